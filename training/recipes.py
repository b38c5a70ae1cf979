"""The three heads that ship: what they read of the target, their sizes, and the layout in which they are saved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from training import export
from training.heads import DFlash, DSpark, Eagle3, Shape, shape_of
from training.target import Teacher

MASK = 3  # an id that no text holds: its embedding stands for what is not known yet


@dataclass(frozen=True)
class Recipe:
    """`taps`: after which of the target's layers states are read. `inner`: of the MLPs. `vocabulary`: how many ids can
    be drafted, the most frequent ones. `drafts`: of a chain or a block. `rank`: of a Markov head. `eight`: what the
    names of weights begin with that have 8 bits, where 4 cost drafts."""

    kind: str
    taps: tuple[int, ...]
    layers: int
    inner: int
    vocabulary: int
    drafts: int
    rank: int = 0
    eight: tuple[str, ...] = ()

    def shape(self, teacher: Teacher) -> Shape:
        return shape_of(teacher.config, self.inner, self.layers, tuple(teacher.taps.index(i) for i in self.taps))

    def make(self, teacher: Teacher, ids: torch.Tensor) -> Any:
        """ids [D] int64: those that can be drafted."""
        shape, norm, head = self.shape(teacher), teacher.norm, teacher.head
        made: dict[str, Callable[[], Any]] = {
            "eagle3": lambda: Eagle3(shape, ids, norm, head),
            "dflash": lambda: DFlash(shape, self.drafts + 1, teacher.embedding[MASK], ids, norm, head),
            "dspark": lambda: DSpark(shape, self.drafts, teacher.embedding[MASK], ids, norm, head, self.rank)}
        new = made[self.kind]().to(head.device)
        new.eight = self.eight
        return new

    def save(self, folder: Path, head: Any, teacher: Teacher, scales: dict[str, torch.Tensor] | None = None) -> None:
        """`scales`: of weights that have been rounded by them, by name; others get those of their largest numbers."""
        more = () if self.kind == "eagle3" else (MASK,)
        getattr(export, self.kind)(folder, head, teacher, self.shape(teacher), scales or {}, *more)


RECIPES = {recipe.kind: recipe for recipe in (
    Recipe("eagle3", taps=(1, 15, 28), layers=1, inner=1536, vocabulary=8192, drafts=5),
    Recipe("dflash", taps=(1, 10, 19, 28), layers=3, inner=768, vocabulary=16384, drafts=7),
    Recipe("dspark", taps=(1, 10, 19, 28), layers=3, inner=768, vocabulary=16384, drafts=7, rank=64))}
