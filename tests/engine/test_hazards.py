"""Ten ways in which another engine's sessions corrupt, leak or wedge, each on the whole engine with a drafter that has
cells of its own. Every answer is checked against a plain forward pass, and at the end no page may be held."""

from __future__ import annotations

import pytest
from rich.console import Console

from stretto.cli.main import run_app
from stretto.protocol import CloseSession, GetSession, RequestError
from tests.engine.chats import Chats
from tests.engine.matrix_run import Lab, make_lab


@pytest.fixture(scope="module")
def lab(tmp_path_factory) -> Lab:
    return make_lab(tmp_path_factory.mktemp("tiny"), True, "float32")


@pytest.fixture
def chats(lab):
    made = Chats(lab, "eagle3", page_size=16, chunk=16, budget=48)
    yield made
    made.end()


def words(n: int, start: int) -> list[int]:
    return [(start + 7 * i) % 290 for i in range(n)]


def state(chats: Chats, sid: str) -> str:
    return chats.core.manage(GetSession(sid))[0][0].state


def test_hazard_1_a_refused_turn_does_not_touch_the_live_one(chats) -> None:
    """Nor does a third one then find the session free."""
    live = chats.ask(words(20, 1), 30, "s")
    chats.until(lambda: live.answering)
    for rid in ("second", "third"):
        with pytest.raises(RequestError) as told:
            chats.ask(words(5, 2), 5, "s", on_busy="reject", rid=rid)
        assert told.value.code == "session_busy" and state(chats, "s") == "running"
        chats.step()
    waits = chats.ask(words(5, 3), 5, "s")
    chats.until(lambda: live.ended == "length")
    waits.prompt = live.prompt + live.ids() + words(5, 3)
    chats.finish()
    assert len(live.ids()) == 30 and chats.counters["sessions_busy"] == 2


def test_hazard_2_a_first_turn_that_is_aborted_before_it_runs_takes_nothing(chats) -> None:
    gone = chats.ask(words(40, 1), 20, "s")
    chats.abort(gone)
    assert gone.ended == "abort" and not gone.ids() and chats.used() == 0
    assert chats.core.host.stats()[1]["running"] == 0 and state(chats, "s") == "idle"
    after = chats.ask(words(9, 2), 6, "s")
    chats.finish()
    assert after.usage.prompt_tokens == 9


def test_hazard_3_a_retracted_turn_is_not_history(chats) -> None:
    chats.ask(words(20, 1), 6, "s")
    chats.finish()
    before = chats.core.manage(GetSession("s"))[0][0]
    live = chats.ask(words(9, 2), 40, "s")
    chats.until(lambda: live.answering)
    retract(chats)
    now = chats.core.manage(GetSession("s"))[0][0]
    assert (now.state, now.tokens, now.turns) == ("running", before.tokens, 1)
    with pytest.raises(RequestError, match="live turn"):
        chats.ask(words(3, 3), 3, "s", on_busy="reject")
    chats.finish()
    assert live.usage.retractions == 1 and len(live.ids()) == 40


def test_hazard_4_a_retracted_turn_gives_its_pages_back_at_once(lab) -> None:
    chats = Chats(lab, "eagle3", page_size=16, prefix_cache=False)
    live = chats.ask(words(100, 1), 40, "s")
    chats.until(lambda: live.answering)
    assert chats.used() >= 6
    retract(chats)
    assert chats.used() == 0
    chats.end()


def test_hazard_5_idle_sessions_never_block_the_pool(lab) -> None:
    """Twelve of them, of 3.6 times the pool: each is recomputed when it speaks again, and a plain request is served."""
    chats = Chats(lab, "eagle3", page_size=16, pool_tokens=320, chunk=64)
    for turn in range(2):
        for i in range(12):
            chats.ask(words(60, 5 * i + turn), 4, f"s{i}")
            chats.finish()
    plain = chats.ask(words(250, 3), 20)
    chats.finish()
    assert plain.ended == "length" and chats.counters["reclaimed"] > 12 and chats.counters["recomputed_tokens"] > 0
    chats.end()


def test_hazard_6_no_engine_shares_its_name_with_one_that_misses_the_session(capsys) -> None:
    """Ranks of one engine carry out one host's plans (tests/engine/test_matrix_ranks.py has sessions over two). Engines
    beside each other in one server are refused by name; replicas are servers, and a session has its home at one of
    them (tests/replicas/test_fleet.py)."""
    code = run_app(["explain", "--data-parallel-size", "2"], {}, Console(stderr=True, width=200))
    told = capsys.readouterr().err.replace("_", "-")
    assert code != 0 and "--data-parallel-size is not a setting of this engine" in told and "replicas" in told


@pytest.mark.parametrize("keep", [False, True], ids=["rollback", "keep"])
def test_hazard_7_a_client_that_leaves_loses_no_session(chats, keep: bool) -> None:
    """Its turn is rolled back, or what it surely received is kept; the next turn goes on from there."""
    chats.ask(words(20, 1), 6, "s")
    chats.finish()
    gone = chats.ask(words(9, 2), 60, "s", on_disconnect="keep" if keep else "rollback")
    chats.until(lambda: len(gone.ids()) >= 5)
    chats.abort(gone, received=3)
    if keep:
        chats.histories["s"] = gone.prompt + gone.ids()[:3]
    after = chats.ask(words(5, 3), 6, "s")
    chats.finish()
    kept = len(after.prompt) - 5
    assert after.usage.prompt_tokens == len(after.prompt)
    assert after.usage.cached_tokens >= kept // 16 * 16  # a page that others may share is not written again


def test_hazard_8_one_clock_decides_and_a_busy_session_never_expires(lab) -> None:
    now = [0.0]
    chats = Chats(lab, "eagle3", page_size=16, session_ttl=10.0, clock=lambda: now[0])
    live, idle = chats.ask(words(20, 1), 30, "busy"), chats.ask(words(20, 2), 2, "idle")
    chats.until(lambda: idle.ended == "length" and live.answering)
    now[0] = 11.0
    chats.core.tick()
    assert [info.id for info in chats.core.manage(GetSession())[0]] == ["busy"]
    chats.finish()
    after = chats.ask(words(5, 3), 3, "busy")
    chats.finish()
    assert after.usage.cached_tokens == 49 and chats.counters["sessions_expired"] == 1
    chats.end()


def test_hazard_9_aborts_in_every_queue_leave_the_session_usable(lab) -> None:
    """Waiting for a slot, behind a live turn, and back from a retraction."""
    chats = Chats(lab, "eagle3", page_size=16, slots=2, session_queue=3)
    blocker = chats.ask(words(20, 1), 200)
    chats.until(lambda: blocker.answering)
    queued = chats.ask(words(9, 2), 5, "a")
    behind = chats.ask(words(3, 3), 5, "a")
    chats.step()
    for gone in (behind, queued):
        chats.abort(gone)
        assert gone.ended == "abort" and not gone.ids()
    chats.abort(blocker)
    live = chats.ask(words(20, 4), 50, "b")
    chats.until(lambda: live.answering)
    retract(chats)
    chats.abort(live)
    assert live.ended == "abort" and state(chats, "a") == state(chats, "b") == "idle"
    for sid in "ab":
        chats.ask(words(7, 5), 5, sid)
    chats.finish()
    assert all(chats.core.manage(CloseSession(sid))[0][0].turns == 1 for sid in "ab")
    chats.end()


def retract(chats: Chats) -> None:
    """As for want of pages, whoever runs; between two steps."""
    for turn in list(chats.core.host.slots.running):
        chats.core.host.planner._retract(turn)
    chats.core.host.audit()
