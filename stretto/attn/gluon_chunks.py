"""The chunk items of the ragged attention on Hopper (sm_90): copies by the copy engine, products by warp groups.

One program of several roles a multiprocessor takes items of the same list as `triton_kernels.attend_kernel`, and makes
the same. In order of time, for one tile of 128 query rows (32 tokens of 4 heads, say):

    copies        |K0 V0 K1 V1|K2 V2 ...                 page by page into rings of blocks; a warp each
    rows 0..63        |QK0|softmax 0|QK1, PV0|softmax 1|QK2, PV1| ...
    rows 64..127        |QK0|softmax 0|QK1, PV0|softmax 1| ...        the tensor cores serve one while the other sums

The product of the next block's logits and that of the last block's values are in flight while a group computes its
softmax: FlashAttention-3 (Shah et al. 2024), section 3. Items are shared out in turns that reverse, so that the
longest of one turn meets the shortest of the next:

    program      0   1   2   3  |  3   2   1   0  |  0 ...
    item         0   1   2   3     4   5   6   7     8 ...

Cells outside [low, high) of an item may be copied where they share a page with cells inside, or stand for pages that
the row does not have; their logits are masked, and their values are set to 0 where they lie beyond the row's last cell.

Written in Gluon, which has no interpreter: `triton_kernels` is its reference. Import it only on a Hopper GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from stretto.attn.api import LayerSpec

GROUP_ROWS = gl.constexpr(64)  # query rows of one warp group
LOWEST = gl.constexpr(-1.0e30)
LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _turn(turn, programs):
    """The item that this program takes in its turn."""
    program = gl.program_id(0)
    return turn * programs + gl.where(turn % 2 == 1, programs - 1 - program, program)


# ------------------------------------------------------------------------------------------------------------ copies
@gluon.jit
def _pages(table, start, first, last, PAGE: gl.constexpr, BOX: gl.constexpr, KEYS: gl.constexpr):
    """First rows, in the caches, of the pieces of BOX cells of a block."""
    rows = ()
    for i in gl.static_range(0, KEYS, BOX):
        cell = start + i
        page = gl.load(table + gl.minimum(gl.maximum(cell // PAGE, first), last))
        rows = rows + (page * PAGE + cell % PAGE,)  # type: ignore[assignment]  # noqa: RUF005 (Gluon: no unpacking)
    return rows


@gluon.jit
def _copies(desc, ring, empty, ready, items, n, programs, tables, table_stride, PAGE: gl.constexpr, BOX: gl.constexpr,
            HEADS_KV: gl.constexpr, D: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, WORDS: gl.constexpr):
    """The copying role, once for keys and once for values: blocks of all items of this program, one after another, each
    into its place of the ring when both groups have left that."""
    turn = 0
    block = 0
    item = _turn(0, programs)
    while item < n:
        record = items + (item // HEADS_KV) * WORDS
        low = gl.load(record + 3)
        high = gl.load(record + 4)
        table = tables + gl.load(record + 5).to(gl.int64) * table_stride
        column = (item % HEADS_KV) * D
        first = low // PAGE
        last = (high - 1) // PAGE
        begin = low // KEYS * KEYS
        rows = _pages(table, begin, first, last, PAGE, BOX, KEYS)
        for start in range(begin, high, KEYS):
            stage = block % STAGES
            mbarrier.wait(empty.index(stage), (block // STAGES & 1) ^ 1)
            mbarrier.expect(ready.index(stage), KEYS * D * 2)
            for i in gl.static_range(KEYS // BOX):
                tma.async_copy_global_to_shared(desc, [rows[i], column], ready.index(stage),
                                                ring.index(stage).slice(i * BOX, BOX))
            rows = _pages(table, start + KEYS, first, last, PAGE, BOX, KEYS)
            block += 1
        turn += 1
        item = _turn(turn, programs)


# ----------------------------------------------------------------------------------------------------------- products
@gluon.jit
def _softmax(s, m, l, start, pos, in_scale, out_scale, MASKED: gl.constexpr, WINDOW: gl.constexpr,
             SOFTCAP: gl.constexpr, KEYS: gl.constexpr):
    """(weights, factor of what was summed before, maximum, sum) after the logits s of the block at `start`."""
    layout: gl.constexpr = s.type.layout
    if SOFTCAP:
        s = 2.0 / (1.0 + gl.exp2(s * in_scale)) - 1.0  # tanh
    if MASKED:
        cell = start + gl.arange(0, KEYS, layout=gl.SliceLayout(0, layout))
        seen = cell[None, :] <= pos[:, None]
        if WINDOW > 0:
            seen = seen & (cell[None, :] > pos[:, None] - WINDOW)
        s = gl.where(seen, s, -float("inf"))
    m_new = gl.maximum(m, gl.max(s, 1) * out_scale)
    p = gl.exp2(s * out_scale - m_new[:, None])
    alpha = gl.exp2(m - m_new)
    return p, alpha, m_new, l * alpha + gl.sum(p, 1)


@gluon.jit
def _clear_outside(v, start, low, kv_len, KEYS: gl.constexpr, D: gl.constexpr):
    """Zeros for the values of cells before the item's first or beyond the row's last one: no weight of 0 could remove a
    NaN there. Both groups write the same."""
    PIECE: gl.constexpr = 16
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    for i in gl.static_range(0, KEYS, PIECE):
        if (start + i < low) | (start + i + PIECE > kv_len):
            piece = v.slice(i, PIECE)
            cell = start + i + gl.arange(0, PIECE, layout=gl.SliceLayout(1, layout))
            values = piece.load(layout)
            kept = (cell >= low) & (cell < kv_len)
            piece.store(gl.where(kept[:, None], values, gl.zeros_like(values)))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _masked_blocks(q, acc, m, l, block, begin, end, low, kv_len, pos, k_ring, v_ring, k_empty, k_ready, v_empty,
                   v_ready, in_scale, out_scale, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, D: gl.constexpr,
                   KEYS: gl.constexpr, STAGES: gl.constexpr, S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr):
    """Adds the blocks [begin, end), with masks, one product at a time."""
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    for start in range(begin, end, KEYS):
        stage = block % STAGES
        phase = block // STAGES & 1
        mbarrier.wait(k_ready.index(stage), phase)
        s = gl.zeros([GROUP_ROWS, KEYS], gl.float32, S_LAYOUT)
        s = warpgroup_mma(q, k_ring.index(stage).permute((1, 0)), s, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        mbarrier.arrive(k_empty.index(stage), count=1)
        p, alpha, m, l = _softmax(s, m, l, start, pos, in_scale, out_scale, True, WINDOW, SOFTCAP, KEYS)
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None]
        mbarrier.wait(v_ready.index(stage), phase)
        v = v_ring.index(stage)
        if (start < low) | (start + KEYS > kv_len):
            _clear_outside(v, start, low, kv_len, KEYS, D)
        acc = warpgroup_mma(gl.convert_layout(p.to(q.dtype), P_LAYOUT), v, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(v_empty.index(stage), count=1)
        block += 1
    return acc, m, l, block


@gluon.jit
def _clear_blocks(q, acc, m, l, block, begin, end, pos, k_ring, v_ring, k_empty, k_ready, v_empty, v_ready, in_scale,
                  out_scale, SOFTCAP: gl.constexpr, D: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
                  S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr):
    """Adds the blocks [begin, end), at least one, which every query sees as a whole."""
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    stage = block % STAGES
    phase = block // STAGES & 1
    mbarrier.wait(k_ready.index(stage), phase)
    s = gl.zeros([GROUP_ROWS, KEYS], gl.float32, S_LAYOUT)
    s = warpgroup_mma(q, k_ring.index(stage).permute((1, 0)), s, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=(s,))
    mbarrier.arrive(k_empty.index(stage), count=1)
    p, alpha, m, l = _softmax(s, m, l, begin, pos, in_scale, out_scale, False, 0, SOFTCAP, KEYS)
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None]
    weights = gl.convert_layout(p.to(q.dtype), P_LAYOUT)
    next_stage = (block + 1) % STAGES
    next_phase = (block + 1) // STAGES & 1
    mbarrier.wait(k_ready.index(next_stage), next_phase, pred=begin + KEYS < end)
    for start in range(begin + KEYS, end, KEYS):
        s = gl.zeros([GROUP_ROWS, KEYS], gl.float32, S_LAYOUT)
        s = warpgroup_mma(q, k_ring.index(next_stage).permute((1, 0)), s, use_acc=False, is_async=True)
        mbarrier.wait(v_ready.index(stage), phase)
        acc = warpgroup_mma(weights, v_ring.index(stage), acc, is_async=True)
        s = warpgroup_mma_wait(1, deps=(s,))
        mbarrier.arrive(k_empty.index(next_stage), count=1)
        p, alpha, m, l = _softmax(s, m, l, start, pos, in_scale, out_scale, False, 0, SOFTCAP, KEYS)
        last = stage
        block += 1
        stage = next_stage
        phase = next_phase
        next_stage = (block + 1) % STAGES
        next_phase = (block + 1) // STAGES & 1
        # Here, so that the softmax comes before the wait for the values' product: a branch keeps them in this order.
        mbarrier.wait(k_ready.index(next_stage), next_phase, pred=start + KEYS < end)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(v_empty.index(last), count=1)
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None]
        weights = gl.convert_layout(p.to(q.dtype), P_LAYOUT)
    mbarrier.wait(v_ready.index(stage), phase)
    acc = warpgroup_mma(weights, v_ring.index(stage), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(v_empty.index(stage), count=1)
    return acc, m, l, block + 1


@gluon.jit
def _join(partial_out, partial_lse, out, sinks, token, tokens, first, splits, stride, head, SINKS: gl.constexpr,
          G: gl.constexpr, HEADS_KV: gl.constexpr, D: gl.constexpr):
    """As `triton_kernels._join`."""
    HEADS: gl.constexpr = HEADS_KV * G
    ROWS: gl.constexpr = 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    d = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    for start in range(0, tokens * G, ROWS):
        i = start + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
        ok = i < tokens * G
        q_head = head * G + i % G
        m = gl.full([ROWS], LOWEST, gl.float32, gl.SliceLayout(1, layout))
        l = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, layout))
        if SINKS:
            m = gl.load(sinks + q_head, mask=ok, other=0.0).to(gl.float32) * LOG2E
            l += 1.0
        acc = gl.zeros([ROWS, D], gl.float32, layout)
        for s in range(0, splits):
            at = (first + s * stride + i // G) * HEADS + q_head
            lse = gl.load(partial_lse + at, mask=ok, other=LOWEST, cache_modifier=".cg")
            o = gl.load(partial_out + at.to(gl.int64)[:, None] * D + d[None, :], mask=ok[:, None], other=0.0,
                        cache_modifier=".cg")
            m_new = gl.maximum(m, lse)
            weight = gl.exp2(lse - m_new)
            alpha = gl.exp2(m - m_new)
            acc = acc * alpha[:, None] + o * weight[:, None]
            l = l * alpha + weight
            m = m_new
        at = ((token + i // G) * HEADS + q_head).to(gl.int64) * D
        gl.store(out + at[:, None] + d[None, :], (acc / l[:, None]).to(out.dtype.element_ty), mask=ok[:, None])


@gluon.jit
def _write(q, acc, m, l, i, row, d, token, tokens, out, sinks, head, SINKS: gl.constexpr, G: gl.constexpr,
           HEADS_KV: gl.constexpr, D: gl.constexpr, O_LAYOUT: gl.constexpr):
    """The results of a tile that has all of its cells, in whole lines: through the memory of its queries."""
    if SINKS:
        l += gl.exp2(gl.load(sinks + head * G + row % G).to(gl.float32) * LOG2E - m)
    scale = gl.convert_layout(1.0 / l, gl.SliceLayout(1, O_LAYOUT))
    gl.thread_barrier()
    q.store((acc * scale[:, None]).to(out.dtype.element_ty))
    gl.thread_barrier()
    at = ((token + i // G) * (HEADS_KV * G) + head * G + i % G).to(gl.int64) * D
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    gl.store(out + at[:, None] + d[None, :], q.load(layout), mask=(i // G < tokens)[:, None])


@gluon.jit
def _write_partial(acc, m, l, row, record, partial, token, tokens, out, partial_out, partial_lse, arrivals, sinks, head,
                   GROUP: gl.constexpr, SINKS: gl.constexpr, G: gl.constexpr, HEADS_KV: gl.constexpr, D: gl.constexpr,
                   O_LAYOUT: gl.constexpr):
    """The partial sums of a tile that has some of its cells; the group that comes last joins them, of both groups."""
    HEADS: gl.constexpr = HEADS_KV * G
    scale = gl.convert_layout(gl.where(l > 0, 1.0 / l, 0.0), gl.SliceLayout(1, O_LAYOUT))
    out_row = GROUP * GROUP_ROWS + gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, O_LAYOUT))
    out_at = ((partial + out_row // G) * HEADS + head * G + out_row % G).to(gl.int64) * D
    out_d = gl.arange(0, D, layout=gl.SliceLayout(0, O_LAYOUT))
    gl.store(partial_out + out_at[:, None] + out_d[None, :], acc * scale[:, None],
             mask=(out_row // G < tokens)[:, None])
    sum_at = (partial + row // G) * HEADS + head * G + row % G
    gl.store(partial_lse + sum_at, gl.where(l > 0, m + gl.log2(l), LOWEST), mask=row // G < tokens)
    splits = gl.load(record + 8)
    arrival = arrivals + gl.load(record + 7) * HEADS_KV + head
    gl.thread_barrier()  # every thread's partial sums stand before the arrival that announces them
    if gl.atomic_add(arrival, 1, sem="acq_rel") == 2 * splits - 1:
        gl.store(arrival, 0)  # for the next layer
        _join(partial_out, partial_lse, out, sinks, token, tokens, gl.load(record + 9), splits, gl.load(record + 10),
              head, SINKS, G, HEADS_KV, D)


@gluon.jit
def _queries(items, item, n, q_ptr, i, d, q_token_stride, q_head_stride, G: gl.constexpr, HEADS_KV: gl.constexpr,
             WORDS: gl.constexpr):
    """(record, first token, tokens, query rows i) of an item; zeros for rows that it does not have, or past the last
    item."""
    record = items + (gl.minimum(item, gl.maximum(n - 1, 0)) // HEADS_KV) * WORDS
    token = gl.load(record)
    tokens = gl.load(record + 1)
    at = (token + i // G).to(gl.int64) * q_token_stride + ((item % HEADS_KV) * G + i % G) * q_head_stride
    ok = (i // G < tokens) & (item < n)
    return record, token, tokens, gl.load(q_ptr + at[:, None] + d[None, :], mask=ok[:, None], other=0.0)


@gluon.jit
def _products(q_ptr, q_tiles, k_ring, v_ring, k_empty, k_ready, v_empty, v_ready, items, n, programs, out,
              partial_out, partial_lse, arrivals, sinks, q_token_stride, q_head_stride, in_scale, out_scale,
              GROUP: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, SINKS: gl.constexpr, G: gl.constexpr,
              HEADS_KV: gl.constexpr, D: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
              WORDS: gl.constexpr):
    """The multiplying role: the query rows [64 GROUP, 64 GROUP + 64) of the tiles of all items of this program."""
    ROWS: gl.constexpr = GROUP_ROWS
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    q = q_tiles.index(GROUP)
    i = GROUP * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LINES))
    row = GROUP * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S_LAYOUT))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, LINES))
    turn = 0
    block = 0
    item = _turn(0, programs)
    record, token, tokens, queries = _queries(items, item, n, q_ptr, i, d, q_token_stride, q_head_stride, G, HEADS_KV,
                                              WORDS)
    while item < n:
        first_pos = gl.load(record + 2)
        low = gl.load(record + 3)
        high = gl.load(record + 4)
        partial = gl.load(record + 6)
        kv_len = gl.load(record + 11)
        head = item % HEADS_KV
        gl.thread_barrier()
        q.store(queries)
        fence_async_shared()
        gl.thread_barrier()
        pos = first_pos + gl.minimum(row // G, tokens - 1)
        acc = gl.zeros([ROWS, D], gl.float32, O_LAYOUT)
        m = gl.full([ROWS], LOWEST, gl.float32, gl.SliceLayout(1, S_LAYOUT))
        l = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, S_LAYOUT))
        clear = low // KEYS * KEYS
        if WINDOW > 0:
            begin = clear
            clear = gl.cdiv(gl.maximum(first_pos + tokens - WINDOW, low), KEYS) * KEYS
            clear = gl.minimum(clear, gl.cdiv(high, KEYS) * KEYS)
            acc, m, l, block = _masked_blocks(q, acc, m, l, block, begin, gl.minimum(clear, high), low, kv_len, pos,
                                              k_ring, v_ring, k_empty, k_ready, v_empty, v_ready, in_scale, out_scale,
                                              WINDOW, SOFTCAP, D, KEYS, STAGES, S_LAYOUT, O_LAYOUT)
        causal = gl.maximum(gl.minimum(first_pos + 1, high) // KEYS * KEYS, clear)
        if causal > clear:
            acc, m, l, block = _clear_blocks(q, acc, m, l, block, clear, causal, pos, k_ring, v_ring, k_empty, k_ready,
                                             v_empty, v_ready, in_scale, out_scale, SOFTCAP, D, KEYS, STAGES, S_LAYOUT,
                                             O_LAYOUT)
        acc, m, l, block = _masked_blocks(q, acc, m, l, block, causal, high, low, kv_len, pos, k_ring, v_ring, k_empty,
                                          k_ready, v_empty, v_ready, in_scale, out_scale, WINDOW, SOFTCAP, D, KEYS,
                                          STAGES, S_LAYOUT, O_LAYOUT)
        turn += 1
        item = _turn(turn, programs)  # its queries arrive while this one's results leave
        next_record, next_token, next_tokens, queries = _queries(items, item, n, q_ptr, i, d, q_token_stride,
                                                                 q_head_stride, G, HEADS_KV, WORDS)
        if partial < 0:
            _write(q, acc, m, l, i, row, d, token, tokens, out, sinks, head, SINKS, G, HEADS_KV, D, O_LAYOUT)
        else:
            _write_partial(acc, m, l, row, record, partial, token, tokens, out, partial_out, partial_lse, arrivals,
                           sinks, head, GROUP, SINKS, G, HEADS_KV, D, O_LAYOUT)
        record = next_record
        token = next_token
        tokens = next_tokens


@gluon.jit(do_not_specialize=["table_stride"])
def attend_chunks_kernel(q, k_desc, v_desc, tables, items, counts, arrivals, out, partial_out, partial_lse, sinks,
                         q_token_stride, q_head_stride, table_stride, in_scale, out_scale, WINDOW: gl.constexpr,
                         SOFTCAP: gl.constexpr, SINKS: gl.constexpr, PAGE: gl.constexpr, G: gl.constexpr,
                         HEADS_KV: gl.constexpr, D: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
                         WORDS: gl.constexpr, PDL: gl.constexpr):
    """A persistent grid of one program of 12 warps on each multiprocessor; see above. The launch of the rows of few
    tokens comes after it and relies on its wait."""
    BOX: gl.constexpr = k_desc.block_type.shape[0]
    q_tiles = gl.allocate_shared_memory(k_desc.dtype, [2, 64, D], k_desc.layout)
    k_ring = gl.allocate_shared_memory(k_desc.dtype, [STAGES, KEYS, D], k_desc.layout)
    v_ring = gl.allocate_shared_memory(k_desc.dtype, [STAGES, KEYS, D], k_desc.layout)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
        mbarrier.init(v_ready.index(i), count=1)
    if PDL:
        gl.inline_asm_elementwise("griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
        gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=gl.int32,
                                  is_pure=False, pack=1)
    programs = gl.load(counts + 4)  # the others leave their multiprocessors to the rows of few tokens
    n = gl.where(gl.program_id(0) < programs, gl.load(counts) * HEADS_KV, 0)
    gl.warp_specialize([
        (_products, (q, q_tiles, k_ring, v_ring, k_empty, k_ready, v_empty, v_ready, items, n, programs, out,
                     partial_out, partial_lse, arrivals, sinks, q_token_stride, q_head_stride, in_scale, out_scale, 0,
                     WINDOW, SOFTCAP, SINKS, G, HEADS_KV, D, KEYS, STAGES, WORDS)),
        (_products, (q, q_tiles, k_ring, v_ring, k_empty, k_ready, v_empty, v_ready, items, n, programs, out,
                     partial_out, partial_lse, arrivals, sinks, q_token_stride, q_head_stride, in_scale, out_scale, 1,
                     WINDOW, SOFTCAP, SINKS, G, HEADS_KV, D, KEYS, STAGES, WORDS)),
        (_copies, (k_desc, k_ring, k_empty, k_ready, items, n, programs, tables, table_stride, PAGE, BOX, HEADS_KV, D,
                   KEYS, STAGES, WORDS)),
        (_copies, (v_desc, v_ring, v_empty, v_ready, items, n, programs, tables, table_stride, PAGE, BOX, HEADS_KV, D,
                   KEYS, STAGES, WORDS)),
    ], [4, 1, 1], [232, 40, 40])


# ------------------------------------------------------------------------------------------------------------- launch
@dataclass(frozen=True)
class Ring:
    """Blocks of `keys` cells, `stages` of keys and of values in shared memory."""

    keys: int
    stages: int


ROWS = 2 * GROUP_ROWS.value  # query rows of a tile
RINGS = {64: Ring(128, 3), 128: Ring(128, 3)}  # by head size
LAYOUT = gl.NVMMASharedLayout(128, 16, 2)  # of 16-bit numbers, rows of 128 bytes swizzled
REGISTERS = 168  # of a thread at the start; the groups that multiply take 232 of what the copying one gives


def serves(layer: LayerSpec, tile_rows: int, cache: torch.Tensor) -> bool:
    """Whether `launch_chunks` can run the chunk items of tiles of so many rows: 16-bit keys and values of a usual head
    size, whose pages (of 8 cells or more) lie one after another."""
    page, dim = cache.shape[1], cache.shape[3]
    dense = cache.stride(2) == dim and cache.stride(0) == page * cache.stride(1) and cache.stride(1) % 8 == 0
    return (tile_rows == ROWS and dim in RINGS and dim == layer.head_dim and cache.element_size() == 2 and dense
            and page >= 8 and page & (page - 1) == 0)


def _as_rows(cache: torch.Tensor, box: int) -> TensorDescriptor:
    """The cells of a cache, [cells, Hkv * D], to be copied `box` cells of one head at a time."""
    pages, page, heads, dim = cache.shape
    return TensorDescriptor(cache, [pages * page, heads * dim], [cache.stride(1), 1], [box, dim], LAYOUT)


def launch_chunks(programs: int, layer: LayerSpec, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
                  table: torch.Tensor, items: torch.Tensor, counts: torch.Tensor, arrivals: torch.Tensor,
                  out: torch.Tensor, partial_out: torch.Tensor, partial_lse: torch.Tensor, sinks: torch.Tensor | None,
                  scales: tuple[float, float], words: int) -> None:
    """Runs the chunk items of a plan, which `serves` has allowed. `scales`: of logits, before and after the cap."""
    ring, page = RINGS[layer.head_dim], k_cache.shape[1]
    box = min(page, ring.keys)
    attend_chunks_kernel[(programs,)](
        q, _as_rows(k_cache, box), _as_rows(v_cache, box), table, items, counts, arrivals, out, partial_out,
        partial_lse, out if sinks is None else sinks, q.stride(0), q.stride(1), table.stride(0), *scales,
        WINDOW=layer.window or 0, SOFTCAP=bool(layer.softcap), SINKS=sinks is not None, PAGE=page,
        G=layer.n_heads // layer.n_kv_heads, HEADS_KV=layer.n_kv_heads, D=layer.head_dim, KEYS=ring.keys,
        STAGES=ring.stages, WORDS=words, PDL=True, num_warps=4, maxnreg=REGISTERS, launch_pdl=True)
