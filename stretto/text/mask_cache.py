"""Masks that were made, by the place in a grammar that they are good for. No torch in this module."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

import numpy as np

MASK_BYTES = 64 << 20  # of all masks that are kept; 16 KB each with 128,000 tokens
KEY_BYTES = 200  # of a key


class _Mask:
    __slots__ = ("bits", "keys", "raw")

    def __init__(self, raw: bytes):
        self.raw, self.keys = raw, 0
        self.bits = np.frombuffer(raw, dtype=np.int32)


class MaskCache:
    """Those used least recently are forgotten where all take more than `most` bytes. Many places have equal masks,
    which are kept once."""

    def __init__(self, most: int = MASK_BYTES):
        self._most, self.size = most, 0
        self._masks: OrderedDict[Hashable, _Mask] = OrderedDict()
        self._by_content: dict[bytes, _Mask] = {}

    def __len__(self) -> int:
        return len(self._masks)

    def get(self, key: Hashable) -> np.ndarray | None:
        """[words], to be read only."""
        found = self._masks.get(key)
        if found is None:
            return None
        self._masks.move_to_end(key)
        return found.bits

    def put(self, key: Hashable, bits: np.ndarray) -> None:
        """Not kept: a mask of one token or none, which costs nothing to make and, where a text is forced, depends on
        how the tokenizer cuts all of it; and one with all bits set, which nobody has made."""
        if key in self._masks or int(np.bitwise_count(bits).sum()) < 2 or bool((bits == -1).all()):
            return
        raw = bits.tobytes()
        mask = self._by_content.get(raw)
        if mask is None:
            mask = self._by_content[raw] = _Mask(raw)
            self.size += len(raw)
        mask.keys += 1
        self._masks[key] = mask
        self.size += KEY_BYTES
        while self.size > self._most and self._masks:
            self._forget(self._masks.popitem(last=False)[1])

    def _forget(self, mask: _Mask) -> None:
        self.size -= KEY_BYTES
        mask.keys -= 1
        if not mask.keys:
            del self._by_content[mask.raw]
            self.size -= len(mask.raw)
