"""What the gateway and the driver say to each other: requests in, tokens out.

Frozen dataclasses, JSON on the wire, validated by pydantic where they enter. Token ids only: text, chat templates and
stop strings are the gateway's, KV blocks and steps the driver's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

from bimetal.engine.wire.frame import Kind, pack_json, unpack_json
from bimetal.errors import LinkError

FinishReason = Literal["stop", "length", "abort", "deadline", "error"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose each next token. The gateway checks every value (`gateway/sampling.py`) before it is sent."""

    max_tokens: int = 16
    min_tokens: int = 0
    """No end-of-sequence or stop token before this many output tokens."""
    temperature: float = 1.0
    """0: greedy."""
    top_k: int = 0
    """0: off."""
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    """Same seed, same prompt, same logits: same tokens, whatever else is in the batch."""
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    """Number of alternatives reported beside the chosen token; None: no logprobs at all."""
    prompt_logprobs: int | None = None
    """Likewise for each prompt token but the first, which has no distribution."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    grammar: str | None = None
    """An llguidance grammar that the output must follow."""


@dataclass(frozen=True, slots=True)
class Generate:
    """One sequence to continue. `n` choices are n of these, which share their prompt's KV blocks."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    request_class: str = "interactive"
    deadline_s: float | None = None
    """From arrival; a request not finished by then ends with `deadline`."""
    cache_salt: str = ""
    """Requests share prefix blocks only within one salt."""


@dataclass(frozen=True, slots=True)
class Abort:
    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The chosen (or given) token's log-probability, its rank from 1, and the top alternatives by descending value."""

    logprob: float
    rank: int
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Output:
    """New tokens of one request. The last one of a request carries `finish_reason`."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each of `token_ids`, if asked for."""
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    """Sent once, with the first output: one for each prompt token but the first."""
    num_cached_tokens: int = 0
    """Prompt tokens whose KV cache was found, not computed."""
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The token of `stop_token_ids` that ended it; None for an end-of-sequence token. Never part of the text."""
    message: str | None = None
    """For `error`: what went wrong, for people."""


@dataclass(frozen=True, slots=True)
class Outputs:
    outputs: tuple[Output, ...]


@dataclass(frozen=True, slots=True)
class Ready:
    """Sent once every stage serves."""

    model: str
    model_path: str
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    num_kv_blocks: int
    kv_block_tokens: int
    eos_token_ids: tuple[int, ...]
    stages: tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Sent about once a second while serving."""

    num_running: int
    num_waiting: int
    kv_used_ratio: float
    num_preemptions: int
    prefix_hit_tokens: int
    prefix_query_tokens: int
    prompt_tokens: int
    output_tokens: int
    num_steps: int
    num_micro_batches: int
    stage_busy_ratio: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Loading:
    """Progress while weights load: of stage `stage`, `done_bytes` of `total_bytes`."""

    stage: int
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Fatal:
    """The engine cannot go on."""

    message: str


_KINDS: dict[type, Kind] = {
    Ready: Kind.READY,
    Generate: Kind.GENERATE,
    Abort: Kind.ABORT,
    Outputs: Kind.OUTPUTS,
    EngineStats: Kind.ENGINE_STATS,
    Loading: Kind.LOADING,
    Fatal: Kind.FATAL,
}
_ADAPTERS: dict[Kind, TypeAdapter[Any]] = {kind: TypeAdapter(cls) for cls, kind in _KINDS.items()}

Message = Ready | Generate | Abort | Outputs | EngineStats | Loading | Fatal
M = TypeVar("M")


def encode(message: Message) -> bytes:
    """A whole frame."""
    kind = _KINDS[type(message)]
    return pack_json(kind, _ADAPTERS[kind].dump_python(message, mode="json", exclude_defaults=True))


def decode(kind: Kind, payload: bytes | bytearray | memoryview) -> Message:
    """The message of a frame; LinkError names the field that does not fit."""
    adapter = _ADAPTERS.get(kind)
    if adapter is None:
        raise LinkError(f"a {kind.name} frame does not belong between gateway and driver")
    try:
        message: Message = adapter.validate_python(unpack_json(payload))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise LinkError(f"{kind.name}.{where}: {first['msg']} (got {first['input']!r})") from error
    return message
