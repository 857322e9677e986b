"""Predictions and their errors as tables for people, and as a document for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bimetal.perf.estimate import ServingEstimate
from bimetal.perf.measurements import Refusal
from bimetal.perf.scores import Scored, Summary, by, summarise
from bimetal.perf.validate import Validation
from bimetal.units import format_s

TARGET_NAMES = {"tpot": "TPOT", "ttft": "TTFT", "rate": "tok/s"}


def validation_document(v: Validation) -> dict[str, Any]:
    """Plain data: groups of GPU, model and engine, totals per target, refusals per reason."""
    groups = [
        {
            "gpu": gpu,
            "model": model,
            "engine": engine,
            **{
                target: asdict(summarise(scored))
                for target, scored in by(members, lambda s: s.target).items()
            },
        }
        for (gpu, model, engine), members in by(v.scored, _group).items()
    ]
    return {
        "num_predicted": len(v.scored),
        "num_fitted": v.num_fitted,
        "num_filled_in": v.num_filled_in,
        "num_duplicates": v.num_duplicates,
        "num_refused": len(v.refusals),
        "refusals": _reasons(v.refusals),
        "totals": {
            target: asdict(summarise(scored)) for target, scored in by(v.scored, lambda s: s.target).items()
        },
        "groups": groups,
    }


def print_validation(v: Validation, console: Console | None = None) -> None:
    """Median and mean absolute error per GPU, model and engine family."""
    console = console or Console(highlight=False)
    title = "median/mean absolute error in % (numbers)"
    table = Table(box=None, pad_edge=False, title=title, title_justify="left")
    table.add_column("GPU, model, engine", overflow="fold")
    for target in TARGET_NAMES.values():
        table.add_column(target, justify="right", no_wrap=True)
    for name, members in by(v.scored, _group).items():
        table.add_row(escape(", ".join(name)), *_cells(members))
    table.add_row("all", *_cells(v.scored), style="bold")
    console.print(table)
    for target, scored in by(v.scored, lambda s: s.target).items():
        for vendor, members in by(scored, lambda s: s.vendor).items():
            s = summarise(members)
            console.print(
                f"{TARGET_NAMES[target]} {vendor}: 90% intervals cover {s.coverage_ratio:.0%}, "
                f"median width {s.median_width_ratio:.0%}"
            )
    if v.num_fitted:
        console.print(
            f"{v.num_fitted} of {len(v.scored)} numbers were part of the fit: their errors say nothing of new rows "
            "(docs/accuracy.md does)"
        )
    console.print(
        f"{v.num_duplicates} duplicate row(s) dropped; something assumed in {v.num_filled_in} row(s); "
        f"{len(v.refusals)} row(s) refused"
    )
    for reason, number in _reasons(v.refusals).items():
        console.print(f"  {number} x {escape(reason)}")


def print_estimate(e: ServingEstimate, console: Console | None = None) -> None:
    """Three numbers with intervals, and where the time goes."""
    console = console or Console(highlight=False)
    for name, p in (("TPOT", e.tpot_s), ("TTFT", e.ttft_s)):
        console.print(f"{name}   {format_s(p.value)}   (90%: {format_s(p.low)} to {format_s(p.high)})")
    rate = e.output_tokens_per_s
    console.print(f"output {rate.value:.0f} tok/s   (90%: {rate.low:.0f} to {rate.high:.0f})")
    console.print(f"{e.num_seqs:.0f} sequences decoded together; binds: {e.binds}")
    console.print("share of TPOT: " + ", ".join(f"{name} {share:.0%}" for name, share in e.shares.items()))
    console.print(f"rests on {escape(e.tpot_s.rests_on)}")


def _group(s: Scored) -> tuple[str, str, str]:
    return s.gpu, s.model, s.engine


def _cells(scored: Sequence[Scored]) -> list[str]:
    groups = by(scored, lambda s: s.target)
    return [_cell(summarise(groups[target])) if target in groups else "-" for target in TARGET_NAMES]


def _cell(s: Summary) -> str:
    return f"{s.median_error_ratio * 100:.1f}/{s.mean_error_ratio * 100:.1f} ({s.num})"


def _reasons(refusals: Sequence[Refusal]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for refusal in refusals:
        counts[refusal.reason] = counts.get(refusal.reason, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: -item[1]))
