"""What `bimetal bench` finds beside times: peaks of the devices, experts hit, time by kernel family. Torch-free.

Watching slows a stage, so each of these has a pass of its own, which no time is taken from.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from bimetal.catalog.hardware import CPU, find_gpu
from bimetal.engine.bench import Result, Workload, run_workload
from bimetal.engine.calibrate import stage_shape
from bimetal.engine.driver.driver import Driver
from bimetal.engine.utilisation import (
    ExpertsHit,
    Peaks,
    StageUse,
    is_routing_degenerate,
    run_flops,
    step_bytes,
)
from bimetal.engine.wire.control import AskStats, StageStats
from bimetal.perf.step_time import StageShape

_POLL_S = 0.05
_WATCHED_TOKENS = 8
_PROFILED_TOKENS = 64
_SEED = 101


@dataclass(frozen=True, slots=True)
class KernelTimes:
    """Of one stage over a profiled pass."""

    workload: str
    busy_s: float
    kernel_s: dict[str, float]
    """By family, largest first."""


@dataclass(frozen=True, slots=True)
class Observed:
    """What one workload showed beside its times."""

    experts: ExpertsHit | None
    """None: no layer has experts."""
    stages: tuple[StageUse, ...]
    kernels: tuple[KernelTimes, ...] | None
    """A stage each; None: not profiled."""


def stage_peaks(
    driver: Driver, source: str, bytes_per_s: float | None, flops_per_s: float | None
) -> list[Peaks | None]:
    """A stage each: what was given for all of them, else measured by the stages now, or from the catalogue, by `source`
    ("measured" or "datasheet"). None: a CPU has no datasheet here, or there was no room to measure."""
    if bytes_per_s is not None and flops_per_s is not None:
        return [Peaks(bytes_per_s, flops_per_s, "given")] * len(driver.replica.stages)
    if source == "datasheet":
        found = [_from_catalogue(stage.gpu, driver.dtype) for stage in driver.replica.stages]
    else:
        found = [_as_measured(stats) for stats in ask(driver, AskStats(measure_peaks=True))]
    return [
        None if peaks is None else _with_given(peaks, bytes_per_s, flops_per_s, source) for peaks in found
    ]


def _with_given(peaks: Peaks, bytes_per_s: float | None, flops_per_s: float | None, source: str) -> Peaks:
    if bytes_per_s is None and flops_per_s is None:
        return peaks
    return Peaks(bytes_per_s or peaks.bytes_per_s, flops_per_s or peaks.flops_per_s, f"given, {source}")


def _as_measured(stats: StageStats) -> Peaks | None:
    if not stats.peak_bytes_per_s:
        return None
    return Peaks(stats.peak_bytes_per_s, stats.peak_flops_per_s, "measured")


def _from_catalogue(gpu: str, dtype: str) -> Peaks | None:
    if gpu == CPU:
        return None
    spec = find_gpu(gpu)
    doubt = ", unchecked" if spec.unverified_of("memory_bytes_per_s", "bf16_flops_per_s") else ""
    return Peaks(spec.memory_bytes_per_s, spec.flops_per_s(dtype), f"datasheet of {spec.name}{doubt}")


def observe(
    driver: Driver, workload: Workload, result: Result, peaks: list[Peaks | None], profile: bool
) -> Observed:
    """`result` is the workload's timed pass. Runs the passes that watch; the driver must be idle."""
    shapes = [stage_shape(driver, stage) for stage in driver.replica.stages]
    experts = watch_experts(driver, workload) if driver.spec.num_experts else None
    uses = tuple(
        _use(shape, workload, result, 1.0 if experts is None else experts.hit_ratio, peak)
        for shape, peak in zip(shapes, peaks, strict=True)
    )
    return Observed(experts, uses, profile_kernels(driver, workload) if profile else None)


def _use(
    shape: StageShape, workload: Workload, result: Result, hit_ratio: float, peaks: Peaks | None
) -> StageUse:
    moved = mbu = mfu = None
    if (window := result.decode) is not None:
        num_seqs = workload.num_requests / window.num_micro_batches
        moved = step_bytes(shape, num_seqs, window.mean_context, hit_ratio)
    if peaks is not None:
        if window is not None and moved is not None:
            mbu = moved * window.num_micro_batches / (window.round_s * peaks.bytes_per_s)
        flops = workload.num_requests * run_flops(shape, workload.input_tokens, workload.output_tokens)
        mfu = flops / (result.duration_s * peaks.flops_per_s)
    return StageUse(moved, mbu, mfu)


def watch_experts(driver: Driver, workload: Workload) -> ExpertsHit | None:
    """Which experts the workload's decode steps hit. None: no step did nothing but decode."""
    ask(driver, AskStats(watch_experts=True))
    tokens = min(workload.output_tokens, _WATCHED_TOKENS)
    run_workload(driver, replace(workload, output_tokens=tokens), _SEED, with_window=False)
    found = [stats for stats in ask(driver, AskStats()) if stats.distinct_experts]
    if not found:
        return None
    spec = driver.spec
    distinct = tuple(count for stats in found for count in stats.distinct_experts)
    num_rows = found[0].num_expert_rows
    is_dummy = driver.options.load_format == "dummy"
    is_invalid = is_dummy and is_routing_degenerate(
        distinct, spec.num_experts, spec.experts_per_token, num_rows
    )
    return ExpertsHit(num_rows, spec.num_experts, distinct, is_invalid)


def profile_kernels(driver: Driver, workload: Workload) -> tuple[KernelTimes, ...]:
    """Device time by kernel family over a whole pass, prompts included, of up to 64 output tokens a request."""
    profiled = replace(workload, output_tokens=min(workload.output_tokens, _PROFILED_TOKENS))
    ask(driver, AskStats(profile=True))
    run_workload(driver, profiled, _SEED + 1, with_window=False)
    found = ask(driver, AskStats())
    return tuple(KernelTimes(str(profiled), stats.busy_s, stats.kernel_s) for stats in found)


def ask(driver: Driver, wanted: AskStats) -> list[StageStats]:
    """The stages' answers. The driver must be idle."""
    driver.ask_stage_stats(wanted)
    while (stats := driver.stage_stats) is None:
        driver.poll(_POLL_S)
    return stats
