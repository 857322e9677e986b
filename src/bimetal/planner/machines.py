"""`Machines`: step times and memory of many replicas at once, as arrays.

Owns the arithmetic of rounds over stages for thousands of replicas in one call. Does not know requests, limits or prices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from bimetal.perf.equations import ROOFLINE_POWER
from bimetal.perf.stage_clock import StageClock
from bimetal.policy.batching import max_num_micro_batches
from bimetal.simulate.shapes import ReplicaShape

Floats = NDArray[np.float64]
CLOCK_FIELDS = tuple(f.name for f in fields(StageClock))


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Of one replica."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048


@dataclass(frozen=True)
class Machines:
    """M replicas of up to P stages; a replica with fewer has stages that take no time."""

    clocks: dict[str, Floats]
    """Each field of `StageClock`, [M, P]."""
    num_stages: NDArray[np.int64]
    hop_s: Floats
    """[M] of all hops of a round together, the way back included: median."""
    hop_p99_s: Floats
    """The same at its 99th percentile; infinite where a link's tail is unknown."""
    hop_token_s: Floats
    """[M] carrying one token over all hops."""
    wire_token_s: Floats
    """[M] carrying one token over the slowest wire."""
    kv_tokens: Floats
    """[M] that the smallest stage's cache holds; not positive where weights do not fit."""

    def __len__(self) -> int:
        return len(self.hop_s)

    def take(self, index: NDArray[np.intp]) -> Machines:
        """Some of them, in the order of `index`."""
        return Machines(
            {name: column[index] for name, column in self.clocks.items()},
            *(getattr(self, f.name)[index] for f in fields(self)[1:]),
        )

    def stage_step_s(self, size: Floats, context: float) -> Floats:
        """[M, P] of one decode step of `size` [M] sequences with `context` tokens each: `StageClock.step_s` without prompts."""
        c, n = self.clocks, size[:, None]
        stream = c["dense_s"]
        if c["experts_s"].any():
            missed = c["expert_miss"] ** (1 + np.maximum(n - 1, 0) * c["spread"])
            stream = stream + c["experts_s"] * (1 - missed)
        roofline = _root(_power(stream) + _power(n * c["multiply_s"]))
        step: Floats = c["bias"] * (c["fixed_s"] + roofline + n * c["token_s"] + n * context * c["context_s"])
        return step

    def round_s(self, num_seqs: Floats, context: float, *, tail: bool = False) -> Floats:
        """[M] in which each of `num_seqs` [M] sequences gets one token, with the best number of micro-batches.

        `tail`: with hops at their 99th percentile.
        """
        hop = self.hop_p99_s if tail else self.hop_s
        best = np.full(len(self), np.inf)
        for k in range(1, max_num_micro_batches(int(self.num_stages.max(initial=1))) + 1):
            size = np.maximum(num_seqs / k, np.minimum(num_seqs, 1.0))
            steps = self.stage_step_s(size, context)
            slowest = np.maximum(steps.max(axis=1), size * self.wire_token_s)
            through = steps.sum(axis=1) + hop + size * self.hop_token_s
            allowed = (self.num_stages > 1) | (k == 1)
            best = np.where(allowed, np.minimum(best, np.maximum(k * slowest, through)), best)
        return best

    def prompt_stage_s(self, tokens: float, tokens_square: float) -> Floats:
        """[M, P] of a prompt's own work on each stage."""
        c = self.clocks
        seconds: Floats = c["bias"] * (
            tokens * c["prompt_token_s"] + tokens_square / 2 * c["score_s"] + c["prompt_s"]
        )
        return seconds

    def without_prefill(self) -> Machines:
        """The same, fed with caches that others have filled."""
        none = np.zeros_like(self.clocks["bias"])
        return replace(
            self, clocks={**self.clocks, "prompt_token_s": none, "score_s": none, "prompt_s": none}
        )

    def shape(self, index: int, engine: EngineLimits) -> ReplicaShape:
        """One of them as the simulator takes it. Hops of a single stage (to its experts) become part of its steps."""
        stages = int(self.num_stages[index])
        clocks = [
            StageClock(**{name: float(self.clocks[name][index, p]) for name in CLOCK_FIELDS})
            for p in range(stages)
        ]
        hop_s, hop_token_s = float(self.hop_s[index]), float(self.hop_token_s[index])
        if stages == 1 and (hop_s or hop_token_s):
            bias = clocks[0].bias
            clocks = [
                replace(
                    clocks[0],
                    fixed_s=clocks[0].fixed_s + hop_s / bias,
                    token_s=clocks[0].token_s + hop_token_s / bias,
                    prompt_token_s=clocks[0].prompt_token_s + hop_token_s / bias,
                )
            ]
            hop_s = hop_token_s = 0.0
        return ReplicaShape(
            clocks=tuple(clocks),
            hop_latency_s=hop_s,
            hop_token_s=hop_token_s,
            max_num_seqs=engine.max_num_seqs,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            kv_tokens=int(self.kv_tokens[index]),
        )


def join(parts: Sequence[Machines]) -> Machines:
    """One after another, padded to the longest chain."""
    depth = max(part.clocks["bias"].shape[1] for part in parts)

    def padded(column: Floats) -> Floats:
        return np.pad(column, ((0, 0), (0, depth - column.shape[1])))

    return Machines(
        {name: np.concatenate([padded(p.clocks[name]) for p in parts]) for name in CLOCK_FIELDS},
        *(np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(Machines)[1:]),
    )


def _power(x: Floats) -> Floats:
    """x ** ROOFLINE_POWER; powers of two are much faster by squaring."""
    if ROOFLINE_POWER != 4:
        return np.asarray(x**ROOFLINE_POWER)
    squared = x * x
    return squared * squared


def _root(x: Floats) -> Floats:
    return np.sqrt(np.sqrt(x)) if ROOFLINE_POWER == 4 else np.asarray(x ** (1 / ROOFLINE_POWER))
