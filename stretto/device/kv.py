"""KV memory: one pair of tensors a layer, addressed by the pages of the layer's group. Page 0 is never owned."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch

from stretto.attn.api import GroupSpec, LayerSpec
from stretto.device.host_pages import HostPages
from stretto.ops.fp8 import BIAS, KV_FP8, KVScales, quantize_heads
from stretto.ops.kv_write import write_kv
from stretto.wire import PageOp

POISON = 3e4  # finite in every KV dtype but e4m3, far from any real key or value
POISON_FP8 = 234.375  # times 2^7: the same


def group_layers(layers: Sequence[LayerSpec], others: Sequence[int | None] = ()) -> tuple[GroupSpec, ...]:
    """Layers of equal window share a group; full attention first, so that group 0 is the one of the whole context.
    `others`: windows of layers whose KV somebody else keeps at the same pages, and which need page tables as well."""
    windows = sorted({*others, *(spec.window for spec in layers)}, key=lambda w: (w is not None, w or 0))
    return tuple(GroupSpec(w, tuple(i for i, spec in enumerate(layers) if spec.window == w)) for w in windows)


def bytes_per_token(layers: Sequence[LayerSpec], group: GroupSpec, dtype: torch.dtype) -> int:
    """Keys and values; e4m3 has one more byte for the scale of each head."""
    scale = int(dtype is KV_FP8)
    return sum(2 * layers[i].n_kv_heads * (layers[i].head_dim * dtype.itemsize + scale) for i in group.layers)


def kv_dtype(name: str) -> torch.dtype:
    """The type that the configuration calls so."""
    return KV_FP8 if name == "fp8_e4m3" else getattr(torch, name)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros. In host memory they come from calloc, so that a page of it costs nothing until it is written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)


class KVCache:
    """k[i] and v[i]: [pages of the layer's group + 1, page_size, Hkv, D]; scales[i]: of e4m3 caches, else None."""

    def __init__(self, layers: Sequence[LayerSpec], groups: Sequence[GroupSpec], pages: Sequence[int], page_size: int,
                 dtype: torch.dtype, device: torch.device):
        self.groups, self.pages, self.page_size, self.dtype = tuple(groups), tuple(pages), page_size, dtype
        self.group_of = {layer: g for g, group in enumerate(groups) for layer in group.layers}
        shapes = [(pages[self.group_of[i]] + 1, page_size, s.n_kv_heads, s.head_dim) for i, s in enumerate(layers)]
        self.k = [_zeros(shape, dtype, device) for shape in shapes]
        self.v = [_zeros(shape, dtype, device) for shape in shapes]
        self.scales = [KVScales(*(_zeros(shape[:3], torch.uint8, device) for _ in "kv")) if dtype is KV_FP8 else None
                       for shape in shapes]

    def write(self, layer: int, cells: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """k, v [T, Hkv, D] into `cells` [T] (page * page_size + offset); padding tokens write to the null page."""
        if k.is_cuda:
            write_kv(k, v, self.k[layer], self.v[layer], cells, self.scales[layer])
            return
        for values, cache, place in ((k, self.k[layer], 0), (v, self.v[layer], 1)):
            scales = self.scales[layer]
            if scales is None:
                cache.flatten(0, 1).index_copy_(0, cells, values.to(self.dtype))
            else:
                codes, exponents = quantize_heads(values)
                cache.view(torch.uint8).flatten(0, 1).index_copy_(0, cells, codes.view(torch.uint8))
                scales[place].flatten(0, 1).index_copy_(0, cells, exponents)

    def copy_page(self, group: int, source: int, target: int) -> None:
        for tensor in self.page_tensors(group):
            tensor[target] = tensor[source]

    def poison_page(self, group: int, page: int) -> None:
        """Debug: whoever reads a freed cell gets nonsense. Not NaN: a masked cell is multiplied by a weight of 0."""
        for layer in self.groups[group].layers:
            scales = self.scales[layer]
            for cache in (self.k[layer], self.v[layer]):
                cache[page] = POISON if scales is None else POISON_FP8
            for exponents in scales or ():
                exponents[page] = BIAS + 7

    def keep_state(self, source: int, page: int) -> None:
        """Nothing here belongs to slots."""

    def page_tensors(self, group: int) -> list[torch.Tensor]:
        layers = self.groups[group].layers
        scales = [tensor for layer in layers for tensor in self.scales[layer] or ()]
        return [self.k[layer] for layer in layers] + [self.v[layer] for layer in layers] + scales

    @property
    def nbytes(self) -> int:
        scales = (tensor for pair in self.scales for tensor in pair or ())
        return sum(t.numel() * t.element_size() for t in (*self.k, *self.v, *scales))


class Paged(Protocol):
    """Memory addressed by page numbers, which page operations must reach."""

    def page_tensors(self, group: int) -> list[torch.Tensor]:
        """All that belongs to the pages of a group, each tensor [pages + 1, ...]: what travels to host memory and
        back."""
        ...

    def copy_page(self, group: int, source: int, target: int) -> None: ...

    def poison_page(self, group: int, page: int) -> None: ...

    def keep_state(self, source: int, page: int) -> None:
        """What belongs to the slot's position in cell `source` (wire.PageOp.KEEP_STATE) is laid beside a page of the
        `state` group."""
        ...


class Pages:
    """Everything that lies at the same page numbers: the target's KV, a drafter's, its seams."""

    def __init__(self, *stores: Paged):
        self.stores = stores
        self.host: HostPages | None = None

    def page_tensors(self, group: int) -> list[torch.Tensor]:
        return [tensor for store in self.stores for tensor in store.page_tensors(group)]

    def copy_page(self, group: int, source: int, target: int) -> None:
        for store in self.stores:
            store.copy_page(group, source, target)

    def poison_page(self, group: int, page: int) -> None:
        for store in self.stores:
            store.poison_page(group, page)

    def keep_state(self, source: int, page: int) -> None:
        for store in self.stores:
            store.keep_state(source, page)

    def run(self, kind: int, ops: Sequence[tuple[int, int, int]]) -> None:
        """Page operations of one kind, in order, as (group, source, target); see wire.PageOp."""
        if kind in (PageOp.SAVE, PageOp.RESTORE):
            for group, sources, targets in _batches(ops):
                assert self.host is not None, "a plan saves pages, and there is no host memory for them"
                move = self.host.save if kind == PageOp.SAVE else self.host.restore
                move(group, sources, targets)
            return
        for group, source, target in ops:
            if kind == PageOp.COPY:
                self.copy_page(group, source, target)
            elif kind == PageOp.KEEP_STATE:
                self.keep_state(source, target)
            else:
                self.poison_page(group, target)


def _batches(ops: Sequence[tuple[int, int, int]]) -> Iterator[tuple[int, list[int], list[int]]]:
    """(group, sources, targets): operations of one group that stand together and write no target twice."""
    sources: list[int] = []
    targets: dict[int, None] = {}
    of_group = -1
    for group, source, target in ops:
        if sources and (group != of_group or target in targets):
            yield of_group, sources, list(targets)
            sources, targets = [], {}
        of_group = group
        sources.append(source)
        targets[target] = None
    if sources:
        yield of_group, sources, list(targets)
