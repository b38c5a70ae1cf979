"""Launches of the products in `skinny.py`: what one program makes."""

from __future__ import annotations

from dataclasses import dataclass

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
    piece: int = 64  # columns that one thread asks for at a time; `ahead` is a multiple
    askers: int = 0  # tiles whose programs ask, the first ones; 0: all


@dataclass(frozen=True)
class OneRow(Blocks):
    """A launch of the kernel for a single row."""

    ahead: int = 64


@dataclass(frozen=True)
class SomeRows(Blocks):
    """A launch of the kernel for gated products of some rows."""
