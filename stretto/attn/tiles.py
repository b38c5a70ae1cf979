"""Tile shapes and split lengths of the ragged attention kernel: one small table by (head size, element size, arch).

Everything here is a constant of a launch. Nothing depends on the batch, so a token's result does not either.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """One kind of work item: `rows` query rows (tokens times query heads of one KV head) against blocks of `keys`."""

    rows: int
    keys: int
    stages: int  # depth of the software pipeline that loads keys and values


@dataclass(frozen=True)
class KernelConfig:
    """Shape of one launch. A row goes to the first tile that holds all its query rows, else to tiles of `large`."""

    small: Tile  # decoded tokens
    medium: Tile  # verify windows
    large: Tile  # prompt chunks
    warps: int
    programs_per_sm: int
    split_keys: int  # KV cells of one work item of a small or medium tile
    transpose: bool = False
    dynamic: bool = True
    registers: int = 0
    large_warps: int = 0  # a launch of its own for large items
    large_registers: int = 168
    large_programs: int = 1  # of each multiprocessor's programs, those that take large items first
    max_splits: int = 32  # of one row; a longer row gets longer splits, by doubling
    large_split_keys: int = 1024  # fewest KV cells of one work item of a large tile
    large_items: int = 256  # a chunk with fewer work items than this (tiles x KV heads) is split as well

    def __post_init__(self) -> None:
        blocks = (self.small.keys, self.medium.keys, self.large.keys)
        if any(s % b for s in (self.split_keys, self.large_split_keys) for b in blocks):
            raise ValueError(f"splits of {self.split_keys} and {self.large_split_keys} keys must be multiples of the"
                             f" key blocks {blocks}: choose splits that are")

    @property
    def max_registers(self) -> int:
        """Registers of a thread that let `programs_per_sm` programs share a multiprocessor's 65536."""
        return self.registers or min(255, 65536 // (32 * self.warps * self.programs_per_sm) // 8 * 8)


# Small enough that rows of a few dozen keys cross every boundary: blocks, splits, tiles.
INTERPRETER = KernelConfig(Tile(16, 16, 1), Tile(32, 16, 1), Tile(64, 32, 1), warps=4, programs_per_sm=3,
                           split_keys=32, max_splits=4, large_split_keys=64, large_items=8)

# Key: padded head size, bytes of an element, arch family (80: sm_80 to sm_89; 90: sm_90 and up).
_TABLE = {
    (64, 2, 90): KernelConfig(Tile(16, 128, 3), Tile(32, 128, 3), Tile(128, 64, 3), 4, 2, 512),
    (128, 2, 90): KernelConfig(Tile(16, 64, 3), Tile(32, 64, 3), Tile(64, 64, 3), 4, 2, 512),
    (256, 2, 90): KernelConfig(Tile(16, 32, 3), Tile(32, 32, 3), Tile(64, 32, 3), 4, 2, 512),
    (64, 2, 80): KernelConfig(Tile(16, 64, 3), Tile(32, 64, 3), Tile(64, 64, 2), 4, 2, 512),
    (128, 2, 80): KernelConfig(Tile(16, 32, 3), Tile(32, 32, 3), Tile(64, 32, 2), 4, 2, 512),
    (256, 2, 80): KernelConfig(Tile(16, 16, 3), Tile(32, 16, 3), Tile(64, 16, 2), 4, 2, 512),
    (64, 4, 80): KernelConfig(Tile(16, 32, 2), Tile(32, 32, 2), Tile(64, 32, 2), 4, 2, 512),
    (128, 4, 80): KernelConfig(Tile(16, 16, 2), Tile(32, 16, 2), Tile(32, 16, 2), 4, 2, 512),
    (256, 4, 80): KernelConfig(Tile(16, 16, 1), Tile(32, 16, 1), Tile(32, 16, 1), 4, 2, 512),
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
