"""The audit as a table for people, as Markdown and as plain data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bimetal.economics.audit import Judgement
from bimetal.economics.judged import ASSERTION, JudgedClaim
from bimetal.economics.quantity import number

VERDICTS = ("holds", "holds only if", "does not hold", ASSERTION)


def _found(j: Judgement) -> str:
    low, high = j.recomputed_range
    text = number(j.recomputed)
    if high - low > 1e-9 * abs(j.recomputed):
        text += f" ({number(low)} to {number(high)})"
    return f"{text} {j.check.unit}".strip() + (", modelled" if j.check.is_model else "")


def _wanted(j: Judgement) -> str:
    return f"{j.check.relation} {number(j.check.target)}"


def _flip(j: Judgement) -> str:
    return "at no value" if j.break_even is None else f"{j.check.lever} = {number(j.break_even)}"


def summary(judged: Sequence[JudgedClaim]) -> str:
    """How many readings came out how."""
    readings = Counter(
        next(v for v in ("holds only if", "does not hold", "holds") if j.verdict.startswith(v))
        for c in judged
        for j in c.readings
    )
    assertions = sum(not c.readings for c in judged)
    counted = ", ".join(f"{readings[v]} {v}" for v in VERDICTS[:3])
    return (
        f"{len(judged)} claims; {sum(readings.values())} readings of {len(judged) - assertions} of them: {counted}; "
        f"{assertions} claims cannot be computed"
    )


def print_audit(judged: Sequence[JudgedClaim], explain: bool = False, console: Console | None = None) -> None:
    """One row a reading; with `explain` its formula, inputs and sources below."""
    console = console or Console(highlight=False)
    table = Table(box=None, pad_edge=False)
    for name in ("claim", "reading", "recomputed", "claimed", "verdict", "flips at"):
        table.add_column(name, overflow="fold")
    for c in judged:
        if not c.readings:
            table.add_row(c.claim.id, escape(c.claim.text), "", "", ASSERTION, escape(c.settled_by))
        for j in c.readings:
            cells = (c.claim.id, j.check.reading, _found(j), _wanted(j), j.verdict, _flip(j))
            table.add_row(*(escape(cell) for cell in cells))
    console.print(table)
    if explain:
        for j in (j for c in judged for j in c.readings):
            console.print(escape(f"{j.check.claim}, {j.check.reading}: {j.check.formula}"), style="bold")
            for name, given in j.check.inputs.items():
                console.print(escape(f"    {name} = {number(given.value)} ({given.source})"))
    console.print(summary(judged))


def audit_document(judged: Sequence[JudgedClaim]) -> list[dict[str, Any]]:
    return [
        {
            "claim": c.claim.id,
            "topic": c.claim.topic,
            "text": c.claim.text,
            "verdict": "" if c.readings else ASSERTION,
            "settled_by": c.settled_by,
            "readings": [
                {
                    "reading": j.check.reading,
                    "formula": j.check.formula,
                    "inputs": {
                        name: {"value": g.value, "low": g.low, "high": g.high, "source": g.source}
                        for name, g in j.check.inputs.items()
                    },
                    "recomputed": j.recomputed,
                    "claimed": f"{j.check.relation} {j.check.target:g}",
                    "verdict": j.verdict,
                    "lever": j.check.lever,
                    "break_even": j.break_even,
                    "is_model": j.check.is_model,
                }
                for j in c.readings
            ],
        }
        for c in judged
    ]


def audit_markdown(judged: Sequence[JudgedClaim]) -> str:
    """docs/audit.md: the table, then formula, inputs and sources of every reading."""
    lines = [
        "# The case for mixing vendors, claim by claim",
        "",
        "Written by `bimetal tco audit -o docs/audit.md`; do not edit. A claim *holds* if it is met over the whole plausible",
        "range of its lever, *does not hold* if it is met nowhere in it, and otherwise *holds only if* the lever lies beyond",
        "the break-even. *Flips at* is the lever's value nearest to today's at which the verdict would change. Where the",
        "recomputed figure is *modelled*, the performance model answered, with its 90% interval: a model, not a measurement.",
        "",
        f"{summary(judged)}.",
        "",
        "| claim | reading | recomputed | claimed | verdict | flips at |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for c in judged:
        if not c.readings:
            lines.append(
                _row(f"{c.claim.id} {c.claim.text}", "", "", "", ASSERTION, f"settled by {c.settled_by}")
            )
        for i, j in enumerate(c.readings):
            name = f"{c.claim.id} {c.claim.text}" if i == 0 else c.claim.id
            lines.append(_row(name, j.check.reading, _found(j), _wanted(j), f"**{j.verdict}**", _flip(j)))
    lines += ["", "## Formulas, inputs and sources", ""]
    for j in (j for c in judged for j in c.readings):
        lines.append(f"- {j.check.claim}, {j.check.reading}: `{j.check.formula}`")
        for name, g in j.check.inputs.items():
            span = f" ({number(g.low)} to {number(g.high)})" if g.high > g.low else ""
            lines.append(f"    - `{name}` = {number(g.value)}{span}: {g.source}")
    return "\n".join(lines) + "\n"


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"
