"""NGRAM against a plain search, and its registration."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stretto.spec.ngram import NgramDrafter, _longest_match
from stretto.spec.registry import DrafterContext, DrafterError, drafter_caps, make_drafter


def search(ids: list[int], longest: int, shortest: int) -> tuple[int, int]:
    for n in range(min(longest, len(ids) - 1), shortest - 1, -1):
        for end in range(len(ids) - 1, n - 1, -1):
            if ids[end - n : end] == ids[-n:]:
                return end, n
    return 0, 0


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=24), min_size=1, max_size=4), st.integers(1, 3))
def test_finds_the_longest_then_the_latest_occurrence(rows: list[list[int]], shortest: int) -> None:
    log = torch.full((len(rows), 30), -1, dtype=torch.int32)
    for r, ids in enumerate(rows):
        log[r, : len(ids)] = torch.tensor(ids)
        log[r, len(ids) : len(ids) + 2] = 1  # drafts behind the confirmed ids must not be read
    follow, length = _longest_match(log, torch.tensor([len(r) for r in rows]), 4, shortest)
    for r, ids in enumerate(rows):
        end, n = search(ids, 4, shortest)
        assert int(length[r]) == n
        assert n == 0 or int(follow[r]) == end


def test_registry_names_what_it_does_not_know() -> None:
    context = DrafterContext(width=3, vocab_size=10, device=torch.device("cpu"))
    assert isinstance(make_drafter("ngram:longest=5,shortest=3", context), NgramDrafter)
    assert drafter_caps("ngram").max_width >= 8
    with pytest.raises(DrafterError, match=r"nosuch.*ngram"):
        make_drafter("nosuch", context)
    with pytest.raises(DrafterError, match="depth=3"):
        make_drafter("ngram:depth=3", context)
    with pytest.raises(DrafterError, match="answers"):
        make_drafter("scripted:/no/such/file.json", context)
