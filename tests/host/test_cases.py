"""Bugs that users of other engines reported, as far as the host half alone can show them. Numbers are those of the list
of field cases."""

from __future__ import annotations

import pytest

from stretto.host.faults import HostFault
from stretto.params import SamplingParams
from stretto.protocol import Request, RequestError, TokenLogprob
from tests.host.fake_device import EOS, FakeDevice
from tests.host.harness import Harness, World, piece, plain_world
from tests.host.steps import (
    ALL_DRAFTERS,
    answer_of,
    counters,
    ended,
    opened,
    prompt_of,
    run_dry,
    session_turn,
    submit,
)


# --------------------------------------------------------------------------------------------------- 3: stop and length
@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("drafter", ALL_DRAFTERS)
def test_case_3_01_stop_and_length_in_one_accepted_block(drafter: str, depth: int):
    prompt = prompt_of(20)
    told = answer_of(prompt, max_tokens=12)
    at = next(i for i in range(5, 12) if told[i] not in told[:i])
    h = Harness(plain_world(drafter, width=0 if drafter == "none" else 8, depth=depth), 0)
    rids = {n: submit(h, prompt, max_tokens=n, stop=(piece(told[at]),)) for n in range(1, 13)}
    h.drain()
    for n, rid in rids.items():
        client = ended(h, rid)
        assert client.finish == ("stop" if n > at else "length")
        assert client.text == "".join(piece(t) for t in told[: min(n, at)])
        assert len(client.tokens) == min(n, at + 1)


@pytest.mark.parametrize("drafter", ALL_DRAFTERS)
def test_case_3_03_ids_log_probabilities_text_and_usage_describe_one_span(drafter: str):
    prompt = prompt_of(20)
    told = answer_of(prompt, max_tokens=12)
    h = Harness(plain_world(drafter, width=0 if drafter == "none" else 8), 0)
    rid = submit(h, prompt, max_tokens=12, logprobs=2, stop=(piece(told[4])[1:] + piece(told[5])[:2],))
    h.drain()
    client = ended(h, rid)
    assert client.last.usage.completion_tokens == len(client.tokens) == len(client.logprobs) == 6
    assert client.text == "".join(piece(t) for t in told[:4]) + "<"


@pytest.mark.parametrize("width", [0, 7])
def test_case_3_05_exactly_max_tokens(width: int):
    h = Harness(plain_world("ngram" if width else "none", width=width), 0)
    rids = [submit(h, prompt_of(9, n), max_tokens=n) for n in range(1, 30)]
    h.drain()
    assert [len(ended(h, rid).tokens) for rid in rids] == list(range(1, 30))
    assert {ended(h, rid).finish for rid in rids} == {"length"}


def test_stop_reasons_tell_the_stop_id_apart():
    prompt = prompt_of(20)
    told = answer_of(prompt, max_tokens=30)
    some = told[6]
    h = Harness(plain_world(eos_token_ids=frozenset({some})), 0)
    eos = submit(h, prompt, max_tokens=30, ignore_eos=False)
    own = submit(h, prompt, max_tokens=30, stop_token_ids=(some,))
    seen = submit(h, prompt, max_tokens=30, stop_token_ids=(some,), include_stop=True)
    h.drain()
    assert (ended(h, eos).finish, ended(h, eos).stop) == ("stop", None)
    assert (ended(h, own).finish, ended(h, own).stop) == ("stop", some)
    assert ended(h, seen).text == ended(h, own).text + piece(some)
    assert ended(h, seen).tokens == ended(h, own).tokens


# ------------------------------------------------------------------------------------------------- 4: chunks and mixing
@pytest.mark.parametrize("drafter", ALL_DRAFTERS)
@pytest.mark.parametrize("policy", ["full", "one_in_mixed", "budget"])
def test_case_4_03_mixing_happens_where_it_is_on(drafter: str, policy: str):
    """While a long prompt comes in, the others go on; and they do not where mixing is off, yet nobody starves."""
    for mixed in (True, False):
        h = Harness(plain_world(drafter, width=0 if drafter == "none" else 3, cap_policy=policy, mixed=mixed), 0)
        first = submit(h, prompt_of(10), max_tokens=60)
        for _ in range(4):
            h.step()
        before = len(h.clients[first, 0].tokens)
        long = submit(h, prompt_of(200, 1), max_tokens=5)
        while not h.clients[long, 0].tokens:
            h.step()
        assert len(h.clients[first, 0].tokens) > before + 3
        h.drain()
        assert (counters(h).mixed_steps > 0) == mixed
        assert (counters(h).tail_rows > 0) == mixed


@pytest.mark.parametrize("drafter", ALL_DRAFTERS)
def test_case_4_05_the_committed_length_is_one_behind_the_last_id(drafter: str):
    width = 0 if drafter == "none" else 3
    h = Harness(plain_world(drafter, accept=0.7, width=width, chunk=8, cap_policy="one_in_mixed"), 0)
    for n in range(6):
        submit(h, prompt_of(50, n), max_tokens=40)
        for _ in range(8):
            h.step()
            for turn in h.half.slots.running:
                if turn.usage.completion_tokens:
                    assert turn.lease.lo == len(turn.tokens) - 1
    h.drain()
    assert counters(h).mixed_steps > 0


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_case_4_07_chunks_make_progress_without_the_prefix_cache(depth: int):
    h = Harness(plain_world(prefix_cache=False, chunk=16, depth=depth), 0)
    submit(h, prompt_of(3 * 16 + 1), max_tokens=5)
    h.drain()
    assert counters(h).chunk_rows == 4
    assert counters(h).chunk_tokens == 3 * 16 + 1


def test_case_4_09_prompts_that_meet_the_chunk_size():
    h = Harness(plain_world(prefix_cache=False, chunk=16, budget=40), 0)
    for n in range(64):
        submit(h, prompt_of((16, 17, 32)[n % 3], n), max_tokens=3)
    h.drain()
    assert h.count["answers"] == 64


def test_case_4_11_the_budget_is_honoured():
    h = Harness(plain_world("ngram", 0.7, width=4, page_size=16, budget=32, chunk=32), 3)
    shared = prompt_of(37)
    for n in range(100):
        submit(h, shared[: n % 37] + prompt_of(1 + n % 50, n), max_tokens=8)
    h.drain()  # every step is compared with the budget
    assert h.count["answers"] == 100


class LiesOnce(FakeDevice):
    """Reports an impossible length for one row of one step."""

    def step_row(self, s, epoch, q_cap):
        row = super().step_row(s, epoch, q_cap)
        if self.count["rows"] == 40:
            row.length += 1000
        return row


def test_case_4_11_a_broken_row_ends_one_request():
    world = plain_world(strict=False)
    h = Harness(World(world.limits, device=LiesOnce), 0)
    h._check = lambda out, client: None if out.finish_reason == "error" else Harness._check(h, out, client)
    rids = [submit(h, prompt_of(20, n), max_tokens=30) for n in range(8)]
    h.drain()
    broken = [rid for rid in rids if ended(h, rid).finish == "error"]
    assert len(broken) == 1 and "a length of 1" in h.clients[broken[0], 0].last.error
    assert h.count["answers"] == 7 and counters(h).faults == 1


def test_a_broken_row_is_raised_in_tests():
    h = Harness(World(plain_world().limits, device=LiesOnce), 0)
    for n in range(8):
        submit(h, prompt_of(20, n), max_tokens=30)
    with pytest.raises(HostFault, match="a length of 1"):
        h.drain()


# ------------------------------------------------------------------------------------------------ 5, 6: overlap, aborts
@pytest.mark.parametrize("depth", [1, 3])
def test_case_5_03_many_prompts_before_the_first_id(depth: int):
    h = Harness(plain_world("eagle", width=3, depth=depth, chunk=64, budget=64), 0)
    for n in range(64):
        submit(h, prompt_of(60, n), max_tokens=12)
    h.drain()
    assert h.count["answers"] == 64


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("drafter", ALL_DRAFTERS)
def test_case_5_07_nothing_comes_after_an_abort(drafter: str, depth: int):
    for after in range(1, 12):
        h = Harness(plain_world(drafter, width=0 if drafter == "none" else 3, depth=depth), 0)
        rid, other = submit(h, prompt_of(20), max_tokens=40, n=2), submit(h, prompt_of(20, 1), max_tokens=20)
        for _ in range(after):
            h.step()
        h.abort(rid)  # the harness refuses any later output
        assert ended(h, rid, 0).finish == ended(h, rid, 1).finish == "abort"
        h.drain()
        assert len(ended(h, other).tokens) == 20


def test_case_6_01_all_pages_come_back():
    h = Harness(plain_world("ngram", 0.7, width=3, page_size=16, pages=(40,)), 0)
    for n in range(100):
        submit(h, prompt_of(1 + (n * 37) % 80, n), max_tokens=1 + n % 16)
    h.drain()
    assert h.count["answers"] == 100 and counters(h).mixed_steps > 0


@pytest.mark.parametrize("drafter", ALL_DRAFTERS)
def test_case_6_05_an_aborted_row_frees_its_slot(drafter: str):
    h = Harness(plain_world(drafter, width=0 if drafter == "none" else 3, max_slots=2), 0)
    first = submit(h, prompt_of(20), max_tokens=400)
    second = submit(h, prompt_of(20, 1), max_tokens=20)
    for _ in range(10):
        h.step()
    fed = counters(h).fed_tokens
    h.abort(first)
    assert not h.half.slots.running
    h.drain()
    assert len(ended(h, second).tokens) == 20 and counters(h).fed_tokens < fed + 60


@pytest.mark.parametrize("depth", [1, 3])
def test_case_6_07_an_abort_between_the_launch_and_the_result_of_the_last_chunk(depth: int):
    h = Harness(plain_world(depth=depth, chunk=16), 0)
    rid = submit(h, prompt_of(32), max_tokens=20)
    launched = 0
    while launched < 2:
        plan = h.half.plan()
        h._mark_published()
        h.flight.append(h.device.run(plan))
        launched += 1
    h.abort(rid)
    h.drain()
    assert ended(h, rid).finish == "abort" and ended(h, rid).tokens == []
    assert counters(h).stale_results == 2


def test_case_6_09_a_request_id_is_free_again_at_once():
    h = Harness(plain_world(max_slots=2), 0)
    submit(h, prompt_of(20), max_tokens=10)
    submit(h, prompt_of(20, 1), max_tokens=10, rid="x")
    h.step()
    with pytest.raises(RequestError, match="'x' is live"):
        submit(h, prompt_of(20, 2), max_tokens=10, rid="x")
    h.abort("x")
    h.clients.pop(("x", 0))
    submit(h, prompt_of(20, 3), max_tokens=10, rid="x")
    h.drain()
    assert len(ended(h, "x").tokens) == 10
    submit(h, prompt_of(20, 4), max_tokens=10, rid="x")
    h.drain()
    assert h.half.abort("x") == []


@pytest.mark.parametrize("drafter", ["ngram", "eagle"])
def test_case_6_13_and_7_03_a_pool_too_small_for_the_drafts(drafter: str):
    h = Harness(World(plain_world(drafter, width=7, pages=(34,)).limits, drafter, 0.9, eager=True), 0)
    for n in range(8):
        submit(h, prompt_of(20, n), max_tokens=60)
    h.drain()
    assert h.count["answers"] == 8 and counters(h).retractions > 0


# -------------------------------------------------------------------------------------------------------- 7: retraction
@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("drafter", ALL_DRAFTERS)
def test_case_7_01_a_request_that_fills_the_pool(drafter: str, depth: int):
    h = Harness(plain_world(drafter, width=0 if drafter == "none" else 7, pages=(16,), depth=depth), 0)
    room = h.limits.kv_tokens
    rid = submit(h, prompt_of(40), max_tokens=100)
    h.drain()
    assert (ended(h, rid).finish, ended(h, rid).stop) == ("length", "kv_cache_full")
    assert len(ended(h, rid).tokens) == room + 1 - 40
    assert counters(h).pool_bound == 1
    with pytest.raises(RequestError, match=r"the KV cache holds"):
        submit(h, prompt_of(room + 1), max_tokens=1)
    again = submit(h, prompt_of(20), max_tokens=5)
    h.drain()
    assert len(ended(h, again).tokens) == 5


@pytest.mark.parametrize("windows", [(None,), (None, 16)])
def test_case_7_05_log_probabilities_after_a_retraction(windows):
    h = Harness(World(plain_world("ngram", width=3, pages=(34,), windows=windows).limits, "ngram", 0.9, eager=True), 0)
    for n in range(8):
        submit(h, prompt_of(30, n), max_tokens=50, logprobs=3, prompt_logprobs=1)
    h.drain()
    assert counters(h).retractions > 0
    for client in h.clients.values():
        assert len(client.logprobs) == len(client.tokens) == 50 and len(client.prompt_logprobs) == 30


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_case_7_07_choices_under_pressure(prefix_cache: bool):
    told = []
    for pages in (400, 34):
        limits = plain_world(pages=(pages,), prefix_cache=prefix_cache).limits
        h = Harness(World(limits, eager=True), 0)
        rids = [submit(h, prompt_of(30, n), max_tokens=40, n=3, temperature=1.0, seed=n) for n in range(4)]
        h.drain()
        told.append([ended(h, rid, i).tokens for rid in rids for i in range(3)])
        assert (counters(h).retractions > 0) == (pages == 34)
    assert told[0] == told[1] and len({tuple(tokens) for tokens in told[0]}) == 12


def test_case_7_09_a_prefix_hit_at_readmission():
    limits = plain_world(page_size=16, pages=(14,), chunk=32).limits
    h = Harness(World(limits, eager=True), 0)
    shared = prompt_of(50)
    for n in range(60):
        submit(h, shared + prompt_of(5 + n % 20, n), max_tokens=30)
    h.drain()
    assert h.count["answers"] == 60 and counters(h).retractions > 0 and counters(h).cached_tokens > 0


@pytest.mark.parametrize("tokens", [64, 640, pytest.param(2000, marks=pytest.mark.full)])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_case_7_11_two_long_requests_do_not_evict_each_other_for_ever(tokens: int, prefix_cache: bool):
    prompt = tokens // 8
    h = Harness(plain_world(pages=(tokens // 4,), max_model_len=tokens, chunk=64, prefix_cache=prefix_cache), 0)
    for n in range(2):
        submit(h, prompt_of(prompt, n), max_tokens=int(0.9 * tokens) - prompt)
    while h.half.has_work or h.flight:
        h.step()
    h.finish()
    assert h.count["answers"] == 2
    assert counters(h).retractions < 5
    assert counters(h).chunk_tokens < 6 * 2 * prompt + 2 * tokens


def test_a_retracted_turn_comes_back_while_younger_ones_keep_coming():
    """It is not overtaken by whoever arrived later."""
    h = Harness(plain_world(pages=(40,), max_slots=9), 0)
    old = [submit(h, prompt_of(20, n), max_tokens=60) for n in range(4)]
    for n in range(400):
        if len(h.half.queue) < 3:
            submit(h, prompt_of(10, n), max_tokens=10)
        h.step()
        if all(h.clients[rid, 0].finish for rid in old):
            break
    assert counters(h).retractions > 0
    assert n < 300
    h.drain()


@pytest.mark.parametrize("policy", ["full", "one_in_mixed", "budget"])
@pytest.mark.parametrize("width", [0, 3])
def test_a_short_budget_is_shared(policy: str, width: int):
    """Thirty rows, eight tokens a step, prompts that keep coming: nobody waits much longer than the others."""
    h = Harness(plain_world("eagle" if width else "none", width=width, budget=8, max_slots=40, cap_policy=policy), 0)
    rids = [submit(h, prompt_of(4, n), max_tokens=400) for n in range(30)]
    while min(len(h.clients[rid, 0].tokens) for rid in rids) < 1:
        h.step()
    before = [len(h.clients[rid, 0].tokens) for rid in rids]
    for n in range(60):
        submit(h, prompt_of(60, n), max_tokens=1)
        h.step()
    got = [len(h.clients[rid, 0].tokens) - n for rid, n in zip(rids, before)]
    assert min(got) >= 10 and max(got) - min(got) <= 2 + 4 * width, got


@pytest.mark.parametrize("cap_policy", ["full", "budget"])
def test_neither_kind_starves_without_mixed_steps(cap_policy: str):
    h = Harness(plain_world("ngram", width=3, mixed=False, budget=32, cap_policy=cap_policy), 0)
    first = submit(h, prompt_of(5), max_tokens=300)
    for n in range(40):
        submit(h, prompt_of(100, n), max_tokens=1)
    for _ in range(80):
        h.step()
    assert len(h.clients[first, 0].tokens) >= 35
    assert sum(client.finish is not None for client in h.clients.values()) >= 8
    h.drain()
    assert counters(h).mixed_steps == 0


@pytest.mark.parametrize("windows", [(None,), (None, 8)])
def test_a_blocked_prompt_is_not_matched_in_every_step(windows, monkeypatch):
    """A match costs as much as the prompt is long; while nothing has changed it is not made again."""
    h = Harness(plain_world(pages=(60,), windows=windows, max_model_len=220), 0)
    for n in range(3):
        submit(h, prompt_of(20, n), max_tokens=50)
    for _ in range(6):
        h.step()
    looks = []
    match = h.half.ledger.tree.match
    monkeypatch.setattr(h.half.ledger.tree, "match", lambda *args: looks.append(1) or match(*args))
    submit(h, prompt_of(200, 9), max_tokens=5)
    h.drain()
    assert 0 < len(looks) <= 5


def test_priority_runs_first_and_is_retracted_last():
    h = Harness(plain_world(max_slots=3), 0)
    low = [submit(h, prompt_of(10, n), max_tokens=20, priority=5) for n in range(4)]
    high = submit(h, prompt_of(10, 9), max_tokens=20, priority=0)
    order = []
    while h.half.has_work or h.flight:
        h.step()
        order += [rid for (rid, _), client in h.clients.items() if client.finish and rid not in order]
    assert order.index(high) <= 1 and set(order) == {*low, high}
    h.finish()


# ------------------------------------------------------------------------------------------------ 8: sessions, prefixes
def test_case_8_01_a_turn_that_is_too_long_leaves_the_session_as_it_was():
    h = Harness(plain_world(max_model_len=100), 0)
    sid = opened(h, "s")
    session_turn(h, sid, prompt_of(20), max_tokens=10)
    run_dry(h)
    with pytest.raises(RequestError, match="the prompt has"):
        session_turn(h, sid, prompt_of(90), max_tokens=10)
    rid = session_turn(h, sid, prompt_of(20, 2), max_tokens=10)
    run_dry(h)
    assert len(ended(h, rid).tokens) == 10
    assert ended(h, rid).last.usage.cached_tokens == 29
    h.half.sessions.close(sid)
    h.finish()


def test_case_8_03_idle_sessions_give_way():
    """Their pages fill the pool; a request takes what it needs, and the sessions go on from their ids."""
    h = Harness(plain_world(pages=(30,), max_model_len=119), 0)
    for n in range(5):
        session_turn(h, opened(h, f"s{n}"), prompt_of(15, n), max_tokens=8)
        run_dry(h)
    assert h.half.stats()[1]["pages_used_0"] >= 25
    rid = submit(h, prompt_of(60, 9), max_tokens=20)
    run_dry(h)
    assert len(ended(h, rid).tokens) == 20 and counters(h).reclaimed > 0
    turns = [session_turn(h, f"s{n}", prompt_of(3, n), max_tokens=5) for n in range(5)]
    run_dry(h)
    assert all(len(ended(h, rid).tokens) == 5 for rid in turns)
    for n in range(5):
        h.half.sessions.close(f"s{n}")
    h.finish()


def test_case_8_03_two_turns_at_once():
    h = Harness(plain_world(session_queue=1), 0)
    sid = opened(h, "s")
    session_turn(h, sid, prompt_of(15), max_tokens=20)
    h.sessions[sid] = 1
    h.append(sid)  # waits
    with pytest.raises(RequestError, match="has a live turn and 1 that wait"):
        session_turn(h, sid, prompt_of(15), max_tokens=20)
    h.half.sessions.close(sid)  # returns; the session goes when its turns have ended
    with pytest.raises(RequestError, match="is closing"):
        session_turn(h, sid, prompt_of(15), max_tokens=20)
    assert h.half.sessions.info(sid)[0].state == "closing"
    del h.sessions[sid]
    run_dry(h)
    assert sid not in h.half.sessions
    h.finish()


@pytest.mark.parametrize("drafter", ["ngram", "eagle"])
@pytest.mark.parametrize("page", [1, 4])
def test_case_8_05_the_session_ends_where_its_text_ends(drafter: str, page: int):
    h = Harness(plain_world(drafter, width=3, page_size=page), 0)
    for n in range(1, 10):
        sid = opened(h, f"s{n}")
        session_turn(h, sid, prompt_of(11), max_tokens=n)
        run_dry(h)
        session = h.half.sessions.get(sid)
        assert len(session.tokens) == 11 + n and session.lease.lo == 11 + n - 1
        assert len(session.lease.pages[0]) == -(-session.lease.lo // page)
        session_turn(h, sid, prompt_of(5, n), max_tokens=7)
        run_dry(h)
        h.half.sessions.close(sid)
    h.finish()


def test_case_8_07_each_page_is_counted_once_after_every_step():
    h = Harness(plain_world("eagle", 0.8, width=3, pages=(60,)), 0)
    for n in range(4):
        session_turn(h, opened(h, f"s{n}"), prompt_of(15, n), max_tokens=20)
        submit(h, [*prompt_of(15, n), 3], max_tokens=20, n=2)
    run_dry(h)  # audits after every step
    for n in range(4):
        h.half.sessions.close(f"s{n}")
    h.finish()


@pytest.mark.parametrize("drafter", ALL_DRAFTERS)
@pytest.mark.parametrize("page", [1, 4, 16])
def test_case_8_09_a_hit_leaves_a_token_to_feed(drafter: str, page: int):
    h = Harness(plain_world(drafter, width=0 if drafter == "none" else 3, page_size=page), 0)
    for n in {page, 2 * page, max(1, 2 * page - 1), 2 * page + 1}:
        cached = []
        for _ in range(3):
            rid = submit(h, prompt_of(n, n), max_tokens=6)
            run_dry(h)
            cached.append(ended(h, rid).last.usage.cached_tokens)
        assert cached == [0, (n - 1) // page * page, (n - 1) // page * page]
        h.half.flush_cache()


def test_case_8_11_a_duplicate_is_swapped_before_it_is_freed():
    h = Harness(plain_world(pages=(60,), chunk=64), 0)
    same = prompt_of(33)
    rids = [submit(h, same, max_tokens=64, seed=n) for n in range(2)]
    for _ in range(3):
        h.step()
    first, second = h.half.slots.running
    assert first.lease.pages[0][:8] == second.lease.pages[0][:8]
    for n in range(12):
        submit(h, prompt_of(20, n), max_tokens=4)
    h.drain()
    assert all(len(ended(h, rid).tokens) == 64 for rid in rids)


def test_case_8_13_a_hit_reaches_to_the_point_of_divergence():
    h = Harness(plain_world(page_size=4), 0)
    first = submit(h, prompt_of(30), max_tokens=25)
    run_dry(h)
    answer = ended(h, first).tokens
    second = submit(h, prompt_of(30) + answer[15:] + [1, 2, 3], max_tokens=5)
    run_dry(h)
    assert ended(h, second).last.usage.cached_tokens >= 28
    third = submit(h, prompt_of(30) + answer + [1, 2, 3], max_tokens=5)
    run_dry(h)
    assert ended(h, third).last.usage.cached_tokens >= 52


def test_prefixes_are_shared_within_one_salt_only():
    h = Harness(plain_world(), 0)
    cached = {}
    for salt in ("", "a", "", "a", "ab", "b"):
        rid = submit(h, prompt_of(33), max_tokens=2, cache_salt=salt)
        run_dry(h)
        cached.setdefault(salt, []).append(ended(h, rid).last.usage.cached_tokens)
    assert cached == {"": [0, 32], "a": [0, 32], "ab": [0], "b": [0]}
    h.finish()


# ------------------------------------------------------------------------------------------- 9, 10: windows, page sizes
def test_case_9_05_window_pages_under_churn():
    h = Harness(plain_world(windows=(None, 8), pages=(100, 12), max_model_len=300), 0)
    text = prompt_of(48)
    for tokens in (text, [*text, 1, 2, 3], text[:24] + prompt_of(10, 1), text, prompt_of(60, 2), [*text, 4]):
        submit(h, tokens, max_tokens=8)
        run_dry(h)
    h.drain()
    assert h.count["answers"] == 6


@pytest.mark.parametrize("window", [1, 2, 17, 18, 19])
def test_case_9_07_windows_that_are_no_multiple_of_the_page(window: int):
    h = Harness(plain_world("eagle", 0.8, width=3, windows=(None, window)), 0)
    for n in range(8):
        submit(h, [*prompt_of(40, n % 3), n], max_tokens=40)
    h.drain()
    assert h.count["answers"] == 8


@pytest.mark.parametrize("drafter", ["none", "eagle"])
def test_case_9_09_a_chat_resumes_where_it_ended(drafter: str):
    h = Harness(plain_world(drafter, width=3 if drafter == "eagle" else 0, windows=(None, 8)), 0)
    text: list[int] = []
    for n in range(5):
        text += prompt_of(9, n)
        rid = submit(h, text, max_tokens=10)
        run_dry(h)
        new = len(text) - ended(h, rid).last.usage.cached_tokens
        assert n == 0 or new <= 9 + 4 + 1
        text += ended(h, rid).tokens
    h.drain()


def test_case_9_11_speculation_keeps_prefix_hits():
    cached = {}
    for drafter in ("none", "eagle"):
        for windows in ((None,), (None, 8)):
            h = Harness(plain_world(drafter, width=3 if drafter == "eagle" else 0, windows=windows), 0)
            for _ in range(2):
                rids = [submit(h, prompt_of(20 + n, n), max_tokens=20) for n in range(10)]
                run_dry(h)
            cached[drafter, windows] = [ended(h, rid).last.usage.cached_tokens for rid in rids]
    for windows in ((None,), (None, 8)):
        assert all(a >= b - 4 for a, b in zip(cached["eagle", windows], cached["none", windows]))
        assert sum(cached["eagle", windows]) > 0


@pytest.mark.parametrize("page", [16, 64])
def test_case_10_01_pages_come_back_whatever_the_length(page: int):
    h = Harness(plain_world("eagle", 0.8, width=5, page_size=page, pages=(40,)), 0)
    for n in range(1, 71, 3):
        submit(h, prompt_of(10, n), max_tokens=n)
        run_dry(h)
        h.half.flush_cache()
        assert len(h.half.ledger.free[0]) == 40


# ----------------------------------------------------------------------------------------------------------- 11: scores
@pytest.mark.parametrize("chunk", [4, 8, 64])
@pytest.mark.parametrize("depth", [0, 2])
def test_case_11_05_prompt_scores_do_not_depend_on_the_chunk(chunk: int, depth: int):
    h = Harness(plain_world("ngram", width=3, chunk=chunk, depth=depth), 0)
    submit(h, prompt_of(43), max_tokens=5)
    run_dry(h)
    rid = submit(h, prompt_of(43), max_tokens=5, prompt_logprobs=2)  # every position, whatever is cached
    h.drain()
    scores = ended(h, rid).prompt_logprobs
    assert len(scores) == 43 and scores[0] == TokenLogprob(prompt_of(43)[0], None, [], [])
    assert [len(s.top_ids) for s in scores] == [0] + [2] * 42


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("scored", [None, 1])
def test_case_11_09_max_tokens_0_scores_the_prompt(n: int, scored: int | None):
    h = Harness(plain_world("ngram", width=3), 0)
    rid = submit(h, prompt_of(40), max_tokens=0, prompt_logprobs=scored, n=n)
    submit(h, prompt_of(40, 1), max_tokens=10)
    h.drain()
    for index in range(n):
        client = ended(h, rid, index)
        assert (client.finish, client.tokens, client.last.usage.completion_tokens) == ("length", [], 0)
    assert (ended(h, rid).prompt_logprobs is None) == (scored is None)


def test_a_request_of_one_token_and_a_context_of_two():
    h = Harness(plain_world(max_model_len=2, pages=(2,), page_size=1), 0)
    rid = submit(h, [EOS], max_tokens=None)
    h.drain()
    assert len(ended(h, rid).tokens) == 1
    with pytest.raises(RequestError, match=r"it must have 1\.\.1"):
        h.half.submit(Request(rid="y", tokens=[1, 2], sampling=SamplingParams()))


def test_case_7_11_would_show_if_admission_did_not_ask_for_room():
    limits = plain_world(pages=(160,), max_model_len=640, chunk=64, prefix_cache=False).limits
    h = Harness(World(limits, eager=True), 0)
    for n in range(2):
        submit(h, prompt_of(80, n), max_tokens=496)
    while h.half.has_work or h.flight:
        h.step()
    assert counters(h).retractions > 20
