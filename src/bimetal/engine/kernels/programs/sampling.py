"""Greedy choice and sampling, one program per row of logits, with no round trip to the host.

A filter keeps the tokens that less than a limit of the others is more probable than: fewer than k of them (top_k), less
than p of their mass (top_p). Both limits are found by one search over the logits' values, written as integers in the
same order, that weighs several pivots in each pass over the row. A row (V * 2 to 4 bytes) stays in the last-level cache,
so after the first pass the bound is one multiprocessor's cache bandwidth.
"""

import triton
import triton.language as tl

_LARGEST_KEY = tl.constexpr(2**31 - 1)
_ABOVE_MINUS_INFINITY = tl.constexpr(0x807FFFFF - 2**32 + 1)
"""The least key of a token that is not masked away."""


@triton.jit
def _key(x):
    """Integers in the order of the floats; both zeros are one."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _load(logits_ptr, first, vocabulary, inverse_temperature, BLOCK: tl.constexpr):
    tokens = first + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + tokens, mask=tokens < vocabulary, other=float("-inf")).to(tl.float32)
    return tokens, x * inverse_temperature


@triton.jit
def greedy_kernel(out_ptr, logits_ptr, vocabulary, row_stride, BLOCK: tl.constexpr):
    """The lowest id among the largest logits. Grid: (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    token, _ = _largest(logits_ptr + row * row_stride, vocabulary, BLOCK)
    tl.store(out_ptr + row, token)


@triton.jit
def _largest(logits_ptr, vocabulary, BLOCK: tl.constexpr):
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    best_token = tl.arange(0, BLOCK)
    for first in tl.range(0, vocabulary, BLOCK, num_stages=3):
        tokens, x = _load(logits_ptr, first, vocabulary, 1.0, BLOCK)
        is_better = x > best
        best = tl.where(is_better, x, best)
        best_token = tl.where(is_better, tokens, best_token)
    largest = tl.max(best, axis=0)
    token = tl.min(tl.where(best == largest, best_token, _LARGEST_KEY), axis=0)
    return token, largest


@triton.jit
def _weigh(logits_ptr, first, vocabulary, inverse_temperature, largest, floor, BLOCK: tl.constexpr):
    tokens, x = _load(logits_ptr, first, vocabulary, inverse_temperature, BLOCK)
    key = _key(x)
    weight = tl.where((tokens < vocabulary) & (key >= floor), tl.exp(x - largest), 0.0)
    return tokens, key, weight


@triton.jit
def _search(
    logits_ptr, vocabulary, inverse_temperature, largest, floor, limit,
    IS_MASS: tl.constexpr, BLOCK: tl.constexpr, PIVOTS: tl.constexpr,
):  # fmt: skip
    """The smallest key t >= floor such that the tokens above t weigh less than `limit`.

    A token weighs 1, or exp(x - largest) if IS_MASS. t is in [low, high] throughout. The search ends early where a
    single token is left in that range, since every key from the one below it keeps the same tokens.
    """
    low = floor
    high = _key(largest)
    num_above_low = vocabulary.to(tl.float32)
    num_above_high = 0.0
    pivots = tl.arange(0, PIVOTS)
    while (low < high) & (num_above_low - num_above_high > 1.0):
        # The keys' range is wider than an int32 holds.
        step = tl.maximum((high.to(tl.int64) - low.to(tl.int64)) // PIVOTS, 1)
        keys = tl.minimum(low.to(tl.int64) + (pivots + 1) * step - 1, high.to(tl.int64)).to(tl.int32)
        counts = tl.zeros((BLOCK, PIVOTS), tl.float32)
        masses = tl.zeros((BLOCK, PIVOTS), tl.float32)
        for first in tl.range(0, vocabulary, BLOCK, num_stages=3):
            tokens, key, weight = _weigh(
                logits_ptr, first, vocabulary, inverse_temperature, largest, floor, BLOCK
            )
            is_above = (
                (key[:, None] > keys[None, :]) & (key >= floor)[:, None] & (tokens < vocabulary)[:, None]
            )
            counts += is_above.to(tl.float32)
            if IS_MASS:
                masses += tl.where(is_above, weight[:, None], 0.0)
        num_above = tl.sum(counts, axis=0)
        above = num_above
        if IS_MASS:
            above = tl.sum(masses, axis=0)
        is_too_low = above >= limit
        # t is above the highest pivot with too much above it, and not above the lowest of the others.
        low = tl.maximum(low, tl.max(tl.where(is_too_low, keys, low - 1), axis=0) + 1)
        high = tl.minimum(high, tl.min(tl.where(is_too_low, high, keys), axis=0))
        num_above_low = tl.minimum(
            num_above_low, tl.min(tl.where(is_too_low, num_above, num_above_low), axis=0)
        )
        num_above_high = tl.maximum(
            num_above_high, tl.max(tl.where(is_too_low, num_above_high, num_above), axis=0)
        )
    return low


@triton.jit
def _mass(logits_ptr, vocabulary, inverse_temperature, largest, floor, BLOCK: tl.constexpr):
    total = 0.0
    for first in tl.range(0, vocabulary, BLOCK, num_stages=3):
        _, _, weight = _weigh(logits_ptr, first, vocabulary, inverse_temperature, largest, floor, BLOCK)
        total += tl.sum(weight, axis=0)
    return total


@triton.jit
def _locate(logits_ptr, vocabulary, inverse_temperature, largest, floor, target, token, BLOCK: tl.constexpr):
    """The first token, in order of id, at which the running mass exceeds `target`; `token` if rounding leaves none."""
    running = 0.0
    for first in tl.range(0, vocabulary, BLOCK, num_stages=3):
        tokens, _, weight = _weigh(logits_ptr, first, vocabulary, inverse_temperature, largest, floor, BLOCK)
        mass = tl.sum(weight, axis=0)
        if (running <= target) & (running + mass > target):
            is_past = (running + tl.cumsum(weight, axis=0) > target) & (weight > 0.0)
            last = tl.max(tl.where(weight > 0.0, tokens, 0), axis=0)
            token = tl.minimum(tl.min(tl.where(is_past, tokens, _LARGEST_KEY), axis=0), last)
        running += mass
    return token


@triton.jit
def sample_kernel(
    out_ptr,  # [rows] int32
    logits_ptr,  # [rows, vocabulary]
    temperatures_ptr,  # [rows] float32
    uniforms_ptr,  # [rows] float32
    top_ks_ptr,  # [rows] int32
    top_ps_ptr,  # [rows] float32
    min_ps_ptr,  # [rows] float32
    vocabulary,
    row_stride,
    has_top_k,
    has_top_p,
    has_min_p,
    BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    temperature = tl.load(temperatures_ptr + row)
    token, largest = _largest(logits_ptr, vocabulary, BLOCK)
    if temperature > 0.0:
        inverse = 1.0 / temperature
        largest = largest * inverse
        floor = tl.full((), _ABOVE_MINUS_INFINITY, tl.int32)
        if has_top_k:
            k = tl.load(top_ks_ptr + row)
            if k > 0:
                floor = _search(
                    logits_ptr, vocabulary, inverse, largest, floor, k.to(tl.float32), False, BLOCK, PIVOTS
                )
        if has_top_p:
            top_p = tl.load(top_ps_ptr + row)
            if top_p < 1.0:
                total = _mass(logits_ptr, vocabulary, inverse, largest, floor, BLOCK)
                floor = _search(
                    logits_ptr,
                    vocabulary,
                    inverse,
                    largest,
                    floor,
                    tl.maximum(top_p * total, 1e-30),
                    True,
                    BLOCK,
                    PIVOTS,
                )
        if has_min_p:
            min_p = tl.load(min_ps_ptr + row)
            if min_p > 0.0:
                floor = tl.maximum(floor, _key(largest + tl.log(min_p)))
        target = tl.load(uniforms_ptr + row) * _mass(logits_ptr, vocabulary, inverse, largest, floor, BLOCK)
        token = _locate(logits_ptr, vocabulary, inverse, largest, floor, target, token, BLOCK)
    tl.store(out_ptr + row, token)
