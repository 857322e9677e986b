"""A fleet decision as one page that opens anywhere without network: the front of cost against latency, and the alternatives."""

from __future__ import annotations

import math
from html import escape

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from bimetal.planner.decision import Decision
from bimetal.units import MS_PER_S

COLOURS = ("#2a78d6", "#d9622b", "#3a9d5d", "#8a5cc2", "#b5892b", "#5f6b7a")
STYLE = """
*{box-sizing:border-box}
body{font:16px/1.45 system-ui,sans-serif;margin:0 auto;max-width:1000px;padding:16px;color:#1c2733;background:#fff}
h1{font-size:1.5rem}section{border:1px solid #d8dee6;border-radius:8px;padding:12px;margin:1em 0;overflow:hidden}
.scroll{overflow-x:auto}table{border-collapse:collapse}
td,th{padding:4px 12px 4px 0;text-align:right;white-space:nowrap;border-bottom:1px solid #e6eaef}
td:first-child,th:first-child{text-align:left}
"""


def render_page(decision: Decision) -> str:
    """HTML with everything inlined."""
    verdict = "".join(f"<li>{escape(line)}</li>" for line in decision.verdict)
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
        f"<h1>Fleet plan: {escape(decision.chosen)}</h1><ul>{verdict}</ul><h2>Replicas</h2><ul>{replicas}</ul>"
        f"<div class=scroll>{_table(decision)}</div>{sections}</html>"
    )


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
    stock = decision.planner.demand.stock
    rows = []
    for a in decision.alternatives:
        beyond = decision.goes_beyond(a)
        if a.plan is None:
            rows.append(f"<tr><td>{escape(a.name)}<td colspan=4>{escape('; '.join(a.reasons))}")
            continue
        gpus = " + ".join(f"{n} {e.label}" for e, n in zip(stock, a.plan.gpus, strict=True) if n)
        chance = decision.chance_cheaper(a)
        rows.append(
            f"<tr><td>{escape(a.name)}{f' ({beyond})' if beyond else ''}<td>{escape(gpus)}"
            f"<td>{a.plan.usd_per_h:.2f}<td>{_dollars(a.plan.usd_per_million_tokens)}"
            f"<td>{'' if chance is None else f'{chance:.0%}'}"
        )
    head = "<tr><th>plan<th>GPUs<th>$/h<th>$/Mtok<th>chance that the chosen one is cheaper"
    return f"<table>{head}{''.join(rows)}</table>"


def _dollars(value: float) -> str:
    """Nothing per token where no tokens are asked for."""
    return f"{value:.3f}" if math.isfinite(value) else "-"
