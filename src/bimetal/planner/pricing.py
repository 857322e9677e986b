"""Which templates can matter: the program without integers, priced out over all of them.

Owns column generation at the root, reduced costs, and dominance: what is out by proof, and what stands in for the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bimetal.planner.formulation import formulate
from bimetal.planner.milp import Floats
from bimetal.planner.problem import Problem
from bimetal.planner.spare import reached_rates

Mask = NDArray[np.bool_]
Pair = tuple[int, int]
"""Template and class."""
TOLERANCE = 1e-7
MOST_NEW = 40
"""Templates that join at once."""
NEAR_MISSES = 12


@dataclass(frozen=True)
class Root:
    """The program without integers, priced out over all templates."""

    value: float
    pool: Sequence[int]
    used: Sequence[int]
    reduced_cost: Floats
    """[T] of one whole replica, whichever class it serves."""


def solve_root(problem: Problem, initial: Sequence[int]) -> Root | None:
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


def first_pool(problem: Problem) -> list[int]:
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


def main_floors(problem: Problem, alive: Mask) -> Floats:
    """[C, P] a bound of the objective if a composition is a class's main one; infinite: impossible."""
    C, P = len(problem.wanted), problem.num_kinds
    program = formulate(problem, [], efficient(problem, np.flatnonzero(alive).tolist()))
    main = program.columns.main
    fixes = [
        {int(main[c, q]): (float(q == p), float(q == p)) for q in range(P)}
        for c in range(C)
        for p in range(P)
    ]
    return np.array(program.milp.probe(fixes)).reshape(C, P)


def near_misses(root: Root, alive: Mask) -> set[int]:
    """Templates of the root, and those that nearly were."""
    order = np.argsort(np.where(alive, root.reduced_cost, np.inf), kind="stable")
    return set(root.used) | {int(t) for t in order[:NEAR_MISSES] if alive[t]}


def smaller(problem: Problem, templates: Iterable[int], alive: Mask) -> set[int]:
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


def undominated(problem: Problem) -> Mask:
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


def efficient(problem: Problem, templates: Sequence[int]) -> list[Pair]:
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
