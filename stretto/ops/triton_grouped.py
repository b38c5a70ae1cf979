"""The Triton kernels behind `grouped.py`. Imported only where they are going to run.

The grid of `grouped_kernel` is sized by what is known on the host: N places make at most N / BM + E blocks. Each
program finds its expert from the bounds; blocks that no expert needs return at once. A sum over the inputs is made in
one order, whatever the batch, by one program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction


@triton.jit
def _dot(a, b, acc, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """Triton's interpreter multiplies bfloat16 as integers: there the operands are widened."""
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def block_of(bounds, block, n_experts, BM: tl.constexpr, EXPERTS: tl.constexpr):
    """(expert, first place, end of the expert's places) of a block; expert = n_experts where there is none."""
    e = tl.arange(0, EXPERTS)
    start = tl.load(bounds + e, mask=e < n_experts, other=0)
    end = tl.load(bounds + e + 1, mask=e < n_experts, other=0)
    blocks = (end - start + BM - 1) // BM
    until = tl.cumsum(blocks, 0)
    expert = tl.sum(((until <= block) & (e < n_experts)).to(tl.int32), 0)
    mine = e == expert
    first = tl.sum(tl.where(mine, start + (block - (until - blocks)) * BM, 0), 0)
    return expert, first, tl.sum(tl.where(mine, end, 0), 0)


@triton.jit(do_not_specialize=["n_experts"])
def grouped_kernel(x, weight, bias, bounds, rows_in, rows_out, out, n_experts, n, inputs, x_stride, BM: tl.constexpr,
                   BN: tl.constexpr, BK: tl.constexpr, EXPERTS: tl.constexpr, BIAS: tl.constexpr,
                   PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """One program: BM places of one expert times BN outputs."""
    expert, first, end = block_of(bounds, tl.program_id(1), n_experts, BM, EXPERTS)
    if expert < n_experts:
        places = first + tl.arange(0, BM)
        real = places < end
        source = tl.load(rows_in + places, mask=real, other=0)
        columns = tl.program_id(0) * BN + tl.arange(0, BN)
        k = tl.arange(0, BK)
        x_at = x + source[:, None] * x_stride + k[None, :]
        w_at = weight + expert.to(tl.int64) * n * inputs + columns.to(tl.int64)[None, :] * inputs + k[:, None]
        inside = (columns < n)[None, :]
        acc = tl.zeros((BM, BN), tl.float32)
        for start in tl.range(0, inputs, BK):
            left = k < inputs - start
            a = tl.load(x_at + start, mask=real[:, None] & left[None, :], other=0.0)
            b = tl.load(w_at + start, mask=left[:, None] & inside, other=0.0)
            acc = _dot(a, b, acc, PRECISION, UPCAST)
        if BIAS:
            acc += tl.load(bias + expert * n + columns, mask=columns < n, other=0.0).to(tl.float32)[None, :]
        target = tl.load(rows_out + places, mask=real, other=0)
        to = out + target[:, None] * n + columns[None, :]
        tl.store(to, acc.to(out.dtype.element_ty), mask=real[:, None] & inside)


@triton.jit
def _asked(experts, at, real, n, n_experts):
    """The experts of some slots: `n_experts` for padding, one more behind the last slot."""
    found = tl.load(experts + at, mask=at < n, other=0).to(tl.int32)
    return tl.where(at < real, found, tl.where(at < n, n_experts, n_experts + 1))


@triton.jit(do_not_specialize=["n", "n_experts"])
def group_kernel(experts, tokens, slots, bounds, n, n_experts, K: tl.constexpr, PADDED: tl.constexpr, N: tl.constexpr,
                 E: tl.constexpr, EACH: tl.constexpr):
    """One program puts n <= N slots in order by counting: before slot i stand the slots of lower experts, and those of
    its own expert that come earlier. `tokens`, read with PADDED: how many are no padding."""
    i = tl.arange(0, N)
    b = tl.arange(0, E)
    real = n
    if PADDED:
        real = tl.minimum(tl.load(tokens).to(tl.int32) * K, n)
    mine = _asked(experts, i, real, n, n_experts)
    rank = tl.zeros((N,), tl.int32)
    before = tl.zeros((E,), tl.int32)
    for start in tl.range(0, N, EACH):
        j = start + tl.arange(0, EACH)
        theirs = _asked(experts, j, real, n, n_experts)
        first = (theirs[None, :] < mine[:, None]) | ((theirs[None, :] == mine[:, None]) & (j[None, :] < i[:, None]))
        rank += tl.sum(first.to(tl.int32), 1)
        before += tl.sum((theirs[None, :] < b[:, None]).to(tl.int32), 1)
    tl.store(slots + rank, i.to(tl.int64), mask=i < n)
    tl.store(bounds + b, before.to(tl.int64), mask=b <= n_experts)


@triton.jit
def combine_kernel(made, weights, out, n, K: tl.constexpr, BLOCK: tl.constexpr):
    """One program: a block of one token's features."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(K):
        row = tl.load(made + (token * K + j) * n + columns, mask=columns < n, other=0.0)
        acc += row.to(tl.float32) * tl.load(weights + token * K + j)
    tl.store(out + token * n + columns, acc.to(out.dtype.element_ty), mask=columns < n)


INTERPRETED = isinstance(grouped_kernel, InterpretedFunction)


def launch_grouped(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, bounds: torch.Tensor,
                   rows_in: torch.Tensor, rows_out: torch.Tensor, out: torch.Tensor,
                   block_rows: int | None = None) -> torch.Tensor:
    """Arguments as `grouped_linear`; block_rows: of every block, None: as suits the number of places. ValueError for
    tensors that are not contiguous."""
    if not (weight.is_contiguous() and out.is_contiguous() and x.stride(1) == 1):
        raise ValueError(f"weights and output must be contiguous, rows of x too; strides are {weight.stride()}, "
                         f"{out.stride()} and {x.stride()}: call contiguous()")
    n_experts, n, inputs = weight.shape
    places = len(rows_in)
    bm = block_rows or min(max(16, triton.next_power_of_2(-(-places // n_experts))), 128)
    bn, bk = (64, 32) if x.dtype is torch.float32 else (128, 64)
    blocks = min(-(-places // bm) + n_experts, places)  # every block but one an expert is full, and none is empty
    if blocks == 0:
        return out
    grouped_kernel[(triton.cdiv(n, bn), blocks)](
        x, weight, x if bias is None else bias, bounds, rows_in, rows_out, out, n_experts, n, inputs, x.stride(0),
        BM=bm, BN=bn, BK=bk, EXPERTS=triton.next_power_of_2(n_experts), BIAS=bias is not None,
        PRECISION="ieee" if x.dtype is torch.float32 else "tf32", UPCAST=INTERPRETED and x.dtype is torch.bfloat16,
        num_warps=4 if bm <= 64 else 8, num_stages=3)
    return out


def launch_group(experts: torch.Tensor, n_experts: int,
                 tokens: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots in the order of their experts [N], and bounds [E + 1]; for few slots. experts [T, K] int64, contiguous."""
    n = experts.numel()
    slots = torch.empty(n, dtype=torch.int64, device=experts.device)
    bounds = torch.empty(n_experts + 1, dtype=torch.int64, device=experts.device)
    group_kernel[(1,)](experts, experts if tokens is None else tokens, slots, bounds, n, n_experts, K=experts.shape[1],
                       PADDED=tokens is not None, N=max(16, triton.next_power_of_2(n)),
                       E=triton.next_power_of_2(n_experts + 1), EACH=16, num_warps=4)
    return slots, bounds


def launch_combine(made: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Arguments as `grouped.combine`."""
    tokens, k, n = made.shape
    out = made.new_empty(tokens, n)
    if tokens:
        combine_kernel[(tokens, triton.cdiv(n, 1024))](made.contiguous(), weights.contiguous(), out, n, K=k, BLOCK=1024,
                                                       num_warps=4)
    return out
