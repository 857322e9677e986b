"""`bimetal bench`: throughput and latency of a placement, offline."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bimetal.cli.placement import engine_options, placement_options, resolve_plan

if TYPE_CHECKING:
    from bimetal.engine.bench import Result, Workload
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
@click.option("--profile", is_flag=True, help="Time of each kernel family, in a further pass of each.")
@click.option(
    "--peaks",
    default="measured",
    type=click.Choice(["measured", "datasheet"]),
    help="What MBU and MFU are shares of.",
)
@click.option("--peak-bytes-per-s", type=click.FloatRange(1), help="Of each stage's device, instead.")
@click.option("--peak-flops-per-s", type=click.FloatRange(1), help="Likewise, in the model's dtype.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def command(
    file: Path | None,
    workloads: tuple[str, ...],
    passes: int,
    warm_up: bool,
    profile: bool,
    peaks: str,
    peak_bytes_per_s: float | None,
    peak_flops_per_s: float | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """Measure FILE (a plan or fleet) or --model on the engine that `serve` runs, with random prompts.

    Example: bimetal bench --model .demo/SmolLM2-135M-Instruct --layers 17,13 --num-threads 1 -w 8:32:64
    """
    from bimetal.engine.bench import check_fits, parse_workload
    from bimetal.engine.driver.driver import Driver
    from bimetal.engine.observe import observe, stage_peaks

    parsed = [parse_workload(text) for text in workloads]
    longest = max(w.input_tokens + w.output_tokens for w in parsed)
    flags["max_model_len"] = flags["max_model_len"] or longest
    flags["max_num_seqs"] = flags["max_num_seqs"] or max(w.num_requests for w in parsed)
    driver = Driver(engine_options(resolve_plan(file, flags), flags))
    for workload in parsed:
        check_fits(driver, workload)
    try:
        _start(driver)
        reached = stage_peaks(driver, peaks, peak_bytes_per_s, peak_flops_per_s)
        results = []
        observed = []
        for workload in parsed:
            results.append(_measure(driver, workload, passes, warm_up))
            observed.append(observe(driver, workload, results[-1], reached, profile))
    finally:
        driver.stop()
    if as_json:
        peak_fields = [None if peak is None else dataclasses.asdict(peak) for peak in reached]
        documents = [
            {**dataclasses.asdict(result), **dataclasses.asdict(seen), "peaks": peak_fields}
            for result, seen in zip(results, observed, strict=True)
        ]
        click.echo(json.dumps(documents, indent=2))
    else:
        from bimetal.cli.bench_table import print_results

        print_results(driver, results, observed, reached)


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
