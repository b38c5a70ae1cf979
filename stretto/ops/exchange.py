"""What several ranks add up, or put side by side, and in which order: the rank's number, always.

    total       out = [base +] (((x of rank 0) + x of rank 1) + ...), in float32, rounded once
    side by side    out[row] = x of rank 0 [row] | x of rank 1 [row] | ...

An element of the total depends on the elements at its place alone, so a row's result does not depend on its batch, and
it is the same bits on every rank, whichever way it is sent. References over tensors that are all here;
`triton_exchange` has the kernels.

Which way, of n bytes over r ranks, by what leaves a GPU:

    one shot     everybody sends all to everybody                        (r - 1) * n            one crossing
    two shots    each adds up a part of the elements and sends the sum   2 * (r - 1) / r * n    two

With two ranks these are the same bytes, and one shot is always the quicker. Two shots have run in Triton's interpreter
and on streams of one GPU alone, so they are off until they have been timed on three GPUs and more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

PROGRAMS, WARPS = 128, 16  # of a launch at most, and of each of them
CROSSING_BYTES = 640 << 10
"""That leave a GPU in the time of one more crossing: 2.5 microseconds, at the 256 GB/s that sums of 1 to 128 rows show
between two H200 (benchmarks/results/ranks_h200.json)."""


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


def fewer_bytes(size: int, ranks: int) -> bool:
    """Whether a sum of `size` bytes is made sooner in two shots."""
    return (ranks - 1) * size > 2 * (ranks - 1) / ranks * size + CROSSING_BYTES


def tile_of(x: torch.Tensor) -> int:
    """Elements that a program handles at one time: 16 bytes a thread."""
    return 16 // x.element_size() * 32 * WARPS


def rows_that_fit(x: torch.Tensor, slot_bytes: int) -> int:
    """Rows of x [..., columns] that one launch takes, each of them in tiles of its own."""
    tiles = PROGRAMS * (slot_bytes // (tile_of(x) * x.element_size()))
    return tiles // -(-x.shape[-1] // tile_of(x))


def two_shot_bytes(ranks: int, slot_bytes: int) -> int:
    """Bytes of a sum that one launch of two shots takes: half a slot of every program for each rank."""
    return PROGRAMS * ranks * (slot_bytes // 2 // TILE_BYTES) * TILE_BYTES


MOST_BYTES = {2: 8 << 20, 3: 1 << 20, 4: 1 << 20}
"""Of a sum in one shot, by ranks: two send each other no more than any other way would."""
MOST_BYTES_OF_MANY = 512 << 10
TILE_BYTES = 16 * 32 * WARPS  # what a program handles at one time


@dataclass(frozen=True)
class Ways:
    """Which sums of `ranks` go through memory that all of them see, and how."""

    ranks: int
    two_shots: bool = False

    @property
    def slot(self) -> int:
        """Bytes of a program's from one rank: two tiles for two shots, with which their sums may have 1 MiB a rank."""
        if self.two_shots and self.ranks > 2:
            return 2 * TILE_BYTES
        return max(self._one_shot_bytes // PROGRAMS, TILE_BYTES)

    @property
    def _one_shot_bytes(self) -> int:
        return MOST_BYTES.get(self.ranks, MOST_BYTES_OF_MANY)

    def shots(self, x: torch.Tensor) -> int:
        """In how many x is added up; 0: some other way."""
        if self.two_shots and fewer_bytes(x.nbytes, self.ranks):
            return 2 if x.nbytes <= two_shot_bytes(self.ranks, self.slot) else 0
        return int(0 < x.nbytes <= self._one_shot_bytes and rows_that_fit(x.view(1, -1), self.slot) > 0)
