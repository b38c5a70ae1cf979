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

FEW_SLOTS = 512  # that one program of a kernel of ours puts in order
FIXED_ROWS = 64  # of a block, where rounding may not depend on the batch


@dataclass(frozen=True)
class Groups:
    """Slots in the order of their experts. N = T * K slots, E experts."""

    slots: torch.Tensor  # [N] int64
    bounds: torch.Tensor  # [E + 1] int64, ascending
    places: torch.Tensor  # [N] int64: 0, 1, 2, ...


def group_by_expert(experts: torch.Tensor, n_experts: int, tokens: torch.Tensor | None = None) -> Groups:
    """experts [T, K] int64: which experts each token asks for. tokens: how many of the T are no padding, a scalar on
    the device; None: all. On CUDA few slots are put in order by one launch, in the same order."""
    if experts.is_cuda and 0 < experts.numel() <= FEW_SLOTS:
        from stretto.ops.triton_grouped import launch_group

        slots, bounds = launch_group(experts.contiguous(), n_experts, tokens)
        return Groups(slots, bounds, torch.arange(len(slots), device=slots.device))
    places = torch.arange(experts.numel(), device=experts.device)
    if tokens is not None:
        real = places.view(experts.shape) < tokens * experts.shape[1]
        experts = torch.where(real, experts, n_experts)
    ordered, slots = experts.flatten().sort(stable=True)
    bounds = torch.searchsorted(ordered, torch.arange(n_experts + 1, device=experts.device))
    return Groups(slots, bounds, places)


def grouped_linear_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, bounds: torch.Tensor,
                             rows_in: torch.Tensor, rows_out: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """out[rows_out[p]] = weight[e] x[rows_in[p]] + bias[e] for each place p of each expert e; other rows of `out` stay.

    x [M, inputs]; weight [E, outputs, inputs]; bias [E, outputs] or None; bounds [E + 1]; rows_in and rows_out [N];
    out [N, outputs]. Returns `out`."""
    if not x.is_cuda:
        edges = bounds.tolist()
        for e, (start, end) in enumerate(pairwise(edges)):
            if start < end:
                out[rows_out[start:end]] = F.linear(x[rows_in[start:end]], weight[e], None if bias is None else bias[e])
        return out
    place = torch.arange(len(rows_in), device=x.device)
    gathered, total = x[rows_in], out[rows_out]
    for e in range(len(weight)):
        mine = (place >= bounds[e]) & (place < bounds[e + 1])
        made = F.linear(gathered, weight[e], None if bias is None else bias[e])
        total = torch.where(mine[:, None], made, total)
    out[rows_out] = total
    return out


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, bounds: torch.Tensor,
                   rows_in: torch.Tensor, rows_out: torch.Tensor, out: torch.Tensor,
                   fixed: bool = False) -> torch.Tensor:
    """As the reference. `fixed`: blocks of one size, so that rounding does not depend on the batch. ValueError for a
    layout that the kernel cannot read."""
    if not x.is_cuda:
        return grouped_linear_reference(x, weight, bias, bounds, rows_in, rows_out, out)
    from stretto.ops.triton_grouped import launch_grouped

    return launch_grouped(x, weight, bias, bounds, rows_in, rows_out, out, FIXED_ROWS if fixed else None)


def combine_reference(made: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """made [T, K, E], weights [T, K] float32 -> the weighted sum over K, [T, E], in float32 and rounded once."""
    return (made.float() * weights[..., None]).sum(1).to(made.dtype)


def combine(made: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """As the reference; on CUDA in one launch that needs no room, the sum in the order of the choices."""
    if not made.is_cuda:
        return combine_reference(made, weights)
    from stretto.ops.triton_grouped import launch_combine

    return launch_combine(made, weights)
