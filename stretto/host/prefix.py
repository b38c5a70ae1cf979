"""The tree of shared prefixes: one node is one full page of tokens, with its page of KV in every group.

Called by the ledger only. A lease refers to every node of its path (`refs`), and pins the page of each group that it
still reads (`pins`): a window page that a lease has slid past is free to go while the full page stays.

Order of eviction: least recently used first, in O(log n) by heaps with stale entries. A page of a full group goes with
its whole node, leaves first; a window page goes alone and leaves a gap, which a later sequence may fill again.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import count

from stretto.host.faults import need
from stretto.wire import NULL_PAGE


class Node:
    """One page of tokens below its parent. The key of a root is its salt; a root's parent is None."""

    __slots__ = ("children", "depth", "key", "pages", "parent", "pins", "refs", "serial", "stamps", "used")

    def __init__(self, key: object, parent: Node | None, n_groups: int, serial: int):
        self.key, self.parent, self.serial = key, parent, serial
        self.depth: int = parent.depth + 1 if parent else 0
        self.children: dict[tuple[int, ...], Node] = {}
        self.pages = [NULL_PAGE] * n_groups
        self.pins = [0] * n_groups  # leases that hold the page of each group
        self.refs = 0  # leases whose path leads through this node
        self.used = 0  # clock when the last reference went
        self.stamps = [0] * n_groups  # clock when the last pin of each group went


Entry = tuple[int, int, int, Node]  # (clock, depth, serial, node)


class PrefixTree:
    """Every public method keeps `held` and `loose` exact: pages of each group in the tree, and those nobody pins."""

    def __init__(self, windows: Sequence[int | None], page_size: int):
        self.windows, self.page_size = tuple(windows), page_size
        n = len(self.windows)
        self.held = [0] * n
        self.loose = [0] * n
        self._roots: dict[object, Node] = {}  # by salt, private ones by their serial number
        self._clock, self._serials = 0, count()
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
        """Nodes of the longest known prefix of whole pages, `most` tokens at most."""
        size, node, path = self.page_size, root, []
        for i in range(most // size):
            child = node.children.get(tuple(tokens[i * size : (i + 1) * size]))
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def child(self, parent: Node, key: tuple[int, ...]) -> Node:
        """The child of this key, made where there is none. The caller must refer to it."""
        found = parent.children.get(key)
        if found is None:
            found = parent.children[key] = self._new_node(key, parent)
        return found

    def _new_node(self, key: object, parent: Node | None) -> Node:
        return Node(key, parent, len(self.windows), next(self._serials))

    # ------------------------------------------------------------------------------------------- pages, references
    def put(self, node: Node, group: int, page: int) -> None:
        """A page becomes shared, pinned by the lease that brings it."""
        need(node.pages[group] == NULL_PAGE, "a node has a page of this group already")
        node.pages[group] = page
        node.pins[group] = 1
        self.held[group] += 1

    def pin(self, node: Node, group: int) -> None:
        need(node.pages[group] != NULL_PAGE, "a page that is gone cannot be pinned")
        if node.pins[group] == 0:
            self.loose[group] -= 1
        node.pins[group] += 1

    def unpin(self, node: Node, group: int) -> None:
        need(node.pins[group] > 0, "a page is unpinned twice")
        node.pins[group] -= 1
        if node.pins[group]:
            return
        self.loose[group] += 1
        self._clock += 1
        node.stamps[group] = self._clock
        if self.windows[group] is not None:
            self._push(self._window_pages[group], self._clock, node)

    def refer(self, node: Node) -> None:
        node.refs += 1

    def unrefer(self, node: Node) -> None:
        """One lease fewer leads through this node; its pins must have gone before."""
        need(node.refs > 0, "a node is unreferred twice")
        node.refs -= 1
        if node.refs == 0:
            self._clock += 1
            node.used = self._clock
            self._unused(node)

    def _unused(self, node: Node) -> None:
        """A node without references and children may go; one that also has no page must go."""
        if node.refs or node.children:
            return
        if node.parent is None:
            if self._roots.get(node.key) is node:
                del self._roots[node.key]
        elif not any(node.pages):
            self._detach(node)
        else:
            self._push(self._leaves, node.used, node)

    def _detach(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.key]  # type: ignore[arg-type]  # only a root's key is no tuple
        node.parent = None
        self._unused(parent)

    # --------------------------------------------------------------------------------------------------- eviction
    def evict(self, group: int) -> list[tuple[int, int]]:
        """Frees at least one page of this group, the least recently used; [] where every page is pinned.
        Returns (group, page) of all that were freed. O(log n), amortised."""
        return self.evict_leaf() if self.windows[group] is None else self._evict_window_page(group)

    def evict_leaf(self) -> list[tuple[int, int]]:
        """Frees the least recently used leaf, with its page of every group."""
        while self._leaves:
            clock, _, _, node = heappop(self._leaves)
            if self._is_leaf(node, clock):
                freed = [(g, self._take_page(node, g)) for g, page in enumerate(node.pages) if page != NULL_PAGE]
                self._detach(node)
                return freed
        return []

    def _evict_window_page(self, group: int) -> list[tuple[int, int]]:
        heap = self._window_pages[group]
        while heap:
            clock, _, _, node = heappop(heap)
            if self._is_loose(node, group, clock):
                freed = [(group, self._take_page(node, group))]
                if node.parent is not None and not any(node.pages):
                    self._unused(node)
                return freed
        return []

    def _take_page(self, node: Node, group: int) -> int:
        need(node.pins[group] == 0, "a pinned page is evicted")
        page, node.pages[group] = node.pages[group], NULL_PAGE
        self.held[group] -= 1
        self.loose[group] -= 1
        return page

    @staticmethod
    def _is_leaf(node: Node, clock: int) -> bool:
        return node.refs == 0 and not node.children and node.parent is not None and node.used == clock

    @staticmethod
    def _is_loose(node: Node, group: int, clock: int) -> bool:
        return node.pages[group] != NULL_PAGE and node.pins[group] == 0 and node.stamps[group] == clock

    def _push(self, heap: list[Entry], clock: int, node: Node) -> None:
        """A heap of mostly stale entries is rebuilt; there are at most as many valid ones as pages in the tree."""
        heappush(heap, (clock, node.depth, node.serial, node))
        if len(heap) > 2 * sum(self.held) + 64:
            group = next((g for g, pages in enumerate(self._window_pages) if pages is heap), None)
            heap[:] = [e for e in heap
                       if (self._is_leaf(e[3], e[0]) if group is None else self._is_loose(e[3], group, e[0]))]
            heapify(heap)

    # ------------------------------------------------------------------------------------------------------ audit
    def nodes(self) -> list[Node]:
        """Every node below a root that can be found, parents first."""
        out, stack = [], list(self._roots.values())
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
                found = {n.serial for clock, _, _, n in self._window_pages[g] if self._is_loose(n, g, clock)}
                need(all(n.serial in found for n in loose), "a loose window page cannot be evicted")
        leaves = {n.serial for clock, _, _, n in self._leaves if self._is_leaf(n, clock)}
        need(all(n.serial in leaves for n in nodes if n.refs == 0 and not n.children), "an unused leaf is lost")
