"""A fleet decision as plain data for programs, and its runnable templates as Plan files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bimetal.errors import ConfigError
from bimetal.plan import dump_plan
from bimetal.planner.decide import FleetPlan
from bimetal.planner.decision import RUNNABLE, Alternative, Decision
from bimetal.planner.deployment import deployments, run_notes
from bimetal.planner.holdings import holdings, is_bought, paid_usd_per_h, prices
from bimetal.planner.power_limits import power_notes

DIGITS = 6


def decision_document(decision: Decision, plan_files: Sequence[Path] = ()) -> dict[str, Any]:
    """Numbers rounded; what is infinite or unknown is null. `plan_files`: those of `write_plans`."""
    document = {
        "version": 1,
        "chosen": decision.chosen,
        "verdict": list(decision.verdict),
        "binds": list(decision.binds),
        "plan_files": [path.name for path in plan_files],
        "prices": [
            {"gpu": price.gpu, "usd_per_h": price.usd_per_h, "source": price.source}
            for price in prices(decision.planner.demand)
        ],
        "demand": {
            t.name: {
                "model": t.model,
                "requests_per_s": t.rate_per_s,
                "input_tokens": t.input_tokens,
                "output_tokens": t.output_tokens,
                "ttft_p99_s": t.ttft_s,
                "tpot_p99_s": t.tpot_s,
                "n_plus_one": t.n_plus_one,
            }
            for t in decision.planner.traffic
        },
        "plan": _plan(decision, decision.plan),
        "alternatives": [_alternative(decision, a) for a in decision.alternatives],
        "relaxations": [
            {
                "what": r.what,
                "usd_per_h": r.usd_per_h,
                "saved_usd_per_h": r.saved_usd_per_h,
                "goodput_gained_tokens_per_s": r.goodput_gained_tokens_per_s,
            }
            for r in decision.relaxations
        ],
        "front": [
            {
                "limits_times": p.factor,
                "tpot_p99_s": p.tpot_p99_s,
                "usd_per_h": p.usd_per_h,
                "usd_per_million_output_tokens": p.usd_per_million_tokens,
                "kinds": list(p.kinds),
            }
            for p in decision.front
        ],
        "num_templates": decision.num_templates,
        "excluded": list(decision.excluded),
    }
    plain: dict[str, Any] = _plain(document)
    return plain


def _alternative(decision: Decision, a: Alternative) -> dict[str, Any]:
    interval = a.prices.interval if a.prices else None
    return {
        "name": a.name,
        "reasons": list(a.reasons),
        "beyond_stock": a.beyond_stock,
        "goes_beyond": decision.goes_beyond(a),
        "usd_per_million_output_tokens_median": a.prices.median if a.prices else None,
        "usd_per_million_output_tokens_90": list(interval) if interval else None,
        "chance_chosen_is_cheaper": decision.chance_cheaper(a),
        **(_plan(decision, a.plan) if a.plan else {}),
    }


def _plan(decision: Decision, plan: FleetPlan) -> dict[str, Any]:
    stock = decision.planner.demand.stock
    optimum = plan.optimum
    return {
        "usd_per_h": plan.usd_per_h,
        "usd_per_million_output_tokens": plan.usd_per_million_tokens,
        "output_tokens_per_s": plan.output_tokens_per_s,
        "served_ratio": {
            t.name: min(1.0, ratio)
            for t, ratio in zip(decision.planner.traffic, optimum.chosen.served_ratio.tolist(), strict=True)
        },
        "goodput_tokens_per_s": sum(r.goodput_tokens_per_s for r in plan.replays) if plan.replays else None,
        "power_w": plan.watts,
        "power_limits": list(power_notes(stock, plan.gpus)),
        "gpus": {entry.label: n for entry, n in zip(stock, plan.gpus, strict=True) if n},
        "holdings": [
            {
                "gpu": h.entry.label,
                "number": h.number,
                "owned": h.owned,
                "nodes": h.nodes,
                "gpus_per_node": h.entry.per_node,
                "terms": "bought" if is_bought(h.entry) else "rented",
            }
            for h in holdings(stock, plan)
        ],
        "paid_usd_per_h": paid_usd_per_h(plan),
        "run_notes": run_notes(plan),
        "kept_limits": plan.passed if plan.replays else None,
        "rounds": plan.num_rounds,
        "untrimmed_usd_per_h": plan.untrimmed_usd_per_h,
        "formula_ratio": plan.formula_ratio,
        "gap_ratio": optimum.gap_ratio,
        "bound": optimum.bound,
        "templates_in_the_program": optimum.num_core,
        "templates_priced_out": optimum.num_priced_out,
        "solve_s": optimum.seconds,
        "replicas": [
            {
                "number": d.number,
                "kind": d.kind,
                "what": d.label,
                "requests_per_s": dict(group.served_per_s),
                "not_runnable": d.not_runnable,
            }
            for d, group in zip(deployments(decision.planner, plan), plan.groups, strict=True)
        ],
        "classes": {
            r.name: {
                "num_requests": r.num_requests,
                "ttft_s": {f"p{p}": v for p, v in r.ttft_s.items()},
                "tpot_s": {f"p{p}": v for p, v in r.tpot_s.items()},
                "met_ratio": r.met_ratio,
                "goodput_tokens_per_s": r.goodput_tokens_per_s,
            }
            for r in plan.replays
        },
        "fine_tuning": _jobs(decision, plan),
    }


def _jobs(decision: Decision, plan: FleetPlan) -> dict[str, Any]:
    demand = decision.planner.demand
    names = [entry.name for entry in demand.demand if entry.kind == "fine-tuning"]
    return {
        names[job]: {"gpu": demand.stock[g].label, "num_gpus": int(plan.problem.jobs[job, g])}
        for job, g in plan.optimum.chosen.jobs.items()
    }


def write_plans(decision: Decision, output: Path, source: str) -> list[Path]:
    """A Plan file for each template that the engine can run, beside `output`: NAME-0.yaml, NAME-1.yaml, ... of the chosen plan;
    if the engine cannot run all of it, NAME-today-0.yaml, ... of the plan that it runs today.
    ConfigError where one of them is `source`, the demand."""
    paths = _write(decision, decision.plan, output, output.stem, source)
    today = next((a.plan for a in decision.alternatives if a.name == RUNNABLE), None)
    if today is not None and any(group.template.not_runnable for group in decision.plan.groups):
        paths += _write(decision, today, output, f"{output.stem}-today", source)
    return paths


def _write(decision: Decision, plan: FleetPlan, output: Path, stem: str, source: str) -> list[Path]:
    paths = []
    for i, deployment in enumerate(deployments(decision.planner, plan)):
        if deployment.plan is not None:
            path = output.with_name(f"{stem}-{i}{output.suffix or '.yaml'}")
            if path.exists() and path.samefile(source):
                raise ConfigError(
                    f"{path}: is the file to be planned and would be lost to one of the plans: give -o another name"
                )
            path.write_text(dump_plan(deployment.plan), encoding="utf-8")
            paths.append(path)
    return paths


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, bool | str | int) or value is None:
        return value
    number = float(value)
    return round(number, DIGITS) if math.isfinite(number) else None
