"""The books of pages, verb by verb, and in any order."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stretto.host.audit import audit, check
from stretto.host.faults import HostFault
from stretto.host.lease import Lease
from stretto.host.ledger import Ledger
from stretto.host.limits import HostLimits
from stretto.host.ops import Ops
from stretto.wire import NULL_PAGE, PageOp, Seam

PAGE = 4


def ledger_of(pages=(32,), windows=(None,), **fields) -> Ledger:
    limits = HostLimits(page_size=PAGE, pages=pages, windows=windows, max_slots=9, max_model_len=200, **fields)
    return Ledger(limits, Ops())


def grown(ledger: Ledger, tokens: list[int], lease: Lease | None = None, salt: str = "", top: int = 150) -> Lease:
    """A lease that has fed all of `tokens`, and published."""
    lease = lease or ledger.adopt(tokens, len(tokens) - 1, top, salt)
    for seq in range(len(tokens) - lease.lo):
        feed(ledger, lease, 1, seq)
        ledger.publish(lease, tokens)
        ledger.slide(lease)
    return lease


def feed(ledger: Ledger, lease: Lease, cap: int, seq: int, got: int | None = None) -> None:
    reservation = ledger.reserve(lease, cap, 0)
    assert reservation is not None
    ledger.launch(reservation, seq)
    ledger.confirm(lease, seq, lease.lo + (cap if got is None else got))


def free(ledger: Ledger, group: int = 0) -> int:
    return len(ledger.free[group])


def test_pages_are_held_up_to_the_clipped_bound_and_the_lookahead():
    ledger = ledger_of()
    lease = ledger.adopt([1] * 6, 5, 9)
    for seq, pages in enumerate((1, 2, 3, 3)):  # caps of 3, 3, 3, 3; top 9, lookahead 2
        reservation = ledger.reserve(lease, 3, 2 if seq else 0)
        assert reservation is not None
        ledger.launch(reservation, seq)
        assert len(lease.pages[0]) == pages
    assert lease.hi == 9 and lease.lo == 0
    ledger.drop(lease)
    audit(ledger, [])


def test_all_groups_or_none():
    ledger = ledger_of(pages=(32, 5), windows=(None, 3))
    lease = ledger.adopt([1] * 100, 99, 150)
    before = [list(pages) for pages in ledger.free]
    assert ledger.reserve(lease, 6 * PAGE, 0) is None
    assert [list(pages) for pages in ledger.free] == before and lease.pages == [[], []]
    audit(ledger, [lease])


@pytest.mark.parametrize(("seq", "exact"), [(1, 1), (0, 4), (0, -1)], ids=["out-of-order", "beyond-hi", "below-lo"])
def test_confirm_refuses(seq: int, exact: int):
    ledger = ledger_of()
    lease = ledger.adopt([1] * 20, 19, 150)
    reservation = ledger.reserve(lease, 3, 0)
    assert reservation is not None
    ledger.launch(reservation, 0)
    with pytest.raises(HostFault):
        ledger.confirm(lease, seq, exact)


def test_confirm_refuses_what_is_not_in_flight_and_what_lies_above_top():
    ledger = ledger_of()
    lease = ledger.adopt([1] * 20, 19, 2)
    with pytest.raises(HostFault, match="out of order"):
        ledger.confirm(lease, 0, 0)
    reservation = ledger.reserve(lease, 8, 0)
    assert reservation is not None
    ledger.launch(reservation, 0)
    with pytest.raises(HostFault, match=r"must lie in 0\.\.2"):
        ledger.confirm(lease, 0, 3)


def test_a_prefix_is_found_in_whole_pages_and_leaves_a_token():
    ledger = ledger_of()
    lease = grown(ledger, list(range(12)))
    for most, hit in ((12, 12), (11, 8), (8, 8), (7, 4), (3, 0)):
        other = ledger.adopt(list(range(12)), most, 150)
        assert other.lo == hit and other.pages[0] == lease.pages[0][: hit // PAGE]
        ledger.drop(other)
    other = ledger.adopt([0, 1, 2, 3, 9, 9, 9, 9], 8, 150)
    assert other.lo == 4
    ledger.drop(other)
    ledger.drop(lease)
    audit(ledger, [])
    assert ledger.tree.loose == [3] and ledger.flush() == 3 and free(ledger) == 32


@given(salts=st.lists(st.text(max_size=3), min_size=2, max_size=4, unique=True))
def test_salts_do_not_meet(salts):
    ledger = ledger_of()
    tokens = list(range(9))
    leases = [grown(ledger, tokens, salt=salt) for salt in salts]
    assert [lease.nodes[0] for lease in leases] == list(dict.fromkeys(lease.nodes[0] for lease in leases))
    for salt, lease in zip(salts, leases):
        other = ledger.adopt(tokens, 8, 150, salt)
        assert other.nodes == lease.nodes
        ledger.drop(other)
        ledger.drop(lease)
    audit(ledger, [])
    ledger.flush()
    assert not ledger.tree._roots, "a salt that nobody uses keeps its root"


def test_case_8_11_a_duplicate_page_is_swapped():
    ledger = ledger_of(poison=True)
    first, second = (ledger.adopt(list(range(9)), 8, 150) for _ in range(2))
    for lease in (first, second):
        feed(ledger, lease, 9, 0)
    own = second.pages[0][:2]
    assert ledger.publish(first, list(range(9))) == []
    assert ledger.publish(second, list(range(9))) == [(0, 0, first.pages[0][0]), (0, 1, first.pages[0][1])]
    assert second.pages[0][:2] == first.pages[0][:2]
    assert list(ledger.free[0])[-2:] == own
    plan = ledger._ops.take(0, 0, [])
    assert plan.page_ops == [(PageOp.POISON, 0, 0, own[0]), (PageOp.POISON, 0, 0, own[1])]
    audit(ledger, [first, second])


def test_only_full_pages_below_lo_are_published():
    ledger = ledger_of()
    lease = ledger.adopt([1] * 20, 19, 150)
    feed(ledger, lease, 7, 0)
    reservation = ledger.reserve(lease, 9, 0)
    assert reservation is not None
    ledger.launch(reservation, 1)
    ledger.publish(lease, [1] * 20)
    assert len(lease.nodes) == 1 and ledger.tree.held == [1]


def test_a_window_lets_pages_go_while_the_full_group_keeps_them():
    ledger = ledger_of(pages=(40, 8), windows=(None, 6))
    tokens = list(range(120))
    lease = grown(ledger, tokens)
    assert len(lease.pages[0]) == 30 and NULL_PAGE not in lease.pages[0]
    assert lease.first[1] == (119 - 5) // PAGE and lease.pages[1][: lease.first[1]] == [NULL_PAGE] * lease.first[1]
    assert free(ledger, 1) + ledger.tree.loose[1] == 8 - (30 - lease.first[1])
    audit(ledger, [lease])
    ledger.drop(lease)
    audit(ledger, [])


def test_case_9_05_a_hit_needs_the_window_before_it():
    ledger = ledger_of(pages=(40, 8), windows=(None, 6))
    tokens = list(range(60))
    ledger.drop(grown(ledger, tokens))
    whole = ledger.adopt(tokens, 60, 150)
    assert whole.lo == 60 and whole.pages[1][:13] == [NULL_PAGE] * 13 and NULL_PAGE not in whole.pages[1][13:]
    early = ledger.adopt(tokens, 20, 150)  # its window pages were evicted while the rest was fed
    assert early.lo == 0
    for lease in (whole, early):
        ledger.drop(lease)
    audit(ledger, [])


def test_a_gap_in_a_window_is_filled_again():
    ledger = ledger_of(pages=(40, 8), windows=(None, 6))
    tokens = list(range(60))
    ledger.drop(grown(ledger, tokens))
    ledger.drop(grown(ledger, tokens[:22]))
    early = ledger.adopt(tokens[:22], 21, 150)
    assert early.lo == 20
    ledger.drop(early)
    audit(ledger, [])


def test_settle_keeps_what_was_proved_and_delivered():
    ledger = ledger_of()
    lease = ledger.adopt([1] * 20, 19, 150)
    feed(ledger, lease, 10, 0)
    for seq in (1, 2):
        reservation = ledger.reserve(lease, 4, 0)
        assert reservation is not None
        ledger.launch(reservation, seq)
    ledger.settle(lease, 8)
    assert (lease.lo, lease.draft_lo, lease.hi, len(lease.flight)) == (8, 8, 8, 0)
    ledger.shrink(lease)
    assert len(lease.pages[0]) == 2
    audit(ledger, [lease])


@pytest.mark.parametrize("n", range(1, 14))
@pytest.mark.parametrize("windows", [(None,), (None, 6)])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_fork_owns_the_page_that_it_writes_again(n: int, windows, prefix_cache: bool):
    ledger = ledger_of(pages=(32,) * len(windows), windows=windows, prefix_cache=prefix_cache)
    tokens = list(range(13))
    lease = ledger.adopt(tokens, 12, 150)
    feed(ledger, lease, 13, 0)
    child, _ = ledger.fork(lease, tokens, n, 100)
    assert child is not None and (child.lo, child.draft_lo, child.top) == (n - 1, n, 100)
    last = (n - 1) // PAGE
    for g in range(len(windows)):
        assert child.pages[g][last] not in lease.pages[g]
        first = child.first[g]
        assert child.pages[g][first:last] == lease.pages[g][first:last]
    copies = [op for op in ledger._ops.take(0, 0, []).page_ops if op[0] == PageOp.COPY]
    assert copies == [(PageOp.COPY, g, lease.pages[g][last], child.pages[g][last]) for g in range(len(windows))]
    assert ledger.seam(child) == Seam.UNKNOWN and child.lo == n - 1
    audit(ledger, [lease, child])
    ledger.drop(lease)
    audit(ledger, [child])
    ledger.drop(child)
    audit(ledger, [])
    if not prefix_cache:
        assert free(ledger) == 32


def test_a_fork_whose_window_is_gone_has_no_child():
    ledger = ledger_of(pages=(40, 20), windows=(None, 6))
    lease = grown(ledger, list(range(60)))
    assert ledger.fork(lease, list(range(60)), 30, 100)[0] is None
    assert ledger.fork(lease, list(range(60)), 58, 100)[0] is not None


def test_a_fork_without_a_free_page_has_no_child_and_leaks_nothing():
    ledger = ledger_of(pages=(4, 20), windows=(None, 6))
    lease = ledger.adopt(list(range(13)), 12, 150)
    feed(ledger, lease, 13, 0)
    assert ledger.fork(lease, list(range(13)), 10, 100)[0] is None
    audit(ledger, [lease])


@pytest.mark.parametrize(("n", "reach"), [(13, 13), (12, 12), (11, 8), (9, 8), (8, 8), (3, 0), (0, 0)])
def test_truncate_stops_at_a_shared_page(n: int, reach: int):
    """Three shared pages and one cell of a fourth."""
    ledger = ledger_of()
    lease = grown(ledger, list(range(13)))
    assert ledger.truncate(lease, n) == reach == lease.lo == lease.draft_lo
    assert len(lease.nodes) == reach // PAGE and len(lease.pages[0]) == -(-reach // PAGE)
    audit(ledger, [lease])


def test_truncate_reaches_nothing_where_the_window_is_gone():
    ledger = ledger_of(pages=(40, 20), windows=(None, 6))
    lease = grown(ledger, list(range(60)))
    assert ledger.truncate(lease, 60) == 60
    assert ledger.truncate(lease, 59) == 0 and lease.nodes == [] and lease.first == [0, 0]
    audit(ledger, [lease])


def test_seams():
    ledger = ledger_of()
    lease = ledger.adopt(list(range(20)), 19, 150)
    assert ledger.seam(lease) == Seam.START
    feed(ledger, lease, 8, 0)
    ledger.publish(lease, list(range(20)))
    assert ledger.seam(lease) == lease.pages[0][1] and lease.lo == 8
    feed(ledger, lease, 2, 1)
    assert ledger.seam(lease) == Seam.UNKNOWN and (lease.lo, lease.draft_lo) == (9, 10)


def test_the_prefix_cache_can_be_off():
    ledger = ledger_of(prefix_cache=False)
    ledger.drop(grown(ledger, list(range(20))))
    assert free(ledger) == 32 and ledger.adopt(list(range(20)), 19, 150).lo == 0


def test_a_broken_lease_is_fenced():
    ledger = ledger_of()
    lease = grown(ledger, list(range(20)))
    ledger.fence(lease)
    audit(ledger, [])
    assert free(ledger) == 32 - 5


def test_a_page_that_leaks_is_seen():
    ledger = ledger_of()
    lease = grown(ledger, list(range(6)))
    lease.pages[0].pop()
    with pytest.raises(HostFault, match="leaked"):
        audit(ledger, [lease])
    ledger.free[0].pop()
    with pytest.raises(HostFault, match="are not 32"):
        check(ledger)


def test_eviction_takes_the_least_recently_used_leaf():
    ledger = ledger_of(pages=(6,))
    for first in (0, 100, 50):
        ledger.drop(grown(ledger, [first + i for i in range(8)]))
    ledger.drop(ledger.adopt([0, 1, 2, 3, 4, 5, 6, 7], 8, 150))  # used again
    lease = ledger.adopt([7] * 8, 7, 150)
    feed(ledger, lease, 8, 0)
    hits = [ledger.adopt([first + i for i in range(8)], 8, 150).lo for first in (0, 50, 100)]
    assert hits == [8, 8, 0]


def test_eviction_does_not_scan_the_tree():
    """Ten times the pages: about ten times the time for ten times the evictions."""
    def seconds(pages: int) -> float:
        ledger = ledger_of(pages=(pages,), windows=(None,))
        for first in range(pages):
            lease = ledger.adopt([first] * PAGE, PAGE, 150)
            feed(ledger, lease, PAGE, 0)
            ledger.publish(lease, [first] * PAGE)
            ledger.drop(lease)
        start = time.thread_time()
        assert len(ledger._take(0, pages) or []) == pages
        return time.thread_time() - start
    small = min(seconds(500) for _ in range(3))
    assert seconds(5000) < 40 * small


def test_a_heap_of_stale_entries_is_rebuilt():
    ledger = ledger_of()
    ledger.drop(grown(ledger, list(range(20))))
    for _ in range(1000):
        ledger.drop(ledger.adopt(list(range(20)), 20, 150))
    assert len(ledger.tree._leaves) < 200
    audit(ledger, [])


# ------------------------------------------------------------------------------------------------------- in any order
@settings(deadline=None, derandomize=True, max_examples=60, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 10_000), windows=st.sampled_from([(None,), (None, 5), (6,), (5, 9), (None, None)]),
       prefix_cache=st.booleans(), pages=st.integers(9, 40))
def test_verbs_in_any_order(seed: int, windows, prefix_cache: bool, pages: int):
    """The audit holds after every verb; a reserve fails only where a group is really out of pages."""
    rng = random.Random(seed)
    ledger = ledger_of(pages=(pages,) * len(windows), windows=windows, prefix_cache=prefix_cache)
    leases: list[tuple[Lease, list[int]]] = []
    for seq in range(120):
        verb = rng.choice(["adopt", *["feed"] * 4, "fork", "settle", "truncate", "shrink", "drop", "flush"])
        if verb == "adopt" and len(leases) < 5:
            tokens = [rng.randrange(2) for _ in range(60)]
            leases.append((ledger.adopt(tokens, rng.randint(0, 59), 59), tokens))
        elif verb == "flush":
            ledger.flush()
        elif leases:
            one_verb(ledger, rng, verb, seq, leases)
        check(ledger)
        audit(ledger, [lease for lease, _ in leases])
    for lease, _ in leases:
        ledger.drop(lease)
    audit(ledger, [])
    ledger.flush()
    assert [len(pages) for pages in ledger.free] == list(ledger.n_pages) and not ledger.tree._roots


def one_verb(ledger: Ledger, rng: random.Random, verb: str, seq: int, leases: list[tuple[Lease, list[int]]]) -> None:
    lease, tokens = rng.choice(leases)
    if verb == "feed" and lease.lo < lease.top:
        cap = rng.randint(1, 9)
        reservation = ledger.reserve(lease, cap, 0)
        if reservation is None:
            n = -(-min(lease.top, lease.lo + cap) // PAGE)
            assert any(ledger.available(g) < n - len(lease.pages[g]) for g in range(len(ledger.windows)))
            return
        ledger.launch(reservation, seq)
        ledger.confirm(lease, seq, min(lease.top, lease.lo + rng.randint(0, cap)))
        ledger.publish(lease, tokens)
        ledger.slide(lease)
    elif verb == "fork" and lease.lo >= 1 and len(leases) < 5:
        child, _ = ledger.fork(lease, tokens, rng.randint(1, lease.lo), 59)
        if child is not None:
            leases.append((child, list(tokens)))
    elif verb == "settle":
        ledger.settle(lease, rng.randint(max(0, len(lease.nodes) * PAGE), 60))
    elif verb == "truncate":
        reach = ledger.truncate(lease, rng.randint(0, 60))
        assert reach == lease.lo
    elif verb == "shrink":
        ledger.shrink(lease)
    elif verb == "drop":
        leases.remove((lease, tokens))
        ledger.drop(lease)
