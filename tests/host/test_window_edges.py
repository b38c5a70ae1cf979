"""A session's turn that ends inside a window, at every place of a page, over the real host half and a fake device.

    pages:   |  0  |  1  | ... | lo // page | lookahead ... |
    cells:   gone .... | window |           lo              hi
             0         cursor              (what the turn proved)

When a turn ends, its pages behind lo go back at once, and no window page from which the next turn reads is gone.
"""

from __future__ import annotations

import pytest

from tests.host.harness import Harness, plain_world
from tests.host.steps import counters, ended, opened, prompt_of, run_dry, session_turn

WINDOW, WIDTH, MARGIN = 8, 7, 40


def residues(page: int) -> list:
    """Every place of a small page; of a large one those around its edges, and the others in the whole product."""
    near = {r % page for r in (*range(-9, 10), page // 2)}
    return [pytest.param(page, r, id=f"page {page}, {r}", marks=() if r in near else pytest.mark.full)
            for r in range(page)]


def harness(page: int, depth: int = 1, drafter: str = "eagle", **more) -> Harness:
    pages = -(-1024 // page) + 4
    return Harness(plain_world(drafter, page_size=page, windows=(None, WINDOW), pages=(pages, pages), width=WIDTH,
                               depth=depth, chunk=64, max_model_len=1000, **more), page)


def check_lease(h: Harness, sid: str, page: int) -> None:
    """Of an idle session: nothing above lo, nothing needed behind it gone."""
    session = h.half.sessions.get(sid)
    lease = session.lease
    assert lease is not None and session.turn is None
    assert len(session.tokens) - 1 <= lease.lo <= len(session.tokens)
    for pages in lease.pages:
        assert len(pages) == -(-lease.lo // page), "pages past ceil(lo / page) stay with an idle session"
    cursor = lease.first[1] * page
    assert cursor <= lease.lo, "the window's cursor is past what was proved"
    assert cursor <= max(0, lease.lo - 1 - WINDOW + 1), "a cell is gone that the next turn reads"
    assert lease.lo - cursor < WINDOW + 2 * page, "the window holds more than it needs"


@pytest.mark.parametrize(("page", "residue"), [p for size in (1, 16, 64, 256) for p in residues(size)])
def test_a_turn_ends_at_every_place_of_a_page(page: int, residue: int) -> None:
    """Then the next turn goes on from there: what it reads is right, cell by cell (the fake device looks)."""
    h = harness(page)
    sid = opened(h, "s")
    length = residue + page * -(-MARGIN // page)  # of the history, so that lo falls on every residue
    session_turn(h, sid, prompt_of(length - 13), max_tokens=13)
    run_dry(h)
    check_lease(h, sid, page)
    held = h.half.sessions.get(sid).lease.lo
    rid = session_turn(h, sid, prompt_of(5, 1), max_tokens=11)
    run_dry(h)
    assert ended(h, rid).last.usage.cached_tokens in (held - 1, held)
    check_lease(h, sid, page)
    h.half.sessions.close(sid)
    h.finish()


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("page", [1, 16, 64, 256])
def test_a_retry_after_a_retraction_has_let_go_of_the_old_tail(page: int, depth: int) -> None:
    """Nothing of the first attempt's pages is held when the turn comes back, drafts and lookahead included."""
    h = harness(page, depth)
    sid = opened(h, "s")
    session_turn(h, sid, prompt_of(37), max_tokens=9)
    run_dry(h)
    session_turn(h, sid, prompt_of(3, 1), max_tokens=60)
    turn = h.half.sessions.get(sid).turn
    while len(turn.tokens) < turn.job.prompt + 20:
        h.step()
    tokens, lease = list(turn.tokens), turn.lease
    h.half.planner._retract(turn)
    assert turn.lease is None and not any(lease.pages) and h.half.ledger.leased == [0, 0]
    assert h.half.sessions.get(sid).turn is turn and turn.tokens == tokens, "what was delivered is lost"
    h.half.audit()
    run_dry(h)
    assert counters(h).retractions == 1
    check_lease(h, sid, page)
    h.half.sessions.close(sid)
    h.finish()


@pytest.mark.parametrize("page", [1, 16, 64])
def test_window_pages_go_while_the_turn_runs(page: int) -> None:
    """Never more than the window, the steps in flight and the lookahead need; the other group keeps all."""
    h = harness(page)
    sid = opened(h, "s")
    session_turn(h, sid, prompt_of(20), max_tokens=300)
    turn = h.half.sessions.get(sid).turn
    most = 0
    while h.half.sessions.get(sid).turn is turn:
        h.step()
        if turn.lease is not None and turn.lease.lo > 2 * WINDOW:
            lease = turn.lease
            most = max(most, len(lease.pages[1]) - lease.first[1])
    bound = -(-(WINDOW + 2 + 2 * (WIDTH + 1) + WIDTH) // page) + 2
    assert 0 < most <= bound, (most, bound)
    assert h.half.sessions.get(sid).lease.first[0] == 0
    h.half.sessions.close(sid)
    h.finish()
