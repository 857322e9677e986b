"""Results of `bimetal bench` as tables for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from bimetal.units import GIGA, MS_PER_S, TERA, format_bytes, format_s

if TYPE_CHECKING:
    from bimetal.engine.bench import Percentiles, Result
    from bimetal.engine.driver.driver import Driver
    from bimetal.engine.observe import KernelTimes, Observed
    from bimetal.engine.utilisation import ExpertsHit, Peaks

_ABSENT = "-"


def print_results(
    driver: Driver, results: list[Result], observed: list[Observed], peaks: list[Peaks | None]
) -> None:
    """What was measured, then how much of the hardware it used."""
    console = Console(highlight=False)
    stages = driver.replica.stages
    spans = "  ".join(f"{s.node}/{s.gpu} [{s.start_layer}, {s.end_layer})" for s in stages)
    plural = "s" * (len(stages) > 1)
    console.print(f"{driver.spec.name}, {driver.dtype}, {len(stages)} stage{plural}: {spans}")
    if len(stages) > 1:
        console.print(f"an idle hop takes {format_s(driver.hop_s)}")
    console.print(_times(results, len(stages)))
    console.print(
        "Times in ms. K: micro-batches in flight; busy: each stage's share while all requests decode; "
        "boundary: what a round takes beyond the stages' own time.",
        style="dim",
    )
    console.print(_uses(results, observed))
    console.print(f"{_against(peaks)} {_EXPLAINED}", style="dim")
    for result, each in zip(results, observed, strict=True):
        if each.experts is not None and each.experts.is_invalid:
            console.print(_invalid(result.workload, each.experts), style="bold red")
        if each.kernels is not None:
            console.print(_kernels(each.kernels))


_EXPLAINED = (
    "MBU: bytes that a decode step must move (weights used, experts hit, KV), over time and bytes/s; MFU: FLOPs of the "
    "whole run; a stage each, its idle time included."
)


def _times(results: list[Result], num_stages: int) -> Table:
    table = _table("req:in:out", "out tok/s", "TTFT p50/p99", "TPOT p50/p99", "K", "busy", "boundary")
    for r in results:
        d = r.decode
        table.add_row(
            r.workload,
            f"{r.output_tokens_per_s:,.1f}",
            _ms(r.ttft_s),
            _ms(r.tpot_s),
            "" if d is None else str(d.num_micro_batches),
            "" if d is None else " ".join(f"{b:.2f}" for b in d.stage_busy_ratio),
            "" if d is None or num_stages == 1 else format_s(max(d.boundary_s, 0.0)),
        )
    return table


def _uses(results: list[Result], observed: list[Observed]) -> Table:
    has_experts = any(each.experts is not None for each in observed)
    table = _table("req:in:out", "MBU", "MFU", "moved a step", *(("experts hit",) if has_experts else ()))
    for result, each in zip(results, observed, strict=True):
        moved = [format_bytes(use.step_bytes) if use.step_bytes else _ABSENT for use in each.stages]
        row = [
            result.workload,
            " ".join(_ratio(use.mbu_ratio) for use in each.stages),
            " ".join(_ratio(use.mfu_ratio) for use in each.stages),
            " ".join(moved),
        ]
        if each.experts is not None:
            row.append(_hit(each.experts))
        table.add_row(*row)
    return table


def _hit(experts: ExpertsHit) -> str:
    least, most = min(experts.distinct), max(experts.distinct)
    return f"{least:.2f} to {most:.2f} of {experts.num_experts} at {experts.num_rows} rows"


def _invalid(workload: str, experts: ExpertsHit) -> str:
    return (
        f"invalid run: {workload}: a layer's dummy routing hit {min(experts.distinct):.2f} of {experts.num_experts} "
        f"experts a step of {experts.num_rows} rows, so that fewer weights were read than a real model's would be; "
        "use another --seed"
    )


def _against(peaks: list[Peaks | None]) -> str:
    if all(peak is None for peak in peaks):
        return "No peaks are known of these devices: --peaks measured, or --peak-bytes-per-s and --peak-flops-per-s."
    told = [
        _ABSENT
        if peak is None
        else f"{_rate(peak.bytes_per_s, 'B/s')}, {_rate(peak.flops_per_s, 'FLOP/s')} ({peak.source})"
        for peak in peaks
    ]
    return f"Peaks: {'; '.join(told)}."


def _rate(value: float, unit: str) -> str:
    return f"{value / TERA:.2f} T{unit}" if value >= TERA else f"{value / GIGA:.1f} G{unit}"


def _kernels(kernels: tuple[KernelTimes, ...]) -> Table:
    """Time of each family, largest first, a column a stage."""
    families = dict.fromkeys(family for times in kernels for family in times.kernel_s)
    table = _table(f"profile of {kernels[0].workload}", *(f"stage {i}" for i in range(len(kernels))))
    for family in families:
        table.add_row(family, *(_share(times, times.kernel_s.get(family, 0.0)) for times in kernels))
    table.add_row("sum", *(_share(times, sum(times.kernel_s.values())) for times in kernels))
    return table


def _share(times: KernelTimes, seconds: float) -> str:
    total = sum(times.kernel_s.values())
    return f"{format_s(seconds)} {seconds / total:4.0%}" if total else _ABSENT


def _table(*names: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for i, name in enumerate(names):
        table.add_column(name, justify="right" if i else "left", no_wrap=True)
    return table


def _ratio(value: float | None) -> str:
    return _ABSENT if value is None else f"{value:.3f}"


def _ms(seconds: Percentiles) -> str:
    return f"{seconds.p50 * MS_PER_S:,.1f}/{seconds.p99 * MS_PER_S:,.1f}"
