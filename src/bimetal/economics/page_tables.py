"""The page's tables: totals, savings on every level, break-evens, rent or own, and every input with its source."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

from bimetal.economics.analysis import Analysis
from bimetal.economics.cash_flow import Amount
from bimetal.economics.quantity import number
from bimetal.economics.uncertainty import Spread, spread
from bimetal.units import MEGA

LEVELS = (
    ("chip_ratio", "on chips"),
    ("system_ratio", "on systems"),
    ("tco_ratio", "on TCO"),
    ("per_token_ratio", "per token"),
)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """HTML that scrolls sideways where it must; cells are escaped."""

    def row(tag: str, cells: Sequence[str]) -> str:
        return f"<tr>{''.join(f'<{tag}>{escape(c)}</{tag}>' for c in cells)}</tr>"

    body = "".join(row("td", cells) for cells in rows)
    return f'<div class="scroll"><table>{row("th", head)}{body}</table></div>'


def totals(analysis: Analysis) -> str:
    currency = analysis.scenarios[0].file.currency
    rows = []
    for name, tco in zip(analysis.names, analysis.drawn, strict=True):
        millions = (tco.chip_usd, tco.system_usd, tco.npv_usd)
        amounts = [*(x / MEGA for x in millions), tco.usd_per_million_output_tokens]
        rows.append([name, *(_range(spread(x * currency.per_usd), ",.3f") for x in amounts)])
    heads = ("chips, million", "systems, million", "TCO, million", "per million output tokens")
    return table(["median [p10, p90]", *(f"{head}, {currency.name}" for head in heads)], rows)


def savings(analysis: Analysis) -> str:
    """Nothing where there is one fleet."""
    rows = []
    for d in analysis.decisions:
        cells = [_percent(getattr(d.drawn, key)) for key, _ in LEVELS]
        rows.append([d.name, *cells, _percent(d.drawn.tokens_ratio)])
    heads = [f"saving against {analysis.names[0]}", *(label for _, label in LEVELS), "tokens delivered"]
    return table(heads, rows) if rows else ""


def break_evens(analysis: Analysis) -> str:
    unit = "per token" if analysis.per_token else "on TCO"
    rows = [
        [
            d.name,
            b.name,
            number(b.now),
            " and ".join(map(number, b.at)) or f"none in {number(b.low)} to {number(b.high)}",
        ]
        for d in analysis.decisions
        for b in d.break_evens
    ]
    heads = [f"costs what {analysis.names[0]} does, {unit}", "input", "now", "break-even"]
    return table(heads, rows) if rows else ""


def rents(analysis: Analysis) -> str:
    """Where a scenario asks whether to rent or own."""
    rows = [
        [
            r.gpu,
            r.verdict,
            r.missing or _range(r.break_even_utilisation, ".0%"),
            _range(r.own_usd_per_h, ".2f"),
            str(r.on_demand_usd_per_h or "-"),
            _range(r.reserved_usd_per_h, ".2f"),
            " to ".join(f"{x:.2f}" for x in r.published_own_usd_per_h or ()) or "-",
        ]
        for r in analysis.rent_or_own
    ]
    prices = ("own, every hour", "on demand", "reserved", "others' published TCO, a cross-check")
    heads = ["USD an hour", "owning is cheaper above", "median [p10, p90]", *prices]
    return table(heads, rows) if rows else ""


def inputs(analysis: Analysis) -> str:
    rows = (
        (label, name, str(q), q.date, q.source)
        for label, s in zip(analysis.labels, analysis.scenarios, strict=True)
        for name, q in s.quantities.items()
    )
    return table(["scenario", "input", "value", "date", "source"], rows)


def _percent(ratios: Amount) -> str:
    return _range(spread(ratios), ".1%")


def _range(s: Spread | None, form: str) -> str:
    if s is None or not math.isfinite(s.p50):
        return "-"
    if s.p90 - s.p10 <= 1e-9 * abs(s.p50):
        return format(s.p50, form)
    return f"{s.p50:{form}} [{s.p10:{form}}, {s.p90:{form}}]"
