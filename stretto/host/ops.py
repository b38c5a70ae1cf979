"""Operations gathered for the next plan, normalised so that the order rule of `wire.StepPlan` holds.

The device executes releases, seats, maps, page operations, drafts, rows, in this order, while the host decides them in
any order. Between two plans one slot may be mapped, released, seated, and released again. What remains of that:

    release      drops the slot's pending seat, maps and drafts
    fresh seat   drops the slot's pending release; the device clears the whole row of page tables
    later seat   (in place) replaces a pending seat's columns only if there is none: two in one plan are a fault
    map          the last one for (slot, group, index) counts
    page ops     keep their order among themselves: a page freed, taken again and copied into reads POISON, COPY
"""

from __future__ import annotations

from stretto.host.faults import need
from stretto.wire import HostDraft, PageOp, Seat, StepPlan

Mapping = tuple[int, int, int]  # (group, index, page)


class Ops:
    """The pending operations; `take` moves them into a plan."""

    def __init__(self) -> None:
        self._releases: dict[int, None] = {}
        self._seats: dict[int, Seat] = {}
        self._maps: dict[int, dict[tuple[int, int], int]] = {}
        self._page_ops: list[tuple[int, int, int, int]] = []
        self._drafts: dict[int, HostDraft] = {}

    def release(self, slot: int) -> None:
        self._seats.pop(slot, None)
        self._maps.pop(slot, None)
        self._drafts.pop(slot, None)
        self._releases[slot] = None

    def seat(self, seat: Seat) -> None:
        need(seat.slot not in self._seats, f"slot {seat.slot} is seated twice in one plan")
        if seat.fresh:
            need(seat.slot not in self._maps, f"slot {seat.slot} has pages of its last occupant")
            self._releases.pop(seat.slot, None)
        need(seat.slot not in self._releases, f"slot {seat.slot} is released and re-seated in place")
        self._seats[seat.slot] = seat

    def map(self, slot: int, mapped: list[Mapping]) -> None:
        if mapped:
            pages = self._maps.setdefault(slot, {})
            for group, index, page in mapped:
                pages[group, index] = page

    def copy(self, group: int, source: int, target: int) -> None:
        self._page_ops.append((PageOp.COPY, group, source, target))

    def poison(self, group: int, page: int) -> None:
        self._page_ops.append((PageOp.POISON, group, 0, page))

    def draft(self, draft: HostDraft) -> None:
        self._drafts[draft.slot] = draft

    def take(self, seq: int, draft_width: int, rows: list[tuple[int, int, int]]) -> StepPlan:
        maps = [(slot, group, index, page) for slot, pages in self._maps.items()
                for (group, index), page in pages.items()]
        plan = StepPlan(seq, draft_width, list(self._releases), list(self._seats.values()), maps, self._page_ops,
                        list(self._drafts.values()), rows)
        self.__init__()  # type: ignore[misc]
        return plan
