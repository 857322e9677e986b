"""How much of their peaks the stages used: MBU of decode steps, MFU of a whole run, and whether dummy routing spread.

    MBU = bytes that a decode step must move / (its time * bytes/s)        the stage's idle time counts
    MFU = FLOPs that the run's tokens need / (its duration * FLOP/s)

A decode step must read every weight that it uses (of the experts, those that were hit; the input embedding is a
look-up), read the keys and values of every sequence and write those of one token each. Bytes and FLOPs come from
`perf.work`. Pure: it knows no driver.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from bimetal.perf.step_time import StageShape
from bimetal.perf.work import Work, count_work

LEAST_ROWS = 16
"""From this many rows on, uniform routing reaches nearly all of eight experts."""
LEAST_SPREAD_RATIO = 7.5 / 8


@dataclass(frozen=True, slots=True)
class Peaks:
    """What a stage's device can do, and who says so."""

    bytes_per_s: float
    flops_per_s: float
    source: str


@dataclass(frozen=True, slots=True)
class ExpertsHit:
    """In decode steps of `num_rows` rows: the mean number of distinct experts, a layer each."""

    num_rows: int
    num_experts: int
    distinct: tuple[float, ...]
    """Over all stages, in order of layers."""
    is_invalid: bool
    """Dummy routing that does not spread reads fewer weights than a real model would: the run says nothing."""

    @property
    def hit_ratio(self) -> float:
        return sum(self.distinct) / len(self.distinct) / self.num_experts


@dataclass(frozen=True, slots=True)
class StageUse:
    """Of one stage. None: there was no window in which every request decoded, or no peak is known."""

    step_bytes: float | None
    mbu_ratio: float | None
    mfu_ratio: float | None


def step_bytes(shape: StageShape, num_seqs: float, context: float, hit_ratio: float) -> float:
    """That one decode step of `num_seqs` sequences with `context` tokens each must move. `hit_ratio`: share of the
    experts that are read.

    >>> from bimetal.catalog.hardware import find_gpu
    >>> from bimetal.catalog.models import builtin_model
    >>> llama = StageShape(builtin_model("Llama-3.1-8B"), 0, 32, find_gpu("H200"))
    >>> round(step_bytes(llama, 32, 256, 1.0) / 1e9, 1)
    16.1
    """
    work = _work(shape, num_seqs, context)
    weights = work.dense_bytes + work.head_bytes + work.expert_bytes * hit_ratio
    read = work.kv_full_bytes * context + work.kv_windowed_bytes * np.minimum(context, work.window)
    written = work.kv_full_bytes + work.kv_windowed_bytes
    return float((weights + num_seqs * (read + written))[0])


def run_flops(shape: StageShape, input_tokens: int, output_tokens: int) -> float:
    """Of one request from its first prompt token to its last token, which is not fed in again."""
    fed = input_tokens + output_tokens - 1
    work = _work(shape, 1.0, float(fed))
    pairs = _attended(fed, None) * work.attention_flops
    pairs = pairs + _attended(fed, int(work.window[0])) * work.windowed_attention_flops
    return float((fed * work.flops_per_token + output_tokens * work.head_flops + pairs)[0])


def _attended(num_tokens: int, window: int | None) -> float:
    """Pairs of a token and one that it sees, itself included.

    >>> _attended(4, None), _attended(4, 2)
    (10.0, 7.0)
    """
    if window is None or window >= num_tokens:
        return num_tokens * (num_tokens + 1) / 2
    return window * (window + 1) / 2 + (num_tokens - window) * float(window)


def _work(shape: StageShape, num_seqs: float, context: float) -> Work:
    return count_work([shape.point(num_seqs, context)])


def least_distinct_experts(num_experts: int, top_k: int, num_rows: int) -> float:
    """Below this a dummy run is invalid: 7.5 of Mixtral's 8, and as much of what uniform routing would hit elsewhere.

    >>> least_distinct_experts(8, 2, 16)
    7.5
    """
    expected = num_experts * (1 - (1 - top_k / num_experts) ** num_rows)
    return LEAST_SPREAD_RATIO * math.ceil(expected)


def is_routing_degenerate(distinct: tuple[float, ...], num_experts: int, top_k: int, num_rows: int) -> bool:
    """Whether some layer's dummy routing reached fewer experts than it must, in a step large enough to judge by."""
    return num_rows >= LEAST_ROWS and min(distinct) < least_distinct_experts(num_experts, top_k, num_rows)
