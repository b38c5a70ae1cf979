"""Triton kernels behind `skinny.py`: a weight matrix times a few rows. Imported only where they are going to run.

Such a product only streams the weights, so what counts is that memory is never idle: while the launch before still
runs, each program already asks the second-level cache for the first part of its weights, which depend on nothing
(programmatic dependent launch). The sum of an output is made in one order, whatever the batch.

    launch n      |######## programs ########|
    launch n + 1                     |prefetch| wait |######## programs ########|
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from stretto.ops.blocks import Blocks
from stretto.ops.triton_launch import ask_rows

ASKED = ("ahead", "piece", "askers")  # what a launch asks for varies


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _start(w, tile, inputs, n, ahead, piece, askers, BN: tl.constexpr, GATED: tl.constexpr, THREADS: tl.constexpr,
           PDL: tl.constexpr):
    """The programs of the first `askers` tiles ask for the first `ahead` columns of theirs. Then waits for the launch
    before; what is written before this launch may be read from here on."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if tile < askers:
            ask_rows(w, tile * BN, inputs, ahead, piece, BN, THREADS)
            if GATED:
                ask_rows(w, n + tile * BN, inputs, ahead, piece, BN, THREADS)
        tl.extra.cuda.gdc_wait()


@triton.jit(do_not_specialize=["eps", *ASKED])
def one_row_kernel(x, w, norm, bias, out, n, inputs, eps, ahead, piece, askers, BN: tl.constexpr, BK: tl.constexpr,
                   STAGES: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr,
                   ADD: tl.constexpr, THREADS: tl.constexpr, PDL: tl.constexpr):
    """out[n] (+)= W[n, inputs] x, in float32. NORM: x is RMS-normed first. GATED: silu(first half) * second half."""
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    _start(w, tl.program_id(0), inputs, n, ahead, piece, askers, BN, GATED, THREADS, PDL)
    k = tl.arange(0, BK)
    at = w + rows.to(tl.int64)[:, None] * inputs + k[None, :]
    up = at + n.to(tl.int64) * inputs
    acc = tl.zeros((BN, BK), tl.float32)
    acc_up = tl.zeros((BN, BK), tl.float32)
    squares = tl.zeros((BK,), tl.float32)
    for start in tl.range(0, inputs, BK, num_stages=STAGES):
        a = tl.load(at + start, eviction_policy="evict_first")
        b = tl.load(x + start + k).to(tl.float32)
        if NORM:
            squares += b * b
            b = b * tl.load(norm + start + k).to(tl.float32)
        acc += a.to(tl.float32) * b[None, :]
        if GATED:
            acc_up += tl.load(up + start, eviction_policy="evict_first").to(tl.float32) * b[None, :]
    y = tl.sum(acc, 1)
    y_up = tl.sum(acc_up, 1)
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, 0) / inputs + eps)
        y = y * scale
        y_up = y_up * scale
    if BIAS:
        y += tl.load(bias + rows).to(tl.float32)
        if GATED:
            y_up += tl.load(bias + n + rows).to(tl.float32)
    if GATED:
        y = _silu(y) * y_up
    if ADD:
        y += tl.load(out + rows).to(tl.float32)
    tl.store(out + rows, y.to(out.dtype.element_ty))


@triton.jit
def _dot(a, b, acc, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """Triton's interpreter multiplies bfloat16 as integers: there the operands are widened."""
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def _finish(acc, bias, out, tokens, rows, m, n, BIAS: tl.constexpr, ADD: tl.constexpr):
    """acc [BN, BM] float32 to its place, with bias and what stands there."""
    if BIAS:
        acc += tl.load(bias + rows).to(tl.float32)[:, None]
    to = out + tokens[None, :] * n + rows[:, None]
    keep = (tokens < m)[None, :] & (rows >= 0)[:, None]
    if ADD:
        acc += tl.load(to, mask=keep, other=0.0).to(tl.float32)
    tl.store(to, acc.to(out.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=["m", *ASKED])
def few_rows_kernel(x, w, x_tiles, w_tiles, bias, out, partial, arrivals, m, n, inputs, x_stride, ahead, piece,
                    askers, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr,
                    STAGES: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr,
                    COPIES: tl.constexpr, THREADS: tl.constexpr, PDL: tl.constexpr, PRECISION: tl.constexpr,
                    UPCAST: tl.constexpr):
    """out[m, n] (+)= x[m, inputs] W^T for m <= BM. The weights are the left operand: tiles [BN, BK] x [BK, BM].

    SPLIT programs share the inputs of a tile of outputs; the last to arrive adds their sums, in order of the parts.
    COPIES: `x_tiles` [BM, BK] and `w_tiles` [BN, BK] are descriptors of x and w."""
    tile = tl.program_id(0)
    part = tl.program_id(1)
    each = inputs // SPLIT
    rows = tile * BN + tl.arange(0, BN)
    _start(w + part * each, tile, inputs, n, ahead, piece, askers, BN, GATED, THREADS, PDL)
    tokens = tl.arange(0, BM)
    k = part * each + tl.arange(0, BK)
    at = w + rows.to(tl.int64)[:, None] * inputs + k[None, :]
    up = at + n.to(tl.int64) * inputs
    x_at = x + tl.minimum(tokens, m - 1)[None, :] * x_stride + k[:, None]
    acc = tl.zeros((BN, BM), tl.float32)
    acc_up = tl.zeros((BN, BM), tl.float32)
    for start in tl.range(0, each, BK, num_stages=STAGES):
        if COPIES:
            b = x_tiles.load([0, part * each + start]).T
            acc = _dot(w_tiles.load([tile * BN, part * each + start]), b, acc, PRECISION, UPCAST)
            if GATED:
                acc_up = _dot(w_tiles.load([n + tile * BN, part * each + start]), b, acc_up, PRECISION, UPCAST)
        else:
            b = tl.load(x_at + start)
            acc = _dot(tl.load(at + start, eviction_policy="evict_first"), b, acc, PRECISION, UPCAST)
            if GATED:
                acc_up = _dot(tl.load(up + start, eviction_policy="evict_first"), b, acc_up, PRECISION, UPCAST)
    finish = True
    if SPLIT > 1:
        inside = tl.arange(0, BN)[:, None] * BM + tokens[None, :]
        tl.store(partial + (tile * SPLIT + part) * (BN * BM) + inside, acc)
        tl.debug_barrier()  # every thread's part stands before the arrival that announces it
        finish = tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == SPLIT - 1
        if finish:
            tl.store(arrivals + tile, 0)  # for the next launch
            acc = tl.zeros((BN, BM), tl.float32)
            for s in tl.static_range(SPLIT):  # past the first-level cache, which misses what others wrote
                acc += tl.load(partial + (tile * SPLIT + s) * (BN * BM) + inside, cache_modifier=".cg")
    if finish:
        if GATED:
            if BIAS:
                acc += tl.load(bias + rows).to(tl.float32)[:, None]
                acc_up += tl.load(bias + n + rows).to(tl.float32)[:, None]
            acc = _silu(acc) * acc_up
        _finish(acc, bias, out, tokens, rows, m, n, BIAS and not GATED, ADD)


INTERPRETED = isinstance(one_row_kernel, InterpretedFunction)


def asked(blocks: Blocks, n: int) -> tuple[int, int, int]:
    """The kernels' arguments named in ASKED."""
    return blocks.ahead, blocks.piece, blocks.askers or n // blocks.outputs


def launch_one_row(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, blocks: Blocks, pdl: bool,
                   norm: torch.Tensor | None = None, eps: float = 0.0, bias: torch.Tensor | None = None,
                   gated: bool = False, add: bool = False) -> None:
    """x [1, inputs], w [outputs (twice if gated), inputs], out [1, outputs], all contiguous."""
    n, inputs = out.shape[1], x.shape[1]
    one_row_kernel[(n // blocks.outputs,)](
        x, w, x if norm is None else norm, x if bias is None else bias, out, n, inputs, eps,
        *asked(blocks, n), BN=blocks.outputs, BK=blocks.columns, STAGES=blocks.stages, NORM=norm is not None,
        BIAS=bias is not None, GATED=gated, ADD=add, THREADS=32 * blocks.warps, PDL=pdl, num_warps=blocks.warps,
        **({"launch_pdl": True} if pdl else {}))


def launch_few_rows(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, blocks: Blocks, pdl: bool,
                    arrivals: torch.Tensor, bias: torch.Tensor | None = None, gated: bool = False,
                    add: bool = False) -> None:
    """x [m, inputs] with contiguous rows (a multiple of 16 bytes apart, where tiles are copied), w [outputs (twice if
    gated), inputs] and out [m, outputs] contiguous. arrivals: zeros, int32, one a tile of outputs; they are zeros again
    afterwards."""
    (m, inputs), n = x.shape, out.shape[1]
    tokens, split = max(16, triton.next_power_of_2(m)), blocks.split
    partial = x if split == 1 else torch.empty(split * n * tokens, dtype=torch.float32, device=x.device)
    tiles = (TensorDescriptor.from_tensor(x, [tokens, blocks.columns]),
             TensorDescriptor.from_tensor(w, [blocks.outputs, blocks.columns])) if blocks.copies else (x, w)
    few_rows_kernel[(n // blocks.outputs, split)](
        x, w, *tiles, x if bias is None else bias, out, partial, arrivals, m, n, inputs,
        x.stride(0), *asked(blocks, n), BM=tokens, BN=blocks.outputs, BK=blocks.columns, SPLIT=split,
        STAGES=blocks.stages, BIAS=bias is not None, GATED=gated, ADD=add, COPIES=blocks.copies,
        THREADS=32 * blocks.warps, PDL=pdl,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        UPCAST=INTERPRETED and x.dtype == torch.bfloat16, num_warps=blocks.warps,
        **({"launch_pdl": True} if pdl else {}))
