"""A fleet decision as one page that opens anywhere without network: the front of cost against latency, and the alternatives."""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import date
from html import escape

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from bimetal.cli.plan_words import (
    LEGEND,
    basis_lines,
    demand_line,
    gpu_words,
    latencies,
    marked_name,
    run_lines,
)
from bimetal.planner.decision import Decision
from bimetal.units import KILO, MS_PER_S

COLOURS = ("#2a78d6", "#d9622b", "#3a9d5d", "#8a5cc2", "#b5892b", "#5f6b7a")
STYLE = """
*{box-sizing:border-box}
body{font:16px/1.45 system-ui,sans-serif;margin:0 auto;max-width:1000px;padding:16px;color:#1c2733;background:#fff}
h1{font-size:1.5rem}section{border:1px solid #d8dee6;border-radius:8px;padding:12px;margin:1em 0;overflow:hidden}
.scroll{overflow-x:auto}table{border-collapse:collapse}
td,th{padding:4px 12px 4px 0;text-align:right;white-space:nowrap;border-bottom:1px solid #e6eaef}
td:first-child,th:first-child{text-align:left}
"""


def render_page(decision: Decision, planned_on: date) -> str:
    """HTML with everything inlined."""
    asked = _items(demand_line(t) for t in decision.planner.traffic)
    verdict = _items([*decision.verdict, *run_lines(decision)])
    basis = _items(basis_lines(decision))
    lacking = _items(f"{a.name}: {reason}" for a in decision.alternatives if a.plan for reason in a.reasons)
    replicas = "".join(
        f"<li>{group.number} x {escape(group.template.kind)}: {escape(group.template.label)}</li>"
        for group in decision.plan.groups
    )
    charts = [("Dollars per million output tokens, 90% of draws", _prices(decision))]
    if decision.front:
        charts.insert(0, ("Cost against latency, every point solved", _front(decision)))
    sections = "".join(
        f"<section><h2>{escape(title)}</h2>"
        f"{figure.to_html(full_html=False, include_plotlyjs=False, config={'responsive': True})}</section>"
        for title, figure in charts
    )
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>Fleet plan</title><style>{STYLE}</style><script>{get_plotlyjs()}</script>"
        f"<h1>Fleet plan: {escape(decision.chosen)}</h1><p>Planned on {planned_on.isoformat()}: "
        f"{escape(gpu_words(decision, decision.plan))}</p><h2>Asked for</h2><ul>{asked}</ul><h2>Verdict</h2><ul>{verdict}</ul>"
        f"<h2>Replicas</h2><ul>{replicas}</ul><h2>Compared</h2><div class=scroll>{_table(decision)}</div><p>{escape(LEGEND)}</p><ul>{lacking}</ul>"
        f"<h2>Prices and speeds</h2><ul>{basis}</ul>{sections}</html>"
    )


def _items(lines: Iterable[str]) -> str:
    return "".join(f"<li>{escape(line)}</li>" for line in lines)


def _front(decision: Decision) -> go.Figure:
    points = [p for p in decision.front if p.usd_per_million_tokens is not None]
    figure = go.Figure()
    figure.add_scatter(
        x=[p.tpot_p99_s * MS_PER_S for p in points],
        y=[p.usd_per_million_tokens for p in points],
        mode="lines+markers",
        line={"shape": "vh", "color": COLOURS[0]},
        text=[", ".join(p.kinds) for p in points],
        hovertemplate="TPOT p99 %{x:.0f} ms: $%{y:.3f}/Mtok<br>%{text}<extra></extra>",
        name="cheapest plan",
    )
    figure.update_layout(
        xaxis_title="strictest TPOT p99 limit, ms (all limits scaled together)",
        yaxis_title="$ per million output tokens",
        margin={"l": 60, "r": 10, "t": 10, "b": 50},
        yaxis_rangemode="tozero",
    )
    return figure


def _prices(decision: Decision) -> go.Figure:
    figure = go.Figure()
    for colour, a in zip(COLOURS, [a for a in decision.alternatives if a.prices], strict=False):
        assert a.prices is not None  # filtered above
        figure.add_box(y=a.prices.usd_per_million_tokens, name=a.name, marker_color=colour)
    figure.update_layout(
        yaxis_title="$ per million output tokens served",
        showlegend=False,
        margin={"l": 60, "r": 10, "t": 10, "b": 50},
    )
    return figure


def _table(decision: Decision) -> str:
    rows = []
    for a in decision.alternatives:
        name = escape(marked_name(decision, a))
        if a.plan is None:
            rows.append(f"<tr><td>{name}<td colspan=8>{escape('; '.join(a.reasons))}")
            continue
        chance = decision.chance_cheaper(a)
        per_million = a.plan.usd_per_million_tokens
        goodput, ttft, tpot = latencies(decision, a.plan)
        cells = (
            gpu_words(decision, a.plan),
            f"{a.plan.usd_per_h:.2f}",
            f"{per_million:.3f}" if math.isfinite(per_million) else "-",
            *(goodput, ttft, tpot, f"{a.plan.watts / KILO:.0f}"),
            "" if chance is None else f"{chance:.0%}",
        )
        rows.append(f"<tr><td>{name}{''.join(f'<td>{escape(cell)}' for cell in cells)}")
    head = (
        "<tr><th>plan<th>GPUs<th>$/h<th>$/Mtok<th>goodput, tok/s<th>TTFT p50/p99<th>TPOT p50/p99<th>kW"
        "<th>chance that the chosen one is cheaper"
    )
    return f"<table>{head}{''.join(rows)}</table>"
