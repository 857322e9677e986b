"""Which of equally cheap plans: the fewest GPUs where some are free, then the most headroom from those.

Owns the second and third solve over the core that the optimum was found with. The objective is what it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bimetal.planner.formulation import Chosen, Program, formulate, read_solution
from bimetal.planner.problem import Problem

HEADROOM_GAP = 0.01
TOLERANCE = 1e-7


@dataclass(frozen=True)
class Equals:
    """Where equally cheap plans are looked for."""

    core: Sequence[int]
    start: Callable[[Program], Mapping[int, float] | None]
    """The plan found as columns of another program."""


def best_of_equals(problem: Problem, equals: Equals, chosen: Chosen, seconds: float) -> Chosen:
    """In no more time than given; `chosen` where nothing better is found."""
    if _has_free(problem):
        seconds /= 2
        chosen = _with_fewest(problem, equals, chosen, seconds)
    return _with_headroom(problem, equals, chosen, seconds) if problem.objective == "cost" else chosen


def _has_free(problem: Problem) -> bool:
    """Whether more GPUs may cost no more."""
    free = (problem.price_usd_per_h <= 0) & (problem.buyable_nodes > 0)
    return bool((free | ((problem.owned_usd_per_h <= 0) & (problem.owned > 0))).any())


def _with_fewest(problem: Problem, equals: Equals, chosen: Chosen, seconds: float) -> Chosen:
    """The plan with the fewest GPUs among those that cost no more and serve no less: what is free is not to be wasted."""
    if not chosen.served_ratio.all():
        return chosen
    same = replace(
        problem,
        objective="fewest",
        wanted=problem.wanted * np.minimum(chosen.served_ratio, 1.0),
        budget_usd_per_h=min(problem.budget_usd_per_h, chosen.usd_per_h + TOLERANCE),
    )
    program = formulate(same, equals.core, [])
    solved = program.milp.solve(gap=TOLERANCE, time_limit_s=seconds, start=equals.start(program))
    if solved.status not in ("optimal", "feasible"):
        return chosen
    found = read_solution(same, program, solved)
    if found.num_gpus(problem) >= chosen.num_gpus(problem):
        return chosen
    return replace(found, served_ratio=chosen.served_ratio)


def _with_headroom(problem: Problem, equals: Equals, chosen: Chosen, seconds: float) -> Chosen:
    """The plan that serves the largest multiple of the demand from the same GPUs: they are paid whether or not all is used."""
    same = replace(
        problem,
        objective="headroom",
        owned=chosen.owned_used,
        buyable_nodes=chosen.nodes.astype(np.float64),
    )
    program = formulate(same, equals.core, [])
    solved = program.milp.solve(gap=HEADROOM_GAP, time_limit_s=seconds, start=equals.start(program))
    if solved.status not in ("optimal", "feasible"):
        return chosen
    found = read_solution(same, program, solved)
    return replace(
        chosen,
        replicas=found.replicas,
        served_per_s=found.served_per_s,
        lost_per_s=found.lost_per_s / found.served_ratio,
        jobs=found.jobs,
    )
