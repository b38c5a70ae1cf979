"""The one call a model makes for attention, bound to a step: write the step's keys and values, then attend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from stretto.attn.api import AttentionBackend, GroupSpec, LayerSpec, ProjectedBackend
from stretto.ops.fp8 import KVScales
from stretto.ops.layer import HeadWeights, Rope, rotate_and_write
from stretto.ops.native import layer as native
from stretto.ops.state_step import StepStates
from stretto.ragged import RaggedStep


class KVTensors(Protocol):
    """What `StepAttention` needs of the KV memory: `k[layer]`, `v[layer]`, `scales[layer]`, `group_of[layer]` and
    `write`."""

    @property
    def k(self) -> Sequence[torch.Tensor]: ...
    @property
    def v(self) -> Sequence[torch.Tensor]: ...
    @property
    def scales(self) -> Sequence[KVScales | None]: ...
    @property
    def group_of(self) -> dict[int, int]: ...
    @property
    def groups(self) -> Sequence[GroupSpec]: ...

    def write(self, layer: int, cells: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None: ...


class StepAttention:
    """`attn.api.Attend` for one step."""

    def __init__(self, step: RaggedStep, layers: Sequence[LayerSpec], kv: KVTensors, backend: AttentionBackend,
                 states: StepStates | None = None):
        """`states`: what layers with states get, of a model that has some."""
        self.step, self.layers, self.kv, self.backend, self.states = step, layers, kv, backend, states
        self.meta: dict[int, object] = {}
        self._projected = backend.projected if isinstance(backend, ProjectedBackend) else None
        self.calls = 0

    @property
    def tokens(self) -> torch.Tensor:
        """How many of the packed tokens are no padding, a scalar on the device."""
        return self.step.cu_q[-1]

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                 sinks: torch.Tensor | None = None) -> torch.Tensor:
        self.kv.write(layer, self.step.cells[self.kv.group_of[layer]], k, v)
        return self._attend(layer, q, sinks)

    def projects(self, layer: int, qkv: torch.Tensor) -> bool:
        """Whether heads may be given as they were projected."""
        return qkv.is_cuda or (native.takes(qkv) and self.kv.k[layer].dtype in native.CELLS)

    def projected(self, layer: int, qkv: torch.Tensor, n_heads: int, rope: Rope, norm: HeadWeights | None,
                  sinks: torch.Tensor | None = None) -> torch.Tensor:
        """qkv [T, H + 2 Hkv, D] as projected, where `projects`. Normed, rotated and written in one launch, then as a
        call; or all of it in one launch, where the backend has one for such steps."""
        group = self.kv.group_of[layer]
        if sinks is None and self._projected is not None:
            attended = self._projected(self.layers[layer], qkv, rope, norm, self.kv.k[layer], self.kv.v[layer],
                                       self.step, group, lambda: self._metadata(layer), self.kv.scales[layer],
                                       self.calls > 0)
            if attended is not None:
                self.calls += 1
                return attended
        cells = self.step.cells[group]
        q = rotate_and_write(qkv, n_heads, rope, norm, self.kv.k[layer], self.kv.v[layer], cells, self.kv.scales[layer])
        return self._attend(layer, q, sinks)

    def _attend(self, layer: int, q: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
        self.calls += 1
        return self.backend.attend(self.layers[layer], q, self.kv.k[layer], self.kv.v[layer], self.step,
                                   self.kv.group_of[layer], self._metadata(layer), sinks, self.kv.scales[layer])

    def _metadata(self, layer: int) -> object:
        """Made once for each group, when its first layer comes."""
        group = self.kv.group_of[layer]
        if group not in self.meta:
            self.meta[group] = self.backend.metadata(self.step, group, self.layers[layer])
        return self.meta[group]
