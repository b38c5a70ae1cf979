"""Products of rows by packed weights on CPUs (packed.cpp): float32 sums in one order for every row, whatever comes
beside it. The reference is `Packed.dequantized`, multiplied."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch

from stretto.ops.native.layer import Product
from stretto.ops.native.library import allocating, function, library
from stretto.ops.packed import BLOCK, Layout, Packed

OUTPUTS = 16  # come in multiples of this
GROUP = 16  # so do the columns of a group
TYPES = (torch.float32, torch.bfloat16)
NAME = "packed"


class _Matrix(ctypes.Structure):
    """`Matrix` in packed.cpp."""

    _fields_ = [("data", ctypes.c_void_p), ("outputs", ctypes.c_int64), ("inputs", ctypes.c_int64),
                ("group", ctypes.c_int64), ("bits", ctypes.c_int32), ("offsets", ctypes.c_int32),
                ("halves", ctypes.c_int32)]


def available() -> bool:
    """Whether this machine has them."""
    return library(NAME) is not None


def takes(layout: Layout, outputs: int, inputs: int) -> bool:
    """Whether there are kernels for such a matrix."""
    if layout.kind not in ("int4", "int8") or outputs % OUTPUTS or inputs % layout.group or layout.group % GROUP:
        return False
    return (layout.bits == 8 or inputs % BLOCK == 0) and available()


def arranged_bytes(layout: Layout, outputs: int, inputs: int) -> int:
    """What `Arranged` keeps of such a matrix."""
    return _bytes(layout, outputs, inputs, layout.half_scales)


def _bytes(layout: Layout, outputs: int, inputs: int, halves: bool) -> int:
    scales = (2 if halves else 4) * (1 + layout.offsets)
    return outputs * (inputs // layout.group) * (scales + layout.group * layout.bits // 8)


class Arranged:
    """A matrix as the kernels read it."""

    def __init__(self, weight: Packed):
        """`weight`: on a CPU, one that `takes`, with scales in float32."""
        layout, codes = weight.layout, weight.codes.contiguous()
        assert takes(layout, weight.outputs, weight.inputs) and weight.scales.dtype is torch.float32
        halves = as_halves(weight.scales, weight.offsets) if layout.half_scales else None
        scales, offsets = (weight.scales, weight.offsets) if halves is None else halves
        scales, offsets = scales.contiguous(), None if offsets is None else offsets.contiguous()
        size = _bytes(layout, weight.outputs, weight.inputs, halves is not None)
        self._data = torch.empty(size, dtype=torch.uint8)
        self.outputs, self.inputs = weight.outputs, weight.inputs
        self._matrix = _Matrix(self._data.data_ptr(), weight.outputs, weight.inputs, layout.group, layout.bits,
                               int(layout.offsets), int(halves is not None))
        self._address = ctypes.addressof(self._matrix)
        _arrange()(self._address, codes.data_ptr(), scales.data_ptr(), None if offsets is None else offsets.data_ptr(),
                   torch.get_num_threads())

    def product(self, bias: torch.Tensor | None) -> Product:
        """For kernels that multiply; valid while this and the bias are. `bias`: as in `multiply`."""
        assert bias is None or (bias.shape == (self.outputs,) and bias.is_contiguous())
        return Product(multiply_address(), self._address, None if bias is None else bias.data_ptr(), self.outputs,
                       self.inputs)

    def multiply(self, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None = None, add: bool = False
                 ) -> torch.Tensor:
        """x [T, inputs] -> out [T, outputs], float32 or bfloat16 each, neighbouring columns side by side; `bias`
        [outputs] in the type of `out`. `add`: onto what is in `out`. Returns it."""
        rows, inputs = x.shape
        assert inputs == self.inputs and out.shape == (rows, self.outputs) and x.stride(1) == 1 == out.stride(1)
        assert x.dtype in TYPES and out.dtype in TYPES and (bias is None or bias.dtype is out.dtype)
        half = (x.dtype is torch.bfloat16) + 2 * (out.dtype is torch.bfloat16)
        _multiply()(self._address, x.data_ptr(), x.stride(0), rows, out.data_ptr(), out.stride(0),
                    None if bias is None else bias.data_ptr(), half, add, torch.get_num_threads())
        return out


def as_halves(scales: torch.Tensor, offsets: torch.Tensor | None
              ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """d and m in float16 that are these scales and offsets exactly, offset = m + 8 d. None where there are none: where
    m is so much smaller than d that float32 has rounded the offset."""
    d, m = scales.half(), None
    exact = torch.equal(d.float(), scales)
    if offsets is not None:
        m = torch.sub(offsets, scales, alpha=8).half()
        exact = exact and torch.equal(m.float() + 8 * scales, offsets)
    return (d, m) if exact else None


@functools.cache
def multiply_address() -> int:
    """Of `multiply_rows`, for other kernels."""
    address = ctypes.cast(_multiply(), ctypes.c_void_p).value  # type: ignore[arg-type]
    assert address is not None
    return address


_POINTER, _SIZE, _FLAG = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
ARRANGE = (_POINTER,) * 4 + (_FLAG,)  # arguments of the functions in packed.cpp
MULTIPLY = (_POINTER, _POINTER, _SIZE, _SIZE, _POINTER, _SIZE, _POINTER, _FLAG, _FLAG, _FLAG)


@functools.cache
def _arrange() -> Callable[..., None]:
    return function(NAME, "arrange_codes", *ARRANGE)


@functools.cache
def _multiply() -> Callable[..., int]:
    return allocating(NAME, "multiply_rows", *MULTIPLY)
