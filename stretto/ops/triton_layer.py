"""The Triton kernels behind `layer.py`. Imported only where they are going to run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from stretto.ops.launch import dependent, overlaps
from stretto.ops.triton_fp8 import exponent_for, power_of, rounded
from stretto.ops.triton_launch import begin

if TYPE_CHECKING:
    from stretto.ops.fp8 import KVScales
    from stretto.ops.layer import HeadWeights, Rope

HEADS = 8  # of one program of the rotation


@triton.jit(do_not_specialize=["eps"])
def rms_norm_kernel(x, weight, out, x_stride, size, eps, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One program a row."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    w = tl.load(weight + i, mask=i < size, other=0.0).to(tl.float32)  # weights may be read before the wait
    begin(PDL)
    a = tl.load(x + row * x_stride + i, mask=i < size, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(a * a, 0) / size + eps)
    tl.store(out + row * size + i, (a * scale * w).to(out.dtype.element_ty), mask=i < size)


@triton.jit
def _tanh(x):
    return 2.0 / (1.0 + tl.exp(-2.0 * x)) - 1.0


@triton.jit
def activate(x, ACT: tl.constexpr):
    if ACT == "silu":
        y = x / (1.0 + tl.exp(-x))
    elif ACT == "gelu_tanh":
        y = 0.5 * x * (1.0 + _tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    elif ACT == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        y = tl.maximum(x, 0.0)
    return y


@triton.jit
def gate_kernel(gate_up, out, size, ACT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One program for BLOCK outputs of a row."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin(PDL)
    a = tl.load(gate_up + row * 2 * size + i, mask=i < size, other=0.0).to(tl.float32)
    b = tl.load(gate_up + row * 2 * size + size + i, mask=i < size, other=0.0).to(tl.float32)
    tl.store(out + row * size + i, (activate(a, ACT) * b).to(out.dtype.element_ty), mask=i < size)


@triton.jit
def rotate_kernel(x, out, table, positions, q_weight, k_weight, k_cache, v_cache, k_scales, v_scales, cells, x_stride,
                  out_stride, page_stride, cell_stride, eps, N_Q: tl.constexpr, N_K: tl.constexpr, N_V: tl.constexpr,
                  PAGE: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, NORM: tl.constexpr,
                  WRITE: tl.constexpr, FP8: tl.constexpr, PDL: tl.constexpr):
    """One program for some heads of a token. q heads go to `out`; with WRITE, k and v heads to the token's cell, with
    FP8 in e4m3 with a scale for each."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, HALF)
    ok = (head < N_Q + N_K + N_V)[:, None] & (d < D // 2)[None, :]
    begin(PDL)
    at = x + token * x_stride + head[:, None] * D + d[None, :]
    a = tl.load(at, mask=ok, other=0.0).to(tl.float32)
    b = tl.load(at + D // 2, mask=ok, other=0.0).to(tl.float32)
    is_v = (head >= N_Q + N_K)[:, None]
    if NORM:
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + eps)[:, None]
        is_q = (head < N_Q)[:, None]
        inside = (d < D // 2)[None, :]
        first = tl.where(is_q, tl.load(q_weight + d[None, :], mask=inside, other=0.0).to(tl.float32),
                         tl.load(k_weight + d[None, :], mask=inside, other=0.0).to(tl.float32))
        second = tl.where(is_q, tl.load(q_weight + D // 2 + d[None, :], mask=inside, other=0.0).to(tl.float32),
                          tl.load(k_weight + D // 2 + d[None, :], mask=inside, other=0.0).to(tl.float32))
        a = tl.where(is_v, a, a * scale * first)
        b = tl.where(is_v, b, b * scale * second)
    row = table + tl.load(positions + token) * D + d
    cos = tl.load(row, mask=d < D // 2, other=0.0)[None, :]
    sin = tl.load(row + D // 2, mask=d < D // 2, other=0.0)[None, :]
    y1 = tl.where(is_v, a, a * cos - b * sin)
    y2 = tl.where(is_v, b, b * cos + a * sin)
    to = out + token * out_stride + head[:, None] * D + d[None, :]
    to_q = ok & (head < N_Q)[:, None]
    tl.store(to, y1.to(out.dtype.element_ty), mask=to_q)
    tl.store(to + D // 2, y2.to(out.dtype.element_ty), mask=to_q)
    if WRITE:
        cell = tl.load(cells + token)
        place = cell // PAGE * page_stride + cell % PAGE * cell_stride
        k_head = (head >= N_Q) & (head < N_Q + N_K)
        if FP8:
            exponent = exponent_for(tl.maximum(tl.max(tl.abs(y1), 1), tl.max(tl.abs(y2), 1)))
            y1 = rounded(y1 * power_of(254 - exponent)[:, None])
            y2 = rounded(y2 * power_of(254 - exponent)[:, None])
            v_head = (head >= N_Q + N_K) & (head < N_Q + N_K + N_V)
            tl.store(k_scales + cell * N_K + head - N_Q, exponent.to(tl.uint8), mask=k_head)
            tl.store(v_scales + cell * N_V + head - N_Q - N_K, exponent.to(tl.uint8), mask=v_head)
        to_k = k_cache + place + (head - N_Q)[:, None] * D + d[None, :]
        is_k = ok & k_head[:, None]
        tl.store(to_k, y1.to(k_cache.dtype.element_ty), mask=is_k)
        tl.store(to_k + D // 2, y2.to(k_cache.dtype.element_ty), mask=is_k)
        to_v = v_cache + place + (head - N_Q - N_K)[:, None] * D + d[None, :]
        tl.store(to_v, y1.to(v_cache.dtype.element_ty), mask=ok & is_v)
        tl.store(to_v + D // 2, y2.to(v_cache.dtype.element_ty), mask=ok & is_v)


ACTS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu": "gelu",
        "relu": "relu"}


def launch_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., E], whose last dimension is contiguous and whose rows lie at one distance."""
    size = x.shape[-1]
    rows = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, size).contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if len(rows):
        block = triton.next_power_of_2(size)
        rms_norm_kernel[(len(rows),)](rows, weight, out, rows.stride(0), size, eps, BLOCK=block,
                                      PDL=overlaps(x.device), num_warps=max(1, min(8, block // 512)),
                                      **dependent(x.device))
    return out


def launch_gate(gate_up: torch.Tensor, act: str) -> torch.Tensor:
    gate_up = gate_up.contiguous()
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, size, dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        block = min(1024, triton.next_power_of_2(size))
        gate_kernel[(rows, triton.cdiv(size, block))](gate_up, out, size, ACT=ACTS[act], BLOCK=block,
                                                      PDL=overlaps(out.device), num_warps=4, **dependent(out.device))
    return out


def _heads_contiguous(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def launch_rotate(x: torch.Tensor, rope: Rope) -> torch.Tensor:
    x = _heads_contiguous(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if len(x):
        _launch_rotation(x, out, rope, None, out, out, rope.positions, x.shape[1], 0)
    return out


def launch_rotate_and_write(qkv: torch.Tensor, n_heads: int, rope: Rope, norm: HeadWeights | None,
                            k_cache: torch.Tensor, v_cache: torch.Tensor, cells: torch.Tensor,
                            scales: KVScales | None = None) -> torch.Tensor:
    """ValueError for caches whose heads are not contiguous or that are not laid out alike."""
    n_kv = (qkv.shape[1] - n_heads) // 2
    head_dim = qkv.shape[2]
    if k_cache.stride() != v_cache.stride() or k_cache.stride()[2:] != (head_dim, 1):
        raise ValueError(f"caches of strides {k_cache.stride()} and {v_cache.stride()}: both need one layout whose"
                         f" heads of {head_dim} lie one after another")
    qkv = _heads_contiguous(qkv)
    if len(qkv):
        _launch_rotation(qkv, qkv, rope, norm, k_cache, v_cache, cells, n_heads, n_kv, scales)
    return qkv[:, :n_heads]


def _launch_rotation(x: torch.Tensor, out: torch.Tensor, rope: Rope, norm: HeadWeights | None, k_cache: torch.Tensor,
                     v_cache: torch.Tensor, cells: torch.Tensor, n_heads: int, n_kv: int,
                     scales: KVScales | None = None) -> None:
    head_dim, write = x.shape[2], n_kv > 0
    heads = n_heads + 2 * n_kv
    rotate_kernel[(len(x), triton.cdiv(heads, HEADS))](
        x, out, rope.table, rope.positions, *((rope.table, rope.table) if norm is None else (norm.q, norm.k)), k_cache,
        v_cache, *(scales or (cells, cells)), cells, x.stride(0), out.stride(0), k_cache.stride(0), k_cache.stride(1),
        0.0 if norm is None else norm.eps, N_Q=n_heads, N_K=n_kv, N_V=n_kv, PAGE=k_cache.shape[1] if write else 1,
        D=head_dim, HALF=triton.next_power_of_2(head_dim // 2), HEADS=HEADS, NORM=norm is not None, WRITE=write,
        FP8=scales is not None, PDL=overlaps(x.device), num_warps=2, **dependent(x.device))
