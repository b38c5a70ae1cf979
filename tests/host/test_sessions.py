"""Sessions: what stays, what may go, and what waits."""

from __future__ import annotations

import pytest

from stretto.protocol import CloseSession, RequestError
from tests.host.harness import Asked, Client, Harness, World, plain_world
from tests.host.steps import counters, ended, opened, prompt_of, run_dry, session_turn, submit


def begun(h: Harness, sid: str, ids: list[int], **sampling) -> str:
    """A turn, and some steps of it."""
    rid = session_turn(h, sid, ids, **sampling)
    for _ in range(6):
        h.step()
    return rid


def waiting(h: Harness, sid: str, ids: list[int], rid: str) -> str:
    """A turn that waits behind the live one."""
    request = h.asked[next(iter(h.asked))].request
    request = request.__class__(rid=rid, tokens=ids, sampling=request.sampling)
    h.half.sessions.append(sid, request)
    h.asked[rid], h.clients[rid, 0] = Asked(request, [], 1, sid, -1), Client()
    h.waiting_turns.add(rid)
    return rid


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("drafter", ["ngram", "eagle"])
def test_a_turn_that_waits_goes_on_in_place(drafter: str, depth: int):
    h = Harness(plain_world(drafter, width=3, depth=depth), 0)
    sid = opened(h, "s")
    begun(h, sid, prompt_of(30), max_tokens=30)
    slot = h.half.sessions.get(sid).turn.slot
    rid = waiting(h, sid, prompt_of(9, 1), "w")
    while rid in h.waiting_turns:
        h.step()
    assert h.half.sessions.get(sid).turn.slot == slot and counters(h).in_place_turns == 1
    run_dry(h)
    assert ended(h, rid).last.usage.cached_tokens == 59
    h.half.sessions.close(sid)
    h.finish()


def test_an_aborted_turn_is_not_history_and_the_next_one_starts():
    h = Harness(plain_world(), 0)
    sid = opened(h, "s")
    session_turn(h, sid, prompt_of(10), max_tokens=5)
    run_dry(h)
    live = begun(h, sid, prompt_of(10, 1), max_tokens=50)
    rid = waiting(h, sid, prompt_of(5, 2), "w")
    h.abort(live)
    run_dry(h)
    assert h.asked[rid].prompt == h.history[sid][:15] + prompt_of(5, 2)
    h.half.sessions.close(sid)
    h.finish()


def test_a_waiting_turn_can_be_aborted():
    h = Harness(plain_world(), 0)
    sid = opened(h, "s")
    live = begun(h, sid, prompt_of(10), max_tokens=30)
    rid = waiting(h, sid, prompt_of(5, 2), "w")
    with pytest.raises(RequestError, match="'w' is live"):
        submit(h, prompt_of(3), rid="w")
    h.abort(rid)
    run_dry(h)
    assert ended(h, rid).finish == "abort" and len(ended(h, live).tokens) == 30
    h.half.sessions.close(sid)
    h.finish()


@pytest.mark.parametrize("closing", [False, True])
def test_closing_with_abort_ends_every_turn(closing: bool):
    """Of a session that was told to close before, too: nobody waits for an answer that never comes."""
    h = Harness(plain_world(), 0)
    sid = opened(h, "s")
    live = begun(h, sid, prompt_of(10), max_tokens=50)
    rid = waiting(h, sid, prompt_of(5, 2), "w")
    if closing:
        h.half.manage(CloseSession(sid))
    (info,), outputs = h.half.manage(CloseSession(sid, abort=True))
    assert info.id == sid and info.state == ("closing" if closing else "running")
    assert [(output.rid, output.finish_reason) for output in outputs] == [(rid, "abort"), (live, "abort")]
    assert sid not in h.half.sessions and not h.half.has_work
    h.half.audit()


def test_a_waiting_turn_that_no_longer_fits_ends_with_an_error():
    h = Harness(plain_world(max_model_len=60), 0)
    sid = opened(h, "s")
    begun(h, sid, prompt_of(30), max_tokens=20)
    rid = waiting(h, sid, prompt_of(12, 1), "w")
    run_dry(h)
    assert ended(h, rid).finish == "error" and "the prompt has 62 tokens" in ended(h, rid).last.error
    again = session_turn(h, sid, prompt_of(3), max_tokens=4)
    run_dry(h)
    assert len(ended(h, again).tokens) == 4
    h.half.sessions.close(sid)
    h.finish()


def test_a_retracted_turn_is_no_history_until_it_ends():
    limits = plain_world(pages=(24,), max_model_len=96).limits
    h = Harness(World(limits, eager=True), 0)
    submit(h, prompt_of(30, 5), max_tokens=50)
    sids = [opened(h, f"s{n}") for n in range(2)]
    rids = [session_turn(h, sid, prompt_of(20, n), max_tokens=40) for n, sid in enumerate(sids)]
    while not counters(h).retractions:
        h.step()
    assert all(h.half.sessions.get(sid).tokens == [] for sid in sids)
    run_dry(h)
    assert [len(ended(h, rid).tokens) for rid in rids] == [40, 40]
    assert [len(h.half.sessions.get(sid).tokens) for sid in sids] == [60, 60]
    for sid in sids:
        h.half.sessions.close(sid)
    h.finish()


@pytest.mark.parametrize("windows", [(None,), (None, 8)])
def test_a_branch_shares_pages(windows):
    h = Harness(plain_world("eagle", width=3, windows=windows), 0)
    sid = opened(h, "s")
    session_turn(h, sid, prompt_of(30), max_tokens=15)
    run_dry(h)
    for n in (1, 7, 30, 43, 44, 45):
        child = h.half.sessions.branch(sid, f"b{n}", n)
        h.history[child.sid] = h.history[sid][:n]
        rid = session_turn(h, child.sid, prompt_of(4, n), max_tokens=6)
        run_dry(h)
        cached = ended(h, rid).last.usage.cached_tokens
        if n == 44 or (n < 44 and not windows[1:]):  # its window, where there is one, is still held
            assert cached == n - 1
        h.half.sessions.close(child.sid)
    assert counters(h).branches == 6
    h.half.sessions.close(sid)
    h.finish()


@pytest.mark.parametrize("n", [0, 1, 16, 30, 37, 45])
def test_rewind(n: int):
    h = Harness(plain_world("eagle", width=3), 0)
    sid = opened(h, "s")
    session_turn(h, sid, prompt_of(30), max_tokens=15)
    run_dry(h)
    h.half.sessions.rewind(sid, n)
    h.history[sid] = h.history[sid][:n]
    h.half.audit()
    rid = session_turn(h, sid, prompt_of(5, 1), max_tokens=10)
    run_dry(h)
    assert ended(h, rid).last.usage.cached_tokens >= n // 4 * 4 - 4
    h.half.sessions.close(sid)
    h.finish()


def test_refusals():
    h = Harness(plain_world(), 0)
    sid = opened(h, "s")
    with pytest.raises(RequestError, match="open already"):
        h.half.sessions.open(sid)
    with pytest.raises(RequestError, match="n is 2"):
        session_turn(h, sid, prompt_of(3), n=2)
    begun(h, sid, prompt_of(10), max_tokens=30)
    for verb in (lambda: h.half.sessions.branch(sid, "b", 3), lambda: h.half.sessions.rewind(sid, 3)):
        with pytest.raises(RequestError, match="has a live turn") as caught:
            verb()
        assert (caught.value.param, caught.value.code) == ("session_id", "session_busy")
    with pytest.raises(KeyError):
        h.half.sessions.close("nobody")
    run_dry(h)
    for verb in (lambda: h.half.sessions.branch(sid, "b", 999), lambda: h.half.sessions.rewind(sid, 999)):
        with pytest.raises(RequestError, match="offset is 999") as caught:
            verb()
        assert (caught.value.param, caught.value.code) == ("offset", None)
    h.half.sessions.close(sid)
    h.finish()


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("came_before", [1, 2], ids="{}-came-before".format)
def test_a_session_with_a_turn_always_waiting_keeps_nobody_out(depth: int, came_before: int):
    """Turns of sessions and other requests run in the order in which they came; those that came before go on in
    place, whoever has come since."""
    h = Harness(plain_world(max_slots=2, depth=depth), 0)
    sid = opened(h, "s")
    session_turn(h, sid, prompt_of(4), max_tokens=8)
    for n in range(came_before):
        waiting(h, sid, prompt_of(2), f"w{n}")
    other = submit(h, prompt_of(30, 1), max_tokens=20)
    for n in range(came_before, 200):
        if len(h.waiting_turns) < came_before:
            waiting(h, sid, prompt_of(2, n), f"w{n}")
        h.step()
        if h.clients[other, 0].finish:
            break
    assert h.clients[other, 0].finish
    assert counters(h).in_place_turns == came_before and counters(h).session_turns <= came_before + 2
    run_dry(h)
    h.half.sessions.close(sid)
    h.finish()


@pytest.mark.parametrize("depth", [0, 1])
def test_a_session_with_a_turn_always_waiting_keeps_no_pages_from_those_who_came_before(depth: int):
    """A slot is free; what the other request waits for is memory that the session has."""
    h = Harness(plain_world(max_slots=3, depth=depth, pages=(33,)), 0)
    sid = opened(h, "s")
    session_turn(h, sid, prompt_of(40), max_tokens=8)
    waiting(h, sid, prompt_of(2), "w0")
    other = submit(h, prompt_of(90, 1), max_tokens=5)
    for n in range(1, 60):
        if not h.waiting_turns:
            waiting(h, sid, prompt_of(2, n), f"w{n}")
        h.step()
        if h.clients[other, 0].finish:
            break
    assert h.clients[other, 0].finish and counters(h).in_place_turns == 1
    run_dry(h)
    h.half.sessions.close(sid)
    h.finish()


def test_a_turn_that_waited_is_made_once():
    """One that gives way has drawn no seed until it runs."""
    h = Harness(plain_world(max_slots=2), 0)
    made = []
    make, h.half._intake.turn = h.half._intake.turn, lambda *a, **k: made.append(a[0].rid) or make(*a, **k)
    sid = opened(h, "s")
    session_turn(h, sid, prompt_of(4), max_tokens=8)
    other = submit(h, prompt_of(30, 1), max_tokens=20)
    waiting(h, sid, prompt_of(2), "w")
    run_dry(h)
    assert made == ["t1", other, "w"] and counters(h).in_place_turns == 0
    h.half.sessions.close(sid)
    h.finish()
