"""The optimum over all templates, with a bound that holds for all of them.

Owns the search: which templates get integers, and when to stop. What the program says is `formulation`'s, which templates can
matter `pricing`'s.

1. Root: the program without integers over a few templates. Its duals price every template (a product of two matrices);
   those with a negative reduced cost come in, until there is none. Then the root's value bounds all templates.
2. The core (none at first) with its integers, all other templates without, gives a bound for all. Of those others only the
   efficient ones can matter (no other gives as much per GPU of every kind it uses), so that the program stays small.
   Only what is cheaper than the plan by most of the gap is looked for: that there is none is proven sooner than how much there is.
3. Templates that the bound uses join the core, with smaller ones of their kind. The core alone gives a plan. No template whose
   reduced cost exceeds what the plan is above the root can be in a better plan; it is priced out.
   2 and 3 repeat until plan and bound meet within the gap, or time is up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from bimetal.errors import InfeasibleError
from bimetal.planner.formulation import Chosen, Program, formulate, read_solution
from bimetal.planner.milp import INFINITY, Solved
from bimetal.planner.pricing import (
    TOLERANCE,
    Mask,
    Pair,
    Root,
    efficient,
    first_pool,
    main_floors,
    near_misses,
    smaller,
    solve_root,
    undominated,
)
from bimetal.planner.problem import Problem
from bimetal.planner.ties import Equals, best_of_equals

PROOF = 0.8
"""Of the gap asked for: that no plan is cheaper by so much is tried to be proven first, which is faster than how much is possible."""
DEFAULT_GAP = 0.005
SLICE_S = 2.5
"""After which the core is looked at again."""
LEAST_S = 0.1
"""Below which no solver starts."""
LAST_S, LAST_RATIO = 1.0, 0.12
"""Of the time limit, the lesser of both, kept for the choice among equally cheap plans."""
ROUGH_GAP, ROUGH_S = 0.02, 1.5
"""For the first look at which templates matter."""


@dataclass(frozen=True, slots=True)
class Optimum:
    """The best plan found, and how far any plan at all can be below it."""

    chosen: Chosen
    objective: float
    bound: float
    num_templates: int
    num_priced_out: int
    """Templates that no better plan can hold, by their reduced cost."""
    num_core: int
    num_rounds: int
    seconds: float

    @property
    def gap_ratio(self) -> float:
        """Of the plan's objective."""
        return max(0.0, self.objective - self.bound) / max(abs(self.objective), 1e-12)


def optimise(
    problem: Problem,
    *,
    gap: float = DEFAULT_GAP,
    time_limit_s: float = 8.0,
    initial: Sequence[int] | None = None,
    clock: Callable[[], float] = perf_counter,
) -> Optimum:
    """InfeasibleError if no plan serves what is wanted, or none was found in time. `initial`: templates to begin with; None: the
    best of each kind. Time is looked at between solves, and solvers are given no more than is left; only the root, some tenths of
    a second, is always solved."""
    started = clock()
    last_s = min(LAST_S, LAST_RATIO * time_limit_s)

    def left_s() -> float:
        return time_limit_s - last_s - (clock() - started)

    root = solve_root(problem, first_pool(problem) if initial is None else initial)
    if root is None:
        raise InfeasibleError("no fleet from this stock serves all that is asked within its limits")
    search = _Search(problem, root, gap)
    search.look(left_s)
    while not search.done and left_s() > LEAST_S:
        search.bind(min(left_s(), SLICE_S))
        if not search.done and left_s() > LEAST_S:
            search.improve(min(left_s(), SLICE_S))
    if search.best is None:
        if not search.done:
            raise InfeasibleError(
                f"no plan was found in {time_limit_s:g} s, nor a proof that there is none: ask for less, or for fewer kinds of GPU"
            )
        raise InfeasibleError("no fleet of whole replicas and nodes from this stock serves all that is asked")
    solved, program = search.best
    chosen = read_solution(problem, program, solved)
    equals = Equals(sorted(search.core), search.values_in)
    return Optimum(
        chosen=best_of_equals(problem, equals, chosen, last_s),
        objective=solved.objective,
        bound=min(search.bound, solved.objective),
        num_templates=len(problem.usage),
        num_priced_out=int((~search.alive).sum()),
        num_core=len(search.core),
        num_rounds=search.rounds,
        seconds=clock() - started,
    )


class _Search:
    """What is known so far: the best plan, the bound, the templates with integers, and what cannot be in a better plan."""

    def __init__(self, problem: Problem, root: Root, gap: float) -> None:
        self.problem, self.root, self.gap = problem, root, gap
        self.alive = undominated(problem)
        self._floors = main_floors(problem, self.alive)
        self._mains: Mask = np.isfinite(self._floors)
        self.core: set[int] = set()
        self.best: tuple[Solved, Program] | None = None
        self.bound = root.value
        self.rounds = 0
        self.done = False
        self._stuck = False

    def look(self, left_s: Callable[[], float]) -> None:
        """Which templates and main compositions matter; then a first plan from those."""
        rough, rest = self._relaxed()
        solved = rough.milp.solve(gap=ROUGH_GAP, time_limit_s=min(left_s(), ROUGH_S))
        if solved.status not in ("optimal", "feasible"):
            self.done = solved.status == "infeasible"
            self.core |= set(self.root.used) | near_misses(self.root, self.alive)
        else:
            self.bound = max(self.bound, solved.bound)
            self._join({rest[i][0] for i in np.flatnonzero(solved.values[rough.columns.rest] > TOLERANCE)})
            self.core |= near_misses(self.root, self.alive)
            first = formulate(self.problem, sorted(self.core), [], solved.values[rough.columns.main] > 0.5)
            self.keep(first, first.milp.solve(gap=self.gap / 4, time_limit_s=min(left_s(), ROUGH_S)))
            self.done = self._is_close

    @property
    def _is_close(self) -> bool:
        return self.best is not None and _gap(self.best[0].objective, self.bound) <= self.gap

    @property
    def _worth_finding(self) -> float:
        """What a cheaper plan must cost at most for the bound to matter; infinite where the gap is to be 0, or none is known."""
        if self.best is None or self.gap <= TOLERANCE:
            return np.inf
        objective = self.best[0].objective
        return objective - PROOF * self.gap * abs(objective)

    def keep(self, program: Program, solved: Solved) -> None:
        """A better plan rules out main compositions and templates that no still better one can hold."""
        if solved.status not in ("optimal", "feasible"):
            return
        if self.best is None or solved.objective < self.best[0].objective - TOLERANCE:
            self.best = solved, program
            self._mains = self._mains & (self._floors <= solved.objective + TOLERANCE)
            above = solved.objective - self.root.value
            self.alive = self.alive & (self.root.reduced_cost <= above + TOLERANCE)

    def improve(self, seconds: float) -> None:
        """The core alone: its solutions are plans."""
        program = formulate(self.problem, sorted(self.core), [], self._mains)
        start = self.values_in(program)
        self.keep(program, program.milp.solve(gap=self.gap / 4, time_limit_s=seconds, start=start))
        self.done = self._is_close

    def bind(self, seconds: float) -> None:
        """A bound for all from the relaxation, and the templates that it would use, which join the core."""
        self.rounds += 1
        at_most = self._worth_finding
        bounding, rest = self._relaxed()
        lower = bounding.milp.solve(
            gap=self.gap / 4, time_limit_s=seconds, at_most=at_most, heuristics=self._stuck
        )
        self._stuck = lower.status == "unknown"
        if lower.status == "infeasible":
            self.bound = max(self.bound, at_most) if at_most < INFINITY else self.bound
            self.done = True
            return
        self.bound = max(self.bound, min(lower.bound, at_most))
        used: set[int] = set()
        if lower.status != "unknown":
            used = {rest[i][0] for i in np.flatnonzero(lower.values[bounding.columns.rest] > TOLERANCE)}
            if not used:
                self.keep(bounding, lower)
        self.done = self._is_close or (lower.status == "optimal" and not used)
        self._join(used)

    def values_in(self, program: Program) -> dict[int, float] | None:
        """The best plan's replicas and nodes as columns of another program."""
        if self.best is None:
            return None
        solved, old = self.best
        new, values = program.columns, solved.values
        runs = {new.run[key]: float(values[i]) for key, i in old.columns.run.items() if key in new.run}
        return runs | dict(zip(new.nodes.tolist(), values[old.columns.nodes].tolist(), strict=True))

    def _join(self, used: set[int]) -> None:
        self.core |= used | smaller(self.problem, used, self.alive)

    def _relaxed(self) -> tuple[Program, list[Pair]]:
        """The core with its integers, the rest without."""
        outside = [int(t) for t in np.flatnonzero(self.alive) if t not in self.core]
        rest = efficient(self.problem, outside)
        return formulate(self.problem, sorted(self.core), rest, self._mains), rest


def _gap(objective: float, bound: float) -> float:
    return (objective - bound) / max(abs(objective), 1e-12)
