"""Python's cycle collector in the process of an engine."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from stretto.engine.collector import IDLE_SECONDS, RestingInbox, _spare_survivors, look_once
from stretto.engine.messages import Command
from stretto.host.prefix import PrefixTree


@pytest.fixture
def looks_once() -> Iterator[None]:
    thresholds = gc.get_threshold()
    look_once()
    yield
    gc.callbacks.remove(_spare_survivors)
    gc.set_threshold(*thresholds)
    gc.unfreeze()


def test_a_prefix_tree_that_grows_is_not_looked_at_again(looks_once: None):
    """Every pass is over the young objects alone, however large the tree is."""
    tree, seen = PrefixTree((None,), 4), list[int]()

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            seen.append(sum(len(gc.get_objects(generation)) for generation in (0, 1, 2)))

    gc.collect()
    before = gc.get_freeze_count()
    gc.callbacks.insert(0, note)
    try:
        node = tree.root("")
        for i in range(40_000):
            node = tree.grow(node, (i, i, i, i), [i + 1])
    finally:
        gc.callbacks.remove(note)
    assert len(seen) > 5 and max(seen) < 20_000
    assert gc.get_freeze_count() - before > 80_000


class Ring:
    """A cycle that counts itself."""

    alive = 0

    def __init__(self) -> None:
        self.me = self
        Ring.alive += 1

    def __del__(self) -> None:
        Ring.alive -= 1


def test_old_cycles_are_freed_when_nothing_is_to_be_done(looks_once: None):
    class Empty:
        def take(self, timeout: float) -> list[Command]:
            return []

    now = 0.0
    gc.collect()
    inbox, before = RestingInbox(Empty(), lambda: now), Ring.alive
    kept = [Ring() for _ in range(20_000)]
    gc.collect()  # they have grown old
    kept.clear()
    gc.collect()
    assert Ring.alive - before == 20_000
    for now, timeout in ((1.0, 0.5), (30.0, 0.0), (30.0 + IDLE_SECONDS, 0.5)):  # soon; at work; not for long enough
        inbox.take(timeout)
        assert Ring.alive - before == 20_000, now
    now = 31.0 + IDLE_SECONDS
    inbox.take(0.5)
    assert Ring.alive == before


def test_young_cycles_are_freed(looks_once: None):
    before = Ring.alive
    for _ in range(30_000):
        Ring()
    assert Ring.alive - before < 15_000
