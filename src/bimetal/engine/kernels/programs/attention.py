"""Paged attention: one program family for decode, prefill and chunked prefill.

A program holds BLOCK_M query rows that share one key head: every query head of the group, for BLOCK_M // group
consecutive tokens of one sequence (one token when it decodes), so that grouped queries read each key once and any group
size fits. It walks the keys that those rows see in tiles of BLOCK_N with an online softmax in base 2. Decode is bound
by memory (each key and value is read once), prefill by the matrix units.

Only tiles at the edges of the causal mask and of the window are masked. Keys past the sequence's end are never read:
a tile's last key is read again in their place, since unwritten slots may hold anything, NaN included.
"""

import triton
import triton.language as tl

from bimetal.engine.kernels.programs.arithmetic import dot

SHORTEST_SPLIT = tl.constexpr(256)
"""Keys; below it, joining costs more than it saves."""


@triton.jit
def _work_item(item, lens_ptr, num_sequences, window, extra_items, BLOCK_SEQUENCES: tl.constexpr):
    """(sequence, its first item, its number of items) for one of num_sequences + extra_items items.

    Long sequences are cut so that no item is much longer than the total over extra_items; every program derives the cut
    from all lengths, so neither the host nor an earlier kernel needs to know them.
    """
    sequences = tl.arange(0, BLOCK_SEQUENCES)
    seen = tl.load(lens_ptr + sequences, mask=sequences < num_sequences, other=0)
    if window > 0:
        seen = tl.minimum(seen, window)
    longest = tl.maximum(tl.cdiv(tl.sum(seen, axis=0), extra_items), SHORTEST_SPLIT)
    # A quarter more is not worth a cut.
    sequence = item
    first = item
    count = 1
    if tl.max(seen, axis=0) > longest + longest // 4:
        counts = tl.maximum((seen + longest - longest // 4 - 1) // longest, 1)
        ends = tl.cumsum(tl.where(sequences < num_sequences, counts, 0), axis=0)
        sequence = tl.sum((ends <= item).to(tl.int32), axis=0)
        first = tl.max(tl.where(sequences < sequence, ends, 0), axis=0)
        count = tl.sum(tl.where(sequences == sequence, counts, 0), axis=0)
    return sequence, first, count


@triton.jit
def _edge_tile(index, num_left, low, full_high, BLOCK_N: tl.constexpr):
    """The first key of an edge tile: those left of the whole tiles come first, then those right of them."""
    return tl.where(index < num_left, low + index * BLOCK_N, full_high + (index - num_left) * BLOCK_N)


@triton.jit
def _load_tile(ptr, block, start, high, block_stride, token_stride, HEAD_DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
               BLOCK_N: tl.constexpr, IS_EDGE: tl.constexpr):  # fmt: skip
    """Keys or values [BLOCK_N, HEAD_DIM]. Tiles start at multiples of BLOCK_N, so a tile lies in one block."""
    tokens = start + tl.arange(0, BLOCK_N)
    if IS_EDGE:
        tokens = tl.minimum(tokens, high - 1)
    in_block = tokens - (start // BLOCK_TOKENS) * BLOCK_TOKENS
    offsets = in_block[:, None] * token_stride + tl.arange(0, HEAD_DIM)[None, :]
    return tl.load(ptr + block.to(tl.int64) * block_stride + offsets)


@triton.jit
def _attend(acc, row_max, row_sum, q, k, v, start, high, positions, window, scale, BLOCK_N: tl.constexpr,
            IS_EDGE: tl.constexpr):  # fmt: skip
    scores = dot(q, tl.trans(k), tl.zeros((q.shape[0], BLOCK_N), tl.float32))
    if IS_EDGE:
        keys = start + tl.arange(0, BLOCK_N)
        is_seen = (keys[None, :] <= positions[:, None]) & (keys[None, :] < high)
        if window > 0:
            is_seen &= keys[None, :] > positions[:, None] - window
        scores = tl.where(is_seen, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, axis=1) * scale)
    shift = new_max
    if IS_EDGE:
        # A row that has seen no key yet would subtract infinity from infinity.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores * scale - shift[:, None])
    decay = tl.exp2(row_max - shift)
    row_sum = row_sum * decay + tl.sum(weights, axis=1)
    return dot(weights.to(v.dtype), v, acc * decay[:, None]), new_max, row_sum


@triton.jit
def paged_attention_kernel(
    out_ptr,  # [T, heads, HEAD_DIM]
    partial_out_ptr,  # [sequences + extra_items, heads, HEAD_DIM] float32; decode only
    partial_lse_ptr,  # [sequences + extra_items, heads] float32, in base 2
    arrivals_ptr,  # [sequences, kv heads]; zero before and after
    q_ptr,  # [T, heads, HEAD_DIM]
    k_ptr,  # [blocks, BLOCK_TOKENS, kv heads, HEAD_DIM]
    v_ptr,  # like k
    k_descriptor,  # k as [tokens, kv heads * HEAD_DIM] in tiles [BLOCK_N, HEAD_DIM]; not touched without descriptors
    v_descriptor,
    table_ptr,  # [sequences, table_stride]
    starts_ptr,  # [sequences + 1]
    lens_ptr,  # [sequences]
    num_decodes,
    num_sequences,
    table_stride,
    k_block_stride,
    v_block_stride,
    group,
    num_kv_heads,
    window,  # 0: none
    extra_items,
    scale,  # times log2(e)
    HEAD_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    IS_DECODE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_DESCRIPTORS: tl.constexpr,
    BLOCK_SEQUENCES: tl.constexpr,  # at least the sequences that decode
):
    """Grid: (kv heads, num_sequences + extra_items) for decode, (kv heads, tiles of tokens) for prefill."""
    tl.static_assert(BLOCK_TOKENS % BLOCK_N == 0)
    kv_head = tl.program_id(0)
    num_heads = group * num_kv_heads
    if IS_DECODE:
        item = tl.program_id(1)
        sequence, first_item, num_items = _work_item(
            item, lens_ptr, num_sequences, window, extra_items, BLOCK_SEQUENCES
        )
        if sequence >= num_sequences:
            return
        first_row = sequence
        num_tokens = 1
        context_len = tl.load(lens_ptr + sequence)
        first_position = context_len - 1
        last_position = context_len - 1
    else:
        # Sequence s owns the tiles from (start of s) // tokens + s on: that leaves each at least what it needs, and
        # the host needs no lengths to size the grid. Later tiles see more keys, so they go first.
        tile_tokens = BLOCK_M // group
        tile = tl.num_programs(1) - 1 - tl.program_id(1)
        low_sequence = num_decodes
        high_sequence = num_sequences
        while high_sequence - low_sequence > 1:
            middle = (low_sequence + high_sequence) // 2
            first_tile = (tl.load(starts_ptr + middle) - num_decodes) // tile_tokens + middle - num_decodes
            if first_tile <= tile:
                low_sequence = middle
            else:
                high_sequence = middle
        sequence = low_sequence
        start = tl.load(starts_ptr + sequence)
        query_len = tl.load(starts_ptr + sequence + 1) - start
        token = (tile - (start - num_decodes) // tile_tokens - (sequence - num_decodes)) * tile_tokens
        if token >= query_len:
            return
        num_tokens = tl.minimum(query_len - token, tile_tokens)
        first_row = start + token
        first_position = tl.load(lens_ptr + sequence) - query_len + token
        last_position = first_position + num_tokens - 1

    rows = tl.arange(0, BLOCK_M)
    tokens = rows // group
    columns = tl.arange(0, HEAD_DIM)
    is_row = tokens < num_tokens
    heads = kv_head * group + rows % group
    row_offsets = (first_row + tokens).to(tl.int64) * num_heads + heads
    q = tl.load(q_ptr + row_offsets[:, None] * HEAD_DIM + columns[None, :], mask=is_row[:, None], other=0.0)
    positions = tl.minimum(first_position + tokens, last_position)

    # The keys that the rows see are among [low, high).
    low = 0
    if window > 0:
        low = (tl.maximum(first_position - window + 1, 0) // BLOCK_N) * BLOCK_N
    high = last_position + 1
    if IS_DECODE:
        part = tl.cdiv(tl.cdiv(high - low, num_items), BLOCK_N) * BLOCK_N
        low = low + (item - first_item) * part
        high = tl.minimum(low + part, high)
    # Tiles in [full_low, full_high) are seen whole by every row; a decode's memory traffic hides the masks of all.
    full_low = low
    full_high = low
    if HAS_DESCRIPTORS or not IS_DECODE:
        if window > 0:
            full_low = tl.minimum(
                tl.maximum(low, tl.cdiv(last_position - window + 1, BLOCK_N) * BLOCK_N), high
            )
        full_high = tl.maximum((tl.minimum(first_position + 1, high) // BLOCK_N) * BLOCK_N, full_low)

    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
    table_ptr += sequence.to(tl.int64) * table_stride
    k_ptr += kv_head * HEAD_DIM
    v_ptr += kv_head * HEAD_DIM
    token_stride = num_kv_heads * HEAD_DIM
    # The next tile's block is looked up while this tile is computed: as a load that the tile's own loads hang on, it
    # would take a stage of the software pipeline.
    if HAS_DESCRIPTORS or not IS_DECODE:
        block = tl.load(table_ptr + full_low // BLOCK_TOKENS, mask=full_low < full_high, other=0)
        for start in tl.range(full_low, full_high, BLOCK_N):
            next_block = tl.load(table_ptr + tl.minimum(start + BLOCK_N, full_high - 1) // BLOCK_TOKENS)
            if HAS_DESCRIPTORS:
                token = block * BLOCK_TOKENS + start % BLOCK_TOKENS
                k = k_descriptor.load([token, kv_head * HEAD_DIM])
                v = v_descriptor.load([token, kv_head * HEAD_DIM])
            else:
                k = _load_tile(
                    k_ptr,
                    block,
                    start,
                    high,
                    k_block_stride,
                    token_stride,
                    HEAD_DIM,
                    BLOCK_TOKENS,
                    BLOCK_N,
                    False,
                )
                v = _load_tile(
                    v_ptr,
                    block,
                    start,
                    high,
                    v_block_stride,
                    token_stride,
                    HEAD_DIM,
                    BLOCK_TOKENS,
                    BLOCK_N,
                    False,
                )
            acc, row_max, row_sum = _attend(
                acc, row_max, row_sum, q, k, v, start, high, positions, window, scale, BLOCK_N, False
            )
            block = next_block
    num_left = tl.cdiv(full_low - low, BLOCK_N)
    num_edges = num_left + tl.cdiv(high - full_high, BLOCK_N)
    start = _edge_tile(0, num_left, low, full_high, BLOCK_N)
    block = tl.load(table_ptr + start // BLOCK_TOKENS, mask=num_edges > 0, other=0)
    for index in tl.range(0, num_edges):
        start = _edge_tile(index, num_left, low, full_high, BLOCK_N)
        next_start = _edge_tile(tl.minimum(index + 1, num_edges - 1), num_left, low, full_high, BLOCK_N)
        next_block = tl.load(table_ptr + next_start // BLOCK_TOKENS)
        k = _load_tile(
            k_ptr, block, start, high, k_block_stride, token_stride, HEAD_DIM, BLOCK_TOKENS, BLOCK_N, True
        )
        v = _load_tile(
            v_ptr, block, start, high, v_block_stride, token_stride, HEAD_DIM, BLOCK_TOKENS, BLOCK_N, True
        )
        acc, row_max, row_sum = _attend(
            acc, row_max, row_sum, q, k, v, start, high, positions, window, scale, BLOCK_N, True
        )
        block = next_block

    # Rows without keys (a graph's padding) give zeros.
    divisor = tl.where(row_sum == 0.0, 1.0, row_sum)
    acc = acc / divisor[:, None]
    is_written = is_row
    if IS_DECODE:  # noqa: SIM102 - known when compiled, unlike the next
        if num_items > 1:
            lse = row_max + tl.log2(divisor)
            acc, is_last = _join(
                acc, lse, item, first_item, num_items, partial_out_ptr, partial_lse_ptr,
                arrivals_ptr + sequence * num_kv_heads + kv_head, num_heads, heads, is_row, HEAD_DIM,
            )  # fmt: skip
            is_written &= is_last
    out_offsets = row_offsets[:, None] * HEAD_DIM + columns[None, :]
    tl.store(out_ptr + out_offsets, acc.to(out_ptr.dtype.element_ty), mask=is_written[:, None])


@triton.jit
def _join(
    acc, lse, item, first_item, num_items, partial_out_ptr, partial_lse_ptr, arrival_ptr, num_heads, heads, is_row,
    HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Leave this item's part in memory; the last of the sequence's items to arrive weighs all parts by their share of
    the softmax and returns (the whole, True)."""
    columns = tl.arange(0, HEAD_DIM)
    row = item * num_heads + heads
    tl.store(
        partial_out_ptr + row.to(tl.int64)[:, None] * HEAD_DIM + columns[None, :], acc, mask=is_row[:, None]
    )
    tl.store(partial_lse_ptr + row, lse, mask=is_row)
    # Every thread's part is written before the arrival is announced.
    tl.debug_barrier()
    is_last = tl.atomic_add(arrival_ptr, 1, sem="acq_rel", scope="gpu") == num_items - 1
    if is_last:
        tl.store(arrival_ptr, 0)
        largest = tl.full(lse.shape, float("-inf"), tl.float32)
        total = tl.zeros(lse.shape, tl.float32)
        acc = tl.zeros(acc.shape, tl.float32)
        for other in tl.range(first_item, first_item + num_items, loop_unroll_factor=4):
            row = other * num_heads + heads
            # From the last-level cache: other multiprocessors wrote it.
            lse = tl.load(partial_lse_ptr + row, mask=is_row, other=0.0, cache_modifier=".cg")
            offsets = row.to(tl.int64)[:, None] * HEAD_DIM + columns[None, :]
            part = tl.load(partial_out_ptr + offsets, mask=is_row[:, None], other=0.0, cache_modifier=".cg")
            # The first item always has keys, so `larger` is finite.
            larger = tl.maximum(largest, lse)
            weight = tl.exp2(lse - larger)
            decay = tl.exp2(largest - larger)
            acc = acc * decay[:, None] + part * weight[:, None]
            total = total * decay + weight
            largest = larger
        acc = acc / total[:, None]
    return acc, is_last
