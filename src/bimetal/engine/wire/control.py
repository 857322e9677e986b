"""What the driver tells a stage before steps flow, and what the stage answers: JSON documents, validated where they enter.

driver -> LOAD    LoadStage       stage -> LOADING*, LOADED  StageLoaded
driver -> START   StartStage      stage -> STARTED           StageStarted
driver -> STATS   AskStats        stage -> STATS     StageStats
driver -> PROBE                   stage -> PROBE     (a document for people)
stage  -> FAILED  StageFailed     at any time
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from bimetal.engine.wire.frame import Kind, pack_json, unpack_json
from bimetal.engine.wire.options import KernelChoice, LinkKind
from bimetal.errors import LinkError


@dataclass(frozen=True, slots=True)
class LoadStage:
    """Hold layers [start_layer, end_layer) of `model` on `device`."""

    index: int
    num_stages: int
    model: str
    start_layer: int
    end_layer: int
    device: str
    dtype: str
    load_format: str
    seed: int
    block_tokens: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    gpu_memory_utilization: float
    kv_cache_bytes: int | None
    enforce_eager: bool
    num_threads: int | None = None
    kernels: KernelChoice = "auto"


@dataclass(frozen=True, slots=True)
class StageLoaded:
    weight_bytes: int
    bytes_read: int
    """From the checkpoint; 0 for dummy weights."""
    max_kv_blocks: int
    kv_block_bytes: int
    device: dict[str, Any]
    fingerprint: dict[str, str]
    load_s: float


@dataclass(frozen=True, slots=True)
class StageEdge:
    """A message kind that this stage sends, and where to."""

    kind: str
    target: int
    address: str


@dataclass(frozen=True, slots=True)
class StartStage:
    """Allocate `num_kv_blocks`, connect the outgoing edges, await the incoming ones, time some decode steps."""

    epoch: int
    num_kv_blocks: int
    outgoing: tuple[StageEdge, ...]
    incoming: tuple[str, ...]
    """Edge kinds that other stages will open to this one."""
    link: LinkKind = "tcp"
    """What carries hidden states."""


@dataclass(frozen=True, slots=True)
class StageStarted:
    decode_step_s: dict[int, float]
    """Measured seconds of a decode step by number of sequences."""


@dataclass(frozen=True, slots=True)
class AskStats:
    """Tell what was done, and watch from now on what is named here, until asked again."""

    watch_experts: bool = False
    """Count the experts that decode steps hit; steps run without graphs meanwhile."""
    profile: bool = False
    measure_peaks: bool = False
    """Measure now what the device reaches, for a good part of a second."""


@dataclass(frozen=True, slots=True)
class StageStats:
    """Since the last STATS."""

    busy_s: float
    input_wait_s: float
    num_steps: int
    num_tokens: int
    num_expert_rows: int = 0
    """Rows of the largest decode steps while experts were watched."""
    distinct_experts: tuple[float, ...] = ()
    """Mean number of experts that each layer with experts hit in a step of so many rows."""
    kernel_s: dict[str, float] = field(default_factory=dict)
    """Of the profile: the device's seconds by kernel family."""
    peak_bytes_per_s: float = 0.0
    peak_flops_per_s: float = 0.0
    """0: not measured."""


@dataclass(frozen=True, slots=True)
class StageFailed:
    message: str
    detail: str = ""


_KINDS: dict[type, Kind] = {
    LoadStage: Kind.LOAD,
    StageLoaded: Kind.LOADED,
    StartStage: Kind.START,
    StageStarted: Kind.STARTED,
    AskStats: Kind.STATS,
    StageStats: Kind.STATS,
    StageFailed: Kind.FAILED,
}
_ADAPTERS: dict[type, TypeAdapter[Any]] = {cls: TypeAdapter(cls) for cls in _KINDS}
M = TypeVar("M")


def encode_control(
    message: LoadStage | StageLoaded | StartStage | StageStarted | AskStats | StageStats | StageFailed,
) -> bytes:
    """A whole frame."""
    return pack_json(_KINDS[type(message)], _ADAPTERS[type(message)].dump_python(message, mode="json"))


def decode_control(expected: type[M], payload: bytes | bytearray | memoryview) -> M:
    """LinkError names the field that does not fit."""
    try:
        message: M = _ADAPTERS[expected].validate_python(unpack_json(payload))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise LinkError(f"{expected.__name__}.{where}: {first['msg']} (got {first['input']!r})") from error
    return message
