"""Token masks from the states of grammars: which ids may follow at each position of a window.

No torch in this module.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import (
    fill_next_token_bitmask,
    fill_next_token_bitmask_par,
    fill_next_token_bitmask_par_with_draft_tokens,
)

from stretto.wire import LateMask


@dataclass(frozen=True)
class MaskAsk:
    """What one row of a plan needs: masks at its window's positions, `drafts` taken as given one after another."""

    row: int  # in the plan
    matcher: LLMatcher  # left as it is
    drafts: list[int]
    withheld: int = 0  # at so many first positions no stop id, while there is another choice (min_tokens)
    stop_ids: Sequence[int] = ()


class MaskMaker:
    """Fills masks for one vocabulary, on several threads where there is more than one row."""

    def __init__(self, vocab_size: int, threads: int | None = None):
        self._words = -(-vocab_size // 32)
        self._threads = threads or max(1, min(16, (os.cpu_count() or 1) - 1))
        self._executor: LLExecutor | None = None

    def make(self, seq: int, n_rows: int, asks: Sequence[MaskAsk]) -> tuple[LateMask, list[int]]:
        """The mask of a plan with so many rows, and the rows that nothing may follow."""
        sizes = [1 + len(ask.drafts) for ask in asks]
        index = np.full((n_rows, max(sizes, default=1)), -1, dtype=np.int32)
        bits = np.full((sum(sizes), self._words), -1, dtype=np.int32)
        starts = [0, *np.cumsum(sizes).tolist()]
        for ask, start, size in zip(asks, starts, sizes):
            index[ask.row, :size] = np.arange(start, start + size)
        self._fill(asks, starts, bits)
        stuck = [ask.row for ask, start in zip(asks, starts) if ask.matcher.is_error() or not bits[start].any()]
        for ask, start, size in zip(asks, starts, sizes):
            _withhold(bits[start : start + min(ask.withheld, size)], ask.stop_ids)
        return LateMask(seq, index, bits), stuck

    def _fill(self, asks: Sequence[MaskAsk], starts: Sequence[int], bits: np.ndarray) -> None:
        if len(asks) == 1 and not asks[0].drafts:  # nothing to share out
            fill_next_token_bitmask(asks[0].matcher, bits)
        elif asks:
            if self._executor is None:
                self._executor = LLExecutor(self._threads)
            plain = [(ask.matcher, start) for ask, start in zip(asks, starts) if not ask.drafts]
            drafted = [(ask.matcher, start, ask.drafts) for ask, start in zip(asks, starts) if ask.drafts]
            if plain:
                fill_next_token_bitmask_par(self._executor, plain, bits)
            if drafted:
                fill_next_token_bitmask_par_with_draft_tokens(self._executor, drafted, bits)


def _withhold(bits: np.ndarray, ids: Sequence[int]) -> None:
    """bits [N, words], changed in place: takes ids away from each mask that allows another one."""
    allowed = bits.view(np.uint32)
    for mask in allowed:
        rest = mask.copy()
        for i in ids:
            rest[i >> 5] &= np.uint32(~(1 << (i & 31)) & 0xFFFFFFFF)
        if rest.any():
            mask[:] = rest


def is_dead_end(matcher: LLMatcher) -> bool:
    """No id may follow, not even one that ends the answer."""
    return not np.frombuffer(matcher.compute_bitmask(), dtype=np.int32).any()
