"""What stands between the products of a layer, on CPUs (layer.cpp): the launches behind `ops.layer`, in float32 and
rounded once, each row by itself."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from stretto.ops.fp8 import KV_FP8, KVScales
from stretto.ops.native.library import allocating, function, library

if TYPE_CHECKING:
    from stretto.ops.layer import HeadWeights, Rope

NAME = "layer"
TYPES = (torch.float32, torch.bfloat16)  # of activations
CELLS = {torch.float32: 0, torch.bfloat16: 1, KV_FP8: 2}
ACTS = {"silu": 0, "swish": 0, "gelu_pytorch_tanh": 1, "gelu_new": 1, "gelu": 2, "relu": 3}
ADDRESS, SIZE, FLAG = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


class Heads(ctypes.Structure):
    """`Heads` in heads.h."""

    _fields_ = [("table", ADDRESS), ("positions", ADDRESS), ("q_norm", ADDRESS), ("k_norm", ADDRESS), ("k", ADDRESS),
                ("v", ADDRESS), ("k_scales", ADDRESS), ("v_scales", ADDRESS), ("cells", ADDRESS), ("page_stride", SIZE),
                ("cell_stride", SIZE), ("page_size", SIZE), ("q_heads", ctypes.c_int32), ("kv_heads", ctypes.c_int32),
                ("head_dim", ctypes.c_int32), ("eps", ctypes.c_float), ("wide_norm", ctypes.c_int32),
                ("kind", ctypes.c_int32)]


class Norm(ctypes.Structure):
    """`Norm` in layer.cpp."""

    _fields_ = [("weight", ADDRESS), ("eps", ctypes.c_float), ("wide", ctypes.c_int32)]


class Product(ctypes.Structure):
    """`Product` in layer.cpp."""

    _fields_ = [("multiply", ADDRESS), ("matrix", ADDRESS), ("bias", ADDRESS), ("outputs", SIZE),
                ("inputs", SIZE)]


@functools.cache
def there() -> bool:
    """Whether this machine has these kernels; if not, `library.trouble` says why."""
    return library(NAME) is not None


def takes(x: torch.Tensor) -> bool:
    """Whether there are kernels for activations like x."""
    return x.dtype in TYPES and x.device.type == "cpu" and there()


def launch_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., E] that `takes`; the weight in its type or in float32."""
    size, by = x.shape[-1], _by(weight, eps, x)
    rows = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, size).contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    _norm()(rows.data_ptr(), rows.stride(0), rows.shape[0], size, by.weight, eps, out.data_ptr(),
            x.dtype is torch.bfloat16, by.wide, torch.get_num_threads())
    return out


def _by(weight: torch.Tensor, eps: float, x: torch.Tensor) -> Norm:
    assert weight.dtype in (x.dtype, torch.float32) and weight.shape == x.shape[-1:] and weight.is_contiguous()
    return Norm(weight.data_ptr(), eps, weight.dtype is torch.float32)


def launch_gate(gate_up: torch.Tensor, act: str) -> torch.Tensor:
    """gate_up [T, 2 F] that `takes` -> [T, F]. KeyError for an activation that ACTS lacks."""
    gate_up = gate_up if gate_up.stride(1) == 1 else gate_up.contiguous()
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, size, dtype=gate_up.dtype)
    _gate()(gate_up.data_ptr(), gate_up.stride(0), rows, size, ACTS[act], out.data_ptr(),
            gate_up.dtype is torch.bfloat16, torch.get_num_threads())
    return out


def launch_normed(x: torch.Tensor, weight: torch.Tensor, eps: float, product: Product,
                  act: str | None) -> torch.Tensor:
    """x [T, inputs] that `takes`, columns side by side: normed, by a matrix, -> [T, outputs]; with `act` the gate of
    that, [T, outputs / 2]."""
    by = _by(weight, eps, x)
    rows, size = x.shape
    assert size == product.inputs and x.stride(1) == 1
    out = x.new_empty(rows, product.outputs if act is None else product.outputs // 2)
    _normed()(ctypes.addressof(by), ctypes.addressof(product), x.data_ptr(), x.stride(0), rows, size,
              -1 if act is None else ACTS[act], out.data_ptr(), x.dtype is torch.bfloat16, torch.get_num_threads())
    return out


def launch_add_mlp(residual: torch.Tensor, weight: torch.Tensor, eps: float, gate_up: Product, act: str,
                   down: Product) -> torch.Tensor:
    """residual [T, E] that `takes`, columns side by side, += what an MLP makes of it, normed. Returns it."""
    by = _by(weight, eps, residual)
    rows, size = residual.shape
    assert size == gate_up.inputs == down.outputs and gate_up.outputs == 2 * down.inputs and residual.stride(1) == 1
    _add_mlp()(ctypes.addressof(by), ctypes.addressof(gate_up), ACTS[act], ctypes.addressof(down), residual.data_ptr(),
               residual.stride(0), rows, size, residual.dtype is torch.bfloat16,
               torch.get_num_threads())
    return residual


def launch_rotate(x: torch.Tensor, rope: Rope) -> torch.Tensor:
    """x [T, H, D] that `takes`."""
    x = heads_together(x)
    out, heads = torch.empty(x.shape, dtype=x.dtype), heads_of(x, x.shape[1], rope, None)
    _rotate()(ctypes.addressof(heads), x.shape[0], x.data_ptr(), x.stride(0), out.data_ptr(), out.stride(0),
              x.dtype is torch.bfloat16, torch.get_num_threads())
    return out


def launch_rotate_and_write(qkv: torch.Tensor, n_heads: int, rope: Rope, norm: HeadWeights | None,
                            k_cache: torch.Tensor, v_cache: torch.Tensor, cells: torch.Tensor,
                            scales: KVScales | None = None) -> torch.Tensor:
    """As `ops.layer.rotate_and_write`, of heads that `takes`. q is changed in place, and returned as a view of qkv."""
    qkv = heads_together(qkv)
    heads = heads_of(qkv, n_heads, rope, norm, k_cache, v_cache, cells, scales)
    _rotate()(ctypes.addressof(heads), qkv.shape[0], qkv.data_ptr(), qkv.stride(0), qkv.data_ptr(), qkv.stride(0),
              qkv.dtype is torch.bfloat16, torch.get_num_threads())
    return qkv[:, :n_heads]


def heads_together(x: torch.Tensor) -> torch.Tensor:
    """x [T, H, D], the heads of a token side by side."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def heads_of(qkv: torch.Tensor, n_heads: int, rope: Rope, norm: HeadWeights | None,
             k_cache: torch.Tensor | None = None, v_cache: torch.Tensor | None = None,
             cells: torch.Tensor | None = None, scales: KVScales | None = None) -> Heads:
    """For qkv [T, H + 2 Hkv, D]; without caches [T, H, D]. ValueError for caches whose heads do not lie side by side,
    or that are not laid out alike. Valid while its tensors are."""
    dim = qkv.shape[2]
    assert rope.addressable
    assert norm is None or (norm.q.dtype is norm.k.dtype and norm.q.dtype in (qkv.dtype, torch.float32)
                            and norm.q.shape == norm.k.shape == (dim,))
    norms = (None, None, 0.0, 0) if norm is None else (norm.q.data_ptr(), norm.k.data_ptr(), norm.eps,
                                                       norm.q.dtype is torch.float32)
    if k_cache is None or v_cache is None or cells is None:
        return Heads(rope.table.data_ptr(), rope.positions.data_ptr(), norms[0], norms[1], q_heads=n_heads,
                     head_dim=dim, eps=norms[2], wide_norm=norms[3])
    assert cells.dtype is torch.int64
    if k_cache.stride() != v_cache.stride() or k_cache.stride()[2:] != (dim, 1):
        raise ValueError(f"caches of strides {k_cache.stride()} and {v_cache.stride()}: both need one layout whose"
                         f" heads of {dim} lie one after another")
    return Heads(rope.table.data_ptr(), rope.positions.data_ptr(), norms[0], norms[1], k_cache.data_ptr(),
                 v_cache.data_ptr(), None if scales is None else scales.k.data_ptr(),
                 None if scales is None else scales.v.data_ptr(), cells.data_ptr(), k_cache.stride(0),
                 k_cache.stride(1), k_cache.shape[1], n_heads, (qkv.shape[1] - n_heads) // 2, dim, norms[2], norms[3],
                 CELLS[k_cache.dtype])


@functools.cache
def _norm() -> Callable[..., None]:
    return function(NAME, "norm", ADDRESS, SIZE, SIZE, SIZE, ADDRESS, ctypes.c_float, ADDRESS, FLAG, FLAG, FLAG)


@functools.cache
def _gate() -> Callable[..., None]:
    return function(NAME, "gate", ADDRESS, SIZE, SIZE, SIZE, FLAG, ADDRESS, FLAG, FLAG)


@functools.cache
def _normed() -> Callable[..., int]:
    return allocating(NAME, "normed_product", ADDRESS, ADDRESS, ADDRESS, SIZE, SIZE, SIZE, FLAG, ADDRESS, FLAG, FLAG)


@functools.cache
def _add_mlp() -> Callable[..., int]:
    return allocating(NAME, "add_mlp", ADDRESS, ADDRESS, FLAG, ADDRESS, ADDRESS, SIZE, SIZE, SIZE, FLAG, FLAG)


@functools.cache
def _rotate() -> Callable[..., None]:
    return function(NAME, "rotate_heads", ADDRESS, SIZE, ADDRESS, SIZE, ADDRESS, SIZE, FLAG, FLAG)
