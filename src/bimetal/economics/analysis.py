"""`Analysis`: fleets of one or more scenarios priced on shared draws, compared, and asked what would change the decision.

Owns which questions are asked. Reports (tables, pages, workbooks) only print what is here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bimetal.catalog.hardware import find_gpu
from bimetal.economics.binding import bind, bind_one
from bimetal.economics.cash_flow import Amount, npv
from bimetal.economics.fleet import Terms, live_ratio
from bimetal.economics.placement import Placed, place
from bimetal.economics.procurement import second_source_usd
from bimetal.economics.quantity import Quantity
from bimetal.economics.scenario import Scenario, check_comparable
from bimetal.economics.tco import Comparison, Returns, Tco, compare, price_fleet, returns_on_difference
from bimetal.economics.uncertainty import (
    NUM_DRAWS,
    ROUNDING,
    Spread,
    Swing,
    Values,
    break_evens,
    central_values,
    draw_together,
    spread,
    tornado,
)
from bimetal.units import HOURS_PER_YEAR

SEARCH_FACTOR = 10
"""Break-evens are sought between a tenth and ten times the input."""


@dataclass(frozen=True, slots=True)
class BreakEven:
    """Where two fleets cost the same, if only this input moves; empty: nowhere within the range searched.

    Where both are of scenarios that name the input, it moves in both.
    """

    name: str
    now: float
    """In the scenario of the fleet that is compared with the first."""
    at: tuple[float, ...]
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Decision:
    """One fleet against the first."""

    name: str
    drawn: Comparison
    returns: Returns
    """On what it costs more than the first, at the median of every input."""
    swings: tuple[Swing, ...]
    break_evens: tuple[BreakEven, ...]
    indifferent_to: tuple[str, ...]
    """Inputs of site and workload that people ask about, on which the saving does not depend."""


@dataclass(frozen=True, slots=True)
class RentOrOwn:
    """Owning one GPU against renting it; None where the catalogue and the file have no price."""

    gpu: str
    break_even_utilisation: Spread | None
    """Above it owning is cheaper; above 1 it never is."""
    own_usd_per_h: Spread | None
    on_demand_usd_per_h: Quantity | None
    reserved_usd_per_h: Spread | None
    """After discounts and credits."""
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
class SecondSource:
    """Expected cost of a late order without and with the option on a second supplier; the difference is its worth."""

    scenario: str
    without_usd: Spread
    with_usd: Spread
    worth_usd: Spread


@dataclass(frozen=True, slots=True)
class Analysis:
    scenarios: tuple[Scenario, ...]
    labels: tuple[str, ...]
    """Of the scenarios."""
    names: tuple[str, ...]
    drawn: tuple[Tco, ...]
    central: tuple[Tco, ...]
    """At the median of every input."""
    decisions: tuple[Decision, ...]
    rent_or_own: tuple[RentOrOwn, ...]
    second_sources: tuple[SecondSource, ...]
    placed: tuple[Placed, ...]

    @property
    def per_token(self) -> bool:
        return self.scenarios[0].file.compare_per == "token"


def analyse(scenarios: Sequence[Scenario], num_draws: int = NUM_DRAWS) -> Analysis:
    """The first fleet of the first scenario is the baseline."""
    check_comparable(scenarios)
    seed = scenarios[0].file.seed
    centres = [central_values(s.quantities) for s in scenarios]
    correlations = tuple(dict.fromkeys(c for s in scenarios for c in s.correlations))
    values = draw_together([s.quantities for s in scenarios], correlations, num_draws, seed)
    drawn = _price(scenarios, values)
    central = _price(scenarios, centres)
    labels = scenario_labels(scenarios)
    alone = len(scenarios) == 1
    names = [
        f.name if alone else f"{label}: {f.name}"
        for label, s in zip(labels, scenarios, strict=True)
        for f in s.file.fleets
    ]
    decisions = [_decide(scenarios, centres, i, names[i], drawn, central) for i in range(1, len(drawn))]
    rents = [r for s, v in zip(scenarios, values, strict=True) for r in rent_or_own(s, v)]
    placed = tuple(p for s, v in zip(scenarios, values, strict=True) for p in place(s, v))
    options = [
        second_source(label, v)
        for label, s, v in zip(labels, scenarios, values, strict=True)
        if s.file.second_source
    ]
    return Analysis(
        tuple(scenarios),
        labels,
        tuple(names),
        drawn,
        central,
        tuple(decisions),
        tuple(rents),
        tuple(options),
        placed,
    )


def scenario_labels(scenarios: Sequence[Scenario]) -> tuple[str, ...]:
    """Their names; with file, and place in the comparison, where two have the same: a copied file keeps its name."""
    names = [s.file.name for s in scenarios]
    files = [f"{s.file.name} ({Path(s.source).name})" for s in scenarios]
    return tuple(
        name if names.count(name) == 1 else file if files.count(file) == 1 else f"{file} #{i}"
        for i, (name, file) in enumerate(zip(names, files, strict=True), start=1)
    )


def second_source(scenario: str, values: Values) -> SecondSource:
    """Expected cost without the option, with it, and the difference."""
    names = ("late_ratio", "cost_of_late_usd", "divertible_ratio", "cost_of_diverting_usd")
    without, chosen = second_source_usd(*(values[f"second_source.{name}"] for name in names))
    return SecondSource(scenario, spread(without), spread(chosen), spread(without - chosen))


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

    found, indifferent = [], []
    owners = [s for s in scenarios for _ in s.file.fleets]
    for path, q in _levers((scenarios[0], owners[i])).items():
        low, high = max(q.central / SEARCH_FACTOR, q.limits[0]), min(q.central * SEARCH_FACTOR, q.limits[1])
        tried = at(path, np.linspace(low, high, 21))
        if not np.any(np.isfinite(tried)) or np.ptp(tried) < ROUNDING:
            if np.any(np.isfinite(tried)) and path.startswith(("site.", "workload.")):
                indifferent.append(path)
            continue  # no saving is defined, or it does not depend on this
        found.append(BreakEven(path, q.central, break_evens(partial(at, path), low, high), low, high))
    swings = tornado([s.quantities for s in scenarios], saving)
    return Decision(
        name,
        compare(drawn[0], drawn[i]),
        returns_on_difference(central[0], central[i]),
        swings,
        tuple(found),
        tuple(indifferent),
    )


def _levers(scenarios: Sequence[Scenario]) -> dict[str, Quantity]:
    """Inputs whose break-even people ask for: prices of GPUs and power, utilisation, throughput; 0 has no tenfold.

    As the last scenario that names them has them.
    """
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


def rent_or_own(scenario: Scenario, values: Values) -> tuple[RentOrOwn, ...]:
    """For each GPU that the scenario lists: what owning an hour costs / what renting an hour on demand costs.

    On demand only used hours are paid, so that this ratio is the utilisation at which both cost the same.
    """
    return tuple(_rent_or_own(scenario, gpu, values) for gpu in scenario.file.rent_or_own)


def _rent_or_own(scenario: Scenario, gpu: str, values: Values) -> RentOrOwn:
    price, on_demand, reserved = (
        scenario.quantities.get(f"gpus.{gpu}.{name}")
        for name in ("price_usd", "on_demand_usd_per_h", "reserved_usd_per_h")
    )
    own = _usd_per_h(scenario, gpu, values, "buy") if price else None
    rent = _usd_per_h(scenario, gpu, values, "on-demand") if on_demand else None
    contract = _usd_per_h(scenario, gpu, values, "reserved") if reserved else None
    missing = [name for name, q in (("purchase", own), ("on-demand", rent)) if q is None]
    return RentOrOwn(
        gpu,
        None if own is None or rent is None else spread(own / rent),
        None if own is None else spread(own),
        on_demand,
        None if contract is None else spread(contract),
        find_gpu(gpu).own_usd_per_h,
        f"no {' or '.join(missing)} price" if missing else "",
    )


def _usd_per_h(scenario: Scenario, gpu: str, values: Values, terms: Terms) -> NDArray[np.float64]:
    """Levelised over every hour that the GPU is there, used or not; before tax, as rents are quoted."""
    fleet = bind_one(scenario, gpu, values, terms)
    c = fleet.conventions
    hours = npv(live_ratio(fleet.groups[0], c.horizon_years), c.wacc_ratio, c.operating_times)
    kept = 1.0 - np.asarray(c.tax_ratio)
    return np.asarray(price_fleet(fleet).npv_usd / hours / HOURS_PER_YEAR / kept)
