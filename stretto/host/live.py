"""Requests that have not ended, by id."""

from __future__ import annotations

from collections.abc import Iterator

from stretto.host.turn import Turn


class Live:
    """A request id is free again as soon as its last turn has ended."""

    def __init__(self) -> None:
        self._turns: dict[str, list[Turn]] = {}

    def __contains__(self, rid: str) -> bool:
        return rid in self._turns

    def __iter__(self) -> Iterator[Turn]:
        return (turn for turns in self._turns.values() for turn in turns)

    def __len__(self) -> int:
        return len(self._turns)

    def of(self, rid: str) -> list[Turn]:
        return list(self._turns.get(rid, ()))

    def add(self, turn: Turn) -> None:
        self._turns.setdefault(turn.job.request.rid, []).append(turn)

    def remove(self, turn: Turn) -> None:
        rid = turn.job.request.rid
        turns = self._turns[rid]
        turns.remove(turn)
        if not turns:
            del self._turns[rid]
