"""The Triton kernel behind `kv_write.write_kv`. Imported only where it is going to run."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


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


def launch_write_kv(k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
                    cells: torch.Tensor) -> None:
    """Arguments as `write_kv`, already checked."""
    n = k.shape[1] * k.shape[2]
    _write_kv_kernel[(k.shape[0],)](
        k, v, k_cache, v_cache, cells, k.stride(0), v.stride(0), k_cache.stride(0), k_cache.stride(1),
        PAGE=k_cache.shape[1], N=n, BLOCK=min(triton.next_power_of_2(n), 2048), num_warps=4)
