"""The Triton kernel behind `skinny.py` for more than a few rows: a weight matrix times up to 256 rows, sm_90 and up.

Tiles come by the device's copy engine (tensor memory accelerator), which takes no thread's time; rows beyond the last
are not read. What a program does before the launch before has ended, and how programs that share the inputs of a tile
add up what they made, is as in `triton_skinny`. Imported only where it is going to run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from stretto.ops.blocks import Blocks
from stretto.ops.triton_skinny import INTERPRETED, _dot, _silu, _start


@triton.jit
def _finish(acc, bias, out, tokens, columns, m, n, BIAS: tl.constexpr, ADD: tl.constexpr):
    """acc [BM, BN] float32 to its place, with bias and what stands there."""
    if BIAS:
        acc += tl.load(bias + columns).to(tl.float32)[None, :]
    to = out + tokens.to(tl.int64)[:, None] * n + columns[None, :]
    keep = (tokens < m)[:, None] & (columns >= 0)[None, :]
    if ADD:
        acc += tl.load(to, mask=keep, other=0.0).to(tl.float32)
    tl.store(to, acc.to(out.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=["m"])
def some_rows_kernel(x_tiles, w_tiles, w, bias, out, partial, arrivals, m, n, inputs, BM: tl.constexpr,
                     BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
                     AHEAD: tl.constexpr, PIECE: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr,
                     ADD: tl.constexpr, PDL: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """out[m, n] (+)= x[m, inputs] W^T for m <= BM. `x_tiles` [BM, BK] and `w_tiles` [BN, BK] are descriptors.

    SPLIT programs share the inputs of a tile of outputs; the last to arrive adds their sums, in order of the parts."""
    tile = tl.program_id(0)
    part = tl.program_id(1)
    each = inputs // SPLIT
    first = part * each
    columns = tile * BN + tl.arange(0, BN)
    _start(w + first, columns, inputs, n, GATED, AHEAD, PIECE, PDL)
    tokens = tl.arange(0, BM)
    acc = tl.zeros((BM, BN), tl.float32)
    acc_up = tl.zeros((BM, BN), tl.float32)
    for start in tl.range(first, first + each, BK, num_stages=STAGES):
        a = x_tiles.load([0, start])
        acc = _dot(a, w_tiles.load([tile * BN, start]).T, acc, PRECISION, UPCAST)
        if GATED:
            acc_up = _dot(a, w_tiles.load([n + tile * BN, start]).T, acc_up, PRECISION, UPCAST)
    if GATED:
        if BIAS:
            acc += tl.load(bias + columns).to(tl.float32)[None, :]
            acc_up += tl.load(bias + n + columns).to(tl.float32)[None, :]
        _finish(_silu(acc) * acc_up, bias, out, tokens, columns, m, n, False, ADD)
    elif SPLIT == 1:
        _finish(acc, bias, out, tokens, columns, m, n, BIAS, ADD)
    else:
        inside = tokens[:, None] * BN + tl.arange(0, BN)[None, :]
        tl.store(partial + (tile * SPLIT + part) * (BN * BM) + inside, acc)
        tl.debug_barrier()  # every thread's part stands before the arrival that announces it
        if tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == SPLIT - 1:
            tl.store(arrivals + tile, 0)  # for the next launch
            total = tl.zeros((BM, BN), tl.float32)
            for s in tl.static_range(SPLIT):  # past the first-level cache, which misses what others wrote
                total += tl.load(partial + (tile * SPLIT + s) * (BN * BM) + inside, cache_modifier=".cg")
            _finish(total, bias, out, tokens, columns, m, n, BIAS, ADD)


def launch_some_rows(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, blocks: Blocks, pdl: bool,
                     arrivals: torch.Tensor, bias: torch.Tensor | None = None, gated: bool = False,
                     add: bool = False) -> None:
    """As `launch_few_rows`; x [m <= 256, inputs], whose rows stand a multiple of 16 bytes apart."""
    (m, inputs), n = x.shape, out.shape[1]
    tokens, split = max(64, triton.next_power_of_2(m)), blocks.split
    partial = x if split == 1 else torch.empty(split * n * tokens, dtype=torch.float32, device=x.device)
    some_rows_kernel[(n // blocks.outputs, split)](
        TensorDescriptor.from_tensor(x, [tokens, blocks.columns]),
        TensorDescriptor.from_tensor(w, [blocks.outputs, blocks.columns]), w, x if bias is None else bias, out, partial,
        arrivals, m, n, inputs, BM=tokens, BN=blocks.outputs, BK=blocks.columns, SPLIT=split, STAGES=blocks.stages,
        AHEAD=blocks.ahead, PIECE=blocks.piece, BIAS=bias is not None, GATED=gated, ADD=add, PDL=pdl,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        UPCAST=INTERPRETED and x.dtype == torch.bfloat16, num_warps=blocks.warps,
        **({"launch_pdl": True} if pdl else {}))
