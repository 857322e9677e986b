"""Greedy choice and sampling, one program per row of logits, with no round trip to the host.

A filter keeps the tokens that less than a limit of the others is more probable than: fewer than k of them (top_k), less
than p of their mass (top_p). Both limits are found by one search over the logits' values, written as integers in the
same order, that weighs three pivots in each pass over the row. A row (2 or 4 bytes a token) stays in the last-level
cache, so after the first pass the bound is one multiprocessor's arithmetic.
"""

import triton
import triton.language as tl

_LARGEST_INTEGER = tl.constexpr(2**31 - 1)
_NEGLIGIBLE_EXPONENT = tl.constexpr(40.0)
"""Tokens less probable than the most probable by exp(40) weigh nothing in a float32 sum over any vocabulary."""


@triton.constexpr_function
def _unused_bits(dtype):
    """Low bits that a logit's float32 never uses."""
    return 16 if dtype == tl.bfloat16 else 13 if dtype == tl.float16 else 0


@triton.jit
def _key(x, UNUSED_BITS: tl.constexpr):
    """Integers in the order of the floats; both zeros are one."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits) >> UNUSED_BITS


@triton.jit
def _load(logits_ptr, tokens, vocabulary):
    return tl.load(logits_ptr + tokens, mask=tokens < vocabulary, other=float("-inf")).to(tl.float32)


@triton.jit
def _largest(logits_ptr, vocabulary, BLOCK: tl.constexpr):
    """(lowest id among the largest, largest)"""
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    best_token = tl.arange(0, BLOCK)
    for first in tl.range(0, vocabulary, BLOCK, num_stages=3):
        tokens = first + tl.arange(0, BLOCK)
        x = _load(logits_ptr, tokens, vocabulary)
        is_better = x > best
        best = tl.where(is_better, x, best)
        best_token = tl.where(is_better, tokens, best_token)
    largest = tl.max(best, axis=0)
    return tl.min(tl.where(best == largest, best_token, _LARGEST_INTEGER), axis=0), largest


@triton.jit
def greedy_kernel(out_ptr, logits_ptr, vocabulary, row_stride, BLOCK: tl.constexpr):
    """The lowest id among the largest logits. Grid: (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    token, _ = _largest(logits_ptr + row * row_stride, vocabulary, BLOCK)
    tl.store(out_ptr + row, token)


@triton.jit
def _search(
    logits_ptr, vocabulary, inverse_temperature, largest, low, limit,
    IS_MASS: tl.constexpr, UNUSED_BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The smallest key t >= low such that the tokens above t weigh less than `limit`.

    A token weighs 1, or exp((x - largest) / temperature) if IS_MASS. t is in [low, high] throughout. The search ends
    early where a single token is left in that range, since every key from there on keeps the same tokens.
    """
    high = _key(largest, UNUSED_BITS)
    num_above_low = vocabulary.to(tl.float32)
    num_above_high = 0.0
    while (low < high) & (num_above_low - num_above_high > 1.0):
        # The keys' range may be wider than an int32 holds.
        step = tl.maximum((high.to(tl.int64) - low.to(tl.int64)) // 4, 1)
        pivot_1 = (low + step - 1).to(tl.int32)
        pivot_2 = tl.minimum(low + 2 * step - 1, high).to(tl.int32)
        pivot_3 = tl.minimum(low + 3 * step - 1, high).to(tl.int32)
        count_1, count_2, count_3, mass_1, mass_2, mass_3 = (tl.zeros((BLOCK,), tl.float32),) * 6
        for first in tl.range(0, vocabulary, BLOCK, num_stages=3):
            x = _load(logits_ptr, first + tl.arange(0, BLOCK), vocabulary)
            key = _key(x, UNUSED_BITS)
            count_1 += tl.where(key > pivot_1, 1.0, 0.0)
            count_2 += tl.where(key > pivot_2, 1.0, 0.0)
            count_3 += tl.where(key > pivot_3, 1.0, 0.0)
            if IS_MASS:
                weight = tl.exp((x - largest) * inverse_temperature)
                mass_1 += tl.where(key > pivot_1, weight, 0.0)
                mass_2 += tl.where(key > pivot_2, weight, 0.0)
                mass_3 += tl.where(key > pivot_3, weight, 0.0)
        low, high, num_above_low, num_above_high = _narrow(
            low, high, num_above_low, num_above_high, pivot_1, count_1, mass_1, limit, IS_MASS
        )
        low, high, num_above_low, num_above_high = _narrow(
            low, high, num_above_low, num_above_high, pivot_2, count_2, mass_2, limit, IS_MASS
        )
        low, high, num_above_low, num_above_high = _narrow(
            low, high, num_above_low, num_above_high, pivot_3, count_3, mass_3, limit, IS_MASS
        )
    return low


@triton.jit
def _narrow(low, high, num_above_low, num_above_high, pivot, counts, masses, limit, IS_MASS: tl.constexpr):
    """t lies above a pivot with too much above it, and not above any other."""
    count = tl.sum(counts, axis=0)
    above = tl.sum(masses, axis=0) if IS_MASS else count
    if above >= limit:
        low = tl.maximum(low, pivot + 1)
        num_above_low = tl.minimum(num_above_low, count)
    else:
        high = tl.minimum(high, pivot)
        num_above_high = tl.maximum(num_above_high, count)
    return low, high, num_above_low, num_above_high


@triton.jit
def _weigh(
    logits_ptr, tokens, vocabulary, inverse_temperature, largest, floor, least, UNUSED_BITS: tl.constexpr
):
    """exp((x - largest) / temperature) of the tokens that the filters keep, else 0."""
    x = _load(logits_ptr, tokens, vocabulary)
    is_kept = (_key(x, UNUSED_BITS) >= floor) & (x >= least)
    return tl.where(is_kept, tl.exp((x - largest) * inverse_temperature), 0.0)


@triton.jit
def _segment_masses(
    sums_ptr, logits_ptr, vocabulary, inverse_temperature, largest, floor, least,
    UNUSED_BITS: tl.constexpr, BLOCK: tl.constexpr, SEGMENT: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """[SEGMENTS] kept mass of every SEGMENT tokens. They pass through memory, since no register can be indexed."""
    segments = tl.arange(0, BLOCK // SEGMENT)
    in_segment = tl.arange(0, SEGMENT)
    for first in tl.range(0, vocabulary, BLOCK, num_stages=3):
        tokens = first + segments[:, None] * SEGMENT + in_segment[None, :]
        weights = _weigh(
            logits_ptr, tokens, vocabulary, inverse_temperature, largest, floor, least, UNUSED_BITS
        )
        tl.store(sums_ptr + first // SEGMENT + segments, tl.sum(weights, axis=1))
    tl.debug_barrier()
    every = tl.arange(0, SEGMENTS)
    sums = tl.load(sums_ptr + every, mask=every < tl.cdiv(vocabulary, BLOCK) * (BLOCK // SEGMENT), other=0.0)
    # The next use of this memory must not overtake another warp's reads.
    tl.debug_barrier()
    return sums


@triton.jit
def sample_kernel(
    out_ptr,  # [rows] int32
    sums_ptr,  # [rows, SEGMENTS] float32
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
    SEGMENT: tl.constexpr,
    SEGMENTS: tl.constexpr,  # SEGMENTS * SEGMENT is at least the vocabulary
):
    """Filters, then the first token in order of id at which the kept mass exceeds the row's uniform share of it.
    Grid: (rows,)."""
    UNUSED_BITS: tl.constexpr = _unused_bits(logits_ptr.dtype.element_ty)
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    sums_ptr += row * SEGMENTS
    temperature = tl.load(temperatures_ptr + row)
    token, largest = _largest(logits_ptr, vocabulary, BLOCK)
    if temperature > 0.0:
        inverse = 1.0 / temperature
        # Tokens that were masked away before are never kept.
        floor = _key(tl.full((), float("-inf"), tl.float32), UNUSED_BITS) + 1
        least = float("-inf")
        if has_top_k:
            top_k = tl.load(top_ks_ptr + row)
            if top_k > 0:
                floor = _search(
                    logits_ptr,
                    vocabulary,
                    inverse,
                    largest,
                    floor,
                    top_k.to(tl.float32),
                    False,
                    UNUSED_BITS,
                    BLOCK,
                )
        if has_top_p:
            top_p = tl.load(top_ps_ptr + row)
            if top_p < 1.0:
                sums = _segment_masses(
                    sums_ptr, logits_ptr, vocabulary, inverse, largest, floor, least,
                    UNUSED_BITS, BLOCK, SEGMENT, SEGMENTS,
                )  # fmt: skip
                # Even a top_p of 0 keeps the most probable token.
                limit = tl.maximum(top_p * tl.sum(sums, axis=0), 1e-30)
                low = tl.maximum(floor, _key(largest - _NEGLIGIBLE_EXPONENT * temperature, UNUSED_BITS))
                floor = _search(
                    logits_ptr, vocabulary, inverse, largest, low, limit, True, UNUSED_BITS, BLOCK
                )
        if has_min_p:
            least = largest + tl.log(tl.load(min_ps_ptr + row)) * temperature
        sums = _segment_masses(
            sums_ptr,
            logits_ptr,
            vocabulary,
            inverse,
            largest,
            floor,
            least,
            UNUSED_BITS,
            BLOCK,
            SEGMENT,
            SEGMENTS,
        )
        every = tl.arange(0, SEGMENTS)
        ends = tl.cumsum(sums, axis=0)
        total = tl.max(ends, axis=0)
        # Below the total even where the product rounds up to it.
        target = tl.minimum(tl.load(uniforms_ptr + row) * total, total * (1.0 - 2.0**-23))
        last = tl.max(tl.where(sums > 0.0, every, 0), axis=0)
        segment = tl.min(tl.where((ends > target) & (sums > 0.0), every, last), axis=0)
        before = tl.max(tl.where(every < segment, ends, 0.0), axis=0)
        tokens = segment * SEGMENT + tl.arange(0, SEGMENT)
        weights = _weigh(logits_ptr, tokens, vocabulary, inverse, largest, floor, least, UNUSED_BITS)
        last_token = tl.max(tl.where(weights > 0.0, tokens, 0), axis=0)
        is_past = (before + tl.cumsum(weights, axis=0) > target) & (weights > 0.0)
        token = tl.min(tl.where(is_past, tokens, last_token), axis=0)
    tl.store(out_ptr + row, token)
