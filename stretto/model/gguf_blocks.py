"""The types of numbers in GGUF files: which are read, and how blocks of a few bits become packed matrices.

A matrix is stored row by row and a block never goes beyond a row, so rows can be chosen, put in another order and
joined as bytes, before anything is made of them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, dequantize
from gguf import GGMLQuantizationType as Kind

from stretto.ops.packed import Layout, Packed, pack4

PLAIN = {Kind.F32: torch.float32, Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}
QUANTISED = frozenset({
    Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0, Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K,
    Kind.IQ1_S, Kind.IQ1_M, Kind.IQ2_XXS, Kind.IQ2_XS, Kind.IQ2_S, Kind.IQ3_XXS, Kind.IQ3_S, Kind.IQ4_NL, Kind.IQ4_XS,
    Kind.TQ1_0, Kind.TQ2_0, Kind.MXFP4})

Parts = tuple[torch.Tensor, ...]  # codes, scales and perhaps offsets of `Packed`


def numbers(kind: Kind, rows: np.ndarray) -> torch.Tensor:
    """rows [R, bytes] uint8 -> [R, I]: in their own type where they are plain, else float32."""
    if kind in PLAIN:
        return torch.from_numpy(np.ascontiguousarray(rows)).view(PLAIN[kind])
    return torch.from_numpy(dequantize(np.ascontiguousarray(rows), kind))


def layout(kind: Kind) -> Layout | None:
    """How rows of this type are packed; None: they are read as numbers only."""
    return _READERS[kind][0] if kind in _READERS else None


def packed(kind: Kind, rows: np.ndarray) -> Packed:
    """rows [R, bytes] uint8 of a type that has a layout. Scales are float32."""
    found, read = _READERS[kind]
    return Packed(found, *read(rows.reshape(rows.shape[0], -1, GGML_QUANT_SIZES[kind][1])))


# Each takes the blocks of a matrix, uint8 [O, blocks of a row, bytes of a block], and gives codes, scales and offsets.
def _halves(blocks: np.ndarray, start: int) -> torch.Tensor:
    """The float16 at `start` of each block -> float32 [O, blocks]."""
    found = np.ascontiguousarray(blocks[..., start : start + 2]).view(np.float16)[..., 0]
    return torch.from_numpy(found.astype(np.float32))


def _bytes(blocks: np.ndarray, start: int, count: int) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(blocks[..., start : start + count]))


def _nibbles(blocks: np.ndarray, start: int) -> torch.Tensor:
    """32 values in 16 bytes: low halves of all bytes, then the high ones. uint8 [O, blocks, 32]."""
    stored = _bytes(blocks, start, 16)
    return torch.cat((stored & 15, stored >> 4), -1)


def _fifth_bits(blocks: np.ndarray, start: int) -> torch.Tensor:
    """Bit i of 32 belongs to value i of the block. uint8 0 or 16, [O, blocks, 32]."""
    return ((_bytes(blocks, start, 4)[..., None] >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(-2) << 4


def _q4_0(blocks: np.ndarray) -> Parts:
    return pack4(_nibbles(blocks, 2).flatten(1)), _halves(blocks, 0)


def _q4_1(blocks: np.ndarray) -> Parts:
    """d q + m = d (q - 8) + (m + 8 d)."""
    d = _halves(blocks, 0)
    return pack4(_nibbles(blocks, 4).flatten(1)), d, _halves(blocks, 2) + 8 * d


def _q5_0(blocks: np.ndarray) -> Parts:
    """d (q - 16)."""
    codes = (_nibbles(blocks, 6) | _fifth_bits(blocks, 2)).to(torch.int8) - 16
    return codes.flatten(1), _halves(blocks, 0)


def _q5_1(blocks: np.ndarray) -> Parts:
    """d q + m = d (q - 16) + (m + 16 d): offsets are small, and lose little where they are kept in 16 bits."""
    codes, d = (_nibbles(blocks, 8) | _fifth_bits(blocks, 4)).to(torch.int8) - 16, _halves(blocks, 0)
    return codes.flatten(1), d, _halves(blocks, 2) + 16 * d


def _q8_0(blocks: np.ndarray) -> Parts:
    return _bytes(blocks, 2, 32).view(torch.int8).flatten(1), _halves(blocks, 0)


def _scales_of_k(blocks: np.ndarray) -> Parts:
    """d, dmin and eight pairs of a 6-bit scale and minimum in 12 bytes -> d scale and dmin minimum, [O, groups]."""
    stored = _bytes(blocks, 4, 12).int()
    low, high, rest = stored[..., :4], stored[..., 4:8], stored[..., 8:]
    scales = torch.cat((low & 63, rest & 15 | low >> 6 << 4), -1)
    minima = torch.cat((high & 63, rest >> 4 | high >> 6 << 4), -1)
    return ((scales * _halves(blocks, 0)[..., None]).flatten(1), (minima * _halves(blocks, 2)[..., None]).flatten(1))


def _q4_k(blocks: np.ndarray) -> Parts:
    """Super-blocks of 256, whose 4 x 32 bytes of nibbles are already in the order of int4 codes.
    d s q - dmin m = d s (q - 8) + (8 d s - dmin m)."""
    scales, minima = _scales_of_k(blocks)
    return _bytes(blocks, 16, 128).flatten(1), scales, 8 * scales - minima


def _q5_k(blocks: np.ndarray) -> Parts:
    """As q4_k, with a fifth bit of each value: bit j of byte i belongs to value i of group j."""
    scales, minima = _scales_of_k(blocks)
    low = _bytes(blocks, 48, 128).unflatten(-1, (4, 32))
    low = torch.stack((low & 15, low >> 4), -2).flatten(-3, -2)  # [O, blocks, 8, 32]
    high = (_bytes(blocks, 16, 32)[..., None, :] >> torch.arange(8, dtype=torch.uint8)[:, None]) & 1
    return ((low | high << 4).to(torch.int8) - 16).flatten(1), scales, 16 * scales - minima


# The sixteen numbers that codes of IQ4 stand for (ggml's kvalues_iq4nl).
_IQ4 = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.int8)


def _iq4_nl(blocks: np.ndarray) -> Parts:
    return _IQ4[_nibbles(blocks, 2).int()].flatten(1), _halves(blocks, 0)


def _iq4_xs(blocks: np.ndarray) -> Parts:
    """Super-blocks of 256: d, the high 2 bits of eight scales, their low 4 bits, 8 x 16 bytes of nibbles."""
    high = _bytes(blocks, 2, 2).int()
    high = (high[..., :1] | high[..., 1:] << 8) >> torch.arange(0, 16, 2, dtype=torch.int32) & 3
    low = _bytes(blocks, 4, 4).int()
    low = torch.stack((low & 15, low >> 4), -1).flatten(-2)
    scales = ((low | high << 4) - 32) * _halves(blocks, 0)[..., None]
    stored = _bytes(blocks, 8, 128).unflatten(-1, (8, 16))
    return _IQ4[torch.cat((stored & 15, stored >> 4), -1).int()].flatten(1), scales.flatten(1)


def _mxfp4(blocks: np.ndarray) -> Parts:
    """A power of two, biased by 127, and 32 numbers of four bits."""
    exponents = _bytes(blocks, 0, 1)[..., 0].float() - 127
    return pack4(_nibbles(blocks, 1).flatten(1)), torch.exp2(exponents)


_READERS: dict[Kind, tuple[Layout, Callable[[np.ndarray], Parts]]] = {
    Kind.Q4_0: (Layout("int4", 32, half_scales=True), _q4_0),
    Kind.Q4_1: (Layout("int4", 32, True, half_scales=True), _q4_1),
    Kind.Q4_K: (Layout("int4", 32, True), _q4_k), Kind.Q5_0: (Layout("int8", 32, half_scales=True), _q5_0),
    Kind.Q5_1: (Layout("int8", 32, True), _q5_1), Kind.Q5_K: (Layout("int8", 32, True), _q5_k),
    Kind.Q8_0: (Layout("int8", 32, half_scales=True), _q8_0),
    Kind.IQ4_NL: (Layout("int8", 32, half_scales=True), _iq4_nl),
    Kind.IQ4_XS: (Layout("int8", 32), _iq4_xs), Kind.MXFP4: (Layout("fp4", 32), _mxfp4),
}
