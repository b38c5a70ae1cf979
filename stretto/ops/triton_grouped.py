"""The Triton kernels behind `grouped.py`. Imported only where they are going to run.

The grid of `grouped_kernel` is sized by what is known on the host: N places make at most N / BM + E blocks. Each
program finds its expert from the bounds; blocks that no expert needs return at once. A sum over the inputs is made in
one order, whatever the batch, by one program.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from stretto.ops.gates import Gate
from stretto.ops.launch import dependent, overlaps
from stretto.ops.triton_dot import dot
from stretto.ops.triton_launch import begin
from stretto.ops.triton_layer import ACTS, activate


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


@triton.jit
def rows_of(columns, n, GATE: tl.constexpr):
    """Which of an expert's n rows of weights each column of a tile is. With a gate the halves alternate, so that what
    is multiplied with each other stands side by side."""
    if GATE == "":
        return columns
    else:
        return columns // 2 + columns % 2 * (n // 2)


@triton.jit
def _gated(first, second, alpha, limit, GATE: tl.constexpr):
    if GATE == "clamped":
        first = tl.minimum(first, limit)
        second = tl.minimum(tl.maximum(second, -limit), limit)
        return (second + 1.0) * first / (1.0 + tl.exp(-alpha * first))
    else:
        return activate(first, GATE) * second


@triton.jit
def finish(acc, bias, rows, rows_out, places, real, out, n, alpha, limit, BM: tl.constexpr, BN: tl.constexpr,
           BIAS: tl.constexpr, GATE: tl.constexpr):
    """A tile's sums [BM, BN] by bias and gate to where they belong. `bias`: of the expert; n: its rows."""
    if BIAS:
        acc += tl.load(bias + rows, mask=rows < n, other=0.0).to(tl.float32)[None, :]
    target = tl.load(rows_out + places, mask=real, other=0)
    if GATE == "":
        columns = tl.program_id(0) * BN + tl.arange(0, BN)
        made, width = acc, n
    else:
        first, second = tl.split(tl.reshape(acc, (BM, BN // 2, 2)))
        made, width = _gated(first, second, alpha, limit, GATE), n // 2
        columns = tl.program_id(0) * (BN // 2) + tl.arange(0, BN // 2)
    to = out + target[:, None] * width + columns[None, :]
    tl.store(to, made.to(out.dtype.element_ty), mask=real[:, None] & (columns < width)[None, :])


@triton.jit(do_not_specialize=["n_experts", "alpha", "limit"])
def grouped_kernel(x, weight, bias, bounds, rows_in, rows_out, out, n_experts, n, inputs, x_stride, each, alpha, limit,
                   BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EXPERTS: tl.constexpr, BIAS: tl.constexpr,
                   GATE: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr, PDL: tl.constexpr):
    """One program: BM places of one expert times BN of its rows."""
    begin(PDL)
    expert, first, end = block_of(bounds, tl.program_id(1), n_experts, BM, EXPERTS)
    if expert < n_experts:
        places = first + tl.arange(0, BM)
        real = places < end
        source = tl.load(rows_in + places, mask=real, other=0) // each
        columns = tl.program_id(0) * BN + tl.arange(0, BN)
        rows = rows_of(columns, n, GATE)
        k = tl.arange(0, BK)
        x_at = x + source[:, None] * x_stride + k[None, :]
        w_at = weight + expert.to(tl.int64) * n * inputs + rows.to(tl.int64)[None, :] * inputs + k[:, None]
        inside = (columns < n)[None, :]
        acc = tl.zeros((BM, BN), tl.float32)
        for start in tl.range(0, inputs, BK):
            left = k < inputs - start
            a = tl.load(x_at + start, mask=real[:, None] & left[None, :], other=0.0)
            b = tl.load(w_at + start, mask=left[:, None] & inside, other=0.0)
            acc = dot(a, b, acc, PRECISION, UPCAST)
        finish(acc, bias + expert * n, tl.where(columns < n, rows, n), rows_out, places, real, out, n, alpha, limit, BM,
               BN, BIAS, GATE)


@triton.jit
def _asked(experts, at, real, n, n_experts):
    """The experts of some slots: `n_experts` for padding, one more behind the last slot."""
    found = tl.load(experts + at, mask=at < n, other=0).to(tl.int32)
    return tl.where(at < real, found, tl.where(at < n, n_experts, n_experts + 1))


@triton.jit(do_not_specialize=["n", "n_experts"])
def group_kernel(experts, tokens, slots, bounds, places, n, n_experts, K: tl.constexpr, PADDED: tl.constexpr,
                 N: tl.constexpr, E: tl.constexpr, EACH: tl.constexpr, PDL: tl.constexpr):
    """One program puts n <= N slots in order by counting: before slot i stand the slots of lower experts, and those of
    its own expert that come earlier. `tokens`, read with PADDED: how many are no padding."""
    i = tl.arange(0, N)
    b = tl.arange(0, E)
    begin(PDL)
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
    tl.store(places + i, i.to(tl.int64), mask=i < n)


@triton.jit(do_not_specialize=["n", "n_experts"])
def count_kernel(experts, tokens, counts, n, n_experts, K: tl.constexpr, PADDED: tl.constexpr, N: tl.constexpr,
                 E: tl.constexpr, EACH: tl.constexpr, PDL: tl.constexpr):
    """One program: how many of the N slots of a block ask for each expert, `counts` [blocks, E]. Padding asks for
    `n_experts`."""
    b = tl.arange(0, E)
    begin(PDL)
    real = n
    if PADDED:
        real = tl.minimum(tl.load(tokens).to(tl.int32) * K, n)
    found = tl.zeros((E,), tl.int32)
    for start in tl.range(0, N, EACH):
        j = tl.program_id(0) * N + start + tl.arange(0, EACH)
        theirs = _asked(experts, j, real, n, n_experts)
        found += tl.sum((theirs[None, :] == b[:, None]).to(tl.int32), 1)
    tl.store(counts + tl.program_id(0) * E + b, found)


@triton.jit(do_not_specialize=["blocks", "n_experts"])
def before_kernel(counts, bounds, blocks, n_experts, E: tl.constexpr, AT_ONCE: tl.constexpr, PDL: tl.constexpr):
    """One program: `counts` become how many slots of the blocks before ask for an expert; and the bounds."""
    b = tl.arange(0, E)
    begin(PDL)
    total = tl.zeros((E,), tl.int32)
    for start in tl.range(0, blocks, AT_ONCE):
        block = start + tl.arange(0, AT_ONCE)
        at = counts + block[:, None] * E + b[None, :]
        inside = (block < blocks)[:, None]
        found = tl.load(at, mask=inside, other=0)
        tl.store(at, tl.cumsum(found, 0) - found + total[None, :], mask=inside)
        total += tl.sum(found, 0)
    tl.store(bounds + b, (tl.cumsum(total, 0) - total).to(tl.int64), mask=b <= n_experts)


@triton.jit(do_not_specialize=["n", "n_experts"])
def place_kernel(experts, tokens, before, bounds, slots, places, n, n_experts, K: tl.constexpr, PADDED: tl.constexpr,
                 N: tl.constexpr, E: tl.constexpr, EACH: tl.constexpr, PDL: tl.constexpr):
    """One program puts the N slots of a block where they belong: behind the slots of lower experts, those of the blocks
    before, and those of the block that come earlier."""
    i, block = tl.arange(0, N), tl.program_id(0)
    at = block * N + i
    begin(PDL)
    real = n
    if PADDED:
        real = tl.minimum(tl.load(tokens).to(tl.int32) * K, n)
    mine = _asked(experts, at, real, n, n_experts)
    rank = tl.load(before + block * E + mine) + tl.load(bounds + mine, mask=mine <= n_experts, other=0).to(tl.int32)
    for start in tl.range(0, N, EACH):
        j = start + tl.arange(0, EACH)
        theirs = _asked(experts, block * N + j, real, n, n_experts)
        rank += tl.sum(((theirs[None, :] == mine[:, None]) & (j[None, :] < i[:, None])).to(tl.int32), 1)
    tl.store(slots + rank, at.to(tl.int64), mask=at < n)
    tl.store(places + at, at.to(tl.int64), mask=at < n)


@triton.jit
def choose_kernel(logits, weights, experts, n_experts, stride, K: tl.constexpr, WIDE_K: tl.constexpr, E: tl.constexpr,
                  OF_ALL: tl.constexpr, PDL: tl.constexpr):
    """One program: the K likeliest experts of a token, of equal ones the first; weights are the softmax over them, or
    (OF_ALL) over all experts."""
    token = tl.program_id(0).to(tl.int64)
    e, j = tl.arange(0, E), tl.arange(0, WIDE_K)
    begin(PDL)
    left = tl.load(logits + token * stride + e, mask=e < n_experts, other=-float("inf")).to(tl.float32)
    most = tl.max(left, 0)
    total = tl.sum(tl.exp(left - most), 0)
    chosen = tl.zeros((WIDE_K,), tl.int32)
    values = tl.full((WIDE_K,), -float("inf"), tl.float32)
    for at in tl.static_range(K):
        value = tl.max(left, 0)
        best = tl.min(tl.where((left == value) & (e < n_experts), e, n_experts - 1), 0)
        chosen = tl.where(j == at, best, chosen)
        values = tl.where(j == at, value, values)
        left = tl.where(e == best, -float("inf"), left)
    share = tl.exp(values - most)
    share = share / (total if OF_ALL else tl.sum(share, 0))
    tl.store(weights + token * K + j, share, mask=j < K)
    tl.store(experts + token * K + j, chosen.to(tl.int64), mask=j < K)


@triton.jit
def combine_kernel(made, weights, tokens, residual, out, n, K: tl.constexpr, PADDED: tl.constexpr, ADD: tl.constexpr,
                   BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One program: a block of one token's features. Padding gets zeros. ADD: onto `residual`."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin(PDL)
    ok = columns < n
    if PADDED:
        ok = ok & (token < tl.load(tokens))
    acc = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(K):
        row = tl.load(made + (token * K + j) * n + columns, mask=ok, other=0.0)
        acc += row.to(tl.float32) * tl.load(weights + token * K + j)
    if ADD:
        acc += tl.load(residual + token * n + columns, mask=columns < n, other=0.0).to(tl.float32)
    tl.store(out + token * n + columns, acc.to(out.dtype.element_ty), mask=columns < n)


INTERPRETED = isinstance(grouped_kernel, InterpretedFunction)
FEW_SLOTS = 512  # that one program puts in order
BLOCK_SLOTS = 256  # of one program, where there are more


@dataclass(frozen=True)
class Tile:
    """Of one program: places, rows of weights, and how many inputs at a time."""

    places: int
    rows: int
    inputs: int
    warps: int = 4
    stages: int = 3


def tile_for(places: int, n_experts: int, itemsize: int) -> Tile:
    """By how many places an expert has on average. Few: much of the weights on the way at once."""
    bm = min(max(16, triton.next_power_of_2(-(-places // n_experts))), 128)
    if itemsize == 4:
        return Tile(bm, 64, 32, 4 if bm <= 64 else 8)
    return Tile(bm, 64, 128, 4, 4) if bm == 16 else Tile(bm, 128, 64, 4 if bm <= 64 else 8)


def blocks_of(places: int, n_experts: int, bm: int) -> int:
    """Most blocks of bm places: every one but one an expert is full, and none is empty."""
    return min(-(-places // bm) + n_experts, places)


def launch_grouped(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, bounds: torch.Tensor,
                   rows_in: torch.Tensor, rows_out: torch.Tensor, out: torch.Tensor, each: int = 1,
                   gate: Gate | None = None, tile: Tile | None = None) -> torch.Tensor:
    """Arguments as `grouped_linear`; tile: None: as suits the number of places. ValueError for tensors that are not
    contiguous."""
    if not (weight.is_contiguous() and out.is_contiguous() and x.stride(1) == 1):
        raise ValueError(f"weights and output must be contiguous, rows of x too; strides are {weight.stride()}, "
                         f"{out.stride()} and {x.stride()}: call contiguous()")
    n_experts, n, inputs = weight.shape
    t = tile or tile_for(len(rows_in), n_experts, x.itemsize)
    blocks = blocks_of(len(rows_in), n_experts, t.places)
    if blocks == 0:
        return out
    kind, alpha, limit = gate_options(gate)
    grouped_kernel[(triton.cdiv(n, t.rows), blocks)](
        x, weight, x if bias is None else bias, bounds, rows_in, rows_out, out, n_experts, n, inputs, x.stride(0), each,
        alpha, limit, BM=t.places, BN=t.rows, BK=t.inputs, EXPERTS=triton.next_power_of_2(n_experts),
        BIAS=bias is not None, GATE=kind,
        PRECISION="ieee" if x.dtype is torch.float32 else "tf32", UPCAST=INTERPRETED and x.dtype is torch.bfloat16,
        PDL=overlaps(x.device), num_warps=t.warps, num_stages=t.stages, **dependent(x.device))
    return out


def gate_options(gate: Gate | None) -> tuple[str, float, float]:
    """GATE, alpha and limit of a kernel."""
    if gate is None:
        return "", 0.0, 0.0
    return ACTS.get(gate.act, gate.act), float(gate.alpha), float(gate.limit)


def launch_group(experts: torch.Tensor, n_experts: int, tokens: torch.Tensor | None,
                 few: int = FEW_SLOTS) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Slots in the order of their experts [N], bounds [E + 1], places [N]; up to `few` slots by one launch, else by
    three. experts [T, K] int64, contiguous."""
    n, device = experts.numel(), experts.device
    slots, places = torch.empty(2, n, dtype=torch.int64, device=device)
    bounds = torch.empty(n_experts + 1, dtype=torch.int64, device=device)
    padding, size = experts if tokens is None else tokens, triton.next_power_of_2(n_experts + 2)
    common = dict(E=size, PDL=overlaps(device), num_warps=4, **dependent(device))
    shape = dict(K=experts.shape[1], PADDED=tokens is not None, EACH=16)
    if n <= few:
        group_kernel[(1,)](experts, padding, slots, bounds, places, n, n_experts,
                           N=max(16, triton.next_power_of_2(n)), **shape, **common)
        return slots, bounds, places
    blocks = triton.cdiv(n, BLOCK_SLOTS)
    counts = torch.empty(blocks, size, dtype=torch.int32, device=device)
    count_kernel[(blocks,)](experts, padding, counts, n, n_experts, N=BLOCK_SLOTS, **shape, **common)
    before_kernel[(1,)](counts, bounds, blocks, n_experts, AT_ONCE=max(1, min(16, 8192 // size)), **common)
    place_kernel[(blocks,)](experts, padding, counts, bounds, slots, places, n, n_experts, N=BLOCK_SLOTS, **shape,
                            **common)
    return slots, bounds, places


def launch_choose(logits: torch.Tensor, k: int, of_all: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Arguments as `grouped.choose`."""
    (tokens, n), device = logits.shape, logits.device
    weights = torch.empty(tokens, k, dtype=torch.float32, device=device)
    experts = torch.empty(tokens, k, dtype=torch.int64, device=device)
    if tokens:
        size = triton.next_power_of_2(n)
        choose_kernel[(tokens,)](logits, weights, experts, n, logits.stride(0), K=k, WIDE_K=triton.next_power_of_2(k),
                                 E=size, OF_ALL=of_all, PDL=overlaps(device), num_warps=1 if size <= 256 else 4,
                                 **dependent(device))
    return weights, experts


def launch_combine(made: torch.Tensor, weights: torch.Tensor, tokens: torch.Tensor | None = None,
                   residual: torch.Tensor | None = None) -> torch.Tensor:
    """Arguments as `grouped.combine`."""
    count, k, n = made.shape
    out = made.new_empty(count, n) if residual is None else residual
    if count:
        combine_kernel[(count, triton.cdiv(n, 1024))](
            made.contiguous(), weights.contiguous(), weights if tokens is None else tokens, out, out, n, K=k,
            PADDED=tokens is not None, ADD=residual is not None, BLOCK=1024, PDL=overlaps(made.device), num_warps=4,
            **dependent(made.device))
    return out
