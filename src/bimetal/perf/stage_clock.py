"""`StageClock`: the step time of one stage as plain floats, for simulators that ask a hundred thousand times.

The equations are those of `equations`; everything that depends on the stage alone is reckoned once. Knows no queues.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bimetal.perf.calibration import Calibration
from bimetal.perf.equations import ROOFLINE_POWER, Coefficients, decode_parts, prefill_s, reduce_bytes
from bimetal.perf.step_time import StageShape, coefficients_of
from bimetal.perf.work import Array, count_work


@dataclass(frozen=True, slots=True)
class StageClock:
    """Seconds per unit of what a step holds."""

    fixed_s: float
    """Overheads and all-reduce latency of a step, whatever it holds."""
    dense_s: float
    """Streaming the dense weights and the head."""
    experts_s: float
    """Streaming every expert."""
    expert_miss: float
    """Chance that a token misses a given expert."""
    spread: float
    multiply_s: float
    """Per decoded token."""
    token_s: float
    """Per decoded token, beside multiplying: all-reduce payload, sampling, bookkeeping."""
    context_s: float
    """Per token of context read from the cache."""
    prompt_token_s: float
    score_s: float
    """Per pair of prompt token and earlier token."""
    prompt_s: float
    """Per prompt."""
    bias: float

    def step_s(
        self,
        num_decodes: float,
        context_tokens: float,
        prompt_tokens: float = 0.0,
        score_pairs: float = 0.0,
        num_prompts: float = 0.0,
    ) -> float:
        """One step: `num_decodes` sequences with `context_tokens` in all, and chunks of prompts beside them."""
        tokens = num_decodes + prompt_tokens
        if tokens <= 0:
            return 0.0
        stream = self.dense_s
        if self.experts_s:
            stream += self.experts_s * (1 - self.expert_miss ** (1 + (tokens - 1) * self.spread))
        chunk = prompt_tokens * self.prompt_token_s + score_pairs * self.score_s + num_prompts * self.prompt_s
        multiply = num_decodes * self.multiply_s
        if num_decodes:
            roofline: float = (stream**ROOFLINE_POWER + multiply**ROOFLINE_POWER) ** (1 / ROOFLINE_POWER)
            roofline += chunk
        else:
            roofline = max(stream, chunk)
        step = self.fixed_s + roofline + num_decodes * self.token_s + context_tokens * self.context_s
        return step * self.bias


def stage_clock(
    shape: StageShape, calibration: Calibration | None = None, draw: int | None = None
) -> StageClock:
    """Of one stage, with the coefficients that its device has."""
    return clock_of(shape, coefficients_of([shape], calibration, draw))


def clock_of(shape: StageShape, c: Coefficients) -> StageClock:
    """With given coefficients. Windows of sliding attention are taken as full, which errs to the slow side."""
    return StageClock(**{name: float(column[0]) for name, column in clock_columns([shape], c).items()})


def clock_columns(shapes: Sequence[StageShape], c: Coefficients) -> dict[str, Array]:
    """Each field of `StageClock` for many stages at once, which costs hardly more than one; all on one kind of device."""
    work = count_work([shape.point(1.0, 1.0) for shape in shapes])
    one, none = np.ones(len(shapes)), np.zeros(len(shapes))
    still = decode_parts(work, c, none, none)
    moving = decode_parts(work, c, one, one)
    short, long = (prefill_s(work, c, n * one) for n in (1.0, 2.0))
    prompt_s = c["prompt_s"]
    score_s = np.maximum(0.0, long - prompt_s - 2 * (short - prompt_s))  # i^2 / 2 pairs: (4 - 2) / 2 = 1
    return {
        "fixed_s": still.overhead_s + still.network_s,
        "dense_s": (work.dense_bytes + work.head_bytes) / (c["weight_rate"] * work.bytes_per_s),
        "experts_s": work.expert_bytes / (c["expert_rate"] * work.bytes_per_s),
        "expert_miss": 1 - work.expert_chance,
        "spread": c["spread"],
        "multiply_s": moving.multiply_s,
        "token_s": c["sequence_s"] + reduce_bytes(work) / (c["reduce_rate"] * work.group_bytes_per_s),
        "context_s": moving.cache_s,
        "prompt_token_s": short - prompt_s - score_s / 2,
        "score_s": score_s,
        "prompt_s": prompt_s,
        "bias": c["tpot_bias"],
    }
