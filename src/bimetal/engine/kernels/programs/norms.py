"""RMSNorm, with or without the addition of a residual, and SwiGLU: bound by memory, one pass over the rows.

Grid: (rows,) for the norms, one program per row; (rows, column blocks) for SwiGLU.
"""

import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(
    out_ptr,  # [rows, columns]
    sum_ptr,  # [rows, columns]; not touched without a residual
    x_ptr,  # [rows, columns]
    residual_ptr,  # [rows, columns]; not touched without a residual
    weight_ptr,  # [columns]
    num_columns,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,  # at least num_columns
):
    dtype = out_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * num_columns
    columns = tl.arange(0, BLOCK)
    is_column = columns < num_columns
    x = tl.load(x_ptr + row + columns, mask=is_column, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row + columns, mask=is_column, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(dtype)
        tl.store(sum_ptr + row + columns, x, mask=is_column)
    weight = tl.load(weight_ptr + columns, mask=is_column, other=0.0)
    wide = x.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, axis=0) / num_columns + eps)
    # Rounded to the model's dtype before it is scaled, as Llama's own code does.
    normalised = (wide * inverse).to(dtype)
    scaled = normalised.to(tl.float32) * weight.to(tl.float32)
    tl.store(out_ptr + row + columns, scaled.to(dtype), mask=is_column)


@triton.jit
def silu_and_mul_kernel(
    out_ptr,  # [rows, columns]
    gate_up_ptr,  # [rows, 2 * columns]
    num_columns,
    BLOCK: tl.constexpr,
):
    dtype = out_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < num_columns
    gate_ptr = gate_up_ptr + row * 2 * num_columns
    gate = tl.load(gate_ptr + columns, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + num_columns + columns, mask=is_column, other=0.0).to(tl.float32)
    activated = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * num_columns + columns, (activated * up).to(dtype), mask=is_column)
