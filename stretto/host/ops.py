"""Operations gathered for the next plan, normalised so that the order rule of `wire.StepPlan` holds.

The device executes releases, seats, maps, page operations, drafts, rows, in this order, while the host decides them in
any order. Between two plans one slot may be mapped, released, seated, and released again. What remains of that:

    release      drops the slot's pending seat, maps and drafts
    seat         drops the slot's pending release; two in one plan are a fault. For a fresh one the device clears the
                 whole row of page tables; another keeps what stands there (in place, or back in the same slot)
    map          the last one for (slot, group, index) counts
    page ops     keep their order among themselves: a page freed, taken again and copied into reads POISON, COPY

Page operations of a plan that saves or restores run beside its step (wire.StepPlan). `fence` says up to which plan they
must be done before the step begins; copies among them are always waited for.
"""

from __future__ import annotations

from collections.abc import Iterable

from stretto.host.faults import need
from stretto.wire import HostDraft, PageOp, Seat, StepPlan

Mapping = tuple[int, int, int]  # (group, index, page)
NO_PLAN = -1  # before the first one


class Ops:
    """The pending operations; `take` moves them into the plan `next_seq`."""

    def __init__(self) -> None:
        self.next_seq = 0
        self._clear()

    def _clear(self) -> None:
        self._fence = NO_PLAN
        self._releases: dict[int, None] = {}
        self._seats: dict[int, Seat] = {}
        self._maps: dict[int, dict[tuple[int, int], int]] = {}
        self._page_ops: list[tuple[int, int, int, int]] = []
        self._drafts: dict[int, HostDraft] = {}

    def release(self, slot: int) -> Iterable[tuple[int, int]] | None:
        """(group, index) of pages that the device has not been told of, and will not; None: nor of the slot's seat."""
        seat = self._seats.pop(slot, None)
        untold = self._maps.pop(slot, {})
        self._drafts.pop(slot, None)
        self._releases[slot] = None
        return None if seat is not None else untold

    def seat(self, seat: Seat) -> None:
        need(seat.slot not in self._seats, f"slot {seat.slot} is seated twice in one plan")
        need(not seat.fresh or seat.slot not in self._maps, f"slot {seat.slot} has pages of its last occupant")
        self._releases.pop(seat.slot, None)
        self._seats[seat.slot] = seat

    def map(self, slot: int, mapped: list[Mapping]) -> None:
        if mapped:
            pages = self._maps.setdefault(slot, {})
            for group, index, page in mapped:
                pages[group, index] = page

    def copy(self, group: int, source: int, target: int) -> None:
        self._page_ops.append((PageOp.COPY, group, source, target))

    def keep_state(self, group: int, cell: int, page: int) -> None:
        """See wire.PageOp.KEEP_STATE."""
        self._page_ops.append((PageOp.KEEP_STATE, group, cell, page))

    def save(self, group: int, page: int, host_page: int) -> None:
        self._page_ops.append((PageOp.SAVE, group, page, host_page))

    def restore(self, group: int, host_page: int, page: int) -> None:
        self._page_ops.append((PageOp.RESTORE, group, host_page, page))

    def fence(self, seq: int) -> None:
        """The next step begins once the page operations of plan `seq`, and of those before it, are done."""
        self._fence = max(self._fence, seq)

    def poison(self, group: int, page: int) -> None:
        self._page_ops.append((PageOp.POISON, group, 0, page))

    def draft(self, draft: HostDraft) -> None:
        self._drafts[draft.slot] = draft

    def take(self, seq: int, draft_width: int, rows: list[tuple[int, int, int]]) -> StepPlan:
        maps = [(slot, group, index, page) for slot, pages in self._maps.items()
                for (group, index), page in pages.items()]
        kinds = {op[0] for op in self._page_ops}
        if kinds & {PageOp.SAVE, PageOp.RESTORE} and kinds & {PageOp.COPY, PageOp.KEEP_STATE}:
            self.fence(seq)
        plan = StepPlan(seq, draft_width, list(self._releases), list(self._seats.values()), maps, self._page_ops,
                        list(self._drafts.values()), rows, fence=self._fence)
        self._clear()
        self.next_seq = seq + 1
        return plan
