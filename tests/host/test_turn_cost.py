"""A turn of a long conversation costs its new tokens: what the host does, and what travels to the device, is counted.

Turns add two ids and are answered with two, so four turns fill a page of 16: edges of 16 turns hold four whole rounds,
and their sums can be compared exactly.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import pytest

from stretto.host import slots as slots_module
from stretto.host.half import HostHalf
from stretto.params import SamplingParams
from stretto.protocol import Request, SessionTurn
from stretto.wire import StepPlan, pack_plan
from tests.host.fake_device import FakeDevice
from tests.host.harness import plain_world
from tests.host.steps import GREEDY

TURNS, EDGE, PAGE = 150, 16, 16
HEAD, TAIL = range(EDGE, 2 * EDGE), range(TURNS - EDGE, TURNS)


@dataclass
class Talk:
    """Sessions over the real host half and the fake device, which finds every id and page that it was not told of."""

    windows: tuple[int | None, ...] = (None,)
    slots: int = 9
    plans: list[StepPlan] = field(default_factory=list)

    def __post_init__(self) -> None:
        world = plain_world(page_size=PAGE, max_model_len=8 * TURNS, pages=(600,), windows=self.windows, depth=0,
                            max_slots=self.slots)
        self.half, self.device = HostHalf(world.limits), FakeDevice(world.device_world(), random.Random(1))
        self.serial = 0

    def submit(self, sid: str, ids: list[int], answer: int = 2, **order: Any) -> str:
        self.serial += 1
        sampling = SamplingParams(**GREEDY, ignore_eos=True, max_tokens=answer)
        self.half.submit(Request(rid=str(self.serial), tokens=ids, sampling=sampling, want_text=False,
                                 session=SessionTurn(sid=sid, mode="append", **order)))
        return str(self.serial)

    def step(self) -> None:
        plan = self.half.plan()
        if plan is not None:
            self.plans.append(plan)
            self.half.process(self.device.run(plan))

    def turn(self, *sids: str, answer: int = 2) -> list[StepPlan]:
        """One turn of each; the plans that it took."""
        first = len(self.plans)
        for sid in sids:
            self.submit(sid, [self.serial % 50, 5], answer)
        while self.half.has_work:
            self.step()
        return self.plans[first:]


def instructions(act: Callable[[], object]) -> int:
    """Instructions of Python that the host half executed meanwhile: loops count as often as they run."""
    count = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        if "/stretto/host/" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("windows", [(None,), (None, 24)], ids=["full", "window"])
def test_what_travels_for_a_turn_does_not_grow(windows) -> None:
    """Words of the plans, bit for bit as many at 600 ids of history as at 64: the new ids, the new pages."""
    talk, words = Talk(windows), []
    for _ in range(TURNS):
        words.append(sum(len(pack_plan(plan)) for plan in talk.turn("a", "b", "c")))
    assert sum(words[t] for t in HEAD) == sum(words[t] for t in TAIL)
    assert talk.half.counters.fed_tokens == 3 * (3 + (TURNS - 1) * 4)  # each id once, but the very last one
    assert all(seat.fresh == (plan is talk.plans[0]) for plan in talk.plans for seat in plan.seats)
    talk.half.audit()


def test_what_the_host_does_for_a_turn_does_not_grow() -> None:
    talk, work = Talk(), []
    for turn in range(TURNS):
        edge = turn in HEAD or turn in TAIL
        work.append(instructions(lambda: talk.turn("a", "b", "c")) if edge else len(talk.turn("a", "b", "c")))
    head, tail = (sum(work[t] for t in edge) for edge in (HEAD, TAIL))
    assert head > 1000 and tail <= 1.03 * head, (head, tail)  # what may grow is a search by bisection


def test_a_loop_over_the_history_would_be_seen(monkeypatch) -> None:
    """What is counted are instructions, not calls: one comprehension over all ids is enough."""
    talk = Talk()
    talk.turn("a", answer=200)
    before = instructions(lambda: talk.turn("a"))
    source = "def shared(left, turn): return sum(1 for x, y in zip(left.tokens, turn.tokens) if x == y)"
    made: dict[str, Any] = {}
    exec(compile(source, slots_module.__file__, "exec"), made)  # as if it stood there
    monkeypatch.setattr(slots_module.Left, "shared", made["shared"])
    assert instructions(lambda: talk.turn("a")) > before + 1000


def test_a_slot_that_others_took_is_told_everything_once() -> None:
    """Two slots, three sessions: who comes back finds another's log, or his own."""
    talk = Talk(slots=3)
    for _ in range(4):
        talk.turn("a", answer=30)
    assert [seat.log_from for plan in talk.turn("a") for seat in plan.seats] == [4 * 32]
    talk.turn("b")  # takes the slot that was never used
    assert not any(seat.fresh for plan in talk.turn("a") for seat in plan.seats)
    talk.turn("c")  # takes b's, which was left longest ago
    assert all(seat.fresh for plan in talk.turn("b") for seat in plan.seats)
    plans = talk.turn("a")
    assert [(seat.fresh, seat.log_from) for plan in plans for seat in plan.seats] == [(True, 0)]
    talk.half.audit()


def test_a_session_that_has_ended_leaves_nothing() -> None:
    talk = Talk()
    talk.turn("a", "b")
    assert len(talk.half.slots._left) == 2
    talk.half.sessions.close("a")
    assert [session.sid for session in talk.half.slots._left] == ["b"]
    assert all(seat.fresh for plan in talk.turn("a") for seat in plan.seats)


def test_pages_that_were_not_told_of_are_told_later() -> None:
    """A turn is aborted when its last page is swapped for a shared one, or has slid behind the window, and no plan has
    said so yet; the next turn finds the slot's old page there."""
    talk = Talk((None, 20))
    talk.turn("a", answer=40)
    rid = talk.submit("a", [3, 4], answer=200)
    while not talk.half._ops._maps:
        talk.step()
    untold = {(g, i) for maps in talk.half._ops._maps.values() for g, i in maps}
    talk.half.abort(rid)
    plans = talk.turn("a")
    assert not plans[0].seats[0].fresh
    assert untold <= {(g, i) for plan in plans for _, g, i, _ in plan.maps}
    talk.half.audit()


@pytest.mark.parametrize("keep", [False, True], ids=["rollback", "keep"])
def test_after_an_abort_the_log_is_told_from_where_it_differs(keep: bool) -> None:
    talk = Talk()
    talk.turn("a", answer=20)
    rid = talk.submit("a", [3, 4], answer=30, on_disconnect="keep" if keep else "rollback")
    for _ in range(9):
        talk.step()
    talk.half.abort(rid, received=5)
    kept = len(talk.half.sessions.get("a").tokens)
    assert kept == (22 + 2 + 5 if keep else 22)
    seat = talk.turn("a")[0].seats[0]
    assert (seat.fresh, seat.log_from, len(seat.log)) == (False, kept, 2)
    talk.half.audit()


def test_a_branch_is_told_everything_and_a_rewound_session_what_is_new() -> None:
    talk = Talk()
    talk.turn("a", answer=40)
    talk.half.sessions.branch("a", "b")
    assert [seat.fresh for plan in talk.turn("b") for seat in plan.seats] == [True]
    talk.half.sessions.rewind("a", 21)
    seat = talk.turn("a")[0].seats[0]
    assert (seat.fresh, seat.log_from, len(seat.log)) == (False, 21, 2)
    talk.half.audit()
