"""Judging a claim: recompute it, see over which inputs it holds, and find where the verdict flips.

Owns the rule by which a verdict follows from numbers; what is computed for which claim stands in `claims_*`. The rule:
a claim holds if its relation is met over the whole plausible range of its lever, does not hold if it is met nowhere in it,
and otherwise holds only if the lever lies beyond the break-even. A lever whose range is one point is judged there, and
the break-even is how far it is off.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bimetal.economics.cash_flow import Amount

SCAN_STEPS = 4000
SEARCH_FACTOR = 10_000
BISECTIONS = 60
EXACT = 1e-9
"""Rounding allowed in figures that should be equal."""

Array = NDArray[np.float64]
Inputs = Mapping[str, Array]
Relation = Literal["at least", "at most", "about"]


@dataclass(frozen=True, slots=True)
class Claim:
    """As the article makes it; `figures` are its numbers."""

    id: str
    topic: str
    text: str
    figures: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Given:
    """An input: value, plausible range, where both come from."""

    value: float
    low: float
    high: float
    source: str


@dataclass(frozen=True, slots=True)
class Check:
    """One reading of a claim as arithmetic."""

    claim: str
    reading: str
    formula: str
    inputs: Mapping[str, Given]
    compute: Callable[[Inputs], Amount]
    relation: Relation
    target: float
    lever: str
    """The input whose break-even is reported."""
    unit: str = ""
    tolerance_ratio: float = 0.05
    """Of `about`."""
    is_model: bool = False
    """A throughput or time is the performance model's."""

    def recompute(self, **changes: float) -> float:
        """The claimed figure from these inputs."""
        values = {name: np.asarray(changes.get(name, given.value)) for name, given in self.inputs.items()}
        return float(self.compute(values))

    def holds(self, **changes: float) -> bool:
        """Whether the relation is met with these inputs."""
        return float(self._margin(np.asarray(self.recompute(**changes)))) >= 0

    def margin_over(self, lever: Array) -> Array:
        """By how much the relation is met at each value of the lever; below 0: not met."""
        values: dict[str, Array] = {name: np.asarray(given.value) for name, given in self.inputs.items()}
        with np.errstate(divide="ignore", invalid="ignore"):  # nan meets no relation
            found = np.asarray(self.compute({**values, self.lever: lever}), dtype=np.float64)
        return self._margin(np.broadcast_to(found, lever.shape))

    def _margin(self, found: Array) -> Array:
        rounding = EXACT * max(abs(self.target), 1e-12)
        if self.relation == "at least":
            return found - self.target + rounding
        if self.relation == "at most":
            return self.target - found + rounding
        return self.tolerance_ratio * abs(self.target) - np.abs(found - self.target) + rounding


@dataclass(frozen=True, slots=True)
class Judgement:
    """What came out for one reading."""

    check: Check
    recomputed: float
    recomputed_range: tuple[float, float]
    """Over the lever's plausible range."""
    verdict: str
    break_even: float | None
    """The lever's value nearest to today's at which the verdict flips; None: it flips at no value searched."""


def judge(check: Check) -> Judgement:
    """The rule of this module's docstring."""
    given = check.inputs[check.lever]
    plausible = (
        np.linspace(given.low, given.high, SCAN_STEPS + 1)
        if given.high > given.low
        else np.array([given.value])
    )
    met = check.margin_over(plausible) >= 0
    values = [check.recompute(**{check.lever: float(x)}) for x in (plausible[0], plausible[-1], given.value)]
    inside = crossings(check, given.low, given.high) if given.high > given.low else []
    if met.all():
        verdict = "holds"
    elif not met.any():
        verdict = "does not hold"
    else:
        verdict = f"holds only if {_where(check.lever, met, inside)}"
    flips = inside or crossings(check, given.value / SEARCH_FACTOR, given.value * SEARCH_FACTOR)
    nearest = min(flips, key=lambda x: abs(x - given.value), default=None)
    return Judgement(check, values[2], (min(values), max(values)), verdict, nearest)


def crossings(check: Check, low: float, high: float) -> list[float]:
    """Every value of the lever in (low, high) at which the verdict flips."""
    points = np.geomspace(low, high, SCAN_STEPS + 1) if low > 0 else np.linspace(low, high, SCAN_STEPS + 1)
    met = check.margin_over(points) >= 0
    found = []
    for i in np.nonzero(met[:-1] != met[1:])[0]:
        left, right = float(points[i]), float(points[i + 1])
        for _ in range(BISECTIONS):
            middle = (left + right) / 2
            if bool(check.margin_over(np.array([middle]))[0] >= 0) == bool(met[i]):
                left = middle
            else:
                right = middle
        found.append((left + right) / 2)
    return found


def _where(lever: str, met: NDArray[np.bool_], inside: Sequence[float]) -> str:
    numbers = [f"{x:.4g}" for x in inside]
    if len(inside) == 1:
        return f"{lever} {'>=' if met[-1] else '<='} {numbers[0]}"
    joined = " and ".join(numbers)
    return f"{lever} is {'outside' if met[0] else 'between'} {joined}"


@cache
def claims() -> Mapping[str, Claim]:
    """Every claim by its id, in the file's order."""
    text = (resources.files("bimetal.catalog") / "data" / "claims.csv").read_text(encoding="utf-8")
    return MappingProxyType(
        {
            row["id"]: Claim(row["id"], row["topic"], row["claim"], _figures(row["figures"] or ""))
            for row in csv.DictReader(text.splitlines())
        }
    )


def _figures(text: str) -> Mapping[str, float]:
    """
    >>> dict(_figures("usd=20000;discount=0.25"))
    {'usd': 20000.0, 'discount': 0.25}
    """
    pairs = (part.partition("=") for part in text.split(";") if part)
    return MappingProxyType({name: float(number) for name, _, number in pairs})
