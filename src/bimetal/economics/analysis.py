"""`Analysis`: fleets of one or more scenarios priced on shared draws, compared, and asked what would change the decision.

Owns which questions are asked. Reports (tables, pages, workbooks) only print what is here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from bimetal.catalog.hardware import find_gpu
from bimetal.economics.cash_flow import Amount
from bimetal.economics.placement import Placed, place
from bimetal.economics.procurement import second_source_value_usd
from bimetal.economics.quantity import Quantity
from bimetal.economics.scenario import Scenario, bind, bind_one, check_comparable
from bimetal.economics.tco import Comparison, Tco, compare, price_fleet
from bimetal.economics.uncertainty import (
    NUM_DRAWS,
    Spread,
    Swing,
    Values,
    break_even,
    central_values,
    draw_values,
    spread,
    tornado,
)
from bimetal.units import HOURS_PER_YEAR

SEARCH_FACTOR = 10
"""Break-evens are sought between a tenth and ten times the input."""


@dataclass(frozen=True, slots=True)
class BreakEven:
    """Where two fleets cost the same, if only this input moves; None: nowhere within the range searched."""

    name: str
    now: float
    at: float | None
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Decision:
    """One fleet against the first."""

    name: str
    drawn: Comparison
    central: Comparison
    swings: tuple[Swing, ...]
    break_evens: tuple[BreakEven, ...]


@dataclass(frozen=True, slots=True)
class RentOrOwn:
    """Owning one GPU against renting it; None where the catalogue and the file have no price."""

    gpu: str
    break_even_utilisation: Spread | None
    """Above it owning is cheaper; above 1 it never is."""
    own_usd_per_h: Spread | None
    on_demand_usd_per_h: Quantity | None
    reserved_usd_per_h: Quantity | None
    published_own_usd_per_h: tuple[float, float] | None
    """Others' total cost of ownership: a cross-check, no input."""
    missing: str = ""

    @property
    def verdict(self) -> str:
        """`none`: renting is cheaper at any utilisation, at the median."""
        if self.break_even_utilisation is None:
            return "no price"
        return "none" if self.break_even_utilisation.p50 > 1 else f"{self.break_even_utilisation.p50:.0%}"


@dataclass(frozen=True, slots=True)
class Analysis:
    scenarios: tuple[Scenario, ...]
    names: tuple[str, ...]
    drawn: tuple[Tco, ...]
    central: tuple[Tco, ...]
    """At the median of every input."""
    decisions: tuple[Decision, ...]
    rent_or_own: tuple[RentOrOwn, ...]
    second_sources: tuple[tuple[str, Spread], ...]
    """Scenario and what the option on a second supplier is worth in it."""
    placed: tuple[Placed, ...]

    @property
    def per_token(self) -> bool:
        return self.scenarios[0].file.compare_per == "token"


def analyse(scenarios: Sequence[Scenario], num_draws: int = NUM_DRAWS) -> Analysis:
    """The first fleet of the first scenario is the baseline."""
    check_comparable(scenarios)
    seed = scenarios[0].file.seed
    centres = [central_values(s.quantities) for s in scenarios]
    values = [draw_values(s.quantities, s.correlations, num_draws, seed) for s in scenarios]
    drawn = _price(scenarios, values)
    central = _price(scenarios, centres)
    alone = len(scenarios) == 1
    names = [f.name if alone else f"{s.file.name}: {f.name}" for s in scenarios for f in s.file.fleets]
    decisions = [_decide(scenarios, centres, i, names[i], drawn, central) for i in range(1, len(drawn))]
    rents = [r for s in scenarios for r in rent_or_own(s, num_draws)]
    placed = tuple(p for s, v in zip(scenarios, values, strict=True) for p in place(s, v))
    options = [
        (s.file.name, spread(second_source_value(v)))
        for s, v in zip(scenarios, values, strict=True)
        if s.file.second_source
    ]
    return Analysis(
        tuple(scenarios), tuple(names), drawn, central, tuple(decisions), tuple(rents), tuple(options), placed
    )


def second_source_value(values: Values) -> Amount:
    """Expected cost without the option less that with it."""
    names = ("late_ratio", "cost_of_late_usd", "divertible_ratio", "cost_of_diverting_usd")
    return second_source_value_usd(*(values[f"second_source.{name}"] for name in names))


def _price(scenarios: Sequence[Scenario], values: Sequence[Values]) -> tuple[Tco, ...]:
    return tuple(price_fleet(f) for s, v in zip(scenarios, values, strict=True) for f in bind(s, v))


def _decide(
    scenarios: Sequence[Scenario],
    centres: Sequence[Mapping[str, Amount]],
    i: int,
    name: str,
    drawn: Sequence[Tco],
    central: Sequence[Tco],
) -> Decision:
    per_token = scenarios[0].file.compare_per == "token"

    def saving(values: Sequence[Values]) -> Amount:
        tcos = _price(scenarios, values)
        c = compare(tcos[0], tcos[i])
        return c.per_token_ratio if per_token else c.tco_ratio

    def at(path: str, x: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.broadcast_to(saving([{**c, path: x} if path in c else c for c in centres]), x.shape)

    found = []
    for path, q in _levers(scenarios).items():
        low, high = max(q.central / SEARCH_FACTOR, q.limits[0]), min(q.central * SEARCH_FACTOR, q.limits[1])
        if len(set(at(path, np.array([low, q.central, high])).tolist())) == 1:
            continue  # this fleet and the first do not depend on it
        crossing = break_even(partial(at, path), low, high)
        found.append(BreakEven(path, q.central, crossing, low, high))
    swings = tornado([s.quantities for s in scenarios], saving)
    return Decision(name, compare(drawn[0], drawn[i]), compare(central[0], central[i]), swings, tuple(found))


def _levers(scenarios: Sequence[Scenario]) -> dict[str, Quantity]:
    """Inputs whose break-even people ask for: prices of GPUs and power, utilisation, throughput; 0 has no tenfold."""
    endings = (
        "price_usd",
        "usd_per_kwh",
        "utilisation_ratio",
        "throughput_ratio",
        "output_tokens_per_s",
        "usd_per_h",
    )
    return {
        name: q
        for s in scenarios
        for name, q in s.quantities.items()
        if name.endswith(endings) and q.central > 0
    }


def rent_or_own(scenario: Scenario, num_draws: int = NUM_DRAWS) -> tuple[RentOrOwn, ...]:
    """For each GPU that the scenario lists: NPV of owning / NPV of renting every hour on demand.

    On demand only used hours are paid, so that this ratio is the utilisation at which both cost the same.
    """
    if not scenario.file.rent_or_own:
        return ()
    values = draw_values(scenario.quantities, scenario.correlations, num_draws, scenario.file.seed)
    found = []
    for gpu in scenario.file.rent_or_own:
        price, on_demand, reserved = (
            scenario.quantities.get(f"gpus.{gpu}.{name}")
            for name in ("price_usd", "on_demand_usd_per_h", "reserved_usd_per_h")
        )
        published = find_gpu(gpu).own_usd_per_h
        missing = [name for name, q in (("purchase", price), ("on-demand", on_demand)) if q is None]
        own = spread(_own_usd_per_h(scenario, gpu, values)) if price else None
        if missing:
            found.append(
                RentOrOwn(gpu, None, own, on_demand, reserved, published, f"no {' or '.join(missing)} price")
            )
            continue
        share = spread(_own_usd_per_h(scenario, gpu, values) / values[f"gpus.{gpu}.on_demand_usd_per_h"])
        found.append(RentOrOwn(gpu, share, own, on_demand, reserved, published))
    return tuple(found)


def _own_usd_per_h(scenario: Scenario, gpu: str, values: Values) -> Amount:
    """Levelised over every hour, used or not."""
    return price_fleet(bind_one(scenario, gpu, values)).annualised_usd / HOURS_PER_YEAR
