"""A Plan's replicas as shapes that can be simulated.

Owns the reading of stages, memory and links. Does not know what arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bimetal.catalog.hardware import CPU, GpuSpec, cpu_spec, find_gpu
from bimetal.catalog.links import LinkSpec
from bimetal.catalog.models import ModelSpec, load_model_spec
from bimetal.errors import InfeasibleError
from bimetal.perf.calibration import Calibration
from bimetal.perf.stage_clock import StageClock, stage_clock
from bimetal.perf.step_time import ACTIVATION_BYTES, StageShape
from bimetal.plan import Plan, Replica, Stage
from bimetal.units import DTYPE_BYTES, format_bytes


@dataclass(frozen=True, slots=True)
class ReplicaShape:
    """What does not change while a replica runs."""

    clocks: tuple[StageClock, ...]
    hop_latency_s: float
    """Of all hops of a round together, the way back included."""
    hop_token_s: float
    """The same per token carried."""
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_tokens: int
    """Tokens that the smallest stage's cache holds."""
    decode_step_s: tuple[Mapping[int, float], ...] = ()
    """Of each stage by number of sequences, as an engine timed it at its start: its policy decides by these. Empty: by the
    clocks."""


LinkOf = Callable[[str, str], LinkSpec]
"""The link between two nodes, by name."""
USABLE_MEMORY_RATIO = 0.9
ID_BYTES = 8


@dataclass(frozen=True, slots=True)
class GpuUse:
    """GPUs of one kind in one stage."""

    gpu: GpuSpec
    number: int


def device_of(stage: Stage) -> GpuSpec:
    """The catalogue's GPU, or a CPU at its default figures."""
    return cpu_spec() if stage.gpu == CPU else find_gpu(stage.gpu)


def gpu_uses(replica: Replica) -> list[GpuUse]:
    """Per stage."""
    return [GpuUse(device_of(stage), stage.tensor_parallel) for stage in replica.stages]


def replica_shape(
    plan: Plan,
    replica: Replica,
    link_of: LinkOf,
    *,
    max_num_batched_tokens: int,
    calibration: Calibration | None = None,
    draw: int | None = None,
) -> ReplicaShape:
    """InfeasibleError if a stage has no room for one token."""
    model = load_model_spec(plan.model)
    shapes = [
        StageShape(model, s.start_layer, s.end_layer, device_of(s), s.tensor_parallel, plan.dtype)
        for s in replica.stages
    ]
    nodes = [stage.node for stage in replica.stages]
    latency = carried = 0.0
    if len(nodes) > 1:
        payload = model.hidden_size * max(ACTIVATION_BYTES, DTYPE_BYTES[plan.dtype])
        for a, b in zip(nodes, nodes[1:] + nodes[:1], strict=True):
            link = link_of(a, b)
            latency += link.latency_s
            carried += (ID_BYTES if b == nodes[0] else payload) / link.bandwidth_bytes_per_s
    return ReplicaShape(
        clocks=tuple(stage_clock(shape, calibration, draw) for shape in shapes),
        hop_latency_s=latency,
        hop_token_s=carried,
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        kv_tokens=min(
            _kv_tokens(stage, shape, model) for stage, shape in zip(replica.stages, shapes, strict=True)
        ),
    )


def _kv_tokens(stage: Stage, shape: StageShape, model: ModelSpec) -> int:
    if stage.prediction is not None:
        return stage.prediction.kv_capacity_tokens
    room = shape.device.memory_bytes * shape.tensor_parallel * USABLE_MEMORY_RATIO - shape.weight_bytes
    tokens = int(room // shape.kv_bytes_per_token)
    if tokens < 1:
        raise InfeasibleError(
            f"stage on {stage.node} ({stage.tensor_parallel} x {stage.gpu}) has no room for a KV cache: layers "
            f"[{stage.start_layer}, {stage.end_layer}) of {model.name} weigh {format_bytes(shape.weight_bytes)}: "
            "give it fewer layers or more GPUs"
        )
    return tokens
