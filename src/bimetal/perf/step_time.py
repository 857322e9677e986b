"""How long one stage takes for one decode step, and what it must hold in memory.

Turns a range of layers on a group of GPUs into the equations' terms, with fitted coefficients for GPUs and plain ones for
CPU threads, whose figures are given or measured. Does not know how layers are chosen (planner) nor how steps overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from bimetal.catalog.hardware import GpuSpec
from bimetal.catalog.models import ModelSpec
from bimetal.perf.calibration import Calibration, published_calibration
from bimetal.perf.equations import SHARES, TERMS, decode_parts
from bimetal.perf.hierarchy import PRIORS
from bimetal.perf.point import BIMETAL, ServingPoint, WeightFormat
from bimetal.perf.work import ACTIVATION_BYTES, Array, count_work
from bimetal.units import DTYPE_BYTES

__all__ = ["ACTIVATION_BYTES", "StageShape", "StepEstimate", "decode_step", "decode_steps"]

Binding = Literal["weights", "kv cache", "compute", "network", "overhead"]

_FORMATS: dict[str, WeightFormat] = {
    "float32": "float32",
    "bfloat16": "bfloat16",
    "float16": "bfloat16",
    "float8": "float8",
    "float4": "float4",
}
_PLAIN = dict.fromkeys(SHARES, 1.0) | {term: 1e-9 for term in TERMS if term.endswith("_s")} | {"gain": 0.0}
"""For a CPU: its figures are what it reaches, so that nothing is taken off, and nothing is known of overheads."""


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
    def weight_bytes(self) -> int:
        """Over the whole group. FP8 checkpoints keep embedding and output head in 16 bits; a mere `dtype` says nothing of them."""
        params = self.model.stage_params(self.start_layer, self.end_layer)
        narrow = self.model.quantization is not None and self.dtype == "float8"
        ends = self.model.stage_embedding_params(self.start_layer, self.end_layer) if narrow else 0
        return int((params - ends) * DTYPE_BYTES[self.dtype] + ends * ACTIVATION_BYTES)

    @property
    def kv_copies(self) -> int:
        """Ranks that hold the same key/value head, where there are more ranks than heads."""
        return max(1, self.tensor_parallel // self.model.num_kv_heads)

    @property
    def kv_bytes_per_token(self) -> int:
        """Over the whole group. The cache keeps 16 bits unless weights are wider."""
        layers = self.end_layer - self.start_layer
        return self.model.kv_bytes_per_token(self.kv_dtype, layers) * self.kv_copies

    @property
    def kv_dtype(self) -> str:
        return "float32" if self.dtype == "float32" else "bfloat16"

    def point(self, num_seqs: float, mean_context: float) -> ServingPoint:
        """The stage as a serving point of this project's own engine."""
        return ServingPoint(
            gpu=self.device,
            model=self.model,
            engine=BIMETAL,
            weight_format=_FORMATS[self.dtype],
            kv_bytes=DTYPE_BYTES[self.kv_dtype],
            tensor_parallel=self.tensor_parallel,
            input_tokens=mean_context,
            output_tokens=1.0,
            regime="static-batch",
            concurrency=num_seqs,
            start_layer=self.start_layer,
            end_layer=self.end_layer,
        )


@dataclass(frozen=True, slots=True)
class StepEstimate:
    """One step of one stage, split by what takes the time; `step_s` is less than the sum where parts overlap."""

    weights_s: float
    kv_s: float
    compute_s: float
    network_s: float
    overhead_s: float
    step_s: float

    @property
    def memory_s(self) -> float:
        return self.weights_s + self.kv_s

    @property
    def binds(self) -> Binding:
        """The largest term: what to buy more of."""
        parts: dict[Binding, float] = {
            "weights": self.weights_s,
            "kv cache": self.kv_s,
            "compute": self.compute_s,
            "network": self.network_s,
            "overhead": self.overhead_s,
        }
        return max(parts, key=parts.__getitem__)


def decode_step(
    shape: StageShape, num_seqs: float, mean_context: float, calibration: Calibration | None = None
) -> StepEstimate:
    """One token for each of `num_seqs` sequences that have `mean_context` tokens in the cache.

    The embedding lookup reads one row per sequence and is left out; the output head is read whole by the last stage.
    """
    return decode_steps([shape], num_seqs, mean_context, calibration)[0]


def decode_steps(
    shapes: Sequence[StageShape], num_seqs: float, mean_context: float, calibration: Calibration | None = None
) -> list[StepEstimate]:
    """Many stages at once, which costs hardly more than one. All on one kind of device."""
    if not shapes:
        return []
    size = len(shapes)
    work = count_work([shape.point(num_seqs, mean_context) for shape in shapes])
    coefficients = coefficients_of(shapes, calibration)
    parts = decode_parts(
        work, coefficients, np.full(size, float(num_seqs)), np.full(size, float(mean_context))
    )
    columns = (
        *(parts.weights_s, parts.cache_s, parts.multiply_s),
        *(parts.network_s, parts.overhead_s, parts.step_s * coefficients["tpot_bias"]),
    )
    return [StepEstimate(*(float(column[i]) for column in columns)) for i in range(size)]


def coefficients_of(
    shapes: Sequence[StageShape], calibration: Calibration | None = None, draw: int | None = None
) -> dict[str, Array]:
    """Fitted ones for GPUs, ones for CPUs, and the user's own where a device was measured; all shapes are on one device."""
    calibration = calibration or published_calibration()
    device = shapes[0].device
    if device.is_cpu:
        found = {term: np.full(len(shapes), _PLAIN.get(term, 1.0)) for term in PRIORS}
    else:
        found = calibration.coefficients([shape.point(1.0, 1.0) for shape in shapes], draw)
    for term, value in calibration.measured.get(device.name, {}).items():
        found[term] = np.full(len(shapes), value)
    if device.name in calibration.measured:
        # measured on dense weights; experts are read no faster
        found["expert_rate"] = np.minimum(found["expert_rate"], found["weight_rate"])
        found["tpot_bias"] = np.ones(len(shapes))
    return found
