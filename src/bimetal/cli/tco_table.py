"""An analysis as tables for people, within 80 columns."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bimetal.cli.tco_document import SAVINGS, explain_inputs, scenario_of, totals
from bimetal.economics.analysis import Analysis, Decision
from bimetal.economics.caveats import conventions, doubts
from bimetal.economics.placement import Placed
from bimetal.economics.quantity import Quantity, number
from bimetal.economics.tco import compare, returns
from bimetal.economics.uncertainty import Spread, spread
from bimetal.units import format_s

TORNADO_ROWS = 6


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=escape(title), title_justify="left", box=None, pad_edge=False)
    for i, name in enumerate(columns):
        table.add_column(name, justify="right" if i else "left", overflow="fold")
    return table


def money(amount: float) -> str:
    """Short enough for a cell, with four digits.

    >>> money(27_600_000), money(1234.5), money(0.5), money(0.0000123), money(0.0)
    ('27.60M', '1,234', '0.5000', '1.23e-05', '0')
    """
    if amount == 0:
        return "0"
    if abs(amount) >= 1e6:
        return f"{amount / 1e6:,.2f}M"
    if abs(amount) >= 100:
        return f"{amount:,.0f}"
    return f"{amount:.4f}" if abs(amount) >= 0.01 else f"{amount:.3g}"


def percent(ratio: float) -> str:
    """
    >>> percent(0.0512), percent(-1e-9), percent(float("-inf"))
    ('5.1%', '0.0%', '-')
    """
    return f"{ratio if abs(ratio) >= 5e-4 else 0.0:.1%}" if math.isfinite(ratio) else "-"


def _range(s: Spread, text: object) -> str:
    show = text if callable(text) else str
    if not math.isfinite(s.p50):
        return "-"
    if s.p90 - s.p10 <= 1e-9 * abs(s.p50):
        return str(show(s.p50))
    return f"{show(s.p50)} [{show(s.p10)}, {show(s.p90)}]"


def print_analysis(analysis: Analysis, explain: bool = False, console: Console | None = None) -> None:
    """Conventions, totals, savings, what matters, what would change the decision."""
    console = console or Console(highlight=False)
    currency = analysis.scenarios[0].file.currency
    for scenario in analysis.scenarios:
        about = f": {scenario.file.about}" if scenario.file.about else ""
        console.print(escape(scenario.file.name + about), style="bold")
    for text in conventions(analysis):
        console.print(f"- {escape(text)}")
    for text in doubts(analysis):
        console.print(f"- {escape(text)}", style="yellow")
    console.print(f"- amounts are median \\[p10, p90] in {currency.name}\n")
    for i, (name, tco) in enumerate(zip(analysis.names, analysis.drawn, strict=True)):
        table = _table(name, ("", f"{currency.name}"))
        for total in totals(tco):
            cell = _range(spread(getattr(tco, total.attribute) * currency.per_usd), money)
            table.add_row(total.label, escape(cell))
        if tco.earns:
            back = returns(analysis.central[i])
            table.add_row("IRR", "none" if back.irr is None else percent(back.irr))
            years = back.payback_years
            table.add_row("payback, years", "never" if years is None else f"{years:.3g}")
        tokens = _range(spread(tco.tokens.mean(axis=-1)), lambda x: f"{x:.3g}")
        table.add_row("output tokens a year", escape(tokens))
        console.print(table)
        if explain:
            _print_rows(analysis, i, console)
        console.print()
    for decision in analysis.decisions:
        _print_decision(analysis, decision, console)
    for placed in analysis.placed:
        _print_placed(placed, currency.per_usd, console)
    for s in analysis.second_sources:
        without, chosen, worth = (
            _range(
                Spread(c.p10 * currency.per_usd, c.p50 * currency.per_usd, c.p90 * currency.per_usd), money
            )
            for c in (s.without_usd, s.with_usd, s.worth_usd)
        )
        console.print(
            escape(
                f"{s.scenario}: the option on a second source is worth {worth} {currency.name}: "
                f"a late order costs {without} without it, {chosen} with it (expected)"
            )
        )
    if analysis.rent_or_own:
        _print_rent_or_own(analysis, console)


def _print_rows(analysis: Analysis, fleet: int, console: Console) -> None:
    tco, scenario = analysis.drawn[fleet], scenario_of(analysis, fleet)
    currency = analysis.scenarios[0].file.currency
    console.print("  rows are present values; a year counts for the share of it in which the GPUs are there")
    for line in tco.lines:
        amount = spread(line.npv_usd(tco.fleet.conventions.wacc_ratio) * currency.per_usd)
        console.print(f"  {escape(line.label)}: {escape(_range(amount, money))} = {escape(line.formula)}")
        for x in explain_inputs(scenario, line.inputs, tco):
            console.print(
                escape(f"    {x['input']} = {x['value']} ({x['date']}; {x['source']})"), style="dim"
            )


def _print_decision(analysis: Analysis, decision: Decision, console: Console) -> None:
    table = _table(f"{decision.name} against {analysis.names[0]}: saving", ("", r"median \[p10, p90]"))
    for key, label in SAVINGS:
        table.add_row(label, escape(_range(spread(getattr(decision.drawn, key)), percent)))
    delivered = _range(spread(decision.drawn.tokens_ratio), lambda x: f"{x:.1%}")
    table.add_row("tokens delivered, of the first's", escape(delivered))
    irr, payback = decision.returns.irr, decision.returns.payback_years
    if irr is not None:
        table.add_row("IRR of what it costs more at first", percent(irr))
    if payback is not None:
        table.add_row("payback of that, years", f"{payback:.3g}")
    console.print(table)
    unit = "per token" if analysis.per_token else "on TCO"
    table = _table(f"what moves the saving {unit}", ("input", "p10 to p90", "saving"))
    for s in decision.swings[:TORNADO_ROWS]:
        inputs = f"{number(s.input_low)} to {number(s.input_high)}"
        table.add_row(escape(s.name), inputs, f"{percent(s.at_low)} to {percent(s.at_high)}")
    if decision.swings:
        console.print(table)
    table = _table(f"at median inputs the two cost the same {unit} at", ("input", "now", "break-even"))
    for b in decision.break_evens:
        found = " and ".join(map(number, b.at)) or f"none in {number(b.low)} to {number(b.high)}"
        table.add_row(escape(b.name), number(b.now), found)
    if decision.break_evens:
        console.print(table)
    if decision.indifferent_to:
        console.print(escape(f"the saving does not depend on {', '.join(decision.indifferent_to)}"))
    console.print()


def _print_placed(placed: Placed, per_usd: float, console: Console) -> None:
    rule, cost = placed.rule, placed.usd_per_million
    under = f" under {format_s(rule.latency_limit_s)}" if rule.latency_limit_s else ""
    kept = _range(Spread(cost.p10 * per_usd, cost.p50 * per_usd, cost.p90 * per_usd), money)
    broken = _range(placed.broken_ratio, lambda x: f"{x:+.0%}")
    price = "" if placed.batches else f": {kept} per million output tokens; on {rule.instead} {broken}"
    console.print(escape(f"{rule.work}{under} on {rule.gpu}{price}"))
    for b in placed.batches:
        steps = f"{b.accumulation_steps} accumulation step(s)" if b.accumulation_steps else "does not fit"
        console.print(escape(f"  {b.gpu} holds {b.samples} samples: {steps}"))


def _ends(q: Quantity) -> str:
    """A range as given; p10 to p90 of what has no ends.

    >>> _ends(Quantity(("low", "high"), (2.0, 5.0))), _ends(Quantity(("mean", "sd"), (3.0, 0.0)))
    ('2.00-5.00', '3.00')
    """
    ends = (q.numbers[0], q.numbers[-1]) if q.shape[0] == "low" else q.quantile(np.array([0.1, 0.9])).tolist()
    return "-".join(dict.fromkeys(f"{x:.2f}" for x in ends))


def _print_rent_or_own(analysis: Analysis, console: Console) -> None:
    table = _table(
        "utilisation above which owning beats on-demand rental",
        ("GPU", "break-even", "p10, p90", "own", "on demand", "3 years", "published TCO"),
    )
    for r in analysis.rent_or_own:
        share, own = r.break_even_utilisation, r.own_usd_per_h
        published = "-".join(f"{x:.2f}" for x in r.published_own_usd_per_h or ())
        table.add_row(
            r.gpu,
            r.verdict,
            f"{share.p10:.0%}, {share.p90:.0%}" if share else "",
            f"{own.p50:.2f}" if own else "",
            _ends(r.on_demand_usd_per_h) if r.on_demand_usd_per_h else "",
            f"{r.reserved_usd_per_h.p50:.2f}" if r.reserved_usd_per_h else "",
            published,
        )
    console.print(table)
    console.print(
        "USD an hour; own: over every hour, used or not; published TCO: others', only a cross-check"
    )
    for r in analysis.rent_or_own:
        if r.missing:
            console.print(f"- {r.gpu}: {r.missing} in the catalogue or the file")
        if r.own_usd_per_h and r.reserved_usd_per_h and r.reserved_usd_per_h.p50 < r.own_usd_per_h.p50:
            console.print(f"- {r.gpu}: three-year rental is below owning")


def print_change(
    before: Analysis, after: Analysis, changes: Sequence[str], console: Console | None = None
) -> None:
    """By how much the decision moved; where there is one fleet, by how much its cost did."""
    console = console or Console(highlight=False)
    made = f"with {escape(', '.join(changes))}"
    if len(before.drawn) != len(after.drawn):
        console.print(
            f"{made}: the number of fleets changed, so that there is no before and after", style="bold"
        )
        return
    if not after.decisions:
        ratio = compare(before.central[0], after.central[0]).per_token_ratio
        console.print(
            f"{made}: {escape(after.names[0])} costs {-float(ratio):+.1%} per output token, at the median",
            style="bold",
        )
    key = "per_token_ratio" if after.per_token else "tco_ratio"
    for old, new in zip(before.decisions, after.decisions, strict=True):
        was, now = spread(getattr(old.drawn, key)), spread(getattr(new.drawn, key))
        if not (math.isfinite(was.p50) and math.isfinite(now.p50)):
            console.print(f"{made}: no share is saved of a cost that is not above 0", style="bold")
            continue
        flips = " The decision flips." if (was.p50 > 0) != (now.p50 > 0) else ""
        unit = "per token" if after.per_token else "on TCO"
        console.print(
            f"{made}: {escape(new.name)} {'saves' if now.p50 >= 0 else 'loses'} {percent(abs(now.p50))} instead of "
            f"{'saving' if was.p50 >= 0 else 'losing'} {percent(abs(was.p50))} {unit} "
            f"({(now.p50 - was.p50) * 100:+.1f} points).{flips}",
            style="bold",
        )
