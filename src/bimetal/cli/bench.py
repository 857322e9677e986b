"""`bimetal bench`: throughput and latency of a placement, offline."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bimetal.cli.placement import engine_options, placement_options, resolve_plan
from bimetal.units import MS_PER_S

if TYPE_CHECKING:
    from bimetal.engine.bench import Percentiles, Result, Workload
    from bimetal.engine.driver.driver import Driver


@click.command(name="bench")
@placement_options
@click.option(
    "-w",
    "--workload",
    "workloads",
    multiple=True,
    default=["8:64:64"],
    help="REQUESTS:INPUT:OUTPUT tokens; may be repeated.",
)
@click.option(
    "--passes", default=1, type=click.IntRange(1), help="Measured passes of each; the best is shown."
)
@click.option("--warm-up/--no-warm-up", default=True, help="One short pass of each workload first.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def command(
    file: Path | None, workloads: tuple[str, ...], passes: int, warm_up: bool, as_json: bool, **flags: Any
) -> None:
    """Measure FILE (a plan or fleet) or --model on the engine that `serve` runs, with random prompts.

    Example: bimetal bench --model .demo/SmolLM2-135M-Instruct --layers 17,13 --num-threads 1 -w 8:32:64
    """
    from bimetal.engine.bench import parse_workload
    from bimetal.engine.driver.driver import Driver

    parsed = [parse_workload(text) for text in workloads]
    longest = max(w.input_tokens + w.output_tokens for w in parsed)
    flags["max_model_len"] = flags["max_model_len"] or longest
    flags["max_num_seqs"] = flags["max_num_seqs"] or max(w.num_requests for w in parsed)
    driver = Driver(engine_options(resolve_plan(file, flags), flags))
    try:
        _start(driver)
        results = [_measure(driver, workload, passes, warm_up) for workload in parsed]
    finally:
        driver.stop()
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(r) for r in results], indent=2))
    else:
        _print(driver, results)


def _start(driver: Driver) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks = [bars.add_task(f"stage {i}", total=None) for i in range(len(driver.replica.stages))]
        driver.start(
            lambda loading: bars.update(
                tasks[loading.stage], completed=loading.done_bytes, total=loading.total_bytes
            )
        )


def _measure(driver: Driver, workload: Workload, passes: int, warm_up: bool) -> Result:
    from dataclasses import replace

    from bimetal.engine.bench import run_workload

    if warm_up:
        run_workload(driver, replace(workload, output_tokens=min(workload.output_tokens, 8)), seed=1)
    results = [run_workload(driver, workload, seed=2 + i) for i in range(passes)]
    return max(results, key=lambda r: r.output_tokens_per_s)


def _print(driver: Driver, results: list[Result]) -> None:
    from rich.console import Console
    from rich.table import Table

    from bimetal.units import format_s

    console = Console()
    stages = driver.replica.stages
    spans = "  ".join(f"{s.node}/{s.gpu} [{s.start_layer}, {s.end_layer})" for s in stages)
    console.print(
        f"{driver.spec.name}, {driver.dtype}, {len(stages)} stage{'s' * (len(stages) > 1)}: {spans}",
        highlight=False,
    )
    if len(stages) > 1:
        console.print(f"an idle hop takes {format_s(driver.hop_s)}", highlight=False)
    table = Table(box=None, pad_edge=False)
    for name in ("req:in:out", "out tok/s", "TTFT p50/p99", "TPOT p50/p99", "K", "busy", "boundary"):
        table.add_column(name, justify="left" if name == "req:in:out" else "right", no_wrap=True)
    for r in results:
        d = r.decode
        table.add_row(
            r.workload,
            f"{r.output_tokens_per_s:,.1f}",
            _ms(r.ttft_s),
            _ms(r.tpot_s),
            "" if d is None else str(d.num_micro_batches),
            "" if d is None else " ".join(f"{b:.2f}" for b in d.stage_busy_ratio),
            "" if d is None or len(stages) == 1 else format_s(max(d.boundary_s, 0.0)),
        )
    console.print(table)
    console.print(
        "Times in ms. K: micro-batches in flight; busy: each stage's share while all requests decode; "
        "boundary: what a round takes beyond the stages' own time.",
        style="dim",
        highlight=False,
    )


def _ms(seconds: Percentiles) -> str:
    return f"{seconds.p50 * MS_PER_S:,.1f}/{seconds.p99 * MS_PER_S:,.1f}"
