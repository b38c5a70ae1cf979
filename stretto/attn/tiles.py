"""Tile shapes and split lengths of the ragged attention kernel: one small table by (head size, element size, arch).

Everything here is a constant of a launch: of the model, the device and the size of the bucket, never of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from stretto.wire import NEVER


@dataclass(frozen=True)
class Tile:
    """One kind of work item and its launch: `rows` query rows (tokens times query heads of one KV head) against
    blocks of `keys` cells, by `warps` warps, `programs` of them at a time on each multiprocessor."""

    rows: int
    keys: int
    stages: int  # depth of the software pipeline that loads keys and values
    warps: int = 4
    programs: int = 2
    registers: int = 255  # most of one thread


@dataclass(frozen=True)
class KernelConfig:
    """A row goes to one tile of `few` if that holds all its query rows, else to tiles of `chunk`.

    Both kinds of program fit a multiprocessor together: chunk rows compute while few-token rows load."""

    few: Tile  # decoded tokens and verify windows
    chunk: Tile  # prompt chunks
    splits: tuple[tuple[int, int], ...] = ((2, 128), (8, 256), (NEVER, 1024))
    """(rows of the bucket up to which it holds, KV cells of one work item of few tokens). Small batches need small
    items to fill the device. One entry alone makes a row's rounding the same in every bucket."""
    max_splits: int = 32  # of one row of few tokens; a longer row gets longer splits, by doubling
    chunk_split: int = 1024  # fewest KV cells of one work item of a chunk
    chunk_items: int = 128  # a chunk row of fewer items than this (tiles x KV heads) is split as well

    def __post_init__(self) -> None:
        lengths = (*(split for _, split in self.splits), self.chunk_split)
        if any(n % t.keys for n in lengths for t in (self.few, self.chunk)):
            raise ValueError(f"split lengths {lengths} must be multiples of the key blocks {self.few.keys} and"
                             f" {self.chunk.keys}: choose lengths that are")
        if self.splits[-1][0] != NEVER:
            raise ValueError(f"splits {self.splits} end at buckets of {self.splits[-1][0]} rows: the last entry must"
                             f" hold for any number, {NEVER}")

    def split_for(self, n_rows: int) -> int:
        """KV cells of one work item of few tokens, in a bucket of n_rows."""
        return next(split for most, split in self.splits if n_rows <= most)


# Small enough that rows of a few dozen keys cross every boundary: blocks, splits, tiles.
INTERPRETER = KernelConfig(Tile(16, 16, 1), Tile(64, 32, 1), splits=((NEVER, 32),), max_splits=4, chunk_split=64,
                           chunk_items=8)

# Key: padded head size, bytes of an element, family (90: sm_90 and sm_100; 80: the others from sm_80 on, whose
# multiprocessors have as little as 99 KiB of shared memory). Measured on sm_90 with head size 128; see docs/kernels.md.
_TABLE = {
    (64, 2, 90): KernelConfig(Tile(64, 64, 3, 4, 3, 168), Tile(128, 64, 3, 8, 1, 168)),
    (128, 2, 90): KernelConfig(Tile(64, 32, 3, 4, 3, 168), Tile(128, 64, 3, 8, 1, 168)),
    (256, 2, 90): KernelConfig(Tile(64, 32, 2), Tile(64, 32, 3, programs=1)),
    (64, 2, 80): KernelConfig(Tile(32, 64, 3), Tile(64, 64, 3)),
    (128, 2, 80): KernelConfig(Tile(32, 32, 3), Tile(64, 32, 3)),
    (256, 2, 80): KernelConfig(Tile(32, 16, 3), Tile(64, 16, 2)),
    (64, 4, 80): KernelConfig(Tile(32, 32, 2), Tile(32, 32, 2)),
    (128, 4, 80): KernelConfig(Tile(32, 16, 2), Tile(32, 16, 2)),
    (256, 4, 80): KernelConfig(Tile(16, 16, 1), Tile(16, 16, 1)),
}


def padded(n: int) -> int:
    """The power of two at or above n: sizes of register tiles."""
    return 1 << (n - 1).bit_length()


def kernel_config(head_dim: int, element_size: int, arch: int) -> KernelConfig:
    """The table's entry. `arch` is the compute capability as major * 10 + minor. ValueError below sm_80."""
    if arch < 80:
        raise ValueError(f"the Triton attention kernel needs compute capability 8.0 or above; this device has"
                         f" {arch // 10}.{arch % 10}: choose the torch backend")
    size = max(padded(head_dim), 64)
    family = 90 if 90 <= arch < 120 and (size, element_size, 90) in _TABLE else 80
    return _TABLE[size, element_size, family]
