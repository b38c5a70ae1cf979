"""What stands between the multiplications of a decoder layer, each a torch reference and one Triton launch on CUDA:
RMSNorm; the gate of an MLP; norm of heads, rotation and the write of keys and values.

On CUDA everything is computed in float32 and rounded once; the references round where torch's operations do.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from stretto.ops.fp8 import KVScales
from stretto.ops.gates import GATES
from stretto.ops.kv_write import write_kv_reference

Rope = tuple[torch.Tensor, torch.Tensor]
"""Where to rotate to, as `model.layers.Rotary.at` gives it. CPU: cos and signed sin, each [T, 1, D] float32. CUDA: the
table [positions, D] float32, row p = [cos | sin], and positions [T] int64."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., E] / rms(x) * weight [E], in float32."""
    if not x.is_cuda:
        return F.rms_norm(x, weight.shape, weight, eps)
    from stretto.ops.triton_layer import launch_rms_norm

    return launch_rms_norm(x, weight, eps)


def gate(gate_up: torch.Tensor, act: str) -> torch.Tensor:
    """gate_up [T, 2 F] -> act(first half) * second half, [T, F]. KeyError for an activation that GATES lacks."""
    if not gate_up.is_cuda:
        first, second = gate_up.chunk(2, dim=-1)
        return GATES[act](first).mul_(second)
    from stretto.ops.triton_layer import launch_gate

    return launch_gate(gate_up, act)


def rotate(x: torch.Tensor, rope: Rope) -> torch.Tensor:
    """x [T, H, D], rotated: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin), in float32, rounded once."""
    if not x.is_cuda:
        cos, sin = rope
        return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)
    from stretto.ops.triton_layer import launch_rotate

    return launch_rotate(x, *rope)


@dataclass(frozen=True)
class HeadWeights:
    """RMSNorm of each head before it is rotated."""

    q: torch.Tensor  # [D]
    k: torch.Tensor  # [D]
    eps: float


def rotate_and_write_reference(qkv: torch.Tensor, n_heads: int, rope: Rope, norm: HeadWeights | None,
                               k_cache: torch.Tensor, v_cache: torch.Tensor, cells: torch.Tensor,
                               scales: KVScales | None = None) -> torch.Tensor:
    """qkv [T, H + 2 Hkv, D]; rope as on CUDA; caches [pages, page_size, Hkv, D]; cells [T] int64, page * page_size +
    offset. Norms and rotates q and k, writes k and v into the cells. Returns q [T, H, D]."""
    n_kv, half = (qkv.shape[1] - n_heads) // 2, qkv.shape[2] // 2
    q, k, v = (part.float() for part in qkv.split([n_heads, n_kv, n_kv], 1))
    if norm is not None:
        q = F.rms_norm(q, q.shape[2:], norm.q.float(), norm.eps)
        k = F.rms_norm(k, k.shape[2:], norm.k.float(), norm.eps)
    table, positions = rope
    cos, sin = table[positions][:, None].split(half, -1)

    def turned(x: torch.Tensor) -> torch.Tensor:
        a, b = x.split(half, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    write_kv_reference(turned(k), v, k_cache, v_cache, cells, scales)
    return turned(q).to(qkv.dtype)


def rotate_and_write(qkv: torch.Tensor, n_heads: int, rope: Rope, norm: HeadWeights | None, k_cache: torch.Tensor,
                     v_cache: torch.Tensor, cells: torch.Tensor, scales: KVScales | None = None) -> torch.Tensor:
    """As the reference, on CUDA in one launch: q is changed in place and returned as a view of qkv."""
    from stretto.ops.triton_layer import launch_rotate_and_write

    return launch_rotate_and_write(qkv, n_heads, rope, norm, k_cache, v_cache, cells, scales)
