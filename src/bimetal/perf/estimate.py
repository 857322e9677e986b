"""What a replica will do: TPOT, TTFT and throughput with intervals, what binds, and whether it fits at all."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from bimetal.errors import InfeasibleError
from bimetal.perf.calibration import Calibration, Prediction
from bimetal.perf.equations import closed_loop
from bimetal.perf.observations import Query
from bimetal.perf.point import ServingPoint
from bimetal.perf.work import count_work
from bimetal.units import format_bytes


@dataclass(frozen=True, slots=True)
class ServingEstimate:
    """Of one replica in a closed loop."""

    tpot_s: Prediction
    ttft_s: Prediction
    output_tokens_per_s: Prediction
    num_seqs: float
    """Decoded together; less than the concurrency where the cache is full."""
    shares: dict[str, float]
    """Of the time per output token: weights, compute, cache, network, overhead, prefill of others."""

    @property
    def binds(self) -> str:
        return max(self.shares, key=self.shares.__getitem__)


def estimate_serving(point: ServingPoint, calibration: Calibration) -> ServingEstimate:
    """InfeasibleError if the weights do not fit."""
    closed = replace(point, regime="closed-loop")
    work = count_work([closed])
    if work.kv_room_bytes[0] <= 1.0:
        weights = work.dense_bytes[0] + work.expert_bytes[0] + 2 * work.head_bytes[0]
        have = point.gpu.memory_bytes * point.tensor_parallel
        raise InfeasibleError(
            f"{point.model.name} weighs {format_bytes(weights)}, {point.tensor_parallel} x {point.gpu.name} have "
            f"{format_bytes(have)}: raise tensor parallelism, or use a narrower dtype"
        )
    tpot, ttft, rate = calibration.predict([Query(closed, t) for t in ("tpot", "ttft", "rate")])
    serving = closed_loop(work, calibration.coefficients([closed]))
    parts = serving.step
    seconds = {
        "weights": parts.weights_s,
        "compute": np.maximum(parts.multiply_s - parts.weights_s, 0.0),
        "kv cache": parts.cache_s,
        "network": parts.network_s,
        "overhead": parts.overhead_s,
        "prefill of others": serving.tpot_s - parts.step_s,
    }
    total = sum(float(s[0]) for s in seconds.values())
    shares = {name: float(s[0]) / total for name, s in seconds.items()}
    return ServingEstimate(tpot, ttft, rate, float(serving.num_seqs[0]), shares)
