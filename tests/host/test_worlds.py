"""Random worlds: whatever the sizes, policies and accidents, every client gets what the oracle says."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from stretto.host.limits import CAP_POLICIES
from stretto.wire import STATE
from tests.host.harness import DRAFTERS, Harness, World, make_world

QUICK = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@st.composite
def worlds(draw) -> World:
    drafter = draw(st.sampled_from(DRAFTERS))
    windows = draw(st.sampled_from([(None,), (None, 5), (None, 33), (None, 5, 16), (None, None), (6,), (1,),
                                    (None, STATE), (STATE,), (None, STATE, 5)]))
    return make_world(
        random.Random(draw(st.integers(0, 999))), drafter=drafter, windows=windows,
        width=0 if drafter == "none" else draw(st.sampled_from([1, 3, 7])),
        page_size=draw(st.sampled_from([1, 4, 8, 16])), max_model_len=draw(st.sampled_from([90, 150])),
        room=draw(st.sampled_from([1.0, 1.3, 2.0, 3.0])), small_windows=draw(st.booleans()),
        depth=draw(st.integers(0, 3)), chunk=draw(st.sampled_from([1, 3, 16, 64])),
        budget=draw(st.sampled_from([2, 8, 40, 128])), cap_policy=draw(st.sampled_from(CAP_POLICIES)),
        mixed=draw(st.booleans()), prefix_cache=draw(st.booleans()), random_caps=draw(st.booleans()),
        eager=draw(st.booleans()), host_room=draw(st.sampled_from([0, 0, 0.2, 1.0, 4.0])),
        accept=draw(st.sampled_from([0.3, 0.95, 1.0])), most_waiting=8,
        grammar_share=draw(st.sampled_from([0.0, 0.0, 0.5])))


@settings(QUICK, max_examples=40)
@given(world=worlds(), seed=st.integers(0, 2**16))
def test_any_world(world: World, seed: int):
    Harness(world, seed).run(30)


@pytest.mark.full
@settings(QUICK, max_examples=1000)
@given(world=worlds(), seed=st.integers(0, 2**16))
def test_any_world_for_longer(world: World, seed: int):
    Harness(world, seed).run(100)


MUST_HAPPEN = ("masked_steps", "masked_positions", "grammar_ends", "forced_drafts",
               "answers", "aborted", "mixed_steps", "tail_rows", "retractions", "stale_results", "host_stops", "forks",
               "forks_without_pages", "session_turns", "in_place_turns", "branches", "reclaimed", "drafted", "accepted",
               "late_kept", "late_dropped", "host_drafts", "cached_tokens", "pool_bound", "session_refusals",
               "host_saved_tokens", "host_restored_tokens", "host_declined_tokens", "host_forgotten_tokens", "fenced",
               "kept_states")


def test_what_is_to_be_tested_happens():
    total: Counter[str] = Counter()
    for seed in range(9):
        force = dict(session_share=1.0, most_waiting=4) if seed % 3 == 0 else dict(eager=seed % 3 == 1)
        force |= dict(grammar_share=0.4 * (seed % 2))
        total += Harness(make_world(random.Random(seed), long_share=0.1, max_model_len=150, **force), seed).run(50)
    for seed in range(2):  # a pool smaller than the context
        total += Harness(make_world(random.Random(seed), page_size=4, room=0.5, long_share=0.5), seed).run(30)
    total += Harness(make_world(random.Random(3), windows=(None, STATE), session_share=1.0, most_waiting=4), 3).run(30)
    assert [name for name in MUST_HAPPEN if not total[name]] == []


@pytest.mark.parametrize("room", [0.3, 0.6], ids=lambda room: f"case_7_01-room-{room}")
def test_a_pool_smaller_than_the_context(room: float):
    """Requests that the pool cannot hold to their end finish with "length", none wedges, none leaks."""
    ended = 0
    for seed in range(4):
        world = make_world(random.Random(seed), room=room, page_size=4, max_model_len=150, long_share=0.4)
        ended += Harness(world, seed).run(40)["pool_bound"]
    assert ended > 0


class HostMachine(RuleBasedStateMachine):
    """Requests, aborts, sessions and steps in any order."""

    @initialize(world=worlds(), seed=st.integers(0, 2**16))
    def start(self, world: World, seed: int):
        self.harness = Harness(world, seed)

    @rule(n=st.integers(1, 4))
    def submit(self, n: int):
        for _ in range(n):
            self.harness.submit()

    @rule(n=st.sampled_from([1, 1, 2, 5, 20]))
    def step(self, n: int):
        for _ in range(n):
            self.harness.step()

    @precondition(lambda self: self.harness.live())
    @rule(data=st.data())
    def abort(self, data):
        self.harness.abort(data.draw(st.sampled_from(self.harness.live())))

    @rule()
    def open_session(self):
        self.harness.open_session()

    @precondition(lambda self: self.harness.sessions)
    @rule()
    def touch_sessions(self):
        self.harness.touch_sessions(closing=False)

    @rule()
    def flush(self):
        self.harness.half.flush_cache()

    @precondition(lambda self: not self.harness.half.has_work)
    @rule()
    def idle(self):
        assert self.harness.half.plan() is None

    @invariant()
    def books_are_right(self):
        if hasattr(self, "harness"):
            self.harness.half.audit()

    def teardown(self):
        if not hasattr(self, "harness"):
            return
        harness = self.harness
        for _ in range(4000):
            harness.touch_sessions(closing=True)
            harness.step()
            if not (harness.half.has_work or harness.sessions or harness.flight):
                break
        harness.finish()


TestHostMachine = HostMachine.TestCase
TestHostMachine.settings = settings(QUICK, max_examples=25, stateful_step_count=30)
