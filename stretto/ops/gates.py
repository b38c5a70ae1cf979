"""What becomes of the two halves of an MLP's first product."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

GATES = {"silu": F.silu, "swish": F.silu, "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
         "gelu_new": lambda x: F.gelu(x, approximate="tanh"), "gelu": F.gelu, "relu": F.relu}


@dataclass(frozen=True)
class Gate:
    """What the two halves of a product become: act(first) * second, act one of `GATES`; or, "clamped", with
    first and second clamped to `limit` (second from both sides), (second + 1) * first * sigmoid(alpha * first)."""

    act: str
    alpha: float = 0.0
    limit: float = 0.0

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[N, 2 F] -> [N, F]."""
        first, second = gate_up.chunk(2, dim=-1)
        if self.act != "clamped":
            return GATES[self.act](first) * second
        first, second = first.clamp(max=self.limit), second.clamp(-self.limit, self.limit)
        return (second + 1) * (first * torch.sigmoid(first * self.alpha))
