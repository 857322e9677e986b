"""The optimum over all templates, with a bound that holds for all of them.

Owns column generation: which templates get integers, which are priced out, when to stop. What the program says is
`formulation`'s.

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

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from bimetal.errors import InfeasibleError
from bimetal.planner.formulation import Chosen, Program, formulate, reached_rates, read_solution
from bimetal.planner.milp import INFINITY, Floats, Solved
from bimetal.planner.problem import Problem

Mask = NDArray[np.bool_]
Pair = tuple[int, int]
"""Template and class."""
TOLERANCE = 1e-7
PROOF = 0.8
"""Of the gap asked for: that no plan is cheaper by so much is tried to be proven first, which is faster than how much is possible."""
MOST_NEW = 40
"""Templates that join at once."""
NEAR_MISSES = 12
DEFAULT_GAP = 0.005
SLICE_S = 2.5
"""After which the core is looked at again."""
LEAST_S = 0.1
"""Below which no solver starts."""
HEADROOM_GAP, HEADROOM_S = 0.01, 1.0
LAST_RATIO = 0.12
"""Of the time limit, kept for the choice among equally cheap plans."""
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
    last_s = min(HEADROOM_S, LAST_RATIO * time_limit_s)

    def left_s() -> float:
        return time_limit_s - last_s - (clock() - started)

    root = _solve_root(problem, _first_pool(problem) if initial is None else initial)
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
    if _has_free(problem):
        chosen = _with_fewest(problem, search, chosen, last_s / 2)
        last_s /= 2
    return Optimum(
        chosen=_with_headroom(problem, search, chosen, last_s) if problem.objective == "cost" else chosen,
        objective=solved.objective,
        bound=min(search.bound, solved.objective),
        num_templates=len(problem.usage),
        num_priced_out=int((~search.alive).sum()),
        num_core=len(search.core),
        num_rounds=search.rounds,
        seconds=clock() - started,
    )


def _has_free(problem: Problem) -> bool:
    """Whether more GPUs may cost no more."""
    free = (problem.price_usd_per_h <= 0) & (problem.buyable_nodes > 0)
    return bool((free | ((problem.owned_usd_per_h <= 0) & (problem.owned > 0))).any())


def _with_fewest(problem: Problem, search: _Search, chosen: Chosen, seconds: float) -> Chosen:
    """The plan with the fewest GPUs among those that cost no more and serve no less: what is free is not to be wasted."""
    if not chosen.served_ratio.all():
        return chosen
    same = replace(
        problem,
        objective="fewest",
        wanted=problem.wanted * np.minimum(chosen.served_ratio, 1.0),
        budget_usd_per_h=min(problem.budget_usd_per_h, chosen.usd_per_h + TOLERANCE),
    )
    program = formulate(same, sorted(search.core), [])
    solved = program.milp.solve(gap=TOLERANCE, time_limit_s=seconds, start=search.values_in(program))
    if solved.status not in ("optimal", "feasible"):
        return chosen
    found = read_solution(same, program, solved)
    if found.num_gpus(problem) >= chosen.num_gpus(problem):
        return chosen
    return replace(found, served_ratio=chosen.served_ratio)


def _with_headroom(problem: Problem, search: _Search, chosen: Chosen, seconds: float) -> Chosen:
    """The plan that serves the largest multiple of the demand from the same GPUs: they are paid whether or not all is used."""
    same = replace(
        problem,
        objective="headroom",
        owned=chosen.owned_used,
        buyable_nodes=chosen.nodes.astype(np.float64),
    )
    program = formulate(same, sorted(search.core), [])
    solved = program.milp.solve(gap=HEADROOM_GAP, time_limit_s=seconds, start=search.values_in(program))
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


class _Search:
    """What is known so far: the best plan, the bound, the templates with integers, and what cannot be in a better plan."""

    def __init__(self, problem: Problem, root: Root, gap: float) -> None:
        self.problem, self.root, self.gap = problem, root, gap
        self.alive = _undominated(problem)
        self._floors = _main_floors(problem, self.alive)
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
            self.core |= set(self.root.used) | _near_misses(self.root, self.alive)
        else:
            self.bound = max(self.bound, solved.bound)
            self._join({rest[i][0] for i in np.flatnonzero(solved.values[rough.columns.rest] > TOLERANCE)})
            self.core |= _near_misses(self.root, self.alive)
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
        self.core |= used | _smaller(self.problem, used, self.alive)

    def _relaxed(self) -> tuple[Program, list[Pair]]:
        """The core with its integers, the rest without."""
        outside = [int(t) for t in np.flatnonzero(self.alive) if t not in self.core]
        rest = _efficient(self.problem, outside)
        return formulate(self.problem, sorted(self.core), rest, self._mains), rest


def _gap(objective: float, bound: float) -> float:
    return (objective - bound) / max(abs(objective), 1e-12)


# -- root ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Root:
    """The program without integers, priced out over all templates."""

    value: float
    pool: Sequence[int]
    used: Sequence[int]
    reduced_cost: Floats
    """[T] of one whole replica, whichever class it serves."""


def _solve_root(problem: Problem, initial: Sequence[int]) -> Root | None:
    """None: infeasible. First the demand that the pool cannot serve is made as small as can be, then the cost."""
    pool = set(initial)
    if problem.objective == "cost":
        most = _generate(replace(problem, objective="goodput"), pool)
        if most is None:
            return None
    return _generate(problem, pool)


def _generate(problem: Problem, pool: set[int]) -> Root | None:
    """Column generation; `pool` grows in place."""
    C = len(problem.wanted)
    every = np.arange(C)
    own_rate = problem.rate[:, every, every]
    least = reached_rates(problem)
    while True:
        pairs = [(t, c) for t in sorted(pool) for c in range(C) if own_rate[t, c] > 0]
        program = formulate(problem, [], pairs)
        solved = program.milp.solve(relax=True)
        if solved.status != "optimal":
            return None
        duals, rows = solved.row_duals, program.rows
        price = duals[rows.demand][None, :] + duals[rows.of_kind].T[problem.kind]
        for c, (levels, reached) in enumerate(rows.reached):  # faster replicas ask for a larger spare
            below = np.concatenate([[0.0], np.cumsum(duals[reached])])
            price[:, c] += below[np.searchsorted(levels, least[:, c], side="right")]
        worth = own_rate * price
        reduced = -problem.usage @ duals[rows.gpus] - worth.max(axis=1, initial=0.0)
        scale = max(abs(solved.objective), 1.0)
        entering = [int(t) for t in np.argsort(reduced)[:MOST_NEW] if reduced[t] < -TOLERANCE * scale]
        entering = [t for t in entering if t not in pool]
        if not entering:
            used = sorted(
                {pairs[i][0] for i in np.flatnonzero(solved.values[program.columns.rest] > TOLERANCE)}
            )
            return Root(solved.objective, sorted(pool), used, np.maximum(reduced, 0.0))
        pool |= set(entering)


def _first_pool(problem: Problem) -> list[int]:
    """For each composition and class, the template that gives most per GPU."""
    gpus = np.maximum(problem.usage.sum(axis=1), 1e-9)
    pool: set[int] = set()
    for c in range(len(problem.wanted)):
        per_gpu = problem.rate[:, c, c] / gpus
        for p in range(problem.num_kinds):
            members = np.flatnonzero(problem.kind == p)
            if len(members):
                pool.add(int(members[np.argmax(per_gpu[members])]))
    return sorted(pool)


def _main_floors(problem: Problem, alive: Mask) -> Floats:
    """[C, P] a bound of the objective if a composition is a class's main one; infinite: impossible."""
    C, P = len(problem.wanted), problem.num_kinds
    program = formulate(problem, [], _efficient(problem, np.flatnonzero(alive).tolist()))
    main = program.columns.main
    fixes = [
        {int(main[c, q]): (float(q == p), float(q == p)) for q in range(P)}
        for c in range(C)
        for p in range(P)
    ]
    return np.array(program.milp.probe(fixes)).reshape(C, P)


def _near_misses(root: Root, alive: Mask) -> set[int]:
    """Templates of the root, and those that nearly were."""
    order = np.argsort(np.where(alive, root.reduced_cost, np.inf), kind="stable")
    return set(root.used) | {int(t) for t in order[:NEAR_MISSES] if alive[t]}


def _smaller(problem: Problem, templates: Iterable[int], alive: Mask) -> set[int]:
    """For each template and class it serves, the best of the same composition that take fewer GPUs: they fill nodes."""
    sizes = problem.usage.sum(axis=1)
    found: set[int] = set()
    for t in templates:
        for c in np.flatnonzero(problem.rate[t].any(axis=0)):
            alike = (problem.kind == problem.kind[t]) & (sizes < sizes[t]) & (problem.rate[:, c, c] > 0)
            members = np.flatnonzero(alike & alive)
            if len(members):
                found.add(int(members[np.argmax(problem.rate[members, c, c] / sizes[members])]))
    return found


# -- the rest ------------------------------------------------------------------------------------------------------


def _undominated(problem: Problem) -> Mask:
    """[T] False where some number of another template of the same composition takes no more GPUs of any kind and serves no
    less of any class: such a template is in no plan that could not do without it. With N+1, a faster one asks for a larger
    spare: a whole replica's worth of supply makes up for that, a share of one does not, so that templates which classes share are
    dominated only by such as are no faster."""
    rate = problem.rate.reshape(len(problem.usage), problem.rate.shape[1] * problem.rate.shape[2])
    alive: Mask = np.asarray(rate.any(axis=1), dtype=bool)
    for p in range(problem.num_kinds):
        members = np.flatnonzero((problem.kind == p) & alive)
        if not len(members):
            continue
        order = np.lexsort((-rate[members].sum(axis=1), problem.usage[members].sum(axis=1)))
        members = members[order]
        used = problem.usage[members][:, problem.usage[members].any(axis=0)]
        times = np.floor(
            (used[:, None, :] / used[None, :, :]).min(axis=2)
        )  # [t, other]: how many of other fit in t
        better: Mask = np.tril(times >= 1, k=-1)
        for k, c in zip(*np.nonzero(problem.rate[members].any(axis=0)), strict=True):
            column = problem.rate[members, k, c]
            better &= times * column[None, :] >= column[:, None] - 1e-12
            if problem.spare[c]:
                shared = (problem.rate[members, k] > 0).sum(axis=1) > 1
                better &= ~shared[:, None] | (column[None, :] <= column[:, None] + 1e-12)
        alive[members[better.any(axis=1)]] = False
    return alive


def _efficient(problem: Problem, templates: Sequence[int]) -> list[Pair]:
    """Pairs that no other of the same composition and class dominates in GPUs of every kind per request."""
    members_of: dict[int, list[int]] = {}
    for t in templates:
        members_of.setdefault(int(problem.kind[t]), []).append(int(t))
    pairs: list[Pair] = []
    reached = reached_rates(problem)
    for members in members_of.values():
        index = np.array(members)
        used = problem.usage[index].any(axis=0)
        for c in range(len(problem.wanted)):
            able = index[problem.rate[index, c, c] > 0]
            if len(able):
                per_request = problem.usage[able][:, used] / problem.rate[able, c, c][:, None]
                if problem.spare[c]:  # a slower one asks for a smaller spare
                    per_request = np.column_stack([per_request, reached[able, c]])
                pairs += [(int(t), c) for t in able[_front(per_request)]]
    return pairs


def _front(costs: Floats) -> Mask:
    """[n] rows of [n, d] that no other row is as low as in every column; of equal rows the first."""
    order = np.lexsort(costs.T[::-1])
    kept = np.zeros(len(costs), dtype=bool)
    front = np.empty((0, costs.shape[1]))
    for i in order:
        if not (front <= costs[i] + 1e-12).all(axis=1).any():
            kept[i] = True
            front = np.vstack([front, costs[i]])
    return kept
