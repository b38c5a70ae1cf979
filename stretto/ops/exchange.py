"""What several ranks add up, or put side by side, and in which order: the rank's number, always.

    total       out = [base +] (((x of rank 0) + x of rank 1) + ...), in float32, rounded once
    side by side    out[row] = x of rank 0 [row] | x of rank 1 [row] | ...

An element of the total depends on the elements at its place alone, so a row's result does not depend on its batch, and
it is the same bits on every rank. References over tensors that are all here; `triton_exchange` has the kernel, in which
each rank sends its part to the others and goes on when theirs have come.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

PROGRAMS, WARPS = 128, 16  # of a launch at most, and of each of them


def total(parts: Sequence[torch.Tensor], base: torch.Tensor | None = None) -> torch.Tensor:
    """parts: x of every rank, in order, all of one shape. Returns their sum, on top of `base` where there is one, in
    their type."""
    made = parts[0].float()
    for part in parts[1:]:
        made = made + part.float()
    return (made if base is None else base.float() + made).to(parts[0].dtype)


def side_by_side(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """parts: x [L, n] of every rank -> [L, n * ranks]."""
    return torch.cat(list(parts), dim=-1)


def tile_of(x: torch.Tensor) -> int:
    """Elements that a program handles at one time: 16 bytes a thread."""
    return 16 // x.element_size() * 32 * WARPS


def rows_that_fit(x: torch.Tensor, slot_bytes: int) -> int:
    """Rows of x [..., columns] that one launch takes, each of them in tiles of its own."""
    tiles = PROGRAMS * (slot_bytes // (tile_of(x) * x.element_size()))
    return tiles // -(-x.shape[-1] // tile_of(x))
