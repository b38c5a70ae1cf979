"""A weight matrix times a few rows: which kernel, with which blocks. torch's product (cuBLAS) wherever none is better.

Everything is decided by sizes alone, so that equal buckets run equal kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from stretto.ops.triton_skinny import Blocks

MOST_ROWS = 64  # above, the product is no longer bound by reading the weights alone, and cuBLAS is ahead


def one_row_blocks(outputs: int, inputs: int) -> Blocks | None:
    """None where the sizes do not fit the kernel's blocks."""
    from stretto.ops.triton_skinny import Blocks

    for blocks in (Blocks(4, 2048, 1, 4), Blocks(4, 1024, 2, 4)) if outputs <= 8192 else (Blocks(8, 1024, 4, 4),):
        if outputs % blocks.outputs == 0 and inputs % blocks.columns == 0:
            return blocks
    return None


def few_rows_blocks(rows: int, outputs: int, inputs: int, gated: bool) -> Blocks | None:
    """None where torch's product is as fast, or the sizes do not fit the kernel's blocks."""
    from stretto.ops.triton_skinny import Blocks

    if rows > MOST_ROWS:
        return None
    if gated:
        blocks = Blocks(64, 128, 4, 4)
    elif outputs > 32768:
        blocks = Blocks(128, 128, 4, 8)
    elif outputs * inputs <= 4 << 20:
        blocks = Blocks(32, 256, 4, 2)
    else:
        return None
    return blocks if outputs % blocks.outputs == 0 and inputs % blocks.columns == 0 else None


def fits(weight: torch.Tensor) -> bool:
    """Whether the kernels can multiply by this matrix at all."""
    return weight.is_cuda and weight.dtype in (torch.bfloat16, torch.float16) and weight.is_contiguous()
