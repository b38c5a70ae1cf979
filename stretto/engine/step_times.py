"""How long steps take on this machine: measured before the first request, for host/cost.py.

Steps of several sizes run through the device half as real plans: rows that decode, rows that verify drafts, prompt
chunks, each on short and long contexts, with and without proposals. The ids are random, and the KV cells are whatever
the pool holds; neither matters for the time. Everything is released afterwards.

    seat n rows, step            warm
    step, step, step             timed, each from launch to result; the shortest counts: what makes one longer is others
    release

The order goes from what matters most to what matters least, and measuring stops when its time is over. A point that
would take most of what is left of it gives way to those behind it.

A server launches a step before it has the result of the one before. What that saves is measured once, and taken off:

    one by one   | launch | device ...... | collect |        | launch | device ...... | collect |
    overlapped   | launch | device ...... | device ...... | device ...... |
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from stretto.device.streams import DeviceHalf
from stretto.host.cost import StepWork
from stretto.host.limits import HostLimits
from stretto.wire import NEVER, HostDraft, Int, Real, Seam, Seat, StepPlan, StepResult, pack_plan, unpack_result

logger = logging.getLogger(__name__)

Samples = list[tuple[StepWork, float]]

TIMED_STEPS = 3
SECONDS = 4.0  # that measuring takes at most by the clock of steps, but for the first points
REAL_SECONDS = 12.0  # that it takes at most in any case: work may get on slowly on a machine that others use
LEAST_POINTS = 4  # that are measured even where they take longer
LONG_STEP = 0.2  # seconds from which one run is enough
SHORT_CONTEXT, LONG_CONTEXT = 32, 2048
MANY_CELLS = 1 << 17  # that the rows of one point read, at least: enough for what a cell costs
ROWS = (1, 4, 16, 64, 256)
FULL_ROWS = (24, 48, 96)  # also, each with all its drafts: where steps begin to compute more than they read
FORMAT = 3  # of what is measured, and how: samples of another one are of no use
FIRST_EPOCH = 1 << 30  # no turn will have it


@dataclass(frozen=True)
class Point:
    """One step to measure: rows that verify `drafts` drafts each, or a single prompt chunk."""

    rows: int
    context: int
    drafts: int = 0
    draft_width: int = 0
    chunk: int = 0

    @property
    def work(self) -> StepWork:
        if self.chunk:
            read = self.context + self.chunk
            return StepWork(1, self.chunk, read, self.chunk * read)
        tokens = self.rows * (1 + self.drafts)
        return StepWork(self.rows, tokens, self.rows * self.context, draft_width=self.draft_width)


def points(limits: HostLimits) -> list[Point]:
    """What is worth measuring, the most important first."""
    room = limits.max_model_len - 1 - (TIMED_STEPS + 1) * (1 + limits.width)
    short, long = max(0, min(SHORT_CONTEXT, room)), max(0, min(LONG_CONTEXT, room))
    rows = [n for n in ROWS if 1.5 * n < limits.max_slots - 1] + [limits.max_slots - 1]
    rows = [n for n in rows if n * (1 + limits.width) <= limits.budget] or [1]
    own = 0 if limits.drafter is not None else limits.width  # drafts that the device proposes
    chunks = sorted({max(1, min(n, limits.chunk, room)) for n in (64, 512, limits.chunk)})
    few, half = min(1, limits.width), limits.width // 2
    found = [Point(1, short), Point(1, short, limits.width), Point(1, 0, chunk=chunks[0])]
    found += [Point(1, short, draft_width=own)]
    for n in rows[1:-1]:
        found += [Point(n, short), Point(n, short, limits.width)]
    # with many rows the number of drafts matters most, and contexts as much as tokens
    n = rows[-1]
    found += [Point(n, short), Point(n, max(short, min(long, MANY_CELLS // n))), Point(n, short, few, own)]
    found += [Point(n, short, half, own), Point(n, short, draft_width=own), Point(1, 0, chunk=chunks[-1])]
    found += [Point(n, short, few) for n in rows[2:-1]] + [Point(n, short, limits.width), Point(1, long)]
    found += [Point(n, short, half) for n in rows[:3]]
    found += [Point(1, 0, chunk=n) for n in chunks[1:-1]]
    found += [Point(1, min(long, room - chunks[-1]), chunk=chunks[-1])]
    found += [Point(n, short, draft_width=own) for n in rows[1:-1]]
    found += [Point(n, short, limits.width) for n in FULL_ROWS if n < rows[-1]] + [Point(n, long) for n in rows[1:]]
    found += [Point(n, short, half) for n in rows[3:-1]]
    most = min(limits.kv_tokens, limits.max_model_len)
    return [p for p in dict.fromkeys(found) if p.context >= 0 and _cells(p, limits) <= most]


def _cells(point: Point, limits: HostLimits) -> int:
    """That one row needs; rows share pages where the pool is small."""
    return point.context + point.chunk + (TIMED_STEPS + 1) * (1 + limits.width)


def _expected(point: Point, samples: Samples) -> float:
    """Seconds that measuring it will take, about: in proportion to its tokens, as the largest step before it."""
    work, seconds = max(samples, key=lambda sample: sample[0].tokens)
    step = seconds * max(1.0, point.work.tokens / work.tokens)
    return step * (1 if step > LONG_STEP else 1 + TIMED_STEPS)


class StepTimes:
    """Measures points on a device half that runs nothing else. Random ids are below `vocab_size`."""

    def __init__(self, device: DeviceHalf, limits: HostLimits, vocab_size: int):
        self._device, self._limits, self._vocab_size = device, limits, vocab_size
        self._clock = limits.step_clock
        self._random = np.random.default_rng(0)
        self._seq = 0

    def measure(self, seconds: float = SECONDS, progress: Callable[[int, int], None] | None = None,
                real_seconds: float = REAL_SECONDS) -> Samples:
        """(what, seconds) of each point that there was time for, by both clocks."""
        samples: Samples = []
        wanted = points(self._limits)
        ends, really_ends = self._clock() + seconds, time.monotonic() + real_seconds
        for done, point in enumerate(wanted, 1):
            left = min(ends - self._clock(), really_ends - time.monotonic())
            if done <= LEAST_POINTS or _expected(point, samples) < left / 2:
                samples.append((point.work, min(self._times(point))))
            if progress:
                progress(done, len(wanted))
        saved = samples[0][1] - self._overlapped(wanted[0]) if self._limits.depth else 0.0
        return [(work, took - min(max(saved, 0.0), took / 4)) for work, took in samples]

    def _overlapped(self, point: Point) -> float:
        """Seconds of a step that is launched while the one before runs, of rows that decode."""
        ends: list[float] = []
        for step in range(2 + TIMED_STEPS):
            plan = StepPlan(self._seq, rows=[(s, FIRST_EPOCH + s, 1) for s in range(1, 1 + point.rows)])
            self._seq += 1
            if step == 0:
                self._seat(plan, point)
            self._device.launch(pack_plan(plan))
            if step:
                self._device.collect()
                ends.append(self._clock())
        self._device.collect()
        self._release(point)
        return min(b - a for a, b in pairwise(ends))

    def _times(self, point: Point) -> Iterator[float]:
        """The first run, which compiles or warms, counts only where it takes long."""
        known = [point.context + max(point.chunk, 1)] * point.rows
        for step in range(1 + TIMED_STEPS):
            plan = StepPlan(self._seq, point.draft_width)
            self._seq += 1
            if step == 0 or point.chunk:
                self._seat(plan, point)
            for slot in range(1, 1 + point.rows):
                plan.rows.append((slot, FIRST_EPOCH + slot, point.chunk or 1 + point.drafts))
                if point.drafts:
                    plan.drafts.append(HostDraft(slot, FIRST_EPOCH + slot, known[slot - 1], self._ids(point.drafts)))
            result, took = self._run(plan)
            known = [row.known for row in result.rows]
            if step or took > LONG_STEP:
                yield took
            if took > LONG_STEP:
                break
        self._release(point)

    def _release(self, point: Point) -> None:
        self._run(StepPlan(self._seq, releases=list(range(1, 1 + point.rows))))
        self._seq += 1

    def _run(self, plan: StepPlan) -> tuple[StepResult, float]:
        packed = pack_plan(plan)
        began = self._clock()
        self._device.launch(packed)
        result = unpack_result(self._device.collect())
        return result, self._clock() - began

    def _ids(self, n: int) -> list[int]:
        return self._random.integers(0, self._vocab_size, n).tolist()

    def _seat(self, plan: StepPlan, point: Point) -> None:
        """Rows whose contexts count as fed. Their pages are spread over the pool, and shared where it is small."""
        limits, cells = self._limits, _cells(point, self._limits) + self._limits.lookahead
        each = -(-cells // limits.page_size)
        for slot in range(1, 1 + point.rows):
            log = self._ids(point.context + max(point.chunk, 1))
            ints = {Int.LEN: point.context, Int.KNOWN: len(log), Int.LIMIT: cells - limits.lookahead, Int.PROMPT: 1,
                    Int.EPOCH: FIRST_EPOCH + slot, Int.DRAFT_LEN: point.context, Int.SPECULATION: limits.width,
                    Int.LOGPROBS: -1, Int.SCORE_FROM: NEVER, Int.SEAM: Seam.KEEP if point.context else Seam.START}
            reals = {Real.TOP_P: 1.0, Real.REPETITION: 1.0}
            columns = [ints.get(c, 0) for c in Int], [reals.get(c, 0.0) for c in Real]
            plan.seats.append(Seat(slot, True, *columns, 0, log))
            plan.maps += [(slot, group, index, 1 + ((slot - 1) * each + index) % pages)
                          for group, pages in enumerate(limits.pages) for index in range(each)]


# --------------------------------------------------------------------------------------------------------------- cache
def cached(folder: Path, key: object, measure: Callable[[], Samples]) -> tuple[Samples, bool]:
    """The samples of an earlier start with an equal key (anything JSON can hold), or new ones; whether they are old."""
    name = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:24]
    path = folder / "step_times" / f"{name}.json"
    try:
        return [(StepWork(*work), float(seconds)) for work, seconds in json.loads(path.read_text())], True
    except (OSError, ValueError, TypeError):
        samples = measure()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(samples))
    except OSError as e:
        logger.info("step times are not kept for the next start: %s", e)
    return samples, False
