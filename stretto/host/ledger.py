"""Who holds which page of KV, and how long each sequence is known to be. The only writer of a Lease (host/lease.py).

The device owns the exact length; a result moves `lo` to it. Every page of every group is in exactly one place: free,
held by one lease, or shared in the prefix tree (checked in host/audit.py).

With a host tier (host/tier.py) a page that the tree evicts is copied to host memory first, and comes back when its
prefix is adopted again. Such pages are waited for until their copy is done (host/copies.py):

    evicted -> SAVE in plan N -> free; whoever takes it makes his plan wait for N (Ops.fence)
    adopted -> RESTORE in plan N -> in the tree at once; a lease that reads it has `arrived` when N's copies are done

Groups are `full` (window None), `window(W)`, or `state` (window wire.STATE: layers that keep one state in place of
cells, see host/states.py). Pages of the `state` group are taken where there are some and done without where there are
none. Nothing can go on but from a state, so a lease without a slot ends at one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from stretto.host.copies import CopiesInFlight
from stretto.host.faults import HostFault, need
from stretto.host.lease import Lease, Reservation
from stretto.host.limits import HostLimits
from stretto.host.ops import Mapping, Ops
from stretto.host.prefix import Node, PrefixTree
from stretto.host.states import KeptStates
from stretto.host.tier import HostTier
from stretto.wire import NULL_PAGE, STATE, Moved, Seam, state_cells


class Ledger:
    """Raises HostFault where a law of the books is broken, whatever the caller did."""

    def __init__(self, limits: HostLimits, ops: Ops):
        self.page_size, self.windows, self.n_pages = limits.page_size, limits.windows, limits.pages
        self.prefix_cache, self._poison, self._ops = limits.prefix_cache, limits.poison, ops
        self._groups = range(len(self.windows))
        self._has_window = any(w is not None for w in self.windows)
        self._state = self.windows.index(STATE) if STATE in self.windows else None
        self._states: KeptStates | None = None
        if self._state is not None:
            self._states = KeptStates(self._state, self.page_size, limits.state_every, state_cells(limits.width))
        # what a sequence holds of a window group while chunks are in flight; more is only asked for, never needed
        self._window_pages = [limits.window_pages(w) + -(-limits.chunk // limits.page_size) for w in self.windows]
        self.free: list[deque[int]] = [deque(range(1, n + 1)) for n in self.n_pages]
        self._is_free = [bytearray([1]) * (n + 1) for n in self.n_pages]
        self.leased = [0] * len(self.windows)
        self.fenced: list[Lease] = []  # set aside after a broken check
        self.lost = [0] * len(self.windows)  # pages of each group that nobody held when a broken check was repaired
        self.tree = PrefixTree(self.windows, self.page_size)
        page_bytes = limits.page_bytes or (1,) * len(self.windows)
        self._token_bytes = sum(page_bytes) / self.page_size
        self._page_bytes = page_bytes
        self.tier: HostTier | None = None
        if limits.host_pages:
            self.tier = HostTier(limits.host_pages, self.windows, self.page_size, page_bytes, limits.rates,
                                 limits.chunk, ops, self.tree.settle)
            self.tree.tier = self.tier
        self._ahead = [min(-(-limits.budget // self.page_size), n // 8) for n in self.n_pages]
        self._copies = CopiesInFlight(ops)

    # ------------------------------------------------------------------------------------------------------ pages
    def available(self, group: int) -> int:
        """Pages that can be had without taking them from a lease."""
        return len(self.free[group]) + self.tree.loose[group]

    def needed(self, lease: Lease, upto: int) -> list[int]:
        """Pages of each group that the lease lacks for cells [0, upto)."""
        n = -(-upto // self.page_size)
        out = []
        for g, window in enumerate(self.windows):
            lacking = max(0, n - len(lease.pages[g])) + sum(group == g for group, _ in lease.away)
            if g == self._state:
                lacking = sum(group == g for group, _ in lease.away)
            elif window is not None:
                lacking = min(lacking, max(0, self._window_pages[g] - len(lease.pages[g]) + lease.first[g]))
            out.append(lacking)
        return out

    def _take(self, group: int, n: int) -> list[int] | None:
        """Pages for cells that the next plan may write: it waits for what is being copied from or to them. Those that
        have been free longest, so that there is seldom something to wait for."""
        if len(self.free[group]) < n and not self._free_up(group, n):
            return None
        free, is_free = self.free[group], self._is_free[group]
        pages = [free.popleft() for _ in range(n)]
        self._copies.taken(group, pages)
        for page in pages:
            is_free[page] = 0
        self.leased[group] += n
        return pages

    def _free_up(self, group: int, n: int) -> bool:
        while len(self.free[group]) < n:
            if not self._evict(group):
                return False
        return True

    def _evict(self, group: int) -> bool:
        """The least valuable page of a group, and what goes with it, leaves the device. False where all are pinned."""
        found = self.tree.evict(group)
        if found is None:
            return False
        node, pages = found
        if self.tier is not None:
            self.tree.hold(node)
            for key in self.tier.save(node, pages):
                self._copies.begin(*key)
            self.tree.let_go(node)
        else:
            self.tree.settle(node)
        for g, page in pages:
            self._to_free(g, page)
        return True

    def _to_free(self, group: int, page: int) -> None:
        need(not self._is_free[group][page], f"page {page} of group {group} is freed twice")
        self._is_free[group][page] = 1
        self.free[group].append(page)
        if self._poison:
            if self.tier is not None:
                self._copies.begin_poison(group, page)
            self._ops.poison(group, page)

    def _give(self, group: int, page: int) -> None:
        """A page that a lease held alone goes back."""
        self._to_free(group, page)
        self.leased[group] -= 1

    def _return_unwritten(self, group: int, pages: Sequence[int]) -> None:
        """Pages that were taken in vain keep their place at the head of the free list."""
        for page in reversed(pages):
            self._is_free[group][page] = 1
            self.free[group].appendleft(page)
        self.leased[group] -= len(pages)

    def _window_start(self, group: int, query: int) -> int:
        """The first page that a query at this position, or any later one, reads."""
        window = self.windows[group]
        if window is None:
            return 0
        return max(0, query - max(window, 2) + 1) // self.page_size  # 2: the seam of a page edge stays in reach

    def _hit_start(self, group: int, lo: int) -> int:
        """The first page that a sequence reads which goes on from `lo` cells. Inside a page it has no taps of its last
        cell and feeds that again (see `seam`)."""
        return self._window_start(group, lo - 1 if lo % self.page_size else lo)

    # ------------------------------------------------------------------------------------------------------ verbs
    def adopt(self, tokens: Sequence[int], most: int, top: int, salt: str = "", home: Node | None = None,
              restore: bool = True) -> Lease:
        """A lease on the longest shared prefix of `most` tokens at most, whole pages, references taken.

        In window groups the pages that a query at the hit's end reads must still be held. Pages that only the host has
        are `away` until `fetch`; they are asked for, unless `restore` is false, where that is faster than computing
        their tokens. So is the `tail` of a sequence that gave its pages up. `home`: where the sequence's own pages are
        (see `give_up`), of ledgers that share none."""
        root = home or (self.tree.root(salt) if self.prefix_cache else self.tree.private_root())
        path = self.tree.match(root, tokens, most) if self.prefix_cache or home is not None else []
        if path and not restore and self.tree.tokens_of(path) % self.page_size:
            path.pop()
        here = self._longest(path, lambda node, g: node.pages[g] != NULL_PAGE)
        if restore and self.tier is not None and len(here) < len(path):
            there = self._longest(path, lambda node, g: node.pages[g] != NULL_PAGE or node.saved[g] != NULL_PAGE)
            gain = self.tree.tokens_of(there) - self.tree.tokens_of(here)
            if gain > 0 and self._restoring_pays(there, gain):
                here = there
        lo = self.tree.tokens_of(here)
        self.tree.found(here)
        tail = here.pop() if lo % self.page_size else None
        lease = self._lease_on(root, here, lo, lo, top)
        if tail is not None:
            self._hold_tail(lease, tail)
        if home is not None:
            self.tree.unrefer(home)  # the lease refers to it now
        return lease

    def _longest(self, path: list[Node], has: Callable[[Node, int], bool]) -> list[Node]:
        """The longest part of a path that a query at its end can read: `has` says which pages are there. A tail needs
        its page of every group."""
        n = len(path)
        for g in self._groups:
            if self.windows[g] is None:
                n = next((i for i, node in enumerate(path[:n]) if not has(node, g)), n)
        windows = [g for g in self._groups if self.windows[g] is not None]
        while n and not all(has(node, g) for g in windows
                            for node in path[self._hit_start(g, self.tree.tokens_of(path[:n])) : n]):
            n -= 1
        return path[:n]

    def _restoring_pays(self, path: list[Node], tokens: int) -> bool:
        assert self.tier is not None
        end = self.tree.tokens_of(path)
        missing = [sum(node.pages[g] == NULL_PAGE for node in path[self._hit_start(g, end) :]) for g in self._groups]
        return self.tier.pays(missing, tokens)

    def _lease_on(self, root: Node, path: list[Node], lo: int, draft_lo: int, top: int) -> Lease:
        """References and pins on shared pages, from the window's start on in window groups."""
        start = self._hit_start if draft_lo == lo else self._window_start
        first = [min(start(g, lo), len(path)) for g in self._groups]
        self.tree.refer(root, *path)
        pages = []
        for g in self._groups:
            held = path[first[g] :]
            self.tree.pin_all(held, g)
            pages.append([NULL_PAGE] * first[g] + [node.pages[g] for node in held])
        lease = Lease(root, list(path), pages, first, lo, top, draft_lo)
        if self.tier is not None or self._has_window:  # else nothing is shared that is not on the device
            lease.away = [(g, i) for g in self._groups for i in range(first[g], len(path)) if pages[g][i] == NULL_PAGE]
        lease.arrives = self._copies.last_of((g, page) for g in self._groups for page in pages[g])
        return lease

    def _hold_tail(self, lease: Lease, tail: Node) -> None:
        """Until `fetch` or `drop` the tail stays as it is."""
        lease.tail = tail
        self.tree.refer(tail)
        self._pin_tail(lease, tail)

    def _pin_tail(self, lease: Lease, tail: Node) -> None:
        """Its pages on the device; there may be more of them since another sequence of the same ids gave up."""
        for g in self._groups:
            if tail.pages[g] != NULL_PAGE and g not in lease.tail_pins:
                self.tree.pin(tail, g)
                lease.tail_pins.add(g)

    def _let_tail_go(self, lease: Lease, used: bool) -> None:
        """`used`: its sequence has a page of its own now, and will leave another tail."""
        tail, lease.tail = lease.tail, None
        if tail is None:
            return
        if used:
            self.tree.supersede(tail)
        for g in lease.tail_pins:
            self.tree.unpin([tail], g)
        lease.tail_pins.clear()
        self.tree.unrefer(tail)

    def fetch(self, lease: Lease) -> bool:
        """Brings back what is away. False, with nothing taken, where pages are short: then `adopt` without `restore`.

        What comes back is shared from the start; whoever reads it waits until it has `arrived`."""
        tail = lease.tail
        if not lease.away and tail is None:
            return True
        needed = [(lease.nodes[i], g) for g, i in lease.away]
        if tail is not None:
            self._pin_tail(lease, tail)
            needed += [(tail, g) for g in self._groups if tail.pages[g] == NULL_PAGE]
        if self.tier is None or any(node.saved[g] == NULL_PAGE for node, g in needed):  # forgotten meanwhile
            return False
        with self.tier.needs(node for node, _ in needed):
            return self._fetch(lease) and self._fetch_tail(lease)

    def _fetch(self, lease: Lease) -> bool:
        taken: list[list[int]] = []
        for g in self._groups:
            got = self._take_unfenced(g, sum(group == g for group, _ in lease.away))
            if got is None:
                for group, pages in enumerate(taken):
                    self._return_unwritten(group, pages)
                return False
            taken.append(got)
        for g, i in lease.away:
            self._come_back(lease, g, i, taken[g].pop())
        lease.away = []
        return True

    def _fetch_tail(self, lease: Lease) -> bool:
        """A page of its own for the end of the lease, in every group: a copy of the tail's, which others may want."""
        tail, taken = lease.tail, list[int]()
        if tail is None:
            return True
        for g in self._groups:
            pages = self._take(g, 1) if tail.pages[g] != NULL_PAGE else self._take_unfenced(g, 1)
            if pages is None:
                for group, page in enumerate(taken):
                    self._return_unwritten(group, [page])
                return False
            taken += pages
        for g, page in enumerate(taken):
            if tail.pages[g] != NULL_PAGE:
                self._copies.wait_for(g, tail.pages[g])
                self._ops.copy(g, tail.pages[g], page)
            else:
                assert self.tier is not None
                self.tier.restore(tail, g, page)
                lease.arrives = self._copies.begin(g, page)
            lease.pages[g].append(page)
        lease.rested = lease.lo
        self._let_tail_go(lease, used=True)
        return True

    def _take_unfenced(self, group: int, n: int) -> list[int] | None:
        """Pages that the next plan copies to. Those freed last: copies are made in order, so nobody waits for those
        that touch these pages."""
        if not self._free_up(group, n):
            return None
        pages = [self.free[group].pop() for _ in range(n)]
        for page in pages:
            self._is_free[group][page] = 0
        self.leased[group] += n
        return pages

    def _come_back(self, lease: Lease, group: int, index: int, page: int) -> None:
        assert self.tier is not None
        node = lease.nodes[index]
        if node.pages[group] != NULL_PAGE:  # asked for by another lease meanwhile
            self._return_unwritten(group, [page])
            self.tree.pin(node, group)
            page = node.pages[group]
            lease.arrives = max(lease.arrives, self._copies.plan_of(group, page))
        else:
            self.tree.put(node, group, page)
            self.leased[group] -= 1
            self.tier.restore(node, group, page)
            lease.arrives = self._copies.begin(group, page)
        lease.pages[group][index] = page

    def arrived(self, lease: Lease) -> bool:
        """Whether all that it reads is on the device; else the plan of its first row must `wait_for` it."""
        return self._copies.is_done(lease.arrives)

    def wait_for(self, lease: Lease) -> None:
        """The next plan begins once all that the lease reads has come."""
        if not self.arrived(lease):
            self._ops.fence(lease.arrives)

    def moved(self, done: Moved) -> None:
        """The copies of a plan are done."""
        self._copies.done(done.seq)
        if self.tier is not None:
            self.tier.moved(done)

    def save_ahead(self) -> None:
        """Evicts what the next steps will need, so that they find pages whose copies are done."""
        if self.tier is not None:
            for g in self._groups:
                while len(self.free[g]) < self._ahead[g] and self._evict(g):
                    pass

    def limit(self, lease: Lease, top: int) -> None:
        """The sequence's next turn: a new top for a lease without steps in flight."""
        need(not lease.flight and top >= lease.lo, "a new top for a lease in flight, or below its length")
        lease.top, lease.ahead = top, 0

    def reserve(self, lease: Lease, q_cap: int, lookahead: int) -> Reservation | None:
        """Pages for [0, hi + q_cap), clipped at top, and the lookahead: in every group or, with None, in no group."""
        n = -(-(min(lease.top, lease.lo + lease.flying + q_cap) + lookahead) // self.page_size)
        held = len(lease.pages[0])
        if n <= held:
            return Reservation(lease, q_cap, [])
        got: dict[int, list[int]] = {}
        for g in self._groups:
            pages = [] if g == self._state else self._take(g, n - held)
            if pages is None:
                for group, taken in got.items():
                    self._return_unwritten(group, taken)
                return None
            got[g] = pages
        if self._states is not None:
            got[self._states.group] = [self._state_page(self._states, i) for i in range(held, n)]
        mapped = []
        for g, pages in got.items():
            mapped += [(g, held + i, page) for i, page in enumerate(pages) if page != NULL_PAGE]
            lease.pages[g] += pages
        return Reservation(lease, q_cap, mapped)

    def _state_page(self, states: KeptStates, index: int) -> int:
        """For the state behind the page of this index, where it is to be kept and there is room; else NULL_PAGE."""
        taken = self._take(states.group, 1) if states.is_kept(index) else None
        return taken[0] if taken else NULL_PAGE

    def launch(self, reservation: Reservation, seq: int) -> None:
        """The row of this reservation is in flight with step `seq`."""
        lease = reservation.lease
        lease.flight.append((seq, reservation.q_cap))
        lease.flying += reservation.q_cap
        lease.rested = -1  # its page may be written

    def confirm(self, lease: Lease, seq: int, exact: int) -> None:
        """A result came: in order, once, and within what was reserved for it."""
        flight, lo = lease.flight, lease.lo
        if not flight or flight[0][0] != seq:
            raise HostFault(f"the result of step {seq} is out of order, or not this turn's")
        q_cap = flight[0][1]
        if not lo <= exact <= lo + q_cap or exact > lease.top:
            raise HostFault(f"a length of {exact} was reported; it must lie in {lo}..{min(lease.top, lo + q_cap)}")
        flight.popleft()
        lease.flying -= q_cap
        lease.lo = lease.draft_lo = exact

    def publish(self, lease: Lease, tokens: Sequence[int]) -> list[Mapping]:
        """Full pages below lo become shared. A page whose tokens are shared already is swapped for the shared one and
        freed. Returns the swaps, which a seated lease must map before its next row."""
        if lease.lo // self.page_size <= len(lease.nodes) or not self.prefix_cache:
            return []
        return self._share(lease, tokens)

    def _share(self, lease: Lease, tokens: Sequence[int]) -> list[Mapping]:
        size, swaps = self.page_size, list[Mapping]()
        nodes, tree = lease.nodes, self.tree
        node = nodes[-1] if nodes else lease.root
        for i in range(len(nodes), min(lease.lo, len(tokens)) // size):
            key = tuple(tokens[i * size : (i + 1) * size])
            found = node.children.get(key)
            if found is None:
                own = [pages[i] for pages in lease.pages]
                node = tree.grow(node, key, own)
                for g, pinned in enumerate(node.pins):
                    self.leased[g] -= pinned
            else:
                node = found
                tree.refer(node)
                for g in self._groups:
                    swaps += self._share_page(lease, node, g, i)
            nodes.append(node)
        return swaps

    def _share_page(self, lease: Lease, node: Node, group: int, index: int) -> list[Mapping]:
        mine, theirs = lease.pages[group][index], node.pages[group]
        if mine == NULL_PAGE:  # slid past: nothing to share, nothing to pin
            return []
        if theirs == NULL_PAGE:
            self.tree.put(node, group, mine)
            self.leased[group] -= 1
            return []
        self.tree.pin(node, group)
        self._copies.wait_for(group, theirs)
        lease.pages[group][index] = theirs
        self._give(group, mine)
        return [(group, index, theirs)]

    def slide(self, lease: Lease) -> list[Mapping]:
        """Window pages that no query at or above lo - 1 reads go. (lo - 1: a re-seat may feed that cell again.)

            cells:  |  gone  |<------- W ------->|
                    0        start      lo - 1   lo
        """
        gone: list[Mapping] = []
        if not self._has_window:
            return gone
        for g in self._groups:
            start = self._read_from(lease, g)
            for i in range(lease.first[g], start):
                if lease.pages[g][i] != NULL_PAGE:
                    self._let_go(lease, g, i)
                    lease.pages[g][i] = NULL_PAGE
                    gone.append((g, i, NULL_PAGE))
            lease.first[g] = max(lease.first[g], start)
        return gone

    def _read_from(self, lease: Lease, group: int) -> int:
        """The first page of a group that anybody may read who goes on from lo, or feeds cell lo - 1 again."""
        if self._states is not None and group == self._states.group:
            return self._states.read_from(lease)
        return min(self._window_start(group, max(0, lease.lo - 1)), len(lease.pages[group]))

    def rest(self, lease: Lease, slot: int, exact: bool = False) -> None:
        """A settled sequence has left its slot (0: and no plan may name that any more), and keeps its pages. Its state
        is kept as well, or lo goes back to the last one that is. `exact`: the device has fed no more than lo."""
        ahead, lease.ahead = 0 if exact else lease.ahead, 0
        if self._states is None or self._states.is_held(lease):
            return
        if not (slot and self._states.outlives(ahead) and self._keep_state(self._states, lease, slot)):
            self.truncate(lease, lease.lo)

    def _keep_state(self, states: KeptStates, lease: Lease, slot: int) -> bool:
        """The slot's state at lo, of which it has a cell, goes beside the page of cell lo - 1. False: there is none."""
        g, i = states.group, (lease.lo - 1) // self.page_size
        node = lease.nodes[i] if i < len(lease.nodes) else None  # then the page is full
        if node is not None and node.pages[g] != NULL_PAGE:  # somebody else has kept it
            self.tree.pin(node, g)
            self._copies.wait_for(g, node.pages[g])
            lease.pages[g][i] = node.pages[g]
        else:
            if lease.pages[g][i] == NULL_PAGE:
                if (taken := self._take(g, 1)) is None:
                    return False
                lease.pages[g][i] = taken[0]
                if node is not None:
                    self.tree.put(node, g, taken[0])
                    self.leased[g] -= 1
            self._ops.keep_state(g, states.cell(slot, lease.lo), lease.pages[g][i])
        lease.first[g], lease.rested = min(lease.first[g], i), lease.lo
        return True

    @property
    def has_states(self) -> bool:
        """Whether a sequence can go on only where its state is at hand."""
        return self._states is not None

    def _let_go(self, lease: Lease, group: int, index: int) -> None:
        """The lease gives up one page: its pin on a shared one, the page itself otherwise."""
        page = lease.pages[group][index]
        if page == NULL_PAGE:
            return
        if index < len(lease.nodes):
            self.tree.unpin([lease.nodes[index]], group)
        else:
            self._give(group, page)

    def settle(self, lease: Lease, n: int) -> None:
        """A turn ended with `n` tokens while steps may be in flight: nothing of them counts."""
        lo = min(lease.lo, n)
        lease.ahead += lease.flying + lease.lo - lo
        lease.flight.clear()
        lease.flying = 0
        lease.lo = lease.draft_lo = lo

    def seam(self, lease: Lease) -> int:
        """Where the taps of position lo-1, and the state behind it, come from when no live slot holds them: a value of
        the SEAM column."""
        if lease.draft_lo == lease.lo + 1:
            return Seam.UNKNOWN  # forked: the cell is fed again
        if lease.lo == 0:
            return Seam.START
        if self._states is not None:
            page = self._states.page_at_end(lease)
            need(page != NULL_PAGE, f"a sequence would go on from {lease.lo} cells without its state")
            return page
        if lease.lo % self.page_size == 0:
            return lease.pages[0][lease.lo // self.page_size - 1]
        self._feed_last_again(lease)
        return Seam.UNKNOWN

    def _feed_last_again(self, lease: Lease) -> None:
        """No taps of position lo-1 at hand: it is fed again. Its draft cell stands; its page is not full, so not
        shared."""
        need(lease.lo // self.page_size >= len(lease.nodes), "a shared page would be fed again")
        lease.draft_lo = lease.lo
        lease.lo -= 1

    def fork(self, lease: Lease, tokens: Sequence[int], n: int, top: int) -> tuple[Lease | None, list[Mapping]]:
        """A child on the first `n` tokens, and the swaps of the parent's pages (see publish).

            pages:  | shared | shared | copied |        `last` is the page of cell n-1,
                    0                 last  n-1         which the child feeds again and so writes itself

        No child where the cells of its window are gone, or no page is free for the copy: then adopt. Where layers keep
        states the child goes on from the last one below n, which ends a page, so nothing is copied."""
        need(1 <= n <= lease.lo, f"a fork at {n} tokens of a sequence proved up to {lease.lo}")
        swaps = self._share(lease, tokens)
        if self._states is not None:
            return self._fork_at_state(lease, self._states.below(lease, n - 1, rested=False), top), swaps
        last = (n - 1) // self.page_size
        for g in self._groups:
            if NULL_PAGE in lease.pages[g][self._window_start(g, n - 1) : last + 1]:
                return None, swaps
        child = self._lease_on(lease.root, lease.nodes[:last], n - 1, n, top)
        if not self._copy_page(lease, child, last):
            self.drop(child)
            return None, swaps
        return child, swaps

    def _fork_at_state(self, lease: Lease, n: int, top: int) -> Lease | None:
        path = lease.nodes[: n // self.page_size]
        for g in self._groups:
            if g != self._state and NULL_PAGE in lease.pages[g][self._window_start(g, n) : len(path)]:
                return None
        return self._lease_on(lease.root, path, n, n, top) if path else None

    def _copy_page(self, parent: Lease, child: Lease, index: int) -> bool:
        got: list[int] = []
        for g in self._groups:
            pages = self._take(g, 1)
            if pages is None:
                for group, page in enumerate(got):
                    self._return_unwritten(group, [page])
                return False
            got += pages
        for g, page in enumerate(got):
            self._copies.wait_for(g, parent.pages[g][index])
            self._ops.copy(g, parent.pages[g][index], page)
            child.pages[g].append(page)
        return True

    def truncate(self, lease: Lease, n: int) -> int:
        """Rewinds a lease without steps in flight to `n` tokens or less; returns the length it reached.

        Less, where `n` lies inside a shared page, which is never written: then its start; or where layers keep states
        and none is held at `n`; and nothing, where window cells that the next token would read are gone."""
        need(not lease.flight, "a lease in flight is settled before it is truncated")
        reach = min(lease.lo, n)
        if self._states is not None:
            reach = self._states.below(lease, reach)
        if reach // self.page_size < len(lease.nodes):
            reach -= reach % self.page_size
        start = [self._window_start(g, max(0, reach - 1)) for g in self._groups]
        if any(lease.first[g] > start[g] for g in self._groups if g != self._state):
            reach = 0
        lease.lo = lease.draft_lo = reach
        lease.rested = reach if 0 < reach == lease.rested else -1
        keep = -(-reach // self.page_size)
        self._supersede(lease, -(-n // self.page_size))
        self._cut(lease, keep)
        self.tree.unrefer(*reversed(lease.nodes[keep:]))
        del lease.nodes[keep:]
        return reach

    def _supersede(self, lease: Lease, keep: int) -> None:
        for node in lease.nodes[keep:]:
            self.tree.supersede(node)

    def shrink(self, lease: Lease) -> None:
        """Gives back the pages above lo of a lease without steps in flight."""
        need(not lease.flight, "a lease in flight is settled before it shrinks")
        keep = -(-lease.lo // self.page_size)
        need(keep >= len(lease.nodes), "a lease would shrink below a shared page")
        self._cut(lease, keep)

    def _cut(self, lease: Lease, keep: int) -> None:
        shared = lease.nodes[keep:]
        for g in self._groups:
            pages = lease.pages[g][keep:]
            self.tree.unpin([node for node, page in zip(shared, pages) if page != NULL_PAGE], g)
            for page in pages[len(shared) :]:
                if page != NULL_PAGE:
                    self._give(g, page)
            del lease.pages[g][keep:]
            lease.first[g] = min(lease.first[g], keep)

    def drop(self, lease: Lease, useful: int | None = None) -> None:
        """Everything goes back. Steps in flight may still write the pages: stream order puts them before any reuse.
        `useful`: tokens that somebody may continue; what follows them is the first to be evicted."""
        lease.flight.clear()
        lease.flying = 0
        if useful is not None:
            self._supersede(lease, -(-useful // self.page_size))
        self._let_tail_go(lease, used=False)
        self._cut(lease, 0)
        self.tree.unrefer(*reversed(lease.nodes))
        lease.nodes.clear()
        self._leave(lease.root)

    def give_up(self, lease: Lease, tokens: Sequence[int], useful: int | None = None, slot: int = 0) -> Node | None:
        """As `publish` and `drop`, of a sequence that will go on: its pages stay findable as long as there is room,
        with a host tier its last cells too. Returns the `home` that it must adopt from, or `forget`; None where the
        shared tree is that. `slot`: where the sequence still sits."""
        if self.tier is None:
            self.publish(lease, tokens)
            self.drop(lease, useful)
            return None
        home = None if self.prefix_cache else self.join(lease.root)
        states = self._states
        if states is not None and slot and lease.lo and states.outlives(lease.flying) and not states.is_held(lease):
            self._keep_state(states, lease, slot)
        self._share(lease, tokens)
        self._share_tail(lease, tokens)
        self.drop(lease, useful)
        return home

    def _share_tail(self, lease: Lease, tokens: Sequence[int]) -> None:
        """The cells above the last full page, of a lease that is about to be dropped. Steps in flight write only cells
        above them."""
        n, rest = divmod(lease.lo, self.page_size)
        if not rest or len(lease.nodes) != n or len(lease.pages[0]) <= n or lease.lo > len(tokens):
            return
        if self.has_states and lease.rested != lease.lo:
            return
        tail = self.tree.child(lease.nodes[-1] if n else lease.root, tuple(tokens[n * self.page_size : lease.lo]))
        self.tree.revive(tail)
        self.tree.refer(tail)
        lease.nodes.append(tail)
        for g in self._groups:
            self._share_page(lease, tail, g, n)

    def join(self, home: Node) -> Node:
        """One more sequence finds its pages there."""
        self.tree.refer(home)
        return home

    def forget(self, home: Node) -> None:
        """A sequence that gave its pages up has ended."""
        self._leave(home)

    def _leave(self, root: Node) -> None:
        """One lease or sequence fewer on this root. Where nothing is shared, pages that nobody can find again go."""
        self.tree.unrefer(root)
        if self.prefix_cache or root.refs:
            return
        for node in reversed(self.tree.below(root)):
            for g, page in self.tree.take_pages(node):
                self._to_free(g, page)
            if self.tier is not None:
                self.tier.forget(node)
            self.tree.settle(node)

    def fence(self, lease: Lease) -> None:
        """A lease whose books are broken is set aside for ever: its pages are lost rather than used twice."""
        lease.flight.clear()
        lease.flying = 0
        self.fenced.append(lease)

    def flush(self) -> int:
        """Frees every shared page that no lease refers to, and every copy; returns how many pages of the device."""
        n = 0
        while (found := self.tree.evict_leaf()) is not None:
            node, freed = found
            n += len(freed)
            for g, page in freed:
                self._to_free(g, page)
            self.tree.settle(node)
        if self.tier is not None:
            self.tier.clear(self.tree.nodes())
        return n

    def worth(self, lease: Lease) -> float:
        """Tokens that would be lost with a lease for the memory that it alone holds; 1: as many as fit there."""
        alone = 0
        for g, window in enumerate(self.windows):
            if window is None:  # who holds a page holds all before it, so those that are shared come first
                shared = bisect_left(range(len(lease.nodes)), True, key=partial(self._holds_alone, lease, g))
                held = len(lease.pages[g]) - shared
            else:
                held = sum(page != NULL_PAGE and not (i < len(lease.nodes) and lease.nodes[i].pins[g] > 1)
                           for i, page in enumerate(lease.pages[g][lease.first[g] :], lease.first[g]))
            alone += held * self._page_bytes[g]
        return lease.lo * self._token_bytes / max(alone, self._token_bytes)

    @staticmethod
    def _holds_alone(lease: Lease, group: int, index: int) -> bool:
        return lease.nodes[index].pins[group] <= 1

    def restate(self, group: int, free: Sequence[int], leased: int) -> None:
        """A group's books anew, after a broken check (see `audit.repair`). What nobody holds is lost."""
        n, pages = self.n_pages[group], set(free)
        self.free[group] = deque(free)
        self._is_free[group] = bytearray(page in pages for page in range(n + 1))
        self.leased[group] = leased
        self.lost[group] = n - len(free) - leased - self.tree.held[group]
