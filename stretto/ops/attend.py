"""The one call a model makes for attention, bound to a step: write the step's keys and values, then attend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from stretto.attn.api import AttentionBackend, GroupSpec, LayerSpec
from stretto.ragged import RaggedStep


class KVTensors(Protocol):
    """What `StepAttention` needs of the KV memory: `k[layer]`, `v[layer]`, `group_of[layer]` and `write`."""

    @property
    def k(self) -> Sequence[torch.Tensor]: ...
    @property
    def v(self) -> Sequence[torch.Tensor]: ...
    @property
    def group_of(self) -> dict[int, int]: ...
    @property
    def groups(self) -> Sequence[GroupSpec]: ...

    def write(self, layer: int, cells: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None: ...


class StepAttention:
    """`attn.api.Attend` for one step. Metadata is made once for each group, when its first layer comes."""

    def __init__(self, step: RaggedStep, layers: Sequence[LayerSpec], kv: KVTensors, backend: AttentionBackend):
        self.step, self.layers, self.kv, self.backend = step, layers, kv, backend
        self.meta: dict[int, object] = {}
        self.calls = 0

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                 sinks: torch.Tensor | None = None) -> torch.Tensor:
        group = self.kv.group_of[layer]
        if group not in self.meta:
            self.meta[group] = self.backend.metadata(self.step, group, self.layers[layer])
        self.kv.write(layer, self.step.cells[group], k, v)
        self.calls += 1
        return self.backend.attend(self.layers[layer], q, self.kv.k[layer], self.kv.v[layer], self.step, group,
                                   self.meta[group], sinks)
