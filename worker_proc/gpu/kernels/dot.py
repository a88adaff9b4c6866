"""Products of tiles, on a card and in Triton's interpreter."""

import triton
import triton.language as tl

WIDEN = tl.constexpr(triton.knobs.runtime.interpret)
"""The interpreter multiplies the bits of bfloat16 as whole numbers. A card adds up in float32 what
it multiplies, which widened factors do as well."""


@triton.jit
def dot(a, b):
    """a [rows, depth] times b [depth, columns], in float32 without rounding float32 factors."""
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")
