"""Memory of layers that keep one state a sequence: cells in each slot, and one state beside each page of their group.

    of a slot    the states behind the positions where its row may stand      read by the next step (ops/recurrent.py)
    of a page    the state behind its last cell, or where a sequence rested   read when a slot is seated

A page of this group is as any page of a window: what is written beside it is final before it can be shared.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stretto.attn.api import GroupSpec, LayerSpec, StateSpec
from stretto.device.kv import POISON, KVCache, group_layers
from stretto.model.api import CausalModel
from stretto.ops.state_step import PartMemory, StateStep, StepStates
from stretto.ragged import RaggedStep
from stretto.wire import STATE, Int, Seam


def states_of(model: CausalModel) -> tuple[StateSpec, ...]:
    """A model without the attribute has none."""
    return getattr(model, "states", ())


def kv_groups(model: CausalModel, others: Sequence[int | None] = ()) -> tuple[GroupSpec, ...]:
    """Of all the model's layers. `others` as in `group_layers`."""
    layers: tuple[LayerSpec, ...] = model.layers
    return group_layers(layers, [*others, *([STATE] if states_of(model) else [])])


def make_states(model: CausalModel, kv: KVCache, n_slots: int, cells: int) -> States | None:
    """For a model with such layers, whose group is among those of `kv`."""
    if not states_of(model):
        return None
    group = [group.window for group in kv.groups].index(STATE)
    return States(states_of(model), group, n_slots, cells, kv.pages[group], model.device,
                  getattr(model, "fixed", False))


class States:
    """`parts[layer]`: memory of each part of a layer's state."""

    def __init__(self, specs: Sequence[StateSpec], group: int, n_slots: int, cells: int, pages: int,
                 device: torch.device, fixed: bool = False):
        self.group, self.cells, self.fixed = group, cells, fixed
        self.parts = [[PartMemory(torch.zeros(n_slots, cells, *shape, device=device),
                                  torch.zeros(pages + 1, *shape, device=device)) for shape in spec.parts]
                      for spec in specs]
        self._all = [part for layer in self.parts for part in layer]

    def of(self, step: RaggedStep) -> StepStates:
        return StepStates(StateStep.of(step, self.group, self.cells, self.fixed), self.parts)

    def seat(self, slots: torch.Tensor, ints: torch.Tensor) -> None:
        """After a plan's seats: the state that the SEAM column of each seated slot names, [A] int64, becomes the
        slot's, at its length."""
        where, cell = ints[Int.SEAM, slots], (ints[Int.LEN, slots] % self.cells).long()
        page = where.clamp(min=0).long()
        for part in self._all:
            ones = (-1, *(1 for _ in part.pages.shape[1:]))
            found = torch.where((where > 0).view(ones), part.pages[page], 0.0)
            part.slots[slots, cell] = torch.where((where == Seam.KEEP).view(ones), part.slots[slots, cell], found)

    # ------------------------------------------------------------------------------------------- page operations
    def keep_state(self, source: int, page: int) -> None:
        """wire.PageOp.KEEP_STATE."""
        for part in self._all:
            part.pages[page] = part.slots.flatten(0, 1)[source]

    def page_tensors(self, group: int) -> list[torch.Tensor]:
        return [part.pages for part in self._all] if group == self.group else []

    def copy_page(self, group: int, source: int, target: int) -> None:
        for pages in self.page_tensors(group):
            pages[target] = pages[source]

    def poison_page(self, group: int, page: int) -> None:
        for pages in self.page_tensors(group):
            pages[page] = POISON

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for part in self._all for t in (part.slots, part.pages))
