"""The simulation beside the engine's own host half, which plans real steps for a device that takes the cost model's
time on a clock of its own: the same load, and what clients see must agree."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass

import numpy as np
import pytest

from stretto.host.cost import CostModel, StepWork
from stretto.host.half import HostHalf
from stretto.host.limits import HostLimits
from stretto.params import SamplingParams
from stretto.plan.hardware import engine, find_hardware
from stretto.plan.load import Talk, Turn
from stretto.plan.shapes import find_shape
from stretto.plan.simulate import Outcome, Replica, simulate
from stretto.plan.steps import Steps
from stretto.protocol import Request
from stretto.wire import Int, RowResult, StepPlan, StepResult

PAGE, CONTEXT = 16, 16_384


@dataclass
class Row:
    epoch: int
    length: int
    known: int
    limit: int


class TimedDevice:
    """Runs plans one after the other, each as long as the cost model says. Without drafts the row formula of
    docs/design.md is short."""

    def __init__(self, cost: CostModel):
        self._cost, self._slots, self.free_at = cost, dict[int, Row](), 0.0

    def run(self, plan: StepPlan, now: float) -> tuple[float, StepResult]:
        """When the step ends, and what it did."""
        for slot in plan.releases:
            self._slots.pop(slot, None)
        for seat in plan.seats:
            ints = seat.ints
            self._slots[seat.slot] = Row(ints[Int.EPOCH], ints[Int.LEN], ints[Int.KNOWN], ints[Int.LIMIT])
        rows, tokens, context, pairs, fed_rows = [], 0, 0, 0, 0
        for slot, epoch, cap in plan.rows:
            row = self._slots.get(slot)
            if row is None or row.epoch != epoch:
                rows.append(RowResult(slot, -1, 0, 0, 0, 0, False, [], []))
                continue
            fed = max(0, min(cap, row.known - row.length, row.limit - 1 - row.length))
            if fed > 1:
                pairs += fed * row.length + fed * (fed + 1) // 2
            row.length += fed
            tokens, context, fed_rows = tokens + fed, context + row.length, fed_rows + bool(fed)
            new = [1 + row.known % 7] if fed and row.length == row.known else []
            row.known += len(new)
            rows.append(RowResult(slot, epoch, fed, 0, row.length, row.known, row.known >= row.limit, new, []))
        self.free_at = max(self.free_at, now) + self._cost.seconds(StepWork(fed_rows, tokens, context, pairs))
        return self.free_at, StepResult(plan.seq, rows)


class Clients:
    """Sends conversations, and notes what it sees. The next turn's prompt is the whole conversation so far."""

    def __init__(self, talks: list[Talk]):
        self._talks, self._random = talks, random.Random(0)
        self.due = [(talk.at, index, 0, list[int]()) for index, talk in enumerate(talks)]
        self._asked: dict[str, tuple[float, int, int, list[int]]] = {}
        self._last: dict[str, float] = {}
        self.first: list[float] = []
        self.gaps: list[float] = []

    def send(self, host: HostHalf, now: float) -> None:
        for at, talk, turn, history in sorted(d for d in self.due if d[0] <= now):
            wanted = self._talks[talk].turns[turn]
            tokens = history + [self._random.randrange(1000) for _ in range(wanted.prompt)]
            rid = f"{talk} {turn}"
            self._asked[rid] = (at, talk, turn, tokens)
            host.submit(Request(rid=rid, tokens=tokens, want_text=False, sampling=SamplingParams(
                temperature=0.0, max_tokens=wanted.output, ignore_eos=True)))
        self.due = [d for d in self.due if d[0] > now]

    def receive(self, outputs, now: float) -> None:
        for output in outputs:
            at, talk, turn, tokens = self._asked[output.rid]
            if output.token_ids:
                if output.rid in self._last:
                    self.gaps.append(now - self._last[output.rid])
                else:
                    self.first.append(now - at)
                self._last[output.rid] = now
                tokens += output.token_ids
            turns = self._talks[talk].turns
            if output.finish_reason and turn + 1 < len(turns):
                self.due.append((now + turns[turn + 1].think, talk, turn + 1, tokens))


def play(replica: Replica, talks: list[Talk]) -> tuple[Clients, float]:
    """The engine's loop with one step in flight, on a clock of its own. Returns the clients and the end of the last
    step."""
    pages = replica.kv_tokens // PAGE
    host = HostHalf(HostLimits(page_size=PAGE, pages=(pages,), max_slots=replica.seats + 1, max_model_len=CONTEXT,
                               chunk=replica.chunk, budget=replica.budget, depth=1))
    device, clients = TimedDevice(replica.cost), Clients(talks)
    flying: deque[tuple[float, StepResult]] = deque()
    now = 0.0
    while clients.due or host.has_work or flying:
        clients.send(host, now)
        plan = host.plan()
        if plan is not None:
            flying.append(device.run(plan, now))
        if len(flying) > (1 if plan is not None else 0):
            now, result = flying.popleft()
            clients.receive(host.process(result), now)
        elif plan is None and clients.due:
            now = max(now, min(clients.due)[0])
    return clients, now


def agree(outcome: Outcome, clients: Clients, seconds: float, within: float) -> None:
    for share in (0.5, 0.9):
        assert outcome.first_token(share) == pytest.approx(float(np.quantile(clients.first, share)), rel=within)
        assert outcome.between(share) == pytest.approx(float(np.quantile(clients.gaps, share)), rel=within)
    assert outcome.seconds == pytest.approx(seconds, rel=within)


def poisson(count: int, rate: float, turns: int) -> list[Talk]:
    rng, at, talks = random.Random(3), 0.0, []
    for _ in range(count):
        at += rng.expovariate(rate)
        talks.append(Talk(at, tuple(Turn(rng.randrange(60, 1500), rng.randrange(16, 90), 1.0 if turn else 0.0)
                                    for turn in range(turns))))
    return talks


@pytest.mark.parametrize("kv, rate, turns, chunk, budget, within", [
    (200_000, 8.0, 1, 2048, 8192, 0.02), (200_000, 30.0, 1, 512, 640, 0.02), (200_000, 5.0, 3, 512, 640, 0.08),
    (12_000, 20.0, 1, 512, 640, 0.15)], ids=["chunks", "busy", "conversations", "little memory"])
def test_the_simulation_sees_what_the_host_half_does(kv: int, rate: float, turns: int, chunk: int, budget: int,
                                                     within: float):
    """Of whole pages and of who is put back for want of memory the simulation knows nothing: so much is left."""
    cost = Steps(find_shape("llama-3.1-8b"), find_hardware("h200"), engine()).cost(8192 + 256)
    replica = Replica(cost, kv, 64, budget, chunk, overhead=0.0)
    talks = poisson(60 // turns, rate, turns)
    clients, seconds = play(replica, talks)
    assert len(clients.first) == sum(len(talk.turns) for talk in talks)
    agree(simulate(replica, talks), clients, seconds, within)
