"""Layers of draft heads, for training. Names of modules are those of the tensors in the checkpoints.

Drafts are trained from anchors: each anchor's queries see the context before it, and their own block or chain.

    queries [B, A, S]       keys  | context [B, T], of which each anchor sees a part | own [B, A, S'], all of them |
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

Keys = tuple[torch.Tensor, torch.Tensor]  # keys and values


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.float()
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Rotary(nn.Module):
    """Halves rotated: pairs (i, i + D/2) turn by position * theta^(-2i/D)."""

    def __init__(self, head_dim: int, theta: float):
        super().__init__()
        self.register_buffer("rate", theta ** (-torch.arange(0, head_dim, 2).float() / head_dim), persistent=False)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x [..., H, D], positions [...]."""
        angle = positions[..., None, None].float() * self.rate
        cos, sin = angle.cos(), angle.sin()
        a, b = x.float().chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int, kv_heads: int, head_dim: int, eps: float, *, inputs: int | None = None,
                 head_norm: bool = False):
        super().__init__()
        self.shape, self.repeat = (-1, head_dim), heads // kv_heads
        self.q_proj = nn.Linear(inputs or hidden, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(inputs or hidden, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(inputs or hidden, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, hidden, bias=False)
        self.q_norm = RMSNorm(head_dim, eps) if head_norm else nn.Identity()
        self.k_norm = RMSNorm(head_dim, eps) if head_norm else nn.Identity()

    def queries(self, x: torch.Tensor, positions: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        """x [..., inputs], positions [...] -> [..., H, D]."""
        return rotary(self.q_norm(self.q_proj(x).unflatten(-1, self.shape)), positions)

    def keys(self, x: torch.Tensor, positions: torch.Tensor, rotary: Rotary) -> Keys:
        """x [..., inputs], positions [...] -> k and v, [..., Hkv, D]."""
        k = rotary(self.k_norm(self.k_proj(x).unflatten(-1, self.shape)), positions)
        return k, self.v_proj(x).unflatten(-1, self.shape)

    def attend(self, q: torch.Tensor, context: Keys, own: Keys | None, seen: torch.Tensor) -> torch.Tensor:
        """q [B, A, S, H, D]; context [B, T, Hkv, D] each, of which anchors see `seen` [B, A, T]; own [B, A, S', Hkv, D]
        each, all seen. Returns [B, A, S, hidden]."""
        b, a, s, h, d = q.shape
        dtype = context[1].dtype
        rows = (q.to(dtype) * d**-0.5).view(b, a, s, -1, self.repeat, d).permute(0, 3, 1, 2, 4, 5)
        # now [B, Hkv, A, S, H / Hkv, D]; keys and values below [B, Hkv, T, D] and [B, Hkv, A, S', D]
        k, v = (x.to(dtype).transpose(1, 2) for x in context)
        scores = (rows.flatten(2, 4) @ k.transpose(2, 3)).view(b, -1, a, s * self.repeat, k.shape[2])
        scores = scores.masked_fill(~seen[:, None, :, None], float("-inf"))
        if own is None:
            weights = scores.float().softmax(-1).to(dtype)
            out = (weights.flatten(2, 3) @ v).view(rows.shape)
        else:
            own_k, own_v = (x.to(dtype).permute(0, 3, 1, 2, 4) for x in own)
            mine = rows.flatten(3, 4) @ own_k.transpose(3, 4)
            weights = torch.cat([scores, mine], -1).float().softmax(-1).to(dtype)
            far, near = weights.split([k.shape[2], own_k.shape[3]], -1)
            out = ((far.flatten(2, 3) @ v).view(b, -1, a, s * self.repeat, d) + near @ own_v).view(rows.shape)
        return self.o_proj(out.permute(0, 2, 3, 1, 4, 5).reshape(b, a, s, h * d))


class MLP(nn.Module):
    def __init__(self, hidden: int, inner: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def small_start(module: nn.Module) -> None:
    """Weights N(0, 0.02)."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=0.02)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
