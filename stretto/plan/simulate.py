"""One replica under a load, step by step: what its requests see. A discrete-event simulation over the engine's own cost
model (host/cost.py).

    arrive -> wait for a place -> prompt in chunks, beside the others' tokens -> a token a step -> think -> next turn

As the engine does: whoever arrives while a step runs is in the step after the next (one step is planned ahead); a step
holds the running rows, then chunks of prompts up to its budget, in the order of arrival; KV that is only kept for a
next turn makes room, the longest idle first, and a turn whose history has gone computes it again. A request is admitted
when its whole length fits, where the engine would start it and put somebody back if need be. Steps between two events
that are alike are taken together, since their cost grows evenly with the contexts. With a drafter each step verifies
drafts where that makes a token cheaper, and else none.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from stretto.host.cost import CostModel, StepWork
from stretto.plan.load import Drawn, Talk

ROUNDING = 1e-6
GROWING, LEAST_THIRD = 2.0, 20  # how much longer the last third of requests may wait than the third before; of so many
WARM = 0.2  # share of a drawn load in which the batch fills


class CostTable:
    """A cost model's seconds from a table of token counts and three slopes: the same figures (a test compares), fifty
    times as fast."""

    def __init__(self, cost: CostModel, most: int):
        bare = StepWork(0, 0, 0)
        self._base: list[float] = cost.curve(bare, np.arange(most + 1)).tolist()
        start = cost.seconds(bare)
        scale = 1 << 20
        self._row, self._cell, self._pair = ((cost.seconds(work) - start) / scale for work in (
            StepWork(scale, 0, 0), StepWork(0, 0, scale), StepWork(0, 0, 0, scale)))

    def seconds(self, rows: int, tokens: int, context: float, pairs: int = 0) -> float:
        base = self._base[min(tokens, len(self._base) - 1)]
        return base + rows * self._row + context * self._cell + pairs * self._pair


@dataclass(frozen=True)
class Replica:
    """`kv_tokens`: cells of KV memory. `seats`, `budget`, `chunk`: rows at once, tokens of a step, of a prompt in it.
    `overhead`: seconds of the server before a first token (HTTP, tokenizer)."""

    cost: CostModel
    kv_tokens: int
    seats: int
    budget: int
    chunk: int
    overhead: float = 0.002
    shared: int = 0  # tokens at every conversation's beginning that the prefix cache has
    drafts: int = 0  # that a row verifies where it pays
    accepted: float = 1.0  # tokens that such a row gains, its own one included

    @cached_property
    def table(self) -> CostTable:
        return CostTable(self.cost, self.budget + self.seats * (1 + self.drafts))


@dataclass
class Outcome:
    """Times in seconds. `gaps`: (seconds, how many) between tokens. `waited`: of the seconds to the first token those
    before admission."""

    first: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)
    gaps: list[tuple[float, float]] = field(default_factory=list)
    seconds: float = 0.0
    busy: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: float = 0
    turns: int = 0
    most_kv: int = 0
    blocked_by_kv: float = 0.0  # seconds in which somebody waited for cells, not for a place
    progress: list[tuple[float, float]] = field(default_factory=list)  # (when, generated tokens so far)

    def first_token(self, share: float) -> float:
        return float(np.quantile(self.first, share)) if self.first else 0.0

    def between(self, share: float) -> float:
        if not self.gaps:
            return 0.0
        seconds, counts = np.asarray([g for g, _ in self.gaps]), np.asarray([n for _, n in self.gaps])
        order = np.argsort(seconds)
        reached = np.cumsum(counts[order])
        return float(seconds[order][np.searchsorted(reached, share * reached[-1])])

    @property
    def output_rate(self) -> float:
        return self.output_tokens / self.seconds if self.seconds else 0.0

    @property
    def steady_rate(self) -> float:
        """Generated tokens a second in the middle half of the time: without the beginning and the end, which a load
        that is drawn has and a real one has not."""
        if not self.progress:
            return 0.0
        times, counts = np.asarray(self.progress).T
        quarter = (times[-1] - times[0]) / 4
        if quarter <= 0:
            return self.output_rate
        return float(np.diff(np.interp([times[0] + quarter, times[-1] - quarter], times, counts))[0] / (2 * quarter))

    @property
    def load(self) -> float:
        """Share of the time in which steps ran."""
        return self.busy / self.seconds if self.seconds else 0.0

    @property
    def grows(self) -> bool:
        """Requests wait longer and longer: more comes than goes."""
        third = len(self.waited) // 3
        if third < LEAST_THIRD:
            return False
        before, last = self.waited[third : 2 * third], self.waited[-third:]
        return sum(last) > GROWING * sum(before) + 0.05 * third


@dataclass
class Together(Outcome):
    """Of several replicas side by side: what all their users see. Its times in all are those of a replica on the
    average; `seconds` are those of the last."""

    growing: bool = False  # on some replica

    @classmethod
    def of(cls, parts: Sequence[Outcome]) -> Together:
        """`parts`: one or more."""
        made = cls(seconds=max(part.seconds for part in parts), growing=any(part.grows for part in parts),
                   most_kv=max(part.most_kv for part in parts))
        for part in parts:
            made.first += part.first
            made.waited += part.waited
            made.gaps += part.gaps
            made.busy += part.busy / len(parts)
            made.blocked_by_kv += part.blocked_by_kv / len(parts)
            made.prompt_tokens += part.prompt_tokens
            made.cached_tokens += part.cached_tokens
            made.output_tokens += part.output_tokens
            made.turns += part.turns
        return made

    @property
    def grows(self) -> bool:
        return self.growing


@dataclass(eq=False)
class _Request:
    talk: int
    turn: int
    arrived: float
    history: int  # tokens before this turn's prompt
    prompt: int
    output: int
    left: int = 0  # tokens of the prompt not yet computed
    context: int = 0  # cells
    admitted: float = 0.0

    @property
    def length(self) -> int:
        return self.history + self.prompt + self.output


class Simulation:
    """One run."""

    def __init__(self, replica: Replica, talks: Sequence[Talk], until: float = math.inf, since: float = 0.0):
        """`until`: seconds at which it is cut off. `since`: requests before that are not looked at."""
        self._replica, self._talks, self._until, self._since = replica, talks, until, since
        self._seconds = replica.table.seconds
        self._arrivals = [(talk.at, index, 0, talk.history) for index, talk in enumerate(talks)]
        heapq.heapify(self._arrivals)  # (when, talk, turn, history)
        self._waiting: deque[_Request] = deque()
        self._filling: deque[_Request] = deque()  # their prompts are being computed
        self._ends: list[tuple[float, int, _Request]] = []  # (`_decoded` at which it ends, tie, request)
        self._decoded = 0.0  # tokens that a row which was there all the time would have
        self._contexts = 0.0  # cells of the rows that decode
        self._reserved = 0  # cells of admitted requests
        self._idle: OrderedDict[int, int] = OrderedDict()  # talk -> cells kept for its next turn
        self._idle_cells = 0
        self._now = 0.0
        self._seen = 0.0  # arrivals up to here may be in the next step
        self._ties = 0
        self.outcome = Outcome()
        for index, talk in enumerate(talks):
            if talk.history:
                self._keep(index, talk.history - 1)
        self._make_room(0)

    def run(self) -> Outcome:
        while (self._arrivals or self._waiting or self._filling or self._ends) and self._now < self._until:
            if not (self._waiting or self._filling or self._ends):
                self._now = max(self._now, self._arrivals[0][0])
                self._seen = self._now
            self._arrive()
            self._admit()
            if self._filling:
                self._mixed_step()
            elif self._ends:
                self._decode_steps()
            else:  # everybody waits for what has yet to arrive
                self._seen = self._now = max(self._now, self._arrivals[0][0])
        for request in (*self._waiting, *self._filling):  # cut off: it took them so long at least
            self._saw(request, request.admitted if request in self._filling else self._now)
        self.outcome.seconds = self._now
        return self.outcome

    # ---------------------------------------------------------------------------------------------------- arrival
    def _arrive(self) -> None:
        while self._arrivals and self._arrivals[0][0] <= self._seen:
            at, talk, turn, history = heapq.heappop(self._arrivals)
            wanted = self._talks[talk].turns[turn]
            self._waiting.append(_Request(talk, turn, at, history, wanted.prompt, wanted.output))

    def _admit(self) -> None:
        replica = self._replica
        while self._waiting and self._seats_left():
            request = self._waiting[0]
            kept = self._idle.pop(request.talk, 0)
            self._idle_cells -= kept
            if not self._make_room(request.length):
                if kept:
                    self._keep(request.talk, kept)
                return
            self._waiting.popleft()
            self._reserved += request.length
            cached = max(kept, min(replica.shared, request.history + request.prompt - 1) if self.outcome.turns else 0)
            request.context = cached
            request.left = request.history + request.prompt - cached
            request.admitted = self._now
            self._filling.append(request)
            self.outcome.turns += 1
            self.outcome.prompt_tokens += request.history + request.prompt
            self.outcome.cached_tokens += cached
            self.outcome.most_kv = max(self.outcome.most_kv, self._reserved + self._idle_cells)

    def _make_room(self, cells: int) -> bool:
        """Idle conversations give way, the longest idle first. A request that is longer than the memory runs alone."""
        while self._idle and self._reserved + self._idle_cells + cells > self._replica.kv_tokens:
            self._idle_cells -= self._idle.popitem(last=False)[1]
        return self._reserved + cells <= self._replica.kv_tokens or not self._reserved

    def _keep(self, talk: int, cells: int) -> None:
        self._idle[talk] = cells
        self._idle_cells += cells

    # ------------------------------------------------------------------------------------------------------ steps
    def _mixed_step(self) -> None:
        replica, rows = self._replica, len(self._ends)
        room, tokens, context, pairs = max(replica.budget - rows, 1), 0, self._contexts, 0
        chunks: list[tuple[_Request, int]] = []
        for request in self._filling:
            size = min(request.left, replica.chunk, room - tokens)
            if size <= 0:
                break
            chunks.append((request, size))
            tokens += size
            context += request.context + size
            pairs += size * request.context + size * (size + 1) // 2
        wide, gained = self._width(len(chunks), tokens, context, pairs)
        self._pass(self._seconds(wide * rows + len(chunks), wide * rows + tokens, context, pairs), 1, gained)
        self._grow(gained)
        for request, size in chunks:
            request.left -= size
            request.context += size
            if not request.left:
                self._filling.remove(request)
                self._first_token(request)

    def _decode_steps(self) -> None:
        """Steps until a row ends, or somebody arrives: seconds of the i-th are `first + i * more`."""
        wide, gained = self._width(0, 0, self._contexts, 0)
        fed = wide * len(self._ends)
        most = math.ceil((self._ends[0][0] - self._decoded) / gained)
        first = self._seconds(fed, fed, self._contexts)
        grown = self._contexts + len(self._ends) * most * gained
        more = max(self._seconds(fed, fed, grown) - first, 0.0) / most
        count = most
        if self._arrivals and self._seats_left():
            count = min(most, 1 + _steps_until(self._arrivals[0][0] - self._now, first, more))
        self._pass(count * first + more * count * (count - 1) / 2, count, gained)
        self._grow(count * gained)

    def _width(self, chunks: int, tokens: int, context: float, pairs: int) -> tuple[int, float]:
        """(tokens that each row feeds, tokens that it gains) in a step with so many chunks: drafts where a token of the
        step gets cheaper by them, those of prompts counted like those that are gained."""
        rows, replica = len(self._ends), self._replica
        if not replica.drafts:
            return 1, 1.0
        narrow, wide = (self._seconds(n * rows + chunks, n * rows + tokens, context, pairs)
                        for n in (1, 1 + replica.drafts))
        pays = wide * (rows + tokens) < narrow * (rows * replica.accepted + tokens)
        return (1 + replica.drafts, replica.accepted) if pays else (1, 1.0)

    def _seats_left(self) -> bool:
        return len(self._filling) + len(self._ends) < self._replica.seats

    def _pass(self, seconds: float, steps: int, gained: float) -> None:
        """Time of some steps in each of which every row gains so many tokens; the next step is planned when the last of
        them starts."""
        if self._waiting and self._seats_left():
            self.outcome.blocked_by_kv += seconds
        self._seen = self._now + seconds * (steps - 1) / steps
        self._now += seconds
        self.outcome.busy += seconds
        if self._ends and self._now >= self._since:
            self.outcome.gaps.append((seconds / steps / gained, steps * gained * len(self._ends)))
        self.outcome.output_tokens += steps * gained * len(self._ends)
        self.outcome.progress.append((self._now, self.outcome.output_tokens))

    def _grow(self, tokens: float) -> None:
        """Every row has so many more."""
        self._decoded += tokens
        self._contexts += tokens * len(self._ends)
        while self._ends and self._ends[0][0] <= self._decoded + ROUNDING:
            end, _, request = heapq.heappop(self._ends)
            beyond = self._decoded - end  # that the last step would have given it
            self.outcome.output_tokens -= beyond
            self._contexts -= request.history + request.prompt + request.output - 1 + beyond
            self._end(request)

    def _first_token(self, request: _Request) -> None:
        self._saw(request, request.admitted)
        self.outcome.output_tokens += 1
        if request.output == 1:
            self._end(request)
            return
        self._ties += 1
        self._contexts += request.history + request.prompt
        heapq.heappush(self._ends, (self._decoded + request.output - 1, self._ties, request))

    def _saw(self, request: _Request, admitted: float) -> None:
        if request.arrived >= self._since:
            self.outcome.first.append(self._now - request.arrived + self._replica.overhead)
            self.outcome.waited.append(admitted - request.arrived)

    def _end(self, request: _Request) -> None:
        self._reserved -= request.length
        turns = self._talks[request.talk].turns
        if request.turn + 1 < len(turns):
            following = turns[request.turn + 1]
            if not following.fresh:
                self._keep(request.talk, request.length - 1)
            heapq.heappush(self._arrivals, (self._now + following.think, request.talk, request.turn + 1,
                                            0 if following.fresh else request.length))


def _steps_until(seconds: float, first: float, more: float) -> int:
    """How many steps have ended, or run, when so many seconds have passed; the i-th takes first + i * more."""
    if seconds <= 0:
        return 0
    if more <= 1e-15:
        return int(seconds / first) + 1
    half = first - more / 2
    return int((-half + (half * half + 2 * more * seconds) ** 0.5) / more) + 1


def simulate(replica: Replica, talks: Sequence[Talk]) -> Outcome:
    """From the first request to the end of the last."""
    return Simulation(replica, talks).run()


def simulate_long(replica: Replica, load: Drawn) -> Outcome:
    """A load that has been there for long: neither what is drawn first, while the batch fills, nor the end is seen."""
    return Simulation(replica, load.talks, load.seconds, load.seconds * WARM).run()
