"""Tile shapes and split lengths of the ragged attention kernel: one small table by (head size, element size, arch).

Everything here is a constant of a launch: of the model, the device and the size of the bucket, never of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

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
class FewTokens:
    """How rows of few tokens (decoded tokens, verify windows) are served in buckets of up to `most_rows` rows."""

    most_rows: int
    tile: Tile
    split: int  # KV cells of one work item


@dataclass(frozen=True)
class KernelConfig:
    """A row goes to one tile of `few` if that holds all its query rows, else to tiles of `chunk`.

    Small buckets need small items to fill the device, large ones large items for throughput. A configuration with one
    entry of `few` rounds a row of few tokens alike in every bucket."""

    few: tuple[FewTokens, ...]
    chunk: Tile
    max_splits: int = 32  # of one row of few tokens; a longer row gets longer splits, by doubling
    chunk_split: int = 1024  # fewest KV cells of one work item of a chunk
    chunk_items: int = 128  # a chunk row of fewer items than this (tiles x KV heads) is split as well

    def __post_init__(self) -> None:
        for split, tile in (*((f.split, f.tile) for f in self.few), (self.chunk_split, self.chunk)):
            if split % tile.keys:
                raise ValueError(f"splits of {split} cells are no multiple of the key block {tile.keys}: choose a"
                                 " length that is")
        if self.few[-1].most_rows != NEVER:
            raise ValueError(f"the last entry of few holds up to {self.few[-1].most_rows} rows: it must hold for any"
                             f" number, {NEVER}")

    def few_for(self, n_rows: int) -> FewTokens:
        """The entry for a bucket of n_rows."""
        return next(f for f in self.few if n_rows <= f.most_rows)


def few_tokens(tile: Tile, large: Tile | None = None, small: Tile | None = None) -> tuple[FewTokens, ...]:
    """The usual splits; `large` is the tile of buckets above 64 rows, `small` of those of up to 8."""
    small = small or tile
    return (FewTokens(2, small, 128), FewTokens(8, small, 256), FewTokens(24, tile, 512), FewTokens(64, tile, 1024),
            FewTokens(NEVER, large or tile, 1024))


# Small enough that rows of a few dozen keys cross every boundary: blocks, splits, tiles.
INTERPRETER = KernelConfig((FewTokens(NEVER, Tile(16, 16, 1), 32),), Tile(64, 32, 1), max_splits=4, chunk_split=64,
                           chunk_items=8)

# Key: padded head size, bytes of an element, family (90: sm_90 and sm_100; 80: the others from sm_80 on, whose
# multiprocessors have as little as 99 KiB of shared memory). Measured on sm_90 with head size 128; see docs/kernels.md.
_TABLE = {
    (64, 2, 90): KernelConfig(few_tokens(Tile(64, 64, 3, 4, 3, 168)), Tile(128, 64, 3, 8, 1, 168)),
    (128, 2, 90): KernelConfig(few_tokens(Tile(64, 64, 3), Tile(64, 32, 3, 4, 3, 168), Tile(64, 32, 3)),
                                Tile(128, 64, 3, 8, 1, 168)),
    (256, 2, 90): KernelConfig(few_tokens(Tile(64, 32, 2)), Tile(64, 32, 3, programs=1)),
    (64, 2, 80): KernelConfig(few_tokens(Tile(32, 64, 3)), Tile(64, 64, 3)),
    (128, 2, 80): KernelConfig(few_tokens(Tile(32, 32, 3)), Tile(64, 32, 3)),
    (256, 2, 80): KernelConfig(few_tokens(Tile(32, 16, 3)), Tile(64, 16, 2)),
    (64, 4, 80): KernelConfig(few_tokens(Tile(32, 32, 2)), Tile(32, 32, 2)),
    (128, 4, 80): KernelConfig(few_tokens(Tile(32, 16, 2)), Tile(32, 16, 2)),
    (256, 4, 80): KernelConfig(few_tokens(Tile(16, 16, 1)), Tile(16, 16, 1)),
}


def unsplit(config: KernelConfig) -> KernelConfig:
    """The same with one tile for every row and one item for every tile: a token's keys are then summed by the same
    instructions in the same order wherever it stands, decoded or inside a chunk."""
    return replace(config, chunk=config.few_for(64).tile, chunk_items=1)


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
