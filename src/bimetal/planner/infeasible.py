"""Why no fleet fits, and the least that would have to change.

Owns the re-solving with one limit elastic at a time: those whose relaxation alone makes the demand servable are the binding ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from bimetal.catalog.demand import Demand
from bimetal.errors import InfeasibleError
from bimetal.planner.candidates import Candidates
from bimetal.planner.decide import FleetPlanner, Slacks
from bimetal.planner.optimise import Optimum, optimise
from bimetal.planner.problem import Problem, build_problem, is_late

MANY_NODES = 10_000
LATENCY_STEPS = (1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0)
TIME_LIMIT_S = 3.0
GAP = 0.01


def explain(
    planner: FleetPlanner,
    wanted: Sequence[bool] | None = None,
    slacks: Slacks | None = None,
    demand: Demand | None = None,
) -> list[str]:
    """Lines for people: what binds, and the nearest relaxations, each solved. `demand`: with other stock."""
    demand = demand or planner.demand
    candidates = _kept(planner.candidates(slacks), wanted)
    lines = list(_unservable(planner, candidates, wanted, slacks))
    if lines:
        return lines
    problem = build_problem(demand, candidates, planner.traffic)
    found = [
        *_more_stock(demand, problem),
        *_without_lead_time(planner, demand, candidates),
        *_more_power(problem),
        *_more_budget(problem),
    ]
    share = _share_served(problem)
    if not found:
        found.append("no single limit is enough: stock, power, budget or latency have to give together")
    return [*found, *share]


def _kept(candidates: Candidates, wanted: Sequence[bool] | None) -> Candidates:
    return candidates if wanted is None else candidates.keep(wanted)


def _attempt(problem: Problem) -> Optimum | None:
    try:
        return optimise(problem, gap=GAP, time_limit_s=TIME_LIMIT_S)
    except InfeasibleError:
        return None


def _unservable(
    planner: FleetPlanner, candidates: Candidates, wanted: Sequence[bool] | None, slacks: Slacks | None
) -> list[str]:
    """Classes that no template serves, with the smallest latency limits at which one does."""
    lines = []
    for c, entry in enumerate(planner.traffic):
        if (candidates.rate[:, c, c] > 0).any():
            continue
        if not len(candidates) or entry.is_batch:
            lines.append(
                f"class {entry.name}: {entry.model} fits no GPUs in stock: add GPUs with more memory, or use a narrower dtype"
            )
            lines += [reason for reason in candidates.excluded if reason.startswith(entry.model)]
            continue
        remedy = "no limit on latency makes it servable: raise memory, or use a narrower dtype"
        for factor in LATENCY_STEPS:
            traffic = list(planner.traffic)
            traffic[c] = replace(entry, ttft_s=entry.ttft_s * factor, tpot_s=entry.tpot_s * factor)
            relaxed = _kept(planner.candidates(slacks, traffic), wanted)
            if (relaxed.rate[:, c, c] > 0).any():
                remedy = f"servable at TTFT p99 {traffic[c].ttft_s:.3g} s and TPOT p99 {traffic[c].tpot_s * 1e3:.3g} ms"
                break
        lines.append(
            f"latency of class {entry.name} binds: no template keeps TTFT p99 {entry.ttft_s:g} s and TPOT p99 "
            f"{entry.tpot_s * 1e3:g} ms; {remedy}"
        )
    return lines


def _more_stock(demand: Demand, problem: Problem) -> list[str]:
    """The fewest nodes more of one kind that suffice, without limits on money."""
    lines = []
    for g, entry in enumerate(demand.stock):
        if is_late(entry, demand) or not entry.count:
            continue
        price = np.zeros(len(problem.owned))
        price[g] = 1.0 / problem.per_node[g]
        buyable = problem.buyable_nodes.copy()
        buyable[g] = MANY_NODES
        found = _attempt(
            replace(
                problem,
                buyable_nodes=buyable,
                price_usd_per_h=price,
                owned_usd_per_h=np.zeros(len(price)),
                budget_usd_per_h=np.inf,
            )
        )
        if found is None:
            continue
        more = int(found.chosen.nodes[g] - problem.buyable_nodes[g])
        if more > 0:
            gpus = more * entry.per_node
            lines.append(f"stock of {entry.spec.name} binds: {gpus} more ({more} nodes) would do")
    return lines


def _without_lead_time(planner: FleetPlanner, demand: Demand, candidates: Candidates) -> list[str]:
    late = [entry for entry in demand.stock if is_late(entry, demand)]
    lines = []
    for entry in late:
        needed = entry.months_to_arrive
        stock = tuple(
            replace(s, lead_time_months=0.0) if s.months_to_arrive <= needed else s for s in demand.stock
        )
        changed = replace(demand, stock=stock)
        if _attempt(build_problem(changed, candidates, planner.traffic)) is not None:
            lines.append(
                f"lead time of {entry.spec.name} binds: it comes in {needed:g} months, needed in "
                f"{demand.site.months_until_needed:g}; waiting for it would do"
            )
    return lines


def _more_power(problem: Problem) -> list[str]:
    if not np.isfinite(problem.power_cap_w):
        return []
    found = _attempt(
        replace(
            problem,
            power_cap_w=np.inf,
            price_usd_per_h=problem.watts,
            owned_usd_per_h=problem.watts,
            budget_usd_per_h=np.inf,
        )
    )
    if found is None or found.objective <= problem.power_cap_w:
        return []
    return [f"power cap of {problem.power_cap_w / 1e3:.1f} kW binds: {found.objective / 1e3:.1f} kW would do"]


def _more_budget(problem: Problem) -> list[str]:
    if not np.isfinite(problem.budget_usd_per_h):
        return []
    found = _attempt(replace(problem, budget_usd_per_h=np.inf))
    if found is None or found.objective <= problem.budget_usd_per_h:
        return []
    return [f"budget of ${problem.budget_usd_per_h:.2f}/h binds: ${found.objective:.2f}/h would do"]


def _share_served(problem: Problem) -> list[str]:
    found = _attempt(replace(problem, objective="goodput"))
    if found is None:
        return []
    wanted = problem.wanted * problem.tokens
    share = float((wanted * found.chosen.served_ratio).sum() / wanted.sum())
    return [f"as it is, {math.floor(share * 1000) / 10:g}% of the output tokens asked for can be served"]
