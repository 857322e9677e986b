"""The simulator and the engine's own scheduler, on the same modelled step times, see the same percentiles."""

import numpy as np
import pytest
from dry_engine import run_dry

from bimetal.perf.stage_clock import StageClock
from bimetal.simulate.pipeline import SimulatedPipeline
from bimetal.simulate.run import simulate
from bimetal.simulate.shapes import ReplicaShape
from bimetal.simulate.trace import Trace


def cpu_clock(share: float) -> StageClock:
    """A share of a model that is slow by the token."""
    return StageClock(
        fixed_s=0.001,
        dense_s=share * 0.05,
        experts_s=0.0,
        expert_miss=1.0,
        spread=1.0,
        multiply_s=share * 0.004,
        token_s=share * 0.002,
        context_s=share * 2e-6,
        prompt_token_s=share * 0.004,
        score_s=share * 1e-7,
        prompt_s=0.002,
        bias=1.0,
    )


def gpu_clock(share: float) -> StageClock:
    """A share of a model that is bound by its weights."""
    return StageClock(
        fixed_s=0.0005,
        dense_s=share * 0.0045,
        experts_s=0.0,
        expert_miss=1.0,
        spread=1.0,
        multiply_s=share * 2e-5,
        token_s=share * 4e-6,
        context_s=share * 3e-8,
        prompt_token_s=share * 3e-5,
        score_s=share * 1e-10,
        prompt_s=0.0002,
        bias=1.0,
    )


def trace(size: int, rate: float, inputs: tuple[int, int], outputs: tuple[int, int], seed: int) -> Trace:
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / rate, size))
    return Trace(arrivals - arrivals[0], rng.integers(*inputs, size), rng.integers(*outputs, size))


CPU_LIMITS = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "kv_tokens": 100_000}
GPU_LIMITS = {"max_num_seqs": 64, "max_num_batched_tokens": 4096, "kv_tokens": 500_000}
CPU_LENGTHS = {"inputs": (16, 200), "outputs": (8, 48)}
GPU_LENGTHS = {"inputs": (200, 2000), "outputs": (20, 200)}


@pytest.mark.parametrize(
    ("shape", "requests"),
    [
        (ReplicaShape((cpu_clock(1),), 0, 0, **CPU_LIMITS), trace(100, 1.0, **CPU_LENGTHS, seed=0)),
        (
            ReplicaShape((cpu_clock(0.55), cpu_clock(0.45)), 0.003, 1e-6, **CPU_LIMITS),
            trace(100, 1.4, **CPU_LENGTHS, seed=1),
        ),
        (ReplicaShape((gpu_clock(1),), 0, 0, **GPU_LIMITS), trace(300, 15, **GPU_LENGTHS, seed=2)),
        (ReplicaShape((gpu_clock(0.5),) * 2, 0.001, 1e-7, **GPU_LIMITS), trace(300, 20, **GPU_LENGTHS, seed=3)),
        (ReplicaShape((gpu_clock(0.33),) * 3, 0.0015, 1e-7, **GPU_LIMITS), trace(300, 25, **GPU_LENGTHS, seed=4)),
    ],
    ids=["cpu", "two cpus", "gpu", "two gpus", "three gpus"],
)  # fmt: skip
def test_percentiles_are_the_schedulers(shape: ReplicaShape, requests: Trace) -> None:
    first, done = run_dry(requests, shape)
    run = simulate(requests, [shape], [1.0])
    tpot = (done - first) / np.maximum(requests.output_tokens - 1, 1)
    for real, modelled in ((first - requests.arrival_s, run.ttft_s), (tpot, run.tpot_s)):
        for percentile in (50, 95):
            assert np.percentile(modelled, percentile) == pytest.approx(
                np.percentile(real, percentile), rel=0.07
            )


def test_a_small_cache_preempts_and_loses_nobody() -> None:
    requests = trace(120, 30, (100, 400), (50, 200), seed=5)
    shape = ReplicaShape((gpu_clock(0.5),) * 2, 0.001, 1e-7, 64, 4096, kv_tokens=6_000)
    run = simulate(requests, [shape], [1.0])
    assert run.num_preemptions > 0
    assert np.isfinite(run.done_s).all()
    assert (run.ttft_s > 0).all()


def test_a_slot_that_changed_hands_gets_no_token_of_its_former_owner() -> None:
    shape = ReplicaShape(
        (gpu_clock(0.5),) * 2, 0.001, 1e-7, max_num_seqs=1, max_num_batched_tokens=4096, kv_tokens=6_000
    )
    first, done = np.full(2, np.nan), np.full(2, np.nan)
    pipeline = SimulatedPipeline(shape, first, done)
    pipeline.submit(0, 10, 5, at_s=0.0)
    ends_s = pipeline.next_change_s
    pipeline._leave(0)  # as a pre-emption does while the step that ends its prompt is under way
    pipeline.submit(1, 2000, 5, at_s=0.0)
    pipeline.advance(np.inf)
    assert np.isnan(first[0])
    assert first[1] > ends_s
