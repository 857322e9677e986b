"""`Work`: what a step must move and multiply, counted from shapes alone, for many serving points at once.

Knows bytes, FLOPs and messages. Knows no efficiency and no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from bimetal.catalog.links import group_bytes_per_s
from bimetal.catalog.models import ModelSpec
from bimetal.perf.point import ServingPoint

Array = NDArray[np.float64]

LEAST_HEAD_BYTES = 2.0
"""Embedding and output head stay 16 bits wide in every published quantised checkpoint."""
ACTIVATION_BYTES = 2
PCIE_BYTES_PER_S = 32e9
USABLE_MEMORY_RATIO = 0.9
RUNTIME_BYTES = 3e9
"""Per GPU: context, graphs and activations."""


@dataclass(frozen=True, slots=True)
class LayerCounts:
    """Sums over a model's layers, in parameters, tokens' worth of cache and multiplications."""

    dense_params: float
    expert_params: float
    """Of all experts, over all layers."""
    active_params: float
    full_layers: int
    windowed_layers: int
    window: float
    expert_layers: int


@lru_cache(maxsize=4096)
def count_layers(model: ModelSpec, start_layer: int, end_layer: int) -> LayerCounts:
    """Once per model and range."""
    every = range(start_layer, end_layer)
    windows = [model.sliding_window(i) for i in every]
    windowed = [w for w in windows if w is not None]
    return LayerCounts(
        dense_params=sum(model.layer_params(i, 0.0) for i in every),
        expert_params=sum(model.num_experts * model.expert_params for i in every if model.has_experts(i)),
        active_params=sum(model.layer_params(i, float(model.experts_per_token)) for i in every),
        full_layers=len(every) - len(windowed),
        windowed_layers=len(windowed),
        window=float(max(windowed, default=0)),
        expert_layers=sum(model.has_experts(i) for i in every),
    )


@dataclass(frozen=True, slots=True)
class Work:
    """One entry per serving point. Rates and bytes are of the whole tensor-parallel group."""

    ranks: Array
    layers: Array
    expert_layers: Array
    bytes_per_s: Array
    flops_per_s: Array
    attention_flops_per_s: Array
    die_flops_per_s: Array
    """16-bit peak of one GPU: how far its generation has come."""
    group_bytes_per_s: Array
    """What one GPU sends to its peers; infinite for a group of one."""
    dense_bytes: Array
    expert_bytes: Array
    expert_chance: Array
    """That a token chooses a given expert; 0 without experts."""
    head_bytes: Array
    flops_per_token: Array
    head_flops: Array
    kv_full_bytes: Array
    """Per token of context in layers that see all of it."""
    kv_windowed_bytes: Array
    window: Array
    attention_flops: Array
    """Per token and token of context, full layers."""
    windowed_attention_flops: Array
    payload_bytes: Array
    """Of one token in one all-reduce."""
    kv_room_bytes: Array
    """Left for the cache when the weights are loaded."""
    input_tokens: Array
    output_tokens: Array
    concurrency: Array
    """Infinite where it is whatever fits."""
    max_num_seqs: Array
    arrivals_per_s: Array
    """Infinite where arrivals are whatever is served."""

    def __len__(self) -> int:
        return len(self.ranks)

    def take(self, index: NDArray[np.intp]) -> Work:
        """A subset of the points."""
        return Work(*(getattr(self, f.name)[index] for f in fields(self)))


def count_work(points: Sequence[ServingPoint]) -> Work:
    """Arrays in the order of `points`."""
    columns = [_count(point) for point in points]
    names = [f.name for f in fields(Work)]
    return Work(*(np.array([column[name] for column in columns], dtype=np.float64) for name in names))


def _count(point: ServingPoint) -> dict[str, float]:
    model, gpu, ranks = point.model, point.gpu, point.tensor_parallel
    start, end = point.layers
    layers = count_layers(model, start, end)
    has_head = end == model.num_layers
    table_bytes = model.embedding_params * max(LEAST_HEAD_BYTES, point.linear_bytes)
    copies = max(1.0, ranks / model.num_kv_heads) if model.family != "deepseek_v3" else float(ranks)
    kv_per_layer = model.kv_bytes_per_token("bfloat16", 1) / 2 * point.kv_bytes * copies
    weights = (
        layers.dense_params * point.linear_bytes
        + layers.expert_params * point.expert_bytes
        + ((start == 0) + has_head) * table_bytes
    )
    usable = gpu.memory_bytes * USABLE_MEMORY_RATIO - RUNTIME_BYTES
    score_flops = 4.0 * model.query_size
    return {
        "ranks": ranks,
        "layers": end - start,
        "expert_layers": layers.expert_layers,
        "bytes_per_s": gpu.memory_bytes_per_s * ranks,
        "flops_per_s": point.peak_flops_per_s * ranks,
        "attention_flops_per_s": gpu.bf16_flops_per_s * ranks,
        "die_flops_per_s": gpu.bf16_flops_per_s,
        "group_bytes_per_s": (group_bytes_per_s(gpu, ranks) or PCIE_BYTES_PER_S) if ranks > 1 else np.inf,
        "dense_bytes": layers.dense_params * point.linear_bytes,
        "expert_bytes": layers.expert_params * point.expert_bytes,
        "expert_chance": model.experts_per_token / model.num_experts if model.num_experts else 0.0,
        "head_bytes": has_head * table_bytes,
        "flops_per_token": 2.0 * layers.active_params,
        "head_flops": has_head * 2.0 * model.embedding_params,
        "kv_full_bytes": layers.full_layers * kv_per_layer,
        "kv_windowed_bytes": layers.windowed_layers * kv_per_layer,
        "window": layers.window,
        "attention_flops": layers.full_layers * score_flops,
        "windowed_attention_flops": layers.windowed_layers * score_flops,
        "payload_bytes": model.hidden_size * ACTIVATION_BYTES,
        "kv_room_bytes": max(usable * ranks - weights, 1.0),
        "input_tokens": point.input_tokens,
        "output_tokens": point.output_tokens,
        "concurrency": np.inf if point.concurrency is None else point.concurrency,
        "max_num_seqs": point.max_num_seqs,
        "arrivals_per_s": np.inf if point.arrivals_per_s is None else point.arrivals_per_s,
    }
