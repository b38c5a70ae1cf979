"""What a drafter is told: of the target before anything is loaded, and of the engine when it is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from stretto.attn.api import AttentionBackend, GroupSpec, LayerSpec
from stretto.model.api import CausalModel
from stretto.model.shard import Shard
from stretto.ops.fp8 import KVScales
from stretto.spec.api import Choose, Drafter, DrafterCaps, SlotView


class DrafterError(ValueError):
    """A drafter that cannot be made as asked."""


class DrafterMissing(DrafterError):
    """Whatever the model: a package that the drafter needs is not installed."""


@dataclass(frozen=True)
class Target:
    """The target model as its files describe it. `tokenizer`: where its tokenizer is, if not at `path`."""

    name: str
    path: Path
    vocab_size: int
    hidden_size: int
    n_layers: int
    context: int
    tokenizer: Path | None = None


@dataclass(frozen=True)
class DrafterSizes:
    """A drafter before its weights are loaded: what it declares, and the memory it takes."""

    caps: DrafterCaps
    parameters: int = 0
    # of its own layers: (window, numbers that one token stores, heads that these make up)
    kv_groups: tuple[tuple[int | None, int, int], ...] = ()
    tap_values: int = 0  # numbers that are kept beside each page and in each slot, for its seam


class DraftKV(Protocol):
    """KV memory of a drafter's own layers, at the target's page numbers. `page_size` tokens a page."""

    @property
    def k(self) -> Sequence[torch.Tensor]: ...  # per layer [pages, page_size, Hkv, D]
    @property
    def v(self) -> Sequence[torch.Tensor]: ...
    @property
    def scales(self) -> Sequence[KVScales | None]: ...  # of e4m3 caches; else None
    @property
    def group_of(self) -> dict[int, int]: ...
    @property
    def groups(self) -> Sequence[GroupSpec]: ...

    def write(self, layer: int, cells: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None: ...


@dataclass(frozen=True)
class DrafterContext:
    """What a drafter may know of the engine when it is made. `width`: most drafts a row, as configured.

    The fields from `model` on are there for drafters with weights or KV of their own."""

    width: int
    vocab_size: int
    device: torch.device
    dtype: torch.dtype = torch.float32
    positions: int = 0  # that the engine serves
    target: Target | None = None
    model: CausalModel | None = None  # lends its embedding and its head
    slots: SlotView | None = None
    choose: Choose | None = None
    attention: AttentionBackend | None = None
    own_kv: Callable[[Sequence[LayerSpec]], DraftKV] | None = None
    seam: Callable[[str], torch.Tensor] | None = None  # tap name -> [S, E]: taps of position len-1 before the step
    shard: Shard = field(default_factory=Shard)  # each rank has a drafter of its own, and all of them the same steps


    def lent_embedding(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """ids [T] -> [T, E] of the target. Raises DrafterError where the target's implementation lends none."""
        embedding = getattr(self.model, "embedding", None)
        if embedding is None:
            name = self.target.name if self.target else "without a name"
            raise DrafterError(f"target {name} ({type(self.model).__name__}) lends no embedding, and the draft"
                               " checkpoint has none of its own: choose a drafter that has, or another target")
        return embedding


class DrafterKind(Protocol):
    """One kind of drafter: what an entry point gives. A kind whose drafter has weights or KV of its own also has

        def sizes(self, settings: str, target: Target) -> DrafterSizes

    which may read files, but loads nothing."""

    def caps(self, settings: str) -> DrafterCaps:
        """What it would declare with these settings, before any weight is loaded. `max_width` is its widest."""
        ...

    def make(self, settings: str, context: DrafterContext) -> Drafter: ...
