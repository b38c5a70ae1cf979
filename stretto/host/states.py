"""Where a sequence can go on whose layers keep states. Reads leases and writes none (host/ledger.py does).

A layer that keeps a state changes it with every token, so a length alone does not say where a sequence can go on:

    slot      the states behind the last few positions, one in each of its cells
    pages     |   |   |   | s |   |   |   | s | s |      the state behind the last cell, of every n-th page;
                              ^ kept      ^     ^ rested      or behind the last one of a sequence that left its slot
"""

from __future__ import annotations

from stretto.host.lease import Lease
from stretto.wire import NULL_PAGE


class KeptStates:
    """Of the one `state` group of an engine. `every`: pages from one kept state to the next; `cells`: of a slot, each
    with the state behind one position."""

    def __init__(self, group: int, page_size: int, every: int, cells: int):
        self.group, self._page_size, self._every, self._cells = group, page_size, every, cells

    def is_kept(self, index: int) -> bool:
        """Whether the state behind the page of this index is to be kept."""
        return (index + 1) % self._every == 0

    def below(self, lease: Lease, n: int, rested: bool = True) -> int:
        """The longest length up to `n`, which is proved, whose state the lease holds in a page; 0 if there is none.
        `rested`: even where that is inside a page."""
        if rested and 0 <= lease.rested <= n:
            return lease.rested
        pages = lease.pages[self.group]
        for i in range(min(len(pages), n // self._page_size) - 1, lease.first[self.group] - 1, -1):
            if pages[i] != NULL_PAGE:
                return (i + 1) * self._page_size
        return 0

    def is_held(self, lease: Lease) -> bool:
        """Whether the lease can go on from its end without a slot."""
        return self.below(lease, lease.lo) == lease.lo

    def read_from(self, lease: Lease) -> int:
        """The first page that anybody may read who goes on from the lease's length or less."""
        n = self.below(lease, lease.lo)
        return (n - 1) // self._page_size if n else lease.lo // self._page_size

    def page_at_end(self, lease: Lease) -> int:
        """The page that holds the state behind the last cell, or NULL_PAGE."""
        return lease.pages[self.group][(lease.lo - 1) // self._page_size]

    def outlives(self, ahead: int) -> bool:
        """Whether a slot still has the state of a length after steps that fed up to `ahead` cells more."""
        return ahead < self._cells

    def cell(self, slot: int, n: int) -> int:
        """The cell in which a slot has the state of the first `n` tokens."""
        return slot * self._cells + n % self._cells
