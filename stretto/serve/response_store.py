"""Responses that may be asked for again, or gone on from. In memory; the least recently used go first."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import msgspec


@dataclass
class Stored:
    """`messages`: the whole conversation, the answer included, as chat messages (without the instructions)."""

    response: dict[str, Any]
    input_items: list[dict[str, Any]]
    messages: list[dict[str, Any]]
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = len(msgspec.json.encode((self.response, self.input_items, self.messages)))


class ResponseStore:
    """Holds at most `count` responses and `size` bytes of them (as JSON)."""

    def __init__(self, count: int, size: int):
        self._count, self._size = count, size
        self._held = 0
        self._by_id: OrderedDict[str, Stored] = OrderedDict()

    def put(self, id: str, stored: Stored) -> None:
        self._by_id[id] = stored
        self._held += stored.size
        while len(self._by_id) > self._count or self._held > self._size:
            _, oldest = self._by_id.popitem(last=False)
            self._held -= oldest.size

    def get(self, id: str) -> Stored | None:
        if id in self._by_id:
            self._by_id.move_to_end(id)
        return self._by_id.get(id)

    def remove(self, id: str) -> None:
        self._held -= self._by_id.pop(id).size

    def ids(self) -> list[str]:
        return list(self._by_id)
