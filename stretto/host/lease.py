"""What a sequence holds of the KV memory, and how long it is known to be: plain data, which Ledger alone writes.

Two bounds for every lease, in KV cells:

    |---- proved ----|---- may be committed by steps in flight ----|--- lookahead ---|
    0                lo                                            hi                     <= top = limit - 1 (hi only)

    pages are held for [0, hi + lookahead)      pages are freed and shared only below lo
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import msgspec

from stretto.host.ops import NO_PLAN, Mapping
from stretto.host.prefix import Node


@dataclass(eq=False, slots=True)
class Lease:
    """What a sequence holds. Only Ledger writes it.

    `pages[group]` lists the pages of cells [0, n * page_size); those of the first len(nodes) are shared. In a window
    group the entries below `first[group]` are NULL_PAGE; in a `state` group most others as well."""

    root: Node
    nodes: list[Node]
    pages: list[list[int]]
    first: list[int]
    lo: int  # cells proved by the last processed result
    top: int  # limit - 1: no cell at or above it is ever committed
    draft_lo: int  # lo; or lo + 1 where cell lo is fed again and its draft cell stands
    flight: deque[tuple[int, int]] = field(default_factory=deque)  # (seq, q_cap) of steps without a result yet
    flying: int = 0  # sum of the caps in flight
    away: list[tuple[int, int]] = field(default_factory=list)  # (group, index) of pages that only the host has: `fetch`
    tail: Node | None = None  # the end of it, of which `fetch` makes a page of its own
    tail_pins: set[int] = field(default_factory=set)  # groups whose page of the tail it pins
    arrives: int = NO_PLAN  # its pages may be read once the copies of this plan are done
    ahead: int = 0  # cells past lo that the steps in flight when it was settled may have fed, at most
    rested: int = -1  # length at which its state is kept in the page of the last cell; -1: where pages end

    @property
    def hi(self) -> int:
        """Cells that the steps in flight may have committed, at most."""
        return min(self.top, self.lo + self.flying)


class Reservation(msgspec.Struct, frozen=True, gc=False):
    """Pages for [0, hi + q_cap) and the lookahead, held in every group. Made by Ledger.reserve alone."""

    lease: Lease
    q_cap: int
    mapped: list[Mapping]
