"""Attention of short steps of few rows in one launch a layer, from the projected heads to the attended ones: norm of
heads, rotation, write of keys and values, attention over the cells, joined parts.

Such a step waits for latency, not for bandwidth, so what counts is how many loads wait for one another. There is no
work list: programs are (split, KV head, row). What earlier steps wrote is loaded before the launch before has ended;
the step's own keys and values, which that launch makes, take their places in the tile in registers.

    cells of a row   | earlier steps ............ base | this step, kv_len |
    programs         |-- split 0 --|-- split 1 --|-- split 2 --|             up to SPLITS of a multiple of KEYS cells
    launch before    ####################|
    this launch         | keys, values | wait | new ones, scores, sums | last to arrive joins |

How a row is split is a function of its own length and of the bucket, and splits are joined in one order, so a token's
result does not depend on the other rows. Imported only where it is going to run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from stretto.attn.api import LayerSpec
from stretto.attn.triton_kernels import LOG2E, LOWEST
from stretto.ops.layer import HeadWeights, Rope
from stretto.ops.triton_dot import dot
from stretto.ragged import RaggedStep

MOST_QUERIES = 16  # of a KV head, of one row, and of one token of each row: above, the work list is faster
KEYS = 64  # cells of one block
PROGRAMS = 32  # of each KV head, all rows together


@triton.jit
def _merge(k1, k2, v, cell, at, qkv, rope, k_weight, k_cache, v_cache, token, base, high, head, qkv_stride, eps,
           G: tl.constexpr, HEADS_KV: tl.constexpr, D: tl.constexpr, NORM: tl.constexpr):
    """The block with the step's own cells in it, which are written to the caches."""
    HALF: tl.constexpr = D // 2
    d = tl.arange(0, HALF)[None, :]
    both = tl.arange(0, D)[None, :]
    new = ((cell >= base) & (cell < high))[:, None]
    row = qkv + (token + cell - base).to(tl.int64)[:, None] * qkv_stride
    x = row + (HEADS_KV * G + head) * D + d
    a = tl.load(x, mask=new, other=0.0).to(tl.float32)
    b = tl.load(x + HALF, mask=new, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + eps)[:, None]
        a = a * scale * tl.load(k_weight + d).to(tl.float32)
        b = b * scale * tl.load(k_weight + HALF + d).to(tl.float32)
    angle = rope + cell.to(tl.int64)[:, None] * D + d
    cos = tl.load(angle, mask=new, other=0.0)
    sin = tl.load(angle + HALF, mask=new, other=0.0)
    k1 = tl.where(new, (a * cos - b * sin).to(k1.dtype), k1)
    k2 = tl.where(new, (b * cos + a * sin).to(k2.dtype), k2)
    v = tl.where(new, tl.load(row + (HEADS_KV * (G + 1) + head) * D + both, mask=new, other=0.0), v)
    tl.store(k_cache + at[:, None] + d, k1, mask=new)
    tl.store(k_cache + at[:, None] + HALF + d, k2, mask=new)
    tl.store(v_cache + at[:, None] + both, v, mask=new)
    return k1, k2, v


@triton.jit
def _places(table, cell, end, head, page_stride, cell_stride, PAGE: tl.constexpr, D: tl.constexpr):
    """Where a head's keys of these cells stand in the cache; those at or after `end` in the null page."""
    page = tl.load(table + cell // PAGE, mask=cell < end, other=0).to(tl.int64)
    return page * page_stride + cell % PAGE * cell_stride + head * D


@triton.jit
def _load(k_cache, v_cache, at, old, D: tl.constexpr):
    """The two halves of a block of keys, and its values; zeros where there are none yet."""
    d = at[:, None] + tl.arange(0, D // 2)[None, :]
    k1 = tl.load(k_cache + d, mask=old[:, None], other=0.0)
    k2 = tl.load(k_cache + d + D // 2, mask=old[:, None], other=0.0)
    v = tl.load(v_cache + at[:, None] + tl.arange(0, D)[None, :], mask=old[:, None], other=0.0)
    return k1, k2, v


@triton.jit
def _block(q1, q2, acc, m, l, k1, k2, v, cell, pos, high, scale, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """Adds a block of keys to the running softmax, in base 2."""
    s = dot(q1, k1.T, None, PRECISION, UPCAST)
    s = dot(q2, k2.T, s, PRECISION, UPCAST)
    s = tl.where((cell[None, :] <= pos[:, None]) & (cell < high)[None, :], s, -float("inf"))
    m_new = tl.maximum(m, tl.max(s, 1) * scale)
    p = tl.exp2(s * scale - m_new[:, None])
    alpha = tl.exp2(m - m_new)
    l = l * alpha + tl.sum(p, 1)
    acc = dot(p.to(v.dtype), v, acc * alpha[:, None], PRECISION, UPCAST)
    return acc, m_new, l


@triton.jit
def _join(partial_out, partial_lse, out, row, token, tokens, splits, head, G: tl.constexpr, GROUP: tl.constexpr,
          HEADS_KV: tl.constexpr, D: tl.constexpr, MOST: tl.constexpr, SPLITS: tl.constexpr):
    """Joins the parts of a row's tokens. Loads pass by the first-level cache, which misses what others wrote."""
    HEADS: tl.constexpr = HEADS_KV * G
    g = tl.arange(0, GROUP)
    s = tl.arange(0, SPLITS)
    d = tl.arange(0, D)
    keep = (g < G)[:, None] & (s < splits)[None, :]
    for j in tl.range(0, tokens):
        at = ((row * SPLITS + s)[None, :] * MOST + j) * HEADS + head * G + g[:, None]
        lse = tl.load(partial_lse + at, mask=keep, other=LOWEST, cache_modifier=".cg")
        o = tl.load(partial_out + at[:, :, None] * D + d[None, None, :], mask=keep[:, :, None], other=0.0,
                    cache_modifier=".cg")
        weight = tl.where(keep, tl.exp2(lse - tl.max(lse, 1)[:, None]), 0.0)
        total = tl.sum(weight, 1)
        y = tl.sum(o * weight[:, :, None], 1) / tl.where(total > 0, total, 1.0)[:, None]
        to = out + ((token + j).to(tl.int64) * HEADS + head * G + g)[:, None] * D + d[None, :]
        tl.store(to, y.to(out.dtype.element_ty), mask=(g < G)[:, None])


@triton.jit
def _queries(x, ok, cos, sin, weight, eps, D: tl.constexpr, NORM: tl.constexpr):
    """The two halves of the tile's queries, normed and rotated."""
    HALF: tl.constexpr = D // 2
    d = tl.arange(0, HALF)[None, :]
    a = tl.load(x, mask=ok[:, None], other=0.0).to(tl.float32)
    b = tl.load(x + HALF, mask=ok[:, None], other=0.0).to(tl.float32)
    if NORM:
        norm = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + eps)[:, None]
        a = a * norm * tl.load(weight + d).to(tl.float32)
        b = b * norm * tl.load(weight + HALF + d).to(tl.float32)
    return (a * cos - b * sin).to(x.dtype.element_ty), (b * cos + a * sin).to(x.dtype.element_ty)


@triton.jit
def _is_last(acc, m, l, partial_out, partial_lse, at, ok, arrival, splits, D: tl.constexpr):
    """Keeps the sums of a split, to be joined; whether those of all splits are there."""
    total = tl.where(l > 0, l, 1.0)
    tl.store(partial_out + at[:, None] * D + tl.arange(0, D)[None, :], acc / total[:, None], mask=ok[:, None])
    tl.store(partial_lse + at, tl.where(l > 0, m + tl.log2(total), LOWEST), mask=ok)
    tl.debug_barrier()  # every thread's sums stand before the arrival that announces them
    last = tl.atomic_add(arrival, 1, sem="acq_rel") == splits - 1
    if last:
        tl.store(arrival, 0)  # for the next layer
    return last


@triton.jit
def _clear(out, first, n_tokens, STEP: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr):
    """Zeros for every STEP-th token from `first` on."""
    for token in tl.range(first.to(tl.int64), n_tokens, STEP):
        for head in tl.range(0, HEADS):
            tl.store(out + (token * HEADS + head) * D + tl.arange(0, D), tl.zeros((D,), out.dtype.element_ty))


@triton.jit(do_not_specialize=["table_stride", "n_rows", "n_tokens", "early"])
def short_kernel(qkv, rope, q_weight, k_weight, k_cache, v_cache, tables, slots, bases, q_lens, cu_q, out, partial_out,
                 partial_lse, arrivals, qkv_stride, page_stride, cell_stride, table_stride, eps, scale, n_rows,
                 n_tokens, early, G: tl.constexpr, GROUP: tl.constexpr, HEADS_KV: tl.constexpr, D: tl.constexpr,
                 M: tl.constexpr, MOST: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr, SPLITS: tl.constexpr,
                 PAGE: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr, PRECISION: tl.constexpr,
                 UPCAST: tl.constexpr):
    """One program for a split of a row's cells and a KV head. Query i of the tile is token i // G, head i % G of the
    group. `early`: what binding wrote may be read before the wait."""
    split, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if PDL and early == 0:
        tl.extra.cuda.gdc_wait()
    base, tokens = tl.load(bases + row), tl.load(q_lens + row)
    token, padding = tl.load(cu_q + row), tl.load(cu_q + n_rows)
    table = tables + tl.load(slots + row).to(tl.int64) * table_stride
    kv = base + tokens
    each = tl.cdiv(tl.cdiv(kv, KEYS), SPLITS) * KEYS
    splits = tl.where(tokens > 0, tl.cdiv(kv, tl.maximum(each, 1)), 0)
    low = split * each
    high = tl.where(split < splits, tl.minimum(low + each, kv), 0)
    i, t = tl.arange(0, M), tl.arange(0, KEYS)
    d = tl.arange(0, D // 2)[None, :]
    cell = low + t
    at = _places(table, cell, high, head, page_stride, cell_stride, PAGE, D)
    k1, k2, v = _load(k_cache, v_cache, at, cell < tl.minimum(high, base), D)
    ok = i // G < tokens
    pos = base + tl.minimum(i // G, tl.maximum(tokens - 1, 0))
    angle = rope + pos.to(tl.int64)[:, None] * D + d
    cos = tl.load(angle)
    sin = tl.load(angle + D // 2)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if split < splits:
        q_head = head * G + i % G
        q1, q2 = _queries(qkv + (token + i // G).to(tl.int64)[:, None] * qkv_stride + q_head[:, None] * D + d, ok, cos,
                          sin, q_weight, eps, D, NORM)
        acc = tl.zeros((M, D), tl.float32)
        m = tl.full((M,), LOWEST, tl.float32)
        l = tl.zeros((M,), tl.float32)
        if high > base:
            k1, k2, v = _merge(k1, k2, v, cell, at, qkv, rope, k_weight, k_cache, v_cache, token, base, high, head,
                               qkv_stride, eps, G, HEADS_KV, D, NORM)
        acc, m, l = _block(q1, q2, acc, m, l, k1, k2, v, cell, pos, high, scale, PRECISION, UPCAST)
        clear = tl.maximum(tl.minimum(high, base) // KEYS * KEYS, low + KEYS)  # blocks before it hold old cells alone
        cell += KEYS
        page = tl.load(table + cell // PAGE, mask=cell < clear, other=0)  # of the block after, a turn early
        for start in tl.range(low + KEYS, clear, KEYS, num_stages=STAGES):
            at = page.to(tl.int64) * page_stride + cell % PAGE * cell_stride + head * D
            page = tl.load(table + (cell + KEYS) // PAGE, mask=cell + KEYS < clear, other=0)
            k1, k2, v = _load(k_cache, v_cache, at, cell < base, D)
            acc, m, l = _block(q1, q2, acc, m, l, k1, k2, v, cell, pos, high, scale, PRECISION, UPCAST)
            cell = start + KEYS + t
        for start in tl.range(clear, high, KEYS, num_stages=1):
            cell = start + t
            at = _places(table, cell, high, head, page_stride, cell_stride, PAGE, D)
            k1, k2, v = _load(k_cache, v_cache, at, cell < tl.minimum(high, base), D)
            k1, k2, v = _merge(k1, k2, v, cell, at, qkv, rope, k_weight, k_cache, v_cache, token, base, high, head,
                               qkv_stride, eps, G, HEADS_KV, D, NORM)
            acc, m, l = _block(q1, q2, acc, m, l, k1, k2, v, cell, pos, high, scale, PRECISION, UPCAST)
        if splits == 1:
            to = out + ((token + i // G).to(tl.int64) * HEADS_KV * G + q_head)[:, None] * D + tl.arange(0, D)[None, :]
            tl.store(to, (acc / tl.where(l > 0, l, 1.0)[:, None]).to(out.dtype.element_ty), mask=ok[:, None])
        else:
            sum_at = ((row * SPLITS + split) * MOST + i // G) * HEADS_KV * G + q_head
            if _is_last(acc, m, l, partial_out, partial_lse, sum_at, ok, arrivals + row * HEADS_KV + head, splits, D):
                _join(partial_out, partial_lse, out, row, token, tokens, splits, head, G, GROUP, HEADS_KV, D, MOST,
                      SPLITS)
    if (head == 0) & (row == 0):
        _clear(out, padding + split, n_tokens, SPLITS, HEADS_KV * G, D)


INTERPRETED = isinstance(short_kernel, InterpretedFunction)


@dataclass(frozen=True)
class ShortLaunch:
    """Sizes of a launch."""

    rows: int
    tokens: int
    most: int  # tokens of a row
    splits: int
    group: int  # query heads of a KV head
    keys: int = KEYS
    stages: int = 3  # depth of the pipeline of all blocks but the first
    warps: int = 4

    @property
    def partials(self) -> int:
        """Token-splits whose sums are kept."""
        return self.rows * self.splits * self.most


def short_launch(layer: LayerSpec, step: RaggedStep) -> ShortLaunch | None:
    """None where the kernel does not serve the layer, or the step is none of few rows of few tokens."""
    rows, tokens, group = step.q_len.numel(), step.ids.numel(), layer.n_heads // layer.n_kv_heads
    most = tokens if step.most_tokens is None else min(tokens, step.most_tokens)
    plain = layer.window is None and not layer.softcap and not layer.has_sinks and layer.head_dim in (64, 128)
    if not plain or not rows or max(most, rows) * group > MOST_QUERIES:
        return None
    return ShortLaunch(rows, tokens, most, max(1, PROGRAMS // triton.next_power_of_2(rows)), group)


def launch_short(sizes: ShortLaunch, layer: LayerSpec, qkv: torch.Tensor, rope: Rope, norm: HeadWeights | None,
                 k_cache: torch.Tensor, v_cache: torch.Tensor, step: RaggedStep, group: int, partials: torch.Tensor,
                 arrivals: torch.Tensor, early: bool, pdl: bool) -> torch.Tensor:
    """qkv [T, H + 2 Hkv, D] as projected; partials float32, at least
    sizes.partials * H * (D + 1); arrivals int32, rows * Hkv, zeros and zeros again afterwards. `early`: a launch of
    this step came long before. Returns [T, H, D]."""
    out = torch.empty(sizes.tokens, layer.n_heads, layer.head_dim, dtype=qkv.dtype, device=qkv.device)
    table, sums = step.page_tables[group], sizes.partials * layer.n_heads
    angles, weights = rope.table, (rope.table, rope.table) if norm is None else (norm.q, norm.k)
    short_kernel[(sizes.splits, layer.n_kv_heads, sizes.rows)](
        qkv, angles, *weights, k_cache, v_cache, table, step.slots, step.base, step.q_len, step.cu_q, out, partials,
        partials[sums * layer.head_dim :], arrivals, qkv.stride(0), k_cache.stride(0), k_cache.stride(1),
        table.stride(0), 0.0 if norm is None else norm.eps, LOG2E.value * layer.scale, sizes.rows, sizes.tokens,
        int(early), G=sizes.group, GROUP=triton.next_power_of_2(sizes.group), HEADS_KV=layer.n_kv_heads,
        D=layer.head_dim, M=max(16, triton.next_power_of_2(sizes.most * sizes.group)), MOST=sizes.most, KEYS=sizes.keys,
        STAGES=sizes.stages, SPLITS=sizes.splits, PAGE=step.page_size, NORM=norm is not None, PDL=pdl,
        PRECISION="ieee" if qkv.dtype == torch.float32 else "tf32",
        UPCAST=INTERPRETED and qkv.dtype == torch.bfloat16, num_warps=sizes.warps,
        **({"launch_pdl": True} if pdl else {}))
    return out
