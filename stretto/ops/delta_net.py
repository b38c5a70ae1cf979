"""What stands around the gated delta rule in a layer: its inputs, made of projections, and the gate of what it answers.
Each a torch reference and one Triton launch on CUDA, where everything is computed in float32 and rounded once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

from stretto.ops.fixed import by_rows

EPS = 1e-6  # of the lengths of q and k


class DeltaInputs(NamedTuple):
    """As `recurrent.gated_delta_rule` takes them, float32."""

    q: torch.Tensor  # [T, Hk, K]
    k: torch.Tensor  # [T, Hk, K]
    decay: torch.Tensor  # [T, Hv]
    beta: torch.Tensor  # [T, Hv]


def delta_inputs(q: torch.Tensor, k: torch.Tensor, a: torch.Tensor, b: torch.Tensor, log_rate: torch.Tensor,
                 bias: torch.Tensor, fixed: bool = False) -> DeltaInputs:
    """q and k [T, Hk, K] float32 at length 1, q by K**-0.5; decay = -exp(log_rate) softplus(a + bias) and beta =
    sigmoid(b), from a, b [T, Hv] and log_rate, bias [Hv]. `fixed`: rounding may not depend on the batch."""
    if not q.is_cuda:
        return delta_inputs_reference(q, k, a, b, log_rate, bias, fixed)
    from stretto.ops.triton_delta_net import launch_delta_inputs

    return DeltaInputs(*launch_delta_inputs(q, k, a, b, log_rate, bias, EPS))


def delta_inputs_reference(q: torch.Tensor, k: torch.Tensor, a: torch.Tensor, b: torch.Tensor, log_rate: torch.Tensor,
                           bias: torch.Tensor, fixed: bool = False) -> DeltaInputs:
    """`delta_inputs` in torch's operations."""
    rows = _rows(fixed)
    decay = rows(lambda x: -log_rate.float().exp() * F.softplus(x.float() + bias.float()), a)
    return DeltaInputs(rows(_unit, q) * q.shape[2] ** -0.5, rows(_unit, k), decay, rows(_sigmoid, b))


def gated_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype,
               fixed: bool = False) -> torch.Tensor:
    """RMSNorm of each head times silu(gate): x [T, H, D] float32, gate [T, H * D], weight [D] -> [T, H * D] of `dtype`.
    `fixed`: rounding may not depend on the batch."""
    if not x.is_cuda:
        return gated_norm_reference(x, gate, weight, eps, dtype, fixed)
    from stretto.ops.triton_delta_net import launch_gated_norm

    return launch_gated_norm(x, gate, weight, eps, dtype)


def gated_norm_reference(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype,
                         fixed: bool = False) -> torch.Tensor:
    """`gated_norm` in torch's operations."""
    made = _rows(fixed)(partial(_gated, weight=weight.float(), eps=eps), x, gate.unflatten(1, x.shape[1:]))
    return made.flatten(1).to(dtype)


def _rows(fixed: bool) -> Callable[..., torch.Tensor]:
    """(fn, tensors) -> fn of all rows, or of a fixed number of them at a time."""
    return by_rows if fixed else lambda fn, *tensors: fn(*tensors)


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * (x.square().sum(-1, keepdim=True) + EPS).rsqrt()


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    return x.float().sigmoid()


def _gated(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, x.shape[2:], weight, eps) * F.silu(gate.float())
