"""The Triton kernels behind `recurrent.py`. Imported only where they are going to run.

A row's state is read and written by the programs of that row alone, each its own part of it, so that a cell may be
written in the step that reads it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from stretto.ops.launch import dependent, overlaps
from stretto.ops.triton_launch import begin

if TYPE_CHECKING:
    from stretto.ops.recurrent import PartMemory, StateStep

CHANNELS = 256  # of one program of the convolution
VALUES = 32  # features of a value of one program of the delta rule
STATE_CHANNELS = 64  # of one program that keeps the convolution's states


@triton.jit
def conv_kernel(x, weight, out, memory, slots, rows, cu_q, base, x_stride, n_rows, channels, CELLS: tl.constexpr,
                WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One program for some channels of a token; inputs before the row's first token are in its state."""
    token = tl.program_id(0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = c < channels
    begin(PDL)
    row = tl.load(rows + token)
    offset = token - tl.load(cu_q + row)
    real = token < tl.load(cu_q + n_rows)
    cell = tl.load(slots + row) * CELLS + tl.load(base + row) % CELLS
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for i in tl.static_range(WIDTH):
        back = WIDTH - 1 - i
        new = tl.load(x + (token - back).to(tl.int64) * x_stride + c, mask=ok & (offset >= back), other=0.0)
        old = tl.load(memory + (cell * channels + c) * (WIDTH - 1) + offset + i, mask=ok & (offset < back), other=0.0)
        total += (new.to(tl.float32) + old) * tl.load(weight + c * WIDTH + i, mask=ok, other=0.0).to(tl.float32)
    made = total / (1.0 + tl.exp(-total))
    tl.store(out + token.to(tl.int64) * channels + c, tl.where(real, made, 0.0), mask=ok)


@triton.jit
def _inputs(x, old, start, t, c, j, ok, x_stride, WIDTH: tl.constexpr):
    """The last WIDTH - 1 inputs behind token t of a row, [C, J]; `old`: where each channel's state begins."""
    back = WIDTH - 2 - j
    new = tl.load(x + (start + t - back).to(tl.int64)[None, :] * x_stride + c[:, None], mask=ok & (t >= back)[None, :],
                  other=0.0)
    before = tl.load(old[:, None] + (j + t + 1)[None, :], mask=ok & (t < back)[None, :], other=0.0)
    return new.to(tl.float32) + before


@triton.jit
def conv_state_kernel(x, memory, page_states, pages, slots, cu_q, q_len, n_out, base, x_stride, channels,
                      CELLS: tl.constexpr, PAGE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
                      COLUMNS: tl.constexpr, PDL: tl.constexpr):
    """One program for some channels of a row. First the pages, which read the row's old state, then its cells: of
    several none is the one that the row began with, of one alone it may be."""
    row = tl.program_id(0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    j = tl.arange(0, COLUMNS)
    ok = (c < channels)[:, None] & (j < WIDTH - 1)[None, :]
    at = c[:, None] * (WIDTH - 1) + j[None, :]
    begin(PDL)
    n, first, start = tl.load(q_len + row), tl.load(base + row), tl.load(cu_q + row)
    size = channels * (WIDTH - 1)
    cells = memory + tl.load(slots + row) * CELLS * size
    old = cells + (first % CELLS) * size + c * (WIDTH - 1)
    for t in range(PAGE - 1 - first % PAGE, n, PAGE):
        page = tl.load(pages + start + t)
        state = _inputs(x, old, start, t, c, j, ok, x_stride, WIDTH)
        tl.store(page_states + page * size + at, state, mask=ok & (page > 0))
    for t in range(n - tl.minimum(tl.maximum(tl.load(n_out + row), 1), n), n):
        state = _inputs(x, old, start, t, c, j, ok, x_stride, WIDTH)
        tl.debug_barrier()
        tl.store(cells + (first + t + 1) % CELLS * size + at, state, mask=ok)


def launch_conv(x: torch.Tensor, weight: torch.Tensor, memory: PartMemory, where: StateStep) -> torch.Tensor:
    """As `recurrent.causal_conv_reference`, in two launches."""
    step, (n, channels), width = where.step, x.shape, weight.shape[1]
    assert x.stride(1) == 1 and weight.is_contiguous() and memory.slots.is_contiguous()
    out = torch.empty(n, channels, dtype=torch.float32, device=x.device)
    options = dict(CELLS=where.cells, WIDTH=width, PDL=overlaps(x.device), **dependent(x.device))
    conv_kernel[n, triton.cdiv(channels, CHANNELS)](
        x, weight, out, memory.slots, step.slots, step.rows, step.cu_q, step.base, x.stride(0), len(step.slots),
        channels, BLOCK=CHANNELS, num_warps=4, **options)
    conv_state_kernel[len(step.slots), triton.cdiv(channels, STATE_CHANNELS)](
        x, memory.slots, memory.pages, where.pages, step.slots, step.cu_q, step.q_len, step.n_out, step.base,
        x.stride(0), channels, PAGE=step.page_size, BLOCK=STATE_CHANNELS, COLUMNS=triton.next_power_of_2(width - 1),
        num_warps=4, **options)
    return out


@triton.jit
def delta_rule_kernel(q, k, v, decay, beta, out, memory, page_states, pages, slots, cu_q, q_len, n_out, base, v_stride,
                      CELLS: tl.constexpr, HEADS: tl.constexpr, EACH: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
                      BK: tl.constexpr, BV: tl.constexpr, PDL: tl.constexpr):
    """One program for BV features of one value head of a row: its part of the state stays in registers."""
    row, head = tl.program_id(0), tl.program_id(1)
    ks, vs = tl.arange(0, BK), tl.program_id(2) * BV + tl.arange(0, BV)
    ok_k, ok_v = ks < K, vs < V
    ok = ok_k[:, None] & ok_v[None, :]
    begin(PDL)
    n, first, start = tl.load(q_len + row), tl.load(base + row), tl.load(cu_q + row).to(tl.int64)
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
        change = (v_t - tl.sum(state * k_t[:, None], 0)) * tl.load(beta + token * HEADS + head)
        state += k_t[:, None] * change[None, :]
        tl.store(out + (token * HEADS + head) * V + vs, tl.sum(state * q_t[:, None], 0), mask=ok_v)
        if t >= kept:
            tl.store(cells + (first + t + 1) % CELLS * HEADS * K * V, state, mask=ok)
        page = tl.load(pages + token)
        if page > 0:
            tl.store(page_states + page * HEADS * K * V + at, state, mask=ok)


def launch_delta_rule(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor,
                      memory: PartMemory, where: StateStep) -> torch.Tensor:
    """As `recurrent.gated_delta_rule_reference`, in one launch. Zeros for padding."""
    step, (n, heads, width) = where.step, v.shape
    assert v.stride()[1:] == (width, 1) and all(x.is_contiguous() for x in (q, k, decay, beta, memory.slots))
    out = torch.zeros(n, heads, width, dtype=torch.float32, device=v.device)
    values = min(VALUES, triton.next_power_of_2(width))
    delta_rule_kernel[len(step.slots), heads, triton.cdiv(width, values)](
        q, k, v, decay, beta, out, memory.slots, memory.pages, where.pages, step.slots, step.cu_q, step.q_len,
        step.n_out, step.base, v.stride(0), CELLS=where.cells, HEADS=heads, EACH=heads // q.shape[1], K=q.shape[2],
        V=width, BK=triton.next_power_of_2(q.shape[2]), BV=values, PDL=overlaps(v.device), num_warps=4,
        **dependent(v.device))
    return out
