"""The surrogate: how many requests per second a replica serves within limits on its slowest percent.

Owns formulas that stand for the simulator while the optimiser looks at thousands of replicas; a plan that they let through
is simulated afterwards, and `Slack` tightens them where they promised too much. With n sequences decoded together,

    S         a prompt's work on the busiest stage,   T(n) a round of all stages,   o the answer's tokens
    TPOT(n) = T(n) + n S (a / b) / o                  each answer meets the prompts that replace the others; in the busiest
                                                      part of the trace prompts come a, answers b times as fast as on average
    rate(n) = n / (o TPOT(n)) / b                     requests per second on average (Little), n of the busiest part
    n+      = n (1 + z / sqrt(N))                     the busiest percent, N sequences in the whole class
    TPOT99  = T99(n+) + n+ S (a / b) / o + jitter     T99: hops at their 99th percentile where the limit is under 100 ms
    jitter  = z' sqrt(m) S sqrt(1 + cv^2) / o'        a short answer of o' tokens that meets more than its m prompts
    TTFT99  = T(n+) + S99 + steps(S99) T(n+) + wait   wait: M/G/R queue (Sakasegawa) for R replicas that share the class

The rate is the largest at which both limits hold and n+ sequences fit the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from bimetal.planner.machines import EngineLimits, Floats, Machines
from bimetal.planner.traffic import Traffic

Z_99 = 2.326
Z_JITTER = 0.84
"""80th percentile: with the shortest twentieth of answers, one in a hundred."""
STRICT_TPOT_S = 0.1
"""Below it, the tail of the hops decides whether a replica over two vendors may serve."""
CACHE_FILL = 0.95
"""Of the cache: above, sequences are pre-empted."""
BISECTIONS = 15
"""Of a span of nine in logarithms: to 0.03%."""
FEWEST_SEQS = 0.02


@dataclass(frozen=True, slots=True)
class Limits:
    """Of the 99th percentile, in seconds."""

    ttft_s: float
    tpot_s: float

    def serves(self, other: Limits) -> bool:
        """Whether a replica run to these limits keeps `other` too."""
        return self.ttft_s <= other.ttft_s and self.tpot_s <= other.tpot_s


@dataclass(frozen=True, slots=True)
class Slack:
    """What the limits are divided by before the formulas see them: over 1 where simulation found them too kind."""

    ttft: float = 1.0
    tpot: float = 1.0


@dataclass(frozen=True)
class Load:
    """One class on M replicas: what it asks of each."""

    traffic: Traffic
    engine: EngineLimits
    machines: Machines
    reads_prompts: bool = True
    """False: caches come filled, from replicas that only read prompts."""
    extra_ttft_s: Floats | float = 0.0
    """Before the replica sees the request, or after it has read the prompt: a transfer of the cache."""

    def prompt_s(self) -> Floats:
        """[M] S above."""
        t = self.traffic
        if not self.reads_prompts:
            return np.zeros(len(self.machines))
        stages = self.machines.prompt_stage_s(t.input_tokens, t.input_square)
        busiest: Floats = np.maximum(stages.max(axis=1), t.input_tokens * self.machines.wire_token_s)
        return busiest

    @property
    def _rush(self) -> float:
        """a / b above."""
        return self.traffic.peak_input_ratio / self.traffic.peak_output_ratio

    def peak(self, n: Floats, tpot: Floats) -> Floats:
        """n+ over n."""
        t = self.traffic
        if t.is_batch:
            return np.ones(len(self.machines))
        together = np.maximum(t.rate_per_s * t.peak_output_ratio * t.output_tokens * tpot, n)
        ratio: Floats = 1 + Z_99 / np.sqrt(together)
        return ratio

    def tpot_s(self, n: Floats, *, tail: bool = False) -> Floats:
        """[M] mean time per token with n sequences."""
        t = self.traffic
        round_s = self.machines.round_s(n, t.context_tokens, tail=tail)
        seconds: Floats = round_s + n * self.prompt_s() * self._rush / t.output_tokens
        return seconds

    def rate(self, n: Floats) -> Floats:
        """[M] requests per second on average over the trace, n of its busiest part."""
        t = self.traffic
        per_s: Floats = n / (t.output_tokens * self.tpot_s(n)) / t.peak_output_ratio
        return per_s

    def tpot_p99_s(self, n: Floats, limit_s: float) -> Floats:
        """[M]."""
        t, mean = self.traffic, self.tpot_s(n)
        peak = n * self.peak(n, mean)
        at_peak = self.tpot_s(peak, tail=limit_s < STRICT_TPOT_S)
        short = t.short_output_tokens
        met = peak / t.output_tokens * short * self._rush
        jitter = Z_JITTER * np.sqrt(met) * self.prompt_s() * np.sqrt(1 + t.input_cv2) / short
        seconds: Floats = at_peak + jitter
        return seconds

    def ttft_p99_s(self, n: Floats) -> Floats:
        """[M]."""
        t, mean = self.traffic, self.tpot_s(n)
        round_s = self.machines.round_s(n * self.peak(n, mean), t.context_tokens)
        wait = self._wait_p99_s(n / (t.output_tokens * mean) * self._rush, round_s)
        longest = t.input_p99_tokens
        own = self.machines.prompt_stage_s(longest, longest**2).sum(axis=1)
        steps = np.ceil(longest / self.engine.max_num_batched_tokens)
        seconds: Floats = round_s + wait + own + steps * round_s + self.extra_ttft_s
        return seconds

    def places(self) -> Floats:
        """[M] sequences that fit."""
        t = self.traffic
        held = self.machines.kv_tokens * CACHE_FILL / t.context_tokens
        longest = self.machines.kv_tokens > t.input_p99_tokens + t.output_tokens
        return np.where(longest, np.minimum(held, self.engine.max_num_seqs), 0.0)

    def _wait_p99_s(self, rate: Floats, round_s: Floats) -> Floats:
        """[M] until a prompt is begun, when `rate` prompts come per second in the busiest part of the trace."""
        t = self.traffic
        service = self.prompt_s() + t.input_tokens / self.engine.max_num_batched_tokens * round_s
        replicas = np.maximum(t.rate_per_s * t.peak_input_ratio / np.maximum(rate, 1e-12), 1.0)
        return wait_p99_s(rate * service, service, t.input_cv2, replicas)


def wait_p99_s(busy: Floats, service_s: Floats, cv2: float, replicas: Floats) -> Floats:
    """99th percentile of the wait before `replicas` servers that are `busy` each; infinite where they cannot keep up.

    Sakasegawa's chance to wait, exponential waits, and the spread of service times (cv2: squared coefficient of variation)
    as in Pollaczek and Khinchine.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        waits = busy ** (np.sqrt(2 * (replicas + 1)) - 1)
        scale = service_s * (1 + cv2) / (2 * replicas * (1 - busy))
        wait = scale * np.log(np.maximum(100 * waits, 1.0))
    return np.where(busy < 1, wait, np.inf)


def largest_load(load: Load, limits: Limits, slack: Slack = Slack()) -> Floats:
    """[M] sequences decoded together at the largest rate within the limits; 0 where not even a trickle is."""

    def holds(n: Floats) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        held: np.ndarray[tuple[int], np.dtype[np.bool_]] = n * load.peak(n, load.tpot_s(n)) <= places
        if np.isfinite(limits.tpot_s):
            held &= load.tpot_p99_s(n, limits.tpot_s) * slack.tpot <= limits.tpot_s
        if np.isfinite(limits.ttft_s):
            held &= load.ttft_p99_s(n) * slack.ttft <= limits.ttft_s
        return held

    places = load.places()
    return largest_that(holds, np.full(len(places), FEWEST_SEQS), np.maximum(places, FEWEST_SEQS))


def largest_that(
    holds: Callable[[Floats], np.ndarray[tuple[int], np.dtype[np.bool_]]], low: Floats, high: Floats
) -> Floats:
    """Bisection of the logarithm, each replica by itself; `holds` is monotone."""
    possible, all_of_it = holds(low), holds(high)
    a, b = np.log(low), np.log(high)
    for _ in range(BISECTIONS):
        middle = (a + b) / 2
        good = holds(np.exp(middle))
        a, b = np.where(good, middle, a), np.where(good, b, middle)
    return np.where(possible, np.where(all_of_it, high, np.exp(a)), 0.0)
