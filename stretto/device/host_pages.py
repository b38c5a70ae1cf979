"""Host memory for KV pages that leave the device: everything of a page of a group lies together, ready for one copy.

    device    k[0] [pages, ...]   v[0] [pages, ...]   ...   seams [pages, E]     of one group
                    |                   |                        |
    staging   [n, | bytes of k[0] | bytes of v[0] | ...  | bytes of seams ]      gathered, on the device
                    |
    host      [host pages, bytes of a page]                                      pinned on CUDA; page 0 is never used

`save` and `restore` enqueue on the current stream and wait for nothing. They are to be called in the order of the plans
on one stream: staging memory is used again and again.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from stretto.config import HOST_STAGING


class PinError(RuntimeError):
    """The system does not let so much memory be pinned."""


class HostPages:
    """`tensors[group]`: what the device keeps at the group's page numbers, each [pages + 1, ...]; `counts[group]`: host
    pages. Raises PinError."""

    def __init__(self, tensors: Sequence[Sequence[torch.Tensor]], counts: Sequence[int], device: torch.device):
        self.device = device
        self._rows = [[_as_words(tensor) for tensor in of_group] for of_group in tensors]
        self.page_bytes = tuple(sum(_aligned(_row_bytes(rows)) for rows in of_group) for of_group in self._rows)
        self.memory: list[torch.Tensor] = []
        pinned: list[torch.Tensor] = []
        self._unpin = weakref.finalize(self, _unpin, pinned)
        self._unpin.atexit = False
        for count, size in zip(counts, self.page_bytes):
            self.memory.append(_host_memory((count + 1, size)))
            if device.type == "cuda" and self.memory[-1].numel():
                _pin(self.memory[-1])
                pinned.append(self.memory[-1])
        self._staging = torch.empty(max(HOST_STAGING, *self.page_bytes), dtype=torch.uint8, device=device)

    def save(self, group: int, pages: Sequence[int], host_pages: Sequence[int]) -> None:
        """Copies pages of the device to host pages. No host page may be named twice."""
        memory = self.memory[group]
        for part, staging in self._parts(group, len(pages)):
            index, to = self._index(pages[part]), host_pages[part]
            for rows, columns in self._columns(group, staging):
                columns.copy_(rows.index_select(0, index))
            for start, end in _runs(to):
                memory[to[start] : to[end - 1] + 1].copy_(staging[start:end], non_blocking=True)

    def restore(self, group: int, host_pages: Sequence[int], pages: Sequence[int]) -> None:
        """Copies host pages to pages of the device. No page may be named twice."""
        memory = self.memory[group]
        for part, staging in self._parts(group, len(pages)):
            index, source = self._index(pages[part]), host_pages[part]
            for start, end in _runs(source):
                staging[start:end].copy_(memory[source[start] : source[end - 1] + 1], non_blocking=True)
            for rows, columns in self._columns(group, staging):
                rows.index_copy_(0, index, columns.contiguous())

    def _parts(self, group: int, n: int) -> Iterator[tuple[slice, torch.Tensor]]:
        """Slices of n pages that fit the staging memory, each with its view of it, [pages of the slice, bytes]."""
        size = self.page_bytes[group]
        most = max(1, len(self._staging) // max(size, 1))
        for start in range(0, n, most):
            count = min(most, n - start)
            yield slice(start, start + count), self._staging[: count * size].view(count, size)

    def _columns(self, group: int, staging: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each tensor of the group, as words, with its columns of the staging memory."""
        at = 0
        for rows in self._rows[group]:
            size = _row_bytes(rows)
            yield rows, staging[:, at : at + size].view(rows.dtype)
            at += _aligned(size)

    def _index(self, pages: Sequence[int]) -> torch.Tensor:
        index = torch.tensor(pages, dtype=torch.int64)
        return index.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else index

    def close(self) -> None:
        """Unpins the memory. Nothing may be under way."""
        self._unpin()
        self.memory = []


WORD = 8  # bytes that a thread of the GPU moves at once, where pages are whole numbers of them


def _as_words(tensor: torch.Tensor) -> torch.Tensor:
    """[pages, words of a page], of the same memory, in the widest words that fit."""
    rows = tensor.view(len(tensor), -1)
    size = _row_bytes(rows)
    fits = [dtype for dtype in (torch.int64, torch.int32, torch.int16) if size % dtype.itemsize == 0]
    return rows.view(next((dtype for dtype in fits if dtype.itemsize >= rows.dtype.itemsize), torch.uint8))


def _row_bytes(rows: torch.Tensor) -> int:
    return rows.shape[1] * rows.element_size()


def _aligned(size: int) -> int:
    return -(-size // WORD) * WORD


def _runs(pages: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Spans [start, end) of neighbours: each is one copy."""
    start = 0
    for i in range(1, len(pages) + 1):
        if i == len(pages) or pages[i] != pages[i - 1] + 1:
            yield start, i
            start = i


def _host_memory(shape: tuple[int, int]) -> torch.Tensor:
    """Zeros, uint8, on pages of their own."""
    n_bytes = shape[0] * shape[1]
    if not n_bytes:
        return torch.zeros(shape, dtype=torch.uint8)
    return torch.from_numpy(np.frombuffer(mmap.mmap(-1, n_bytes), dtype=np.uint8)).view(shape)


def _pin(memory: torch.Tensor) -> None:
    """By registration: the allocator of pinned memory would round up to a power of two."""
    status = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if int(status) != 0:
        raise PinError(f"the system refuses to pin {memory.nbytes / 2**30:.2f} GiB of host memory (CUDA error"
                       f" {int(status)}): lower --kv-host-bytes, or raise the limit of this container or of `ulimit"
                       " -l`")


def _unpin(pinned: list[torch.Tensor]) -> None:
    """Before the memory is given back, also where nobody called `close`: the system gives its addresses to others, say
    a checkpoint's file, and CUDA would copy what was there before."""
    while pinned:
        torch.cuda.cudart().cudaHostUnregister(pinned.pop().data_ptr())
