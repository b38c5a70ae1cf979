"""Strict accounting in production: a fault in the books is injected; it is counted and told, who is concerned ends with
an error, everybody else gets the right answer, and the books are whole again."""

from __future__ import annotations

import logging

import pytest

from stretto.host.faults import HostFault
from tests.host.harness import Harness, expect, plain_world
from tests.host.steps import counters, ended, opened, prompt_of, session_turn, submit


class Serving(Harness):
    """`concerned`: the request that may end with an error."""

    concerned = ""

    def _check(self, out, client) -> None:
        if out.rid == self.concerned:
            expect(out.finish_reason == "error", "it went on with pages in doubt")
        else:
            super()._check(out, client)


def serving(strict: bool = False, **more) -> Serving:
    return Serving(plain_world("eagle", width=3, strict=strict, windows=(None, 8), pages=(200, 200), **more), 3)


def begun(h: Harness, n: int = 3) -> list[str]:
    rids = [submit(h, prompt_of(20, i), max_tokens=40) for i in range(n)]
    while not all(h.clients[rid, 0].tokens for rid in rids):
        h.step()
    return rids


def run(h: Harness) -> None:
    for _ in range(500):
        if not (h.half.has_work or h.flight):
            return
        h.step()
    raise AssertionError("did not come to an end")


def turn_of(h: Harness, rid: str):
    return h.half._live.of(rid)[0]


def leak_a_free_page(h: Harness, rid: str) -> None:
    h.half.ledger.free[0].pop()


def free_a_held_page(h: Harness, rid: str) -> None:
    h.half.ledger.free[0].append(turn_of(h, rid).lease.pages[0][-1])


def hold_a_page_twice(h: Harness, rid: str) -> None:
    """The sum is as it was: only a look at every page finds it, or the page's return."""
    ledger, lease = h.half.ledger, turn_of(h, rid).lease
    ledger.free[0].append(lease.pages[0][-1])
    ledger.free[0].popleft()


@pytest.mark.parametrize(("fault", "concerned"), [(leak_a_free_page, False), (free_a_held_page, True)])
def test_a_broken_sum_is_contained(caplog, fault, concerned: bool) -> None:
    h = serving()
    rids = begun(h)
    fault(h, rids[1])
    h.concerned = rids[1] if concerned else ""
    with caplog.at_level(logging.ERROR):
        h.step()
    assert counters(h).broken_books == 1 and "the last results: [StepResult(" in caplog.text
    run(h)
    h.half.audit()
    assert counters(h).broken_books == 1, "counted again, though it was repaired"
    assert counters(h).faults == int(concerned)
    for rid in rids:
        client = ended(h, rid)
        if concerned and rid == rids[1]:
            assert client.finish == "error" and "internal error" in client.last.error
        else:
            assert client.finish == "length" and len(client.tokens) == 40
    again = begun(h)  # it serves on
    run(h)
    assert all(len(ended(h, rid).tokens) == 40 for rid in again)


def test_idle_engines_look_at_every_page() -> None:
    """Once after the last step; what is wrong is found though the sum is right."""
    h = serving()
    sid = opened(h, "s")
    session_turn(h, sid, prompt_of(20), max_tokens=6)
    run(h)
    lease = h.half.sessions.get(sid).lease
    h.half.ledger.free[0].append(lease.pages[0][-1])
    h.half.ledger.free[0].popleft()
    h.half.tick()
    assert counters(h).broken_books == 1 and h.half.sessions.get(sid).lease is None
    h.half.audit()
    h.half.tick()
    assert counters(h).broken_books == 1
    rid = session_turn(h, sid, prompt_of(3, 1), max_tokens=5)  # its ids are still there: computed again
    run(h)
    assert ended(h, rid).finish == "length" and h.asked[rid].prompt[:20] == prompt_of(20)


def test_an_audit_takes_its_time_only_when_idle(monkeypatch) -> None:
    h, audits = serving(), []
    audit = h.half.audit
    monkeypatch.setattr(h.half, "audit", lambda: (audits.append(len(h.half._live)), audit()))
    begun(h)
    for _ in range(5):
        h.half.tick()
        h.step()
    assert audits == []
    run(h)
    for _ in range(3):
        h.half.tick()
    assert audits == [0]


@pytest.mark.parametrize("fault", [leak_a_free_page, free_a_held_page])
def test_tests_are_ended_by_a_broken_sum(fault) -> None:
    h = serving(strict=True)
    rids = begun(h)
    fault(h, rids[0])
    with pytest.raises(HostFault, match="pages are not"):
        h.step()


def test_a_page_with_two_owners_is_never_used_again() -> None:
    """The request that holds it ends; the page stays out of use."""
    h = serving(prefix_cache=False)
    rids = begun(h)
    h.concerned = rids[1]
    page = turn_of(h, rids[1]).lease.pages[0][-1]
    hold_a_page_twice(h, rids[1])
    with pytest.raises(HostFault, match="free and held"):
        h.half.audit()
    h.half._contain(HostFault("as found by an audit"))
    assert counters(h).faults == 1 and page not in h.half.ledger.free[0]
    h.receive(h.half.take_outputs())
    run(h)
    h.half.audit()
    again = begun(h)
    run(h)
    assert all(len(ended(h, rid).tokens) == 40 for rid in (*again, rids[0], rids[2]))
    assert page not in h.half.ledger.free[0]
