"""The performance model's throughputs as inputs of economics, which may not know it."""

from __future__ import annotations

import math
from functools import cache

from bimetal.catalog.hardware import GpuSpec, find_gpu
from bimetal.catalog.planned_models import planned_model
from bimetal.economics.audit import Given
from bimetal.economics.claims_performance import ModelAnswers
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


def answers() -> ModelAnswers:
    """What the performance model says where a claim is about throughput or time."""
    mixtral = Serving(
        model="Mixtral-8x7B",
        weights="bfloat16",
        tensor_parallel=2,
        input_tokens=1024,
        output_tokens=256,
        concurrency=32,
    )
    dense = Serving(
        model="Llama-3.1-70B",
        weights="bfloat16",
        tensor_parallel=4,
        input_tokens=1024,
        output_tokens=256,
        concurrency=32,
    )
    narrow = Serving(
        model="Llama-3.1-70B",
        weights="float8",
        tensor_parallel=8,
        input_tokens=1024,
        output_tokens=1024,
        concurrency=256,
    )
    mi300x, h100, mi355x = find_gpu("MI300X"), find_gpu("H100"), find_gpu("MI355X")
    tpot = estimate_serving(serving_point(mi300x, dense), _calibration()).tpot_s
    return ModelAnswers(
        mixtral_ratio=_ratio(mi300x, h100, mixtral),
        dense_70b_ratio=_ratio(mi300x, h100, dense),
        dense_70b_tpot_s=Given(
            tpot.value, tpot.low, tpot.high, f"performance model, rests on {tpot.rests_on}"
        ),
        mi355x_over_mi300x=_ratio(mi355x, mi300x, narrow),
    )


def _ratio(above: GpuSpec, below: GpuSpec, serving: Serving) -> Given:
    """Of two predictions taken as independent, which widens the interval: what they share would cancel."""
    a, b = predict_rate(above, serving), predict_rate(below, serving)
    half = math.hypot(math.log(a.high / a.value), math.log(b.high / b.value))
    value = a.value / b.value
    source = (
        f"performance model, 90% interval: {serving.model} {serving.weights}, {serving.tensor_parallel} GPUs, "
        f"{serving.concurrency:g} at once; rests on {a.rests_on} and {b.rests_on}"
    )
    return Given(value, value * math.exp(-half), value * math.exp(half), source)
