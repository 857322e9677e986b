"""Measuring a device through the engine: decode steps at several sizes and contexts, prompts of several lengths.

Owns which points are measured. What is made of them is `perf.device`'s. Torch-free: the stages do the work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from bimetal.catalog.hardware import CPU, cpu_spec, find_gpu
from bimetal.engine.bench import Workload, run_workload
from bimetal.engine.driver.driver import Driver
from bimetal.perf.device import PromptSample, StepSample
from bimetal.perf.step_time import StageShape
from bimetal.plan import Stage
from bimetal.policy.batching import prompt_chunks

WARM_UP = Workload(1, 16, 8)
PASSES = 2
"""Each point is measured twice, and the quicker kept: what disturbs a measurement only adds to it."""


@dataclass(frozen=True, slots=True)
class DeviceSamples:
    """Everything that one session of measuring found."""

    steps: tuple[StepSample, ...]
    prompts: tuple[PromptSample, ...]
    hop_s: float | None


def workloads(max_num_seqs: int, max_model_len: int) -> list[Workload]:
    """About nine points: one to many sequences at short context, one and some at long context, all at what lies between."""
    long = max_model_len * 2 // 3
    outputs = max(16, min(48, max_model_len // 8))
    sizes = sorted({1, 2, 4, 8, max_num_seqs} & set(range(1, max_num_seqs + 1)))
    points = [Workload(n, 16, outputs) for n in sizes]
    points += [Workload(1, length, outputs) for length in (max_model_len // 8, max_model_len // 3, long)]
    if max_num_seqs >= 2:
        points.append(Workload(max_num_seqs, max_model_len // 4, outputs))
        points.append(Workload(2, long, outputs))
    return points


def measure(driver: Driver, report: Callable[[str], None] = lambda text: None) -> DeviceSamples:
    """Minutes. The driver must be started, idle, and without prefix caching."""
    shapes = tuple(stage_shape(driver, stage) for stage in driver.replica.stages)
    run_workload(driver, WARM_UP, seed=0)
    steps: list[StepSample] = []
    prompts: list[PromptSample] = []
    boundaries: list[float] = []
    seed = 1
    for workload in workloads(driver.max_num_seqs, driver.max_model_len):
        results = []
        for _ in range(PASSES):
            results.append(run_workload(driver, workload, seed))
            seed += 1
        windows = [r.decode for r in results if r.decode is not None]
        if windows:
            best = min(windows, key=lambda w: sum(w.stage_step_s))
            size = workload.num_requests / best.num_micro_batches
            context = workload.input_tokens + workload.output_tokens / 2
            pairs = zip(shapes, best.stage_step_s, strict=True)
            # With several micro-batches a stage is also kept by what no stopwatch of its own sees: taking a step up, passing
            # it on, waiting for one that took longer than most. With one, that is what a hop takes.
            beside_s = (
                max(best.boundary_s, 0.0) / best.num_micro_batches if best.num_micro_batches > 1 else 0.0
            )
            steps += [StepSample(shape, size, context, step_s + beside_s) for shape, step_s in pairs]
            if workload.num_requests == 1:
                boundaries.append(best.boundary_s)
        if workload.num_requests == 1:
            ttft = min(r.ttft_s.p50 for r in results)
            chunks = prompt_chunks(
                workload.input_tokens,
                driver.max_num_batched_tokens,
                len(shapes),
                driver.scheduler.smallest_chunk_tokens,
            )
            prompts.append(PromptSample(shapes, chunks, ttft))
        report(str(workload))
    if len(shapes) == 1:
        return DeviceSamples(tuple(steps), tuple(prompts), None)
    hop_s = max(min(boundaries), 0.0) / len(shapes)
    hops = hop_s * len(shapes)
    return DeviceSamples(
        tuple(steps), tuple(replace(p, seconds=max(p.seconds - hops, p.seconds / 2)) for p in prompts), hop_s
    )


def stage_shape(driver: Driver, stage: Stage) -> StageShape:
    """A stage as the performance model sees it."""
    device = cpu_spec() if stage.gpu == CPU else find_gpu(stage.gpu)
    # Triton's kernels take FP8 weights as they are stored; everything else has them widened.
    keeps_fp8 = stage.gpu != CPU and driver.dtype != "float32" and driver.options.kernels != "torch"
    dtype = driver.spec.weight_dtype if driver.spec.quantization and keeps_fp8 else driver.dtype
    return StageShape(driver.spec, stage.start_layer, stage.end_layer, device, stage.tensor_parallel, dtype)
