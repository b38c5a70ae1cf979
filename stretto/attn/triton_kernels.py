"""Triton kernels of the ragged paged attention: plan and attend.

All lengths are read on the device. `plan_kernel` cuts the rows of a step into work items, once a step and KV group;
`attend_kernel` runs them, once a layer. An item is (tile of query tokens, split of the KV cells), for each KV head.

    row with 3 splits       cell 0       split        2*split    kv_len
    (one tile)                   |--item 0--|--item 1--|--item 2-|           partial sums; who ends last joins them

    chunk row, 2 tiles           |==================\\ tile 0                 causal edge; written directly
                                 |=====================\\ tile 1

Splits lie at absolute multiples of the split length, so the order in which a token's keys are summed depends on the
token's own row alone. Online softmax: Milakov and Gimelshein 2018, tiled as in FlashAttention-2 (Dao 2023); split KV
as in Flash-Decoding (2023); all query heads of one KV head share a tile (GQA packing).

This module imports Triton at the top: import it only where a kernel is going to run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from stretto.ops.triton_fp8 import scales_at

# One aligned 64-byte record: 0 first token, 1 tokens, 2 position of the first token, 3 first cell, 4 end cell, 5 slot,
# 6 where the partial sums go (-1: written directly), 7 number of the tile, 8 splits of the tile, 9 partial sums of the
# tile's first split, 10 distance between the partial sums of two splits, 11 end of the row's cells.
ITEM_WORDS = 16
LOWEST = tl.constexpr(-1.0e30)  # below every logit; finite, so that differences of it are no NaN
LOG2E = tl.constexpr(1.4426950408889634)
# Of an H200, by which chunks gained most: a multiprocessor reads at most so many times its share of what all of them
# read; and pairs of one query head and a cell that it multiplies while it so reads one cell of a KV head.
READS_ALONE = tl.constexpr(2.0)
PAIRS_A_CELL = tl.constexpr(67.0)


# ------------------------------------------------------------------------------------------------------------- plan
@triton.jit
def _splits(q, kv, low, shift, G: tl.constexpr, HEADS_KV: tl.constexpr, FEW: tl.constexpr, CHUNK: tl.constexpr,
            SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr, CHUNK_SPLIT: tl.constexpr, CHUNK_ITEMS: tl.constexpr):
    """For rows of q tokens that read the cells [low, kv): (kind, tiles, split length, first split, splits).

    A function of the row alone, but for `shift`, which is 0 unless the workspace is too small."""
    kind = tl.where(q * G <= FEW, 1, 0)
    tiles = tl.where(kind == 0, tl.cdiv(q, CHUNK // G), tl.minimum(q, 1))
    extent = kv - low
    few = tl.zeros_like(q) + SPLIT
    for _ in tl.static_range(12):
        few = tl.where(extent > few * MAX_SPLITS, few * 2, few)
    wanted = tl.maximum(tl.cdiv(CHUNK_ITEMS, tl.maximum(tiles, 1) * HEADS_KV), 1)
    chunk = tl.maximum(tl.cdiv(tl.cdiv(extent, wanted), CHUNK_SPLIT), 1) * CHUNK_SPLIT
    split = tl.where(kind == 1, few, tl.where(wanted == 1, 1 << 28, chunk))
    split = tl.minimum(split.to(tl.int64) << shift, 1 << 28).to(tl.int32)
    first = low // split
    #   few tokens   |--split--|--split--|-|      a short rest joins the last split: an item of its own would cost more
    rest = tl.where(kind == 1, split // 4, 0)
    return kind, tiles, split, first, tl.where(q > 0, tl.maximum(tl.cdiv(kv - rest, split) - first, 1), 0)


@triton.jit
def _pick(values, mine):
    return tl.sum(tl.where(mine, values, 0), 0)


@triton.jit
def _chunk_programs(q, kv, low, kind, items, programs, WINDOW: tl.constexpr, G: tl.constexpr):
    """How many of the device's multiprocessors the chunks get where they take whole ones (`gluon_chunks`): all, or so
    many that they end when the rows of few tokens end on the others, if that is sooner.

        all     |== chunks ==|=== few ===|            few tokens read nearly as fast on some multiprocessors as on all
        apart   |===== chunks =====|
                |======= few ======|                  each of the former has the same number of items, if it can

    Work of the one kind is pairs of a query and a cell, of the other kind cells; times are in pairs. Measured: with
    64 rows of 1,024 cells a chunk of 2,048 tokens gains by it; one of 448, which has fewer items, loses."""
    seen = kv - q // 2
    if WINDOW > 0:
        seen = tl.minimum(seen, WINDOW)
    pairs = tl.sum(tl.where(kind == 0, q.to(tl.float32) * seen.to(tl.float32), 0.0), 0)
    cells = tl.sum(tl.where((kind == 1) & (q > 0), kv - low, 0).to(tl.float32), 0)
    reading = cells * PAIRS_A_CELL / G
    wanted = tl.maximum(pairs / tl.maximum(pairs + reading, 1.0), 0.25) * programs
    turns = tl.maximum((items / wanted + 0.5).to(tl.int32), 1)
    chosen = tl.minimum(tl.cdiv(items, turns), programs)
    item = pairs / tl.maximum(items, 1)
    least = READS_ALONE * reading / programs
    together = tl.cdiv(items, programs) * item + least
    apart = tl.maximum(tl.cdiv(items, tl.maximum(chosen, 1)) * item, reading / tl.maximum(programs - chosen, 1))
    return tl.where((items >= 2 * programs) & (tl.maximum(apart, least) < together), chosen, programs)


@triton.jit(do_not_specialize=["n_rows", "capacity", "offset_few", "programs"])
def plan_kernel(q_len, kv_len, cu_q, slots, items, counts, arrivals, n_rows, capacity, offset_few, programs,
                ROWS: tl.constexpr, WINDOW: tl.constexpr, G: tl.constexpr, HEADS_KV: tl.constexpr, FEW: tl.constexpr,
                CHUNK: tl.constexpr, SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr, CHUNK_SPLIT: tl.constexpr,
                CHUNK_ITEMS: tl.constexpr, WORDS: tl.constexpr):
    """One program a row: writes the row's work items into the list of its kind, and where its partial sums go.

    counts: [5] int32, items of each kind, claims (set to 0), and how many of `programs` chunks get. Where the partial
    sums of the step would not fit `capacity` token-splits, every split of the step doubles until they do."""
    row = tl.program_id(0)
    r = tl.arange(0, ROWS)
    q = tl.load(q_len + r, mask=r < n_rows, other=0)
    kv = tl.load(kv_len + r, mask=r < n_rows, other=0)
    low = tl.maximum(kv - q - WINDOW + 1, 0) if WINDOW > 0 else tl.zeros_like(kv)
    shift = 0
    kind, tiles, split, first, n = _splits(q, kv, low, shift, G, HEADS_KV, FEW, CHUNK, SPLIT, MAX_SPLITS, CHUNK_SPLIT,
                                           CHUNK_ITEMS)
    while tl.sum(tl.where(n > 1, n * q, 0), 0) > capacity:
        shift += 1
        kind, tiles, split, first, n = _splits(q, kv, low, shift, G, HEADS_KV, FEW, CHUNK, SPLIT, MAX_SPLITS,
                                               CHUNK_SPLIT, CHUNK_ITEMS)
    mine = r == row
    earlier = r < row
    my_kind = _pick(kind, mine)
    my_q = _pick(q, mine)
    same = kind == my_kind
    #   full splits of all rows of the kind, row after row | last splits of all rows: short items end the launch
    before = _pick(tiles * (n - 1), same & earlier)
    last = _pick(tiles * (n - 1), same) + _pick(tiles, same & earlier)
    partial = _pick(tl.where(n > 1, n * q, 0), earlier)
    if row == 0:
        for k in tl.static_range(2):
            tl.store(counts + k, _pick(tiles * n, kind == k))
            tl.store(counts + 2 + k, 0)
        chunks = _pick(tiles * n, kind == 0) * HEADS_KV
        tl.store(counts + 4, _chunk_programs(q, kv, low, kind, chunks, programs, WINDOW, G))
    _write_items(items, arrivals, offset_few * my_kind, before, last, _pick(tiles, mine), _pick(n, mine),
                 _pick(first, mine), _pick(split, mine), tl.where(my_kind == 0, CHUNK // G, my_q), my_q,
                 _pick(kv, mine), tl.load(cu_q + row), tl.load(slots + row), partial, WINDOW, HEADS_KV, WORDS)


@triton.jit
def _write_items(items, arrivals, offset, before, last, tiles, n, first, split, tile_tokens, q, kv, token, slot,
                 partial, WINDOW: tl.constexpr, HEADS_KV: tl.constexpr, WORDS: tl.constexpr):
    """The records of one row (words as listed at ITEM_WORDS), longest tile first. Items of the last split go to index
    `last` of the kind's list, the others to `before`. The arrival counters of the row's tiles are set to 0."""
    base = kv - q
    for start in tl.range(0, tiles * n, 64):
        j = start + tl.arange(0, 64)
        ok = j < tiles * n
        s = j // tiles
        rank = j % tiles
        at = (tiles - 1 - rank) * tile_tokens
        tokens = tl.minimum(tile_tokens, q - at)
        cell = (first + s) * split
        end = tl.where(s < n - 1, tl.minimum(cell + split, base + at + tokens), base + at + tokens)
        if WINDOW > 0:
            cell = tl.maximum(cell, base + at - WINDOW + 1)
        p = items + (offset + tl.where(s < n - 1, before + j, last + rank)) * WORDS
        tile = offset + last + rank
        tl.store(p, token + at, mask=ok)
        tl.store(p + 1, tokens, mask=ok)
        tl.store(p + 2, base + at, mask=ok)
        tl.store(p + 3, cell, mask=ok)
        tl.store(p + 4, end, mask=ok)
        tl.store(p + 5, tl.zeros_like(j) + slot, mask=ok)
        tl.store(p + 6, tl.where(n > 1, partial + s * q + at, -1), mask=ok)
        tl.store(p + 7, tile, mask=ok)
        tl.store(p + 8, tl.zeros_like(j) + n, mask=ok)
        tl.store(p + 9, partial + at, mask=ok)
        tl.store(p + 10, tl.zeros_like(j) + q, mask=ok)
        tl.store(p + 11, tl.zeros_like(j) + base + q, mask=ok)
        for head in tl.static_range(HEADS_KV):
            tl.store(arrivals + tile * HEADS_KV + head, tl.zeros_like(j), mask=ok & (s == 0))


# ----------------------------------------------------------------------------------------------------------- attend
@triton.jit
def _dot(a, b, acc, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """a @ b + acc in float32. Triton's interpreter multiplies bfloat16 as integers: there the operands are widened."""
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def _cells(start, low, high, KEYS: tl.constexpr):
    return tl.minimum(tl.maximum(start + tl.arange(0, KEYS), low), high - 1)


@triton.jit
def _blocks(q, acc, m, l, k_cache, v_cache, k_scales, v_scales, table, begin, end, low, high, pos, page_stride,
            cell_stride, in_scale, out_scale, MASKED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
            PAGE: tl.constexpr, HEADS_KV: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, KEYS: tl.constexpr,
            STAGES: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr, FP8: tl.constexpr):
    """Adds the key blocks [begin, end) to the running softmax of one tile.

    q [M, D]; acc [M, D], m and l [M]: weighted values, maximum and sum, of logits in base 2. Cells outside [low, high)
    are never read: the nearest cell inside stands for them, and the mask removes it. FP8: keys and values are e4m3,
    with a scale for each cell, which their products are multiplied by."""
    d = tl.arange(0, BLOCK_D)
    cell = _cells(begin, low, high, KEYS)
    page = tl.load(table + cell // PAGE)  # one block ahead, so that no load of keys waits for a load of page numbers
    for start in tl.range(begin, end, KEYS, num_stages=STAGES):
        t = start + tl.arange(0, KEYS)
        at = page.to(tl.int64) * page_stride + (cell % PAGE) * cell_stride
        if FP8:
            scale_at = (page.to(tl.int64) * PAGE + cell % PAGE) * HEADS_KV
        cell = _cells(start + KEYS, low, high, KEYS)
        page = tl.load(table + cell // PAGE)
        if BLOCK_D == D:
            k = tl.load(k_cache + at[:, None] + d[None, :])
        else:
            k = tl.load(k_cache + at[:, None] + d[None, :], mask=d[None, :] < D, other=0.0)
        s = _dot(q, tl.trans(k.to(q.dtype)), tl.zeros((q.shape[0], KEYS), tl.float32), PRECISION, UPCAST)
        if FP8:
            s = s * scales_at(k_scales + scale_at)[None, :]
        if SOFTCAP:
            s = 2.0 / (1.0 + tl.exp2(s * in_scale)) - 1.0  # tanh
        if MASKED:
            seen = t[None, :] <= pos[:, None]
            if WINDOW > 0:
                seen = seen & (t[None, :] > pos[:, None] - WINDOW)
            s = tl.where(seen, s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, 1) * out_scale)
        p = tl.exp2(s * out_scale - m_new[:, None])
        alpha = tl.exp2(m - m_new)
        l = l * alpha + tl.sum(p, 1)
        if BLOCK_D == D:
            v = tl.load(v_cache + at[:, None] + d[None, :])
        else:
            v = tl.load(v_cache + at[:, None] + d[None, :], mask=d[None, :] < D, other=0.0)
        if FP8:
            p = p * scales_at(v_scales + scale_at)[None, :]
        acc = _dot(p.to(q.dtype), v.to(q.dtype), acc * alpha[:, None], PRECISION, UPCAST)
        m = m_new
    return acc, m, l


@triton.jit
def _words(record):
    """What an item starts with: token, tokens, position of the first, first cell, end cell, slot, partial sums."""
    return (tl.load(record), tl.load(record + 1), tl.load(record + 2), tl.load(record + 3), tl.load(record + 4),
            tl.load(record + 5), tl.load(record + 6))


@triton.jit
def _item(record, token, tokens, first_pos, low, high, slot, partial, head, q_ptr, k_cache, v_cache, k_scales,
          v_scales, tables, out, partial_out, partial_lse, arrivals, sinks, q_token_stride, q_head_stride,
          page_stride, cell_stride, head_stride, table_stride, in_scale, out_scale, WINDOW: tl.constexpr,
          SOFTCAP: tl.constexpr, SINKS: tl.constexpr, PAGE: tl.constexpr, G: tl.constexpr, HEADS_KV: tl.constexpr,
          D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
          SKIP_MASK: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr, FP8: tl.constexpr):
    """One work item for one KV head. Query row i of the tile is token i // G, head i % G of the group."""
    HEADS: tl.constexpr = HEADS_KV * G
    table = tables + slot.to(tl.int64) * table_stride
    i = tl.arange(0, M)
    d = tl.arange(0, BLOCK_D)
    ok = i // G < tokens
    pos = first_pos + tl.minimum(i // G, tokens - 1)
    q_head = head * G + i % G
    q_at = (token + i // G).to(tl.int64) * q_token_stride + q_head * q_head_stride
    q = tl.load(q_ptr + q_at[:, None] + d[None, :], mask=ok[:, None] & (d[None, :] < D), other=0.0)
    acc = tl.zeros((M, BLOCK_D), tl.float32)
    m = tl.full((M,), LOWEST, tl.float32)
    l = tl.zeros((M,), tl.float32)
    k_head = k_cache + head * head_stride
    v_head = v_cache + head * head_stride
    ks_head = k_scales + head
    vs_head = v_scales + head
    begin = low // KEYS * KEYS
    #   begin       clear        causal      high         blocks in [clear, causal) need no mask: every query of the
    #     |--window--|--no mask-----|--causal--|          tile sees every key of them
    if SKIP_MASK:
        clear = begin
        if WINDOW > 0:
            clear = tl.cdiv(tl.maximum(first_pos + tokens - WINDOW, low), KEYS) * KEYS
            clear = tl.minimum(clear, tl.cdiv(high, KEYS) * KEYS)
            acc, m, l = _blocks(q, acc, m, l, k_head, v_head, ks_head, vs_head, table, begin, tl.minimum(clear, high),
                                low, high, pos, page_stride, cell_stride, in_scale, out_scale, True, WINDOW, SOFTCAP,
                                PAGE, HEADS_KV, D, BLOCK_D, KEYS, STAGES, PRECISION, UPCAST, FP8)
        causal = tl.maximum(tl.minimum(first_pos + 1, high) // KEYS * KEYS, clear)
        acc, m, l = _blocks(q, acc, m, l, k_head, v_head, ks_head, vs_head, table, clear, causal, low, high, pos,
                            page_stride, cell_stride, in_scale, out_scale, False, WINDOW, SOFTCAP, PAGE, HEADS_KV, D,
                            BLOCK_D, KEYS, STAGES, PRECISION, UPCAST, FP8)
        begin = causal
    acc, m, l = _blocks(q, acc, m, l, k_head, v_head, ks_head, vs_head, table, begin, high, low, high, pos, page_stride,
                        cell_stride, in_scale, out_scale, True, WINDOW, SOFTCAP, PAGE, HEADS_KV, D, BLOCK_D, KEYS,
                        STAGES, PRECISION, UPCAST, FP8)
    keep = ok[:, None] & (d[None, :] < D)
    if partial < 0:
        if SINKS:
            l += tl.exp2(tl.load(sinks + q_head).to(tl.float32) * LOG2E - m)
        at = ((token + i // G) * HEADS + q_head).to(tl.int64) * D
        tl.store(out + at[:, None] + d[None, :], (acc / l[:, None]).to(out.dtype.element_ty), mask=keep)
    else:
        sum_at = (partial + i // G) * HEADS + q_head
        scale = tl.where(l > 0, 1.0 / l, 0.0)
        tl.store(partial_out + sum_at.to(tl.int64)[:, None] * D + d[None, :], acc * scale[:, None], mask=keep)
        tl.store(partial_lse + sum_at, tl.where(l > 0, m + tl.log2(l), LOWEST), mask=ok)
        splits = tl.load(record + 8)
        arrival = arrivals + tl.load(record + 7) * HEADS_KV + head
        tl.debug_barrier()  # every thread's partial sums stand before the arrival that announces them
        if tl.atomic_add(arrival, 1, sem="acq_rel") == splits - 1:
            tl.store(arrival, 0)  # for the next layer
            _join(partial_out, partial_lse, out, sinks, token, tokens, tl.load(record + 9), splits,
                  tl.load(record + 10), head, SINKS, G, HEADS_KV, D, BLOCK_D)


@triton.jit
def _join(partial_out, partial_lse, out, sinks, token, tokens, first, splits, stride, head, SINKS: tl.constexpr,
          G: tl.constexpr, HEADS_KV: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Joins the partial sums of a tile's tokens, in the order of the splits, whichever arrived last.

    Split s of token j of the tile stands at `first + s * stride + j`. Loads pass by the first-level cache, which does
    not see what other multiprocessors wrote."""
    HEADS: tl.constexpr = HEADS_KV * G
    ROWS: tl.constexpr = 8
    SPLITS: tl.constexpr = 8  # loaded at once
    d = tl.arange(0, BLOCK_D)
    for start in tl.range(0, tokens * G, ROWS):
        i = start + tl.arange(0, ROWS)
        ok = i < tokens * G
        q_head = head * G + i % G
        m = tl.full((ROWS,), LOWEST, tl.float32)
        l = tl.zeros((ROWS,), tl.float32)
        if SINKS:
            m = tl.load(sinks + q_head, mask=ok, other=0.0).to(tl.float32) * LOG2E
            l += 1.0
        acc = tl.zeros((ROWS, BLOCK_D), tl.float32)
        for s in tl.range(0, splits, SPLITS):
            for u in tl.static_range(SPLITS):
                seen = ok & (s + u < splits)
                at = (first + (s + u) * stride + i // G) * HEADS + q_head
                lse = tl.load(partial_lse + at, mask=seen, other=LOWEST, cache_modifier=".cg")
                o = tl.load(partial_out + at.to(tl.int64)[:, None] * D + d[None, :],
                            mask=seen[:, None] & (d[None, :] < D), other=0.0, cache_modifier=".cg")
                m_new = tl.maximum(m, lse)
                weight = tl.where(seen, tl.exp2(lse - m_new), 0.0)
                alpha = tl.exp2(m - m_new)
                acc = acc * alpha[:, None] + o * weight[:, None]
                l = l * alpha + weight
                m = m_new
        at = ((token + i // G) * HEADS + q_head).to(tl.int64) * D
        tl.store(out + at[:, None] + d[None, :], (acc / l[:, None]).to(out.dtype.element_ty),
                 mask=ok[:, None] & (d[None, :] < D))


@triton.jit
def _clear_padding(out, first, n_tokens, G: tl.constexpr, HEADS_KV: tl.constexpr, D: tl.constexpr,
                   BLOCK_D: tl.constexpr):
    """Zeros for the tokens [first, n_tokens), shared by the programs of the grid."""
    d = tl.arange(0, BLOCK_D)
    for token in tl.range((first + tl.program_id(0)).to(tl.int64), n_tokens, tl.num_programs(0)):
        for head in tl.range(0, HEADS_KV * G):
            at = (token * HEADS_KV * G + head) * D
            tl.store(out + at + d, tl.zeros((BLOCK_D,), out.dtype.element_ty), mask=d < D)


@triton.jit(do_not_specialize=["table_stride", "offset", "n_rows", "n_tokens", "early"])
def attend_kernel(q, k_cache, v_cache, k_scales, v_scales, tables, items, counts, arrivals, cu_q, out, partial_out,
                  partial_lse, sinks, q_token_stride, q_head_stride, page_stride, cell_stride, head_stride,
                  table_stride, in_scale, out_scale, offset, n_rows, n_tokens, early, KIND: tl.constexpr,
                  WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, PAGE: tl.constexpr,
                  G: tl.constexpr, HEADS_KV: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr,
                  KEYS: tl.constexpr, STAGES: tl.constexpr, WORDS: tl.constexpr, FIRST: tl.constexpr,
                  PDL: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr, FP8: tl.constexpr):
    """A persistent grid that claims the work items of one kind until none is left. KIND: 0 chunks, 1 few tokens.

    Of n items, program p takes item p without asking; where there are more, the others are claimed. Every program
    claims until it fails once, which makes n claims in all: the claim that returns n - 1 is the last, and sets the
    counter back for the next layer. The few-token launch also clears the padding, and with PDL it runs beside the
    launch of the chunks and ends after it: it starts when every program of the chunks has waited for all that came
    before, and lets the launch after it fetch weights while it runs. FIRST: no launch of chunks comes before. `early`:
    the plan was made long before, so that its first item may be read before the wait."""
    programs = tl.num_programs(0)
    if PDL:
        if KIND == 1:  # what comes after waits for this launch, whenever it starts
            tl.extra.cuda.gdc_launch_dependents()
        if early == 0:
            tl.extra.cuda.gdc_wait()
    n = tl.load(counts + KIND) * HEADS_KV
    claim = tl.program_id(0)
    record = items + (offset + tl.minimum(claim, tl.maximum(n - 1, 0)) // HEADS_KV) * WORDS
    token, tokens, first_pos, low, high, slot, partial = _words(record)
    if PDL:
        if FIRST:
            tl.extra.cuda.gdc_wait()
        if KIND == 0:  # the launch of the few tokens relies on this wait
            tl.extra.cuda.gdc_launch_dependents()
    if KIND == 1:
        padding = tl.load(cu_q + n_rows)  # here, so that no program ends by waiting for it
    while claim < n:
        _item(record, token, tokens, first_pos, low, high, slot, partial, claim % HEADS_KV, q, k_cache, v_cache,
              k_scales, v_scales, tables, out, partial_out, partial_lse, arrivals, sinks, q_token_stride, q_head_stride,
              page_stride, cell_stride, head_stride, table_stride, in_scale, out_scale, WINDOW, SOFTCAP, SINKS, PAGE,
              G, HEADS_KV, D, BLOCK_D, M, KEYS, STAGES, KIND == 0, PRECISION, UPCAST, FP8)
        if n > programs:
            claim = tl.atomic_add(counts + 2 + KIND, 1, sem="relaxed")
            if claim == n - 1:
                tl.store(counts + 2 + KIND, 0)
        claim += programs
        record = items + (offset + tl.minimum(claim, n - 1) // HEADS_KV) * WORDS
        token, tokens, first_pos, low, high, slot, partial = _words(record)
    if KIND == 1:
        _clear_padding(out, padding, n_tokens, G, HEADS_KV, D, BLOCK_D)
        if PDL and not FIRST:
            tl.extra.cuda.gdc_wait()
