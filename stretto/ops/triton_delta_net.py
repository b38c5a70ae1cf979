"""The Triton kernels behind `delta_net.py`. Imported only where they are going to run."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stretto.ops.launch import dependent, overlaps
from stretto.ops.triton_launch import begin


@triton.jit(do_not_specialize=["scale", "eps"])
def delta_inputs_kernel(q, k, a, b, log_rate, bias, q_out, k_out, decay, beta, x_stride, a_stride, scale, eps,
                        HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, K: tl.constexpr, BLOCK_H: tl.constexpr,
                        BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PDL: tl.constexpr):
    """One program a token and BLOCK_H heads of keys; the first of a token's makes its decays and shares."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    h, i, v = part * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    ok, at = (h < HEADS)[:, None] & (i < K)[None, :], h[:, None] * K + i[None, :]
    mine = (v < VALUE_HEADS) & (part == 0)
    rate = tl.exp(tl.load(log_rate + v, mask=mine, other=0.0).to(tl.float32))
    shift = tl.load(bias + v, mask=mine, other=0.0).to(tl.float32)
    begin(PDL)
    x = tl.load(q + token * x_stride + at, mask=ok, other=0.0)
    tl.store(q_out + token * HEADS * K + at, x * (tl.rsqrt(tl.sum(x * x, 1) + eps) * scale)[:, None], mask=ok)
    x = tl.load(k + token * x_stride + at, mask=ok, other=0.0)
    tl.store(k_out + token * HEADS * K + at, x * tl.rsqrt(tl.sum(x * x, 1) + eps)[:, None], mask=ok)
    step = tl.load(a + token * a_stride + v, mask=mine, other=0.0).to(tl.float32) + shift
    soft = tl.where(step > 20.0, step, tl.log(1.0 + tl.exp(tl.minimum(step, 20.0))))
    tl.store(decay + token * VALUE_HEADS + v, -rate * soft, mask=mine)
    share = tl.load(b + token * a_stride + v, mask=mine, other=0.0).to(tl.float32)
    tl.store(beta + token * VALUE_HEADS + v, 1.0 / (1.0 + tl.exp(-share)), mask=mine)


def launch_delta_inputs(q: torch.Tensor, k: torch.Tensor, a: torch.Tensor, b: torch.Tensor, log_rate: torch.Tensor,
                        bias: torch.Tensor, eps: float) -> tuple[torch.Tensor, ...]:
    """The fields of `delta_net.DeltaInputs`; q and k, a and b of one layout each. `eps`: of lengths."""
    (n, heads, size), values = q.shape, a.shape[1]
    assert q.stride() == k.stride() and q.stride()[1:] == (size, 1) and a.stride() == b.stride() and a.stride(1) == 1
    out = (*(torch.empty(n, heads, size, dtype=torch.float32, device=q.device) for _ in "qk"),
           *(torch.empty(n, values, dtype=torch.float32, device=q.device) for _ in "ab"))
    if n:
        each = min(4, triton.next_power_of_2(heads))
        delta_inputs_kernel[n, triton.cdiv(heads, each)](
            q, k, a, b, log_rate, bias, *out, q.stride(0), a.stride(0), size**-0.5, eps, HEADS=heads,
            VALUE_HEADS=values, K=size, BLOCK_H=each, BLOCK_K=triton.next_power_of_2(size),
            BLOCK_V=triton.next_power_of_2(values), PDL=overlaps(q.device), num_warps=4, **dependent(q.device))
    return out


@triton.jit(do_not_specialize=["eps"])
def gated_norm_kernel(x, gate, weight, out, gate_stride, eps, HEADS: tl.constexpr, D: tl.constexpr,
                      BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr):
    """One program: BLOCK_H heads of a token."""
    token = tl.program_id(0).to(tl.int64)
    h, d = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    ok, at = (h < HEADS)[:, None] & (d < D)[None, :], h[:, None] * D + d[None, :]
    w = tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)
    begin(PDL)
    made = tl.load(x + token * HEADS * D + at, mask=ok, other=0.0)
    z = tl.load(gate + token * gate_stride + at, mask=ok, other=0.0).to(tl.float32)
    made = made * tl.rsqrt(tl.sum(made * made, 1) / D + eps)[:, None] * w[None, :] * z / (1.0 + tl.exp(-z))
    tl.store(out + token * HEADS * D + at, made.to(out.dtype.element_ty), mask=ok)


def launch_gated_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float,
                      dtype: torch.dtype) -> torch.Tensor:
    """Arguments as `delta_net.gated_norm`."""
    n, heads, size = x.shape
    assert x.is_contiguous() and gate.stride(1) == 1
    out = torch.empty(n, heads * size, dtype=dtype, device=x.device)
    if n:
        each = min(8, triton.next_power_of_2(heads))
        gated_norm_kernel[n, triton.cdiv(heads, each)](
            x, gate, weight, out, gate.stride(0), eps, HEADS=heads, D=size, BLOCK_H=each,
            BLOCK_D=triton.next_power_of_2(size), PDL=overlaps(x.device), num_warps=4, **dependent(x.device))
    return out
