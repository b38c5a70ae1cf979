"""Optimisers whose steps can be captured in a CUDA graph: learning rates are tensors, nothing is decided on the host.

torch.optim.Muon takes its rate as a number, which a graph would keep for ever; this one is the same but for that, and
for matrices of one shape being orthogonalised side by side.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
STEPS, EPS = 5, 1e-7


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised (K. Jordan, 2024), of a size that an update of Adam would have (0.2 sqrt(longer side)).
    `lr`: a tensor with one number."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: torch.Tensor, momentum: float = 0.95,
                 weight_decay: float = 0.01):
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = {}
            for weight in group["params"]:
                by_shape.setdefault(weight.shape, []).append(weight)
            for shape, weights in by_shape.items():
                self._update(group, shape, weights)

    def _update(self, group: dict, shape: torch.Size, weights: list[nn.Parameter]) -> None:
        gradient = torch.stack([weight.grad for weight in weights])
        state = self.state[weights[0]]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(gradient)
        average = state["momentum"].lerp_(gradient, 1 - group["momentum"])
        update = orthogonal(gradient.lerp(average, group["momentum"])).float()
        size = group["lr"] * (0.2 * max(shape) ** 0.5)
        for weight, direction in zip(weights, update, strict=True):
            weight.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction * size)


def orthogonal(x: torch.Tensor) -> torch.Tensor:
    """x [N, R, C] -> nearly the nearest matrices with orthonormal rows or columns, in bfloat16."""
    a, b, c = NEWTON_SCHULZ
    x = x.bfloat16()
    tall = x.shape[1] > x.shape[2]
    x = x.transpose(1, 2) if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=EPS)
    for _ in range(STEPS):
        gram = x @ x.transpose(1, 2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.transpose(1, 2) if tall else x


def optimizers_of(head: nn.Module, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for matrices between hidden states; AdamW, at half the rate, for vectors and what has a row for each id.
    Every group keeps its first rate as `initial_lr`."""
    matrices, rest = [], []
    for name, weight in head.named_parameters():
        inner = weight.ndim == 2 and min(weight.shape) > 1 and not name.startswith(("lm_head", "markov_head.markov"))
        (matrices if inner else rest).append(weight)
    cuda, device = rest[0].is_cuda, rest[0].device
    made = [Muon(matrices, torch.tensor(rate, device=device)),
            torch.optim.AdamW(rest, lr=torch.tensor(rate / 2, device=device), betas=(0.9, 0.95), weight_decay=0.0,
                              capturable=cuda, fused=cuda)]
    for optimizer in made:
        for group in optimizer.param_groups:
            group["initial_lr"] = float(group["lr"])
    return made
