"""NGRAM against a plain search, and its registration."""

from __future__ import annotations

from types import SimpleNamespace

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


DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(("longest", "shortest", "width"), [(4, 2, 5), (3, 1, 4), (5, 3, 1)])
@pytest.mark.parametrize("block", [8, 64])
def test_the_kernel_offers_what_the_reference_does(monkeypatch, longest: int, shortest: int, width: int,
                                                   block: int) -> None:
    triton_ngram = pytest.importorskip("stretto.ops.triton_ngram")
    monkeypatch.setattr(triton_ngram, "BLOCK", block)
    g = torch.Generator().manual_seed(longest)
    log = torch.randint(0, 3, (12, 40), generator=g, dtype=torch.int32).to(DEVICE)
    known = torch.tensor([0, 1, 2, 3, 5, 8, 13, 21, 33, 38, 39, 40], dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([0, 11, 3, 7, 7, 1, 2, 4, 5, 6, 8, 9, 10], device=DEVICE)
    ids, offered = triton_ngram.launch_ngram(log, slots, known, width, longest, shortest)
    view = SimpleNamespace(log=log, known=known)
    want = NgramDrafter(width, longest, shortest).propose_reference(SimpleNamespace(slots=slots), view, width)
    assert offered.tolist() == want.width.tolist() and max(offered.tolist()) == width
    for row, n in enumerate(offered.tolist()):
        assert ids[row, :n].tolist() == want.ids[row, :n].tolist()


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
