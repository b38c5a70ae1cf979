"""Products of tiles, as devices and Triton's interpreter both make them. Imported only where a kernel is going to
run."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """a @ b + acc in float32; acc None: a @ b. Triton's interpreter multiplies what has less than 32 bits as whole
    numbers: there (UPCAST) the operands are widened."""
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)
