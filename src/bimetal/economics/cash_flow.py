"""Money over time: present value, annuity, internal rate of return, payback.

Owns the conventions, stated once and printed with every report (`Conventions.lines`). Flows are cash only: what is paid
and received. Depreciation is an accounting view and enters only through the tax that it saves, where tax is modelled.
Does not know what is bought. Amounts may be arrays of draws: every function works along the last axis, which is years.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

Amount = float | NDArray[np.float64]
"""One number, or one per Monte Carlo draw."""
Flows = NDArray[np.float64]
"""[..., years + 1]: index 0 is today, index y the end (or middle) of year y."""

IRR_LOW, IRR_HIGH, IRR_STEPS = -0.99, 100.0, 200


@dataclass(frozen=True, slots=True)
class Conventions:
    """How flows are dated, in which money, and before or after tax."""

    horizon_years: int
    wacc_ratio: Amount
    flows: Literal["end-year", "mid-year"] = "end-year"
    terms: Literal["nominal", "real"] = "nominal"
    inflation_ratio: Amount = 0.0
    """Of running costs, a year; 0 in real terms."""
    tax_ratio: Amount = 0.0

    @property
    def operating_times(self) -> NDArray[np.float64]:
        """[years]: when the running costs of years 1, 2, ... fall due.

        >>> Conventions(2, 0.1, flows="mid-year").operating_times.tolist()
        [0.5, 1.5]
        """
        ends = np.arange(1, self.horizon_years + 1, dtype=np.float64)
        return ends - 0.5 if self.flows == "mid-year" else ends

    def lines(self) -> tuple[str, ...]:
        """For people."""
        rate = float(np.median(self.wacc_ratio))
        inflation = float(np.median(self.inflation_ratio))
        tax = float(np.median(self.tax_ratio))
        money = f"nominal, running costs rise {inflation:.1%} a year" if self.terms == "nominal" else "real"
        return (
            f"NPV is cash only over {self.horizon_years} years: CapEx out, discounted resale in; no depreciation",
            f"{money}; WACC {rate:.1%} {self.terms}; "
            f"{f'after tax at {tax:.0%}, written off evenly over the years of use' if tax else 'before tax'}",
            f"purchases at the start and resale at the end of a year, running costs at {self.flows.replace('-', ' of the ')}",
            f"$ per million output tokens = NPV of costs / present value of tokens{' / (1 - tax rate)' if tax else ''}",
        )


def discount(rate_ratio: Amount, times_years: ArrayLike) -> NDArray[np.float64]:
    """Value today of one dollar at each time: (1 + rate)^-t.

    >>> discount(0.25, [0, 1, 2]).tolist()
    [1.0, 0.8, 0.64]
    """
    times = np.asarray(times_years, dtype=np.float64)
    return np.asarray((1.0 + np.asarray(rate_ratio)[..., None]) ** -times)


def npv(
    flows_usd: ArrayLike, rate_ratio: Amount, times_years: ArrayLike | None = None
) -> NDArray[np.float64]:
    """Sum of flow / (1 + rate)^t; times are 0, 1, 2, ... if not given.

    >>> round(float(npv([-100, 60, 60], 0.1)), 4)
    4.1322
    """
    flows = np.asarray(flows_usd, dtype=np.float64)
    times = np.arange(flows.shape[-1]) if times_years is None else times_years
    return np.asarray((flows * discount(rate_ratio, times)).sum(axis=-1))


def annuity_factor(rate_ratio: float, num_years: int) -> float:
    """Yearly payment, at the end of each year, that one dollar today is worth: r / (1 - (1 + r)^-n).

    >>> round(annuity_factor(0.08, 3), 6), annuity_factor(0.0, 4)
    (0.388034, 0.25)
    """
    if rate_ratio == 0:
        return 1 / num_years
    return rate_ratio / (1 - (1 + rate_ratio) ** -num_years)


def irr(flows_usd: ArrayLike, times_years: ArrayLike | None = None) -> float | None:
    """The rate at which NPV is 0; None where flows never change sign, or change it more than once.

    Times rise; they are 0, 1, 2, ... if not given.

    >>> irr([-100, 60, 60]), irr([100, 60])
    (0.130662, None)
    """
    flows = np.asarray(flows_usd, dtype=np.float64)
    signs = np.sign(flows[flows != 0])
    if np.count_nonzero(np.diff(signs)) != 1:
        return None
    low, high = IRR_LOW, IRR_HIGH
    at_low, at_high = (float(npv(flows, rate, times_years)) for rate in (low, high))
    rising = at_low < at_high
    if (at_low > 0) == (at_high > 0):
        return None
    for _ in range(IRR_STEPS):
        middle = (low + high) / 2
        if (float(npv(flows, middle, times_years)) < 0) == rising:
            low = middle
        else:
            high = middle
    return round((low + high) / 2, 6)


def payback_years(flows_usd: ArrayLike, times_years: ArrayLike | None = None) -> float | None:
    """When undiscounted flows have paid back, by proportion between two flows; None: never.

    Times rise; they are 0, 1, 2, ... if not given.

    >>> payback_years([-100, 40, 40, 40]), payback_years([-100, 10])
    (2.5, None)
    """
    flows = np.asarray(flows_usd, dtype=np.float64)
    times = np.arange(len(flows)) if times_years is None else np.asarray(times_years, dtype=np.float64)
    balance = np.cumsum(flows)
    start = int(np.argmax(flows != 0))
    if balance[start] >= 0:
        return 0.0
    for i in range(start + 1, len(flows)):
        if balance[i] >= 0:
            return float(times[i - 1] - balance[i - 1] / flows[i] * (times[i] - times[i - 1]))
    return None
