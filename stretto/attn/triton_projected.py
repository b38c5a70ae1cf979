"""Heads as a projection makes them, taken into attention: normed, rotated, and the new keys and values written.

    qkv [T, H + 2 Hkv, D]   | q heads        | k heads | v heads |
                              turned by every  turned and written by the item that reads their cells
                              item that reads
                              them

This saves short steps a launch a layer (`ops.layer.rotate_and_write`, which computes the same). Each cell belongs to
one item of its row and KV head, and no other item reads it in this launch; so the program that writes it is the only
one that has to wait for the write.

This module imports Triton at the top: import it only where a kernel is going to run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from stretto.ops.triton_fp8 import exponent_for, power_of, rounded


@triton.jit
def turned(x, at, position, table, weight, eps, keep, D: tl.constexpr, BLOCK_D: tl.constexpr, NORM: tl.constexpr):
    """The heads at x + at [N], RMS-normed by `weight` [D] where NORM says so, rotated to position [N].

    table [positions, D] float32, row p = [cos | sin]. Returns [N, BLOCK_D] float32, zeros where not `keep` [N]."""
    HALF: tl.constexpr = D // 2
    d = tl.arange(0, BLOCK_D)
    partner = (d + HALF) % D
    if HALF % 8 == 0:  # so that the partner's features too are loaded 16 bytes at a time
        partner = tl.max_contiguous(tl.multiple_of(partner, 8), 8)
    ok = keep[:, None] & (d < D)[None, :]
    a = tl.load(x + at[:, None] + d[None, :], mask=ok, other=0.0).to(tl.float32)
    b = tl.load(x + at[:, None] + partner[None, :], mask=ok, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(a * a, 1) / D + eps)[:, None]
        a = a * scale * tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
        b = b * scale * tl.load(weight + partner, mask=d < D, other=0.0).to(tl.float32)[None, :]
    angle = d % HALF
    if HALF % 8 == 0:
        angle = tl.max_contiguous(tl.multiple_of(angle, 8), 8)
    row = table + position[:, None] * D + angle[None, :]
    sin = tl.load(row + HALF, mask=ok, other=0.0)
    return a * tl.load(row, mask=ok, other=0.0) + b * tl.where((d < HALF)[None, :], -sin, sin)


@triton.jit
def _store_head(y, cache, scales, place, scale_at, keep, D: tl.constexpr, BLOCK_D: tl.constexpr, FP8: tl.constexpr):
    """y [N, BLOCK_D] float32 into the cells at `place` [N], with FP8 as `ops.fp8.quantize_heads` makes it."""
    d = tl.arange(0, BLOCK_D)
    if FP8:
        exponent = exponent_for(tl.max(tl.abs(y), 1))
        y = rounded(y * power_of(254 - exponent)[:, None])
        tl.store(scales + scale_at, exponent.to(tl.uint8), mask=keep)
    tl.store(cache + place[:, None] + d[None, :], y.to(cache.dtype.element_ty), mask=keep[:, None] & (d < D)[None, :])


@triton.jit
def write_new(qkv, token, tokens, first_pos, low, high, head, positions, cells, table, k_weight, k_cache, v_cache,
              k_scales, v_scales, token_stride, head_stride, page_stride, cell_stride, cache_head_stride, eps,
              HEADS: tl.constexpr, HEADS_KV: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
              NEW: tl.constexpr, NORM: tl.constexpr, FP8: tl.constexpr):
    """Writes keys and values of one KV head of those of the row's tokens (at most NEW, the first at `first_pos`) whose
    cells are the item's, [low, high); the program may read them afterwards."""
    if (first_pos < high) & (first_pos + tokens > low):
        j = tl.arange(0, NEW)
        keep = (j < tokens) & (first_pos + j >= low) & (first_pos + j < high)
        at = (token + j).to(tl.int64) * token_stride + (HEADS + head) * head_stride
        cell = tl.load(cells + token + j, mask=keep, other=0)
        place = cell // PAGE * page_stride + cell % PAGE * cell_stride + head * cache_head_stride
        scale_at = cell * HEADS_KV + head
        position = tl.load(positions + token + j, mask=keep, other=0)
        k = turned(qkv, at, position, table, k_weight, eps, keep, D, BLOCK_D, NORM)
        _store_head(k, k_cache, k_scales, place, scale_at, keep, D, BLOCK_D, FP8)
        d = tl.arange(0, BLOCK_D)
        v = tl.load(qkv + at[:, None] + HEADS_KV * head_stride + d[None, :],
                    mask=keep[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
        _store_head(v, v_cache, v_scales, place, scale_at, keep, D, BLOCK_D, FP8)
        tl.debug_barrier()  # what other threads wrote is read below
