"""Keys and values in 8 bits: e4m3 numbers, and for each head of each token a power of two to multiply them by.

    stored       | e4m3 x D | 2^s |     one byte a number, one byte a head
    stands for   e4m3 * 2^s             exactly, in bfloat16 too: e4m3 has 4 significant bits

The scale is made when a token is written, from that token alone. So what a cell holds depends neither on the batch nor
on chunks or drafts, nothing saturates, and no checkpoint has to bring calibrated scales. It is a power of two, as in
the formats of OCP Microscaling (https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf):
dividing by it rounds nothing, so every kernel stores the same bits. The largest number of a head lands in [128, 256),
below e4m3's 448; one of 2^-14 of it or less loses precision. Only what is within a 32nd of float32's largest number
comes back as infinity.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

KV_FP8 = torch.float8_e4m3fn
TOP = 7  # the largest number of a head is stored in [2^7, 2^8)
BIAS = 127  # of stored exponents, and of float32's


class KVScales(NamedTuple):
    """Of one layer's cache of keys and values: biased exponents, uint8 [pages, page_size, Hkv] each."""

    k: torch.Tensor
    v: torch.Tensor


def quantize_heads(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., D] -> e4m3 [..., D] and biased exponents uint8 [...]."""
    x = x.float()
    largest = x.abs().amax(-1).view(torch.int32) >> 23  # float32's own biased exponent
    exponent = (largest - TOP).clamp_(min=1)
    scaled = x * ((2 * BIAS - exponent) << 23).view(torch.float32)[..., None]
    return scaled.to(KV_FP8), exponent.to(torch.uint8)


def dequantize_heads(codes: torch.Tensor, exponent: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The inverse, exact but where `dtype` cannot hold a number. codes [..., D] e4m3, exponent [...] uint8."""
    scale = (exponent.int() << 23).view(torch.float32)[..., None]
    return numbers_of(codes).mul_(scale).to(dtype)


def numbers_of(codes: torch.Tensor) -> torch.Tensor:
    """e4m3 -> float32. On CPUs by a table, five times as fast as torch's conversion."""
    if codes.is_cuda:
        return codes.float()
    table = torch.arange(256, dtype=torch.uint8).view(KV_FP8).float()
    return table.index_select(0, codes.contiguous().view(torch.uint8).flatten().int()).view(codes.shape)
