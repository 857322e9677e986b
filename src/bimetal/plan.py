"""`Plan`: the one document that the planner writes, the engine and the gateway run, and economics prices.

Knows layers, stages and edges. Does not know how a plan is found (planner), timed (perf) or run (engine).
A plan may also be written by hand: `bimetal serve plan.yaml` needs only the fields without a default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError

from bimetal.errors import ConfigError

Role = Literal["both", "prefill", "decode"]
EdgeKind = Literal["hidden", "ids"]

_STRICT = ConfigDict(extra="forbid")


@dataclass(frozen=True, slots=True)
class StagePrediction:
    """What `perf` expects of a stage when it decodes one step of the planned batch."""

    weight_bytes: int
    kv_capacity_tokens: int
    step_s: float
    binds: str


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers [start_layer, end_layer) on one single-vendor group of GPUs."""

    __pydantic_config__ = _STRICT

    node: str
    gpu: str
    start_layer: int
    end_layer: int
    device_indices: tuple[int, ...] = (0,)
    address: str | None = None
    """host:port where `bimetal stage --listen` waits; None: a child process of this machine."""
    python: str | None = None
    """Interpreter that holds this vendor's torch; None: the one that runs bimetal."""
    model_path: str | None = None
    """Where this node keeps the checkpoint, if not at the plan's `model`."""
    num_threads: int | None = None
    role: Role = "both"
    experts: tuple[int, int] | None = None
    """Half-open range of experts held; None: all."""
    prediction: StagePrediction | None = None

    @property
    def tensor_parallel(self) -> int:
        return len(self.device_indices)

    @property
    def num_layers(self) -> int:
        return self.end_layer - self.start_layer


@dataclass(frozen=True, slots=True)
class Edge:
    """Messages of one kind go from stage `source` to stage `target` (indices into the replica's stages)."""

    kind: EdgeKind
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Replica:
    """One copy of the model: stages that together hold every layer once."""

    __pydantic_config__ = _STRICT

    name: str
    stages: tuple[Stage, ...]
    num_micro_batches: int | None = None
    """None: chosen at run time from measured step times."""

    @property
    def edges(self) -> tuple[Edge, ...]:
        """Hidden states down the chain; sampled ids from the last stage straight back to the first."""
        last = len(self.stages) - 1
        hidden = tuple(Edge("hidden", i, i + 1) for i in range(last))
        return (*hidden, Edge("ids", last, 0)) if last else ()


@dataclass(frozen=True, slots=True)
class Plan:
    """Replicas, limits, and why."""

    __pydantic_config__ = _STRICT

    model: str
    """A catalogue name, or a path to a Hugging Face checkpoint."""
    replicas: tuple[Replica, ...]
    dtype: str = "bfloat16"
    max_model_len: int = 4096
    max_num_seqs: int = 64
    predicted_output_tokens_per_s: float | None = None
    reasons: tuple[str, ...] = field(default=())
    version: Literal[1] = 1


_ADAPTER = TypeAdapter(Plan)


def check_stages(stages: Sequence[Stage], num_layers: int, source: str) -> None:
    """Raise ConfigError unless the stages hold layers [0, num_layers) in order, each once."""
    expected = 0
    for i, stage in enumerate(stages):
        if stage.start_layer != expected or stage.end_layer <= stage.start_layer:
            raise ConfigError(
                f"{source}: stage {i} holds layers [{stage.start_layer}, {stage.end_layer}), "
                f"but must start at {expected} and hold at least one layer: stages hold every layer once, in order"
            )
        expected = stage.end_layer
    if expected != num_layers:
        raise ConfigError(
            f"{source}: the stages end at layer {expected}, but the model has {num_layers}: "
            f"set the last stage's end_layer to {num_layers}"
        )


def load_plan(path: Path) -> Plan:
    """Read a plan from YAML; ConfigError names file, field and value."""
    try:
        document = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}: give the path of a plan written by `bimetal plan`"
        ) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {error}") from error
    return parse_plan(document, str(path))


def parse_plan(document: object, source: str) -> Plan:
    """Validate a parsed YAML or JSON document as a plan."""
    if isinstance(document, dict) and is_decision(document):
        raise ConfigError(_decision_is_no_plan(document, Path(source)))
    try:
        plan = _ADAPTER.validate_python(document)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "document"
        raise ConfigError(
            f"{source}: {where}: {first['msg']} (got {_short(repr(first['input']))})"
        ) from error
    for replica in plan.replicas:
        if not replica.stages:
            raise ConfigError(f"{source}: replica {replica.name} has no stages: give it at least one")
        check_stages(replica.stages, replica.stages[-1].end_layer, f"{source}: replica {replica.name}")
    if not plan.replicas:
        raise ConfigError(f"{source}: replicas is empty: a plan needs at least one replica")
    return plan


def is_decision(document: object) -> bool:
    """Whether it is what `bimetal plan` writes for a demand file: a whole fleet and what else was compared, no one plan."""
    return isinstance(document, dict) and "alternatives" in document and "replicas" not in document


def _decision_is_no_plan(decision: Mapping[object, object], path: Path) -> str:
    """Names the plan of a template that was written with the decision, if there is one."""
    listed = decision.get("plan_files")
    names = [str(name) for name in listed] if isinstance(listed, list) else []
    found = next(
        (p for p in (path.with_name(Path(n).name) for n in names if Path(n).name) if p.is_file()), None
    )
    if found is not None:
        remedy = f"give one of its templates' plans, such as `bimetal serve {found}`"
    elif names:
        remedy = f"its templates' plans, {', '.join(names)}, are gone: write them with `bimetal plan DEMAND -o {path}`"
    else:
        remedy = f"no plans were written with it: `bimetal plan DEMAND -o {path}` writes those that the engine runs today, if any"
    return f"{path}: is the decision on a whole fleet, not the plan of one replica: {remedy}"


def _short(text: str, most: int = 200) -> str:
    return text if len(text) <= most else f"{text[:most]}..."


def dump_plan(plan: Plan) -> str:
    """The plan as YAML, fields at their default left out."""
    document = _ADAPTER.dump_python(plan, mode="json", exclude_defaults=True)
    return yaml.safe_dump({"version": plan.version, **document}, sort_keys=False)
