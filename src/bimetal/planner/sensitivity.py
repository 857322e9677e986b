"""What a limit costs: the decision solved again with it relaxed, never read off a dual.

Owns which limits are worth relaxing in a plan, how far, and the front of cost against latency. Everything is solved under the
tightness that the plan's own simulation asked for, and not simulated again; for a trimmed plan, with so much less of the demand
as the formulas say that it serves, and against the cheapest plan for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bimetal.catalog.demand import Demand, Stock
from bimetal.errors import InfeasibleError
from bimetal.planner.candidates import Candidates
from bimetal.planner.decide import FleetPlan, FleetPlanner
from bimetal.planner.optimise import Optimum
from bimetal.planner.problem import is_late
from bimetal.planner.traffic import Traffic
from bimetal.units import MEGA, S_PER_HOUR

LATENCY_FACTORS = (0.5, 0.7, 1.0, 1.5, 2.5)
TPOT_RELAXED, TTFT_RELAXED, CAP_RELAXED = 1.25, 1.5, 1.1
GAP = 0.01
TIME_LIMIT_S = 4.0


@dataclass(frozen=True, slots=True)
class Relaxation:
    """One limit relaxed."""

    what: str
    usd_per_h: float
    saved_usd_per_h: float
    """Against the plan; negative noise of the optimiser's gap is 0."""
    goodput_gained_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class FrontPoint:
    """The cheapest plan when every interactive limit is multiplied by `factor`."""

    factor: float
    tpot_p99_s: float
    """The strictest class's limit."""
    usd_per_h: float | None
    """None: no fleet from this stock."""
    usd_per_million_tokens: float | None
    kinds: tuple[str, ...]
    """Of the templates chosen."""


def binding(planner: FleetPlanner, plan: FleetPlan) -> list[str]:
    """Limits that the plan has reached."""
    demand, found = planner.demand, []
    for entry in {entry.spec.name: entry for entry in demand.stock}.values():
        if _used(demand, plan, entry) + entry.per_node > entry.count:
            found.append(f"stock of {entry.spec.name}")
    node_watts = min(entry.watts * entry.per_node for entry in demand.stock)
    site = demand.site
    if site.power_cap_w and plan.watts + node_watts > site.power_cap_w:
        found.append("power cap")
    problem = plan.problem
    nodes_usd = (problem.price_usd_per_h * problem.per_node)[
        problem.buyable_nodes > plan.optimum.chosen.nodes
    ]
    if (
        site.budget_usd_per_h
        and plan.usd_per_h + nodes_usd.min(initial=np.inf) > site.budget_usd_per_h
        and len(nodes_usd)
    ):
        found.append("budget")
    for r in plan.replays:
        limits = next(t for t in planner.traffic if t.name == r.name)
        for label, reached, limit in (
            ("TTFT", r.ttft_s[99], limits.ttft_s),
            ("TPOT", r.tpot_s[99], limits.tpot_s),
        ):
            if reached > 0.85 * limit:
                found.append(f"{label} p99 of {r.name}")
    return found


def relaxations(planner: FleetPlanner, plan: FleetPlan, wanted: Sequence[bool] | None) -> list[Relaxation]:
    """Each limit worth relaxing, by what it gives; those that give nothing last."""
    found, now_usd = [], plan.usd_per_h
    if plan.formula_ratios:
        now_usd = _solve(planner, plan, wanted, planner.demand, planner.traffic)[0]
    for what, demand, traffic in _relaxed(planner, plan):
        try:
            usd, tokens = _solve(planner, plan, wanted, demand, traffic)
        except InfeasibleError:
            continue
        found.append(
            Relaxation(
                what,
                usd,
                max(0.0, now_usd - usd),
                max(0.0, tokens - plan.output_tokens_per_s),
            )
        )
    return sorted(found, key=lambda r: (-r.goodput_gained_tokens_per_s, -r.saved_usd_per_h))


def _relaxed(planner: FleetPlanner, plan: FleetPlan) -> Iterator[tuple[str, Demand, Sequence[Traffic]]]:
    demand, traffic = planner.demand, planner.traffic
    for name, entry in {entry.spec.name: entry for entry in demand.stock}.items():
        if is_late(entry, demand):
            what = f"{name} at once, not in {entry.months_to_arrive:g} months"
            yield what, _with(demand, name, lead_time_months=0.0), traffic
        elif _used(demand, plan, entry) + entry.per_node > entry.count:
            more = _with(demand, name, count=entry.count + entry.per_node)
            yield f"one node more of {name}", more, traffic
    site = demand.site
    if site.power_cap_w:
        relaxed = replace(site, power_cap_w=site.power_cap_w * CAP_RELAXED)
        yield (
            f"power cap {site.power_cap_w * CAP_RELAXED / 1e3:.0f} kW",
            replace(demand, site=relaxed),
            traffic,
        )
    if site.budget_usd_per_h and demand.objective == "goodput":
        relaxed = replace(site, budget_usd_per_h=site.budget_usd_per_h * CAP_RELAXED)
        yield f"budget ${site.budget_usd_per_h * CAP_RELAXED:.0f}/h", replace(demand, site=relaxed), traffic
    for i, t in enumerate(traffic):
        if not t.is_batch:
            for what, changed in (
                (
                    f"TPOT p99 of {t.name} {t.tpot_s * TPOT_RELAXED * 1e3:.0f} ms",
                    replace(t, tpot_s=t.tpot_s * TPOT_RELAXED),
                ),
                (
                    f"TTFT p99 of {t.name} {t.ttft_s * TTFT_RELAXED:.2g} s",
                    replace(t, ttft_s=t.ttft_s * TTFT_RELAXED),
                ),
            ):
                yield what, demand, [*traffic[:i], changed, *traffic[i + 1 :]]
        if t.n_plus_one:
            yield (
                f"no N+1 for {t.name}",
                demand,
                [*traffic[:i], replace(t, n_plus_one=False), *traffic[i + 1 :]],
            )


def _with(demand: Demand, name: str, **changes: Any) -> Demand:
    """One GPU's entry changed, at all its power limits."""
    stock = (replace(entry, **changes) if entry.spec.name == name else entry for entry in demand.stock)
    return replace(demand, stock=tuple(stock))


def _used(demand: Demand, plan: FleetPlan, entry: Stock) -> int:
    """GPUs of an entry's name, at any power limit."""
    return sum(
        n for other, n in zip(demand.stock, plan.gpus, strict=True) if other.spec.name == entry.spec.name
    )


def _solve(
    planner: FleetPlanner,
    plan: FleetPlan,
    wanted: Sequence[bool] | None,
    demand: Demand,
    traffic: Sequence[Traffic],
) -> tuple[float, float]:
    """Dollars per hour and output tokens per second."""
    candidates = planner.candidates(plan.slacks, traffic)
    if wanted is not None:
        candidates = candidates.keep(wanted)
    return _priced(planner, plan, candidates, traffic, demand)[:2]


def _priced(
    planner: FleetPlanner,
    plan: FleetPlan,
    candidates: Candidates,
    traffic: Sequence[Traffic],
    demand: Demand | None = None,
) -> tuple[float, float, Optimum]:
    """Dollars per hour, output tokens per second, and the rest."""
    ratios = plan.formula_ratios or (1.0,) * len(traffic)
    asked = [replace(t, rate_per_s=t.rate_per_s * ratio) for t, ratio in zip(traffic, ratios, strict=True)]
    problem, optimum = planner.solve(
        candidates, demand=demand, traffic=asked, gap=GAP, time_limit_s=TIME_LIMIT_S
    )
    chosen = optimum.chosen
    tokens = (problem.wanted / ratios * problem.tokens * chosen.served_ratio).sum()
    return chosen.usd_per_h, float(tokens), optimum


def front(
    planner: FleetPlanner,
    plan: FleetPlan,
    factors: Sequence[float] = LATENCY_FACTORS,
    report: Callable[[FrontPoint], None] = lambda point: None,
) -> list[FrontPoint]:
    """Cost against latency."""
    points = []
    for factor in factors:
        traffic = [replace(t, tpot_s=t.tpot_s * factor, ttft_s=t.ttft_s * factor) for t in planner.traffic]
        strictest = min((t.tpot_s for t in traffic), default=np.inf)
        usd = per_million = None
        kinds: tuple[str, ...] = ()
        try:
            candidates = planner.candidates(plan.slacks, traffic)
            usd, tokens, optimum = _priced(planner, plan, candidates, traffic)
            per_million = usd / (tokens * S_PER_HOUR / MEGA) if tokens else None
            kinds = tuple(sorted({candidates.templates[t].kind for t, _ in optimum.chosen.replicas}))
        except InfeasibleError:
            pass
        points.append(FrontPoint(factor, strictest, usd, per_million, kinds))
        report(points[-1])
    return points
