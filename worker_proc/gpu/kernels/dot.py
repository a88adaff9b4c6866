"""Products of tiles, on a GPU and in Triton's interpreter."""

import triton
import triton.language as tl

# The interpreter multiplies the bits of bfloat16 as integers. A GPU accumulates its products in
# float32, which is what widened factors give.
WIDEN = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def dot(a, b):
    """Multiply [rows, depth] by [depth, columns] in float32, without rounding float32 factors."""
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def dot_add(a, b, c):
    """Add the product of [rows, depth] and [depth, columns] to [rows, columns] float32."""
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, c, input_precision="ieee")
