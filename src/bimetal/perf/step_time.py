"""How long one stage takes for one decode step, and what it must hold in memory.

A roofline: the larger of the time to stream weights and KV cache and the time to multiply, plus the all-reduces of a
tensor-parallel group. Does not know how layers are chosen (planner) nor how steps overlap between stages.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from bimetal.catalog.hardware import GpuSpec
from bimetal.catalog.links import group_bytes_per_s
from bimetal.catalog.models import ModelSpec
from bimetal.units import DTYPE_BYTES, GIGA, US_PER_S

Binding = Literal["weights", "kv cache", "compute", "network"]

DEFAULT_BANDWIDTH_RATIO = 0.75
DEFAULT_COMPUTE_RATIO = 0.6
"""Where the catalogue has no achieved fraction: between what MI300X and H100 reach on large matrices."""
ACTIVATION_BYTES = 2
ALL_REDUCE_LATENCY_S = 10 / US_PER_S
UNKNOWN_GROUP_BYTES_PER_S = 32 * GIGA
"""A PCIe 4 x16 slot, where the catalogue names no scale-up link."""


@dataclass(frozen=True, slots=True)
class StageShape:
    """Layers [start_layer, end_layer) of a model on a group of `tensor_parallel` GPUs of one kind."""

    model: ModelSpec
    start_layer: int
    end_layer: int
    device: GpuSpec
    tensor_parallel: int = 1
    dtype: str = "bfloat16"

    @property
    def is_last(self) -> bool:
        return self.end_layer == self.model.num_layers

    @property
    def weight_bytes(self) -> int:
        """Over the whole group."""
        params = self.model.stage_params(self.start_layer, self.end_layer)
        return int(params * DTYPE_BYTES[self.dtype])

    @property
    def kv_copies(self) -> int:
        """Ranks that hold the same key/value head, where there are more ranks than heads."""
        return max(1, self.tensor_parallel // self.model.num_kv_heads)

    @property
    def kv_bytes_per_token(self) -> int:
        """Over the whole group. The cache keeps 16 bits unless weights are wider."""
        dtype = "float32" if self.dtype == "float32" else "bfloat16"
        layers = self.end_layer - self.start_layer
        return self.model.kv_bytes_per_token(dtype, layers) * self.kv_copies


@dataclass(frozen=True, slots=True)
class StepEstimate:
    """One step of one stage, split by what takes the time."""

    weights_s: float
    kv_s: float
    compute_s: float
    network_s: float

    @property
    def memory_s(self) -> float:
        return self.weights_s + self.kv_s

    @property
    def step_s(self) -> float:
        return max(self.memory_s, self.compute_s) + self.network_s

    @property
    def binds(self) -> Binding:
        """The largest term: what to buy more of."""
        parts: dict[Binding, float] = {"weights": self.weights_s, "kv cache": self.kv_s}
        if self.compute_s > self.memory_s:
            parts = {"compute": self.compute_s}
        return max([*parts, "network"], key={**parts, "network": self.network_s}.__getitem__)


def distinct_experts(num_experts: int, experts_per_token: int, num_tokens: float) -> float:
    """Experts that at least one of `num_tokens` tokens chooses, if each chooses at random: E (1 - (1 - k/E)^n).

    >>> distinct_experts(8, 2, 1)
    2.0
    """
    missed: float = (1 - experts_per_token / num_experts) ** num_tokens
    return num_experts * (1 - missed)


@lru_cache(maxsize=65536)
def layer_groups(model: ModelSpec, start_layer: int, end_layer: int) -> tuple[tuple[int, int], ...]:
    """(a layer, how many of [start_layer, end_layer) are of its kind), so that deep stages are reckoned at once."""
    first: dict[tuple[bool, int | None], int] = {}
    counts: Counter[tuple[bool, int | None]] = Counter()
    for layer in range(start_layer, end_layer):
        kind = (model.has_experts(layer), model.sliding_window(layer))
        first.setdefault(kind, layer)
        counts[kind] += 1
    return tuple((first[kind], count) for kind, count in counts.items())


def decode_step(shape: StageShape, num_seqs: float, mean_context: float) -> StepEstimate:
    """One token for each of `num_seqs` sequences that have `mean_context` tokens in the cache.

    The embedding lookup reads one row per sequence and is left out; the output head is read whole by the last stage.
    """
    model, device, ranks = shape.model, shape.device, shape.tensor_parallel
    weights_read = flops_params = kv_tokens = 0.0
    for layer, count in layer_groups(model, shape.start_layer, shape.end_layer):
        held, used = None, None
        if model.has_experts(layer):
            held = distinct_experts(model.num_experts, model.experts_per_token, num_seqs)
            used = float(model.experts_per_token)
        weights_read += count * model.layer_params(layer, held)
        flops_params += count * model.layer_params(layer, used)
        window = model.sliding_window(layer)
        kv_tokens += count * num_seqs * min(mean_context, window or mean_context)
    if shape.is_last:
        weights_read += model.embedding_params + model.hidden_size
        flops_params += model.embedding_params

    bandwidth = (
        device.memory_bytes_per_s * (device.bandwidth_achieved_ratio or DEFAULT_BANDWIDTH_RATIO) * ranks
    )
    kv_per_layer = model.kv_bytes_per_token("float32" if shape.dtype == "float32" else "bfloat16", 1)
    attention_flops = 4 * model.query_size * kv_tokens
    peak = device.flops_per_s(shape.dtype) * (device.bf16_achieved_ratio or DEFAULT_COMPUTE_RATIO) * ranks
    return StepEstimate(
        weights_s=weights_read * DTYPE_BYTES[shape.dtype] / bandwidth,
        kv_s=kv_tokens * kv_per_layer * shape.kv_copies / bandwidth,
        compute_s=(2 * flops_params * num_seqs + attention_flops) / peak,
        network_s=2 * (shape.end_layer - shape.start_layer) * all_reduce_s(shape, num_seqs),
    )


def all_reduce_s(shape: StageShape, num_tokens: float) -> float:
    """Ring all-reduce of [num_tokens, hidden] over the group: 2 (n - 1)/n of the payload at the group's rate."""
    ranks = shape.tensor_parallel
    if ranks == 1:
        return 0.0
    payload = num_tokens * shape.model.hidden_size * ACTIVATION_BYTES
    rate = group_bytes_per_s(shape.device, ranks) or UNKNOWN_GROUP_BYTES_PER_S
    return ALL_REDUCE_LATENCY_S + 2 * (ranks - 1) / ranks * payload / rate
