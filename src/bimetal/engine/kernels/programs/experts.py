"""Mixture of experts: routing, placement of (row, expert) pairs by expert, two grouped products, weighted sum.

Nothing here needs the host to know which experts were hit: grids come from upper bounds, programs past the last tile
end at once. In decode the grouped products are bound by reading the hit experts' weights once, in prefill by the matrix
units. A pair is row * top_k + j; pairs stand in order of expert, each expert's from a multiple of BLOCK_M on in tiles
(not in memory: tiles point into the dense order).
"""

import triton
import triton.language as tl

from bimetal.engine.kernels.programs.arithmetic import dot, tile_of


@triton.jit
def route_kernel(
    experts_ptr,  # [rows, top_k] expert of each pair; num_experts: none
    ranks_ptr,  # [rows, top_k] how many pairs of that expert were counted before
    weights_ptr,  # [rows, top_k] float32
    counts_ptr,  # [num_experts] pairs of each expert; zero before
    logits_ptr,  # [rows, num_experts]
    slots_ptr,  # [rows]
    num_rows,
    num_experts,
    top_k,
    RENORMALISE: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """The top_k most probable experts of each row, the lower id first among equals. Grid: (blocks of rows,)."""
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    experts = tl.arange(0, BLOCK_EXPERTS)
    is_row = rows < num_rows
    is_expert = experts < num_experts
    logits = tl.load(
        logits_ptr + rows[:, None] * num_experts + experts[None, :],
        mask=is_row[:, None] & is_expert[None, :],
        other=float("-inf"),
    ).to(tl.float32)
    largest = tl.max(logits, axis=1)
    largest = tl.where(is_row, largest, 0.0)
    exponentials = tl.exp(logits - largest[:, None])
    total = tl.sum(exponentials, axis=1)
    total = tl.where(is_row, total, 1.0)
    is_kept = is_row & (tl.load(slots_ptr + rows, mask=is_row, other=-1) >= 0)
    left = tl.where(is_expert[None, :], exponentials, -1.0)
    chosen_sum = tl.zeros((BLOCK_ROWS,), tl.float32)
    for j in range(top_k):
        best = tl.max(left, axis=1)
        expert = tl.min(tl.where(left == best[:, None], experts[None, :], BLOCK_EXPERTS), axis=1)
        left = tl.where(experts[None, :] == expert[:, None], -1.0, left)
        chosen_sum += best
        pair = rows * top_k + j
        rank = tl.atomic_add(counts_ptr + expert, 1, mask=is_kept, sem="relaxed")
        tl.store(experts_ptr + pair, tl.where(is_kept, expert, num_experts), mask=is_row)
        tl.store(ranks_ptr + pair, rank, mask=is_kept)
        tl.store(weights_ptr + pair, best / total, mask=is_row)
    if RENORMALISE:
        tl.debug_barrier()
        for j in range(top_k):
            pair = rows * top_k + j
            weight = tl.load(weights_ptr + pair, mask=is_row, other=0.0)
            tl.store(weights_ptr + pair, weight * total / chosen_sum, mask=is_row)


@triton.jit
def place_kernel(
    order_ptr,  # [pairs] pair at each place of the order by expert
    tiles_ptr,  # [grid tiles, 3] expert, first place, end place of each tile; expert -1: no tile
    experts_ptr,
    ranks_ptr,
    counts_ptr,
    num_pairs,
    num_experts,
    num_tiles,
    tile_rows,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
):
    """Order the pairs by expert and cut the order into tiles of one expert. Grid: (blocks of pairs or of tiles,)."""
    experts = tl.arange(0, BLOCK_EXPERTS)
    counts = tl.load(counts_ptr + experts, mask=experts < num_experts, other=0)
    ends = tl.cumsum(counts, axis=0)
    starts = ends - counts
    tile_counts = (counts + tile_rows - 1) // tile_rows
    tile_ends = tl.cumsum(tile_counts, axis=0)

    lanes = tl.program_id(0) * BLOCK_PAIRS + tl.arange(0, BLOCK_PAIRS)
    is_pair = lanes < num_pairs
    expert = tl.load(experts_ptr + lanes, mask=is_pair, other=num_experts)
    is_pair &= expert < num_experts
    rank = tl.load(ranks_ptr + lanes, mask=is_pair, other=0)
    start = tl.sum(tl.where(experts[None, :] == expert[:, None], starts[None, :], 0), axis=1)
    tl.store(order_ptr + start + rank, lanes, mask=is_pair)

    # Lane t also writes tile t: its expert is the number of experts whose tiles all come before.
    is_tile = lanes < num_tiles
    before = tile_ends[None, :] <= lanes[:, None]
    tile_expert = tl.sum(before.to(tl.int32), axis=1)
    is_mine = experts[None, :] == tile_expert[:, None]
    first_tile = tl.sum(tl.where(is_mine, (tile_ends - tile_counts)[None, :], 0), axis=1)
    first = tl.sum(tl.where(is_mine, starts[None, :], 0), axis=1) + (lanes - first_tile) * tile_rows
    end = tl.sum(tl.where(is_mine, ends[None, :], 0), axis=1)
    tl.store(tiles_ptr + lanes * 3, tl.where(tile_expert < num_experts, tile_expert, -1), mask=is_tile)
    tl.store(tiles_ptr + lanes * 3 + 1, first, mask=is_tile)
    tl.store(tiles_ptr + lanes * 3 + 2, end, mask=is_tile)


@triton.jit
def expert_gate_up_kernel(
    out_ptr,  # [pairs in order, inner]
    x_ptr,  # [rows, hidden]
    weight_ptr,  # [experts, 2 * inner, hidden]
    weight_descriptor,  # the weights as [experts * 2 * inner, hidden] in tiles [BLOCK_N, BLOCK_K]
    order_ptr,
    tiles_ptr,
    num_tiles,
    hidden,
    inner,
    top_k,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    HAS_DESCRIPTORS: tl.constexpr,
):
    """silu(x gate') * (x up') for a tile of pairs of one expert. Grid: (tiles * column tiles,)."""
    tile, column_tile = tile_of(num_tiles, inner, BLOCK_N, GROUP_M)
    expert = tl.load(tiles_ptr + tile * 3).to(tl.int64)
    if expert < 0:
        return
    places = tl.load(tiles_ptr + tile * 3 + 1) + tl.arange(0, BLOCK_M)
    end = tl.load(tiles_ptr + tile * 3 + 2)
    rows = (tl.load(order_ptr + tl.minimum(places, end - 1)) // top_k).to(tl.int64)
    columns = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    read = tl.minimum(columns, inner - 1)
    depth = tl.arange(0, BLOCK_K)
    x_tile = x_ptr + rows[:, None] * hidden + depth[None, :]
    gate_tile = weight_ptr + expert * 2 * inner * hidden + read[None, :] * hidden + depth[:, None]
    up_tile = gate_tile + inner * hidden
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    whole = hidden // BLOCK_K
    first_row = (expert * 2 * inner + column_tile * BLOCK_N).to(tl.int32)
    for step in tl.range(0, whole):
        x = tl.load(x_tile)
        if HAS_DESCRIPTORS:
            gate = dot(x, tl.trans(weight_descriptor.load([first_row, step * BLOCK_K])), gate)
            up = dot(x, tl.trans(weight_descriptor.load([first_row + inner, step * BLOCK_K])), up)
        else:
            gate = dot(x, tl.load(gate_tile), gate)
            up = dot(x, tl.load(up_tile), up)
            gate_tile += BLOCK_K
            up_tile += BLOCK_K
        x_tile += BLOCK_K
    if whole * BLOCK_K < hidden:
        is_depth = depth < hidden - whole * BLOCK_K
        x = tl.load(x_tile, mask=is_depth[None, :], other=0.0)
        if HAS_DESCRIPTORS:
            gate_tile += whole * BLOCK_K
            up_tile += whole * BLOCK_K
        gate = dot(x, tl.load(gate_tile, mask=is_depth[:, None], other=0.0), gate)
        up = dot(x, tl.load(up_tile, mask=is_depth[:, None], other=0.0), up)
    activated = gate * tl.sigmoid(gate) * up
    mask = (places < end)[:, None] & (columns < inner)[None, :]
    out_offsets = places.to(tl.int64)[:, None] * inner + columns[None, :]
    tl.store(out_ptr + out_offsets, activated.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def expert_down_kernel(
    out_ptr,  # [pairs, hidden]
    x_ptr,  # [pairs in order, inner]
    weight_ptr,  # [experts, hidden, inner]
    x_descriptor,  # x in tiles [BLOCK_M, BLOCK_K]
    weight_descriptor,  # the weights as [experts * hidden, inner] in tiles [BLOCK_N, BLOCK_K]
    order_ptr,
    tiles_ptr,
    num_tiles,
    hidden,
    inner,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    HAS_DESCRIPTORS: tl.constexpr,
):
    """x down' for a tile of pairs of one expert, put back in order of rows. Grid: (tiles * column tiles,)."""
    tile, column_tile = tile_of(num_tiles, hidden, BLOCK_N, GROUP_M)
    expert = tl.load(tiles_ptr + tile * 3).to(tl.int64)
    if expert < 0:
        return
    places = tl.load(tiles_ptr + tile * 3 + 1) + tl.arange(0, BLOCK_M)
    end = tl.load(tiles_ptr + tile * 3 + 2)
    read_places = tl.minimum(places, end - 1).to(tl.int64)
    columns = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    read = tl.minimum(columns, hidden - 1)
    depth = tl.arange(0, BLOCK_K)
    x_tile = x_ptr + read_places[:, None] * inner + depth[None, :]
    weight_tile = weight_ptr + expert * hidden * inner + read[None, :] * inner + depth[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    whole = inner // BLOCK_K
    first_place = tl.load(tiles_ptr + tile * 3 + 1)
    first_row = (expert * hidden + column_tile * BLOCK_N).to(tl.int32)
    for step in tl.range(0, whole):
        if HAS_DESCRIPTORS:
            # Rows past the expert's last belong to others; what becomes of them is not stored.
            x = x_descriptor.load([first_place, step * BLOCK_K])
            acc = dot(x, tl.trans(weight_descriptor.load([first_row, step * BLOCK_K])), acc)
        else:
            acc = dot(tl.load(x_tile), tl.load(weight_tile), acc)
            x_tile += BLOCK_K
            weight_tile += BLOCK_K
    if whole * BLOCK_K < inner:
        is_depth = depth < inner - whole * BLOCK_K
        if HAS_DESCRIPTORS:
            x_tile += whole * BLOCK_K
            weight_tile += whole * BLOCK_K
        x = tl.load(x_tile, mask=is_depth[None, :], other=0.0)
        acc = dot(x, tl.load(weight_tile, mask=is_depth[:, None], other=0.0), acc)
    pairs = tl.load(order_ptr + read_places).to(tl.int64)
    mask = (places < end)[:, None] & (columns < hidden)[None, :]
    tl.store(
        out_ptr + pairs[:, None] * hidden + columns[None, :], acc.to(out_ptr.dtype.element_ty), mask=mask
    )


@triton.jit
def weighted_sum_kernel(
    out_ptr,  # [rows, hidden]
    pairs_ptr,  # [rows, top_k, hidden]
    weights_ptr,  # [rows, top_k] float32
    slots_ptr,  # [rows]
    hidden,
    top_k,
    BLOCK: tl.constexpr,
):
    """Each row's experts, weighed and added in order of probability. Grid: (rows, column blocks)."""
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < hidden
    acc = tl.zeros((BLOCK,), tl.float32)
    # A padding row has no pairs, so what stands in its place was never written.
    if tl.load(slots_ptr + row) >= 0:
        for j in range(top_k):
            pair = row.to(tl.int64) * top_k + j
            value = tl.load(pairs_ptr + pair * hidden + columns, mask=is_column, other=0.0)
            acc += value.to(tl.float32) * tl.load(weights_ptr + pair)
    tl.store(out_ptr + row.to(tl.int64) * hidden + columns, acc.to(out_ptr.dtype.element_ty), mask=is_column)
