"""The search against every split there is."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bimetal.planner.split import best_split, least_overflow, round_s


def every_split(num_stages, num_layers):
    for inner in combinations(range(1, num_layers), num_stages - 1):
        yield (0, *inner, num_layers)


@st.composite
def problems(draw):
    num_stages = draw(st.integers(1, 4))
    num_layers = draw(st.integers(num_stages, 8))
    most = draw(st.integers(1, 4))
    seconds = st.one_of(st.floats(0.01, 10), st.integers(1, 4).map(float), st.just(np.inf))
    costs = {}
    for k in range(1, most + 1):
        table = np.full((num_stages, num_layers + 1, num_layers + 1), np.inf)
        for stage in range(num_stages):
            for start in range(num_layers):
                for end in range(start + 1, num_layers + 1):
                    table[stage, start, end] = draw(seconds)
        costs[k] = table
    wires = {k: [draw(st.floats(0, 3)) for _ in range(num_stages - 1)] for k in costs}
    hops = {k: sum(wires[k]) + draw(st.floats(0, 2)) for k in costs}
    return num_stages, num_layers, most, costs, wires, hops


@given(problems())
@settings(max_examples=60, deadline=None)
def test_no_split_is_better(problem):
    num_stages, num_layers, most, costs, wires, hops = problem
    best = np.inf
    for k in costs:
        for cut in every_split(num_stages, num_layers):
            times = [float(costs[k][i, cut[i], cut[i + 1]]) for i in range(num_stages)]
            best = min(best, round_s(times, k, wires[k], hops[k]))
    found = best_split(costs.__getitem__, lambda k: (wires[k], hops[k]), most)
    if np.isinf(best):
        assert found is None
        return
    assert found is not None
    assert found.round_s == pytest.approx(best, rel=1e-9)
    k, cut = found.num_micro_batches, found.boundaries
    times = [float(costs[k][i, cut[i], cut[i + 1]]) for i in range(num_stages)]
    assert round_s(times, k, wires[k], hops[k]) == pytest.approx(best, rel=1e-9)


@given(st.integers(1, 4), st.integers(4, 8), st.randoms())
@settings(max_examples=50, deadline=None)
def test_least_overflow_is_least(num_stages, num_layers, random):
    missing = np.full((num_stages, num_layers + 1, num_layers + 1), np.inf)
    for stage in range(num_stages):
        for start in range(num_layers):
            for end in range(start + 1, num_layers + 1):
                missing[stage, start, end] = random.uniform(-5, 5)

    def worst(cut):
        return max(missing[i, cut[i], cut[i + 1]] for i in range(num_stages))

    assert worst(least_overflow(missing)) == min(map(worst, every_split(num_stages, num_layers)))
