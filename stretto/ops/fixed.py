"""Arithmetic whose rounding does not depend on the batch, for `--deterministic`.

Libraries choose a kernel, and so an order of summing, by the sizes they are given; and vectorised loops compute their
last few elements by other code. So everything here is cut into pieces of one size, in which a row's place does not
matter either.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

CPU_PIECE = 32768  # elements that torch's loops give to one thread undivided (at::internal::GRAIN_SIZE)
VECTOR = 64  # a multiple of what any vectorised loop takes at a time
CUDA_ROWS = 16


def elementwise(fn: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """fn of every element of x [T, N]. On CPUs in pieces that no thread shares and no vector overhangs; a GPU's loops
    treat all elements alike."""
    if x.is_cuda or not len(x):
        return fn(x)
    columns = x.shape[1]
    padded = F.pad(x, (0, -columns % VECTOR)).contiguous()
    pieces = padded.split(max(1, CPU_PIECE // padded.shape[1]))
    return torch.cat([fn(piece) for piece in pieces])[:, :columns]


def by_rows(fn: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
    """fn of the rows of all tensors, a fixed number of rows at a time: one on CPUs, a tile on GPUs, whose last one is
    filled up with copies of the last row. fn gives one row for each."""
    n = len(tensors[0])
    if n == 0:
        return fn(*tensors)
    if not tensors[0].is_cuda:
        return torch.cat([fn(*(t[i : i + 1] for t in tensors)) for i in range(n)])
    index = torch.arange(-(-n // CUDA_ROWS) * CUDA_ROWS, device=tensors[0].device).clamp_(max=n - 1)
    return torch.cat([fn(*(t[part] for t in tensors)) for part in index.split(CUDA_ROWS)])[:n]
