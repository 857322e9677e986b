"""Lines of a fleet decision that the tables and the page share."""

from __future__ import annotations

import math

from bimetal.planner.decide import FleetPlan
from bimetal.planner.decision import RUNNABLE, Alternative, Decision
from bimetal.planner.deployment import run_notes
from bimetal.planner.holdings import holdings, price_lines
from bimetal.planner.traffic import Traffic
from bimetal.units import MS_PER_S

LEGEND = "*: chosen. !: broke a limit in its simulation. +: takes more than there is in stock, shown for its price only."
MODEL_ERROR = "speeds are a performance model's: docs/accuracy.md holds it to published measurements and says how far it is off"


def demand_line(t: Traffic) -> str:
    """What a class asks for."""
    limits = (
        "done by its deadline"
        if t.is_batch
        else f"TTFT p99 <= {t.ttft_s:g} s, TPOT p99 <= {t.tpot_s * MS_PER_S:g} ms"
    )
    return (
        f"{t.name}: {t.model}, {t.rate_per_s:.4g} requests/s of {t.input_tokens:.0f} + {t.output_tokens:.0f} tokens, "
        f"{limits}{', N+1' if t.n_plus_one else ''}"
    )


def gpu_words(decision: Decision, plan: FleetPlan) -> str:
    """All GPUs of a plan, owned and paid for."""
    held = holdings(decision.planner.demand.stock, plan)
    return " + ".join(holding.words for holding in held) or "no GPUs"


def marked_name(decision: Decision, a: Alternative) -> str:
    """With the signs of `LEGEND`."""
    chosen = "*" if a.name == decision.chosen else ""
    broken = "!" if a.plan is not None and not a.plan.passed else ""
    return f"{a.name}{chosen}{broken}{'+' if a.beyond_stock else ''}"


def basis_lines(decision: Decision) -> list[str]:
    """What prices and speeds rest on."""
    return [*price_lines(decision.planner.demand), MODEL_ERROR]


def run_lines(decision: Decision) -> list[str]:
    """What running it takes, of the chosen plan and of the one that the engine runs today."""
    plan, lines = decision.plan, []
    notes = run_notes(plan)
    rest = notes[1:]
    if notes:
        whole = all(group.template.not_runnable is None for group in plan.groups)
        what = "the engine runs the chosen plan" if whole else "of the chosen plan the engine runs a part"
        lines.append(f"{what}: {notes[0]}")
    today = next((a.plan for a in decision.alternatives if a.name == RUNNABLE), None)
    if today is not None and today.optimum is not plan.optimum:
        first, *more = run_notes(today)
        lines.append(f"{RUNNABLE}: {first}")
        rest += more
    return [*lines, *dict.fromkeys(rest)]


def latencies(decision: Decision, plan: FleetPlan) -> tuple[str, str, str]:
    """Goodput, and p50/p99 of TTFT and TPOT, each of the interactive class in which it is highest; "-": not simulated."""
    batch = {t.name for t in decision.planner.traffic if t.is_batch}
    interactive = [r for r in plan.replays if r.name not in batch]
    goodput = f"{sum(r.goodput_tokens_per_s for r in plan.replays):.0f}" if plan.replays else "-"
    if not interactive:
        return goodput, "-", "-"
    ttft = [max(r.ttft_s[p] for r in interactive) for p in (50, 99)]
    first = f"{ttft[0]:.2f}/{ttft[1]:.2f} s"
    per_token = [r for r in interactive if math.isfinite(r.tpot_s[99])]  # not of answers of one token
    if not per_token:
        return goodput, first, "-"
    tpot = [max(r.tpot_s[p] for r in per_token) * MS_PER_S for p in (50, 99)]
    return goodput, first, f"{tpot[0]:.0f}/{tpot[1]:.0f} ms"
