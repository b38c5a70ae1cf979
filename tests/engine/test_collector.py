"""Python's cycle collector in the process of an engine."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from stretto.engine.process import _spare_survivors, look_once
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


def test_young_cycles_are_freed(looks_once: None):
    class Ring:
        alive = 0

        def __init__(self) -> None:
            self.me = self
            Ring.alive += 1

        def __del__(self) -> None:
            Ring.alive -= 1

    for _ in range(30_000):
        Ring()
    assert Ring.alive < 15_000
