"""The Triton kernels of the gated delta rule and of state spaces (`recurrent.py`). Imported only where they are going
to run.

A short row is fed token by token. A long one is fed in chunks of C tokens, by the chunked form of Yang et al. 2024
(https://arxiv.org/abs/2412.06464, section 3.3), in two launches. In a chunk, total[i] is the sum of its decays up to
token i, and G[i, j] = exp(total[i] - total[j]) for j <= i, else 0:

    chunks at once        system = beta (k k^T) G below the diagonal;      inverse = (I + system)^-1
                          own = inverse (beta v);     read = inverse (beta k exp(total));     within = (q k^T) G
    one after another     change = own - read S;      out = q exp(total) S + within change
                          S = exp(total[-1]) S + (k exp(total[-1] - total))^T change

Where nothing is taken back from a state (DELTA off, Mamba-2: Dao and Gu 2024, https://arxiv.org/abs/2405.21060), a
change is v itself, and what only serves to find it falls away.

A row's state is read and written by the programs of that row alone, each its own part of it, so that a cell may be
written in the step that reads it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from stretto.ops.launch import dependent, overlaps, shared_memory
from stretto.ops.state_step import PartMemory, StateStep
from stretto.ops.triton_dot import dot
from stretto.ops.triton_launch import begin

SHORT = 24  # most tokens of a row that is fed token by token, where long ones are fed in chunks
CHUNKS = False  # off until tests/gpu/test_states_cuda.py has passed with the warps that `Chunking` has now
VALUES = 32  # features of a value of one program that feeds tokens
WIDE = 160 * 1024  # bytes of shared memory that the longest chunks take at most


@dataclass(frozen=True)
class Chunking:
    """How long rows are fed: `tokens` of a chunk, `values` features of a program that goes from chunk to chunk. A warp
    takes 16 tokens of a chunk: where there are more, the compiler gives some of them rows that no chunk has."""

    tokens: int
    values: int
    warps: int = 4  # of a program that makes a chunk ready
    warps_on: int = 4  # of one that goes from chunk to chunk
    stages: int = 1  # how far its loads run ahead


def chunking(dtype: torch.dtype, size: int, room: int = WIDE) -> Chunking:
    """For products of this type, keys of this size, and `room` bytes of shared memory. What a chunk needs of float32
    numbers takes twice the room."""
    halves = (dtype is torch.float32) + (size > 128) + (room < WIDE)
    return Chunking(max(16, 64 >> halves), 32)


# ------------------------------------------------------------------------------------------------------ token by token
@triton.jit
def tokens_kernel(q, k, v, decay, beta, out, memory, page_states, pages, slots, cu_q, q_len, n_out, base, v_stride,
                  most, CELLS: tl.constexpr, HEADS: tl.constexpr, EACH: tl.constexpr, K: tl.constexpr,
                  V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, DELTA: tl.constexpr, PDL: tl.constexpr):
    """One program for BV features of one value head of a row of up to `most` tokens: its part of the state stays in
    registers."""
    row, head = tl.program_id(0), tl.program_id(1)
    ks, vs = tl.arange(0, BK), tl.program_id(2) * BV + tl.arange(0, BV)
    ok_k, ok_v = ks < K, vs < V
    ok = ok_k[:, None] & ok_v[None, :]
    begin(PDL)
    n, first, start = tl.load(q_len + row), tl.load(base + row), tl.load(cu_q + row).to(tl.int64)
    n = tl.where(n > most, 0, n)
    kept = n - tl.maximum(tl.load(n_out + row), 1)
    at = head * K * V + ks[:, None] * V + vs[None, :]
    cells = memory + tl.load(slots + row) * CELLS * HEADS * K * V + at
    state = tl.load(cells + (first % CELLS) * HEADS * K * V, mask=ok & (n > 0), other=0.0)
    tl.debug_barrier()
    for t in range(n):
        token = start + t
        qk = (token * (HEADS // EACH) + head // EACH) * K + ks
        q_t, k_t = tl.load(q + qk, mask=ok_k, other=0.0), tl.load(k + qk, mask=ok_k, other=0.0)
        v_t = tl.load(v + token * v_stride + head * V + vs, mask=ok_v, other=0.0)
        state *= tl.exp(tl.load(decay + token * HEADS + head))
        if DELTA:
            v_t = (v_t - tl.sum(state * k_t[:, None], 0)) * tl.load(beta + token * HEADS + head)
        state += k_t[:, None] * v_t[None, :]
        tl.store(out + (token * HEADS + head) * V + vs, tl.sum(state * q_t[:, None], 0), mask=ok_v)
        if t >= kept:
            tl.store(cells + (first + t + 1) % CELLS * HEADS * K * V, state, mask=ok)
        page = tl.load(pages + token)
        if page > 0:
            tl.store(page_states + page * HEADS * K * V + at, state, mask=ok)


# -------------------------------------------------------------------------------------------------------- in chunks
@triton.jit
def _chunk_of(q_len, chunk, n_rows, most, C: tl.constexpr, ROWS: tl.constexpr):
    """(row, first token of the chunk in its row, tokens of the row); row = n_rows where there is no such chunk."""
    r = tl.arange(0, ROWS)
    q = tl.load(q_len + r, mask=r < n_rows, other=0)
    chunks = tl.where(q > most, (q + C - 1) // C, 0)
    until = tl.cumsum(chunks, 0)
    row = tl.sum(((until <= chunk) & (r < n_rows)).to(tl.int32), 0)
    mine = r == row
    return row, (chunk - tl.sum(tl.where(mine, until - chunks, 0), 0)) * C, tl.sum(tl.where(mine, q, 0), 0)


@triton.jit
def _inverse(system, C: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """(I + system)^-1 of a strictly lower triangular [C, C], by blocks that double: from the inverses of blocks A and B
    on the diagonal and what stands between them,

        | A   |^-1    |  A^-1             |
        | X B |    =  | -B^-1 X A^-1  B^-1 |

    Nothing grows on the way that is not in the result."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    made = tl.where(i == j, 1.0, tl.where(i // 2 == j // 2, -system, 0.0))
    for level in tl.static_range(1, LEVELS):
        between = (i // (2 << level) == j // (2 << level)) & (i // (1 << level) != j // (1 << level))
        part = dot(tl.where(between, system, 0.0), made, None, PRECISION, UPCAST)
        made -= dot(made, part, None, PRECISION, UPCAST)
    return made


@triton.jit
def ready_kernel(q, k, v, decay, beta, q_ready, k_ready, read, own, within, totals, cu_q, q_len, v_stride, n_rows, most,
                 HEADS: tl.constexpr, EACH: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
                 BV: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, ROWS: tl.constexpr, DELTA: tl.constexpr,
                 PRECISION: tl.constexpr, UPCAST: tl.constexpr, PDL: tl.constexpr):
    """One program for a chunk and a value head: what needs no state. See the top of this file for the names."""
    head = tl.program_id(1)
    begin(PDL)
    row, first, n = _chunk_of(q_len, tl.program_id(0), n_rows, most, C, ROWS)
    if row < n_rows:
        i, ks, vs = tl.arange(0, C), tl.arange(0, BK), tl.arange(0, BV)
        token = (tl.load(cu_q + row) + first + i).to(tl.int64)
        real = i < n - first
        ok_k = real[:, None] & (ks < K)[None, :]
        qk = (token * (HEADS // EACH) + head // EACH)[:, None] * K + ks[None, :]
        of_head = token * HEADS + head
        decays = tl.load(decay + of_head, mask=real, other=0.0)
        total, last = tl.cumsum(decays, 0), tl.sum(decays, 0)
        below = i[:, None] >= i[None, :]
        fades = tl.where(below, tl.exp(tl.where(below, total[:, None] - total[None, :], 0.0)), 0.0)
        k_i = tl.load(k + qk, mask=ok_k, other=0.0)
        wide = of_head[:, None] * K + ks[None, :]
        tl.store(k_ready + wide, (k_i * tl.exp(last - total)[:, None]).to(k_ready.dtype.element_ty), mask=ok_k)
        k_i = k_i.to(k_ready.dtype.element_ty)
        q_i = tl.load(q + qk, mask=ok_k, other=0.0)
        tl.store(q_ready + wide, (q_i * tl.exp(total)[:, None]).to(k_i.dtype), mask=ok_k)
        seen = dot(q_i.to(k_i.dtype), tl.trans(k_i), None, PRECISION, UPCAST) * fades
        tl.store(within + of_head[:, None] * C + i[None, :], seen.to(k_i.dtype), mask=real[:, None])
        if DELTA:
            share = tl.load(beta + of_head, mask=real, other=0.0)
            alike = dot(k_i, tl.trans(k_i), None, PRECISION, UPCAST)
            system = tl.where(i[:, None] > i[None, :], alike * fades * share[:, None], 0.0)
            inverse = _inverse(system, C, LEVELS, PRECISION, UPCAST)
            v_i = tl.load(v + token[:, None] * v_stride + head * V + vs[None, :],
                          mask=real[:, None] & (vs < V)[None, :], other=0.0)
            made = dot((inverse * share[None, :]).to(k_i.dtype), v_i.to(k_i.dtype), None, PRECISION, UPCAST)
            tl.store(own + of_head[:, None] * V + vs[None, :], made, mask=real[:, None] & (vs < V)[None, :])
            by_share = (inverse * (share * tl.exp(total))[None, :]).to(k_i.dtype)
            tl.store(read + wide, dot(by_share, k_i, None, PRECISION, UPCAST).to(k_i.dtype), mask=ok_k)
        tl.store(totals + of_head, total, mask=real)


@triton.jit
def _state_behind(state, change, k, totals, key, of_head, t, ok, i, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """The state behind token t of a chunk that begins with `state`."""
    total = tl.load(totals + of_head, mask=i <= t, other=0.0)
    here = tl.sum(tl.where(i == t, total, 0.0), 0)
    fade = tl.where(i <= t, tl.exp(tl.where(i <= t, here - total, 0.0)), 0.0)
    k_i = tl.load(k + key, mask=ok & (i <= t)[:, None], other=0.0) * fade[:, None]
    made = dot(tl.trans(k_i.to(change.dtype)), change, None, PRECISION, UPCAST)
    return state * tl.exp(here) + made


@triton.jit
def chunks_kernel(k, q_ready, k_ready, read, own, within, totals, out, memory, page_states, pages, slots, cu_q, q_len,
                  n_out, base, own_stride, most, CELLS: tl.constexpr, HEADS: tl.constexpr, EACH: tl.constexpr,
                  K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
                  DELTA: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr, PDL: tl.constexpr):
    """One program for BV features of one value head of a row of more than `most` tokens, chunk after chunk."""
    row, head = tl.program_id(0), tl.program_id(1)
    i, ks, vs = tl.arange(0, C), tl.arange(0, BK), tl.program_id(2) * BV + tl.arange(0, BV)
    begin(PDL)
    n, base_of = tl.load(q_len + row), tl.load(base + row)
    if n > most:
        kept = n - tl.maximum(tl.load(n_out + row), 1)
        ok = (ks < K)[:, None] & (vs < V)[None, :]
        at = head * K * V + ks[:, None] * V + vs[None, :]
        cells = memory + tl.load(slots + row) * CELLS * HEADS * K * V + at
        state = tl.load(cells + (base_of % CELLS) * HEADS * K * V, mask=ok, other=0.0)
        tl.debug_barrier()
        start = tl.load(cu_q + row).to(tl.int64)
        for first in range(0, n, C):
            token = start + first + i
            real = i < n - first
            ok_k, ok_v = real[:, None] & (ks < K)[None, :], real[:, None] & (vs < V)[None, :]
            of_head = token * HEADS + head
            wide = of_head[:, None] * K + ks[None, :]
            q_i = tl.load(q_ready + wide, mask=ok_k, other=0.0)
            k_i = tl.load(k_ready + wide, mask=ok_k, other=0.0)
            seen = tl.load(within + of_head[:, None] * C + i[None, :], mask=real[:, None], other=0.0)
            own_i = tl.load(own + token[:, None] * own_stride + head * V + vs[None, :], mask=ok_v, other=0.0)
            page = tl.load(pages + token, mask=real, other=0)
            total = tl.load(totals + (start + tl.minimum(first + C, n) - 1) * HEADS + head)
            rounded = state.to(q_i.dtype)
            if DELTA:
                read_i = tl.load(read + wide, mask=ok_k, other=0.0)
                own_i -= dot(read_i, rounded, None, PRECISION, UPCAST)
            change = own_i.to(q_i.dtype)
            made = dot(q_i, rounded, None, PRECISION, UPCAST) + dot(seen, change, None, PRECISION, UPCAST)
            tl.store(out + of_head[:, None] * V + vs[None, :], made, mask=ok_v)
            stays = real & ((page > 0) | (first + i >= kept))
            if tl.max(stays.to(tl.int32), 0) > 0:
                key = (token * (HEADS // EACH) + head // EACH)[:, None] * K + ks[None, :]
                for t in range(tl.minimum(C, n - first)):
                    target = tl.load(pages + start + first + t)
                    if (target > 0) | (first + t >= kept):
                        behind = _state_behind(state, change, k, totals, key, of_head, t, ok_k, i, PRECISION, UPCAST)
                        tl.store(page_states + target * HEADS * K * V + at, behind, mask=ok & (target > 0))
                        tl.store(cells + (base_of + first + t + 1) % CELLS * HEADS * K * V, behind,
                                 mask=ok & (first + t >= kept))
            state = state * tl.exp(total) + dot(tl.trans(k_i), change, None, PRECISION, UPCAST)


INTERPRETED = isinstance(tokens_kernel, InterpretedFunction)


def launch_delta_rule(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor,
                      beta: torch.Tensor | None, memory: PartMemory, where: StateStep,
                      dtype: torch.dtype = torch.float32, short: int | None = None,
                      how: Chunking | None = None) -> torch.Tensor:
    """As `recurrent.recurrence_reference`; zeros for padding. One launch if all rows are short or rounding may not
    depend on the batch, else three. `dtype`: of the operands of products of chunks. `short`: None: as CHUNKS says."""
    step, (n, heads, width) = where.step, v.shape
    assert v.stride()[1:] == (width, 1) and all(x.is_contiguous() for x in (q, k, decay, memory.slots))
    assert beta is None or beta.is_contiguous()
    out = torch.zeros(n, heads, width, dtype=torch.float32, device=v.device)
    most = n if step.most_tokens is None else min(n, step.most_tokens)
    if short is None:
        short = SHORT if CHUNKS else n
    one_by_one = where.fixed or most <= short
    values = min(VALUES, triton.next_power_of_2(width))
    tokens_kernel[len(step.slots), heads, triton.cdiv(width, values)](
        q, k, v, decay, decay if beta is None else beta, out, memory.slots, memory.pages, where.pages, step.slots,
        step.cu_q, step.q_len, step.n_out, step.base, v.stride(0), n if one_by_one else short, CELLS=where.cells,
        HEADS=heads, EACH=heads // q.shape[1], K=q.shape[2], V=width, BK=triton.next_power_of_2(q.shape[2]), BV=values,
        DELTA=beta is not None, PDL=overlaps(v.device), num_warps=4, **dependent(v.device))
    if not one_by_one:
        how = how or chunking(dtype, q.shape[2], WIDE if INTERPRETED else shared_memory(v.device))
        _launch_chunks(q, k, v, decay, beta, out, memory, where, dtype, short, how)
    return out


def _launch_chunks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor | None,
                   out: torch.Tensor, memory: PartMemory, where: StateStep, dtype: torch.dtype, short: int,
                   how: Chunking) -> None:
    """Rows of more than `short` tokens."""
    step, (n, heads, width), size, c = where.step, v.shape, q.shape[2], how.tokens
    rows, device = len(step.slots), v.device
    chunks = n // c + min(rows, n // (short + 1))  # every chunk but a row's last is full

    def ready(features: int, of: torch.dtype) -> torch.Tensor:
        return torch.empty(n, heads, features, dtype=of, device=device)

    q_ready, k_ready, within, totals = ready(size, dtype), ready(size, dtype), ready(c, dtype), ready(1, torch.float32)
    read, own = (q_ready, v) if beta is None else (ready(size, dtype), ready(width, torch.float32))
    common = dict(HEADS=heads, EACH=heads // q.shape[1], K=size, V=width, BK=max(16, triton.next_power_of_2(size)), C=c,
                  DELTA=beta is not None, PRECISION="tf32x3" if dtype is torch.float32 else "tf32",
                  UPCAST=INTERPRETED and dtype is not torch.float32, PDL=overlaps(device), **dependent(device))
    ready_kernel[chunks, heads](
        q, k, v, decay, decay if beta is None else beta, q_ready, k_ready, read, own, within, totals, step.cu_q,
        step.q_len, v.stride(0), rows, short, BV=max(16, triton.next_power_of_2(width)), LEVELS=c.bit_length() - 1,
        ROWS=max(16, triton.next_power_of_2(rows)), num_warps=how.warps, **common)
    values = max(16, min(how.values, triton.next_power_of_2(width)))
    chunks_kernel[rows, heads, triton.cdiv(width, values)](
        k, q_ready, k_ready, read, own, within, totals, out, memory.slots, memory.pages, where.pages, step.slots,
        step.cu_q, step.q_len, step.n_out, step.base, own.stride(0), short, CELLS=where.cells, BV=values,
        num_warps=how.warps_on, num_stages=how.stages, **common)
