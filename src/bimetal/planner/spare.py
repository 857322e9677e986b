"""N+1 as rows of the program: a class outlives the largest replica that serves it.

What a class can be served at are levels l = 1, 2, ... of rates, step_l = level_l - level_(l-1). reached_l >= reached_(l+1) says
that a replica as fast as level l serves it: spare is then no less than that replica, and all that such replicas serve together
is at most wanted_c (1 + e_c) + spare_c, as more than that would be served for nothing (most_l = wanted_c (1 + e_c) + level_l;
the steps above l are the rest of spare). So the spare grows with the share of demand that large replicas serve even where nothing
is whole. Each rate of the core is a level, so that its solutions are exact.

A template without integers counts from the highest level that none of its rates, over all limits k that it may be run to, is
below. Any solution in whole replicas, z_tkc of them, is y_tc = z_tkc rate_tkc / rate_tcc there, with equal supply, no more GPUs and
no higher a level: what is left out of the core is bounded, never cut off.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bimetal.planner.milp import Floats, Indices, Milp
from bimetal.planner.problem import Problem

NUM_LEVELS = 16
"""Levels of N+1 for templates without integers, beside the core's own rates: more bound better and are solved more slowly."""


def reached_rates(problem: Problem) -> Floats:
    """[T, C] of each template without integers, the level that it reaches: the highest of a few that is not above its rate at the
    limits at which it serves the class slowest; infinite where it does not serve it."""
    found: Floats = np.where(problem.rate > 0, problem.rate, np.inf).min(axis=1, initial=np.inf)
    for c in np.flatnonzero(problem.spare):
        able = np.isfinite(found[:, c])
        if able.any():
            levels = np.quantile(np.unique(found[able, c]), np.linspace(0, 1, NUM_LEVELS), method="lower")
            found[able, c] = levels[np.searchsorted(levels, found[able, c], side="right") - 1]
    return found


def keep_spare(
    m: Milp,
    problem: Problem,
    c: int,
    needed: float,
    spare: int,
    supply: Sequence[tuple[Indices, Floats, Floats]],
) -> tuple[Floats, Indices]:
    """Levels of the class and their rows. `needed`: requests per second at most, with what is lost. `supply`: of the core and of the rest, columns, rates, and rates by which they reach
    levels."""
    able = problem.rate[:, :, c][problem.rate[:, :, c] > 0]
    if not problem.spare[c] or not len(able):
        return np.empty(0), np.empty(0, np.int64)
    (_, _, exact), (_, _, coarse) = supply
    none = [0.0] if problem.objective == "goodput" else []  # it may serve nothing
    levels = np.unique(np.concatenate([none, [able.min()], exact, coarse]))
    steps = np.diff(levels)
    reached = m.variables(len(steps), upper=1.0, integer=True)
    m.row([(spare, 1.0), (reached, -steps)], lower=float(levels[0]), upper=float(levels[0]))
    rows = np.zeros(len(steps), np.int64)
    for i, level in enumerate(levels[1:]):
        above = [(column[by >= level], rate[by >= level]) for column, rate, by in supply]
        more = [(reached[i], -(needed + level)), (reached[i + 1 :], -steps[i + 1 :])]
        rows[i] = m.row([*above, *more], upper=0.0)
        if i:
            m.row([(reached[i - 1], 1.0), (reached[i], -1.0)], lower=0.0)
    return levels[1:], rows
