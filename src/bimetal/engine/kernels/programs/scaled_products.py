"""Products with FP8 weights that have a scale a row or a block, and the quantising of rows for the vendor's own product.

Weights are read in 8 bits and widened in registers to the rows' dtype, so that decode steps, which reading weights
bounds, move half the bytes; each step over the depth lies within one scale block, whose scale multiplies its partial sum.
Prefill is bound by the matrix units at the rows' dtype. Operands are addressed as in `experts`.
"""

import triton
import triton.language as tl

from bimetal.engine.kernels.programs.arithmetic import dot, tile_of


@triton.jit
def quantise_rows_kernel(
    out_ptr,  # [rows, columns] FP8
    scales_ptr,  # [rows] float32
    x_ptr,  # [rows, columns]
    num_columns,
    largest,  # number of the FP8 encoding
    BLOCK: tl.constexpr,
):
    """Each row divided by what makes its largest number the encoding's largest. Grid: (rows,)."""
    row = tl.program_id(0).to(tl.int64) * num_columns
    columns = tl.arange(0, BLOCK)
    top = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, num_columns, BLOCK):
        x = tl.load(x_ptr + row + start + columns, mask=start + columns < num_columns, other=0.0)
        top = tl.maximum(top, tl.abs(x.to(tl.float32)))
    scale = tl.maximum(tl.max(top, axis=0) / largest, 1e-12)
    tl.store(scales_ptr + tl.program_id(0), scale)
    for start in tl.range(0, num_columns, BLOCK):
        is_column = start + columns < num_columns
        x = tl.load(x_ptr + row + start + columns, mask=is_column, other=0.0)
        # The quotient may round past the largest number, and not every GPU's conversion saturates.
        quotient = tl.minimum(tl.maximum(x.to(tl.float32) / scale, -largest), largest)
        tl.store(out_ptr + row + start + columns, quotient.to(out_ptr.dtype.element_ty), mask=is_column)


@triton.jit
def _step(acc, x, weight, scale):
    """acc + x @ (weight * scale), with one scale a column of the tile."""
    part = dot(x, weight.to(x.dtype), tl.zeros(acc.shape, tl.float32))
    return acc + part * scale[None, :]


@triton.jit
def scaled_linear_kernel(
    out_ptr,  # [rows, columns]
    x_ptr,  # [rows, depth]
    weight_ptr,  # [columns, depth] FP8
    scale_ptr,  # [column blocks, depth blocks] float32
    num_rows,
    num_columns,
    depth,
    block_rows,  # rows of the weight, which are columns of the product, that share a scale
    block_columns,
    num_depth_blocks,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """x (weight * scale)'. Grid: (row tiles * column tiles,)."""
    tile, column_tile = tile_of(tl.cdiv(num_rows, BLOCK_M), num_columns, BLOCK_N, GROUP_M)
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    read_rows = tl.minimum(rows, num_rows - 1).to(tl.int64)
    read = tl.minimum(columns, num_columns - 1)
    inside = tl.arange(0, BLOCK_K)
    x_tile = x_ptr + read_rows[:, None] * depth + inside[None, :]
    weight_tile = weight_ptr + read.to(tl.int64)[None, :] * depth + inside[:, None]
    scale_row = scale_ptr + (read // block_rows) * num_depth_blocks
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    whole = depth // BLOCK_K
    for step in tl.range(0, whole):
        scale = tl.load(scale_row + step * BLOCK_K // block_columns)
        acc = _step(acc, tl.load(x_tile), tl.load(weight_tile), scale)
        x_tile += BLOCK_K
        weight_tile += BLOCK_K
    if whole * BLOCK_K < depth:
        is_inside = inside < depth - whole * BLOCK_K
        x = tl.load(x_tile, mask=is_inside[None, :], other=0.0)
        weight = tl.load(weight_tile, mask=is_inside[:, None], other=0.0)
        acc = _step(acc, x, weight, tl.load(scale_row + whole * BLOCK_K // block_columns))
    mask = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    out_offsets = rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
    tl.store(out_ptr + out_offsets, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def scaled_gate_up_kernel(
    out_ptr,  # [pairs in order, inner]
    x_ptr,  # [rows, hidden]
    weight_ptr,  # [experts, 2 * inner, hidden] FP8
    scale_ptr,  # [experts, row blocks, depth blocks] float32
    order_ptr,
    tiles_ptr,
    num_tiles,
    hidden,
    inner,
    top_k,
    block_rows,
    block_columns,
    num_row_blocks,
    num_depth_blocks,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
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
    inside = tl.arange(0, BLOCK_K)
    x_tile = x_ptr + rows[:, None] * hidden + inside[None, :]
    gate_tile = (
        weight_ptr + expert * 2 * inner * hidden + read.to(tl.int64)[None, :] * hidden + inside[:, None]
    )
    up_tile = gate_tile + inner.to(tl.int64) * hidden
    scale_base = scale_ptr + expert * num_row_blocks * num_depth_blocks
    gate_scale_row = scale_base + (read // block_rows) * num_depth_blocks
    up_scale_row = scale_base + ((read + inner) // block_rows) * num_depth_blocks
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    whole = hidden // BLOCK_K
    for step in tl.range(0, whole):
        x = tl.load(x_tile)
        block = step * BLOCK_K // block_columns
        gate = _step(gate, x, tl.load(gate_tile), tl.load(gate_scale_row + block))
        up = _step(up, x, tl.load(up_tile), tl.load(up_scale_row + block))
        x_tile += BLOCK_K
        gate_tile += BLOCK_K
        up_tile += BLOCK_K
    if whole * BLOCK_K < hidden:
        is_inside = inside < hidden - whole * BLOCK_K
        x = tl.load(x_tile, mask=is_inside[None, :], other=0.0)
        block = whole * BLOCK_K // block_columns
        weight = tl.load(gate_tile, mask=is_inside[:, None], other=0.0)
        gate = _step(gate, x, weight, tl.load(gate_scale_row + block))
        weight = tl.load(up_tile, mask=is_inside[:, None], other=0.0)
        up = _step(up, x, weight, tl.load(up_scale_row + block))
    activated = gate * tl.sigmoid(gate) * up
    mask = (places < end)[:, None] & (columns < inner)[None, :]
    out_offsets = places.to(tl.int64)[:, None] * inner + columns[None, :]
    tl.store(out_ptr + out_offsets, activated.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def scaled_down_kernel(
    out_ptr,  # [pairs, hidden]
    x_ptr,  # [pairs in order, inner]
    weight_ptr,  # [experts, hidden, inner] FP8
    scale_ptr,  # [experts, row blocks, depth blocks] float32
    order_ptr,
    tiles_ptr,
    num_tiles,
    hidden,
    inner,
    block_rows,
    block_columns,
    num_row_blocks,
    num_depth_blocks,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
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
    inside = tl.arange(0, BLOCK_K)
    x_tile = x_ptr + read_places[:, None] * inner + inside[None, :]
    weight_tile = weight_ptr + expert * hidden * inner + read.to(tl.int64)[None, :] * inner + inside[:, None]
    scale_row = scale_ptr + (expert * num_row_blocks + read // block_rows) * num_depth_blocks
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    whole = inner // BLOCK_K
    for step in tl.range(0, whole):
        scale = tl.load(scale_row + step * BLOCK_K // block_columns)
        acc = _step(acc, tl.load(x_tile), tl.load(weight_tile), scale)
        x_tile += BLOCK_K
        weight_tile += BLOCK_K
    if whole * BLOCK_K < inner:
        is_inside = inside < inner - whole * BLOCK_K
        x = tl.load(x_tile, mask=is_inside[None, :], other=0.0)
        weight = tl.load(weight_tile, mask=is_inside[:, None], other=0.0)
        acc = _step(acc, x, weight, tl.load(scale_row + whole * BLOCK_K // block_columns))
    pairs = tl.load(order_ptr + read_places).to(tl.int64)
    mask = (places < end)[:, None] & (columns < hidden)[None, :]
    tl.store(
        out_ptr + pairs[:, None] * hidden + columns[None, :], acc.to(out_ptr.dtype.element_ty), mask=mask
    )
