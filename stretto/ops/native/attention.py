"""Ragged paged attention on CPUs (attention.cpp): what a step and a layer say, as the kernel reads it; its calls."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from stretto.ops.fp8 import KVScales
from stretto.ops.native.layer import ADDRESS, CELLS, FLAG, SIZE, Heads
from stretto.ops.native.library import allocating
from stretto.ragged import RaggedStep

NAME = "attention"


class Layer(ctypes.Structure):
    """`Layer` in attention.cpp."""

    _fields_ = [("k", ADDRESS), ("v", ADDRESS), ("k_scales", ADDRESS), ("v_scales", ADDRESS), ("page_stride", SIZE),
                ("cell_stride", SIZE), ("page_size", SIZE), ("heads", ctypes.c_int32), ("kv_heads", ctypes.c_int32),
                ("head_dim", ctypes.c_int32), ("window", ctypes.c_int32), ("scale", ctypes.c_float),
                ("softcap", ctypes.c_float), ("kind", ctypes.c_int32)]


class _Step(ctypes.Structure):
    """`Step` in attention.cpp."""

    _fields_ = [("q_len", ADDRESS), ("starts", ADDRESS), ("base", ADDRESS), ("slots", ADDRESS), ("table", ADDRESS),
                ("table_stride", SIZE), ("width", SIZE), ("rows", SIZE), ("tokens", SIZE)]


@dataclass(frozen=True)
class BoundStep:
    """A step and one of its groups, with the tensors that it points to."""

    step: _Step
    tensors: tuple[torch.Tensor, ...]
    threads: int


def bound(step: RaggedStep, group: int) -> BoundStep:
    """What all layers of a group share."""
    lengths = [t if t.dtype is torch.int32 and t.is_contiguous() else t.to(torch.int32).contiguous()
               for t in (step.q_len, step.cu_q, step.base)]
    slots, table = step.slots.long().contiguous(), step.page_tables[group]
    assert table.dtype is torch.int32 and table.stride(1) == 1
    made = _Step(*(t.data_ptr() for t in (*lengths, slots, table)), table.stride(0), table.shape[1], len(slots),
                 len(step.ids))
    return BoundStep(made, (*lengths, slots, table), torch.get_num_threads())


def attend_rows(layer: Layer, step: BoundStep, q: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """q [T, H, D], float32 or bfloat16, heads side by side -> [T, H, D]. sinks [H] float32."""
    out = torch.empty(q.shape, dtype=q.dtype)
    _attend_rows()(ctypes.addressof(layer), ctypes.addressof(step.step), q.data_ptr(), q.stride(0),
                   None if sinks is None else sinks.data_ptr(), out.data_ptr(), q.dtype is torch.bfloat16, step.threads)
    return out


def attend_projected(layer: Layer, step: BoundStep, heads: Heads, qkv: torch.Tensor) -> torch.Tensor:
    """qkv [T, H + 2 Hkv, D] as projected, whose q is changed in place -> [T, H, D]."""
    out = torch.empty(qkv.shape[0], layer.heads, qkv.shape[2], dtype=qkv.dtype)
    _attend_projected()(ctypes.addressof(layer), ctypes.addressof(step.step), ctypes.addressof(heads), qkv.data_ptr(),
                        qkv.stride(0), None, out.data_ptr(), qkv.dtype is torch.bfloat16, step.threads)
    return out


def layer_of(n_heads: int, scale: float, window: int | None, softcap: float | None, k_cache: torch.Tensor,
             v_cache: torch.Tensor, scales: KVScales | None) -> Layer:
    """Valid while its tensors are. ValueError for caches whose heads do not lie side by side, or that are not laid out
    alike."""
    page_size, kv_heads, dim = k_cache.shape[1:]
    if k_cache.stride() != v_cache.stride() or k_cache.stride()[2:] != (dim, 1):
        raise ValueError(f"caches of strides {k_cache.stride()} and {v_cache.stride()}: both need one layout whose"
                         f" heads of {dim} lie one after another")
    return Layer(k_cache.data_ptr(), v_cache.data_ptr(), None if scales is None else scales.k.data_ptr(),
                 None if scales is None else scales.v.data_ptr(), k_cache.stride(0), k_cache.stride(1), page_size,
                 n_heads, kv_heads, dim, window or 0, scale, softcap or 0.0, CELLS[k_cache.dtype])


@functools.cache
def _attend_rows() -> Callable[..., int]:
    return allocating(NAME, "attend_rows", ADDRESS, ADDRESS, ADDRESS, SIZE, ADDRESS, ADDRESS, FLAG, FLAG)


@functools.cache
def _attend_projected() -> Callable[..., int]:
    return allocating(NAME, "attend_projected", ADDRESS, ADDRESS, ADDRESS, ADDRESS, SIZE, ADDRESS, ADDRESS, FLAG, FLAG)
