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
def ask_for(pointers, wanted, size):
    """Where `wanted` (int32) is not 0, has `size` bytes (a multiple of 16) from each pointer on brought to the
    second-level cache; waits for nothing. sm_90 and up. One element for each thread of the program, or a multiple of
    that."""
    tl.inline_asm_elementwise(
        "{.reg .pred p; setp.ne.s32 p, $3, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;}",
        "=r,l,r,r", [pointers, tl.zeros_like(wanted) + size, wanted], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def ask_rows(w, row, stride, columns, piece, ROWS: tl.constexpr, THREADS: tl.constexpr):
    """Asks for the first `columns` columns of ROWS rows of W from `row` on, `piece` of them at a time."""
    pieces = ROWS * (columns // piece)
    for start in tl.range(0, pieces, THREADS):
        i = start + tl.arange(0, THREADS)
        at = w + (row + i % ROWS).to(tl.int64) * stride + i // ROWS * piece
        ask_for(at, (i < pieces).to(tl.int32), piece * (w.dtype.element_ty.primitive_bitwidth // 8))
