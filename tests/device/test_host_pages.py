"""Pages to host memory and back, bit for bit, whatever lies at their numbers."""

from __future__ import annotations

import gc
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.device.host_pages import HostPages, PinError
from stretto.device.kv import Pages
from stretto.wire import PageOp

CPU = torch.device("cpu")
TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.uint8]


def filled(pages: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    words = torch.randint(0, 256, (pages, *shape, dtype.itemsize), dtype=torch.uint8)
    return words.view(pages, -1).view(dtype).view(pages, *shape)


class Store:
    """What a page is made of, in two groups."""

    def __init__(self, *groups: list[torch.Tensor]):
        self.groups = groups

    def page_tensors(self, group: int) -> list[torch.Tensor]:
        return self.groups[group]

    def copy_page(self, group: int, source: int, target: int) -> None:
        for tensor in self.groups[group]:
            tensor[target] = tensor[source]

    def poison_page(self, group: int, page: int) -> None:
        for tensor in self.groups[group]:
            tensor[page] = 0


@settings(max_examples=60, deadline=None)
@given(shapes=st.lists(st.tuples(st.sampled_from([(1,), (3,), (4, 2, 5), (16, 8)]), st.sampled_from(TYPES)),
                       min_size=1, max_size=4), n=st.integers(1, 12), most=st.integers(1, 5), seed=st.integers(0, 999))
def test_what_was_saved_comes_back(shapes, n: int, most: int, seed: int):
    torch.manual_seed(seed)
    rng = random.Random(seed)
    tensors = [filled(13, shape, dtype) for shape, dtype in shapes]
    host = HostPages([tensors], [20], CPU)
    host._staging = host._staging[: most * host.page_bytes[0]]
    pages, host_pages = rng.sample(range(1, 13), n), rng.sample(range(1, 21), n)
    before = [tensor.clone() for tensor in tensors]
    host.save(0, pages, host_pages)
    for tensor in tensors:
        tensor.zero_()
    order = rng.sample(range(n), n)
    host.restore(0, [host_pages[i] for i in order], [pages[i] for i in order])
    for tensor, old in zip(tensors, before):
        assert torch.equal(tensor[pages].view(torch.uint8), old[pages].view(torch.uint8))
        rest = [i for i in range(13) if i not in pages]
        assert not tensor[rest].view(torch.uint8).any(), "a page that nobody named was written"


def test_operations_run_in_the_order_of_the_list():
    """Save, restore over it, save again; a page restored twice holds the second."""
    store = Store([torch.arange(10).view(10, 1)], [torch.arange(10, 20).view(10, 1)])
    pages = Pages(store)
    pages.host = HostPages([store.page_tensors(g) for g in (0, 1)], [5, 5], CPU)
    pages.run(PageOp.SAVE, [(0, 1, 1), (0, 2, 2), (1, 1, 1)])
    pages.run(PageOp.RESTORE, [(0, 1, 7), (0, 2, 7), (1, 1, 7), (0, 1, 8)])
    assert [int(store.groups[0][0][p]) for p in (7, 8)] == [2, 1] and int(store.groups[1][0][7]) == 11
    pages.run(PageOp.COPY, [(0, 7, 9)])
    pages.run(PageOp.SAVE, [(0, 9, 1), (0, 3, 1)])
    pages.run(PageOp.POISON, [(0, 0, 9)])
    pages.run(PageOp.RESTORE, [(0, 1, 9)])
    assert int(store.groups[0][0][9]) == 3


def test_pages_cannot_be_saved_where_there_is_no_host_memory():
    with pytest.raises(AssertionError, match="there is no host memory"):
        Pages(Store([torch.zeros(3, 1)])).run(PageOp.SAVE, [(0, 1, 1)])


class Registered:
    """What CUDA would know of pinned memory."""

    def __init__(self, most: int = 9):
        self.addresses, self.most = set(), most

    def cudaHostRegister(self, address, n_bytes, flags):
        if len(self.addresses) == self.most:
            return 2
        self.addresses.add(address)
        return 0

    def cudaHostUnregister(self, address):
        self.addresses.remove(address)
        return 0


@pytest.mark.parametrize("close", [True, False])
def test_memory_is_unpinned_before_it_goes(monkeypatch, close) -> None:
    """Else CUDA would copy what once stood at addresses that are somebody else's by then."""
    known = Registered()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: known)
    monkeypatch.setattr(torch, "empty", lambda *sizes, device=None, **kw: torch.zeros(*sizes, **kw))
    pages = HostPages([[torch.zeros(3, 8)], [torch.zeros(3, 8)]], [4, 2], torch.device("cuda"))
    assert len(known.addresses) == 2
    if close:
        pages.close()
        pages.close()
    del pages
    assert not known.addresses


def test_a_refusal_leaves_nothing_pinned(monkeypatch) -> None:
    known = Registered(most=1)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: known)
    with pytest.raises(PinError, match="--kv-host-bytes"):
        HostPages([[torch.zeros(3, 8)], [torch.zeros(3, 8)]], [4, 2], torch.device("cuda"))
    gc.collect()
    assert not known.addresses
