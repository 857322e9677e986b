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
from bimetal.planner.traffic import Traffic
from bimetal.units import KILO, MS_PER_S

MANY_NODES = 1_000_000
LATENCY_STEPS = (1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)
"""Multiples of a limit that are tried."""
LATENCY_STEP = 1.02
"""Of the limit at which a first request gets through."""
LOOSEST_S = 1e5
"""No limit at all."""
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
    lines = _unservable(planner, demand, candidates, wanted, slacks)
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
    found = found or _less_strict(planner, demand, wanted, slacks)
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
    planner: FleetPlanner,
    demand: Demand,
    candidates: Candidates,
    wanted: Sequence[bool] | None,
    slacks: Slacks | None,
) -> list[str]:
    """Classes that no template serves, with latency limits at which all that is asked can be served."""
    blocked = [c for c in range(len(planner.traffic)) if not (candidates.rate[:, c, c] > 0).any()]
    lines = []
    for c in blocked:
        entry = planner.traffic[c]
        if not any(t.model.name == entry.model for t in candidates.templates) or entry.is_batch:
            lines.append(
                f"class {entry.name}: {entry.model} fits no GPUs in stock: add GPUs with more memory, or use a narrower dtype"
            )
            lines += [reason for reason in candidates.excluded if reason.startswith(entry.model)]
            continue
        lines.append(
            f"latency of class {entry.name} binds: no template keeps TTFT p99 {entry.ttft_s:g} s and TPOT p99 "
            f"{entry.tpot_s * MS_PER_S:g} ms; {_looser(planner, demand, c, wanted, slacks, alone=len(blocked) == 1)}"
        )
    return lines


def _looser(
    planner: FleetPlanner,
    demand: Demand,
    c: int,
    wanted: Sequence[bool] | None,
    slacks: Slacks | None,
    *,
    alone: bool,
) -> str:
    """The least of one limit, or of both together, at which the class is served. `alone`: then everything is."""
    entry = planner.traffic[c]
    evaluator = planner.evaluators[entry.model]
    kept = [True] * len(planner.templates) if wanted is None else wanted
    templates = [
        t for t, keep in zip(planner.templates, kept, strict=True) if keep and t.model.name == entry.model
    ]

    def eased(factor: float, ttft: bool, tpot: bool) -> Traffic:
        return replace(
            entry,
            ttft_s=rounded_up(entry.ttft_s * factor) if ttft else entry.ttft_s,
            tpot_s=rounded_up(entry.tpot_s * factor) if tpot else entry.tpot_s,
        )

    def trickles(traffic: Traffic) -> bool:
        asked = replace(evaluator, traffic=(traffic,), slack=dict(slacks or {}))
        return bool((asked.rates(templates) > 0).any())

    found: list[str] = []
    for ttft, tpot in ((False, True), (True, False), (True, True)):
        if found and ttft and tpot:
            continue
        low, high = 1.0, LOOSEST_S / min(entry.ttft_s if ttft else np.inf, entry.tpot_s if tpot else np.inf)
        if not trickles(eased(high, ttft, tpot)):
            continue
        while high / low > LATENCY_STEP:
            middle = math.sqrt(low * high)
            low, high = (low, middle) if trickles(eased(middle, ttft, tpot)) else (middle, high)
        enough = next(
            (
                f
                for f in LATENCY_STEPS
                if not alone or _solves(planner, demand, c, eased(high * f, ttft, tpot), wanted, slacks)
            ),
            None,
        )
        at = eased(high * (enough or 1.0), ttft, tpot)
        limits = [f"TTFT p99 {at.ttft_s:g} s"] * ttft + [f"TPOT p99 {at.tpot_s * MS_PER_S:g} ms"] * tpot
        found.append(" and ".join(limits) + ("" if enough else ", with more stock"))
    if not found:
        return "no limit on latency makes it servable: raise memory, or use a narrower dtype"
    return f"servable at {', or at '.join(found)}"


def _solves(
    planner: FleetPlanner,
    demand: Demand,
    c: int,
    changed: Traffic,
    wanted: Sequence[bool] | None,
    slacks: Slacks | None,
) -> bool:
    traffic = [*planner.traffic[:c], changed, *planner.traffic[c + 1 :]]
    candidates = _kept(planner.candidates(slacks, traffic), wanted)
    return _attempt(build_problem(demand, candidates, traffic)) is not None


def _less_strict(
    planner: FleetPlanner, demand: Demand, wanted: Sequence[bool] | None, slacks: Slacks | None
) -> list[str]:
    """Both limits of one class at a time."""
    lines = []
    for c, entry in enumerate(planner.traffic):
        for factor in () if entry.is_batch else LATENCY_STEPS[1:]:
            changed = replace(
                entry, ttft_s=rounded_up(entry.ttft_s * factor), tpot_s=rounded_up(entry.tpot_s * factor)
            )
            if _solves(planner, demand, c, changed, wanted, slacks):
                lines.append(
                    f"latency of class {entry.name} binds: TTFT p99 {changed.ttft_s:g} s and TPOT p99 "
                    f"{changed.tpot_s * MS_PER_S:g} ms would do"
                )
                break
    return lines


def rounded_up(value: float, digits: int = 3) -> float:
    """The least number of so many digits that is not below: what is printed must do when it is typed in.

    >>> rounded_up(0.012341), rounded_up(93.2), rounded_up(13801.0)
    (0.0124, 93.2, 13900.0)
    """
    if not 0 < value < math.inf:
        return value
    places = digits - 1 - math.floor(math.log10(value))
    scaled = math.ceil(round(value * 10.0**places, 6))
    return float(f"{scaled / 10.0**places:.{digits}g}")


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
        if np.isfinite(problem.budget_usd_per_h):  # the fewest may be too dear, and nothing be gained by more
            few = buyable.copy()
            few[g] = found.chosen.nodes[g]
            found = _attempt(replace(problem, buyable_nodes=few)) or _attempt(
                replace(problem, buyable_nodes=buyable)
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
    if found is None:
        return []
    enough = rounded_up(found.objective, 4)
    if np.isfinite(problem.budget_usd_per_h) and not _attempt(replace(problem, power_cap_w=enough)):
        found = _attempt(replace(problem, power_cap_w=np.inf))  # the least watts are too dear
        if found is None:
            return []
        chosen = found.chosen
        enough = rounded_up(float(problem.watts @ (chosen.nodes * problem.per_node + chosen.owned_used)), 4)
    if enough <= problem.power_cap_w:
        return []
    return [f"power cap of {problem.power_cap_w / KILO:g} kW binds: {enough / KILO:g} kW would do"]


def _more_budget(problem: Problem) -> list[str]:
    if not np.isfinite(problem.budget_usd_per_h):
        return []
    found = _attempt(replace(problem, budget_usd_per_h=np.inf))
    if found is None or found.objective <= problem.budget_usd_per_h:
        return []
    enough = math.ceil(found.objective * 100 - 1e-4) / 100
    return [f"budget of ${problem.budget_usd_per_h:.2f}/h binds: ${enough:.2f}/h would do"]


def _share_served(problem: Problem) -> list[str]:
    found = _attempt(replace(problem, objective="goodput"))
    if found is None:
        return []
    wanted = problem.wanted * problem.tokens
    share = float((wanted * found.chosen.served_ratio).sum() / wanted.sum())
    return [f"as it is, {math.floor(share * 1000) / 10:g}% of the output tokens asked for can be served"]
