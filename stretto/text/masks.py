"""Token masks from the states of grammars: which ids may follow at each position of a window.

A mask takes 15 us where its grammar's automaton has been in the place before, so the masks of 64 rows are made faster
than threads could be told of them. Some take a millisecond (long runs of any letters: most of the vocabulary has to be
walked), and those are shared out. Copies of a matcher have one automaton, which one thread at a time may use: masks of
one grammar can only be made one after another (and threads that wait for each other cost more than they bring).

    rows, by automaton   | a a a a a a b b b c |
    this thread          | a a a a |                  until PATIENCE has passed
    then                           | a a | b b b | c |       one thread for each automaton that is left
    the next masks       | a a a a a a | b b b | c |         at once, until all of them together are quick again

`slow` tells of whom there should be more (host/grammar.py). No torch in this module.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from llguidance import LLExecutor, LLMatcher

from stretto.wire import LateMask

PATIENCE = 2e-3  # seconds after which masks are shared out; well below a step of a large model


@dataclass(frozen=True)
class MaskAsk:
    """What one row of a plan needs: masks at its window's positions, `drafts` taken as given one after another."""

    row: int  # in the plan
    matcher: LLMatcher  # left as it is
    drafts: list[int]
    withheld: int = 0  # at so many first positions no stop id, while there is another choice (min_tokens)
    stop_ids: Sequence[int] = ()
    automaton: Hashable = None  # rows with the same one cannot be made at once


class Filled(NamedTuple):
    rows: int
    seconds: float


class MaskMaker:
    """Fills masks for one vocabulary. `slow`: rows of the last `make` that had to wait for each other for longer than
    PATIENCE, of each automaton."""

    def __init__(self, vocab_size: int, threads: int | None = None):
        self._words = -(-vocab_size // 32)
        self.threads = threads or max(1, min(16, _cores() - 1))
        self._pool: ThreadPoolExecutor | None = None
        self._alone: LLExecutor | None = None  # asked for one row at a time, which it makes on the thread that asks
        self.slow: list[list[int]] = []
        self._costly = False  # the last masks took longer than PATIENCE, all together
        self._bits = np.empty((0, self._words), dtype=np.int32)

    def make(self, seq: int, n_rows: int, asks: Sequence[MaskAsk]) -> tuple[LateMask, list[int]]:
        """The mask of a plan with so many rows, good until the next one is made; and rows that nothing may follow."""
        sizes = [1 + len(ask.drafts) for ask in asks]
        index = np.full((n_rows, max(sizes, default=1)), -1, dtype=np.int32)
        bits = self._room(sum(sizes))
        starts = [0, *np.cumsum(sizes).tolist()]
        for ask, start, size in zip(asks, starts, sizes):
            index[ask.row, :size] = np.arange(start, start + size)
        self._fill(list(zip(asks, starts)), bits)
        free = np.any(bits, axis=1).tolist()
        stuck = [ask.row for ask, start in zip(asks, starts) if ask.matcher.is_error() or not free[start]]
        for ask, start, size in zip(asks, starts, sizes):
            if ask.withheld:
                _withhold(bits[start : start + min(ask.withheld, size)], ask.stop_ids)
        return LateMask(seq, index, bits), stuck

    def _room(self, n: int) -> np.ndarray:
        """[n, words], all bits set: memory that stays, since new memory costs as much as the masks."""
        if len(self._bits) < n:
            self._bits = np.empty((n, self._words), dtype=np.int32)
        bits = self._bits[:n]
        bits.fill(-1)
        return bits

    def _fill(self, rows: Sequence[tuple[MaskAsk, int]], bits: np.ndarray) -> None:
        self.slow = []
        if self._alone is None and any(ask.drafts for ask, _ in rows):
            self._alone = LLExecutor(1)
        rest = rows if self._costly else rows[self._fill_part(rows, bits, PATIENCE).rows :]
        self._costly = bool(rest) and self._share_out(rest, bits) > PATIENCE

    def _share_out(self, rest: Sequence[tuple[MaskAsk, int]], bits: np.ndarray) -> float:
        """One automaton, one thread. Returns the seconds of all threads together."""
        parts: dict[Hashable, list[tuple[MaskAsk, int]]] = {}
        for ask, start in rest:
            parts.setdefault(ask.automaton, []).append((ask, start))
        longest = sorted(parts.values(), key=len, reverse=True)
        if len(longest) > 1 and self.threads > 1:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self.threads, "mask")
            filled = list(self._pool.map(lambda part: self._fill_part(part, bits), longest))
        else:
            filled = [self._fill_part(part, bits) for part in longest]
        self.slow = [[ask.row for ask, _ in part] for part, took in zip(longest, filled)
                     if took.seconds > PATIENCE and len(part) > 1]
        return sum(took.seconds for took in filled)

    def _fill_part(self, part: Sequence[tuple[MaskAsk, int]], bits: np.ndarray, patience: float = math.inf) -> Filled:
        """One row after the other, none after `patience` seconds. The interpreter's lock is not held meanwhile."""
        began, first, size = time.perf_counter(), bits.ctypes.data, bits.itemsize * bits.shape[1]
        for n, (ask, start) in enumerate(part):
            if time.perf_counter() - began > patience:
                return Filled(n, time.perf_counter() - began)
            if ask.drafts:
                assert self._alone is not None
                self._alone.unsafe_compute_mask_ptr_with_draft_token(
                    [(ask.matcher, start, ask.drafts)], first, size, len(bits))
            else:
                ask.matcher.unsafe_compute_mask_ptr(first + start * size, size)
        return Filled(len(part), time.perf_counter() - began)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()


def _cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
