"""Layers of draft heads, for training. Names of modules are those of the tensors in the checkpoints.

Drafts are trained from anchors: each anchor's queries see the context before it, and their own block or chain.

    queries [B, A * S]      keys  | context [B, T], each anchor sees a part | own [B, A * S], each anchor sees its own |
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


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
        """x [B, N, H, D], positions [B, N]."""
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
        """x [B, N, inputs] -> [B, N, H, D]."""
        return rotary(self.q_norm(self.q_proj(x).unflatten(-1, self.shape)), positions)

    def keys(self, x: torch.Tensor, positions: torch.Tensor, rotary: Rotary) -> tuple[torch.Tensor, torch.Tensor]:
        """x [B, N, inputs] -> k and v, [B, N, Hkv, D]."""
        k = rotary(self.k_norm(self.k_proj(x).unflatten(-1, self.shape)), positions)
        return k, self.v_proj(x).unflatten(-1, self.shape)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """mask [B, Q, C], added to the scores -> [B, Q, hidden]."""
        dtype = mask.dtype
        q = q.transpose(1, 2).to(dtype)
        k, v = (x.repeat_interleave(self.repeat, 2).transpose(1, 2).to(dtype) for x in (k, v))
        mask = mask[:, None].expand(-1, q.shape[1], -1, -1)
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, hidden: int, inner: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def additive(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """bool -> 0 where seen, else -inf."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))


def small_start(module: nn.Module) -> None:
    """Weights N(0, 0.02)."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=0.02)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
