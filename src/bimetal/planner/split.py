"""The exact split of a model's layers over a chain of stages.

Owns the search: every boundary, every number of micro-batches, one optimum. Does not know why a stage takes the time
that `perf` says it takes.

A round of K micro-batches of N/K sequences takes

    max(K * slowest stage(N/K), K * slowest wire(N/K), sum of stages(N/K) + hops)

because a stage works on one micro-batch at a time, a wire carries one at a time, and a micro-batch must come back
before its next token. Throughput is N over that. For one K the best split is found exactly: for a limit T on the
slowest stage, dynamic programming finds the smallest sum; the sum falls as T grows and K * T rises, so the optimum
lies where they cross, and a binary search over the stage times that occur finds it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Costs = NDArray[np.float64]
"""[stage, start, end]: seconds of layers [start, end) on a stage; inf where they do not fit or end <= start."""


@dataclass(frozen=True, slots=True)
class Split:
    """Stage i holds layers [boundaries[i], boundaries[i + 1])."""

    boundaries: tuple[int, ...]
    num_micro_batches: int
    round_s: float


def round_s(stage_s: list[float], num_micro_batches: int, wire_s: list[float], hops_s: float) -> float:
    """The formula above.

    >>> round_s([1.0, 3.0], 2, [0.25], 0.5)
    6.0
    """
    slowest = max([*stage_s, *wire_s])
    return max(num_micro_batches * slowest, sum(stage_s) + hops_s)


def best_split(
    costs_of: Callable[[int], Costs],
    wires_of: Callable[[int], tuple[list[float], float]],
    max_micro_batches: int,
) -> Split | None:
    """The split with the shortest round over K in [1, max_micro_batches]; None: no split fits.

    `costs_of(K)` gives stage times for micro-batches of N/K, `wires_of(K)` the time that each wire is busy with one
    and the sum of all hops. Of equal rounds the fewest micro-batches win: each has its own cost that is not modelled.
    """
    best: Split | None = None
    for k in range(1, max_micro_batches + 1):
        wires, hops = wires_of(k)
        found = _best_for(costs_of(k), k, max(wires, default=0.0), hops)
        if found is not None and (best is None or found.round_s < best.round_s * (1 - 1e-12)):
            best = found
    return best


def _best_for(costs: Costs, k: int, wire: float, hops: float) -> Split | None:
    limits = np.unique(costs[np.isfinite(costs)])
    if not len(limits):
        return None

    def attempt(index: int) -> tuple[float, tuple[int, ...] | None]:
        total, boundaries = _smallest_sum(np.where(costs <= limits[index], costs, np.inf))
        return total + hops, boundaries

    low, high = 0, len(limits) - 1
    if attempt(high)[1] is None:
        return None
    while low < high:  # the first limit at which the slowest stage, not the sum, decides
        middle = (low + high) // 2
        if attempt(middle)[0] <= k * limits[middle]:
            high = middle
        else:
            low = middle + 1
    candidates = []
    for index in {low, max(low - 1, 0)}:
        total, boundaries = attempt(index)
        if boundaries is not None:
            stages = [costs[i, boundaries[i], boundaries[i + 1]] for i in range(len(costs))]
            duration = max(k * max(float(max(stages)), wire), total)
            candidates.append(Split(boundaries, k, duration))
    return min(candidates, key=lambda split: split.round_s, default=None)


def _smallest_sum(costs: Costs) -> tuple[float, tuple[int, ...] | None]:
    """Shortest path from layer 0 to the last over one edge per stage."""
    num_stages, size, _ = costs.shape
    reach = np.full(size, np.inf)
    reach[0] = 0.0
    came_from = np.zeros((num_stages, size), dtype=np.int64)
    for stage in range(num_stages):
        through = reach[:, None] + costs[stage]
        came_from[stage] = np.argmin(through, axis=0)
        reach = through[came_from[stage], np.arange(size)]
    if not np.isfinite(reach[-1]):
        return float("inf"), None
    boundaries = [size - 1]
    for stage in reversed(range(num_stages)):
        boundaries.append(int(came_from[stage][boundaries[-1]]))
    return float(reach[-1]), tuple(reversed(boundaries))


def least_overflow(missing: Costs) -> tuple[int, ...]:
    """Boundaries for which the largest of the stages' missing bytes is smallest.

    `missing` is [stage, start, end] in bytes, negative where there is room, inf where end <= start.
    """
    num_stages, size, _ = missing.shape
    reach = np.full(size, np.inf)
    reach[0] = -np.inf
    came_from = np.zeros((num_stages, size), dtype=np.int64)
    for stage in range(num_stages):
        through = np.maximum(reach[:, None], missing[stage])
        came_from[stage] = np.argmin(through, axis=0)
        reach = through[came_from[stage], np.arange(size)]
    boundaries = [size - 1]
    for stage in reversed(range(num_stages)):
        boundaries.append(int(came_from[stage][boundaries[-1]]))
    return tuple(reversed(boundaries))


def worst_overflow(missing: Costs, boundaries: tuple[int, ...]) -> float:
    """The largest of the stages' missing bytes for given boundaries."""
    return max(float(missing[i, start, end]) for i, (start, end) in enumerate(pairwise(boundaries)))
