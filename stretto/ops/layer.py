"""What stands between the multiplications of a decoder layer: RMSNorm; the gate of an MLP; norm of heads, rotation and
the write of keys and values. Each is a torch reference; one Triton launch on CUDA; and on a CPU one call of a native
kernel, where the machine has these and the activations are of their types.

The kernels compute in float32 and round once; the references round where torch's operations do.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F

from stretto.ops.fp8 import KVScales
from stretto.ops.gates import GATES
from stretto.ops.kv_write import write_kv_reference
from stretto.ops.native import layer as native


@dataclass(frozen=True)
class Rope:
    """Where tokens are rotated to."""

    table: torch.Tensor  # [positions, D] float32, row p = [cos | sin]
    positions: torch.Tensor  # [T] int64, without gaps

    @cached_property
    def addressable(self) -> bool:
        """Whether both are what kernels find at an address."""
        return (self.table.dtype is torch.float32 and self.positions.dtype is torch.int64
                and self.table.is_contiguous() and self.positions.is_contiguous())

    @cached_property
    def angles(self) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and signed sin of each token, [T, 1, D]: what torch's operations need, once for all layers."""
        cos, sin = self.table[self.positions].unsqueeze(1).chunk(2, dim=-1)
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def fused(x: torch.Tensor) -> bool:
    """Whether kernels do all of this for activations like x, in float32 whatever they read."""
    return x.is_cuda or native.takes(x)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., E] / rms(x) * weight [E], in float32."""
    if native.takes(x):
        return native.launch_rms_norm(x, weight, eps)
    if not x.is_cuda:
        return F.rms_norm(x, weight.shape, weight, eps)
    from stretto.ops.triton_layer import launch_rms_norm

    return launch_rms_norm(x, weight, eps)


def gate(gate_up: torch.Tensor, act: str) -> torch.Tensor:
    """gate_up [T, 2 F] -> act(first half) * second half, [T, F]. KeyError for an activation that GATES lacks."""
    if native.takes(gate_up):
        return native.launch_gate(gate_up, act)
    if not gate_up.is_cuda:
        first, second = gate_up.chunk(2, dim=-1)
        return GATES[act](first).mul_(second)
    from stretto.ops.triton_layer import launch_gate

    return launch_gate(gate_up, act)


def rotate(x: torch.Tensor, rope: Rope) -> torch.Tensor:
    """x [T, H, D], rotated: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin), in float32, rounded once."""
    if native.takes(x):
        return native.launch_rotate(x, rope)
    if not x.is_cuda:
        cos, sin = rope.angles
        return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)
    from stretto.ops.triton_layer import launch_rotate

    return launch_rotate(x, rope)


@dataclass(frozen=True)
class HeadWeights:
    """RMSNorm of each head before it is rotated."""

    q: torch.Tensor  # [D]
    k: torch.Tensor  # [D]
    eps: float


def rotate_and_write_reference(qkv: torch.Tensor, n_heads: int, rope: Rope, norm: HeadWeights | None,
                               k_cache: torch.Tensor, v_cache: torch.Tensor, cells: torch.Tensor,
                               scales: KVScales | None = None) -> torch.Tensor:
    """qkv [T, H + 2 Hkv, D]; caches [pages, page_size, Hkv, D]; cells [T] int64, page * page_size +
    offset. Norms and rotates q and k, writes k and v into the cells. Returns q [T, H, D]."""
    n_kv, half = (qkv.shape[1] - n_heads) // 2, qkv.shape[2] // 2
    q, k, v = (part.float() for part in qkv.split([n_heads, n_kv, n_kv], 1))
    if norm is not None:
        q = F.rms_norm(q, q.shape[2:], norm.q.float(), norm.eps)
        k = F.rms_norm(k, k.shape[2:], norm.k.float(), norm.eps)
    cos, sin = rope.table[rope.positions][:, None].split(half, -1)

    def turned(x: torch.Tensor) -> torch.Tensor:
        a, b = x.split(half, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    write_kv_reference(turned(k), v, k_cache, v_cache, cells, scales)
    return turned(q).to(qkv.dtype)


def rotate_and_write(qkv: torch.Tensor, n_heads: int, rope: Rope, norm: HeadWeights | None, k_cache: torch.Tensor,
                     v_cache: torch.Tensor, cells: torch.Tensor, scales: KVScales | None = None) -> torch.Tensor:
    """As the reference, in one launch or call: q is changed in place and returned as a view of qkv. On a CPU: of heads
    that the native kernels take."""
    if not qkv.is_cuda:
        return native.launch_rotate_and_write(qkv, n_heads, rope, norm, k_cache, v_cache, cells, scales)
    from stretto.ops.triton_layer import launch_rotate_and_write

    return launch_rotate_and_write(qkv, n_heads, rope, norm, k_cache, v_cache, cells, scales)
