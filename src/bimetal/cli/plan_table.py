"""A plan as a table for people, within 80 columns."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bimetal.plan import Plan
from bimetal.units import format_bytes, format_s

COLUMNS = (
    *(("#", "right"), ("node", "left"), ("device", "left"), ("layers", "right"), ("weights", "right")),
    *(("KV tokens", "right"), ("step", "right"), ("share", "right"), ("binds", "left")),
)


def print_plan(plan: Plan, console: Console | None = None) -> None:
    """One row a stage: what it holds, how long its micro-batch takes, its share of the chain, what binds."""
    console = console or Console(highlight=False)
    for replica in plan.replicas:
        table = Table(title=f"{plan.model}, {plan.dtype}", title_justify="left", box=None, pad_edge=False)
        for title, justify in COLUMNS:
            table.add_column(title, justify=justify, overflow="fold")  # type: ignore[arg-type]
        total = sum(stage.prediction.step_s for stage in replica.stages if stage.prediction)
        for i, stage in enumerate(replica.stages):
            predicted = stage.prediction
            count = f"{stage.tensor_parallel}x" if stage.tensor_parallel > 1 else ""
            cells = [str(i), stage.node, count + stage.gpu, f"{stage.start_layer}:{stage.end_layer}"]
            if predicted is None:
                cells += ["-"] * 5
            else:
                share = f"{predicted.step_s / total:.0%}"
                cells += [format_bytes(predicted.weight_bytes), str(predicted.kv_capacity_tokens)]
                cells += [format_s(predicted.step_s), share, predicted.binds]
            table.add_row(*(escape(cell) for cell in cells))
        console.print(table)
    if plan.predicted_output_tokens_per_s is not None:
        console.print(f"predicted: {plan.predicted_output_tokens_per_s:.0f} output tok/s, decoding")
    for reason in plan.reasons:
        console.print(f"- {escape(reason)}")
    if not any("unverified" in reason for reason in plan.reasons):
        console.print("- every device figure that this uses has a source in the catalogue or the fleet file")
