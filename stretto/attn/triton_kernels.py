"""Triton kernels of the ragged paged attention: plan, attend, join.

One launch of `attend_kernel` serves every row of a step: chunks, verify windows, decoded tokens. All lengths are read
on the device. A work item is (tile of query tokens, split of the KV cells); each item runs once per KV head.

    row with 3 splits       cells  0        split      2*split     kv_len
    (one tile)                     |--item 0--|--item 1--|--item 2-|         partial sums, joined by `join_kernel`

    chunk row, 2 tiles             |==================\\ tile 0                causal edge; written directly
                                   |=====================\\ tile 1

Splits lie at absolute multiples of the split length, so the order in which a token's keys are summed depends on the
token's own row alone. Online softmax: Milakov and Gimelshein 2018, tiled as in FlashAttention-2 (Dao 2023); split KV
with a join as in Flash-Decoding (2023); all query heads of one KV head share a tile (GQA packing).

This module imports Triton at the top: import it only where a kernel is going to run.
"""

from __future__ import annotations

import triton
import triton.language as tl

ITEM_WORDS = 8  # one aligned 32-byte record: token, tokens, position, first cell, end cell, slot, partial, unused
LOWEST = tl.constexpr(-1.0e30)  # below every logit; finite, so that differences of it are no NaN
LOG2E = tl.constexpr(1.4426950408889634)


# ------------------------------------------------------------------------------------------------------------- plan
@triton.jit
def _splits(q, kv, low, shift, G: tl.constexpr, HEADS_KV: tl.constexpr, SMALL: tl.constexpr, MEDIUM: tl.constexpr,
            LARGE: tl.constexpr, SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr, LARGE_SPLIT: tl.constexpr,
            LARGE_ITEMS: tl.constexpr):
    """For rows of q tokens that read cells [low, kv): (kind, tiles, split length, first split, splits)."""
    kind = tl.where(q * G <= SMALL, 0, tl.where(q * G <= MEDIUM, 1, 2))
    tiles = tl.where(kind == 2, tl.cdiv(q, LARGE // G), tl.minimum(q, 1))
    extent = kv - low
    split = tl.zeros_like(q) + SPLIT
    for _ in tl.static_range(12):
        split = tl.where(extent > split * MAX_SPLITS, split * 2, split)
    wanted = tl.maximum(tl.cdiv(LARGE_ITEMS, tl.maximum(tiles, 1) * HEADS_KV), 1)
    large = tl.cdiv(tl.cdiv(extent, wanted), LARGE_SPLIT) * LARGE_SPLIT
    split = tl.where(kind == 2, tl.where(wanted == 1, 1 << 28, tl.maximum(large, LARGE_SPLIT)), split)
    split = tl.minimum(split.to(tl.int64) << shift, 1 << 28).to(tl.int32)
    first = low // split
    return kind, tiles, split, first, tl.where(q > 0, tl.cdiv(kv, split) - first, 0)


@triton.jit(do_not_specialize=["n_rows", "capacity", "offset_medium", "offset_large"])
def plan_kernel(q_len, kv_len, cu_q, slots, items, counts, row_splits, row_partial, n_rows, capacity,
                offset_medium, offset_large, ROWS: tl.constexpr, WINDOW: tl.constexpr, G: tl.constexpr,
                HEADS_KV: tl.constexpr, SMALL: tl.constexpr, MEDIUM: tl.constexpr, LARGE: tl.constexpr,
                SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr, LARGE_SPLIT: tl.constexpr, LARGE_ITEMS: tl.constexpr,
                WORDS: tl.constexpr):
    """One program a row: writes the row's work items into the list of its kind, and where its partial sums go.

    counts: [8] items of each kind (words 0..2) and claims (words 4..6, set to 0). Where the partial sums of the step
    would not fit `capacity` token-splits, every split of the step doubles until they do."""
    row = tl.program_id(0)
    r = tl.arange(0, ROWS)
    q = tl.load(q_len + r, mask=r < n_rows, other=0)
    kv = tl.load(kv_len + r, mask=r < n_rows, other=0)
    low = tl.maximum(kv - q - WINDOW + 1, 0) if WINDOW > 0 else tl.zeros_like(kv)
    shift = 0
    kind, tiles, split, first, n = _splits(q, kv, low, shift, G, HEADS_KV, SMALL, MEDIUM, LARGE, SPLIT, MAX_SPLITS,
                                           LARGE_SPLIT, LARGE_ITEMS)
    partials = tl.where(n > 1, n * q, 0)
    while tl.sum(partials, 0) > capacity:
        shift += 1
        kind, tiles, split, first, n = _splits(q, kv, low, shift, G, HEADS_KV, SMALL, MEDIUM, LARGE, SPLIT, MAX_SPLITS,
                                               LARGE_SPLIT, LARGE_ITEMS)
        partials = tl.where(n > 1, n * q, 0)
    mine = r == row
    my_kind = tl.sum(tl.where(mine, kind, 0), 0)
    my_tiles = tl.sum(tl.where(mine, tiles, 0), 0)
    my_split = tl.sum(tl.where(mine, split, 0), 0)
    my_first = tl.sum(tl.where(mine, first, 0), 0)
    my_n = tl.sum(tl.where(mine, n, 0), 0)
    my_q = tl.sum(tl.where(mine, q, 0), 0)
    my_kv = tl.sum(tl.where(mine, kv, 0), 0)
    partial = tl.sum(tl.where(r < row, partials, 0), 0)
    #   full splits of all rows of the kind, row after row | last splits of all rows: short ones end the launch
    same = kind == my_kind
    before = tl.sum(tl.where(same & (r < row), tiles * (n - 1), 0), 0)
    last = tl.sum(tl.where(same, tiles * (n - 1), 0) + tl.where(same & (r < row), tiles, 0), 0)
    offset = tl.where(my_kind == 0, 0, tl.where(my_kind == 1, offset_medium, offset_large))
    tl.store(row_splits + row, my_n)
    tl.store(row_partial + row, partial)
    if row == 0:
        for k in tl.static_range(3):
            tl.store(counts + k, tl.sum(tl.where(kind == k, tiles * n, 0), 0))
            tl.store(counts + 4 + k, 0)
    tile_tokens = tl.where(my_kind == 2, LARGE // G, my_q)
    _write_items(items + offset * WORDS, before, last, my_tiles, my_n, my_first, my_split, tile_tokens, my_q, my_kv,
                 tl.load(cu_q + row), tl.load(slots + row), partial, WINDOW, WORDS)


@triton.jit
def _write_items(out, before, last, tiles, n, first, split, tile_tokens, q, kv, token, slot, partial, WINDOW: tl.constexpr,
                 WORDS: tl.constexpr):
    """The records of one row, longest tile first: see ITEM_WORDS. The last splits go to index `last`, others to
    `before`."""
    base = kv - q
    for start in tl.range(0, tiles * n, 64):
        j = start + tl.arange(0, 64)
        ok = j < tiles * n
        s = j // tiles
        tile = tiles - 1 - j % tiles
        at = tile * tile_tokens
        tokens = tl.minimum(tile_tokens, q - at)
        cell = (first + s) * split
        end = tl.minimum(cell + split, base + at + tokens)
        if WINDOW > 0:
            cell = tl.maximum(cell, base + at - WINDOW + 1)
        p = out + tl.where(s < n - 1, before + j, last + j % tiles) * WORDS
        tl.store(p, token + at, mask=ok)
        tl.store(p + 1, tokens, mask=ok)
        tl.store(p + 2, base + at, mask=ok)
        tl.store(p + 3, cell, mask=ok)
        tl.store(p + 4, end, mask=ok)
        tl.store(p + 5, tl.zeros_like(j) + slot, mask=ok)
        tl.store(p + 6, tl.where(n > 1, partial + s * q + at, -1), mask=ok)


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
def _blocks(q, acc, m, l, k_cache, v_cache, table, begin, end, low, high, pos, page_stride, cell_stride, in_scale,
            out_scale, MASKED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PAGE: tl.constexpr,
            D: tl.constexpr, BLOCK_D: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
            PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """Adds the key blocks [begin, end) to the running softmax of one tile.

    q [M, D]; acc [M, D], m and l [M]: weighted values, maximum and sum, of logits in base 2. Cells outside [low, high)
    are never read: the nearest cell inside stands for them, and the mask removes it."""
    d = tl.arange(0, BLOCK_D)
    cell = _cells(begin, low, high, KEYS)
    page = tl.load(table + cell // PAGE)  # one block ahead, so that no load of keys waits for a load of page numbers
    for start in tl.range(begin, end, KEYS, num_stages=STAGES):
        t = start + tl.arange(0, KEYS)
        at = page.to(tl.int64) * page_stride + (cell % PAGE) * cell_stride
        cell = _cells(start + KEYS, low, high, KEYS)
        page = tl.load(table + cell // PAGE)
        if BLOCK_D == D:
            k = tl.load(k_cache + at[:, None] + d[None, :])
        else:
            k = tl.load(k_cache + at[:, None] + d[None, :], mask=d[None, :] < D, other=0.0)
        s = _dot(q, tl.trans(k), tl.zeros((q.shape[0], KEYS), tl.float32), PRECISION, UPCAST)
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
        acc = _dot(p.to(v.dtype), v, acc * alpha[:, None], PRECISION, UPCAST)
        m = m_new
    return acc, m, l


@triton.jit
def _blocks_transposed(q, acc, m, l, k_cache, v_cache, table, begin, end, low, high, pos, page_stride, cell_stride,
                       in_scale, out_scale, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PAGE: tl.constexpr,
                       D: tl.constexpr, BLOCK_D: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
                       PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """`_blocks` for few query rows: keys and head size on the long sides of both products.

    q [D, M]; acc [D, M]; m [M]; l [KEYS, M], summed over keys by the caller."""
    d = tl.arange(0, BLOCK_D)
    cell = _cells(begin, low, high, KEYS)
    page = tl.load(table + cell // PAGE)
    for start in tl.range(begin, end, KEYS, num_stages=STAGES):
        t = start + tl.arange(0, KEYS)
        at = page.to(tl.int64) * page_stride + (cell % PAGE) * cell_stride
        cell = _cells(start + KEYS, low, high, KEYS)
        page = tl.load(table + cell // PAGE)
        if BLOCK_D == D:
            k = tl.load(k_cache + at[:, None] + d[None, :])
        else:
            k = tl.load(k_cache + at[:, None] + d[None, :], mask=d[None, :] < D, other=0.0)
        s = _dot(k, q, tl.zeros((KEYS, q.shape[1]), tl.float32), PRECISION, UPCAST)
        if SOFTCAP:
            s = 2.0 / (1.0 + tl.exp2(s * in_scale)) - 1.0  # tanh
        seen = t[:, None] <= pos[None, :]
        if WINDOW > 0:
            seen = seen & (t[:, None] > pos[None, :] - WINDOW)
        s = tl.where(seen, s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, 0) * out_scale)
        p = tl.exp2(s * out_scale - m_new[None, :])
        alpha = tl.exp2(m - m_new)
        l = l * alpha[None, :] + p
        if BLOCK_D == D:
            v = tl.load(v_cache + at[:, None] + d[None, :])
        else:
            v = tl.load(v_cache + at[:, None] + d[None, :], mask=d[None, :] < D, other=0.0)
        acc = _dot(tl.trans(v), p.to(v.dtype), acc * alpha[None, :], PRECISION, UPCAST)
        m = m_new
    return acc, m, l


@triton.jit
def _item(record, head, q_ptr, k_cache, v_cache, tables, out, partial_out, partial_lse, sinks, q_token_stride,
          q_head_stride, page_stride, cell_stride, head_stride, table_stride, in_scale, out_scale,
          WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, PAGE: tl.constexpr, G: tl.constexpr,
          HEADS_KV: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr, KEYS: tl.constexpr,
          STAGES: tl.constexpr, SKIP_MASK: tl.constexpr, TRANSPOSE: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """One work item for one KV head. Query row i of the tile is token i // G, head i % G of the group."""
    HEADS: tl.constexpr = HEADS_KV * G
    token = tl.load(record)
    tokens = tl.load(record + 1)
    first_pos = tl.load(record + 2)
    low = tl.load(record + 3)
    high = tl.load(record + 4)
    table = tables + tl.load(record + 5).to(tl.int64) * table_stride
    partial = tl.load(record + 6)
    i = tl.arange(0, M)
    d = tl.arange(0, BLOCK_D)
    ok = i // G < tokens
    pos = first_pos + tl.minimum(i // G, tokens - 1)
    q_head = head * G + i % G
    q_at = (token + i // G).to(tl.int64) * q_token_stride + q_head * q_head_stride
    q = tl.load(q_ptr + q_at[:, None] + d[None, :], mask=ok[:, None] & (d[None, :] < D), other=0.0)
    m = tl.full((M,), LOWEST, tl.float32)
    k_head = k_cache + head * head_stride
    v_head = v_cache + head * head_stride
    begin = low // KEYS * KEYS
    if TRANSPOSE:
        acc_t, m, l_t = _blocks_transposed(
            tl.trans(q), tl.zeros((BLOCK_D, M), tl.float32), m, tl.zeros((KEYS, M), tl.float32), k_head, v_head, table,
            begin, high, low, high, pos, page_stride, cell_stride, in_scale, out_scale, WINDOW, SOFTCAP, PAGE, D,
            BLOCK_D, KEYS, STAGES, PRECISION, UPCAST)
        acc = tl.trans(acc_t)
        l = tl.sum(l_t, 0)
    else:
        acc = tl.zeros((M, BLOCK_D), tl.float32)
        l = tl.zeros((M,), tl.float32)
        #   begin       clear        causal      high         blocks in [clear, causal) need no mask: every query of the
        #     |--window--|--no mask-----|--causal--|          tile sees every key of them
        if SKIP_MASK:
            clear = begin
            if WINDOW > 0:
                clear = tl.cdiv(tl.maximum(first_pos + tokens - WINDOW, low), KEYS) * KEYS
                clear = tl.minimum(clear, tl.cdiv(high, KEYS) * KEYS)
                acc, m, l = _blocks(q, acc, m, l, k_head, v_head, table, begin, tl.minimum(clear, high), low, high, pos,
                                    page_stride, cell_stride, in_scale, out_scale, True, WINDOW, SOFTCAP, PAGE, D, BLOCK_D,
                                    KEYS, STAGES, PRECISION, UPCAST)
            causal = tl.maximum(tl.minimum(first_pos + 1, high) // KEYS * KEYS, clear)
            acc, m, l = _blocks(q, acc, m, l, k_head, v_head, table, clear, causal, low, high, pos, page_stride,
                                cell_stride, in_scale, out_scale, False, WINDOW, SOFTCAP, PAGE, D, BLOCK_D, KEYS, STAGES,
                                PRECISION, UPCAST)
            begin = causal
        acc, m, l = _blocks(q, acc, m, l, k_head, v_head, table, begin, high, low, high, pos, page_stride, cell_stride,
                            in_scale, out_scale, True, WINDOW, SOFTCAP, PAGE, D, BLOCK_D, KEYS, STAGES, PRECISION, UPCAST)
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


@triton.jit(do_not_specialize=["table_stride", "offset_medium", "offset_large", "large_first"])
def attend_kernel(q, k_cache, v_cache, tables, items, counts, out, partial_out, partial_lse, sinks, q_token_stride,
                  q_head_stride, page_stride, cell_stride, head_stride, table_stride, in_scale, out_scale,
                  offset_medium, offset_large, large_first, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
                  SINKS: tl.constexpr, PAGE: tl.constexpr, G: tl.constexpr, HEADS_KV: tl.constexpr, D: tl.constexpr,
                  BLOCK_D: tl.constexpr, M0: tl.constexpr, KEYS0: tl.constexpr, STAGES0: tl.constexpr,
                  M1: tl.constexpr, KEYS1: tl.constexpr, STAGES1: tl.constexpr, M2: tl.constexpr,
                  KEYS2: tl.constexpr, STAGES2: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, DYNAMIC: tl.constexpr,
                  PDL_FIRST: tl.constexpr, PDL_LAST: tl.constexpr, TRANSPOSE: tl.constexpr, WORDS: tl.constexpr,
                  PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """A persistent grid that claims work items until none is left.

    The first `large_first` programs, one on each multiprocessor, take large items first and the others small ones, so
    that arithmetic of chunk rows and memory traffic of decode rows overlap on every multiprocessor."""
    pid = tl.program_id(0)
    if PDL_FIRST:
        tl.extra.cuda.gdc_launch_dependents()
    n_small = tl.load(counts) * HEADS_KV
    n_medium = tl.load(counts + 1) * HEADS_KV
    n_large = tl.load(counts + 2) * HEADS_KV
    kind = tl.where(pid < large_first, LAST, FIRST)
    step = tl.where(pid < large_first, -1, 1)
    kinds_left = LAST - FIRST + 1
    claim = pid
    while kinds_left > 0:
        if DYNAMIC:
            claim = tl.atomic_add(counts + 4 + kind, 1, sem="relaxed")
        n = tl.where(kind == 0, n_small, tl.where(kind == 1, n_medium, n_large))
        if claim < n:
            item = claim // HEADS_KV
            head = claim % HEADS_KV
            if FIRST == 0:
                if kind == 0:
                    _item(items + (item) * WORDS, head, q, k_cache, v_cache, tables, out, partial_out, partial_lse,
                          sinks, q_token_stride, q_head_stride, page_stride, cell_stride, head_stride, table_stride,
                          in_scale, out_scale, WINDOW, SOFTCAP, SINKS, PAGE, G, HEADS_KV, D, BLOCK_D, M0, KEYS0,
                          STAGES0, False, TRANSPOSE, PRECISION, UPCAST)
                elif kind == 1:
                    _item(items + (offset_medium + item) * WORDS, head, q, k_cache, v_cache, tables, out, partial_out, partial_lse,
                          sinks, q_token_stride, q_head_stride, page_stride, cell_stride, head_stride, table_stride,
                          in_scale, out_scale, WINDOW, SOFTCAP, SINKS, PAGE, G, HEADS_KV, D, BLOCK_D, M1, KEYS1,
                          STAGES1, False, TRANSPOSE, PRECISION, UPCAST)
            if LAST == 2:
                if kind == 2:
                    _item(items + (offset_large + item) * WORDS, head, q, k_cache, v_cache, tables, out, partial_out, partial_lse,
                          sinks, q_token_stride, q_head_stride, page_stride, cell_stride, head_stride, table_stride,
                          in_scale, out_scale, WINDOW, SOFTCAP, SINKS, PAGE, G, HEADS_KV, D, BLOCK_D, M2, KEYS2,
                          STAGES2, True, False, PRECISION, UPCAST)
            if not DYNAMIC:
                claim += tl.num_programs(0)
        else:
            kind += step
            kinds_left -= 1
            claim = pid
    if PDL_LAST:
        tl.extra.cuda.gdc_wait()


# ------------------------------------------------------------------------------------------------------------- join
@triton.jit(do_not_specialize=["n_rows"])
def join_kernel(partial_out, partial_lse, out, sinks, token_rows, q_len, cu_q, row_splits, row_partial, counts, n_rows,
                SINKS: tl.constexpr, G: tl.constexpr, BLOCK_G: tl.constexpr, HEADS_KV: tl.constexpr, D: tl.constexpr,
                BLOCK_D: tl.constexpr, SPLITS: tl.constexpr):
    """One program a (token, KV head): joins the partial sums of the token's splits, in the order of the splits.

    Tokens of the padding become 0. The claims of `attend_kernel` are set back for the next layer."""
    token = tl.program_id(0)
    head = tl.program_id(1)
    HEADS: tl.constexpr = HEADS_KV * G
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    keep = (g[:, None] < G) & (d[None, :] < D)
    target = out + (token.to(tl.int64) * HEADS + head * G + g)[:, None] * D + d[None, :]
    if (token == 0) & (head == 0):
        for k in tl.static_range(3):
            tl.store(counts + 4 + k, 0)
    if token >= tl.load(cu_q + n_rows):
        tl.store(target, tl.zeros((BLOCK_G, BLOCK_D), out.dtype.element_ty), mask=keep)
    else:
        row = tl.load(token_rows + token)
        n = tl.load(row_splits + row)
        if n > 1:
            q = tl.load(q_len + row)
            first = tl.load(row_partial + row) + token - tl.load(cu_q + row)
            m = tl.full((BLOCK_G,), LOWEST, tl.float32)
            l = tl.zeros((BLOCK_G,), tl.float32)
            if SINKS:
                m = tl.load(sinks + head * G + g, mask=g < G, other=0.0).to(tl.float32) * LOG2E
                l += 1.0
            acc = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
            for start in tl.range(0, n, SPLITS):
                s = start + tl.arange(0, SPLITS)
                ok = (s < n)[:, None] & (g < G)[None, :]
                at = ((first + s * q) * HEADS + head * G)[:, None] + g[None, :]
                lse = tl.load(partial_lse + at, mask=ok, other=LOWEST)
                o = tl.load(partial_out + at.to(tl.int64)[:, :, None] * D + d[None, None, :],
                            mask=ok[:, :, None] & (d < D)[None, None, :], other=0.0)
                m_new = tl.maximum(m, tl.max(lse, 0))
                weight = tl.exp2(lse - m_new[None, :])
                alpha = tl.exp2(m - m_new)
                acc = acc * alpha[:, None] + tl.sum(o * weight[:, :, None], 0)
                l = l * alpha + tl.sum(weight, 0)
                m = m_new
            tl.store(target, (acc / l[:, None]).to(out.dtype.element_ty), mask=keep)
