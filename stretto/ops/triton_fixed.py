"""The Triton kernel of a product in which a row's result does not depend on the rows beside it, bit for bit.

One program makes ROWS x OUTPUTS results and walks the inputs from the first to the last; tiles have one size whatever
the number of rows, so every row is summed by the same instructions in the same order. Nothing is shared out between
programs. Imported only where it is going to run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from stretto.ops.launch import dependent, overlaps
from stretto.ops.triton_layer import begin

ROWS, OUTPUTS, INPUTS = 64, 64, 64  # of a tile; float32 tiles have half the inputs


@triton.jit
def _dot(a, b, acc, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """Triton's interpreter multiplies bfloat16 as integers: there the operands are widened."""
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit(do_not_specialize=["m"])
def fixed_kernel(x, w, bias, out, m, n, inputs, x_stride, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                 BIAS: tl.constexpr, PDL: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """out[m, n] = x[m, inputs] W^T, W [n, inputs]; sums in float32."""
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    x_at = x + tl.minimum(rows, m - 1).to(tl.int64)[:, None] * x_stride + k[None, :]
    w_at = w + tl.minimum(columns, n - 1).to(tl.int64)[None, :] * inputs + k[:, None]
    begin(PDL)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in tl.range(0, inputs, BK):
        left = k < inputs - start
        a = tl.load(x_at + start, mask=left[None, :], other=0.0)
        b = tl.load(w_at + start, mask=left[:, None], other=0.0)
        acc = _dot(a, b, acc, PRECISION, UPCAST)
    if BIAS:
        acc += tl.load(bias + columns, mask=columns < n, other=0.0).to(tl.float32)[None, :]
    to = out + rows.to(tl.int64)[:, None] * n + columns[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=(rows < m)[:, None] & (columns < n)[None, :])


INTERPRETED = isinstance(fixed_kernel, InterpretedFunction)


def launch_fixed(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """x [m, inputs], whose rows are contiguous, and weight [n, inputs] -> [m, n] in `dtype`."""
    x = x if x.stride(1) == 1 else x.contiguous()
    (m, inputs), n = x.shape, weight.shape[0]
    out = torch.empty(m, n, dtype=dtype, device=x.device)
    if m:
        wide = x.dtype is torch.float32
        fixed_kernel[(triton.cdiv(n, OUTPUTS), triton.cdiv(m, ROWS))](
            x, weight, x if bias is None else bias, out, m, n, inputs, x.stride(0), BM=ROWS, BN=OUTPUTS,
            BK=INPUTS // 2 if wide else INPUTS, BIAS=bias is not None, PDL=overlaps(x.device),
            PRECISION="ieee" if wide else "tf32", UPCAST=INTERPRETED and x.dtype is torch.bfloat16, num_warps=4,
            num_stages=3, **dependent(x.device))
    return out
