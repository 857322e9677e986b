"""Micro-batches: the choice against brute force, and what a replay of `pick_decodes` does over many rounds."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bimetal.policy.batching import (
    choose_num_micro_batches,
    max_outstanding_steps,
    pick_decodes,
    prefill_chunk,
    round_s,
)
from bimetal.policy.step_times import fit_step_time


def test_steps_that_cost_weights_and_rows_take_two() -> None:
    """a + b n on two stages: one micro-batch costs 2 a + 2 b N a round, two 2 a + b N, three 3 a + b N."""
    affine = [lambda n: 0.010 + 0.0001 * n, lambda n: 0.010 + 0.0001 * n]
    assert choose_num_micro_batches(64, affine, hop_s=0.0001) == 2
    assert choose_num_micro_batches(1, affine, hop_s=0.0001) == 1


def test_steps_of_weights_alone_stay_together() -> None:
    """Two micro-batches would read the weights twice and gain nothing."""
    flat = [lambda n: 0.010, lambda n: 0.010]
    assert choose_num_micro_batches(64, flat, hop_s=0.0001) == 1


def test_row_bound_stages_hide_their_hops() -> None:
    """Steps that cost by the row: smaller micro-batches cost nothing, so one more than the stages hides the hops."""
    by_row = [lambda n: 0.001 * n, lambda n: 0.001 * n]
    assert choose_num_micro_batches(60, by_row, hop_s=0.005) == 3
    assert choose_num_micro_batches(60, by_row, hop_s=0.0) == 2


def test_one_stage_never_splits() -> None:
    assert choose_num_micro_batches(64, [lambda n: 0.001 * n], 0.0) == 1


@given(
    st.integers(1, 200),
    st.lists(st.tuples(st.floats(1e-4, 0.1), st.floats(0, 1e-3)), min_size=1, max_size=5),
    st.floats(0, 0.01),
)
def test_the_choice_is_the_best(n: int, lines: list[tuple[float, float]], hop_s: float) -> None:
    times = [lambda m, a=a, b=b: a + b * m for a, b in lines]
    chosen = choose_num_micro_batches(n, times, hop_s)
    most = min(n, len(lines) + 1 if len(lines) > 1 else 1)
    assert (
        round_s(n, chosen, times, hop_s)
        <= min(round_s(n, k, times, hop_s) for k in range(1, most + 1)) + 1e-12
    )


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 4), st.randoms(use_true_random=False))
def test_every_sequence_gets_its_tokens_in_fair_turns(
    n: int, num_micro_batches: int, num_stages: int, rng: object
) -> None:
    """Steps issued and returned in order, sequences coming and going: nobody waits for ids that are not the oldest
    outstanding ones, steps keep to their share, and nobody starves."""
    size = n + 10
    ready = np.zeros(size, np.bool_)
    ready[:n] = True
    in_flight, last_step = np.zeros(size, np.int32), np.full(size, -1, np.int64)
    outstanding: deque[tuple[int, np.ndarray]] = deque()
    counts = np.zeros(size, int)
    number = 0
    for turn in range(120):
        while len(outstanding) < max_outstanding_steps(num_stages, num_micro_batches):
            oldest = outstanding[0][0] if outstanding else None
            picked = pick_decodes(ready, in_flight, last_step, oldest, num_micro_batches)
            if not len(picked):
                break
            number += 1
            assert len(picked) <= -(-int(ready.sum()) // num_micro_batches)
            assert all(in_flight[s] == 0 or (in_flight[s] == 1 and last_step[s] == oldest) for s in picked)
            in_flight[picked] += 1
            last_step[picked] = number
            counts[picked] += 1
            outstanding.append((number, picked))
        assert outstanding, "something must always be in flight"
        in_flight[outstanding.popleft()[1]] -= 1
        # None in the last turns, so that whoever came last has had its turn too when they are counted.
        if turn < 100 and rng.random() < 0.05:  # type: ignore[attr-defined]
            slot = rng.randrange(size)  # type: ignore[attr-defined]
            if ready[slot] and ready.sum() > 1 and in_flight[slot] == 0:
                ready[slot] = False
                counts[slot] = 0
            elif not ready[slot]:
                ready[slot], last_step[slot], counts[slot] = True, -1, 0
    steady = counts[ready & (counts > 0)]
    assert ready.sum() == np.count_nonzero(
        ready & (last_step >= number - 4 * (num_micro_batches + num_stages) - 4)
    )
    assert steady.min() >= 1


def test_chunks_fill_the_budget() -> None:
    assert prefill_chunk(100, 30) == 30
    assert prefill_chunk(10, 30) == 10
    assert prefill_chunk(10, -5) == 0


@given(
    st.floats(1e-4, 0.1),
    st.floats(1e-6, 1e-2),
    st.lists(st.floats(0.97, 1.03), min_size=6, max_size=6),
)
def test_step_times_are_fitted_through_noise(weights_s: float, row_s: float, noise: list[float]) -> None:
    sizes = [1, 2, 4, 8, 16, 32]
    time_s = fit_step_time({n: (weights_s + row_s * n) * f for n, f in zip(sizes, noise, strict=True)})
    for n in sizes:
        assert abs(time_s(n) / (weights_s + row_s * n) - 1) < 0.06
    assert time_s(64) >= time_s(1)


def test_step_times_never_fall() -> None:
    assert fit_step_time({1: 0.02, 8: 0.01})(8) == fit_step_time({1: 0.02, 8: 0.01})(1)
    assert fit_step_time({4: 0.02})(100) == 0.02
    with pytest.raises(ValueError, match="measure at least one size"):
        fit_step_time({})
