"""The tree of shared prefixes: one node is one full page of tokens, with its page of KV in every group.

Called by the ledger only. A lease refers to every node of its path (`refs`), and pins the page of each group that it
still reads (`pins`): a window page that a lease has slid past is free to go while the full page stays.

A *tail* is a leaf of less than a page: the end of a sequence that gave its pages up and will go on. Its page is never
shared: whoever goes on from it gets a copy.

A node may also have copies of its pages in host memory (`saved`, written by host/tier.py alone), which stay when its
pages on the device go:

    root ---- A ---- B ---- C ---- D        A, B: on the device (and perhaps saved)        evicted: B, then A
                  device |  host            C, D: saved only; found by `match` all the same

Order of eviction: least valuable first, in O(log n) by heaps with stale entries. A page of a full group goes with its
whole node, leaves first; a window page goes alone and leaves a gap, which a later sequence may fill again. The value of
a node is that of Cherkasova's Greedy-Dual-Size-Frequency (1998) for pages of one size: how often it was found, plus the
value of what was evicted last, so that what is never found again grows old; at equal value the least recently used
goes. States that nobody will continue (a rewound turn, a replaced history) go before all others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import count
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec

from stretto.host.faults import need
from stretto.wire import NULL_PAGE

if TYPE_CHECKING:
    from stretto.host.tier import HostTier

Rank = tuple[float, int]  # (value, clock): the smallest goes first
MOST_HITS = 7  # that count: what was found more often is as old after as many turnovers
NEVER_AGAIN = -1  # in place of `hits`: superseded
Evicted = list[tuple[int, int]]  # (group, page)


_NO_TAILS: Mapping[int, int] = MappingProxyType({})  # one for all nodes: few have any, and there are many nodes
_UNUSED: Rank = (0.0, 0)
_NO_STAMPS: Sequence[Rank] = (_UNUSED,) * 64  # one for all nodes, as only window pages are unpinned one by one


class Node(msgspec.Struct, eq=False):
    """One page of tokens below its parent. The key of a root is its salt; a root's parent is None."""

    key: object
    parent: Node | None
    serial: int
    depth: int
    pages: list[int]  # of each group
    pins: list[int]  # leases that hold the page of each group
    saved: Sequence[int]  # host pages: of each group
    refs: int = 0  # leases whose path leads through this node
    kids: int = 0  # children with a page on the device
    hits: int = 0  # how often it was found
    used: Rank = _UNUSED  # when the last reference went
    stamps: Sequence[Rank] = _NO_STAMPS  # when the last pin of each group went, once one has
    saved_kids: int = 0  # children with a host page
    children: dict[tuple[int, ...], Node] = {}
    tails: Mapping[int, int] = _NO_TAILS  # children that are less than a page: how many of each length


Entry = tuple[Rank, int, Node]  # (rank, serial, node)


class PrefixTree:
    """Every public method keeps `held` and `loose` exact: pages of each group in the tree, and those nobody pins."""

    def __init__(self, windows: Sequence[int | None], page_size: int):
        self.windows, self.page_size = tuple(windows), page_size
        n = len(self.windows)
        self._not_saved = (NULL_PAGE,) * n  # one for all nodes
        self._groups = range(n)
        self.held = [0] * n
        self.loose = [0] * n
        self._roots: dict[object, Node] = {}  # by salt, private ones by their serial number
        self._clock, self._serials = 0, count()
        self._floor = 0.0  # the value of what was evicted last
        self.tier: HostTier | None = None
        self._leaves: list[Entry] = []
        self._window_pages: list[list[Entry]] = [[] for _ in range(n)]

    # ------------------------------------------------------------------------------------------------------ paths
    def root(self, salt: str) -> Node:
        """The root of all prefixes of one salt. Roots are separate, so no text can imitate a salt."""
        found = self._roots.get(salt)
        if found is None:
            found = self._roots[salt] = self._new_node(salt, None)
        return found

    def private_root(self) -> Node:
        """A root that no other sequence can find."""
        root = self._new_node(None, None)
        root.key = root.serial
        self._roots[root.key] = root
        return root

    def match(self, root: Node, tokens: Sequence[int], most: int) -> list[Node]:
        """Nodes of the longest known prefix of whole pages, `most` tokens at most, and the tail that continues it."""
        size, node, path = self.page_size, root, list[Node]()
        ids = tuple(tokens[:most])  # slices of it are keys
        for end in range(size, most + 1, size):
            child = node.children.get(ids[end - size : end])
            if child is None:
                break
            path.append(child)
            node = child
        at = len(path) * size
        for n in sorted(node.tails, reverse=True):
            if at + n <= most and (tail := node.children.get(ids[at : at + n])) is not None:
                return [*path, tail]
        return path

    def child(self, parent: Node, key: tuple[int, ...]) -> Node:
        """The child of this key, made where there is none. The caller must refer to it."""
        found = parent.children.get(key)
        if found is None:
            found = parent.children[key] = self._new_node(key, parent)
            if len(key) < self.page_size:
                parent.tails = {**parent.tails, len(key): parent.tails.get(len(key), 0) + 1}
        return found

    def grow(self, parent: Node, key: tuple[int, ...], pages: list[int]) -> Node:
        """A child of whole pages that nobody has yet, with its page of every group (or NULL_PAGE), each pinned by the
        lease that brings them and leads through it: `child`, `refer` and `put` at once."""
        pins, held = [int(page != NULL_PAGE) for page in pages], self.held
        node = Node(key, parent, next(self._serials), parent.depth + 1, pages, pins, self._not_saved, refs=1)
        need(parent.children.setdefault(key, node) is node, "a page of tokens is made twice")
        for group in self._groups:
            held[group] += pins[group]
        parent.kids += 1 in pins
        return node

    def tokens_of(self, path: Sequence[Node]) -> int:
        """Tokens of a path, which may end with a tail."""
        return (len(path) - 1) * self.page_size + len(path[-1].key) if path else 0  # type: ignore[arg-type]

    def _new_node(self, key: object, parent: Node | None) -> Node:
        n, depth = len(self.windows), parent.depth + 1 if parent else 0
        return Node(key, parent, next(self._serials), depth, [NULL_PAGE] * n, [0] * n, self._not_saved)

    # ------------------------------------------------------------------------------------------- pages, references
    def put(self, node: Node, group: int, page: int) -> None:
        """A page becomes shared, pinned by the lease that brings it."""
        need(node.pages[group] == NULL_PAGE, "a node has a page of this group already")
        if node.parent is not None and not any(node.pages):
            node.parent.kids += 1
        node.pages[group] = page
        node.pins[group] = 1
        self.held[group] += 1

    def pin(self, node: Node, group: int) -> None:
        need(node.pages[group] != NULL_PAGE, "a page that is gone cannot be pinned")
        if node.pins[group] == 0:
            self.loose[group] -= 1
        node.pins[group] += 1

    def pin_all(self, nodes: Sequence[Node], group: int) -> None:
        """Those of them that have a page of this group."""
        for node in nodes:
            if node.pages[group] != NULL_PAGE:
                pins = node.pins
                if pins[group] == 0:
                    self.loose[group] -= 1
                pins[group] += 1

    def unpin(self, nodes: Iterable[Node], group: int) -> None:
        """The page of each of them."""
        window = self.windows[group] is not None
        for node in nodes:
            left = node.pins[group] - 1
            need(left >= 0, "a page is unpinned twice")
            node.pins[group] = left
            if left == 0:
                self.loose[group] += 1
                if window:
                    self._stamp(node, group)

    def _stamp(self, node: Node, group: int) -> None:
        """A window page may be evicted next."""
        stamps = list(node.stamps[: len(node.pages)])
        stamps[group] = rank = self._rank(node)
        node.stamps = stamps
        self._push(self._window_pages[group], rank, node)

    def refer(self, *nodes: Node) -> None:
        for node in nodes:
            node.refs += 1

    def unrefer(self, *nodes: Node) -> None:
        """One lease fewer leads through these nodes, the last of a path first; its pins must have gone before."""
        for node in nodes:
            refs = node.refs
            need(refs > 0, "a node is unreferred twice")
            node.refs = refs - 1
            if refs == 1:
                node.used = self._rank(node)
                if self.tier is not None:
                    self.tier.note(node)
                self.settle(node)

    def _rank(self, node: Node) -> Rank:
        self._clock += 1
        return (NEVER_AGAIN if node.hits == NEVER_AGAIN else self._floor + 1 + node.hits), self._clock

    def hold(self, node: Node) -> None:
        """The node stays, whatever else goes, until `let_go`."""
        node.refs += 1

    def let_go(self, node: Node) -> None:
        """Undoes `hold`, and is no use of the node."""
        node.refs -= 1
        self.settle(node)

    def found(self, path: Sequence[Node]) -> None:
        """A sequence goes on from these nodes."""
        for node in path:
            if (hits := node.hits) < MOST_HITS:
                node.hits = hits + 1 if hits > 0 else 1

    def revive(self, node: Node) -> None:
        """Somebody may continue this state after all."""
        node.hits = max(node.hits, 0)

    def supersede(self, node: Node) -> None:
        """The one lease that leads through this node leaves a state that will not be continued."""
        if node.refs == 1:
            node.hits = NEVER_AGAIN

    def settle(self, node: Node) -> None:
        """After pages, references or children of a node went: it may be evicted next, or goes itself where nothing
        of it is left, and perhaps its parents with it."""
        while node.refs == 0:
            parent = node.parent
            if parent is None:
                if not node.children and self._roots.get(node.key) is node:
                    del self._roots[node.key]
                return
            if any(node.pages):
                if node.kids == 0:
                    self._push(self._leaves, node.used, node)
                return
            if node.children or any(node.saved):
                return
            self._detach(node, parent)
            node = parent

    def _detach(self, node: Node, parent: Node) -> None:
        key = node.key
        assert isinstance(key, tuple)  # only a root's is none
        del parent.children[key]
        node.parent = None
        if len(key) < self.page_size:
            left = {n: count - (n == len(key)) for n, count in parent.tails.items()}
            parent.tails = {n: count for n, count in left.items() if count} or _NO_TAILS

    # --------------------------------------------------------------------------------------------------- eviction
    def evict(self, group: int) -> tuple[Node, Evicted] | None:
        """Takes at least one page of this group off the device, the least valuable; None where every page is pinned.
        The node, which the caller must `settle`, and (group, page) of all that went. O(log n), amortised."""
        return self.evict_leaf() if self.windows[group] is None else self._evict_window_page(group)

    def evict_leaf(self) -> tuple[Node, Evicted] | None:
        """As `evict`: the least valuable node without others behind it, with its page of every group."""
        while self._leaves:
            rank, _, node = heappop(self._leaves)
            if self._is_leaf(node, rank):
                self._floor = max(self._floor, rank[0])
                return node, self.take_pages(node)
        return None

    def _evict_window_page(self, group: int) -> tuple[Node, Evicted] | None:
        heap = self._window_pages[group]
        while heap:
            rank, _, node = heappop(heap)
            if self._is_loose(node, group, rank):
                return node, [(group, self._take_page(node, group))]
        return None

    def take_pages(self, node: Node) -> Evicted:
        """Every page of a node that nobody pins; the caller must `settle` it."""
        return [(g, self._take_page(node, g)) for g, page in enumerate(node.pages) if page != NULL_PAGE]

    def _take_page(self, node: Node, group: int) -> int:
        need(node.pins[group] == 0, "a pinned page is evicted")
        page, node.pages[group] = node.pages[group], NULL_PAGE
        self.held[group] -= 1
        self.loose[group] -= 1
        if node.parent is not None and not any(node.pages):
            node.parent.kids -= 1
            if node.parent.kids == 0:
                self.settle(node.parent)
        return page

    @staticmethod
    def _is_leaf(node: Node, rank: Rank) -> bool:
        return node.refs == 0 and node.kids == 0 and node.parent is not None and node.used == rank and any(node.pages)

    @staticmethod
    def _is_loose(node: Node, group: int, rank: Rank) -> bool:
        return node.pages[group] != NULL_PAGE and node.pins[group] == 0 and node.stamps[group] == rank

    def _push(self, heap: list[Entry], rank: Rank, node: Node) -> None:
        """A heap of mostly stale entries is rebuilt; there are at most as many valid ones as pages in the tree."""
        heappush(heap, (rank, node.serial, node))
        if len(heap) > 2 * sum(self.held) + 64:
            group = next((g for g, pages in enumerate(self._window_pages) if pages is heap), None)
            heap[:] = [e for e in heap
                       if (self._is_leaf(e[2], e[0]) if group is None else self._is_loose(e[2], group, e[0]))]
            heapify(heap)

    # ------------------------------------------------------------------------------------------------------ audit
    def nodes(self) -> list[Node]:
        """Every node below a root that can be found, parents first."""
        return [node for root in self._roots.values() for node in self.below(root)]

    @staticmethod
    def below(root: Node) -> list[Node]:
        """Every node below a root, parents first."""
        out, stack = [], [root]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if node.parent is not None:
                out.append(node)
        return out

    def audit(self, nodes: Sequence[Node]) -> None:
        """Recounts `held` and `loose`, and proves that every page that could be evicted will be found."""
        for g, window in enumerate(self.windows):
            have = [n for n in nodes if n.pages[g] != NULL_PAGE]
            loose = [n for n in have if n.pins[g] == 0]
            need(self.held[g] == len(have), f"the tree counts {self.held[g]} pages of group {g}, and has {len(have)}")
            need(self.loose[g] == len(loose), f"group {g} counts {self.loose[g]} loose pages, and has {len(loose)}")
            if window is None:
                need(all(n.refs == 0 for n in loose), "a full page is loose while a lease leads through it")
            else:
                found = {n.serial for rank, _, n in self._window_pages[g] if self._is_loose(n, g, rank)}
                need(all(n.serial in found for n in loose), "a loose window page cannot be evicted")
        leaves = {n.serial for rank, _, n in self._leaves if self._is_leaf(n, rank)}
        for node in nodes:
            kids = sum(any(child.pages) for child in node.children.values())
            need(node.kids == kids, f"a node counts {node.kids} children on the device, and has {kids}")
            if node.refs == 0 and any(node.pages) and not kids:
                need(node.serial in leaves, "an unused leaf is lost")
            need(node.refs or node.children or any(node.pages) or any(node.saved), "a node without anything stays")
            tails = Counter(len(key) for key in node.children if len(key) < self.page_size)
            need(node.tails == tails, "a node counts other tails than it has")
