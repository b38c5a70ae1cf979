"""Triton kernels behind `skinny.py`: a weight matrix times a few rows. Imported only where they are going to run.

Such a product only streams the weights, so what counts is that memory is never idle: while the launch before still
runs, each program already asks the second-level cache for the first part of its weights, which depend on nothing
(programmatic dependent launch). The sum of an output is made in one order, whatever the batch.

    launch n      |######## programs ########|
    launch n + 1                     |prefetch| wait |######## programs ########|
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from stretto.ops.triton_launch import ask_for


@dataclass(frozen=True)
class Blocks:
    """One launch: each program makes `outputs` outputs of every row, reading `columns` columns of W at a time."""

    outputs: int
    columns: int
    stages: int
    warps: int
    split: int = 1  # programs that share the columns of one output
    ahead: int = 256  # columns asked for before the launch before has ended

    @property
    def piece(self) -> int:
        """Columns that one thread asks for."""
        return min(self.ahead, max(32, self.outputs * self.ahead // (self.warps * 32)))


@dataclass(frozen=True)
class OneRow(Blocks):
    """A launch of the kernel for a single row."""


@dataclass(frozen=True)
class SomeRows(Blocks):
    """A launch of the kernel in `triton_some_rows`."""


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _start(w, rows, inputs, n, GATED: tl.constexpr, AHEAD: tl.constexpr, PIECE: tl.constexpr, PDL: tl.constexpr):
    """Prefetches, then waits for the launch before; what is written before this launch may be read from here on."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        pieces = w + rows.to(tl.int64)[:, None] * inputs + (tl.arange(0, AHEAD // PIECE) * PIECE)[None, :]
        ask_for(pieces, PIECE * 2)
        if GATED:
            ask_for(pieces + n.to(tl.int64) * inputs, PIECE * 2)
        tl.extra.cuda.gdc_wait()


@triton.jit(do_not_specialize=["eps"])
def one_row_kernel(x, w, norm, bias, out, n, inputs, eps, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
                   AHEAD: tl.constexpr, PIECE: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr,
                   GATED: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr):
    """out[n] (+)= W[n, inputs] x, in float32. NORM: x is RMS-normed first. GATED: silu(first half) * second half."""
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    _start(w, rows, inputs, n, GATED, AHEAD, PIECE, PDL)
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


@triton.jit(do_not_specialize=["m", "eps"])
def few_rows_kernel(x, w, norm, bias, out, partial, arrivals, m, n, inputs, x_stride, eps, BM: tl.constexpr,
                    BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr,
                    PIECE: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr,
                    ADD: tl.constexpr, PDL: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """out[m, n] (+)= x[m, inputs] W^T for m <= BM. The weights are the left operand: tiles [BN, BK] x [BK, BM].

    NORM: x is multiplied by the norm's weights on the way, and the sums by 1 / rms of their row at the end.
    SPLIT programs share the inputs of a tile of outputs; the last to arrive adds their sums, in order of the parts."""
    tile = tl.program_id(0)
    part = tl.program_id(1)
    each = inputs // SPLIT
    rows = tile * BN + tl.arange(0, BN)
    _start(w + part * each, rows, inputs, n, GATED, AHEAD, PIECE, PDL)
    tokens = tl.arange(0, BM)
    k = part * each + tl.arange(0, BK)
    at = w + rows.to(tl.int64)[:, None] * inputs + k[None, :]
    up = at + n.to(tl.int64) * inputs
    x_at = x + tl.minimum(tokens, m - 1)[None, :] * x_stride + k[:, None]
    acc = tl.zeros((BN, BM), tl.float32)
    acc_up = tl.zeros((BN, BM), tl.float32)
    squares = tl.zeros((BK, BM), tl.float32)
    for start in tl.range(0, each, BK, num_stages=STAGES):
        b = tl.load(x_at + start)
        if NORM:
            wide = b.to(tl.float32)
            squares += wide * wide
            b = (wide * tl.load(norm + start + k).to(tl.float32)[:, None]).to(b.dtype)
        acc = _dot(tl.load(at + start, eviction_policy="evict_first"), b, acc, PRECISION, UPCAST)
        if GATED:
            acc_up = _dot(tl.load(up + start, eviction_policy="evict_first"), b, acc_up, PRECISION, UPCAST)
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, 0) / inputs + eps)
        acc *= scale[None, :]
        acc_up *= scale[None, :]
    if GATED:
        if BIAS:
            acc += tl.load(bias + rows).to(tl.float32)[:, None]
            acc_up += tl.load(bias + n + rows).to(tl.float32)[:, None]
        _finish(_silu(acc) * acc_up, bias, out, tokens, rows, m, n, False, ADD)
    elif SPLIT == 1:
        _finish(acc, bias, out, tokens, rows, m, n, BIAS, ADD)
    else:
        inside = tl.arange(0, BN)[:, None] * BM + tokens[None, :]
        tl.store(partial + (tile * SPLIT + part) * (BN * BM) + inside, acc)
        tl.debug_barrier()  # every thread's part stands before the arrival that announces it
        if tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == SPLIT - 1:
            tl.store(arrivals + tile, 0)  # for the next launch
            total = tl.zeros((BN, BM), tl.float32)
            for s in tl.static_range(SPLIT):  # past the first-level cache, which misses what others wrote
                total += tl.load(partial + (tile * SPLIT + s) * (BN * BM) + inside, cache_modifier=".cg")
            _finish(total, bias, out, tokens, rows, m, n, BIAS, ADD)


INTERPRETED = isinstance(one_row_kernel, InterpretedFunction)


def launch_one_row(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, blocks: Blocks, pdl: bool,
                   norm: torch.Tensor | None = None, eps: float = 0.0, bias: torch.Tensor | None = None,
                   gated: bool = False, add: bool = False) -> None:
    """x [1, inputs], w [outputs (twice if gated), inputs], out [1, outputs], all contiguous."""
    n, inputs = out.shape[1], x.shape[1]
    one_row_kernel[(n // blocks.outputs,)](
        x, w, x if norm is None else norm, x if bias is None else bias, out, n, inputs, eps, BN=blocks.outputs,
        BK=blocks.columns, STAGES=blocks.stages, AHEAD=blocks.ahead, PIECE=blocks.piece, NORM=norm is not None,
        BIAS=bias is not None, GATED=gated, ADD=add, PDL=pdl, num_warps=blocks.warps,
        **({"launch_pdl": True} if pdl else {}))


def launch_few_rows(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, blocks: Blocks, pdl: bool,
                    arrivals: torch.Tensor, norm: torch.Tensor | None = None, eps: float = 0.0,
                    bias: torch.Tensor | None = None, gated: bool = False, add: bool = False) -> None:
    """x [m, inputs] with contiguous rows, w [outputs (twice if gated), inputs] and out [m, outputs] contiguous.
    arrivals: zeros, int32, one a tile of outputs; they are zeros again afterwards. ValueError for a norm where
    programs share the inputs."""
    (m, inputs), n = x.shape, out.shape[1]
    tokens, split = max(16, triton.next_power_of_2(m)), blocks.split
    if norm is not None and split > 1:
        raise ValueError(f"a norm needs all inputs of a row in one program; these blocks share them among {split}")
    partial = x if split == 1 else torch.empty(split * n * tokens, dtype=torch.float32, device=x.device)
    few_rows_kernel[(n // blocks.outputs, split)](
        x, w, x if norm is None else norm, x if bias is None else bias, out, partial, arrivals, m, n, inputs,
        x.stride(0), eps, BM=tokens, BN=blocks.outputs, BK=blocks.columns, SPLIT=split, STAGES=blocks.stages,
        AHEAD=blocks.ahead, PIECE=blocks.piece, NORM=norm is not None, BIAS=bias is not None, GATED=gated, ADD=add,
        PDL=pdl, PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        UPCAST=INTERPRETED and x.dtype == torch.bfloat16, num_warps=blocks.warps,
        **({"launch_pdl": True} if pdl else {}))
