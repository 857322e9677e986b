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
