"""Products by weights that stay in the bits they are stored in, where a device has kernels for that.

    CPU               ours in C++ (`ops.native.packed`), float32 sums, of integers of 4 and 8 bits
    CPU without them  in bfloat16 torch's int4 and int8 kernels; int8 with a scale for each group of columns as two int4
                      matrices: code = 16 * high + low           W = 16 s * high + s * low
    CUDA              ours for few rows (`ops.triton_packed`); many rows are multiplied by the matrix made anew in 16
                      bits for the length of the product; e4m3 by e4m3 where the checkpoint means so

A row's result does not depend on the rows beside it on a CPU: these kernels sum each row by itself. On CUDA it
differs by rounding, as with all products there. Inputs that are rounded to e4m3 are rounded row by row, for few rows
and many.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stretto.model.matrix import Matrix
from stretto.ops.layer import gate, rms_norm
from stretto.ops.native import layer as native_layer
from stretto.ops.native import packed as native
from stretto.ops.packed import BLOCK, MOST_ROWS, Layout, Packed, unpack4

CPU_GROUPS = (32, 64, 128, 256)  # that torch's int4 kernel takes
ROWS = 16  # outputs come in multiples of this
SMALL, FEW = 1 << 25, 16  # on CUDA: numbers of a matrix that is made in 16 bits in a few us, for more rows than this
MOST_JOINED = 64  # rows
AT_ONCE = 2048  # outputs that are packed at a time; torch packs blocks of at most 64 by themselves


def stays_packed(layout: Layout, outputs: int, inputs: int, dtype: torch.dtype, device: str, fixed: bool) -> bool:
    """Whether a matrix of this layout is kept in its bits on a device of this type, for activations of `dtype`.
    `fixed`: its sums must not depend on the batch."""
    if device == "cpu" and is_native(layout, outputs, inputs, dtype):
        return True
    if inputs % layout.group or (layout.bits == 4 and inputs % BLOCK):
        return False
    if outputs % ROWS or dtype not in (torch.bfloat16, torch.float16):
        return False
    if device == "cpu":
        return dtype is torch.bfloat16 and _on_cpu(layout, inputs)
    return device == "cuda" and not fixed and _on_cuda(layout, inputs)


def is_native(layout: Layout, outputs: int, inputs: int, dtype: torch.dtype) -> bool:
    """Whether our kernels for CPUs multiply such a matrix by activations of `dtype`. Its scales are float32 then."""
    return dtype in native.TYPES and native.takes(layout, outputs, inputs)


def _is_native(weight: Packed) -> bool:
    """One of those, on a CPU."""
    return weight.scales.dtype is torch.float32 and native.takes(weight.layout, weight.outputs, weight.inputs)


def _on_cpu(layout: Layout, inputs: int) -> bool:
    if layout.kind in ("fp8", "fp4") or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    return _cpu_group(layout, inputs) is not None or (layout.kind == "int8" and not layout.offsets)


def _on_cuda(layout: Layout, inputs: int) -> bool:
    """e4m3 needs multiprocessors that convert it."""
    if layout.kind == "fp8" and torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9):
        return False
    group = layout.group
    if layout.kind == "fp4":  # of experts alone
        return inputs % 64 == 0
    return inputs % 64 == 0 and group % 32 == 0 and (group == inputs or group & (group - 1) == 0)


def _cpu_group(layout: Layout, inputs: int) -> int | None:
    """The group in which torch's int4 kernel takes the columns: a larger one is cut into several of one scale."""
    fitting = [g for g in CPU_GROUPS if layout.group % g == 0 and inputs % g == 0]
    return max(fitting, default=None)


def packed_matrix(weight: Packed, bias: torch.Tensor | None = None) -> Matrix:
    """`weight` has been found to stay packed."""
    layout = weight.layout
    if weight.codes.is_cuda:
        return (EightBitMatrix if _by_eight_bits(weight) else PackedCudaMatrix)(weight, bias)
    if _is_native(weight):
        return NativeMatrix(weight, bias)
    if layout.kind == "int8" and layout.group == weight.inputs and not layout.offsets:
        return Int8CpuMatrix(weight, bias)
    return Int4CpuMatrix(weight, bias)


def _by_eight_bits(weight: Packed) -> bool:
    layout = weight.layout
    return layout.eight_bit_inputs and layout.group == weight.inputs and weight.scales.dtype is torch.float32


def matrix_bytes(weight: Packed, device: str, experts: bool = False) -> tuple[int, int]:
    """What `packed_matrix` of it keeps on a device of this type, and what a product takes beside that for its length:
    the matrix in 16 bits, on CUDA. `experts`: what is kept of matrices of experts, which take nothing."""
    layout, numbers = weight.layout, weight.numel()
    if device == "cuda":
        pairs = 2 if layout.bits == 8 and layout.offsets else 1  # of 4 bits a scale and an offset are one number
        kept = weight.codes.nbytes + 4 * pairs * (numbers // layout.group)
        if experts:
            return kept, 0
        return kept + 4 * (weight.outputs // ROWS), 0 if _by_eight_bits(weight) else 2 * numbers
    if _is_native(weight):
        return native.arranged_bytes(layout, weight.outputs, weight.inputs), 0
    if layout.kind == "int8" and layout.group == weight.inputs and not layout.offsets:
        return weight.nbytes, 0
    group = _cpu_group(layout, weight.inputs)
    assert group is not None
    return (layout.bits // 4) * (numbers // 2 + numbers // group * 2 * weight.scales.itemsize), 0


class NativeMatrix:
    """A row's result depends on that row alone, bit for bit, however many come with it."""

    def __init__(self, weight: Packed, bias: torch.Tensor | None = None):
        self._arranged, self._bias = native.Arranged(weight), bias
        self._product = self._arranged.product(bias)

    def joins(self, x: torch.Tensor) -> bool:
        """Whether what stands around the product of x can be one call with it: for few rows, where calls take longer
        than what they do."""
        return (len(x) <= MOST_JOINED and native_layer.takes(x) and x.stride(1) == 1
                and (self._bias is None or self._bias.dtype is x.dtype))

    def normed(self, x: torch.Tensor, weight: torch.Tensor, eps: float, act: str | None = None) -> torch.Tensor:
        """self(RMSNorm(x)); with `act`, the gated halves of it."""
        if self.joins(x):
            return native_layer.launch_normed(x, weight, eps, self._product, act)
        made = self(rms_norm(x, weight, eps))
        return made if act is None else gate(made, act)

    def add_mlp(self, residual: torch.Tensor, weight: torch.Tensor, eps: float, act: str,
                down: NativeMatrix) -> torch.Tensor:
        """residual += down(gate(self(RMSNorm(residual)))), in place; returns it. Of a residual that both `joins`."""
        return native_layer.launch_add_mlp(residual, weight, eps, self._product, act, down._product)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._into(x, x.new_empty(len(x), self._arranged.outputs))

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if residual.stride(1) != 1:
            return residual.add_(self(x))
        return self._into(x, residual, add=True)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """The float32 sums themselves."""
        return self._into(x, x.new_empty(len(x), self._arranged.outputs, dtype=torch.float32))

    def _into(self, x: torch.Tensor, out: torch.Tensor, add: bool = False) -> torch.Tensor:
        bias = None if self._bias is None else self._bias.to(out.dtype)
        return self._arranged.multiply(x if x.stride(1) == 1 else x.contiguous(), out, bias, add)


class _CpuMatrix:
    """Inputs of another type than the scales' are rounded to it."""

    def __init__(self, weight: Packed, bias: torch.Tensor | None):
        self._bias, self._dtype = bias, weight.scales.dtype

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        made = self._product(x.to(self._dtype).contiguous()).to(x.dtype)
        return made if self._bias is None else made.add_(self._bias)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return residual.add_(self(x))

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).float()


class Int8CpuMatrix(_CpuMatrix):
    """One scale a row."""

    def __init__(self, weight: Packed, bias: torch.Tensor | None = None):
        super().__init__(weight, bias)
        self._codes, self._scales = weight.codes, weight.scales[:, 0].contiguous()

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._weight_int8pack_mm(x, self._codes, self._scales)


class Int4CpuMatrix(_CpuMatrix):
    """A scale and an offset a group. 8 bits are two matrices of 4."""

    def __init__(self, weight: Packed, bias: torch.Tensor | None = None):
        super().__init__(weight, bias)
        group = _cpu_group(weight.layout, weight.inputs)
        assert group is not None
        self._group, parts = group, []
        for at in range(0, weight.outputs, AT_ONCE):  # what is unpacked on the way takes eight times the room
            parts.append([self._plane(*plane, weight.layout.group // group)
                          for plane in _planes(weight.rows(at, min(AT_ONCE, weight.outputs - at)))])
        self._planes = [(torch.cat([codes for codes, _ in plane]), torch.cat([scales for _, scales in plane], 1))
                        for plane in zip(*parts, strict=True)]

    @staticmethod
    def _plane(codes: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor,
               repeats: int) -> tuple[torch.Tensor, torch.Tensor]:
        """codes [O, I] of 0 .. 15 that count as -8 .. 7; scales and offsets [O, G], each of `repeats` of torch's
        groups."""
        both = torch.stack((scales, offsets), -1).repeat_interleave(repeats, 1)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
        return packed, both.transpose(0, 1).contiguous()

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        first, *others = (torch.ops.aten._weight_int4pack_mm_for_cpu(x, codes, self._group, scales)
                          for codes, scales in self._planes)
        for other in others:
            first += other
        return first


def _planes(weight: Packed) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    scales = weight.scales
    offsets = torch.zeros_like(scales) if weight.offsets is None else weight.offsets
    if weight.layout.kind == "int4":
        return [(unpack4(weight.codes), scales, offsets)]
    code = weight.codes.int() + 128
    return [(code >> 4, 16 * scales, torch.zeros_like(scales)), (code & 15, scales, offsets + 8 * scales)]


class PackedCudaMatrix:
    """Few rows are multiplied by the codes, many by numbers that are made of them for the occasion. Of a small matrix,
    these stay in the device's cache until they are read: a step of the default model took 1.67 ms for 256 rows, when
    up to 64 were few, and 2.40 ms for 64 (H200)."""

    def __init__(self, weight: Packed, bias: torch.Tensor | None = None):
        self._weight, self._bias = weight.by_groups(), bias
        self._arrivals = torch.zeros(weight.outputs // ROWS, dtype=torch.int32, device=weight.codes.device)
        self._most = FEW if weight.numel() <= SMALL else MOST_ROWS

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._into(x, x.dtype)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if len(x) <= self._most and residual.is_contiguous():
            self._few(x, residual, add=True)
            return residual
        return residual.add_(self(x))

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """The float32 sums themselves."""
        return self._into(x, torch.float32)

    def _into(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if len(x) > self._most:
            return self._many(x, dtype)
        out = torch.empty(len(x), self._weight.outputs, dtype=dtype, device=x.device)
        if len(x):
            self._few(x, out)
        return out

    def _few(self, x: torch.Tensor, out: torch.Tensor, add: bool = False) -> None:
        from stretto.ops.triton_packed import launch_few_rows

        launch_few_rows(x if x.stride(1) == 1 else x.contiguous(), self._weight, out, self._bias, add,
                        arrivals=self._arrivals)

    def _many(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        from stretto.ops.triton_packed import launch_dequantize

        weight = launch_dequantize(self._weight, x.dtype).t()
        made = torch.mm(x, weight) if dtype is x.dtype else torch.mm(x, weight, out_dtype=dtype)
        return made if self._bias is None else made.add_(self._bias)


class EightBitMatrix(PackedCudaMatrix):
    """e4m3 weights with a scale a row, by inputs that are rounded to e4m3 with a scale a row."""

    def __init__(self, weight: Packed, bias: torch.Tensor | None = None):
        super().__init__(weight, bias)
        self._most = MOST_ROWS  # torch's product of many makes no numbers of the codes

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """The float32 sums themselves. Many rows are several times few: torch's product of e4m3 gives bfloat16."""
        return torch.cat([super(EightBitMatrix, self).logits(some) for some in x.split(MOST_ROWS)])

    def _few(self, x: torch.Tensor, out: torch.Tensor, add: bool = False) -> None:
        from stretto.ops.triton_packed import launch_few_rows, round_rows

        codes, scales = round_rows(x if x.stride(1) == 1 else x.contiguous())
        launch_few_rows(codes, self._weight, out, self._bias, add, scales)

    def _many(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        from stretto.ops.triton_packed import round_rows

        codes, scales = round_rows(x if x.stride(1) == 1 else x.contiguous())
        made = torch._scaled_mm(codes, self._weight.codes.t(), scales[:, None], self._weight.scales,
                                out_dtype=torch.bfloat16)
        made = made if self._bias is None else made.add_(self._bias)
        return made.to(dtype)


class JoinedMatrix:
    """Several matrices one below the other, as one."""

    def __init__(self, parts: Sequence[Matrix]):
        self._parts = parts

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([part(x) for part in self._parts], -1)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return residual.add_(self(x))

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([part.logits(x) for part in self._parts], -1)
