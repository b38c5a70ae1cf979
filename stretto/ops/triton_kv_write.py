"""The Triton kernel behind `kv_write.write_kv`. Imported only where it is going to run."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stretto.ops.fp8 import KVScales
from stretto.ops.triton_fp8 import exponent_for, power_of, rounded


@triton.jit
def _write_kv_kernel(k, v, k_cache, v_cache, cells, k_stride, v_stride, page_stride, cell_stride, PAGE: tl.constexpr,
                     N: tl.constexpr, BLOCK: tl.constexpr):
    """One program a token: N contiguous elements of keys and of values."""
    token = tl.program_id(0).to(tl.int64)
    cell = tl.load(cells + token)
    at = cell // PAGE * page_stride + cell % PAGE * cell_stride
    for start in tl.static_range(0, N, BLOCK):
        i = start + tl.arange(0, BLOCK)
        key = tl.load(k + token * k_stride + i, mask=i < N)
        value = tl.load(v + token * v_stride + i, mask=i < N)
        tl.store(k_cache + at + i, key.to(k_cache.dtype.element_ty), mask=i < N)
        tl.store(v_cache + at + i, value.to(v_cache.dtype.element_ty), mask=i < N)


@triton.jit
def _write_head(x, cache, exponents, d, D: tl.constexpr):
    """One head in e4m3, and the exponent of its scale."""
    a = tl.load(x + d, mask=d < D, other=0.0).to(tl.float32)
    exponent = exponent_for(tl.max(tl.abs(a), 0))
    tl.store(cache + d, rounded(a * power_of(254 - exponent)).to(cache.dtype.element_ty), mask=d < D)
    tl.store(exponents, exponent.to(tl.uint8))


@triton.jit
def _write_fp8_kernel(k, v, k_cache, v_cache, k_scales, v_scales, cells, k_stride, v_stride, page_stride, cell_stride,
                      PAGE: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """One program for a head of a token."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK)
    cell = tl.load(cells + token)
    at = cell // PAGE * page_stride + cell % PAGE * cell_stride + head * D
    _write_head(k + token * k_stride + head * D, k_cache + at, k_scales + cell * HEADS + head, d, D)
    _write_head(v + token * v_stride + head * D, v_cache + at, v_scales + cell * HEADS + head, d, D)


def launch_write_kv(k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
                    cells: torch.Tensor, scales: KVScales | None = None) -> None:
    """Arguments as `write_kv`, already checked."""
    if scales is not None:
        heads, dim = k.shape[1:]
        _write_fp8_kernel[(k.shape[0], heads)](
            k, v, k_cache, v_cache, *scales, cells, k.stride(0), v.stride(0), k_cache.stride(0), k_cache.stride(1),
            PAGE=k_cache.shape[1], HEADS=heads, D=dim, BLOCK=triton.next_power_of_2(dim), num_warps=1)
        return
    n = k.shape[1] * k.shape[2]
    _write_kv_kernel[(k.shape[0],)](
        k, v, k_cache, v_cache, cells, k.stride(0), v.stride(0), k_cache.stride(0), k_cache.stride(1),
        PAGE=k_cache.shape[1], N=n, BLOCK=min(triton.next_power_of_2(n), 2048), num_warps=4)
