"""The Triton kernel behind `skinny.py` for gated products of more than a few rows, sm_90 and up.

Tiles come by the device's copy engine (tensor memory accelerator), which takes no thread's time; rows beyond the last
are not read. Imported only where it is going to run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from stretto.ops.blocks import Blocks
from stretto.ops.triton_skinny import ASKED, INTERPRETED, _dot, _silu, _start, asked


@triton.jit(do_not_specialize=["m", *ASKED])
def some_rows_kernel(x_tiles, w_tiles, w, bias, out, m, n, inputs, ahead, piece, askers, BM: tl.constexpr,
                     BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, BIAS: tl.constexpr,
                     THREADS: tl.constexpr, PDL: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """out[m, n] = silu(first half) * second half of x[m, inputs] W^T, for m <= BM. `x_tiles` [BM, BK] and `w_tiles`
    [BN, BK] are descriptors of x and w."""
    tile = tl.program_id(0)
    columns = tile * BN + tl.arange(0, BN)
    _start(w, tile, inputs, n, ahead, piece, askers, BN, True, THREADS, PDL)
    tokens = tl.arange(0, BM)
    acc = tl.zeros((BM, BN), tl.float32)
    acc_up = tl.zeros((BM, BN), tl.float32)
    for start in tl.range(0, inputs, BK, num_stages=STAGES):
        a = x_tiles.load([0, start])
        acc = _dot(a, w_tiles.load([tile * BN, start]).T, acc, PRECISION, UPCAST)
        acc_up = _dot(a, w_tiles.load([n + tile * BN, start]).T, acc_up, PRECISION, UPCAST)
    if BIAS:
        acc += tl.load(bias + columns).to(tl.float32)[None, :]
        acc_up += tl.load(bias + n + columns).to(tl.float32)[None, :]
    to = out + tokens.to(tl.int64)[:, None] * n + columns[None, :]
    tl.store(to, (_silu(acc) * acc_up).to(out.dtype.element_ty), mask=(tokens < m)[:, None] & (columns >= 0)[None, :])


def launch_some_rows(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, blocks: Blocks, pdl: bool,
                     bias: torch.Tensor | None = None) -> None:
    """x [m <= 256, inputs], w [2 outputs, inputs] and out [m, outputs], all contiguous, rows a multiple of 16 bytes."""
    (m, inputs), n = x.shape, out.shape[1]
    tokens = max(64, triton.next_power_of_2(m))
    some_rows_kernel[(n // blocks.outputs,)](
        TensorDescriptor.from_tensor(x, [tokens, blocks.columns]),
        TensorDescriptor.from_tensor(w, [blocks.outputs, blocks.columns]), w, x if bias is None else bias, out, m, n,
        inputs, *asked(blocks, n), BM=tokens, BN=blocks.outputs, BK=blocks.columns, STAGES=blocks.stages,
        BIAS=bias is not None, THREADS=32 * blocks.warps, PDL=pdl,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        UPCAST=INTERPRETED and x.dtype == torch.bfloat16, num_warps=blocks.warps,
        **({"launch_pdl": True} if pdl else {}))
