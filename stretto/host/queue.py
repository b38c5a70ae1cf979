"""Turns that wait for a slot, the smallest rank first."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Container, Iterator

from stretto.host.turn import Turn

Entry = tuple[tuple[int, int, int], Turn]  # ranks differ, so turns are never compared


class Queue:
    def __init__(self) -> None:
        self._entries: list[Entry] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Turn]:
        return (turn for _, turn in self._entries)

    def first(self, but: Container[Turn]) -> Turn | None:
        """The next to run; these, and those that are not ready, are passed over."""
        return next((turn for _, turn in self._entries if turn.ready and turn not in but), None)

    def push(self, turn: Turn) -> None:
        insort(self._entries, (turn.job.rank, turn), key=lambda entry: entry[0])

    def remove(self, turn: Turn) -> None:
        """Raises ValueError if the turn does not wait here."""
        i = bisect_left(self._entries, turn.job.rank, key=lambda entry: entry[0])
        if i == len(self._entries) or self._entries[i][1] is not turn:
            raise ValueError(f"request {turn.job.request.rid!r} does not wait")
        del self._entries[i]

    def last_with_lease(self, after: Turn | None) -> Turn | None:
        """Of the waiting turns that hold pages, the one that runs last; only of those behind a turn."""
        for rank, turn in reversed(self._entries):
            if after is not None and rank <= after.job.rank:
                return None
            if turn.lease is not None:
                return turn
        return None
