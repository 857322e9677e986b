"""`ServingPoint`: one way of serving one model, of which a time may be measured or predicted.

Owns the names of engine families, load regimes and precisions. Knows no times.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bimetal.catalog.hardware import GpuSpec
from bimetal.catalog.models import ModelSpec

Regime = Literal["closed-loop", "static-batch", "offline", "server", "interactive"]
"""closed-loop: a new request follows each answer. static-batch: all start and end together. offline: as many at once as
memory and the engine allow, for throughput. server: arrivals at random, as many as a latency limit allows, or
`arrivals_per_s`; interactive: the same with a tight limit."""

WeightFormat = Literal["float32", "bfloat16", "float8", "float4", "mxfp4"]
"""mxfp4: experts only; the rest is 16 bits wide."""

BLOCK_SCALE_BYTES = {"float4": 1 / 16, "mxfp4": 1 / 32}
"""A scale byte for 16 weights (nvfp4) or 32 (mxfp4)."""


BIMETAL = "bimetal"
"""This project's own engine: no published row, so that it gets what the other families have in common."""


@dataclass(frozen=True, slots=True)
class ServingPoint:
    """A replica of `tensor_parallel` GPUs under one load."""

    gpu: GpuSpec
    model: ModelSpec
    engine: str
    """Family: `tensorrt-llm`, `vllm`, `sglang`; `vllm-2024` before its rewrite; `vllm-rocm` on AMD."""
    weight_format: WeightFormat
    kv_bytes: float
    """Per element of the cache: 2 or 1."""
    tensor_parallel: int
    input_tokens: float
    output_tokens: float
    regime: Regime
    concurrency: float | None = None
    """Requests in flight, or given at once; None: whatever fits."""
    max_num_seqs: float = 2048.0
    """The engine's own limit on sequences that it decodes together."""
    arrivals_per_s: float | None = None
    setting: str = ""
    """Who set the engine up and measured it: a group of like runs."""
    version: str = ""
    start_layer: int = 0
    end_layer: int | None = None
    """Half-open range of the layers held; None: to the last."""

    @property
    def layers(self) -> tuple[int, int]:
        return self.start_layer, self.model.num_layers if self.end_layer is None else self.end_layer

    @property
    def die(self) -> str:
        """GPUs with one compute die and different memories share what their kernels reach."""
        return f"{self.gpu.vendor} {self.gpu.bf16_flops_per_s / 1e12:.0f}"

    @property
    def linear_bytes(self) -> float:
        """Per weight of a dense layer."""
        return {
            "float32": 4.0,
            "bfloat16": 2.0,
            "float8": 1.0,
            "float4": 0.5 + BLOCK_SCALE_BYTES["float4"],
            "mxfp4": 2.0,
        }[self.weight_format]

    @property
    def expert_bytes(self) -> float:
        """Per weight of an expert."""
        return 0.5 + BLOCK_SCALE_BYTES["mxfp4"] if self.weight_format == "mxfp4" else self.linear_bytes

    @property
    def peak_flops_per_s(self) -> float:
        """Of one GPU, dense. mxfp4 weights meet 8-bit activations where the GPU has 4-bit units, 16-bit ones elsewhere."""
        if self.weight_format == "mxfp4":
            return self.gpu.flops_per_s("float8" if self.gpu.fp4_flops_per_s else "bfloat16")
        return self.gpu.flops_per_s(self.weight_format)
