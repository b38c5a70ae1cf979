"""The Triton kernels behind `recurrent.py`. Imported only where they are going to run.

A row's state is read and written by the programs of that row alone, each its own part of it, so that a cell may be
written in the step that reads it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stretto.ops.launch import dependent, overlaps
from stretto.ops.state_step import PartMemory, StateStep
from stretto.ops.triton_launch import begin

CHANNELS = 256  # of one program of the convolution
TOKENS = 8  # of one program of it, in steps of more than FEW
FEW = 64
STATE_CHANNELS = 64  # of one program that keeps the convolution's states


@triton.jit
def conv_kernel(x, weight, bias, out, memory, slots, rows, cu_q, base, x_stride, n_rows, n_tokens, channels,
                CELLS: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
                BIAS: tl.constexpr, PDL: tl.constexpr):
    """One program for some channels of some tokens; inputs before a row's first token are in its state."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin(PDL)
    row = tl.load(rows + token, mask=token < n_tokens, other=0)
    offset = (token - tl.load(cu_q + row))[:, None]
    ok = (token < tl.load(cu_q + n_rows))[:, None] & (c < channels)[None, :]
    cell = (tl.load(slots + row) * CELLS + tl.load(base + row) % CELLS)[:, None]
    state = memory + (cell * channels + c[None, :]) * (WIDTH - 1) + offset
    total = tl.zeros([TOKENS, BLOCK], dtype=tl.float32)
    for i in tl.static_range(WIDTH):
        back = WIDTH - 1 - i
        new = tl.load(x + (token - back).to(tl.int64)[:, None] * x_stride + c[None, :], mask=ok & (offset >= back),
                      other=0.0)
        old = tl.load(state + i, mask=ok & (offset < back), other=0.0)
        factor = tl.load(weight + c * WIDTH + i, mask=c < channels, other=0.0).to(tl.float32)
        total += (new.to(tl.float32) + old) * factor[None, :]
    if BIAS:
        total += tl.load(bias + c, mask=c < channels, other=0.0).to(tl.float32)[None, :]
    made = total / (1.0 + tl.exp(-total))
    tl.store(out + token.to(tl.int64)[:, None] * channels + c[None, :], made,
             mask=(token < n_tokens)[:, None] & (c < channels)[None, :])


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


def launch_conv(x: torch.Tensor, weight: torch.Tensor, memory: PartMemory, where: StateStep,
                bias: torch.Tensor | None = None) -> torch.Tensor:
    """As `recurrent.causal_conv_reference`, in two launches."""
    step, (n, channels), width = where.step, x.shape, weight.shape[1]
    assert x.stride(1) == 1 and weight.is_contiguous() and memory.slots.is_contiguous()
    out = torch.empty(n, channels, dtype=torch.float32, device=x.device)
    options = dict(CELLS=where.cells, WIDTH=width, PDL=overlaps(x.device), **dependent(x.device))
    tokens = 1 if n <= FEW else TOKENS
    conv_kernel[triton.cdiv(n, tokens), triton.cdiv(channels, CHANNELS)](
        x, weight, weight if bias is None else bias, out, memory.slots, step.slots, step.rows, step.cu_q, step.base,
        x.stride(0), len(step.slots), n, channels, TOKENS=tokens, BLOCK=CHANNELS, BIAS=bias is not None, num_warps=4,
        **options)
    conv_state_kernel[len(step.slots), triton.cdiv(channels, STATE_CHANNELS)](
        x, memory.slots, memory.pages, where.pages, step.slots, step.cu_q, step.q_len, step.n_out, step.base,
        x.stride(0), channels, PAGE=step.page_size, BLOCK=STATE_CHANNELS, COLUMNS=triton.next_power_of_2(width - 1),
        num_warps=4, **options)
    return out
