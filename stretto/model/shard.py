"""One rank's part of a model: which rows and columns of each matrix it holds, and how parts become whole again.

    rows     q k v, gate up, head     each rank has some heads, some inner features, some token ids
    columns  o, down                  each rank multiplies what it made itself; the sum over ranks is the result
    experts  as MLPs                  each rank has a part of the inner features of every expert

This is the scheme of Megatron-LM (Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053). Norms, embeddings and the
router are whole on every rank, so hidden states are equal on all of them, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch


class Shard:
    """Rank 0 of 1: everything, and nothing to join. `device/ranks.py` has those that join."""

    def __init__(self, rank: int = 0, ranks: int = 1):
        self.rank, self.ranks = rank, ranks

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """x of every rank added up, the same bits on every rank. x may be overwritten."""
        return x

    def add(self, base: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """base += x of every rank added up, in place; returns it. Both contiguous, base the same on every rank."""
        return base.add_(x)

    def join(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., n] of every rank side by side, [..., n * ranks]."""
        return x


@dataclass(frozen=True)
class Piece:
    """Rows `start` to `start + rows` of a tensor that has `total` rows."""

    name: str
    total: int
    start: int
    rows: int


def whole(name: str, rows: int) -> Piece:
    return Piece(name, rows, 0, rows)


def cut(shard: Shard, n: int) -> tuple[int, int]:
    """(start, count) of a rank's equal part of n; n must be a multiple of the ranks."""
    count = n // shard.ranks
    return shard.rank * count, count


def cut_heads(shard: Shard, heads: int) -> tuple[int, int]:
    """As `cut`. Where there are fewer heads than ranks, several ranks hold the same one."""
    if heads >= shard.ranks:
        return cut(shard, heads)
    return shard.rank * heads // shard.ranks, 1


def first_holder(shard: Shard, heads: int) -> bool:
    """Whether no rank before this one holds the same heads."""
    return heads >= shard.ranks or shard.rank * heads % shard.ranks < heads


def rows_of(shard: Shard, name: str, total: int, first: int = 0, size: int | None = None) -> Piece:
    """A rank's equal part of rows `first` to `first + size` (None: to the end)."""
    start, count = cut(shard, total - first if size is None else size)
    return Piece(name, total, first + start, count)


def heads_of(shard: Shard, name: str, heads: int, head_dim: int, first: int = 0, total: int | None = None) -> Piece:
    """The rows of a rank's heads, of a tensor whose heads begin at row `first`."""
    start, count = cut_heads(shard, heads)
    return Piece(name, heads * head_dim if total is None else total, first + start * head_dim, count * head_dim)


@dataclass(frozen=True)
class Columns:
    """Columns `start` to `start + count` of a matrix that has `total` columns."""

    total: int
    start: int
    count: int


def columns_of(shard: Shard, total: int) -> Columns:
    """A rank's equal part."""
    return Columns(total, *cut(shard, total))


def modules_of(pieces: Sequence[Piece]) -> list[tuple[str, list[Piece]]]:
    """(name, its pieces) of the modules that pieces come from; those of one module follow each other."""
    return [(name, list(of_module)) for name, of_module in groupby(pieces, key=lambda p: p.name)]
