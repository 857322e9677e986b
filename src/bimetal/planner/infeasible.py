"""Why no fleet fits, and the least that would have to change.

Owns the re-solving with one limit elastic at a time: those whose relaxation alone makes the demand servable are the binding ones.
What changes which templates exist is `remedies`'.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from bimetal.catalog.demand import Demand
from bimetal.planner.candidates import Candidates
from bimetal.planner.decide import FleetPlanner, Slacks
from bimetal.planner.problem import Problem, build_problem, is_late
from bimetal.planner.remedies import ANY, Asked, attempt, later, more_stock, narrower_weights
from bimetal.planner.traffic import Traffic
from bimetal.units import KILO, MS_PER_S

LATENCY_STEPS = (1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)
"""Multiples of a limit that are tried."""
LATENCY_STEP = 1.02
"""Of the limit at which a first request gets through."""
LOOSEST_S = 1e5
"""No limit at all."""


def explain(
    planner: FleetPlanner,
    wanted: Sequence[bool] | None = None,
    slacks: Slacks | None = None,
    demand: Demand | None = None,
) -> list[str]:
    """Lines for people: what binds, and the nearest relaxations, each solved. `demand`: with other stock."""
    demand = demand or planner.demand
    asked = Asked(planner, demand, wanted, slacks)
    candidates = _kept(planner.candidates(slacks), wanted)
    late = {rounded_up(entry.months_to_arrive) for entry in demand.stock if is_late(entry, demand)}
    blocked = [c for c in range(len(planner.traffic)) if not (candidates.rate[:, c, c] > 0).any()]
    if blocked:
        models = [planner.traffic[c].model for c in blocked]
        found = [*more_stock(asked), *later(asked, list(late)), *narrower_weights(asked, models)]
        return _unservable(asked, candidates, blocked, found)
    problem = build_problem(demand, candidates, planner.traffic)
    found = [
        *more_stock(asked),
        *later(asked, list(late)),
        *_more_power(problem),
        *_more_budget(problem),
    ]
    share = share_served(problem)
    found = found or _less_strict(asked)
    if not found:
        found.append("no single limit is enough: stock, power, budget or latency have to give together")
    return [*found, *share]


def _kept(candidates: Candidates, wanted: Sequence[bool] | None) -> Candidates:
    return candidates if wanted is None else candidates.keep(wanted)


def _unservable(
    asked: Asked, candidates: Candidates, blocked: Sequence[int], found: Sequence[str]
) -> list[str]:
    """Classes that no template serves, with latency limits at which all that is asked can be served. `found`: what else would
    do."""
    planner, lines = asked.planner, []
    dtypes = {model.name: model.dtype for model in asked.demand.models}
    eased: dict[int, Traffic] = {}
    for c in blocked:
        entry = planner.traffic[c]
        if not any(t.model.name == entry.model for t in candidates.templates) or entry.is_batch:
            line = f"class {entry.name}: {entry.model} at {dtypes[entry.model]} fits no GPUs in stock"
            reasons = [reason for reason in candidates.excluded if reason.startswith(entry.model)]
        else:
            looser, at = _looser(asked, c, alone=len(blocked) == 1)
            eased |= {} if at is None else {c: at}
            line, reasons = (
                (
                    f"latency of class {entry.name} binds: no template keeps TTFT p99 {entry.ttft_s:g} s and TPOT p99 "
                    f"{entry.tpot_s * MS_PER_S:g} ms; {looser}"
                ),
                [],
            )
        lines += [line, *reasons]
    if len(eased) > 1 and not _solves(asked, eased):
        lines.append("all these latencies together are not enough: stock, power or budget bind too")
    if not found and not eased:
        lines.append(
            "neither more of these GPUs nor a narrower dtype alone is enough: add GPUs with more memory, or ask for less"
        )
    return [*lines, *found]


def _looser(asked: Asked, c: int, *, alone: bool) -> tuple[str, Traffic | None]:
    """The least of one limit, or of both together, at which the class is served, and the class so. `alone`: nothing else binds,
    and these limits are enough for all that is asked."""
    planner, entry = asked.planner, asked.planner.traffic[c]
    evaluator = planner.evaluators[entry.model]
    kept = [True] * len(planner.templates) if asked.wanted is None else asked.wanted
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
        looser = replace(evaluator, traffic=(traffic,), slack=dict(asked.slacks or {}))
        return bool((looser.rates(templates) > 0).any())

    enough: dict[str, Traffic] = {}
    too_little: list[str] = []
    for ttft, tpot in ((False, True), (True, False), (True, True)):
        if enough and ttft and tpot:
            continue
        low, high = 1.0, LOOSEST_S / min(entry.ttft_s if ttft else np.inf, entry.tpot_s if tpot else np.inf)
        if not trickles(eased(high, ttft, tpot)):
            continue
        while high / low > LATENCY_STEP:
            middle = math.sqrt(low * high)
            low, high = (low, middle) if trickles(eased(middle, ttft, tpot)) else (middle, high)
        steps = (eased(high * f, ttft, tpot) for f in LATENCY_STEPS)
        at = next((step for step in steps if not alone or _solves(asked, {c: step})), None)
        named = at or eased(high, ttft, tpot)
        limits = [f"TTFT p99 {named.ttft_s:g} s"] * ttft + [f"TPOT p99 {named.tpot_s * MS_PER_S:g} ms"] * tpot
        words = " and ".join(limits)
        if at is None:
            too_little.append(words)
        else:
            enough[words] = at
    if enough:
        return f"servable at {', or at '.join(enough)}", next(iter(enough.values()))
    if too_little:
        return f"some of it is servable at {too_little[0]}, but not all of it from this stock", None
    return "no limit on latency makes it servable", None


def _solves(asked: Asked, changed: Mapping[int, Traffic]) -> bool:
    """Whether all that is asked is served with these classes in place of their own."""
    traffic = [changed.get(c, entry) for c, entry in enumerate(asked.planner.traffic)]
    candidates = _kept(asked.planner.candidates(asked.slacks, traffic), asked.wanted)
    return attempt(build_problem(asked.demand, candidates, traffic), ANY) is not None


def _less_strict(asked: Asked) -> list[str]:
    """Both limits of one class at a time."""
    lines = []
    for c, entry in enumerate(asked.planner.traffic):
        for factor in () if entry.is_batch else LATENCY_STEPS[1:]:
            changed = replace(
                entry, ttft_s=rounded_up(entry.ttft_s * factor), tpot_s=rounded_up(entry.tpot_s * factor)
            )
            if _solves(asked, {c: changed}):
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


def _more_power(problem: Problem) -> list[str]:
    if not np.isfinite(problem.power_cap_w):
        return []
    found = attempt(
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
    if np.isfinite(problem.budget_usd_per_h) and not attempt(replace(problem, power_cap_w=enough)):
        found = attempt(replace(problem, power_cap_w=np.inf))  # the least watts are too dear
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
    found = attempt(replace(problem, budget_usd_per_h=np.inf))
    if found is None or found.objective <= problem.budget_usd_per_h:
        return []
    enough = math.ceil(found.objective * 100 - 1e-4) / 100
    return [f"budget of ${problem.budget_usd_per_h:.2f}/h binds: ${enough:.2f}/h would do"]


def share_served(problem: Problem) -> list[str]:
    """A line that says how much can be served as it is; none if that was not found in time."""
    found = attempt(replace(problem, objective="goodput"))
    if found is None:
        return []
    wanted = problem.wanted * problem.tokens
    share = float((wanted * found.chosen.served_ratio).sum() / wanted.sum())
    return [f"as it is, {math.floor(share * 1000) / 10:g}% of the output tokens asked for can be served"]
