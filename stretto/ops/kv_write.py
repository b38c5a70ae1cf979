"""Writes the keys and values of a step into their cells: a torch reference, and one Triton launch on CUDA."""

from __future__ import annotations

import torch

from stretto.ops.fp8 import KVScales, quantize_heads


def write_kv_reference(k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
                       cells: torch.Tensor, scales: KVScales | None = None) -> None:
    """k and v [T, Hkv, D]; caches [pages, page_size, Hkv, D], written in place; cells [T] int64, page * page_size +
    offset. Cells of padding tokens may repeat: any of their values stays. `scales`: of e4m3 caches."""
    page, offset = cells // k_cache.shape[1], cells % k_cache.shape[1]
    if scales is None:
        k_cache[page, offset] = k.to(k_cache.dtype)
        v_cache[page, offset] = v.to(v_cache.dtype)
        return
    for values, cache, exponents in ((k, k_cache, scales.k), (v, v_cache, scales.v)):
        codes, exponents[page, offset] = quantize_heads(values)
        cache.view(torch.uint8)[page, offset] = codes.view(torch.uint8)


def _check(k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
           cells: torch.Tensor) -> None:
    if k.shape != v.shape or k.shape[1:] != k_cache.shape[2:] or cells.shape != k.shape[:1]:
        raise ValueError(f"keys {tuple(k.shape)}, values {tuple(v.shape)}, cells {tuple(cells.shape)} and caches"
                         f" {tuple(k_cache.shape)} do not fit: T tokens need [T, Hkv, D] twice, [T] and"
                         " [pages, page_size, Hkv, D]")
    if k_cache.stride() != v_cache.stride():
        raise ValueError(f"the strides of the caches differ, {k_cache.stride()} and {v_cache.stride()}: give both one"
                         " layout")
    for name, t in (("keys", k), ("values", v), ("cache", k_cache[0])):
        if t.stride()[1:] != (t.shape[2], 1):
            raise ValueError(f"the heads of the {name} are not contiguous (strides {t.stride()}): call contiguous()")


def write_kv(k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
             cells: torch.Tensor, scales: KVScales | None = None) -> None:
    """As `write_kv_reference`, in one launch without synchronisation on CUDA. ValueError for shapes or layouts that do
    not fit; tokens may be strided (a slice of a fused projection), heads may not."""
    if not k.is_cuda:
        write_kv_reference(k, v, k_cache, v_cache, cells, scales)
        return
    from stretto.ops.triton_kv_write import launch_write_kv

    _check(k, v, k_cache, v_cache, cells)
    launch_write_kv(k, v, k_cache, v_cache, cells, scales)
