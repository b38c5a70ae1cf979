"""Which turn sits in which slot, under which epoch.

A pair (slot, epoch) is given once. A result that names a pair whose turn has left belongs to nobody.

A slot that nobody sits in keeps its log and its page tables until somebody else takes it. The next turn of a session
goes back to the slot of its last one where it can, and is told only what has changed since:

    the slot's log   | the last turn's prompt and answer |           seat: log_from = common ids
    the next turn    | history                           | new ids |       the ids from there on, pages that differ

so a turn costs its new tokens, however long the history is. Slots are taken in the order in which they were left.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from stretto.host.faults import need
from stretto.host.history import common
from stretto.host.ops import Mapping, Ops
from stretto.host.seat import seat_of
from stretto.host.turn import Turn
from stretto.wire import NULL_PAGE

if TYPE_CHECKING:
    from stretto.host.session import Session

UNTOLD = -1  # no page: the device has not been told of this entry


class Left(NamedTuple):
    """What a slot still has of a session's turn: the first ids of its log, and the page table of each group."""

    slot: int
    tokens: list[int]
    pages: list[list[int]]
    seam: int = -1  # the length at whose end its SEAM column stands; -1: nobody knows

    def shared(self, turn: Turn) -> int:
        """How many first ids of its log are those of the turn."""
        if turn.begins is not None and turn.begins[0] is self.tokens:  # known since it was submitted
            return turn.begins[1]
        return common(self.tokens, turn.tokens)

    def changes(self, pages: list[list[int]]) -> list[Mapping]:
        """What makes its page tables those of a lease."""
        return [(g, i, page) for g, (had, has) in enumerate(zip(self.pages, pages))
                for i, page in _changes(had, has)]


def _changes(had: list[int], has: list[int]) -> list[tuple[int, int]]:
    """(index, page) of the entries that differ."""
    same = common(had, has)
    padded = has[same:] + [NULL_PAGE] * (len(had) - len(has))
    known = had[same:] + [NULL_PAGE] * (len(has) - len(had))
    return [(same + i, page) for i, (page, old) in enumerate(zip(padded, known)) if page != old]


class Slots:
    """`running` holds the seated turns, those first that a short budget left out longest ago."""

    def __init__(self, n_slots: int, ops: Ops):
        self._ops = ops
        self._free = deque(range(1, n_slots))
        self._occupants: list[Turn | None] = [None] * n_slots
        self._left: dict[Session, Left] = {}
        self._leavers: list[Session | None] = [None] * n_slots  # whose ids a vacant slot still has
        self._epochs = 0
        self.running: dict[Turn, None] = {}
        self.ended = 0  # turns that left for good

    @property
    def vacant(self) -> int:
        """Slots that nobody sits in."""
        return len(self._free)

    def owner(self, slot: int, epoch: int) -> Turn | None:
        turn = self._occupants[slot]
        return turn if turn is not None and turn.epoch == epoch else None

    def seat(self, turn: Turn, seam: int) -> None:
        """A turn with a lease takes a free slot; of its log and its pages travels what the slot has not."""
        lease = turn.lease
        need(lease is not None and turn.slot < 0, "a turn is seated without a lease, or twice")
        assert lease is not None
        left = self._left.get(turn.session) if turn.session is not None else None
        if left is None:
            turn.slot = self._free.popleft()
            log_from, changes = 0, Left(turn.slot, [], [[]] * len(lease.pages)).changes(lease.pages)
        else:
            turn.slot = left.slot
            self._free.remove(turn.slot)
            log_from, changes = left.shared(turn), left.changes(lease.pages)
        self._forget(self._leavers[turn.slot])
        self._occupy(turn)
        self._ops.seat(seat_of(turn, lease, fresh=left is None, seam=seam, log_from=log_from))
        self._ops.map(turn.slot, changes)

    def reseat(self, old: Turn, new: Turn, seam: int, log_from: int) -> None:
        """The next turn of a session takes over slot, pages and log of the one that ended, under a new epoch."""
        need(new.lease is not None and new.slot < 0, "a turn is re-seated without a lease, or twice")
        assert new.lease is not None
        new.slot = old.slot
        del self.running[old]
        old.slot = old.epoch = -1
        self._occupy(new)
        self._ops.seat(seat_of(new, new.lease, fresh=False, seam=seam, log_from=log_from))

    def _occupy(self, turn: Turn) -> None:
        self._epochs += 1
        turn.epoch, turn.fill_to = self._epochs, len(turn.tokens)
        self._occupants[turn.slot] = turn
        self.running[turn] = None

    def holds_seam(self, turn: Turn) -> bool:
        """The slot that the turn goes back to has the taps of the cell before those that it will feed."""
        left = self._left.get(turn.session) if turn.session is not None else None
        if left is None or turn.lease is None or turn.lease.draft_lo != turn.lease.lo:
            return False
        return left.seam == turn.lease.lo <= left.shared(turn)

    def leave(self, turn: Turn, returns: bool = False, exact: bool = False) -> None:
        """The slot is free again; whatever is in flight for this epoch will find nobody. `returns`: the turn's session
        will go on from here, and its books are sound. `exact`: the device ended it where its lease ends."""
        untold = self._ops.release(turn.slot)
        if returns and untold is not None and turn.session is not None and turn.lease is not None:
            pages = [list(of_group) for of_group in turn.lease.pages]
            for group, index in untold:
                pages[group][index] = UNTOLD
            seam = turn.lease.lo if exact else -1
            self._left[turn.session] = Left(turn.slot, turn.tokens, pages, seam)
            self._leavers[turn.slot] = turn.session
        self._occupants[turn.slot] = None
        self._free.append(turn.slot)
        del self.running[turn]
        turn.slot = turn.epoch = -1

    def forget(self, session: Session) -> None:
        """The session has ended."""
        self._forget(session)

    def _forget(self, session: Session | None) -> None:
        if session is not None and (left := self._left.pop(session, None)) is not None:
            self._leavers[left.slot] = None

    def rotate(self, served: list[Turn]) -> None:
        """Turns that got what they wanted stand behind those that did not."""
        for turn in served:
            del self.running[turn]
            self.running[turn] = None
