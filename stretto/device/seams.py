"""The seams of the draft stream: a drafter's cell p is made from the taps of position p-1, which another step, another
turn or another request may have computed.

    of a slot    taps of position len-1, after every step                  the next step's first cell needs them
    of a page    taps of its last position, beside each page of group 0    a prefix hit of whole pages needs them

Where the model keeps states, the pages are those of the `state` group, which say where a sequence can go on; and a slot
keeps the taps of every position where it keeps a state (`keep_state` lays both beside a page).

`seat` and `record` are the only writers. The values of a page are final before the page can be shared: they are those
of the last time its last position was fed.
"""

from __future__ import annotations

import torch

from stretto.device.kv import POISON
from stretto.ops.state_step import may_end
from stretto.ragged import RaggedStep
from stretto.wire import Int, Seam


class Seams:
    """`of_slot[name]` [S, E] and `of_page[name]` [pages + 1, E] for each tap name; `of_cell[name]` [S, cells, E]: those
    of the positions behind which a slot keeps states."""

    def __init__(self, names: list[str], n_slots: int, pages: int, page_size: int, width: int, dtype: torch.dtype,
                 device: torch.device, group: int = 0, cells: int = 0):
        """`group`: whose pages; `cells`: states that a slot keeps, 0 where the model has none."""
        self.page_size, self.exact, self.group, self.cells = page_size, device.type == "cpu", group, cells
        self.of_cell = {name: torch.zeros(n_slots, cells, width, dtype=dtype, device=device) for name in names}
        self.of_slot = {name: torch.zeros(n_slots, width, dtype=dtype, device=device) for name in names}
        self.of_page = {name: torch.zeros(pages + 1, width, dtype=dtype, device=device) for name in names}

    def seat(self, slots: torch.Tensor, ints: torch.Tensor) -> None:
        """After a plan's seats: what the SEAM column of each seated slot names, [A] int64, becomes the slot's own."""
        where = ints[Int.SEAM, slots]
        for name, own in self.of_slot.items():
            found = self.of_page[name][where.clamp(min=0).long()]
            own[slots] = torch.where((where == Seam.KEEP)[:, None], own[slots], found)
            if self.cells:
                self.of_cell[name][slots, (ints[Int.LEN, slots] % self.cells).long()] = own[slots]

    def record(self, step: RaggedStep, taps: dict[str, torch.Tensor], length: torch.Tensor) -> None:
        """After a step's commit. `length` [R]: cells committed. A launch a tap on CUDA."""
        if step.slots.is_cuda:
            self._launch_record(step, taps, length)
        else:
            self.record_reference(step, taps, length)
        if self.cells and len(step.ids):
            self._record_cells(step, taps)

    def _launch_record(self, step: RaggedStep, taps: dict[str, torch.Tensor], length: torch.Tensor) -> None:
        from stretto.ops.triton_draft import launch_seam

        for name, own in self.of_slot.items():
            launch_seam(taps[name], own, self.of_page[name], step.slots, step.cu_q, step.base, step.q_len, length,
                        step.positions, step.cells[self.group], self.page_size)

    def record_reference(self, step: RaggedStep, taps: dict[str, torch.Tensor], length: torch.Tensor) -> None:
        """In torch's operations; states of slots apart."""
        fed = (step.q_len > 0) & (length > step.base)
        token = (step.cu_q[:-1] + length - 1 - step.base).clamp(0, max(len(step.ids) - 1, 0)).long()
        slots = torch.where(fed, step.slots, 0)
        real = torch.arange(len(step.ids), device=slots.device) < step.cu_q[-1]
        at_end = real & (step.positions % self.page_size == self.page_size - 1)
        page = torch.where(at_end, step.cells[self.group] // self.page_size, 0)
        if self.exact:
            ends = at_end.nonzero().flatten()
            page = page[ends]
        for name, own in self.of_slot.items():
            if len(step.ids):
                own[slots] = taps[name][token]
                self.of_page[name][page] = taps[name][ends] if self.exact else taps[name]

    def _record_cells(self, step: RaggedStep, taps: dict[str, torch.Tensor]) -> None:
        slots = torch.where(may_end(step), step.slots[step.rows], 0).long()
        cells = (step.positions + 1) % self.cells
        for name, of_cell in self.of_cell.items():
            of_cell[slots, cells] = taps[name]

    # ------------------------------------------------------------------------------------------- with its page's KV
    def page_tensors(self, group: int) -> list[torch.Tensor]:
        return list(self.of_page.values()) if group == self.group else []

    def keep_state(self, source: int, page: int) -> None:
        for name, of_cell in self.of_cell.items():
            self.of_page[name][page] = of_cell.flatten(0, 1)[source]

    def copy_page(self, group: int, source: int, target: int) -> None:
        if group == self.group:
            for pages in self.of_page.values():
                pages[target] = pages[source]

    def poison_page(self, group: int, page: int) -> None:
        if group == self.group:
            for pages in self.of_page.values():
                pages[page] = POISON

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for d in (self.of_slot, self.of_page, self.of_cell) for t in d.values())
