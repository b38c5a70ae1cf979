"""Where interpreted kernels read and write: every address must lie within a tensor that the kernel was given. Canaries
around tensors would find writes alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from triton.runtime import interpreter


@contextmanager
def within_bounds(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Raises IndexError for a load or store elsewhere. Gives how many addresses were looked at."""
    seen, spans = {"load": 0, "store": 0}, [np.zeros((0, 2), np.uint64)]
    launch, builder = interpreter.GridExecutor.__call__, interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def launched(self, *args, **kwargs):
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor) and x.numel()]
        found = [(t.data_ptr(), t.data_ptr() + _extent(t)) for t in tensors]
        spans[0] = np.array(sorted(found), dtype=np.uint64)
        return launch(self, *args, **kwargs)

    def look(kind, ptrs, mask):
        live = ptrs.data[np.broadcast_to(mask.data.astype(bool), ptrs.data.shape)].astype(np.uint64).ravel()
        size = ptrs.get_element_ty().primitive_bitwidth // 8
        at = np.searchsorted(spans[0][:, 0], live, side="right").astype(int) - 1
        if (at < 0).any() or (live + np.uint64(size) > spans[0][at, 1]).any():
            raise IndexError(f"a {kind} of {size} bytes beyond all tensors of the kernel")
        seen[kind] += len(live)

    def masked_load(self, ptrs, mask, *rest):
        look("load", ptrs, mask)
        return load(self, ptrs, mask, *rest)

    def masked_store(self, ptrs, value, mask, *rest):
        look("store", ptrs, mask)
        return store(self, ptrs, value, mask, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "__call__", launched)
        patch.setattr(builder, "create_masked_load", masked_load)
        patch.setattr(builder, "create_masked_store", masked_store)
        yield seen


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from the first number to the end of the last one."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
