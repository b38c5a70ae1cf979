"""Copies of KV pages in host memory: taken when a page leaves the device, brought back when its prefix is asked for.

    device    | A | B | C |            evicted      | A |   |   |          found again     | A | B | C |
    host      |   |   |   |     ->                  |   | B | C |    ->                    |   | B | C |

The copies belong to nodes of the prefix tree (`Node.saved`, written here alone), so whoever shares a prefix shares
them, and whatever gives its pages to the tree has them saved: idle sessions, cached prefixes, retracted turns. A copy
stays when its page has come back, so that a prefix that leaves the device again need not be copied again.

All copies are made in the order in which they are asked for here (wire.StepPlan, `page_ops`), by one stream of the
device. So a host page may be given away while a copy from it is still to come, and is in exactly one of two places:

    free + cached = all                for each KV group

Order of eviction: that of the prefix tree, by the same ranks; of a full group leaves first, of a window group any page.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from heapq import heapify, heappop, heappush

from stretto.host.faults import HostFault, need
from stretto.host.ops import Ops
from stretto.host.prefix import Entry, Evicted, Node, Rank
from stretto.host.rates import Rates
from stretto.wire import NULL_PAGE, Moved


class HostTier:
    """`settle` is told of nodes that may have lost their last copy. Counts are of tokens of group 0."""

    def __init__(self, pages: Sequence[int], windows: Sequence[int | None], page_size: int, page_bytes: Sequence[int],
                 rates: Rates, chunk: int, ops: Ops, settle: Callable[[Node], None]):
        self.n_pages, self.windows, self.page_size, self.page_bytes = tuple(pages), windows, page_size, page_bytes
        self.rates, self._chunk, self._ops, self._settle = rates, chunk, ops, settle
        self.free: list[deque[int]] = [deque(range(1, n + 1)) for n in pages]
        self.cached = [0] * len(pages)
        self.saved_tokens = self.restored_tokens = self.declined_tokens = self.forgotten_tokens = 0
        self._saving: Node | None = None
        self._needed: frozenset[Node] = frozenset()
        self._leaves: list[Entry] = []
        self._window_pages: list[list[Entry]] = [[] for _ in pages]
        self._sent: deque[tuple[int, list[int]]] = deque()  # (plan, bytes saved and restored) not yet done

    # ------------------------------------------------------------------------------------------------------- copies
    def save(self, node: Node, pages: Evicted) -> list[tuple[int, int]]:
        """(group, page) of a node leave the device; the caller holds it (PrefixTree.hold). Returns those that are
        copied first: they stay fenced until then."""
        pages = [(g, page) for g, page in pages if node.saved[g] == NULL_PAGE]
        self._saving = node
        if not pages or not self.rates.saving_pays(sum(self.page_bytes[g] for g, _ in pages), self.page_size):
            return []
        copied = [(g, page) for g, page in pages if self._save_page(node, g, page)]
        self.note(node)
        return copied

    def _save_page(self, node: Node, group: int, page: int) -> bool:
        if not self.free[group] and not self._make_room(group):
            return False
        host_page = self.free[group].popleft()
        if node.parent is not None and not any(node.saved):
            node.parent.saved_kids += 1
        node.saved = [*node.saved[:group], host_page, *node.saved[group + 1 :]]
        self.cached[group] += 1
        self._ops.save(group, page, host_page)
        self._count(0, group)
        self.saved_tokens += len(node.key) if group == 0 else 0  # type: ignore[arg-type]
        if self.windows[group] is not None:
            self._push(self._window_pages[group], node.stamps[group], node)
        return True

    @contextmanager
    def needs(self, nodes: Iterable[Node]) -> Iterator[None]:
        """Meanwhile these nodes' copies stay."""
        self._needed = frozenset(nodes)
        try:
            yield
        finally:
            self._needed = frozenset()

    def restore(self, node: Node, group: int, page: int) -> None:
        """The node's copy comes back to a page of the device, which is fenced until then."""
        need(node.saved[group] != NULL_PAGE, "a page is restored that was never saved")
        self._ops.restore(group, node.saved[group], page)
        self.restored_tokens += len(node.key) if group == 0 else 0  # type: ignore[arg-type]
        self._count(1, group)

    def _count(self, kind: int, group: int) -> None:
        if not self._sent or self._sent[-1][0] != self._ops.next_seq:
            self._sent.append((self._ops.next_seq, [0, 0]))
        self._sent[-1][1][kind] += self.page_bytes[group]

    def moved(self, done: Moved) -> None:
        """The device has made the copies of a plan: what they took is measured."""
        while self._sent and self._sent[0][0] <= done.seq:
            seq, (saved, restored) = self._sent.popleft()
            if seq == done.seq and saved and done.save_seconds > 0:
                self.rates.saving.add(saved, done.save_seconds)
            if seq == done.seq and restored and done.restore_seconds > 0:
                self.rates.restoring.add(restored, done.restore_seconds)

    def pays(self, pages: Sequence[int], tokens: int) -> bool:
        """Whether so many pages of each group come back sooner than so many tokens are computed."""
        n_bytes = sum(n * size for n, size in zip(pages, self.page_bytes))
        if self.rates.copying_pays(n_bytes, tokens, self._chunk):
            return True
        self.declined_tokens += tokens
        return False

    # ----------------------------------------------------------------------------------------------------- eviction
    def note(self, node: Node) -> None:
        """The node's rank has changed."""
        if any(node.saved):
            self._push_node(node)

    def _push_node(self, node: Node) -> None:
        if node.saved_kids == 0:
            self._push(self._leaves, node.used, node)

    def _make_room(self, group: int) -> bool:
        """Forgets the least valuable copy of this group, and what goes with it."""
        while not self.free[group]:
            if not (self._forget_leaf() if self.windows[group] is None else self._forget_window_page(group)):
                return False
        return True

    def _forget_leaf(self) -> bool:
        node = self._least(self._leaves, self._is_leaf, lambda n: n.used)
        if node is not None:
            self.forget(node)
            self._settle(node)
        return node is not None

    def _forget_window_page(self, group: int) -> bool:
        node = self._least(self._window_pages[group], lambda n: n.saved[group] != NULL_PAGE, lambda n: n.stamps[group])
        if node is not None:
            self._forget_page(node, group)
            self._settle(node)
        return node is not None

    def _least(self, heap: list[Entry], valid: Callable[[Node], bool],
               rank_of: Callable[[Node], Rank]) -> Node | None:
        """The least valuable node of a heap, taken out of it; not one that is needed just now."""
        needed: list[Entry] = []
        found = None
        while heap and found is None:
            rank, _, node = heappop(heap)
            if not valid(node):
                continue
            if rank_of(node) > rank:  # used since: its turn comes later
                heappush(heap, (rank_of(node), node.serial, node))
            elif node is self._saving or node in self._needed:
                needed.append((rank, node.serial, node))
            else:
                found = node
        for entry in needed:
            heappush(heap, entry)
        return found

    def forget(self, node: Node) -> None:
        """Every copy of a node goes; the caller settles it."""
        for group, host_page in enumerate(node.saved):
            if host_page != NULL_PAGE:
                self._forget_page(node, group)

    def _forget_page(self, node: Node, group: int) -> None:
        self.free[group].append(node.saved[group])
        self.cached[group] -= 1
        node.saved = [*node.saved[:group], NULL_PAGE, *node.saved[group + 1 :]]
        self.forgotten_tokens += len(node.key) if group == 0 else 0  # type: ignore[arg-type]
        if node.parent is not None and not any(node.saved):
            node.parent.saved_kids -= 1
            if any(node.parent.saved):
                self._push_node(node.parent)

    @staticmethod
    def _is_leaf(node: Node) -> bool:
        return node.saved_kids == 0 and node.parent is not None and any(node.saved)

    def _push(self, heap: list[Entry], rank: Rank, node: Node) -> None:
        """A node may stand in a heap several times, under old ranks; then the heap is rebuilt, each node once."""
        heappush(heap, (rank, node.serial, node))
        if len(heap) > 2 * sum(self.cached) + 64:
            group = next((g for g, pages in enumerate(self._window_pages) if pages is heap), None)
            kept = {e[2].serial: e[2] for e in heap
                    if (self._is_leaf(e[2]) if group is None else e[2].saved[group] != NULL_PAGE)}
            heap[:] = [(n.used if group is None else n.stamps[group], n.serial, n) for n in kept.values()]
            heapify(heap)

    def clear(self, nodes: Sequence[Node]) -> None:
        """Forgets every copy of the tree's nodes, which come parents first."""
        for node in reversed(nodes):
            self.forget(node)
            self._settle(node)

    # ------------------------------------------------------------------------------------------------------- checks
    def counters(self) -> dict[str, float]:
        return {"host_saved_tokens": self.saved_tokens, "host_restored_tokens": self.restored_tokens,
                "host_declined_tokens": self.declined_tokens, "host_forgotten_tokens": self.forgotten_tokens}

    def gauges(self) -> dict[str, float]:
        """Bytes, and the rates of which decisions are made (0: not measured)."""
        used = sum(n * size for n, size in zip(self.cached, self.page_bytes))
        total = sum(n * size for n, size in zip(self.n_pages, self.page_bytes))
        return {"host_bytes_used": used, "host_bytes_total": total} | self.rates.gauges()

    def check(self) -> None:
        """The pool equation of host memory, O(1)."""
        for g, n in enumerate(self.n_pages):
            if len(self.free[g]) + self.cached[g] != n:
                raise HostFault(f"group {g}: {len(self.free[g])} free + {self.cached[g]} cached host pages are not {n}")

    def reset(self, nodes: Sequence[Node]) -> None:
        """After a broken check: no copy is trusted any longer. `nodes`: all of the tree, parents first."""
        for node in reversed(nodes):
            node.saved, node.saved_kids = [NULL_PAGE] * len(self.n_pages), 0
        self.free = [deque(range(1, n + 1)) for n in self.n_pages]
        self.cached = [0] * len(self.n_pages)
        self._leaves, self._window_pages = [], [[] for _ in self.n_pages]
        for node in reversed(nodes):
            self._settle(node)

    def audit(self, nodes: Sequence[Node]) -> None:
        """Every host page in exactly one place, and every copy can be forgotten. O(pages)."""
        self.check()
        for g, window in enumerate(self.windows):
            copies = [node.saved[g] for node in nodes if node.saved[g] != NULL_PAGE]
            need(len(copies) == self.cached[g], f"group {g} counts {self.cached[g]} copies, and has {len(copies)}")
            everywhere = copies + list(self.free[g])
            need(len(everywhere) == len(set(everywhere)) == self.n_pages[g], f"a host page of group {g} leaked, or has"
                                                                             " two owners")
            if window is not None:
                found = {entry[2].serial for entry in self._window_pages[g]}
                need(all(n.serial in found for n in nodes if n.saved[g]), "a window page's copy cannot be forgotten")
        found = {entry[2].serial for entry in self._leaves}
        for node in nodes:
            kids = sum(any(child.saved) for child in node.children.values())
            need(node.saved_kids == kids, f"a node counts {node.saved_kids} saved children, and has {kids}")
            need(not any(node.saved) or kids or node.serial in found, "a node's copies cannot be forgotten")
