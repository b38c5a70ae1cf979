"""Whether the ledger's books are in order, and what is done where they are not.

Every page of every group is in exactly one place:

    n_pages = free + leased by one + shared in the prefix tree + lost

The sum is checked in O(1) after every step (`check`), and page by page on demand (`audit`). After a broken check
`repair` makes the books follow what is held, and sets aside whom it cannot believe.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from stretto.host.faults import HostFault, need
from stretto.host.lease import Lease
from stretto.host.ledger import Ledger
from stretto.host.prefix import Node
from stretto.wire import NULL_PAGE


def check(ledger: Ledger) -> None:
    """The pool equation, O(1). Raises HostFault."""
    for g, n in enumerate(ledger.n_pages):
        total = len(ledger.free[g]) + ledger.leased[g] + ledger.tree.held[g] + ledger.lost[g]
        if total != n:
            raise HostFault(f"group {g}: {len(ledger.free[g])} free + {ledger.leased[g]} leased +"
                            f" {ledger.tree.held[g]} shared + {ledger.lost[g]} lost pages are not {n}")
    if ledger.tier is not None:
        ledger.tier.check()


def audit(ledger: Ledger, leases: Iterable[Lease]) -> None:
    """Every page in exactly one place, every reference and pin counted. `leases`: all that are not fenced. O(pages).
    Raises HostFault."""
    check(ledger)
    leases, nodes = list(leases), ledger.tree.nodes()
    ledger.tree.audit(nodes)
    if ledger.tier is not None:
        ledger.tier.audit(nodes)
    for g, n in enumerate(ledger.n_pages):
        held = [node.pages[g] for node in nodes if node.pages[g] != NULL_PAGE]
        held += [page for lease in leases for page in _own(lease, g)]
        need(len(held) == len(set(held)), f"a page of group {g} has two owners")
        everywhere = [*held, *_aside(ledger, g, held), *ledger.free[g]]
        need(len(everywhere) == len(set(everywhere)), f"a page of group {g} is free and held")
        need(len(everywhere) == n - ledger.lost[g], f"a page of group {g} leaked")
    _audit_references([*leases, *ledger.fenced], nodes)


def _audit_references(leases: list[Lease], nodes: list[Node]) -> None:
    refs: Counter[int] = Counter()
    pins: Counter[tuple[int, int]] = Counter()
    for lease in leases:
        need(len({len(pages) for pages in lease.pages}) == 1, "the groups of a lease differ in length")
        for i, node in enumerate(lease.nodes):
            refs[node.serial] += 1
            for g, pages in enumerate(lease.pages):
                need(pages[i] in (NULL_PAGE, node.pages[g]), "a lease names another page than the tree")
                pins[node.serial, g] += pages[i] != NULL_PAGE
    for node in nodes:
        need(node.refs == refs[node.serial], "a node's references are not the leases that lead through it")
        for g in range(len(node.pages)):
            need(node.pins[g] == pins[node.serial, g], "a page's pins are not the leases that hold it")


def repair(ledger: Ledger, leases: Sequence[Lease]) -> list[Lease]:
    """After a broken check: makes the books follow what is held, so that later checks mean something. Leases with a
    page that is also free, shared, or held by another are fenced and returned. A page that nobody holds is lost."""
    if ledger.tier is not None:
        try:
            ledger.tier.audit(ledger.tree.nodes())
        except HostFault:
            ledger.tier.reset(ledger.tree.nodes())
    nodes = ledger.tree.nodes()
    doubtful = _doubtful(ledger, leases, nodes)
    for lease in doubtful:
        ledger.fence(lease)
    sound = [lease for lease in leases if lease not in doubtful]
    for g in range(len(ledger.n_pages)):
        shared = {node.pages[g] for node in nodes} - {NULL_PAGE}
        own = {page for lease in sound for page in _own(lease, g)}
        own |= _aside(ledger, g, shared | own)
        free = [page for page in dict.fromkeys(ledger.free[g]) if page not in shared | own]
        ledger.restate(g, free, len(own))
    return doubtful


def _doubtful(ledger: Ledger, leases: Sequence[Lease], nodes: Sequence[Node]) -> list[Lease]:
    """Leases with a page of their own that somebody else has as well."""
    owners = [Counter(node.pages[g] for node in nodes) + Counter(set(free)) for g, free in enumerate(ledger.free)]
    for g, counts in enumerate(owners):
        counts.update(page for lease in leases for page in _own(lease, g))
    return [lease for lease in leases
            if any(counts[page] > 1 for g, counts in enumerate(owners) for page in _own(lease, g))]


def _aside(ledger: Ledger, group: int, held: Iterable[int]) -> set[int]:
    """Pages that only fenced leases hold."""
    return {page for lease in ledger.fenced for page in _own(lease, group)}.difference(held)


def _own(lease: Lease, group: int) -> list[int]:
    """Pages that a lease holds alone."""
    return [page for page in lease.pages[group][len(lease.nodes):] if page != NULL_PAGE]
