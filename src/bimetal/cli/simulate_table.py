"""A simulation's results as tables for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bimetal.simulate.run import PERCENTILES, ClassResult, Simulation
from bimetal.simulate.usage import GpuUsage
from bimetal.units import format_s


def print_simulation(
    run: Simulation, results: Sequence[ClassResult], usage: Sequence[GpuUsage], console: Console | None = None
) -> None:
    """What clients see, then what the GPUs did."""
    console = console or Console(highlight=False)
    table = Table(box=None, pad_edge=False)
    table.add_column("class")
    for title in ("requests", "", *(f"p{p}" for p in PERCENTILES)):
        table.add_column(title, justify="right")
    for result in results:
        for label, values in (("TTFT", result.ttft_s), ("TPOT", result.tpot_s)):
            head = (escape(result.name), str(result.num_requests)) if label == "TTFT" else ("", "")
            table.add_row(*head, label, *(format_s(values[p]) for p in PERCENTILES))
    console.print(table)
    for result in results:
        console.print(
            f"{escape(result.name)}: {result.output_tokens_per_s:.0f} output tok/s, goodput "
            f"{result.goodput_tokens_per_s:.0f}, {result.met_ratio:.1%} of requests within their limits"
        )
    console.print(f"{run.makespan_s:.1f} s simulated, {run.num_preemptions} pre-emption(s)")
    for use in usage:
        cost = "no price" if use.cost_usd is None else f"${use.cost_usd:.2f}"
        console.print(
            f"{use.number} x {escape(use.gpu)}: busy {use.busy_ratio:.0%}, idle {use.idle_s:.0f} GPU-seconds, {cost}"
        )
