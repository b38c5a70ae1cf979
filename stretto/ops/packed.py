"""Weights in the few bits that a checkpoint stores, kept so in memory: the container, and what it stands for.

    W[o, i] = number(codes[o, i]) * scales[o, i // group] (+ offsets[o, i // group])

    int4   codes uint8 [O, I / 2], values 0 .. 15 that count as -8 .. 7; in each block of 64 columns byte j holds column
           j in its low bits and column j + 32 in its high ones
    fp4    codes as of int4; values are those of e2m1, 0 .5 1 1.5 2 3 4 6 and their negatives, as in MXFP4
    int8   codes int8 [O, I]
    fp8    codes e4m3 [O, I]

Layouts of quantised checkpoints can be written so, but for tables of numbers and columns in another order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

MOST_ROWS = 64  # that the kernels of `triton_packed` multiply in one launch
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
BLOCK = 64  # columns of int4 codes that share 32 bytes


@dataclass(frozen=True)
class Layout:
    """How a matrix is stored."""

    kind: Literal["int4", "fp4", "int8", "fp8"]
    group: int  # neighbouring columns that share a scale
    offsets: bool = False
    eight_bit_inputs: bool = False  # the checkpoint means its inputs to be rounded to e4m3 as well
    half_scales: bool = False  # scales are float16 numbers; so are, of int4 with offsets, the offsets - 8 scales

    @property
    def bits(self) -> int:
        return 4 if self.kind in ("int4", "fp4") else 8


@dataclass(frozen=True)
class Coded:
    """Codes [outputs, inputs * bits / 8] and what makes numbers of them."""

    layout: Layout
    codes: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None = None

    @property
    def outputs(self) -> int:
        return self.codes.shape[0]

    @property
    def inputs(self) -> int:
        return self.codes.shape[1] * 8 // self.layout.bits

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.codes, self.scales, self.offsets) if t is not None)


class Packed(Coded):
    """A matrix [outputs, inputs], or some of its rows; scales and offsets [outputs, inputs / group]."""

    @classmethod
    def empty(cls, layout: Layout, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> Packed:
        """`dtype`: of scales and offsets."""
        kind = {"int4": torch.uint8, "fp4": torch.uint8, "int8": torch.int8, "fp8": torch.float8_e4m3fn}[layout.kind]
        width, groups = inputs * layout.bits // 8, inputs // layout.group
        return cls(layout, torch.empty(outputs, width, dtype=kind, device=device),
                   torch.empty(outputs, groups, dtype=dtype, device=device),
                   torch.empty(outputs, groups, dtype=dtype, device=device) if layout.offsets else None)

    def numel(self) -> int:
        return self.outputs * self.inputs

    def _each(self, change) -> Packed:
        offsets = None if self.offsets is None else change(self.offsets)
        return replace(self, codes=change(self.codes), scales=change(self.scales), offsets=offsets)

    def rows(self, start: int, count: int) -> Packed:
        """A view of some rows."""
        return self._each(lambda t: t.narrow(0, start, count))

    def take(self, order: torch.Tensor) -> Packed:
        """Copies of the rows `order`. Codes travel as bytes, since e4m3 has no such operation on CPUs."""
        taken = self._each(lambda t: (t.view(torch.uint8) if t.dtype.itemsize == 1 else t)[order])
        return replace(taken, codes=taken.codes.view(self.codes.dtype))

    def columns(self, start: int, count: int) -> Packed:
        """A view of some columns; both must be multiples of the group, and of BLOCK where there are two in a byte."""
        def part(t: torch.Tensor) -> torch.Tensor:
            if t.shape[1] == 1:
                return t
            return t.narrow(1, start * t.shape[1] // self.inputs, count * t.shape[1] // self.inputs)
        return self._each(part)

    def copy_(self, other: Packed) -> None:
        self.codes.view(torch.uint8).copy_(other.codes.view(torch.uint8))
        self.scales.copy_(other.scales)
        if self.offsets is not None and other.offsets is not None:
            self.offsets.copy_(other.offsets)

    def numbers(self) -> torch.Tensor:
        """float32 [O, I]: the codes as numbers, without scales."""
        if self.layout.kind == "int4":
            return unpack4(self.codes).float().sub_(8)
        if self.layout.kind == "fp4":
            return torch.tensor(FP4, device=self.codes.device)[unpack4(self.codes).int()]
        return self.codes.float()

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """[O, I], rounded once."""
        grouped = self.numbers().view(self.outputs, -1, self.layout.group).mul_(self.scales.float()[..., None])
        if self.offsets is not None:
            grouped += self.offsets.float()[..., None]
        return grouped.view(self.outputs, self.inputs).to(dtype)

    def by_groups(self) -> ByGroups:
        """The same as the kernels for matrices on CUDA read it; shares the codes."""
        scales, offsets = self.scales.t(), None if self.offsets is None else self.offsets.t()
        if self.layout.bits == 8:
            return ByGroups(self.layout, self.codes, scales.float().contiguous(),
                            None if offsets is None else offsets.float().contiguous())
        other = torch.zeros_like(scales) if offsets is None else offsets
        low, high = (part.contiguous().view(torch.int16).int() for part in (scales, other))
        return ByGroups(self.layout, self.codes, (low & 0xFFFF) | (high << 16))


class ByGroups(Coded):
    """A matrix whose scales are [groups, outputs]: what a program needs of a group lies together, 4 bytes each, so that
    it comes by the pipeline of the kernel's loop.

    4 bits   scales int32, pairs: a scale in the low 16 bits, an offset in the high ones; no offsets
    8 bits   scales and offsets float32"""


def pack4(values: torch.Tensor) -> torch.Tensor:
    """0 .. 15 as uint8 [O, I] -> [O, I / 2]. I is a multiple of BLOCK."""
    low, high = values.view(values.shape[0], -1, 2, BLOCK // 2).unbind(2)
    return (low | high << 4).flatten(1)


def unpack4(codes: torch.Tensor) -> torch.Tensor:
    """The inverse."""
    halves = codes.view(codes.shape[0], -1, BLOCK // 2)
    return torch.stack((halves & 15, halves >> 4), 2).view(codes.shape[0], -1)
