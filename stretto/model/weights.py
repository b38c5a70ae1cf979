"""From a checkpoint into a model's own parameters, each tensor copied once.

A model first declares what it wants, fused as it likes; memory is reserved, nothing is read. Then the whole list is
compared with what the source holds, and every difference is named in one error. Only then is data copied.

    declared   qkv [ q rows | k rows | v rows ]        gate_up [ gate rows | up rows ]
    source       q_proj.weight  k_proj.weight  v_proj.weight        gate_proj.weight  up_proj.weight
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch

from stretto.model.lora import AdapterBank
from stretto.model.packed_matrix import is_native, matrix_bytes, stays_packed
from stretto.model.shard import Piece, Shard, cut, whole
from stretto.model.source import PackedSource, WeightError, WeightSource
from stretto.ops.packed import Layout, Packed

Progress = Callable[[int, int], None]  # (elements copied, elements in all)

# Buffers that old checkpoints saved beside the weights, and that are computed from the configuration.
COMPUTED = re.compile(r"(^|\.)(rotary_emb\.inv_freq|rotary_emb\.(cos|sin)_cached|attn\.(masked_)?bias)$")


@dataclass(frozen=True)
class _Copy:
    name: str
    shape: tuple[int, ...]  # of the whole tensor
    target: torch.Tensor
    starts: tuple[int, ...] = ()  # where what is copied begins, in the dimensions that are not copied whole

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        for dim, size in enumerate(self.target.shape):
            if size != tensor.shape[dim]:
                tensor = tensor.narrow(dim, self.starts[dim], size)
        return tensor

    def fill(self, source: WeightSource) -> None:
        tensor = source.tensor(self.name)
        if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
            raise WeightError(f"{self.name} holds {tensor.dtype}; weights must be floating-point numbers of 16 "
                              "bits or more, or be quantised in a way that config.json names")
        mine = self.of(tensor)
        self.target.copy_(mine)
        if not is_finite(self.target):
            beyond = f": the checkpoint's numbers are beyond those of {self.target.dtype}; take --dtype bfloat16"
            raise WeightError(NOT_FINITE.format(self.name, beyond if is_finite(mine) else DAMAGED))


@dataclass(frozen=True)
class _PackedCopy:
    name: str
    shape: tuple[int, ...]  # of the whole tensor
    target: Packed
    starts: tuple[int, int]  # the first row and column

    def fill(self, source: WeightSource) -> None:
        assert isinstance(source, PackedSource)
        target, (row, column) = self.target, self.starts
        self.target.copy_(source.packed(self.name).rows(row, target.outputs).columns(column, target.inputs))
        if not is_finite(target.scales):
            raise WeightError(NOT_FINITE.format(f"the scales of {self.name}", DAMAGED))


NOT_FINITE = "{} would be infinite or no numbers (NaN){}"
DAMAGED = ", as the checkpoint holds them: it is damaged, fetch it again"


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether there is neither infinity nor NaN, which is the least and the greatest wherever it is."""
    if not tensor.numel():
        return True
    least, greatest = torch.aminmax(tensor)
    return bool(least.isfinite() & greatest.isfinite())


class Weights:
    """What a model takes from a source. Parameters are filled by `fill`; until then they hold nothing."""

    def __init__(self, source: WeightSource, dtype: torch.dtype, device: torch.device, fixed: bool = False,
                 adapters: AdapterBank | None = None, shard: Shard | None = None, kernels: str | None = None,
                 multiplied_in: torch.dtype | None = None):
        """`fixed`: what is made of these weights shall compute a row in one way, whatever the batch. `adapters`: where
        linear layers get room for adapters. `shard`: the rank whose part this is; None: all of it.
        `kernels`: the type of the device that will multiply, which decides what stays packed; None: `device`'s.
        `multiplied_in`: to which packed matrices round their inputs where there are no kernels for `dtype`; None:
        `dtype`, not at all."""
        self._source, self._names = source, frozenset(source.names())
        self.dtype, self.device, self.fixed, self.adapters = dtype, device, fixed, adapters
        self._packed_dtype = multiplied_in or dtype
        self.shard, self.kernels = shard or Shard(), kernels or device.type
        self._copies: list[_Copy | _PackedCopy] = []
        self._ignored: set[str] = set()
        self._after: list[Callable[[], None]] = []
        self._added = 0  # bytes that matrices keep beyond what was declared for them
        self.scratch_bytes = 0  # that one product takes at most, beside what is kept: see `matrix_bytes`

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """The tensor `name`, which must have this shape."""
        return self.stack([(name, shape[0])], *shape[1:])

    def stack(self, parts: Sequence[tuple[str, int]], *columns: int) -> torch.Tensor:
        """The named tensors one below the other: [sum of rows, *columns]. `parts` gives (name, rows) of each."""
        return self.stack_pieces([whole(name, rows) for name, rows in parts], *columns)

    def stack_pieces(self, pieces: Sequence[Piece], *columns: int, cut_columns: bool = False) -> torch.Tensor:
        """As `stack`, of a part of each tensor's rows. `cut_columns`: and of this rank's equal part of the columns."""
        column, width = cut(self.shard, columns[0]) if cut_columns else (0, columns[0] if columns else 0)
        shape = (width, *columns[1:]) if columns else ()
        parameter = torch.empty(sum(p.rows for p in pieces), *shape, dtype=self.dtype, device=self.device)
        at = 0
        for p in pieces:
            target = parameter.narrow(0, at, p.rows)
            self._copies.append(_Copy(p.name, (p.total, *columns), target, (p.start, column)))
            at += p.rows
        return parameter

    def matrices(self, pieces: Sequence[Piece], inputs: int, cut_columns: bool = False,
                 single: bool = False) -> list[torch.Tensor | Packed]:
        """The matrices [rows, inputs] below each other, as `stack_pieces`; runs of those that stay packed on this
        device are packed. `single`: as one, packed or not."""
        layouts = [self._layout(piece, inputs, cut_columns) for piece in pieces]
        if single and len(set(layouts)) > 1:
            layouts = [None] * len(pieces)
        made: list[torch.Tensor | Packed] = []
        for layout, run in groupby(zip(layouts, pieces, strict=True), key=lambda pair: pair[0]):
            some = [piece for _, piece in run]
            made.append(self.stack_pieces(some, inputs, cut_columns=cut_columns) if layout is None else
                        self._stack_packed(layout, some, inputs, cut_columns))
        return made

    def transposed_experts(self, name: str, shape: tuple[int, int, int]) -> Packed | None:
        """A tensor of this shape, [E, inputs, rows], as matrices [rows, inputs] one below the other, where they stay
        packed here; None: take it as numbers."""
        experts, inputs, rows = shape
        if self.shard.ranks > 1 or not isinstance(self._source, PackedSource) or name not in self._names:
            return None
        layout = self._source.layout(name)
        if layout is None or not stays_packed(layout, rows, inputs, self.dtype, self.kernels, self.fixed):
            return None
        parameter = Packed.empty(layout, experts * rows, inputs, self.dtype, self.device)
        self._copies.append(_PackedCopy(name, shape, parameter, (0, 0)))
        return parameter

    def _layout(self, piece: Piece, inputs: int, cut_columns: bool) -> Layout | None:
        """That of a matrix that stays packed here, else None."""
        if not isinstance(self._source, PackedSource) or piece.name not in self._names:
            return None
        layout, count = self._source.layout(piece.name), cut(self.shard, inputs)[1] if cut_columns else inputs
        if layout is None:
            return None
        if layout.group == inputs:  # a scale a row, however many columns of it are here
            layout = replace(layout, group=count)
        packed = not count % layout.group and any(
            stays_packed(layout, piece.rows, count, dtype, self.kernels, self.fixed)
            for dtype in (self.dtype, self._packed_dtype))
        return layout if packed else None

    def _stack_packed(self, layout: Layout, pieces: Sequence[Piece], inputs: int, cut_columns: bool) -> Packed:
        column, width = cut(self.shard, inputs) if cut_columns else (0, inputs)
        rows = sum(p.rows for p in pieces)
        native = self.kernels == "cpu" and is_native(layout, rows, width, self.dtype)
        scales = torch.float32 if native or layout.kind == "fp8" else self._packed_dtype
        parameter = Packed.empty(layout, rows, width, scales, self.device)
        at = 0
        for p in pieces:
            self._copies.append(_PackedCopy(p.name, (p.total, inputs), parameter.rows(at, p.rows), (p.start, column)))
            at += p.rows
        return parameter

    def take_part(self, name: str, shape: Sequence[int], dim: int, start: int, count: int) -> torch.Tensor:
        """`start` to `start + count` in one dimension of the tensor `name`, which must have this shape."""
        sizes = [count if d == dim else size for d, size in enumerate(shape)]
        parameter = torch.empty(sizes, dtype=self.dtype, device=self.device)
        self._copies.append(_Copy(name, tuple(shape), parameter, (0,) * dim + (start,)))
        return parameter

    def ignore(self, *names: str) -> None:
        """Tensors that a checkpoint may hold and this model does not need."""
        self._ignored.update(names)

    def ignore_under(self, prefix: str) -> None:
        """All tensors whose names begin so."""
        self._ignored.update(name for name in self._names if name.startswith(prefix))

    def holds(self, name: str) -> bool:
        """Whether the checkpoint has a tensor of this name."""
        return name in self._names

    def differ(self, name: str, other: str) -> bool:
        """True if the source holds both tensors and they are not equal. Reads them."""
        if not {name, other} <= self._names:
            return False
        return not torch.equal(self._source.tensor(name), self._source.tensor(other))

    def then(self, action: Callable[[], None]) -> None:
        """Called once all parameters are filled: for what is computed from them."""
        self._after.append(action)

    def check(self) -> None:
        """Raises WeightError that names every tensor missing, misshapen or not asked for."""
        wanted = {copy.name: copy for copy in self._copies}
        missing = sorted(wanted.keys() - self._names)
        extra = sorted(n for n in self._names - wanted.keys() - self._ignored if not COMPUTED.search(n))
        shapes = {n: tuple(self._source.shape(n)) for n in wanted.keys() & self._names}
        misshapen = [f"{n} is {list(shapes[n])}, the config wants {list(c.shape)}" for n, c in wanted.items()
                     if n in shapes and shapes[n] != c.shape]
        parts = [f"{len(found)} {what}: {', '.join(found)}" for what, found in
                 (("missing", missing), ("misshapen", misshapen), ("not part of this model", extra)) if found]
        if parts:
            raise WeightError("the checkpoint does not fit its config: " + "; ".join(parts))

    def multiplied(self, weights: Sequence[torch.Tensor | Packed], elsewhere: bool = False,
                   experts: bool = False) -> None:
        """Notes that each of these that is packed becomes a `packed_matrix`, or those of experts. `elsewhere`: and
        stays what it is for others."""
        for weight in weights:
            if isinstance(weight, Packed):
                kept, scratch = matrix_bytes(weight, self.kernels, experts)
                shared = weight.codes.nbytes if self.kernels == "cuda" else 0
                self._added += kept - (shared if elsewhere else weight.nbytes)
                self.scratch_bytes = max(self.scratch_bytes, scratch)

    @property
    def nbytes(self) -> int:
        """Of all that has been declared, as it is kept."""
        return sum(copy.target.nbytes for copy in self._copies) + self._added

    def fill(self, progress: Progress | None = None) -> None:
        """Checks, then copies everything. Raises WeightError."""
        self.check()
        total, done = sum(c.target.numel() for c in self._copies), 0
        for copy in self._copies:
            copy.fill(self._source)
            done += copy.target.numel()
            if progress is not None:
                progress(done, total)
        self._copies.clear()
        for action in self._after:
            action()
        self._after.clear()
