"""The host tier by itself: what is decided, what goes first, what must happen in single cases."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.host.audit import audit, check
from stretto.host.lease import Lease
from stretto.host.ledger import Ledger
from stretto.host.limits import HostLimits
from stretto.host.ops import Ops
from stretto.host.rates import TRY_AGAIN, Line, Rates
from stretto.wire import NULL_PAGE, Moved, PageOp, Seam
from tests.host.harness import Harness, World, plain_world
from tests.host.steps import answer_of, ended, opened, prompt_of, session_turn, submit

PAGE = 4


# ----------------------------------------------------------------------------------------------------------- the rule
@given(start=st.floats(0, 0.1), slope=st.floats(1e-9, 1e-3), sizes=st.lists(st.integers(1, 10**6), min_size=2,
                                                                            max_size=20, unique=True))
def test_a_line_is_found_again(start: float, slope: float, sizes: list[int]):
    line = Line()
    for x in sizes:
        line.add(x, start + slope * x)
    for x in sizes:
        assert line.at(x) == pytest.approx(start + slope * x, rel=1e-3, abs=1e-6)


@given(st.lists(st.tuples(st.integers(1, 10**7), st.floats(0, 1)), min_size=1, max_size=200))
def test_a_line_never_promises_less_than_nothing(samples: list[tuple[int, float]]):
    line = Line()
    for x, y in samples:
        line.add(x, y)
    start, slope = line.fit()
    assert start >= 0 and slope >= 0 and line.at(0) <= line.at(10**8)


def rates_of(copy_start: float, per_byte: float, step_start: float, per_token: float) -> Rates:
    rates = Rates()
    for n in (1, 2, 4):
        rates.restoring.add(n * 10**6, copy_start + per_byte * n * 10**6)
        rates.computing.add(n * 100, step_start + per_token * n * 100)
    return rates


def test_copying_is_chosen_where_it_takes_less():
    """128 KiB a token at 50 GB/s is 2.6 us; computing one takes 20 us, a step 5 ms, a copy 10 ms before it begins."""
    rates = rates_of(0.010, 1 / 50e9, 0.005, 20e-6)
    token = 128 << 10
    assert not rates.copying_pays(16 * token, 16, 2048)  # 10.04 ms against 5.32
    assert rates.copying_pays(1000 * token, 1000, 2048)  # 12.6 ms against 25
    assert not rates.copying_pays(1000 * token * 100, 1000, 2048), "a slow way is not taken"


def test_many_chunks_pay_the_start_of_each():
    rates = rates_of(0.1, 1 / 50e9, 0.050, 1e-6)
    assert not rates.copying_pays(1 << 20, 2000, 2048) and rates.copying_pays(1 << 20, 2000, 256)


def test_what_is_not_measured_is_tried():
    assert Rates().copying_pays(1 << 40, 1, 1) and Rates().saving_pays(1 << 40, 1)
    rates = rates_of(1.0, 1e-6, 0.0, 1e-9)
    answers = [rates.copying_pays(1 << 20, 16, 64) for _ in range(2 * TRY_AGAIN)]
    assert sum(answers) == 2, "a rate that is refused for ever is never measured again"
    assert sum(rates.saving_pays(1 << 20, 16) for _ in range(2 * TRY_AGAIN)) == 2


def test_the_rates_follow_what_is_measured():
    h = tier_world(rates=Rates())
    for seed in (1, 2, 3, 1, 2, 3):
        submit(h, prompt_of(60, seed), max_tokens=2)
        h.drain_only()
    gauges = h.half.stats()[1]
    for name in ("host_save_bytes_per_second", "host_restore_bytes_per_second", "prefill_tokens_per_second"):
        assert gauges[name] > 0, name


# --------------------------------------------------------------------------------------------------------- the books
class Always(Rates):
    def copying_pays(self, n_bytes: int, tokens: int, chunk: int) -> bool:
        return True

    def saving_pays(self, page_bytes: int, page_tokens: int) -> bool:
        return True


def ledger_of(pages=(8,), host_pages=(8,), windows=(None,), **fields) -> Ledger:
    return Ledger(HostLimits(page_size=PAGE, pages=pages, host_pages=host_pages, windows=windows, max_slots=9,
                             max_model_len=200, **{"rates": Always()} | fields), Ops())


def fed(ledger: Ledger, tokens: list[int]) -> Lease:
    """A lease that has fed all of its tokens."""
    lease = ledger.adopt(tokens, len(tokens), 150)
    assert ledger.fetch(lease)
    if lease.lo < len(tokens):
        reservation = ledger.reserve(lease, len(tokens) - lease.lo, 0)
        assert reservation is not None
        ledger.launch(reservation, 0)
        ledger.confirm(lease, 0, len(tokens))
    ledger.publish(lease, tokens)
    return lease


def run_through(ledger: Ledger, tokens: list[int]) -> None:
    ledger.drop(fed(ledger, tokens))


def text(first: int, n: int = 16) -> list[int]:
    return [first + i for i in range(n)]


def found(ledger: Ledger, tokens: list[int]) -> tuple[int, int]:
    """(tokens found, pages of them that only the host has), without bringing them back."""
    lease = ledger.adopt(tokens, len(tokens), 150)
    n = lease.lo, len(lease.away)
    ledger.drop(lease)
    return n


def page_ops(ledger: Ledger, seq: int = 0) -> list[tuple[int, int, int, int]]:
    return ledger._ops.take(seq, 0, []).page_ops


def test_what_is_evicted_is_found_on_the_host_and_comes_back():
    ledger = ledger_of()
    for first in (0, 100, 200):
        run_through(ledger, text(first))
    saves = page_ops(ledger)
    assert [op[0] for op in saves] == [PageOp.SAVE] * 4
    assert found(ledger, text(0)) == (16, 4) and found(ledger, text(200)) == (16, 0)
    lease = fed(ledger, text(0))
    restores = [op for op in page_ops(ledger, 1) if op[0] == PageOp.RESTORE]
    assert [op[3] for op in restores] == lease.pages[0] and not ledger.arrived(lease)
    host_page = {page: host for _, _, page, host in saves}
    assert [op[2] for op in restores] == [host_page[p] for p in sorted(host_page, key=list(host_page).index)][::-1]
    ledger.moved(Moved(0, 0.0, 0.0))
    assert not ledger.arrived(lease)
    ledger.moved(Moved(1, 0.0, 0.0))
    assert ledger.arrived(lease)
    audit(ledger, [lease])


def test_a_copy_stays_when_its_page_has_come_back():
    ledger = ledger_of(host_pages=(12,))
    for first in (0, 100, 200, 0, 100):
        run_through(ledger, text(first))
    assert ledger.tier is not None and ledger.tier.saved_tokens == 48 and ledger.tier.restored_tokens == 32
    assert sum(op[0] == PageOp.SAVE for op in page_ops(ledger)) == 12, "what the host has already is not copied again"


def test_others_wait_for_what_is_on_its_way():
    ledger = ledger_of(pages=(12,))
    for first in (0, 100, 200, 300):
        run_through(ledger, text(first))
    page_ops(ledger)
    first, second = fed(ledger, text(0)), fed(ledger, text(0))
    assert first.arrives == second.arrives == 1 and first.pages == second.pages
    assert sum(op[0] == PageOp.RESTORE for op in page_ops(ledger, 1)) == 4


def test_a_page_that_is_being_saved_is_waited_for():
    ledger = ledger_of()
    run_through(ledger, text(0, 32))
    lease = ledger.adopt([9] * 8, 8, 150)
    assert ledger.reserve(lease, 8, 0) is not None
    assert ledger._ops.take(5, 0, []).fence == 5 - 5, "the plan that saves them"
    other = ledger.adopt([7] * 4, 4, 150)
    ledger._ops.next_seq = 1
    assert ledger.reserve(other, 4, 0) is not None and ledger._ops.take(1, 0, []).fence == 1


def test_pages_freed_ahead_are_not_waited_for():
    ledger = ledger_of(pages=(32,), host_pages=(32,), budget=16)
    run_through(ledger, text(0, 128))
    ledger.save_ahead()
    assert len(ledger.free[0]) == 4 and ledger._ops.take(0, 0, []).fence == -1
    ledger.moved(Moved(0, 0.0, 0.0))
    lease = ledger.adopt([9] * 16, 16, 150)
    assert ledger.reserve(lease, 16, 0) is not None
    assert ledger._ops.take(1, 0, []).fence == 0, "what is done on this rank, all others wait for"


def test_states_that_nobody_will_continue_go_first():
    ledger = ledger_of(pages=(12,), host_pages=(4,))
    run_through(ledger, text(100))
    lease = fed(ledger, text(0))
    ledger.truncate(lease, 8)  # rewound: its second half is newer than all others, and of no use
    ledger.drop(lease)
    taken = ledger._take(0, 6)
    assert taken is not None
    assert found(ledger, text(100)) == (16, 0), "older, but somebody may come back to it"
    assert found(ledger, text(0)) == (16, 2) and found(ledger, text(0)[:8]) == (8, 0)


def test_what_is_often_found_stays():
    ledger = ledger_of(pages=(12,), host_pages=(1,))
    for first in (0, 100, 0, 0, 100, 0):
        run_through(ledger, text(first, 8))
    run_through(ledger, text(0, 8))
    for first in range(200, 900, 100):  # each once, 14 pages in all
        run_through(ledger, text(first, 8))
    assert found(ledger, text(0, 8)) == (8, 0) and found(ledger, text(200, 8))[0] < 8


def test_the_host_forgets_leaves_first_and_never_what_is_asked_for():
    ledger = ledger_of(pages=(8,), host_pages=(6,))
    run_through(ledger, text(0, 32))
    run_through(ledger, text(100, 32))  # all eight pages were evicted, the last six are kept
    tokens, away = found(ledger, text(0, 32))
    assert (tokens, away) == (24, 6), "the end is forgotten first, so the beginning can be used"
    lease = ledger.adopt(text(0, 32), 32, 150)
    assert ledger.fetch(lease), "its copies stay while other pages are saved for its sake"
    assert [op[0] for op in page_ops(ledger)].count(PageOp.RESTORE) == 6
    audit(ledger, [lease])


def test_a_copy_that_is_forgotten_before_it_is_fetched():
    ledger = ledger_of(pages=(8,), host_pages=(4,))
    run_through(ledger, text(0))
    run_through(ledger, text(100, 32))
    lease = ledger.adopt(text(0), 16, 150)
    assert len(lease.away) == 4
    assert ledger._take(0, 4) is not None  # saves four others
    assert not ledger.fetch(lease) and len(ledger.free[0]) == 0
    ledger.drop(lease)
    assert ledger.adopt(text(0), 16, 150, restore=False).lo == 0
    check(ledger)


def test_without_a_shared_tree_a_sequence_finds_its_own_pages():
    ledger = ledger_of(prefix_cache=False)
    home = ledger.give_up(fed(ledger, text(0)), text(0))
    other = fed(ledger, text(0, 32))
    assert other.lo == 32 and found(ledger, text(0))[0] == 0, "others do not"
    assert ledger.tier is not None and ledger.tier.saved_tokens == 16
    ledger.drop(other)
    lease = ledger.adopt(text(0), 16, 150, home=home)
    assert lease.lo == 16 and ledger.fetch(lease)
    home = ledger.give_up(lease, text(0))
    assert home is not None
    ledger.forget(home)
    audit(ledger, [])
    assert ledger.tier.cached == [0] and len(ledger.free[0]) == 8 and not ledger.tree._roots


@pytest.mark.parametrize("windows", [(None,), (None, 6)])
@pytest.mark.parametrize("on_host", [True, False])
def test_the_end_of_a_sequence_that_gives_way_is_found_too(windows, on_host: bool):
    """18 cells: four pages and a half. Whoever goes on has a page of his own for the half."""
    n = len(windows)
    ledger = ledger_of((12,) * n, (24,) * n, windows)
    lease = fed(ledger, text(0, 18))
    ledger.slide(lease)
    ledger.give_up(lease, text(0, 18))
    if on_host:
        run_through(ledger, text(100, 48))
    ledger._ops.take(0, 0, [])
    assert found(ledger, [*text(0, 18), 77])[0] == 18 and found(ledger, [*text(0, 17), 77])[0] == 16
    first, second = (ledger.adopt([*text(0, 18), 77], 18, 150) for _ in range(2))
    for lease in (first, second):
        assert lease.lo == 18 and ledger.fetch(lease) and len(lease.pages[0]) == 5 and len(lease.nodes) == 4
    assert first.pages[0][:4] == second.pages[0][:4] and first.pages[0][4] != second.pages[0][4]
    kinds = [op[0] for op in page_ops(ledger, 1)]
    assert kinds.count(PageOp.RESTORE if on_host else PageOp.COPY) >= 2 * n
    assert ledger.seam(first) == Seam.UNKNOWN and (first.lo, first.draft_lo) == (17, 18)
    for lease in (first, second):
        ledger.drop(lease)
    audit(ledger, [])
    taken = ledger._take(0, 12)
    assert taken is not None and ledger.tier is not None
    ledger._return_unwritten(0, taken)
    ledger.flush()
    audit(ledger, [])
    assert not ledger.tree._roots


@pytest.mark.parametrize("windows", [(None,), (None, 6)])
@pytest.mark.parametrize("then", ["goes on", "gives up"])
def test_the_end_of_a_sequence_comes_to_the_device_while_another_one_waits_for_it(windows, then: str):
    """A session and a branch of as many ids: the one will go on and waits for its last page from the host, when the
    other, idle one gives up its pages, for want of which it waits."""
    n = len(windows)
    ledger = ledger_of((12,) * n, (12,) * n, windows)
    tokens = text(0, 10)
    branch, lease = fed(ledger, tokens), fed(ledger, tokens)
    ledger.give_up(lease, tokens)
    while any(any(node.pages) for node in ledger.tree.nodes() if len(node.key) < PAGE):
        assert ledger._evict(0)
    lease = ledger.adopt(tokens, 10, 150)
    assert lease.lo == 10 and lease.tail is not None and not any(lease.tail.pages)
    ledger.give_up(branch, tokens)
    assert all(lease.tail.pages)
    if then == "goes on":
        assert ledger.fetch(lease) and len(lease.pages[0]) == 3
        audit(ledger, [lease])
    ledger.drop(lease)
    audit(ledger, [])
    ledger.flush()
    assert [len(free) for free in ledger.free] == [12] * n and not ledger.tree._roots


def test_a_flush_forgets_the_copies_too():
    ledger = ledger_of()
    for first in (0, 100, 200):
        run_through(ledger, text(first))
    ledger.flush()
    assert found(ledger, text(0)) == (0, 0)
    audit(ledger, [])
    assert ledger.tier is not None and ledger.tier.cached == [0] and not ledger.tree._roots


def test_window_pages_come_back_as_far_as_they_are_read():
    ledger = ledger_of(pages=(16, 16), host_pages=(64, 64), windows=(None, 6))
    run_through(ledger, text(0, 40))
    run_through(ledger, text(100, 64))
    run_through(ledger, text(300, 64))
    lease = ledger.adopt(text(0, 40), 40, 150)
    assert lease.lo == 40 and sorted(lease.away) == [(0, i) for i in range(10)] + [(1, 8), (1, 9)]
    assert ledger.fetch(lease) and NULL_PAGE not in lease.pages[0]
    audit(ledger, [lease])


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**16), windows=st.sampled_from([(None,), (None, 6), (None, None), (5,), (None, 5, 9)]),
       prefix_cache=st.booleans(), pages=st.integers(9, 30), host_pages=st.integers(1, 40))
def test_verbs_in_any_order(seed: int, windows, prefix_cache: bool, pages: int, host_pages: int):
    """The books hold whatever leaves, comes back, is given up, forgotten, flushed."""
    rng = random.Random(seed)
    n = len(windows)
    ledger = ledger_of((pages,) * n, (host_pages,) * n, windows, prefix_cache=prefix_cache, poison=rng.random() < 0.5)
    leases: list[tuple[Lease, list[int]]] = []
    homes: list = []
    for step in range(80):
        verb = rng.choice(["adopt", "adopt", "feed", "feed", "drop", "give up", "come back", "truncate", "flush",
                           "take", "moved"])
        if verb == "adopt" and len(leases) < 4:
            tokens = text(100 * rng.randint(0, 2), rng.randint(1, 60))
            take_up(ledger, leases, tokens, rng, None)
        elif verb == "come back" and homes:
            home, tokens = homes.pop(rng.randrange(len(homes)))
            take_up(ledger, leases, tokens, rng, home)
        elif verb == "flush" and rng.random() < 0.3:
            ledger.flush()
        elif verb == "take":
            ledger.save_ahead()
            ledger._ops.take(ledger._ops.next_seq, 0, [])
        elif verb == "moved":
            ledger.moved(Moved(rng.randint(-1, ledger._ops.next_seq - 1), 1e-3, 1e-3))
        elif leases:
            lease, tokens = leases[rng.randrange(len(leases))]
            if verb == "feed" and lease.lo < min(len(tokens), lease.top):
                cap = rng.randint(1, 20)
                if (reservation := ledger.reserve(lease, cap, 0)) is not None:
                    ledger.launch(reservation, step)
                    ledger.confirm(lease, step, min(lease.lo + cap, len(tokens), lease.top))
                    ledger.publish(lease, tokens)
                    ledger.slide(lease)
            elif verb == "truncate":
                ledger.truncate(lease, rng.randint(0, 60))
            elif verb in ("drop", "give up"):
                leases.remove((lease, tokens))
                if verb == "drop":
                    ledger.drop(lease, rng.choice([None, 3, 40]))
                else:
                    homes.append((ledger.give_up(lease, tokens), tokens))
        audit(ledger, [lease for lease, _ in leases])
    finish(ledger, leases, homes)


def take_up(ledger: Ledger, leases: list, tokens: list[int], rng: random.Random, home) -> None:
    lease = ledger.adopt(tokens, rng.randint(0, len(tokens)), 70, home=home)
    if rng.random() < 0.2:
        ledger.save_ahead()
    if not ledger.fetch(lease):
        home = ledger.give_up(lease, tokens)
        lease = ledger.adopt(tokens, len(tokens), 70, home=home, restore=False)
    leases.append((lease, tokens))


def finish(ledger: Ledger, leases: list, homes: list) -> None:
    for lease, _ in leases:
        ledger.drop(lease)
    for home, _ in homes:
        if home is not None:
            ledger.forget(home)
    ledger.flush()
    audit(ledger, [])
    assert ledger.tier is not None and not any(ledger.tier.cached) and not ledger.tree._roots
    assert [len(pages) for pages in ledger.free] == list(ledger.n_pages)


# ------------------------------------------------------------------------------------------------------- single cases
class TierHarness(Harness):
    def drain_only(self, most: int = 2000) -> None:
        """Steps until nothing is left to do; sessions and caches stay."""
        for _ in range(most):
            if not (self.half.has_work or self.flight):
                return
            self.step()
            self.half.audit()
        raise AssertionError("not idle")

    @property
    def tokens_restored(self) -> float:
        return self.half.stats()[0]["host_restored_tokens"]


def tier_world(drafter: str = "none", **fields) -> TierHarness:
    fields = dict(pages=(24,), host_pages=(200,), rates=Always(), max_model_len=90, chunk=16) | fields
    world: World = plain_world(drafter, **fields)
    return TierHarness(world, 0)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_session_that_was_reclaimed_is_restored(prefix_cache: bool):
    h = tier_world(prefix_cache=prefix_cache)
    opened(h, "s")
    session_turn(h, "s", prompt_of(40), max_tokens=5)
    h.drain_only()
    submit(h, prompt_of(60, 1), max_tokens=20)
    h.drain_only()
    assert h.half.sessions.get("s").lease is None, "the other request needed its pages"
    rid = session_turn(h, "s", [3, 4], max_tokens=5)
    h.drain_only()
    usage = ended(h, rid).last.usage
    assert usage.cached_tokens == 44 and h.tokens_restored >= 36
    assert h.half.counters.recomputed_tokens <= PAGE
    h.half.sessions.close("s")
    h.finish()


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_retracted_request_is_restored(prefix_cache: bool):
    h = tier_world(prefix_cache=prefix_cache, budget=64)
    prompts = [prompt_of(30, seed) for seed in range(2)]
    rids = [submit(h, prompt, max_tokens=50) for prompt in prompts]
    h.drain_only()
    for rid, prompt in zip(rids, prompts):
        assert ended(h, rid).tokens == answer_of(prompt, max_tokens=50)
    assert h.half.counters.retractions > 0 and h.tokens_restored > 0
    h.finish()


def restoring(h: TierHarness) -> str:
    """A request whose pages are on their way while another one runs."""
    for seed in (1, 2, 3):
        submit(h, prompt_of(60, seed), max_tokens=2)
        h.drain_only()
    runs = submit(h, prompt_of(4, 9), max_tokens=30)
    while not h.clients[runs, 0].tokens:
        h.step()
    h.device.slow = True
    rid = submit(h, prompt_of(60, 1), max_tokens=2)
    h.step()
    assert len(h.half.planner._arriving) == 1 and h.half._live.of(rid)[0].slot < 0
    return rid


def test_others_run_on_while_pages_come_back():
    h = tier_world(pages=(40,))
    rid = restoring(h)
    before = h.half.counters.decode_rows
    for _ in range(4):
        h.step()
    assert h.half.counters.decode_rows > before and h.half._live.of(rid)[0].slot < 0
    h.device.slow = False
    h.drain_only()
    assert ended(h, rid).tokens == answer_of(prompt_of(60, 1), max_tokens=2)
    h.finish()


@pytest.mark.parametrize("then", ["abort", "flush", "abort and take", "reclaim"])
def test_what_may_happen_while_pages_come_back(then: str):
    h = tier_world(pages=(40,), poison=False)
    rid = restoring(h)
    if then.startswith("abort"):
        h.abort(rid)
    if then == "flush":
        h.half.flush_cache()
    if then == "abort and take":  # somebody else gets the pages before the copies are made
        submit(h, prompt_of(80, 5), max_tokens=5)
    if then == "reclaim":
        assert h.half.planner._reclaim()
    h.half.audit()
    for _ in range(3):
        h.step()
        h.half.audit()
    h.device.slow = False
    h.drain_only()
    h.finish()


@pytest.mark.parametrize("breaks", ["a page is lost", "a page has two owners"])
def test_broken_books_of_host_memory_cost_the_copies_and_no_more(breaks: str):
    h = tier_world(strict=False)
    for seed in (1, 2, 3):
        submit(h, prompt_of(60, seed), max_tokens=2)
        h.drain_only()
    tier = h.half.ledger.tier
    assert tier is not None and any(tier.cached)
    if breaks == "a page is lost":
        tier.free[0].pop()
    else:
        tier.free[0].append(next(node.saved[0] for node in h.half.ledger.tree.nodes() if node.saved[0]))
    rid = submit(h, prompt_of(60, 4), max_tokens=2)
    h.drain_only()
    assert ended(h, rid).tokens == answer_of(prompt_of(60, 4), max_tokens=2)
    assert h.half.counters.broken_books == 1 and h.half.counters.faults == 0
    h.finish()


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_branch_and_a_rewind_of_a_session_that_is_on_the_host(page_size: int):
    h = tier_world(page_size=page_size, pages=(96 // page_size,), host_pages=(200,))
    opened(h, "s")
    session_turn(h, "s", prompt_of(40), max_tokens=5)
    h.drain_only()
    submit(h, prompt_of(70, 1), max_tokens=20)
    h.drain_only()
    h.half.sessions.branch("s", "b", 33)
    h.history["b"] = h.history["s"][:33]
    h.half.sessions.rewind("s", 20)
    h.history["s"] = h.history["s"][:20]
    for sid in ("b", "s"):
        session_turn(h, sid, [3, 4], max_tokens=5)
        h.drain_only()
    assert h.tokens_restored > 0
    for sid in ("b", "s"):
        h.half.sessions.close(sid)
    h.finish()


def test_the_session_that_frees_most_for_what_it_holds_goes_first():
    """Two branches share almost all: to give one of them up frees next to nothing."""
    h = tier_world(pages=(60,))
    for sid in ("shared", "alone"):
        opened(h, sid)
        session_turn(h, sid, prompt_of(40, len(sid)), max_tokens=5)
        h.drain_only()
    h.half.sessions.branch("shared", "branch")
    assert h.half.sessions.reclaim()
    assert [s.sid for s in h.half.sessions._idle] != [], "one is left"
    assert h.half.sessions.get("branch").lease is not None, "it holds one page for 44 tokens"
    for sid in ("shared", "alone", "branch"):
        h.half.sessions.close(sid)
    h.finish()
