"""Launches of the products in `skinny.py`: what one program makes, and what passes from one product to the next."""

from __future__ import annotations

from dataclasses import dataclass

import torch

MOST_ROWS = 64  # of the kernel for few rows: above, reading the rows again for each tile takes longer than the weights


@dataclass(frozen=True)
class Blocks:
    """One launch: each program makes `outputs` outputs of every row, reading `columns` columns of W at a time."""

    outputs: int
    columns: int
    stages: int
    warps: int
    split: int = 1  # programs that share the columns of one output
    ahead: int = 256  # columns asked for before the launch before has ended
    copies: bool = False  # tiles come by the copy engine (tensor memory accelerator, sm_90 and up)

    @property
    def piece(self) -> int:
        """Columns that one thread asks for."""
        return min(self.ahead, max(32, self.outputs * self.ahead // (self.warps * 32)))


@dataclass(frozen=True)
class OneRow(Blocks):
    """A launch of the kernel for a single row."""


@dataclass(frozen=True)
class SomeRows(Blocks):
    """A launch of the kernel in `triton_some_rows`."""


@dataclass(frozen=True)
class Ahead:
    """A norm that has begun where its input was made. What multiplies by the normed rows multiplies by `weighted`, and
    its sums by 1 / rms, which follows from `squares`: so that the norm needs no launch of its own."""

    weighted: torch.Tensor  # [m, n], the rows times the norm's weights
    squares: torch.Tensor  # [tiles of n, MOST_ROWS] float32, parts of the sums of the rows' squares
    eps: float
