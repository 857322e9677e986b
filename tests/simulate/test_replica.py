"""One replica by hand, and what must hold whatever arrives."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bimetal.errors import ConfigError
from bimetal.perf.stage_clock import StageClock
from bimetal.policy.batching import choose_num_micro_batches
from bimetal.simulate.run import Slo, class_results, simulate
from bimetal.simulate.shapes import ReplicaShape
from bimetal.simulate.trace import Trace, merge, poisson_trace

CLOCK = StageClock(
    fixed_s=0.001,
    dense_s=0.009,
    experts_s=0.0,
    expert_miss=1.0,
    spread=1.0,
    multiply_s=0.0,
    token_s=0.0001,
    context_s=1e-6,
    prompt_token_s=2e-5,
    score_s=1e-9,
    prompt_s=0.002,
    bias=1.0,
)
SHAPE = ReplicaShape((CLOCK,), 0.0, 0.0, max_num_seqs=8, max_num_batched_tokens=512, kv_tokens=100_000)


def trace(*requests):
    arrivals, inputs, outputs = zip(*requests, strict=True)
    return Trace(np.array(arrivals, dtype=float), np.array(inputs), np.array(outputs))


def test_one_request_by_hand():
    run = simulate(trace((0.0, 100, 11)), [SHAPE], [1.0])
    prefill = 0.001 + 0.009  # 100 tokens take 4 ms: the weights are streamed meanwhile
    assert run.ttft_s[0] == pytest.approx(prefill)
    steps = [0.001 + 0.009 + 0.0001 + 1e-6 * context for context in range(101, 111)]
    assert run.done_s[0] == pytest.approx(prefill + sum(steps))
    assert run.tpot_s[0] == pytest.approx(np.mean(steps))


def test_a_long_prompt_is_read_in_chunks():
    run = simulate(trace((0.0, 1200, 1)), [SHAPE], [1.0])
    chunks = []
    done = 0
    for size in (512, 512, 176):
        pairs = size * (done + size / 2)
        done += size
        chunks.append(0.001 + max(0.009, size * 2e-5 + pairs * 1e-9 + (0.002 if done == 1200 else 0)))
    assert run.ttft_s[0] == pytest.approx(sum(chunks))
    assert np.isnan(run.tpot_s[0])


def test_a_prompt_slows_those_that_decode():
    alone = simulate(trace((0.0, 100, 50)), [SHAPE], [1.0])
    disturbed = simulate(trace((0.0, 100, 50), (0.2, 400, 2)), [SHAPE], [1.0])
    assert disturbed.done_s[0] > alone.done_s[0] + 400 * 2e-5


def test_skipping_ahead_changes_nothing():
    """A request that arrives late and far away forces single rounds; the first must end at the same time."""
    quiet = simulate(trace((0.0, 100, 200)), [SHAPE], [1.0])
    watched = simulate(
        trace((0.0, 100, 200), *((0.01 * i, 5, 1) for i in range(1, 100))), [SHAPE, SHAPE], [1.0, 1e-9]
    )
    only_first = simulate(trace((0.0, 100, 200), (50.0, 5, 1)), [SHAPE], [1.0])
    assert only_first.done_s[0] == pytest.approx(quiet.done_s[0], rel=1e-9)
    assert watched.done_s[0] >= quiet.done_s[0]


def test_two_stages_take_the_policys_micro_batches():
    """Many sequences keep both stages busy: a round takes what the policy's formula says."""
    fast = replace(CLOCK, dense_s=0.001, token_s=0.001, context_s=0.0)
    shape = ReplicaShape(
        (fast, fast), 0.0002, 0.0, max_num_seqs=32, max_num_batched_tokens=4096, kv_tokens=10**6
    )
    run = simulate(trace(*((0.0, 10, 101) for _ in range(16))), [shape], [1.0])

    def step(size):
        return fast.step_s(size, 0)

    k = choose_num_micro_batches(16, [step, step], 0.0001)
    assert k >= 2
    expected = max(k * step(16 / k), 2 * step(16 / k) + 0.0002)
    assert np.median(run.tpot_s) == pytest.approx(expected, rel=0.02)
    assert min(run.busy_s[0]) / run.makespan_s > 0.9


def test_the_cache_bounds_what_runs_and_the_newest_gives_way():
    small = replace(SHAPE, kv_tokens=700)
    run = simulate(trace(*((0.001 * i, 100, 200) for i in range(6))), [small], [1.0])
    assert run.num_preemptions > 0
    assert np.isfinite(run.done_s).all()
    assert run.done_s[0] < run.done_s[-1]
    assert (
        run.done_s.max()
        > simulate(trace(*((0.001 * i, 100, 200) for i in range(6))), [SHAPE], [1.0]).done_s.max()
    )


def test_a_faster_replica_gets_more():
    slow = replace(SHAPE, clocks=(replace(CLOCK, bias=3.0),))
    load = poisson_trace(300, 20, 100, 50, seed=1)
    run = simulate(load, [SHAPE, slow], [3.0, 1.0])
    assert (run.replica == 0).mean() == pytest.approx(0.75, abs=0.08)


def test_the_same_trace_gives_the_same_result():
    load = poisson_trace(200, 30, 200, 60, seed=5)
    first, second = (simulate(load, [SHAPE, SHAPE], [1.0, 1.0]) for _ in range(2))
    assert np.array_equal(first.done_s, second.done_s)
    assert not np.array_equal(load.arrival_s, poisson_trace(200, 30, 200, 60, seed=6).arrival_s)


def test_goodput_counts_tokens_within_limits_by_class():
    chat = poisson_trace(100, 10, 100, 20, seed=2, name="chat")
    batch = poisson_trace(50, 5, 400, 100, seed=3, name="batch")
    run = simulate(merge([chat, batch]), [SHAPE], [1.0])
    loose = {r.name: r for r in class_results(run, {})}
    tight = {r.name: r for r in class_results(run, {"chat": Slo(ttft_s=float(np.median(run.ttft_s)))})}
    assert set(loose) == {"chat", "batch", "all"}
    assert loose["all"].goodput_tokens_per_s == pytest.approx(loose["all"].output_tokens_per_s)
    assert 0 < tight["chat"].met_ratio < 1
    assert tight["chat"].goodput_tokens_per_s < loose["chat"].goodput_tokens_per_s
    assert tight["batch"] == loose["batch"]


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("kv_tokens", [0, 1])
def test_a_cache_that_holds_no_request_is_refused(num_stages, kv_tokens):
    shape = replace(SHAPE, clocks=(CLOCK,) * num_stages, kv_tokens=kv_tokens)
    with pytest.raises(ConfigError, match=f"holds {kv_tokens} tokens.*more memory"):
        simulate(trace((0.0, 10, 5)), [shape], [1.0])
    run = simulate(trace((0.0, 10, 5)), [replace(shape, kv_tokens=2)], [1.0])
    assert np.isfinite(run.done_s).all()


def test_an_empty_trace_is_refused():
    nothing = Trace(np.zeros(0), np.zeros(0, np.int64), np.zeros(0, np.int64))
    with pytest.raises(ConfigError, match="no requests"):
        simulate(nothing, [SHAPE], [1.0])


@given(
    st.lists(st.tuples(st.floats(0, 3), st.integers(1, 900), st.integers(1, 60)), min_size=1, max_size=40),
    st.integers(1, 4),
    st.sampled_from([2, 20, 300, 1500, 100_000]),
    st.sampled_from([1, 8]),
    st.sampled_from([4, 512]),
)
@settings(max_examples=60, deadline=None)
def test_every_request_ends_and_nothing_is_busier_than_time(
    requests, num_stages, kv_tokens, max_num_seqs, max_num_batched_tokens
):
    shape = replace(
        SHAPE,
        clocks=(CLOCK,) * num_stages,
        kv_tokens=kv_tokens,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        hop_latency_s=1e-4,
    )
    run = simulate(trace(*sorted(requests)), [shape, shape], [1.0, 1.0])
    assert (run.ttft_s > 0).all()
    assert (run.done_s >= run.trace.arrival_s + run.ttft_s - 1e-12).all()
    assert max(map(max, run.busy_s)) <= run.makespan_s * (1 + 1e-9)
