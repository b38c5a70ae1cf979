"""Pages that are being copied between the device and host memory, and who waits for that.

    plan N saves or restores a page      |---- copies of N ----|  told: N is done
    whoever takes the page meanwhile     his plan waits for N (Ops.fence)
    whoever reads what is restored       has `arrived` once N is done, or his plan waits for N

Copies of a plan run beside its step, and in order with those of other plans.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from stretto.host.ops import NO_PLAN, Ops


class CopiesInFlight:
    """Which page is touched by the copies of which plan."""

    def __init__(self, ops: Ops):
        self._ops = ops
        self._plans: dict[tuple[int, int], int] = {}  # (group, page) -> the last plan whose copies touch it
        self._order: deque[tuple[int, tuple[int, int]]] = deque()  # the same, in order
        self._done = NO_PLAN  # the copies of plans up to this one are done

    def begin(self, group: int, page: int) -> int:
        """The next plan, whose number is returned, copies from or to this page."""
        seq = self._ops.next_seq
        self._plans[group, page] = seq
        self._order.append((seq, (group, page)))
        return seq

    def begin_poison(self, group: int, page: int) -> None:
        """Debug: poison may run beside the step as copies do, and after those of earlier plans."""
        if (seq := self.plan_of(group, page)) != self._ops.next_seq:
            self._ops.fence(seq)
        self.begin(group, page)

    def plan_of(self, group: int, page: int) -> int:
        """The plan whose copies of this page are not yet known to be done; NO_PLAN: there is none."""
        return self._plans.get((group, page), NO_PLAN)

    def last_of(self, pages: Iterable[tuple[int, int]]) -> int:
        """The last plan whose copies touch one of these (group, page); NO_PLAN: there is none."""
        return max((self.plan_of(*page) for page in pages), default=NO_PLAN) if self._plans else NO_PLAN

    def wait_for(self, group: int, page: int) -> None:
        """The next plan waits for what is being copied from or to this page."""
        self._ops.fence(self.plan_of(group, page))

    def taken(self, group: int, pages: Iterable[int]) -> None:
        """The next plan may write these pages, so it waits; nobody after it needs to."""
        for page in pages if self._plans else ():
            self.wait_for(group, page)
            self._plans.pop((group, page), None)

    def done(self, seq: int) -> None:
        """The copies of this plan are done. Other ranks may not be so far: the next step makes sure of it."""
        self._ops.fence(seq)
        self._done = max(self._done, seq)
        while self._order and self._order[0][0] <= seq:
            plan, page = self._order.popleft()
            if self._plans.get(page) == plan:
                del self._plans[page]

    def is_done(self, seq: int) -> bool:
        """Whether the copies of this plan are known to be done."""
        return seq <= self._done
