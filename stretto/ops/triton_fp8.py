"""What kernels need for caches of e4m3 numbers; see `fp8.py`. Imported only where a kernel is going to run."""

from __future__ import annotations

import triton
import triton.language as tl

from stretto.ops.fp8 import TOP as _TOP

TOP = tl.constexpr(_TOP)


@triton.jit
def exponent_for(largest):
    """The biased exponent of the scale of a head whose largest magnitude this is; float32 -> int32."""
    return tl.maximum((largest.to(tl.int32, bitcast=True) >> 23) - TOP, 1)


@triton.jit
def power_of(exponent):
    """2^(exponent - 127), int32 -> float32."""
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def scales_at(exponents):
    """The scales that stored exponents stand for. uint8 -> float32."""
    return power_of(tl.load(exponents).to(tl.int32))


@triton.jit
def rounded(x):
    """float32 -> the nearest number that e4m3 has, ties to even. Triton's interpreter converts otherwise than devices
    do; what needs no rounding it converts as they do."""
    magnitude = tl.abs(x)
    bits = magnitude.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    small = (magnitude + 24576.0) - 24576.0  # below 2^-6 in steps of 2^-9
    return tl.where(x < 0, -1.0, 1.0) * tl.where(magnitude < 0.015625, small, normal)
