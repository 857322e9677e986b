"""A fleet priced: NPV, yearly cost, $ per million output tokens, and savings on every level.

Owns how lines and tokens add up over the horizon. Does not know where inputs come from (scenario) nor how uncertain they
are (uncertainty): any amount may be an array of draws, and then so is every result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bimetal.economics.cash_flow import Flows, discount, irr, npv, payback_years
from bimetal.economics.fleet import FleetInputs, capacity_tokens_per_s, used_ratio
from bimetal.economics.lines import Level, Line, after_tax, fleet_lines, group_lines
from bimetal.units import HOURS_PER_YEAR, MEGA, S_PER_HOUR

S_PER_YEAR = HOURS_PER_YEAR * S_PER_HOUR


@dataclass(frozen=True, slots=True)
class Tco:
    """A fleet priced. Arrays are of draws, or of shape () for one set of inputs."""

    fleet: FleetInputs
    lines: tuple[Line, ...]
    tokens: Flows
    """[..., years]: output tokens delivered."""

    def _sum(self, *levels: Level) -> Flows:
        rate = self.fleet.conventions.wacc_ratio
        total: Flows = np.asarray(
            sum((x.npv_usd(rate) for x in self.lines if x.level in levels), np.float64(0))
        )
        return total

    @property
    def chip_usd(self) -> Flows:
        return self._sum("chip")

    @property
    def system_usd(self) -> Flows:
        return self._sum("chip", "system")

    @property
    def npv_usd(self) -> Flows:
        """Of all costs, less resale. Revenue is no part of it: it would hide in a cost per token."""
        return self._sum("chip", "system", "running", "resale")

    @property
    def revenue_usd(self) -> Flows:
        """Present value, after tax where that is modelled."""
        return -self._sum("revenue")

    @property
    def profit_usd(self) -> Flows:
        return np.asarray(self.revenue_usd - self.npv_usd)

    @property
    def earns(self) -> bool:
        return any(line.level == "revenue" for line in self.lines)

    @property
    def annualised_usd(self) -> Flows:
        """The equal yearly payment, dated as running costs are, of the same NPV."""
        c = self.fleet.conventions
        return np.asarray(self.npv_usd / discount(c.wacc_ratio, c.operating_times).sum(axis=-1))

    @property
    def tokens_present(self) -> Flows:
        """Tokens discounted as money is, so that $ per token is what would have to be charged."""
        c = self.fleet.conventions
        return npv(self.tokens, c.wacc_ratio, c.operating_times)

    @property
    def usd_per_million_output_tokens(self) -> Flows:
        """What would have to be charged, before tax on it: the tax that costs save is not saved on the charge."""
        kept = 1.0 - np.asarray(self.fleet.conventions.tax_ratio)
        return np.asarray(self.npv_usd / self.tokens_present / kept * MEGA)

    def yearly_usd(self) -> NDArray[np.float64]:
        """[years + 1]: costs less revenue by the year in which they fall due, 0 for today; of medians if there are draws."""
        years = np.zeros(self.fleet.conventions.horizon_years + 1)
        for line in self.lines:
            usd, times = np.broadcast_arrays(line.usd, line.times_years)
            if usd.ndim > 1:
                usd, times = np.median(usd, axis=0), np.median(times, axis=0)
            np.add.at(years, np.ceil(times - 1e-9).astype(int), usd)
        return years


@dataclass(frozen=True, slots=True)
class Comparison:
    """Of a fleet with a baseline; ratios are savings: 0.1 is 10% less."""

    chip_ratio: Flows
    system_ratio: Flows
    tco_ratio: Flows
    per_token_ratio: Flows
    tco_usd: Flows
    tokens_ratio: Flows
    """Tokens delivered over the baseline's."""


def compare(baseline: Tco, other: Tco) -> Comparison:
    """Every saving is shown on chip, on system, on TCO, and per token."""
    return Comparison(
        chip_ratio=_saving(baseline.chip_usd, other.chip_usd),
        system_ratio=_saving(baseline.system_usd, other.system_usd),
        tco_ratio=_saving(baseline.npv_usd, other.npv_usd),
        per_token_ratio=_saving(baseline.usd_per_million_output_tokens, other.usd_per_million_output_tokens),
        tco_usd=baseline.npv_usd - other.npv_usd,
        tokens_ratio=other.tokens.sum(axis=-1) / baseline.tokens.sum(axis=-1),
    )


def _saving(before: Flows, after: Flows) -> Flows:
    """Share saved; nan where there was nothing to save from: no share of 0, or of less, means anything."""
    return np.asarray(1 - after / np.where(before > 0, before, np.nan))


def dated_flows(gains: Sequence[Line], losses: Sequence[Line]) -> tuple[Flows, Flows]:
    """Times and USD of one set of lines less another, at the median; times rise, flows due together are one."""
    found: dict[float, float] = {0.0: 0.0}
    for sign, line in [(1.0, x) for x in gains] + [(-1.0, x) for x in losses]:
        usd, times = (np.asarray(x) for x in np.broadcast_arrays(line.usd, line.times_years))
        if usd.ndim > 1:
            usd, times = np.median(usd, axis=0), np.median(times, axis=0)
        for t, amount in zip(times.tolist(), usd.tolist(), strict=True):
            at = round(t, 9)
            found[at] = found.get(at, 0.0) + sign * amount
    order = sorted(found)
    return np.array(order), np.array([found[t] for t in order])


@dataclass(frozen=True, slots=True)
class Returns:
    """Of money spent at first; None where it does not come back."""

    irr: float | None
    payback_years: float | None


def returns(tco: Tco) -> Returns:
    """Of a fleet that earns revenue."""
    return _returns(*dated_flows((), tco.lines)) if tco.earns else Returns(None, None)


def returns_on_difference(baseline: Tco, other: Tco) -> Returns:
    """Of spending more on the other fleet at first, to spend less later; None where it does not cost more at first."""
    return _returns(*dated_flows(baseline.lines, other.lines))


def _returns(times: Flows, flows: Flows) -> Returns:
    first = flows[flows != 0][:1]
    if not len(first) or first[0] > 0:
        return Returns(None, None)
    return Returns(irr(flows, times), payback_years(flows, times))


def price_fleet(fleet: FleetInputs) -> Tco:
    """Lines of every group and of the fleet, then tokens = min(demand, capacity x utilisation)."""
    lines = [line for group in fleet.groups for line in group_lines(fleet, group)]
    lines += fleet_lines(fleet)
    tokens = np.asarray(capacity_tokens_per_s(fleet) * used_ratio(fleet) * S_PER_YEAR)
    if np.any(np.asarray(fleet.usd_per_million_tokens) != 0):
        earned = tokens / MEGA * np.asarray(fleet.usd_per_million_tokens)[..., None]
        lines.append(
            Line(
                "revenue",
                "revenue",
                "-(tokens / 1e6 x $ per million)",
                ("workload.revenue_usd_per_million_output_tokens",),
                -earned,
                fleet.conventions.operating_times,
            )
        )
    return Tco(fleet, after_tax(fleet, lines), tokens)


def by_level(tco: Tco) -> Mapping[str, Flows]:
    """NPV per level, for charts."""
    rate = tco.fleet.conventions.wacc_ratio
    found: dict[str, Flows] = {}
    for line in tco.lines:
        found[line.level] = np.asarray(found.get(line.level, 0.0) + line.npv_usd(rate))
    return found
