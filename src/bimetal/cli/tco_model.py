"""The performance model's throughputs as inputs of economics, which may not know it."""

from __future__ import annotations

import math
from functools import cache

from bimetal.catalog.hardware import GpuSpec
from bimetal.catalog.planned_models import planned_model
from bimetal.economics.quantity import NORMAL_P90, Quantity
from bimetal.economics.scenario_file import Serving
from bimetal.perf.calibration import NORMAL_90, Calibration, Prediction, published_calibration
from bimetal.perf.estimate import estimate_serving
from bimetal.perf.point import ServingPoint


@cache
def _calibration() -> Calibration:
    return published_calibration()


def throughput_of(gpu: GpuSpec, serving: Serving) -> Quantity:
    """Output tokens per second of one GPU, log-normal, as the model's interval has it."""
    rate = predict_rate(gpu, serving)
    sd = math.log(rate.high / rate.value) / NORMAL_90
    numbers = tuple(
        rate.value * math.exp(sign * NORMAL_P90 * sd) / serving.tensor_parallel for sign in (-1, 1)
    )
    source = (
        f"performance model (a model, not a measurement): {serving.model}, {serving.weights}, "
        f"{serving.tensor_parallel} GPUs, {serving.input_tokens:g} in, {serving.output_tokens:g} out, "
        f"{serving.concurrency:g} at once; rests on {rate.rests_on}"
    )
    return Quantity(("p10", "p90"), numbers, source, _calibration().date, (0.0, math.inf))


def predict_rate(gpu: GpuSpec, serving: Serving) -> Prediction:
    """Output tokens per second of one replica."""
    return estimate_serving(serving_point(gpu, serving), _calibration()).output_tokens_per_s


def serving_point(gpu: GpuSpec, serving: Serving) -> ServingPoint:
    return ServingPoint(
        gpu=gpu,
        model=planned_model(serving.model),
        engine="vllm-rocm" if gpu.vendor == "AMD" else "vllm",
        weight_format=serving.weights,
        kv_bytes=2.0,
        tensor_parallel=serving.tensor_parallel,
        input_tokens=serving.input_tokens,
        output_tokens=serving.output_tokens,
        regime="closed-loop",
        concurrency=serving.concurrency,
    )
