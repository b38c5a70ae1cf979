"""Quantised checkpoints as if they were not: a WeightSource that gives each weight back as floating-point numbers, or
packed (`ops.packed`) where its layout can be written so.

Layouts are recognised tensor by tensor, so that a checkpoint may leave some layers as they were. X is a layer's name.

    fp8, fbgemm_fp8     X.weight float8 [O, I]; X.weight_scale [], [O], [O, 1] or X.weight_scale_inv [O / b, I / b]
    compressed-tensors  as fp8; X.weight int8 with X.weight_scale and maybe X.weight_zero_point; or
                        X.weight_packed int32 [O, I / n], n = 32 / bits, first value in the lowest bits, offset by half
                        the range; X.weight_shape [2]; X.weight_scale [O, G]; maybe X.weight_zero_point [O / n, G],
                        packed by rows, and X.weight_g_idx [I]
    gptq                X.qweight int32 [I / n, O], X.qzeros [G, O / n], X.scales [G, O], maybe X.g_idx [I]
    awq                 X.qweight int32 [I, O / 8], X.qzeros [G, O / 8], X.scales [G, O]; columns of a word interleaved
    mxfp4               X_blocks uint8 [E, O, I / 32, 16], two values a byte, low first; X_scales uint8 [E, O, I / 32];
                        stands for X [E, I, O]

Scales of activations are left out: where activations are rounded at all, each row has a scale of its own.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from stretto.model.quantization import Quantization
from stretto.model.source import WeightError, WeightSource
from stretto.ops.packed import BLOCK, FP4, Layout, Packed, pack4

logger = logging.getLogger(__name__)

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column that each four bits of a word belong to, from the lowest
UNUSED = re.compile(r"\.(input_scale|activation_scale|input_zero_point|input_global_scale|input_scale_ub|[kvq]_scale)$")


@dataclass(frozen=True)
class Recipe:
    """How one weight is made of what is stored."""

    name: str
    parts: tuple[str, ...]  # stored tensors that stand for it
    shape: tuple[int, ...]
    make: Callable[[], torch.Tensor]
    layout: Callable[[], Layout | None] = lambda: None  # None: it cannot be written as `Packed`
    pack: Callable[[], Packed] | None = None  # scales in float32


class DequantizedSource:
    """A `WeightSource` over another one. Raises WeightError for parts that are missing or do not fit each other."""

    def __init__(self, source: WeightSource, quantization: Quantization):
        self._source = source
        names = frozenset(source.names())
        found = list(_FINDERS[quantization.method](source, names, quantization))
        self._recipes = {recipe.name: recipe for recipe in found}
        stored = {part for recipe in found for part in recipe.parts}
        self._plain = [name for name in names - stored if not UNUSED.search(name)]
        self.quantization, self.unpacked = quantization, 0  # numbers that were quantised and have been dequantised
        if not found:
            raise WeightError(f"the config says that weights are stored in {quantization}, but no tensor is")

    def names(self) -> Iterable[str]:
        return (*self._plain, *self._recipes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._recipes[name].shape if name in self._recipes else self._source.shape(name)

    def tensor(self, name: str) -> torch.Tensor:
        if name not in self._recipes:
            return self._source.tensor(name)
        self.unpacked += math.prod(self._recipes[name].shape)
        return self._recipes[name].make()

    def layout(self, name: str) -> Layout | None:
        """See `source.PackedSource`."""
        return self._recipes[name].layout() if name in self._recipes else None

    def packed(self, name: str) -> Packed:
        """See `source.PackedSource`."""
        pack = self._recipes[name].pack
        assert pack is not None
        return pack()

    def told(self, dtype: torch.dtype) -> None:
        """Once all is loaded, a warning of what was dequantised to `dtype`."""
        if self.unpacked:
            stored = self.unpacked * sum(self.quantization.bits) / len(self.quantization.bits) / 8
            logger.warning("weights stored in %s were dequantised at load: %.2f GB of %s instead of about %.2f GB",
                           self.quantization, self.unpacked * dtype.itemsize / 1e9, str(dtype).removeprefix("torch."),
                           stored / 1e9)


def dequantized(source: WeightSource, quantization: Quantization | None) -> WeightSource:
    """`source`, or where its weights are quantised what gives them as numbers or packed. Raises WeightError."""
    return source if quantization is None else DequantizedSource(source, quantization)


# ------------------------------------------------------------------------------------------------------------- layouts
def _scaled(source: WeightSource, names: frozenset[str], q: Quantization) -> Iterator[Recipe]:
    for name in sorted(names):
        base = name.removesuffix(".weight")
        scales = [s for s in (f"{base}.weight_scale", f"{base}.weight_scale_inv") if s in names]
        if base == name or not scales:
            continue
        zero = f"{base}.weight_zero_point"
        parts = (name, scales[0], *([zero] if zero in names else []))
        shape = source.shape(name)
        _check_scale(scales[0], source.shape(scales[0]), shape, q.block)

        def make(name: str = name, scale: str = scales[0], zero: str | None = zero if zero in names else None
                 ) -> torch.Tensor:
            values = source.tensor(name).float()
            if zero is not None:
                values -= spread(source.tensor(zero), values.shape, q.block)
            return values.mul_(spread(source.tensor(scale), values.shape, q.block))

        def layout(shape: tuple[int, ...] = shape, scale: str = scales[0], plain: bool = zero not in names
                   ) -> Layout | None:
            group = _columns_of_scale(source.shape(scale), shape, q.block)
            if not plain or len(shape) != 2 or len(q.kinds) > 1 or shape[1] % group:
                return None
            return Layout("fp8" if q.kinds == ("float",) else "int8", group, eight_bit_inputs=q.eight_bit_inputs)

        def pack(name: str = name, scale: str = scales[0], layout: Callable[[], Layout | None] = layout) -> Packed:
            found, codes = layout(), source.tensor(name)
            assert found is not None
            each = spread(source.tensor(scale), tuple(codes.shape), q.block)
            return Packed(found, codes, each[:, :: found.group].expand(codes.shape[0], -1))
        yield Recipe(name, parts, shape, make, layout, pack)


def _packed(source: WeightSource, names: frozenset[str], q: Quantization) -> Iterator[Recipe]:
    yield from _scaled(source, names, q)
    for name in sorted(names):
        base = name.removesuffix(".weight_packed")
        if base == name:
            continue
        wanted = [f"{base}.weight_scale", f"{base}.weight_shape"]
        optional = [n for n in (f"{base}.weight_zero_point", f"{base}.weight_g_idx") if n in names]
        _need(names, name, wanted)
        shape = tuple(int(n) for n in source.tensor(wanted[1]))

        stored = _Compressed(source, names, base, shape)
        yield Recipe(f"{base}.weight", (name, *wanted, *optional), shape, stored.make, stored.layout, stored.pack)


@dataclass(frozen=True)
class _Compressed:
    """One matrix of compressed-tensors whose values are packed into words."""

    source: WeightSource
    names: frozenset[str]
    base: str
    shape: tuple[int, ...]

    def _part(self, end: str) -> torch.Tensor:
        return self.source.tensor(f"{self.base}.{end}")

    @property
    def bits(self) -> int:
        return 32 // math.ceil(self.shape[1] / self.source.shape(f"{self.base}.weight_packed")[1])

    def _values(self) -> torch.Tensor:
        return unpack(self._part("weight_packed"), self.bits)[:, : self.shape[1]]

    def _scales(self) -> torch.Tensor:
        scale = self._part("weight_scale").float()
        return scale.view(self.shape[0], -1) if scale.numel() > 1 else scale.expand(self.shape[0], 1)

    def _zeros(self) -> torch.Tensor | None:
        """[O, G], less half the range."""
        if f"{self.base}.weight_zero_point" not in self.names:
            return None
        zero, half = self._part("weight_zero_point"), 1 << (self.bits - 1)
        if zero.dtype is torch.int32:  # packed by rows; as int8, they are plain numbers
            zero = unpack(zero.t().contiguous(), self.bits).t()[: self.shape[0]].float() - half
        return zero.float()

    def make(self) -> torch.Tensor:
        values, scales, zeros = self._values().float() - (1 << (self.bits - 1)), self._scales(), self._zeros()
        group = _groups(self.source, self.names, f"{self.base}.weight_g_idx", self.shape[1], scales.shape[1])
        if zeros is not None:
            values -= zeros[:, group]
        return values.mul_(scales[:, group])

    def layout(self) -> Layout | None:
        stored = self.source.shape(f"{self.base}.weight_scale")
        groups = stored[1] if len(stored) > 1 else 1
        if f"{self.base}.weight_g_idx" in self.names or self.shape[1] % groups:
            return None
        return _integers(self.bits, self.shape[1] // groups, f"{self.base}.weight_zero_point" in self.names)

    def pack(self) -> Packed:
        zeros = self._zeros()
        return _packed_integers(self.layout(), self._values(), self._scales(), zeros)


def _gptq(source: WeightSource, names: frozenset[str], q: Quantization) -> Iterator[Recipe]:
    bits, n = q.bits[0], 32 // q.bits[0]
    for base in _bases(names, ".qweight"):
        parts = [f"{base}.{part}" for part in ("qweight", "qzeros", "scales")]
        _need(names, parts[0], parts[1:])
        index = f"{base}.g_idx"
        rows, columns = source.shape(parts[0])

        def make(parts: list[str] = parts, index: str = index, inputs: int = rows * n) -> torch.Tensor:
            words, zeros, scales = (source.tensor(part) for part in parts)
            values = unpack(words.t().contiguous(), bits).float()  # [O, I]
            zero = unpack(zeros, bits).t()[: values.shape[0]].float() + q.zero_offset  # [O, G]
            group = _groups(source, names, index, inputs, scales.shape[0])
            return values.sub_(zero[:, group]).mul_(scales.float().t()[:, group])

        def layout(parts: list[str] = parts, index: str = index, inputs: int = rows * n) -> Layout | None:
            groups = source.shape(parts[2])[0]
            if inputs % groups or (index in names and not torch.equal(
                    source.tensor(index).long(), torch.arange(inputs) // (inputs // groups))):
                return None
            return _integers(bits, inputs // groups, True)

        def pack(parts: list[str] = parts, layout: Callable[[], Layout | None] = layout) -> Packed:
            words, zeros, scales = (source.tensor(part) for part in parts)
            values = unpack(words.t().contiguous(), bits)
            zero = unpack(zeros, bits).t()[: values.shape[0]].float() + q.zero_offset - (1 << (bits - 1))
            return _packed_integers(layout(), values, scales.float().t(), zero)
        yield Recipe(f"{base}.weight", (*parts, *([index] if index in names else [])), (columns, rows * n), make,
                     layout, pack)


def _awq(source: WeightSource, names: frozenset[str], _q: Quantization) -> Iterator[Recipe]:
    for base in _bases(names, ".qweight"):
        parts = [f"{base}.{part}" for part in ("qweight", "qzeros", "scales")]
        _need(names, parts[0], parts[1:])
        inputs, words = source.shape(parts[0])

        def make(parts: list[str] = parts, inputs: int = inputs) -> torch.Tensor:
            values, zeros, scales = (source.tensor(part) for part in parts)
            group = _groups(source, names, "", inputs, scales.shape[0])
            numbers = _unpack_awq(values).float().sub_(_unpack_awq(zeros).float()[group])
            return numbers.mul_(scales.float()[group]).t()

        def layout(parts: list[str] = parts, inputs: int = inputs) -> Layout | None:
            groups = source.shape(parts[2])[0]
            return None if inputs % groups else _integers(4, inputs // groups, True)

        def pack(parts: list[str] = parts, layout: Callable[[], Layout | None] = layout) -> Packed:
            values, zeros, scales = (source.tensor(part) for part in parts)
            return _packed_integers(layout(), _unpack_awq(values).t(), scales.float().t(),
                                    _unpack_awq(zeros).t().float() - 8)
        yield Recipe(f"{base}.weight", tuple(parts), (words * 8, inputs), make, layout, pack)


def _mxfp4(source: WeightSource, names: frozenset[str], _q: Quantization) -> Iterator[Recipe]:
    for base in _bases(names, "_blocks"):
        parts = (f"{base}_blocks", f"{base}_scales")
        _need(names, parts[0], parts[1:])
        experts, rows, blocks, half = source.shape(parts[0])

        def make(parts: tuple[str, ...] = parts) -> torch.Tensor:
            stored, scales = (source.tensor(part) for part in parts)
            return torch.stack([_numbers_of_fp4(*pair) for pair in zip(stored, scales, strict=True)]).transpose(1, 2)

        def pack(parts: tuple[str, ...] = parts) -> Packed:
            """One expert below the other, not transposed."""
            stored, scales = (source.tensor(part) for part in parts)
            codes = [pack4(torch.stack((one & 15, one >> 4), -1).flatten(1)) for one in stored]
            return Packed(Layout("fp4", 32), torch.cat(codes), torch.exp2(scales.float() - 127).flatten(0, 1))
        layout = Layout("fp4", 32) if half == 16 and blocks % 2 == 0 else None
        yield Recipe(base, parts, (experts, blocks * half * 2, rows), make, partial(_this, layout), pack)


def _this(layout: Layout | None) -> Layout | None:
    return layout


_FINDERS = {"fp8": _scaled, "fbgemm_fp8": _scaled, "compressed-tensors": _packed, "gptq": _gptq, "awq": _awq,
            "mxfp4": _mxfp4}


# -------------------------------------------------------------------------------------------------------------- pieces
def _integers(bits: int, group: int, offsets: bool) -> Layout | None:
    """Of unsigned values of so many bits."""
    return Layout("int4" if bits == 4 else "int8", group, offsets) if bits in (4, 8) else None


def _packed_integers(layout: Layout | None, values: torch.Tensor, scales: torch.Tensor,
                     zeros: torch.Tensor | None) -> Packed:
    """values [O, I] uint8, scales [O, G] and zero points [O, G], these less half the range."""
    assert layout is not None
    codes = (pack4(_whole_blocks(values)) if layout.kind == "int4" else
             (values.to(torch.int16) - 128).to(torch.int8))
    return Packed(layout, codes, scales, None if zeros is None else -zeros * scales)


def _whole_blocks(values: torch.Tensor) -> torch.Tensor:
    if values.shape[1] % BLOCK:
        raise WeightError(f"a matrix of {values.shape[1]} columns is no multiple of {BLOCK}")
    return values.contiguous()


def _columns_of_scale(scale: tuple[int, ...], shape: tuple[int, ...], block: tuple[int, int] | None) -> int:
    """How many columns of a matrix share a scale; see `spread`."""
    if math.prod(scale) == 1 or len(scale) == 1 or scale[1] == 1:
        return shape[1]
    if block is not None and scale[0] != shape[0]:
        return block[1]
    return shape[1] // scale[1]


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [R, C] -> uint8 [R, C * 32 / bits]: the values of each word, from the lowest bits up."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((words[..., None] >> shifts) & ((1 << bits) - 1)).to(torch.uint8).flatten(-2)


def _unpack_awq(words: torch.Tensor) -> torch.Tensor:
    values = unpack(words, 4).view(*words.shape, 8)
    return values[..., torch.tensor(AWQ_ORDER).argsort()].flatten(-2)


def _numbers_of_fp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """blocks uint8 [O, B, 16], scales uint8 [O, B], powers of two biased by 127 -> bfloat16 [O, B * 32], exactly."""
    table = torch.tensor(FP4, dtype=torch.bfloat16)
    both = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)  # [O, B, 32]
    return torch.ldexp(table[both.int()], scales.int()[..., None] - 127).to(torch.bfloat16).flatten(-2)


def spread(scale: torch.Tensor, shape: tuple[int, ...], block: tuple[int, int] | None) -> torch.Tensor:
    """A scale of the whole, of rows, of blocks or of groups of columns, as it broadcasts to [O, I]. float32."""
    scale = scale.float()
    if scale.numel() == 1:
        return scale.view(1, 1)
    if scale.ndim == 1 or scale.shape[1] == 1:
        return scale.view(-1, 1)
    if block is not None and scale.shape[0] != shape[0]:
        scale = scale.repeat_interleave(block[0], 0)[: shape[0]].repeat_interleave(block[1], 1)
        return scale[:, : shape[1]]
    return scale.repeat_interleave(shape[1] // scale.shape[1], 1)


def _check_scale(name: str, scale: tuple[int, ...], weight: tuple[int, ...], block: tuple[int, int] | None) -> None:
    allowed: list[tuple[int, ...]] = [(), (1,), (weight[0],), (weight[0], 1)]
    if block is not None:
        allowed.append((math.ceil(weight[0] / block[0]), math.ceil(weight[1] / block[1])))
    grouped = len(scale) == 2 and scale[0] == weight[0] and weight[1] % scale[1] == 0
    if scale not in allowed and not grouped:
        raise WeightError(f"{name} is {list(scale)}, which fits no weight of {list(weight)}"
                          + (f" in blocks of {list(block)}" if block else "; the config gives no weight_block_size"))


def _groups(source: WeightSource, names: frozenset[str], index: str, inputs: int, groups: int) -> torch.Tensor:
    """The group of each column, [I] int64: as stored, or groups of equal size."""
    if index in names:
        return source.tensor(index).long()
    if inputs % groups:
        raise WeightError(f"{inputs} columns do not make {groups} groups of equal size, and there is no {index}")
    return torch.arange(inputs) // (inputs // groups)


def _bases(names: frozenset[str], suffix: str) -> list[str]:
    return sorted(name.removesuffix(suffix) for name in names if name.endswith(suffix))


def _need(names: frozenset[str], name: str, parts: Iterable[str]) -> None:
    missing = [part for part in parts if part not in names]
    if missing:
        raise WeightError(f"{name} is quantised, but {', '.join(missing)} is missing")
