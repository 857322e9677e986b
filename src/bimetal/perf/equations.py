"""The performance model: seconds from work and coefficients. Reads like the paper it would be.

A decode step of n sequences with s tokens of context each, on a group of g GPUs with L layers, takes

    decode(n, s)  = ( stream(n)^p + multiply(n)^p )^(1/p) + cache(n, s) + reduce(n) + overhead(n)
    stream(n)     = (dense + head) / (weight_rate * bandwidth)
                  + experts * (1 - (1 - k/E)^(1 + spread (n - 1))) / (expert_rate * bandwidth)
    multiply(n)   = n * FLOPs / (decode_rate * peak)
    cache(n, s)   = n * s * bytes per token / (cache_rate * bandwidth)
    reduce(n)     = 2 L log2(g) * hop + 2 L * n * payload * 2 (g - 1)/g / (reduce_rate * group bandwidth)
    overhead(n)   = step + (L * layer + expert layers * router) / (peak16 / an H100's)^gain + n * sequence

and reading a prompt of i tokens, together with others in one pass,

    prefill(i)    = i * FLOPs / (prefill_rate * peak) + i^2/2 * attention FLOPs / (attend_rate * peak16)
                  + i * payload * 2 L * 2 (g - 1)/g / (reduce_rate * group bandwidth) + prompt

In a closed loop of c requests, n = min(c, what the cache holds) decode together, and while one request decodes its o
tokens each of the others reads one prompt:

    TPOT = decode(n, i + o/2) + interference * (n - 1)/(o - 1) * prefill(i)
    TTFT = (1 + first) * prefill(i) + steps * decode + burst * n * prefill(i) + queue for a place in the cache

In a static batch of n, end-to-end = pass(n * i) + (o - 1) * decode(n, i + o/2).

Experts are read at a rate of their own: a grouped product of a few tokens per expert, on weights that are unpacked on the
way, is another kernel than a dense layer's. Knows no GPU, model or engine by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from bimetal.perf.work import Array, Work

ROOFLINE_POWER = 4.0
"""Sharpness of the corner between streaming and multiplying: 4 leaves 19% on top where both are equal."""
REFERENCE_FLOPS_PER_S = 989e12

SHARES = (
    *("weight_rate", "expert_rate", "decode_rate", "cache_rate", "reduce_rate", "prefill_rate"),
    *("attend_rate", "spread"),
)
"""Terms that cannot exceed 1."""
TERMS = (
    *SHARES,
    *("hop_s", "step_s", "layer_s", "router_s", "sequence_s", "prompt_s"),
    *("gain", "interference", "first", "steps", "burst", "fill"),
)
Coefficients = Mapping[str, Array]
"""A positive number per term and serving point."""


@dataclass(frozen=True, slots=True)
class StepParts:
    """Seconds of one decode step by what takes them."""

    weights_s: Array
    multiply_s: Array
    cache_s: Array
    network_s: Array
    overhead_s: Array

    @property
    def step_s(self) -> Array:
        roofline: Array = (self.weights_s**ROOFLINE_POWER + self.multiply_s**ROOFLINE_POWER) ** (
            1 / ROOFLINE_POWER
        )
        return roofline + self.cache_s + self.network_s + self.overhead_s


def reduce_bytes(w: Work) -> Array:
    """That each GPU sends for one token: two all-reduces a layer, 2 (g - 1)/g of the payload each."""
    sent: Array = 2 * w.layers * w.payload_bytes * 2 * (w.ranks - 1) / w.ranks
    return sent


def decode_parts(w: Work, c: Coefficients, num_seqs: Array, context: Array) -> StepParts:
    """`num_seqs` sequences, each with `context` tokens in the cache."""
    missed = (1 - w.expert_chance) ** (1 + (num_seqs - 1) * c["spread"])
    shared_s = (w.dense_bytes + w.head_bytes) / (c["weight_rate"] * w.bytes_per_s)
    experts_s = w.expert_bytes * (1 - missed) / (c["expert_rate"] * w.bytes_per_s)
    cache_bytes = w.kv_full_bytes * context + w.kv_windowed_bytes * np.minimum(context, w.window)
    hops = 2 * w.layers * np.log2(w.ranks) * c["hop_s"]
    sent = num_seqs * reduce_bytes(w) / (c["reduce_rate"] * w.group_bytes_per_s)
    return StepParts(
        weights_s=shared_s + experts_s,
        multiply_s=num_seqs * (w.flops_per_token + w.head_flops) / (c["decode_rate"] * w.flops_per_s),
        cache_s=num_seqs * cache_bytes / (c["cache_rate"] * w.bytes_per_s),
        network_s=hops + sent,
        overhead_s=c["step_s"]
        + (w.layers * c["layer_s"] + w.expert_layers * c["router_s"])
        / (w.die_flops_per_s / REFERENCE_FLOPS_PER_S) ** c["gain"]
        + num_seqs * c["sequence_s"],
    )


def prefill_s(w: Work, c: Coefficients, tokens: Array) -> Array:
    """A prompt's own share of the passes that read it."""
    scores = w.attention_flops * tokens**2 / 2
    scores = scores + w.windowed_attention_flops * tokens * np.minimum(tokens / 2, w.window)
    seconds: Array = (
        tokens * w.flops_per_token / (c["prefill_rate"] * w.flops_per_s)
        + scores / (c["attend_rate"] * w.attention_flops_per_s)
        + tokens * reduce_bytes(w) / (c["reduce_rate"] * w.group_bytes_per_s)
        + c["prompt_s"]
    )
    return seconds


def places(w: Work, tokens: Array) -> Array:
    """Sequences of `tokens` each that the cache holds."""
    held: Array = w.kv_room_bytes / (
        w.kv_full_bytes * tokens + w.kv_windowed_bytes * np.minimum(tokens, w.window)
    )
    return np.maximum(held, 1.0)


def at_most(wanted: Array, limit: Array) -> Array:
    """A minimum with a rounded corner: engines hold a little back before they are full."""
    ratio = np.where(np.isfinite(wanted), wanted, 1e9) / limit
    smooth: Array = np.where(np.isfinite(wanted), wanted, 1e9 * np.ones_like(limit)) / (1 + ratio**8) ** (
        1 / 8
    )
    return smooth


@dataclass(frozen=True, slots=True)
class Serving:
    """What a client sees, and the step behind it."""

    tpot_s: Array
    ttft_s: Array
    output_tokens_per_s: Array
    step: StepParts
    num_seqs: Array


def closed_loop(w: Work, c: Coefficients) -> Serving:
    """A new request follows each answer; lengths vary a little, so that answers do not end together."""
    i, o = w.input_tokens, w.output_tokens
    n = at_most(w.concurrency, places(w, i + o * c["fill"]))
    step = decode_parts(w, c, n, i + o / 2)
    prompt = prefill_s(w, c, i)
    tpot = step.step_s + c["interference"] * np.maximum(n - 1, 0) / np.maximum(o - 1, 1) * prompt
    service = prompt + o * tpot
    queue = (w.concurrency - n) / n * service
    ttft = (1 + c["first"]) * prompt + c["steps"] * step.step_s + c["burst"] * n * prompt + queue
    return Serving(tpot, ttft, w.concurrency * o / (ttft + o * tpot), step, n)


def static_batch(w: Work, c: Coefficients) -> Serving:
    """All requests start together and end together."""
    i, o, n = w.input_tokens, w.output_tokens, w.concurrency
    running = at_most(n, places(w, i + o * c["fill"]))
    step = decode_parts(w, c, running, i + o / 2)
    first = step.overhead_s + np.maximum(running * prefill_s(w, c, i), step.weights_s)
    end_to_end = n / running * (first + (o - 1) * step.step_s)
    return Serving(step.step_s, first, n * o / end_to_end, step, running)


def offline(w: Work, c: Coefficients) -> Serving:
    """As many as fit, without end: each place makes o tokens in the time of o steps and its share of a prompt."""
    i, o = w.input_tokens, w.output_tokens
    n = at_most(np.minimum(w.concurrency, w.max_num_seqs), places(w, i + o * c["fill"]))
    step = decode_parts(w, c, n, i + o / 2)
    prompt = prefill_s(w, c, i)
    round_s = o * step.step_s + c["interference"] * n * prompt
    rate = np.minimum(n * o / round_s, w.arrivals_per_s * o)
    return Serving(round_s / o, prompt, rate, step, n)
