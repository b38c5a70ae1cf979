"""Where a step finds the states of layers that keep some, and where it leaves them (`recurrent.py` draws it)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from stretto.ragged import RaggedStep


@dataclass(frozen=True)
class PartMemory:
    """One part of one layer's states: `slots` [S, cells, *shape] and `pages` [pages + 1, *shape], float32."""

    slots: torch.Tensor
    pages: torch.Tensor


def may_end(step: RaggedStep) -> torch.Tensor:
    """Tokens behind which their row may stand after the step, [T] bool."""
    first = step.kv_len - step.n_out.clamp(min=1)
    real = torch.arange(len(step.ids), device=step.ids.device) < step.cu_q[-1]
    return real & (step.positions >= first[step.rows])


@dataclass(frozen=True)
class StateStep:
    """What the layers with states share of a step. `pages` [T] int64: the page that gets the state behind each token;
    NULL_PAGE: none. `fixed`: rounding may not depend on the batch."""

    step: RaggedStep
    cells: int
    pages: torch.Tensor
    fixed: bool = False

    @classmethod
    def of(cls, step: RaggedStep, group: int, cells: int, fixed: bool = False) -> StateStep:
        at_end = step.positions % step.page_size == step.page_size - 1
        return cls(step, cells, torch.where(at_end, step.cells[group] // step.page_size, 0), fixed)

    @cached_property
    def first(self) -> torch.Tensor:
        """The slot's cell that holds the state which each row begins with, [R] int64."""
        return (self.step.base % self.cells).long()

    @cached_property
    def offsets(self) -> torch.Tensor:
        """Of each token in its row, [T] int64."""
        return self.step.positions - self.step.base[self.step.rows]

    @cached_property
    def kept(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(token, slot, cell) of the states that stay in slots, each [N] int64. Reads sizes on the host."""
        step, tokens = self.step, may_end(self.step).nonzero().flatten()
        return tokens, step.slots[step.rows[tokens]].long(), (step.positions[tokens] + 1) % self.cells

    @cached_property
    def paged(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(token, page) of the states that stay beside pages, each [N] int64. Reads sizes on the host."""
        tokens = self.pages.nonzero().flatten()
        return tokens, self.pages[tokens]


@dataclass(frozen=True)
class StepStates:
    """What a model's layers with states get of a step; `parts[i]` belongs to the i-th of them."""

    where: StateStep
    parts: Sequence[Sequence[PartMemory]]
