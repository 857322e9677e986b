"""Per-head RMSNorm (Qwen3), rotary embedding and the write of keys and values to the paged cache, in one pass.

Bound by memory: reads the fused rows once, writes queries, keys and values once. Grid: (rows, tiles of heads); the tiles
of query heads come first, then those of key heads, then those of value heads, so that a program does one thing.
"""

import triton
import triton.language as tl


@triton.jit
def _normalise_and_rotate(
    first, second, norm_ptr, cos, sin, half, eps, HAS_NORM: tl.constexpr, HEAD_DIM: tl.constexpr
):
    dtype = first.dtype
    first = first.to(tl.float32)
    second = second.to(tl.float32)
    if HAS_NORM:
        mean = (tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / HEAD_DIM
        inverse = tl.rsqrt(mean + eps)[:, None]
        first_weight = tl.load(norm_ptr + half).to(tl.float32)[None, :]
        second_weight = tl.load(norm_ptr + HEAD_DIM // 2 + half).to(tl.float32)[None, :]
        first = ((first * inverse).to(dtype).to(tl.float32) * first_weight).to(dtype).to(tl.float32)
        second = ((second * inverse).to(dtype).to(tl.float32) * second_weight).to(dtype).to(tl.float32)
    return (first * cos - second * sin).to(dtype), (second * cos + first * sin).to(dtype)


@triton.jit
def rotary_and_cache_kernel(
    q_ptr,  # [rows, query heads, HEAD_DIM]
    k_cache_ptr,  # [blocks, BLOCK_TOKENS, kv heads, HEAD_DIM]
    v_cache_ptr,  # like k_cache
    qkv_ptr,  # [rows, query heads + 2 * kv heads, HEAD_DIM]
    cos_sin_ptr,  # [positions, HEAD_DIM] float32, cosines then sines
    positions_ptr,  # [rows]
    slots_ptr,  # [rows]
    q_norm_ptr,  # [HEAD_DIM]; not touched without norms
    k_norm_ptr,
    num_heads,
    num_kv_heads,
    k_block_stride,
    v_block_stride,
    eps,
    HEAD_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    half = tl.arange(0, HEAD_DIM // 2)
    lanes = tl.arange(0, BLOCK_HEADS)
    num_q_tiles = tl.cdiv(num_heads, BLOCK_HEADS)
    num_kv_tiles = tl.cdiv(num_kv_heads, BLOCK_HEADS)
    row_ptr = qkv_ptr + row * (num_heads + 2 * num_kv_heads) * HEAD_DIM
    position = tl.load(positions_ptr + row).to(tl.int64)
    cos = tl.load(cos_sin_ptr + position * HEAD_DIM + half)[None, :]
    sin = tl.load(cos_sin_ptr + position * HEAD_DIM + HEAD_DIM // 2 + half)[None, :]
    if tile < num_q_tiles:
        heads = tile * BLOCK_HEADS + lanes
        mask = (heads < num_heads)[:, None]
        offsets = heads[:, None] * HEAD_DIM + half[None, :]
        first = tl.load(row_ptr + offsets, mask=mask, other=0.0)
        second = tl.load(row_ptr + offsets + HEAD_DIM // 2, mask=mask, other=0.0)
        first, second = _normalise_and_rotate(
            first, second, q_norm_ptr, cos, sin, half, eps, HAS_NORM, HEAD_DIM
        )
        out_ptr = q_ptr + row * num_heads * HEAD_DIM
        tl.store(out_ptr + offsets, first, mask=mask)
        tl.store(out_ptr + offsets + HEAD_DIM // 2, second, mask=mask)
    else:
        slot = tl.load(slots_ptr + row)
        if slot >= 0:
            block = (slot // BLOCK_TOKENS).to(tl.int64)
            in_block = (slot % BLOCK_TOKENS) * num_kv_heads * HEAD_DIM
            kv_tile = tile - num_q_tiles
            heads = (kv_tile % num_kv_tiles) * BLOCK_HEADS + lanes
            mask = (heads < num_kv_heads)[:, None]
            offsets = heads[:, None] * HEAD_DIM + half[None, :]
            if kv_tile < num_kv_tiles:
                source_ptr = row_ptr + num_heads * HEAD_DIM
                first = tl.load(source_ptr + offsets, mask=mask, other=0.0)
                second = tl.load(source_ptr + offsets + HEAD_DIM // 2, mask=mask, other=0.0)
                first, second = _normalise_and_rotate(
                    first, second, k_norm_ptr, cos, sin, half, eps, HAS_NORM, HEAD_DIM
                )
                target_ptr = k_cache_ptr + block * k_block_stride + in_block
                tl.store(target_ptr + offsets, first, mask=mask)
                tl.store(target_ptr + offsets + HEAD_DIM // 2, second, mask=mask)
            else:
                source_ptr = row_ptr + (num_heads + num_kv_heads) * HEAD_DIM
                first = tl.load(source_ptr + offsets, mask=mask, other=0.0)
                second = tl.load(source_ptr + offsets + HEAD_DIM // 2, mask=mask, other=0.0)
                target_ptr = v_cache_ptr + block * v_block_stride + in_block
                tl.store(target_ptr + offsets, first, mask=mask)
                tl.store(target_ptr + offsets + HEAD_DIM // 2, second, mask=mask)
