"""What of a plan's GPUs is owned and what is paid for in whole nodes, at which prices and where those are from.

Owns these figures and their words. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bimetal.catalog.demand import Demand, Stock
from bimetal.planner.decide import FleetPlan


@dataclass(frozen=True, slots=True)
class Holding:
    """GPUs of one entry of the stock in a plan."""

    entry: Stock
    owned: int
    """In use, of `entry.owned`: beside all that is rented, whose power is paid anyway."""
    nodes: int
    """Rented or bought beside them."""

    @property
    def number(self) -> int:
        return self.owned + self.nodes * self.entry.per_node

    @property
    def words(self) -> str:
        """For people.

        >>> Holding(Stock("MI300X", 24, owned=8), 8, 1).words
        '16 MI300X (8 owned, 1 node of 8 more rented)'
        >>> Holding(Stock("MI300X", 24, purchase_usd=12000.0), 0, 2).words
        '16 MI300X (2 nodes of 8 bought)'
        """
        entry, parts = self.entry, []
        if self.owned:
            parts.append(
                f"{self.owned} owned"
                if self.owned == entry.owned
                else f"{self.owned} of {entry.owned} owned in use"
            )
        if self.nodes:
            size = f" of {entry.per_node}" if entry.per_node > 1 else ""
            more = " more" if self.owned else ""
            parts.append(
                f"{self.nodes} node{'s' if self.nodes > 1 else ''}{size}{more} "
                f"{'bought' if is_bought(entry) else 'rented'}"
            )
        return f"{self.number} {entry.label} ({', '.join(parts)})"


def holdings(stock: Sequence[Stock], plan: FleetPlan) -> list[Holding]:
    """In the order of the stock, of the kinds in use."""
    nodes = [round(float(n)) for n in plan.optimum.chosen.nodes]
    found = (
        Holding(entry, number - bought * entry.per_node, bought)
        for entry, number, bought in zip(stock, plan.gpus, nodes, strict=True)
    )
    return [holding for holding in found if holding.number]


def is_bought(entry: Stock) -> bool:
    """Bought and not rented, where it is not owned yet."""
    return entry.purchase_usd is not None and entry.price_usd_per_h is None


def paid_usd_per_h(plan: FleetPlan) -> float:
    """For what is rented or bought alone: without the power of owned GPUs."""
    p = plan.problem
    return float(p.price_usd_per_h @ (plan.optimum.chosen.nodes * p.per_node))


def usd_per_h_as_if_rented(plan: FleetPlan) -> float:
    """With the owned GPUs in use at the price of more of the same."""
    return float(plan.problem.price_usd_per_h @ np.array(plan.gpus))


def num_owned(stock: Sequence[Stock], plan: FleetPlan) -> int:
    """Owned GPUs in use."""
    return sum(h.owned for h in holdings(stock, plan))


@dataclass(frozen=True, slots=True)
class Price:
    """Of one GPU of one kind."""

    gpu: str
    usd_per_h: float
    source: str


def prices(demand: Demand) -> list[Price]:
    """Of every kind in stock, what is paid for one more and for an owned one, with the source."""
    found = []
    per_kwh = demand.site.electricity_usd_per_kwh
    power = (
        f"its power at ${per_kwh:g}/kWh"
        if per_kwh
        else "its power, which site.electricity_usd_per_kwh does not price"
    )
    for entry in demand.stock:
        if entry.count > entry.owned:
            found.append(Price(entry.label, entry.usd_per_h(per_kwh), _source(entry, per_kwh)))
        if entry.owned:
            found.append(Price(f"owned {entry.label}", entry.power_usd_per_h(per_kwh), power))
    return list(dict.fromkeys(found))


def _source(entry: Stock, per_kwh: float) -> str:
    spec = entry.spec
    if entry.price_usd_per_h is not None:
        return "given in the file"
    if is_bought(entry):
        power = f"with power at ${per_kwh:g}/kWh" if per_kwh else "power not priced"
        return f"${entry.purchase_usd:g} given in the file over {entry.amortise_years:g} years, {power}"
    if spec.rental_usd_per_h:
        source = spec.sources.get("rental_usd_per_h", "the catalogue names no source")
        return f"catalogue, three-year rental: {source}"
    if spec.on_demand_usd_per_h:
        source = spec.sources.get("on_demand_usd_per_h", "the catalogue names no source")
        return f"catalogue, lowest on demand: {source}"
    return "neither given nor in the catalogue"


def price_lines(demand: Demand) -> list[str]:
    """One for each source."""
    by_source: dict[str, list[str]] = {}
    for price in prices(demand):
        by_source.setdefault(price.source, []).append(f"{price.gpu} {price.usd_per_h:.2f}")
    return [f"$/GPU-hour: {', '.join(kinds)} ({source})" for source, kinds in by_source.items()]
