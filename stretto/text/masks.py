"""Token masks from the states of grammars: which ids may follow at each position of a window.

A mask takes 10 us where its grammar's automaton has been in the place before, so the masks of 64 rows are made faster
than threads could be told of them. Some take a millisecond (long runs of any letters: most of the vocabulary has to be
walked), and those are shared out. Copies of a matcher have one automaton, which one thread at a time may use: masks of
one grammar can only be made one after another.

    rows                 | b a a c b a a b c a |
    this thread          | b a a c |              one by one, timed, until PATIENCE has passed
    then                 | a a a | b b | c |      by automaton, on llguidance's threads: one call, for which the
                                                  interpreter's lock is given up and taken once
    the next SHARED      | a a a a a | b b b | c c |   at once, as long as all of them together take so long

One call for the first of each automaton, one for the second, and so on, lets no thread wait for another within a call,
but all wait for the slowest each time: 64 rows on 16 cores took 1.0 to 1.5 times as long (`benchmarks.grammars_gpu` on
the host of an H200: 6.6 to 7.1 ms instead of 4.6 for addresses, 6.4 to 6.9 instead of 6.7 for words).

`slow` tells of whom there should be more (host/grammar.py).

Where a grammar tells the place of a row (text/regex_places.py), its mask is made once, whoever comes there again. No
torch in this module.
"""

from __future__ import annotations

import os
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from llguidance import LLExecutor, LLMatcher

from stretto.text.mask_cache import MaskCache
from stretto.text.regex_places import RegexPlaces
from stretto.wire import LateMask

PATIENCE = 2e-3  # seconds after which masks are shared out; well below a step of a large model
SHARED = 32  # how often they are shared out at once before they are timed again


@dataclass(frozen=True)
class MaskAsk:
    """What one row of a plan needs: masks at its window's positions, `drafts` taken as given one after another."""

    row: int  # in the plan
    matcher: LLMatcher  # left as it is
    drafts: list[int]
    withheld: int = 0  # at so many first positions no stop id, while there is another choice (min_tokens)
    stop_ids: Sequence[int] = ()
    automaton: Hashable = None  # rows with the same one cannot be made at once
    grammar: Hashable = None  # rows of the same one are held to take as long as each other
    keys: Sequence[Hashable] = ()  # of the first positions' masks, as far as they are known: equal keys, equal masks
    places: RegexPlaces | None = None  # that gave the keys


class Memory(NamedTuple):
    """Of the masks: where it begins, bytes of each, how many."""

    address: int
    each: int
    masks: int


class MaskMaker:
    """Fills masks for one vocabulary. `slow`: rows of the last `make` that had to wait for each other, of each
    automaton, where it took longer than PATIENCE and their grammar is known to be slow. `work`: seconds that it took,
    by automaton; an upper bound where masks were shared out. `reused`: masks that had been made, since the start."""

    def __init__(self, vocab_size: int, threads: int | None = None):
        self._words = -(-vocab_size // 32)
        self._cache = MaskCache()
        self.reused = 0
        self.work: dict[Hashable, float] = {}
        self.threads = threads or min(16, _cores())
        self._executors: dict[int, LLExecutor] = {}  # by threads; made when they are first needed
        self.slow: list[list[int]] = []
        self._at_once = 0  # so often masks are shared out without a trial
        self._seconds: dict[Hashable, float] = {}  # of a mask, by grammar
        self._bits = np.empty((0, self._words), dtype=np.int32)

    def make(self, seq: int, n_rows: int, asks: Sequence[MaskAsk]) -> tuple[LateMask, list[int]]:
        """The mask of a plan with so many rows, good until the next one is made; and rows that nothing may follow."""
        sizes = [1 + len(ask.drafts) for ask in asks]
        index = np.full((n_rows, max(sizes, default=1)), -1, dtype=np.int32)
        bits = self._room(sum(sizes))
        starts = [0, *np.cumsum(sizes).tolist()]
        for ask, start, size in zip(asks, starts, sizes):
            index[ask.row, :size] = np.arange(start, start + size)
        first = seq % max(len(asks), 1)  # each row is timed now and then
        rows = list(zip(asks, starts))
        rows = [row for row in rows[first:] + rows[:first] if not self._remembered(*row, bits)]
        apart, alike = _apart(rows)
        self._fill(apart, Memory(bits.ctypes.data, bits.itemsize * self._words, len(bits)))
        for ask, start in apart:
            self._remember(ask, start, bits)
        for (ask, start), (_, other) in alike:
            self.reused += len(ask.keys)
            bits[start : start + len(ask.keys)] = bits[other : other + len(ask.keys)]
        stuck = sorted(ask.row for ask, start in rows if ask.matcher.is_error() or not bits[start].any())
        for ask, start, size in zip(asks, starts, sizes):
            if ask.withheld:
                _withhold(bits[start : start + min(ask.withheld, size)], ask.stop_ids)
        return LateMask(seq, index, bits), stuck

    def _remembered(self, ask: MaskAsk, start: int, bits: np.ndarray) -> bool:
        """Fills the masks of a row from those that were made, as far as its drafts lead; False where one is missing."""
        for i, key in enumerate(ask.keys):
            mask = self._cache.get(key)
            if mask is None:
                return False
            bits[start + i] = mask
            if i == len(ask.drafts) or not _allows(mask, ask.drafts[i]):
                self.reused += i + 1
                if ask.places is not None:
                    ask.places.reused(i + 1)
                return True
        return False

    def _remember(self, ask: MaskAsk, start: int, bits: np.ndarray) -> None:
        if ask.keys and not ask.matcher.is_error():
            for i, key in enumerate(ask.keys):
                self._cache.put(key, bits[start + i])

    def _room(self, n: int) -> np.ndarray:
        """[n, words], all bits set: memory that stays, since new memory costs as much as the masks."""
        if len(self._bits) < n:
            self._bits = np.empty((n, self._words), dtype=np.int32)
        bits = self._bits[:n]
        bits.fill(-1)
        return bits

    def _fill(self, rows: Sequence[tuple[MaskAsk, int]], memory: Memory) -> None:
        self.slow, self.work = [], {}
        here = {ask.grammar for ask, _ in rows}
        self._seconds = {grammar: seconds for grammar, seconds in self._seconds.items() if grammar in here}
        done = 0 if self._at_once else self._one_by_one(rows, memory)
        self._at_once = max(0, self._at_once - 1)
        if rest := rows[done:]:
            self._share_out(rest, memory)

    def _one_by_one(self, rows: Sequence[tuple[MaskAsk, int]], memory: Memory) -> int:
        """Until PATIENCE has passed. Returns how many."""
        began = last = time.perf_counter()
        seconds: dict[Hashable, float] = {}
        for done, (ask, start) in enumerate(rows):
            if last - began > PATIENCE:
                self._seconds |= seconds
                return done
            self._fill_row(ask, start, memory)
            before, last = last, time.perf_counter()
            seconds[ask.grammar] = last - before
            self.work[ask.automaton] = self.work.get(ask.automaton, 0.0) + last - before
        self._seconds = seconds  # nothing takes long
        return len(rows)

    def _share_out(self, rest: Sequence[tuple[MaskAsk, int]], memory: Memory) -> None:
        parts: dict[Hashable, list[tuple[MaskAsk, int]]] = {}
        for row in rest:
            parts.setdefault(row[0].automaton, []).append(row)
        longest = sorted(parts.items(), key=lambda part: len(part[1]), reverse=True)
        threads = min(self.threads, len(longest))
        began = time.perf_counter()
        if threads == 1:
            for ask, start in rest:
                self._fill_row(ask, start, memory)
        else:
            self._fill_together([row for _, part in longest for row in part], memory, threads)
        took = time.perf_counter() - began
        for automaton, part in longest:
            self.work[automaton] = self.work.get(automaton, 0.0) + took * threads * len(part) / len(rest)
        if took * threads > PATIENCE and not self._at_once:
            self._at_once = SHARED
        if took > PATIENCE:  # a grammar that was never timed may be quick: its turn comes
            self.slow = [[ask.row for ask, _ in part] for _, part in longest
                         if len(part) > 1 and len(part) * self._seconds.get(part[0][0].grammar, 0.0) > PATIENCE / 2]

    def _fill_row(self, ask: MaskAsk, start: int, memory: Memory) -> None:
        if ask.drafts:
            self._executor(1).unsafe_compute_mask_ptr_with_draft_token(  # one row it makes on the thread that asks
                [(ask.matcher, start, ask.drafts)], *memory)
        else:
            ask.matcher.unsafe_compute_mask_ptr(memory.address + start * memory.each, memory.each)

    def _fill_together(self, rows: Sequence[tuple[MaskAsk, int]], memory: Memory, threads: int) -> None:
        executor = self._executor(threads)
        if plain := [(ask.matcher, start) for ask, start in rows if not ask.drafts]:
            executor.unsafe_compute_mask_ptr(plain, *memory)
        if drafted := [(ask.matcher, start, ask.drafts) for ask, start in rows if ask.drafts]:
            executor.unsafe_compute_mask_ptr_with_draft_token(drafted, *memory)

    def _executor(self, threads: int) -> LLExecutor:
        if threads not in self._executors:
            self._executors[threads] = LLExecutor(threads)
        return self._executors[threads]

    def close(self) -> None:
        self._executors.clear()


def _apart(rows: Sequence[tuple[MaskAsk, int]]) -> tuple[list[tuple[MaskAsk, int]],
                                                         list[tuple[tuple[MaskAsk, int], tuple[MaskAsk, int]]]]:
    """Those whose masks differ as far as is known, and each other one with the one that it is like."""
    apart: list[tuple[MaskAsk, int]] = []
    alike: list[tuple[tuple[MaskAsk, int], tuple[MaskAsk, int]]] = []
    leaders: dict[tuple[Hashable, ...], tuple[MaskAsk, int]] = {}
    for row in rows:
        known = tuple(row[0].keys)
        if len(known) <= len(row[0].drafts):
            apart.append(row)
        elif known in leaders:
            alike.append((row, leaders[known]))
        else:
            leaders[known] = row
            apart.append(row)
    return apart, alike


def _allows(mask: np.ndarray, token: int) -> bool:
    return 0 <= token >> 5 < len(mask) and bool(mask[token >> 5] >> (token & 31) & 1)


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
