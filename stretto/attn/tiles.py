"""Tile shapes and split lengths of the ragged attention kernel: one small table by (head size, element size, arch).

Everything here is a constant of a launch. Nothing depends on the batch, so a token's result does not either.
"""

from __future__ import annotations

from dataclasses import dataclass


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
    split_keys: int = 1024  # KV cells of one work item of few tokens
    max_splits: int = 32  # of one row of few tokens; a longer row gets longer splits, by doubling
    chunk_split_keys: int = 1024  # fewest KV cells of one work item of a chunk
    chunk_items: int = 128  # a chunk row of fewer items than this (tiles x KV heads) is split as well

    def __post_init__(self) -> None:
        if any(s % t.keys for s in (self.split_keys, self.chunk_split_keys) for t in (self.few, self.chunk)):
            raise ValueError(f"splits of {self.split_keys} and {self.chunk_split_keys} cells must be multiples of the"
                             f" key blocks {self.few.keys} and {self.chunk.keys}: choose splits that are")


# Small enough that rows of a few dozen keys cross every boundary: blocks, splits, tiles.
INTERPRETER = KernelConfig(Tile(16, 16, 1), Tile(64, 32, 1), split_keys=32, max_splits=4, chunk_split_keys=64,
                           chunk_items=8)

# Key: padded head size, bytes of an element, arch family (80: sm_80 to sm_89; 90: sm_90 and up).
_TABLE = {
    (64, 2, 90): KernelConfig(Tile(64, 64, 3), Tile(128, 64, 3, warps=8, programs=1)),
    (128, 2, 90): KernelConfig(Tile(64, 64, 3), Tile(128, 64, 3, warps=8, programs=1)),
    (256, 2, 90): KernelConfig(Tile(64, 32, 3), Tile(64, 32, 3)),
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
    family = 90 if arch >= 90 and (size, element_size, 90) in _TABLE else 80
    return _TABLE[size, element_size, family]
