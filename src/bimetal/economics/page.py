"""An analysis as one page: tables and charts with everything inlined, so that it opens anywhere without network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from textwrap import wrap

import numpy as np
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from bimetal.economics.analysis import Analysis, Decision
from bimetal.economics.caveats import conventions, doubts
from bimetal.economics.page_tables import break_evens, inputs, rents, savings, totals
from bimetal.economics.tco import by_level

COLOURS = ("#2a78d6", "#d9622b", "#3a9d5d", "#8a5cc2", "#b5892b", "#5f6b7a")
LEVELS = {
    "chip": "chips",
    "system": "rest of the system",
    "running": "running costs",
    "resale": "resale",
    "revenue": "revenue",
}
NUM_BINS = 60
LINE_CHARS = 16
TORNADO_ROWS = 8
STYLE = """
*{box-sizing:border-box}
body{font:16px/1.45 system-ui,sans-serif;margin:0 auto;max-width:1200px;padding:16px;color:#1c2733;background:#fff}
h1{font-size:1.5rem;margin:.2em 0}h2{font-size:1.05rem;margin:0 0 .3em}ul{padding-left:1.2em}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,480px),1fr));gap:16px}
section{min-width:0;border:1px solid #d8dee6;border-radius:8px;padding:12px;overflow:hidden}
.scroll{overflow-x:auto}table{border-collapse:collapse;margin:.5em 0 1em}
td,th{padding:4px 12px 4px 0;text-align:right;white-space:nowrap;border-bottom:1px solid #e6eaef}
td:first-child,th:first-child{text-align:left}
details{margin:1em 0}.doubt{color:#a5480a;overflow-wrap:anywhere}
"""

RESIZE = "<script>addEventListener('load',()=>dispatchEvent(new Event('resize')))</script>"
"""Charts are drawn while the page grows; its scroll bar then narrows them."""


def render_page(analysis: Analysis) -> str:
    """HTML; amounts in the first scenario's currency."""
    currency = analysis.scenarios[0].file.currency
    charts = [
        ("NPV by kind of cost", _levels(analysis)),
        ("Cost by year", _years(analysis)),
        (
            f"{currency.name} per million output tokens",
            _histograms(_per_million(analysis), analysis.names, ""),
        ),
    ]
    for d in analysis.decisions:
        saving = d.drawn.per_token_ratio if analysis.per_token else d.drawn.tco_ratio
        unit = "per token" if analysis.per_token else "on TCO"
        against = f"{d.name} against {analysis.names[0]}"
        charts.append((f"Saving {unit}: {against}", _histograms([saving], [d.name], ".0%")))
        if d.swings:
            charts.append((f"What moves the saving {unit}: {against}", _tornado(d)))
    if any(r.break_even_utilisation for r in analysis.rent_or_own):
        charts.append(("Utilisation above which owning beats on-demand rental", _rent_or_own(analysis)))
    title = escape(", ".join(s.file.name for s in analysis.scenarios))
    about = "".join(f"<p>{escape(s.file.about)}</p>" for s in analysis.scenarios)
    said = "".join(f"<li>{escape(x)}</li>" for x in conventions(analysis))
    said += "".join(f'<li class="doubt">{escape(x)}</li>' for x in doubts(analysis))
    blocks = "".join(
        f"<section><h2>{escape(name)}</h2>{figure.to_html(full_html=False, include_plotlyjs=False, config=_CONFIG)}</section>"
        for name, figure in charts
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>TCO: {title}</title><style>{STYLE}</style><script>{get_plotlyjs()}</script></head><body>"
        f"<h1>{title}</h1>{about}<ul>{said}</ul>{totals(analysis)}{savings(analysis)}"
        f'<div class="charts">{blocks}</div>{break_evens(analysis)}{rents(analysis)}'
        f"<details><summary>Inputs and sources</summary>{inputs(analysis)}</details>{RESIZE}</body></html>\n"
    )


_CONFIG = {"responsive": True, "displaylogo": False, "displayModeBar": False}


def _figure(traces: Sequence[object], height: int = 340, **layout: object) -> go.Figure:
    figure = go.Figure(list(traces))
    figure.update_layout(
        template="plotly_white",
        height=height,
        margin={"l": 8, "r": 8, "t": 8, "b": 8},
        legend={"orientation": "h", "y": -0.15, "yanchor": "top", "x": 0},
        colorway=COLOURS,
        **layout,
    )
    figure.update_xaxes(automargin=True)
    figure.update_yaxes(automargin=True)
    return figure


def _levels(analysis: Analysis) -> go.Figure:
    per_usd = analysis.scenarios[0].file.currency.per_usd
    found = [by_level(tco) for tco in analysis.central]
    bars = [
        go.Bar(
            name=label,
            orientation="h",
            y=[_wrapped(name) for name in analysis.names],
            x=[float(f.get(level, 0.0)) * per_usd for f in found],
        )
        for level, label in LEVELS.items()
        if level != "revenue" or any(tco.earns for tco in analysis.central)
    ]
    figure = _figure(bars, height=160 + 60 * len(found), barmode="relative")
    figure.update_yaxes(autorange="reversed")
    return figure


def _wrapped(name: str) -> str:
    """In lines that leave a phone's width to the bars; Plotly takes a name for HTML."""
    return "<br>".join(escape(line) for line in wrap(name, LINE_CHARS))


def _years(analysis: Analysis) -> go.Figure:
    per_usd = analysis.scenarios[0].file.currency.per_usd
    bars = []
    for name, tco in zip(analysis.names, analysis.central, strict=True):
        usd = tco.yearly_usd() * per_usd
        bars.append(
            go.Bar(
                name=_wrapped(name), x=["today", *(f"year {y}" for y in range(1, len(usd)))], y=usd.tolist()
            )
        )
    return _figure(bars, barmode="group")


def _per_million(analysis: Analysis) -> list[object]:
    return [
        t.usd_per_million_output_tokens * analysis.scenarios[0].file.currency.per_usd for t in analysis.drawn
    ]


def _histograms(results: Sequence[object], names: Sequence[str], percent: str) -> go.Figure:
    """Shares of the draws, over bins that all results share; counted here, so that the page stays small."""
    drawn = [np.atleast_1d(np.asarray(r, dtype=np.float64)) for r in results]
    low, high = min(float(d.min()) for d in drawn), max(float(d.max()) for d in drawn)
    edges = np.linspace(low, high if high > low else low + max(abs(low), 1.0) * 0.01, NUM_BINS + 1)
    middles = ((edges[:-1] + edges[1:]) / 2).tolist()
    lines = [
        go.Scatter(
            name=_wrapped(name), x=middles, y=(np.histogram(d, edges)[0] / len(d)).tolist(), mode="lines", line_shape="hvh",
            fill="tozeroy",
        )
        for name, d in zip(names, drawn, strict=True)
    ]  # fmt: skip
    figure = _figure(lines, showlegend=True)
    figure.update_xaxes(tickformat=percent)
    figure.update_yaxes(tickformat=".0%", title="share of draws")
    return figure


def _tornado(decision: Decision) -> go.Figure:
    swings = decision.swings[:TORNADO_ROWS][::-1]
    names = [s.name.removeprefix("gpus.").replace(".", "<br>") for s in swings]
    bars = [
        go.Bar(
            name=label,
            orientation="h",
            y=names,
            base=[min(s.at_low, s.at_high) if first else (s.at_low + s.at_high) / 2 for s in swings],
            x=[s.width / 2 for s in swings],
            customdata=[[s.input_low, s.input_high, s.at_low, s.at_high] for s in swings],
            hovertemplate="input %{customdata[0]:.4g} to %{customdata[1]:.4g}<br>"
            "saving %{customdata[2]:.1%} to %{customdata[3]:.1%}<extra></extra>",
        )
        for first, label in ((True, "lower half"), (False, "upper half"))
    ]
    figure = _figure(bars, height=120 + 44 * len(swings), barmode="overlay", showlegend=False)
    figure.update_xaxes(tickformat=".0%", nticks=6)
    return figure


def _rent_or_own(analysis: Analysis) -> go.Figure:
    known = [(r.gpu, r.break_even_utilisation) for r in analysis.rent_or_own if r.break_even_utilisation]
    bar = go.Bar(
        x=[gpu for gpu, _ in known],
        y=[s.p50 for _, s in known],
        error_y={
            "type": "data",
            "symmetric": False,
            "array": [s.p90 - s.p50 for _, s in known],
            "arrayminus": [s.p50 - s.p10 for _, s in known],
        },
    )
    figure = _figure([bar], showlegend=False)
    figure.add_hline(y=1.0, line_dash="dot")
    figure.update_yaxes(tickformat=".0%", rangemode="tozero")
    return figure
