"""A weight matrix times a few rows: which kernel, with which blocks. torch's product (cuBLAS) wherever none is better.

Everything is decided by sizes alone, so that equal buckets run equal kernels. The numbers come from
`benchmarks/skinny_gpu.py` on an H200.
"""

from __future__ import annotations

import torch

from stretto.ops.blocks import MOST_ROWS, Blocks, OneRow, SomeRows

SOME_ROWS = 128  # of the kernel for gated products of some rows: above, cuBLAS is ahead
HEAD = 32768  # outputs from which a matrix is as long as a vocabulary
MOST_INPUTS = 8192  # of the kernel for one row
SMALL = 8 << 20  # elements below which a matrix is read in a few microseconds
EARLY = 400  # programs of the kernel for one row that are there before the launch before has ended


def blocks_for(rows: int, outputs: int, inputs: int, gated: bool, shared: int, copies: bool = False) -> Blocks | None:
    """The launch for so many rows; None where torch's product is as fast, the sizes do not fit a kernel's blocks, or
    the blocks do not fit the `shared` bytes of memory that a program may have. `copies`: there is a copy engine."""
    if rows == 0:
        return None
    if rows > MOST_ROWS:
        return some_rows_blocks(rows, outputs, inputs, shared) if copies and gated else None
    alone = one_row_blocks(outputs, inputs, gated) if rows == 1 else None
    return alone or few_rows_blocks(rows, outputs, inputs, gated, shared, copies)


def one_row_blocks(outputs: int, inputs: int, gated: bool) -> OneRow | None:
    """None where the kernel for few rows is as fast, or the sizes do not fit. Each program reads all inputs for a few
    outputs: where they are many, that is as much as a part of the weights."""
    if (outputs >= HEAD and inputs < 2048) or inputs > MOST_INPUTS:
        return None
    if gated:
        wanted = [OneRow(4, 1024, 2, 4) if outputs * inputs * 2 <= SMALL else
                  OneRow(4, 1024, 4, 4, ahead=512, askers=EARLY)]
    else:
        wanted = [OneRow(4, 2048, 1, 4), OneRow(8, 1024, 1, 4) if inputs == 1024 else OneRow(4, 1024, 4, 4)]
    wanted += [OneRow(8, 512, 2, 4), OneRow(8, 256, 2, 4)]
    return next((b for b in wanted if outputs % b.outputs == 0 and inputs % b.columns == 0), None)


def few_rows_blocks(rows: int, outputs: int, inputs: int, gated: bool, shared: int,
                    copies: bool = False) -> Blocks | None:
    """None where torch's product is as fast, the sizes do not fit the kernel's blocks, or the blocks do not fit the
    `shared` bytes of memory that a program may have."""
    if rows > MOST_ROWS:
        return None
    copied = _copied_blocks(rows, outputs, inputs, gated) if copies else None
    if copied is not None and _needs(copied, rows, gated) <= shared:
        return copied
    if gated:
        wanted = Blocks(64, 128, 4, 4)
    elif outputs >= HEAD:
        wanted = Blocks(128, 128, 4, 8)
    elif outputs * inputs > SMALL:
        split = 2 if outputs < 64 * 96 else 1  # too few tiles of outputs to fill the device
        wanted = Blocks(64, 256, 4, 4, split) if rows <= 32 else Blocks(64, 128, 6 if split == 2 else 4, 4, split)
    elif outputs >= 2048:
        wanted = Blocks(32, 256, 4, 2) if rows <= 32 else Blocks(64, 128, 4, 4)
    else:
        wanted = Blocks(16, 256, 4, 2, 4 if rows <= 16 else 2)
    fitting = outputs % wanted.outputs == 0 and inputs % (wanted.columns * wanted.split) == 0
    return wanted if fitting and inputs >= wanted.ahead and _needs(wanted, rows, gated) <= shared else None


def _copied_blocks(rows: int, outputs: int, inputs: int, gated: bool) -> Blocks | None:
    """Where it is faster to have the tiles brought by the copy engine: small matrices, and long sums of one row."""
    if rows == 1 and inputs > MOST_INPUTS and not gated:
        wanted = Blocks(64, 128, 6, 4, 2, 64, True)
    elif rows <= 16 and not gated and outputs * inputs <= SMALL:
        wanted = Blocks(64, 256, 4, 4, 1 if outputs >= 64 * 48 else 4, 64, True)
    else:
        return None
    return wanted if outputs % wanted.outputs == 0 and inputs % (wanted.columns * wanted.split) == 0 else None


def some_rows_blocks(rows: int, outputs: int, inputs: int, shared: int) -> SomeRows | None:
    """Of a gated product. None where torch's product and a gate are as fast, or the sizes do not fit the blocks."""
    wanted = SomeRows(128, 64, 4, 8, ahead=64)
    fitting = outputs % wanted.outputs == 0 and inputs % wanted.columns == 0 and _needs(wanted, rows, True) <= shared
    return wanted if rows <= SOME_ROWS and outputs * inputs > SMALL and fitting else None


def _needs(blocks: Blocks, rows: int, gated: bool) -> int:
    """Bytes of shared memory of one program: tiles of the matrix and of the rows, as deep as its pipeline."""
    tokens = max(16, 1 << (rows - 1).bit_length())
    return (blocks.outputs * (1 + gated) + tokens) * blocks.columns * 2 * blocks.stages


def fits(weight: torch.Tensor) -> bool:
    """Whether the kernels can multiply by this matrix at all."""
    return weight.is_cuda and weight.dtype in (torch.bfloat16, torch.float16) and weight.is_contiguous()
