"""Many matrices, each for its own rows, as in a layer of experts. A torch reference, one Triton launch on CUDA.

Each token asks for K experts; its K copies are *slots*, slot t * K + j. Slots are put in the order of their experts, by
a stable sort, so that everything is summed in one order in any batch. Padding asks for expert E, which no one is:

    places    | expert 0 | expert 1 |  ...  | expert E-1 | padding, never computed |
    bounds      0          3          ...                  bounds[E]
    slots[p]  the slot that stands at place p

Nothing here reads a device value on the host, except `grouped_linear_reference` where it may (on CPUs).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F

from stretto.ops.gates import Gate

FIXED_ROWS = 64  # of a block, where rounding may not depend on the batch


def choose(logits: torch.Tensor, k: int, of_all: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [T, E] -> the k likeliest experts of each token, likeliest first: weights [T, K] float32 by softmax over
    all experts (`of_all`) or over the chosen ones, experts [T, K] int64. One launch on CUDA."""
    if not logits.is_cuda:
        return choose_reference(logits, k, of_all)
    from stretto.ops.triton_grouped import launch_choose

    return launch_choose(logits, k, of_all)


def choose_reference(logits: torch.Tensor, k: int, of_all: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """`choose` in torch's operations; which of equal experts is taken is torch's."""
    if of_all:
        return torch.topk(logits.float().softmax(-1), k, dim=-1)
    best, experts = torch.topk(logits.float(), k, dim=-1)
    return best.softmax(-1), experts


@dataclass(frozen=True)
class Groups:
    """Slots in the order of their experts. N = T * K slots, E experts."""

    slots: torch.Tensor  # [N] int64
    bounds: torch.Tensor  # [E + 1] int64, ascending
    places: torch.Tensor  # [N] int64: 0, 1, 2, ...


def group_by_expert(experts: torch.Tensor, n_experts: int, tokens: torch.Tensor | None = None) -> Groups:
    """experts [T, K] int64: which experts each token asks for. tokens: how many of the T are no padding, a scalar on
    the device; None: all. On CUDA one launch or three put them in the same order, by counting."""
    if experts.is_cuda and experts.numel():
        from stretto.ops.triton_grouped import launch_group

        return Groups(*launch_group(experts.contiguous(), n_experts, tokens))
    places = torch.arange(experts.numel(), device=experts.device)
    if tokens is not None:
        real = places.view(experts.shape) < tokens * experts.shape[1]
        experts = torch.where(real, experts, n_experts)
    ordered, slots = experts.flatten().sort(stable=True)
    bounds = torch.searchsorted(ordered, torch.arange(n_experts + 1, device=experts.device))
    return Groups(slots, bounds, places)


def grouped_linear_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, bounds: torch.Tensor,
                             rows_in: torch.Tensor, rows_out: torch.Tensor, out: torch.Tensor, each: int = 1,
                             gate: Gate | None = None) -> torch.Tensor:
    """out[rows_out[p]] = gate(weight[e] x[rows_in[p] // each] + bias[e]) for each place p of each expert e; other rows
    of `out` stay.

    x [M, inputs]; weight [E, rows, inputs]; bias [E, rows] or None; bounds [E + 1]; rows_in and rows_out [N]; out
    [N, rows], with a gate half as wide. Returns `out`."""
    def made(rows: torch.Tensor, e: int) -> torch.Tensor:
        product = F.linear(rows, weight[e], None if bias is None else bias[e])
        return product if gate is None else gate(product)

    if not x.is_cuda:
        for e, (start, end) in enumerate(pairwise(bounds.tolist())):
            if start < end:
                out[rows_out[start:end]] = made(x[rows_in[start:end] // each], e)
        return out
    place = torch.arange(len(rows_in), device=x.device)
    gathered, total = x[rows_in // each], out[rows_out]
    for e in range(len(weight)):
        mine = (place >= bounds[e]) & (place < bounds[e + 1])
        total = torch.where(mine[:, None], made(gathered, e), total)
    out[rows_out] = total
    return out


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, bounds: torch.Tensor,
                   rows_in: torch.Tensor, rows_out: torch.Tensor, out: torch.Tensor, each: int = 1,
                   gate: Gate | None = None, fixed: bool = False) -> torch.Tensor:
    """As the reference. `fixed`: blocks of one size, so that rounding does not depend on the batch. ValueError for a
    layout that the kernel cannot read."""
    if not x.is_cuda:
        return grouped_linear_reference(x, weight, bias, bounds, rows_in, rows_out, out, each, gate)
    from stretto.ops.triton_grouped import launch_grouped, tile_for

    tile = tile_for(FIXED_ROWS * len(weight), len(weight), x.itemsize) if fixed else None
    return launch_grouped(x, weight, bias, bounds, rows_in, rows_out, out, each, gate, tile)


def combine_reference(made: torch.Tensor, weights: torch.Tensor, tokens: torch.Tensor | None = None,
                      residual: torch.Tensor | None = None) -> torch.Tensor:
    """made [T, K, E], weights [T, K] float32 -> the weighted sum over K, [T, E], in float32 and rounded once; with
    `residual` [T, E] added to that, in place. tokens: how many of the T are no padding, whose sum is 0; None: all."""
    if tokens is not None:
        real = torch.arange(len(made), device=made.device) < tokens
        made = torch.where(real[:, None, None], made, 0)
    total = (made.float() * weights[..., None]).sum(1)
    return total.to(made.dtype) if residual is None else residual.copy_(residual.float() + total)


def combine(made: torch.Tensor, weights: torch.Tensor, tokens: torch.Tensor | None = None,
            residual: torch.Tensor | None = None) -> torch.Tensor:
    """As the reference; on CUDA in one launch that needs no room, the sum in the order of the choices."""
    if not made.is_cuda:
        return combine_reference(made, weights, tokens, residual)
    from stretto.ops.triton_grouped import launch_combine

    return launch_combine(made, weights, tokens, residual)
