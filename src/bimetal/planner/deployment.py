"""Chosen templates as files: what `bimetal serve` can run becomes a Plan, the rest says why it cannot.

Owns the translation. A Plan file holds one replica; how many of it are wanted stands in its reasons.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bimetal.perf.step_time import StageShape, decode_step
from bimetal.plan import Plan, Replica, Stage, StagePrediction
from bimetal.planner.decide import FleetPlan, FleetPlanner
from bimetal.planner.power_limits import power_notes
from bimetal.planner.replay import Group

NOT_ON_AMD = "nothing of bimetal has run on AMD hardware yet: its kernels are compiled for it, and untried"
UNSIMULATED_TPOT_S = 0.05
"""For the predicted batch of a plan that was not simulated."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """One group of equal replicas."""

    label: str
    kind: str
    number: int
    plan: Plan | None
    """None: the engine cannot run it."""
    not_runnable: str | None


def run_notes(fleet: FleetPlan) -> list[str]:
    """What it takes, beyond a plan file, to run what the engine can run of a plan; empty: it can run nothing of it."""
    groups = [group for group in fleet.groups if group.template.not_runnable is None]
    number = sum(group.number for group in groups)
    notes = []
    if number:
        one = "this replica is one `bimetal serve`"
        many = (
            f"these {number} replicas are {number} times `bimetal serve`, with a router in front that shares requests out, "
            "which bimetal does not have"
        )
        notes.append(one if number == 1 else many)
    if any("AMD" in group.template.vendors for group in groups):
        notes.append(NOT_ON_AMD)
    return notes


def deployments(planner: FleetPlanner, fleet: FleetPlan) -> list[Deployment]:
    """In the order of the plan's groups."""
    tpot_s = {t.name: UNSIMULATED_TPOT_S for t in planner.traffic} | {
        r.name: r.tpot_s[50] for r in fleet.replays
    }
    return [
        Deployment(
            label=group.template.label,
            kind=group.template.kind,
            number=group.number,
            plan=None if group.template.not_runnable else _plan(planner, group, tpot_s),
            not_runnable=group.template.not_runnable,
        )
        for group in fleet.groups
    ]


def _plan(planner: FleetPlanner, group: Group, tpot_s: Mapping[str, float]) -> Plan:
    template = group.template
    evaluator = planner.evaluators[template.model.name]
    classes = [t for t in evaluator.traffic if group.served_per_s.get(t.name, 0.0) > 0]
    tokens = sum(group.served_per_s[t.name] * t.output_tokens for t in classes) / group.number
    longest = max(t.input_p99_tokens + t.output_tokens for t in classes)
    together = sum(group.served_per_s[t.name] * t.output_tokens * tpot_s[t.name] for t in classes)
    context = sum(group.served_per_s[t.name] * t.context_tokens for t in classes) / sum(
        group.served_per_s[t.name] for t in classes
    )
    num_seqs = max(1.0, together / group.number)
    room = evaluator.tables.demand.site.memory_utilization
    used: dict[str, int] = {}
    stages = []
    stock = evaluator.tables.demand.stock
    limits = power_notes(stock, [template.num_gpus(g) for g in range(len(stock))])
    for part in template.parts:
        gpu, ranks = part.slot.gpu, part.slot.tensor_parallel
        first = used.get(gpu.name, 0)
        used[gpu.name] = first + ranks
        shape = StageShape(
            template.model.spec, part.start_layer, part.end_layer, gpu, ranks, template.model.dtype
        )
        estimate = decode_step(shape, num_seqs, context, planner.calibration)
        left = gpu.memory_bytes * ranks * room - shape.weight_bytes
        prediction = StagePrediction(
            shape.weight_bytes, int(left // shape.kv_bytes_per_token), estimate.step_s, estimate.binds
        )
        stages.append(
            Stage(
                node=gpu.name.lower(),
                gpu=gpu.name,
                start_layer=part.start_layer,
                end_layer=part.end_layer,
                device_indices=tuple(range(first, first + ranks)),
                prediction=prediction,
            )
        )
    return Plan(
        model=template.model.name,
        replicas=(Replica("replica-0", tuple(stages)),),
        dtype=template.model.dtype,
        max_model_len=min(template.model.spec.max_position, 1 << (int(longest * 2) - 1).bit_length()),
        max_num_seqs=evaluator.engine.max_num_seqs,
        predicted_output_tokens_per_s=round(tokens, 3),
        reasons=(
            f"one of {group.number} equal replicas of a fleet plan, serving {', '.join(t.name for t in classes)}",
            "nodes are named after their GPUs: give each stage on another host its address and interpreter",
            *([NOT_ON_AMD] if "AMD" in template.vendors else []),
            *limits,
        ),
    )
