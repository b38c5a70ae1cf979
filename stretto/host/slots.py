"""Which turn sits in which slot, under which epoch.

A pair (slot, epoch) is given once. A result that names a pair whose turn has left belongs to nobody."""

from __future__ import annotations

from collections import deque

from stretto.host.faults import need
from stretto.host.ops import Ops
from stretto.host.seat import seat_of
from stretto.host.turn import Turn


class Slots:
    """`running` holds the seated turns, those first that a short budget left out longest ago."""

    def __init__(self, n_slots: int, ops: Ops):
        self._ops = ops
        self._free = deque(range(1, n_slots))
        self._occupants: list[Turn | None] = [None] * n_slots
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
        """A turn with a lease takes a free slot; its whole log and all its pages travel."""
        lease = turn.lease
        need(lease is not None and turn.slot < 0, "a turn is seated without a lease, or twice")
        assert lease is not None
        turn.slot = self._free.popleft()
        self._occupy(turn)
        self._ops.seat(seat_of(turn, lease, fresh=True, seam=seam, log_from=0))
        self._ops.map(turn.slot, [(g, i, page) for g, pages in enumerate(lease.pages)
                                  for i, page in enumerate(pages) if page])

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

    def leave(self, turn: Turn) -> None:
        """The slot is free again; whatever is in flight for this epoch will find nobody."""
        self._ops.release(turn.slot)
        self._occupants[turn.slot] = None
        self._free.append(turn.slot)
        del self.running[turn]
        turn.slot = turn.epoch = -1

    def rotate(self, served: list[Turn]) -> None:
        """Turns that got what they wanted stand behind those that did not."""
        for turn in served:
            del self.running[turn]
            self.running[turn] = None
