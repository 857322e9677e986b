"""`EngineOptions`: everything that a driver must be told before it can load a plan.

Passed as one JSON argument to the driver's process, by `serve`, `bench` and tests alike, so that what is benchmarked
is what serves. Knows names and bounds of options; not how the engine obeys them, nor anything of HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from bimetal.errors import ConfigError
from bimetal.units import DTYPE_BYTES

LinkKind = Literal["tcp", "nixl"]
LoadFormat = Literal["safetensors", "dummy"]
KernelChoice = Literal["auto", "torch", "triton"]

_SEED_LIMIT = 2**64


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """One engine: a plan, and how to run it. None: the engine chooses, from the plan or from what it finds."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    plan: dict[str, Any]
    """A plan document, as `bimetal.plan.parse_plan` reads it."""
    max_model_len: int | None = None
    """Tokens of prompt and output of one request together; None: the plan's."""
    max_num_seqs: int | None = None
    """Requests that run at once; None: the plan's."""
    max_num_batched_tokens: int | None = None
    """Token budget of one step, prefill and decode together."""
    gpu_memory_utilization: float = 0.9
    """Share of a device's memory that weights and KV cache may take, 0 to 1."""
    kv_cache_bytes: int | None = None
    """KV cache of each stage; None: what `gpu_memory_utilization` leaves."""
    block_tokens: int | None = None
    """Tokens a KV block."""
    enable_prefix_caching: bool = True
    enforce_eager: bool = False
    """No graph capture."""
    dtype: str | None = None
    """None: the plan's."""
    num_micro_batches: int | None = None
    """None: the plan's, else chosen from measured step times."""
    link: LinkKind = "tcp"
    load_format: LoadFormat = "safetensors"
    """`dummy`: random weights of the model's shape; nothing is read but its config."""
    kernels: KernelChoice = "auto"
    """`auto`: Triton's on GPUs, torch's elsewhere."""
    step_timeout_s: float = 300.0
    """A stage that answers to nothing for so long while steps are due has hung, and ends the engine."""
    seed: int = 0
    """Of dummy weights, and of requests that bring none."""

    def __post_init__(self) -> None:
        for name in (
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "kv_cache_bytes",
            "block_tokens",
            "num_micro_batches",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}, but must be at least 1: raise it, or leave it out")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"gpu_memory_utilization is {self.gpu_memory_utilization}, but is a share above 0 and up to 1: "
                "0.9 leaves a tenth of the device to others"
            )
        if not self.step_timeout_s > 0:
            raise ConfigError(
                f"step_timeout_s is {self.step_timeout_s}, but must be above 0: the longest that a step may take"
            )
        if self.dtype is not None and self.dtype not in DTYPE_BYTES:
            raise ConfigError(f"dtype is {self.dtype!r}, but must be one of {', '.join(DTYPE_BYTES)}")
        if not 0 <= self.seed < _SEED_LIMIT:
            raise ConfigError(f"seed is {self.seed}, but must be from 0 to 2**64 - 1")

    def to_json(self) -> str:
        """Fields at their default left out; `from_json` gives an equal object."""
        return _ADAPTER.dump_json(self, exclude_defaults=True).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> EngineOptions:
        """ConfigError names the option that does not fit."""
        try:
            return _ADAPTER.validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "document"
            raise ConfigError(f"engine options: {where}: {first['msg']} (got {first['input']!r})") from error


_ADAPTER = TypeAdapter(EngineOptions)
