"""An analysis as plain data and as CSV, for programs. Amounts are in the scenario's currency."""

from __future__ import annotations

import csv
import io
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from bimetal.economics.analysis import Analysis
from bimetal.economics.cash_flow import Amount
from bimetal.economics.caveats import conventions, doubts
from bimetal.economics.scenario import Scenario
from bimetal.economics.tco import Comparison, Tco, returns
from bimetal.economics.uncertainty import spread


@dataclass(frozen=True, slots=True)
class Total:
    """A figure of a fleet: its attribute in USD, its key where it is in the scenario's currency, and its label."""

    attribute: str
    key: str
    label: str
    needs_revenue: bool = False


_TOTALS = (
    Total("chip_usd", "chips", "chips"),
    Total("system_usd", "systems", "systems (CapEx)"),
    Total("npv_usd", "tco", "TCO (NPV)"),
    Total("annualised_usd", "tco_a_year", "TCO a year"),
    Total("usd_per_million_output_tokens", "per_million_output_tokens", "per million output tokens"),
    Total("revenue_usd", "revenue", "revenue (present value)", needs_revenue=True),
    Total("profit_usd", "profit", "revenue less TCO", needs_revenue=True),
)
SAVINGS = (
    ("chip_ratio", "on chips"),
    ("system_ratio", "on systems"),
    ("tco_ratio", "on TCO"),
    ("per_token_ratio", "per token"),
)


def totals(tco: Tco) -> list[Total]:
    """Those that the fleet has."""
    return [total for total in _TOTALS if tco.earns or not total.needs_revenue]


def scenario_of(analysis: Analysis, fleet: int) -> Scenario:
    """The scenario that fleet number `fleet` comes from."""
    owners = [s for s in analysis.scenarios for _ in s.file.fleets]
    return owners[fleet]


def analysis_document(analysis: Analysis) -> dict[str, Any]:
    """Amounts are in `currency`, inputs and rents an hour in USD."""
    currency = analysis.scenarios[0].file.currency
    return {
        "currency": {"name": currency.name, "per_usd": currency.per_usd},
        "compared_per": analysis.scenarios[0].file.compare_per,
        "conventions": conventions(analysis),
        "doubts": doubts(analysis),
        "fleets": [
            {
                "name": name,
                **{t.key: _spread(getattr(tco, t.attribute), currency.per_usd) for t in totals(tco)},
                "at_median_inputs": {
                    t.key: float(getattr(analysis.central[i], t.attribute)) * currency.per_usd
                    for t in totals(tco)
                },
                **asdict(returns(analysis.central[i])),
                "output_tokens_per_year": np.atleast_2d(tco.tokens).mean(axis=0).tolist(),
                "rows": _rows(analysis, i),
            }
            for i, (name, tco) in enumerate(zip(analysis.names, analysis.drawn, strict=True))
        ],
        "decisions": [
            {
                "fleet": d.name,
                "savings": _comparison(d.drawn, currency.per_usd),
                **asdict(d.returns),
                "tornado": [asdict(s) for s in d.swings],
                "break_evens": [{**asdict(b), "at": list(b.at)} for b in d.break_evens],
                "indifferent_to": list(d.indifferent_to),
            }
            for d in analysis.decisions
        ],
        "rent_or_own": [
            {
                "gpu": r.gpu,
                "verdict": r.verdict,
                "break_even_utilisation": asdict(r.break_even_utilisation)
                if r.break_even_utilisation
                else None,
                "own_usd_per_h": asdict(r.own_usd_per_h) if r.own_usd_per_h else None,
                "reserved_usd_per_h": asdict(r.reserved_usd_per_h) if r.reserved_usd_per_h else None,
                "published_own_usd_per_h": r.published_own_usd_per_h,
                "missing": r.missing,
            }
            for r in analysis.rent_or_own
        ],
        "second_sources": {
            s.scenario: {
                key: {p: x * currency.per_usd for p, x in asdict(cost).items()}
                for key, cost in (
                    ("without", s.without_usd),
                    ("with", s.with_usd),
                    ("worth", s.worth_usd),
                )
            }
            for s in analysis.second_sources
        },
        "placement": [
            {
                "work": p.rule.work,
                "gpu": p.rule.gpu,
                "instead": p.rule.instead,
                "latency_limit_s": p.rule.latency_limit_s,
                "per_million_tokens": {k: x * currency.per_usd for k, x in asdict(p.usd_per_million).items()},
                "broken_ratio": asdict(p.broken_ratio),
                "batches": [asdict(b) for b in p.batches],
            }
            for p in analysis.placed
        ],
        "inputs": {
            label: {
                name: {"value": str(q), "median": q.central, "source": q.source, "date": q.date}
                for name, q in s.quantities.items()
            }
            for label, s in zip(analysis.labels, analysis.scenarios, strict=True)
        },
    }


def _spread(amount: Amount, factor: float) -> dict[str, float]:
    return {key: value * factor for key, value in asdict(spread(amount)).items()}


def _comparison(c: Comparison, per_usd: float) -> dict[str, dict[str, float]]:
    arrays = {f.name: getattr(c, f.name) for f in fields(c)}
    return {
        name.removesuffix("_usd"): _spread(a, per_usd if name.endswith("_usd") else 1.0)
        for name, a in arrays.items()
        if np.all(np.isfinite(a))
    }


def _rows(analysis: Analysis, fleet: int) -> list[dict[str, Any]]:
    tco, scenario = analysis.drawn[fleet], scenario_of(analysis, fleet)
    per_usd = analysis.scenarios[0].file.currency.per_usd
    return [
        {
            "row": line.label,
            "level": line.level,
            "npv": _spread(npv, per_usd),
            "formula": line.formula,
            "inputs": explain_inputs(scenario, line.inputs, tco),
        }
        for line, npv in _with_npv(tco)
    ]


def _with_npv(tco: Tco) -> list[tuple[Any, Amount]]:
    return [(line, line.npv_usd(tco.fleet.conventions.wacc_ratio)) for line in tco.lines]


def explain_inputs(scenario: Scenario, names: tuple[str, ...], tco: Tco) -> list[dict[str, str]]:
    """Value, source and date of each input of a row; a fleet's own inputs are under its name.

    Discounts stand below the price that they are off. Inputs left at their default are left out, but for a row's first.
    """
    paths = [path for name in names for path in _paths(scenario, name, tco)]
    return [
        {"input": path, "value": str(q), "source": q.source or "default", "date": q.date or "undated"}
        for i, path in enumerate(paths)
        if (q := scenario.quantities.get(path)) and (i == 0 or q.source != "default")
    ]


def _paths(scenario: Scenario, name: str, tco: Tco) -> list[str]:
    *at, last = name.split(".")
    if not at:
        return [f"fleets.{tco.fleet.name}.{name}"]
    on = {"price_usd": "price", "on_demand_usd_per_h": "on-demand", "reserved_usd_per_h": "reserved"}.get(
        last
    )
    if on is None or at[0] != "gpus":
        return [name]
    discounts = scenario.file.gpus[at[1]].discounts
    return [name, *(f"gpus.{at[1]}.discounts.{d.name}.ratio" for d in discounts if d.applies_to == on)]


def analysis_csv(analysis: Analysis) -> str:
    """One record a row and fleet."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    currency = analysis.scenarios[0].file.currency.name
    columns = [f"npv_{p}_{currency.lower()}" for p in ("p10", "p50", "p90")]
    writer.writerow(["fleet", "row", "level", *columns, "formula", "inputs", "sources", "price_dates"])
    for i, name in enumerate(analysis.names):
        for row in _rows(analysis, i):
            inputs = row["inputs"]
            cells = ["; ".join(x[key] for x in inputs) for key in ("source", "date")]
            named = "; ".join(f"{x['input']} = {x['value']}" for x in inputs)
            npv = [f"{row['npv'][p]:.2f}" for p in ("p10", "p50", "p90")]
            writer.writerow([name, row["row"], row["level"], *npv, row["formula"], named, *cells])
    return out.getvalue()
