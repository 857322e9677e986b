"""What several Triton programs share."""

import triton
import triton.language as tl
from triton import knobs

INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))


@triton.jit
def dot(a, b, acc):
    """acc + a @ b, accumulated in float32; float32 operands are multiplied as such, not as TF32."""
    # Triton's interpreter multiplies bfloat16 wrongly, without a word.
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def tile_of(num_tiles, num_columns, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Programs walk GROUP_M row tiles by all column tiles at a time, so that both operands stay in the cache."""
    num_column_tiles = tl.cdiv(num_columns, BLOCK_N)
    group_programs = GROUP_M * num_column_tiles
    group = tl.program_id(0) // group_programs
    first = group * GROUP_M
    size = tl.minimum(num_tiles - first, GROUP_M)
    in_group = tl.program_id(0) % group_programs
    return first + in_group % size, in_group // size
