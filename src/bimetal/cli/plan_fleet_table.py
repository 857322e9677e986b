"""A fleet decision as tables for people, within 80 columns."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bimetal.cli.plan_words import (
    LEGEND,
    basis_lines,
    demand_line,
    gpu_words,
    latencies,
    marked_name,
    run_lines,
)
from bimetal.planner.decide import FleetPlan
from bimetal.planner.decision import Alternative, Decision
from bimetal.planner.power_limits import power_notes
from bimetal.planner.proof import NUM_SEEDS
from bimetal.planner.replay import LEAST_SEEN, PERCENTILES
from bimetal.planner.sensitivity import FrontPoint
from bimetal.units import KILO, MS_PER_S

BAR = 34
MOST_EXCLUDED = 6
LEAST_SHOWN = 5e-4
LEAST_GAP = 5e-5
TITLES = ("$/h", "$/Mtok", "goodput", "TTFT p50/p99", "TPOT p50/p99", "kW", "P")
LEAST_WIDTH, SPARED = 76, ("goodput", "kW")
"""Of a terminal, below which these are left out, so that the plans' names can be read."""
MOST_REASONS = 2
"""And the last, which says how much can be served."""


def print_decision(decision: Decision, console: Console | None = None) -> None:
    """What is asked, what is chosen, what else there was, what would change it."""
    console = console or Console(highlight=False)
    for t in decision.planner.traffic:
        console.print(escape(demand_line(t)))
    plan = decision.plan
    console.print()
    console.print(f"Chosen ({escape(decision.chosen)}): {escape(gpu_words(decision, plan))}")
    for group in plan.groups:
        served = ", ".join(f"{escape(name)} {_rate(rate)}/s" for name, rate in group.served_per_s.items())
        blocked = group.template.not_runnable
        mark = f"  \\[priced only: {escape(blocked)}]" if blocked else ""
        console.print(
            f"  {group.number} x {group.template.kind}: {escape(group.template.label)}: {served}{mark}"
        )
    for t, share in zip(decision.planner.traffic, plan.optimum.chosen.served_ratio, strict=True):
        if share < 1 - LEAST_SHOWN:
            console.print(f"  {share:.1%} of what {escape(t.name)} asks for is served")
    for job, g in plan.optimum.chosen.jobs.items():
        names = [entry.name for entry in decision.planner.demand.demand if entry.kind == "fine-tuning"]
        number, kind = int(plan.problem.jobs[job, g]), decision.planner.demand.stock[g].label
        console.print(f"  {number} x {kind} kept for {escape(names[job])}")
    for note in power_notes(decision.planner.demand.stock, plan.gpus):
        console.print(f"  {escape(note)}")
    console.print()
    _print_table(decision, console)
    for line in (*decision.verdict, *run_lines(decision), *basis_lines(decision)):
        console.print(f"- {escape(line)}")
    _print_proof(decision, plan, console)
    _print_changes(decision, console)


def _rate(per_s: float) -> str:
    return f"{per_s:.0f}" if per_s >= 100 else f"{per_s:.3g}"


def _print_table(decision: Decision, console: Console) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("", overflow="fold")
    shown = [title for title in TITLES if title not in SPARED or console.width >= LEAST_WIDTH]
    for title in shown:
        table.add_column(title, justify="right", no_wrap=title != "P")
    for a in decision.alternatives:
        name, *cells = _cells(decision, a)
        table.add_row(name, *(cell for title, cell in zip(TITLES, cells, strict=True) if title in shown))
    console.print(table)
    for a in decision.alternatives:
        if a.plan is not None:
            beyond = decision.goes_beyond(a)
            words = f"{a.name}: {gpu_words(decision, a.plan)}{f' ({beyond})' if beyond else ''}"
            console.print(f"  {escape(words)}")
        for reason in [*a.reasons[:MOST_REASONS], *a.reasons[MOST_REASONS:][-1:]]:
            console.print(f"  {escape(a.name)}: {escape(reason)}")
    console.print(
        "goodput: output tok/s of requests within their limits, simulated. P: chance that the chosen plan is "
        f"cheaper per token served of this demand, on shared draws of the performance model. {LEGEND}"
    )


def _cells(decision: Decision, a: Alternative) -> tuple[str, ...]:
    if a.plan is None:
        return (escape(a.name), *("-",) * len(TITLES))
    chance = decision.chance_cheaper(a)
    is_same = decision.is_chosen(a) and a.name != decision.chosen
    per_million = a.plan.usd_per_million_tokens
    return (
        escape(marked_name(decision, a)),
        f"{a.plan.usd_per_h:.2f}",
        f"{per_million:.3f}" if math.isfinite(per_million) else "-",
        *latencies(decision, a.plan),
        f"{a.plan.watts / KILO:.0f}",
        f"{chance:.0%}" if chance is not None else "same" if is_same else "",
    )


def _is_interactive(decision: Decision, name: str) -> bool:
    return not next(t for t in decision.planner.traffic if t.name == name).is_batch


def _print_proof(decision: Decision, plan: FleetPlan, console: Console) -> None:
    o = plan.optimum
    better = "better" if decision.planner.demand.objective == "goodput" else "cheaper"
    than = better if o.gap_ratio < LEAST_GAP else f"more than {o.gap_ratio:.2%} {better}"
    before = " before it was trimmed" if plan.formula_ratio < 1 else ""
    if decision.num_templates:
        console.print(
            f"- proof: no other fleet is {than} by the formulas than this plan{before}, of all that can be made of "
            f"{decision.num_templates} kinds of replica ({o.num_core} were counted in whole replicas, {o.num_priced_out} are in no "
            f"better plan; {o.seconds:.1f} s)"
        )
    if plan.replays:
        word = "kept its limits" if plan.passed else "broke a limit"
        console.print(
            f"- simulated: {word} with {NUM_SEEDS} seeds, the worst of which is shown; {plan.num_rounds} round(s) of solving "
            "and simulating"
            if plan.passed
            else f"- simulated: {word}; {plan.num_rounds} round(s) of solving and simulating"
        )
    if plan.formula_ratio < 1:
        console.print(
            f"- trimmed: the formulas wanted ${plan.untrimmed_usd_per_h:.2f}/h, and say that these GPUs serve "
            f"{plan.formula_ratio:.1%} of the demand; that they serve all of it rests on the simulation"
        )
    for r in plan.replays:
        if _is_interactive(decision, r.name):
            ttft = "/".join(f"{r.ttft_s[p]:.2f}" for p in PERCENTILES)
            tpot = "/".join(f"{r.tpot_s[p] * MS_PER_S:.0f}" for p in PERCENTILES)
            times = f"TTFT {ttft} s, TPOT {tpot} ms" if math.isfinite(r.tpot_s[99]) else f"TTFT {ttft} s"
            console.print(f"  {escape(r.name)}, p50/p95/p99: {times}, {r.met_ratio:.1%} within both limits")
    for name, number in _hardly_seen(decision, plan):
        console.print(
            f"- {escape(name)}: {number} requests in the simulated time, too few for a 99th percentile: that its limits hold "
            "rests on the formulas"
        )
    prices = next((a.prices for a in decision.alternatives if a.name == decision.chosen), None)
    if prices is not None:
        low, high = prices.interval
        top = f"{high:.2f}" if math.isfinite(high) else "no limit kept"
        console.print(
            f"- $/Mtok served over the model's draws: median {prices.median:.2f}, 90% {low:.2f} to {top}"
        )
    binds = ", ".join(decision.binds) or "nothing but whole nodes"
    console.print(f"- binds: {escape(binds)}")


def _hardly_seen(decision: Decision, plan: FleetPlan) -> Iterator[tuple[str, int]]:
    """Classes with limits that the simulation says little of."""
    seen = {r.name: r.num_requests for r in plan.replays}
    for t, served in zip(decision.planner.traffic, plan.optimum.chosen.served_ratio, strict=True):
        number = seen.get(t.name, 0)
        if plan.replays and not t.is_batch and served > LEAST_SHOWN and number < LEAST_SEEN:
            yield t.name, number


def _print_changes(decision: Decision, console: Console) -> None:
    if decision.relaxations:
        console.print("\nRelaxed one at a time and solved again:")
    for r in decision.relaxations:
        gain = f"saves ${r.saved_usd_per_h:.2f}/h" if r.saved_usd_per_h > 0 else "gives nothing"
        if r.goodput_gained_tokens_per_s > 0:
            gain = f"serves {r.goodput_gained_tokens_per_s:.0f} more output tok/s"
        console.print(f"  {escape(r.what)}: {gain}")
    if decision.front:
        console.print("\nCost against latency (all limits scaled together):")
        for point in decision.front:
            console.print(f"  {_bar(point, decision.front)}")
    if decision.excluded:
        console.print("\nLeft out:")
        for reason in decision.excluded[:MOST_EXCLUDED]:
            console.print(f"  {escape(reason)}")
        if len(decision.excluded) > MOST_EXCLUDED:
            console.print(f"  and {len(decision.excluded) - MOST_EXCLUDED} more (--json has all)")


def _bar(point: FrontPoint, front: tuple[FrontPoint, ...]) -> str:
    limit = (
        f"TPOT p99 {point.tpot_p99_s * MS_PER_S:4.0f} ms" if math.isfinite(point.tpot_p99_s) else "no limit"
    )
    if point.usd_per_million_tokens is None:
        return f"{limit}  not from this stock"
    top = max(p.usd_per_million_tokens or 0.0 for p in front)
    length = max(1, round(BAR * point.usd_per_million_tokens / top)) if top else 1  # all of it may be free
    return f"{limit}  {'#' * length} ${point.usd_per_million_tokens:.3f}/Mtok"
