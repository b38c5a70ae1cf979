"""What kernels share at their start. Imported only where they are going to run."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def begin(PDL: tl.constexpr):
    """Lets the launch after start as far as it can, then waits for the launch before. In this order: the launch after
    waits for this one whenever it starts, and until then may fetch weights."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def ask_for(pointers, BYTES: tl.constexpr):
    """Has BYTES bytes (a multiple of 16) from each pointer on brought to the second-level cache; waits for nothing.
    sm_90 and up. Pointers of fewer elements than the program has threads are asked for more than once."""
    sizes = tl.zeros_like(pointers.to(tl.int64)).to(tl.int32) + BYTES
    tl.inline_asm_elementwise("cp.async.bulk.prefetch.L2.global [$1], $2;\nmov.u32 $0, 0;", "=r,l,r",
                              [pointers, sizes], dtype=tl.int32, is_pure=False, pack=1)
