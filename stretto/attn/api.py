"""What an attention backend is: paged, ragged, with every length read from the device.

A backend serves all rows of a step in one call, whatever their q: a prompt's chunk, a decoded token, a verify window.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch

from stretto.ops.fp8 import KVScales
from stretto.ops.layer import HeadWeights, Rope
from stretto.ragged import RaggedStep


@dataclass(frozen=True)
class LayerSpec:
    """Attention of one layer, as the model declares it."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None  # a query at position p sees positions p - window + 1 .. p; None: all up to p
    softcap: float | None = None  # logits become softcap * tanh(logits / softcap)
    has_sinks: bool = False  # one learned logit per head joins the softmax


@dataclass(frozen=True)
class StateSpec:
    """A layer that keeps one state of fixed size for a sequence, as the model declares it: the shapes of its parts, all
    kept in float32. A sequence without tokens has zeros."""

    parts: tuple[tuple[int, ...], ...]

    @property
    def values(self) -> int:
        return sum(math.prod(part) for part in self.parts)


@dataclass(frozen=True)
class GroupSpec:
    """Layers that share page tables: all of one kind, full or one window. A window of wire.STATE: layers with states,
    which attend to nothing and so are not among `layers`."""

    window: int | None
    layers: tuple[int, ...]


@dataclass(frozen=True)
class AttnCaps:
    """What a backend provides; compared with what model and configuration need at start-up."""

    page_sizes: frozenset[int] | None  # None: any
    head_dims: frozenset[int] | None  # None: any
    window: bool
    sinks: bool
    softcap: bool
    empty_rows: bool
    host_lengths: Literal["none", "bound"]  # a backend that needs exact lengths on the host is refused
    graphs: bool  # may be captured in a CUDA graph
    devices: frozenset[str] = frozenset({"cpu", "cuda"})
    lack: str = ""  # what goes another way here than it should, and why, for the start-up report
    kv_dtypes: frozenset[str] = frozenset()  # of caches that are not of the activations' type: "fp8_e4m3", "bfloat16"


class AttentionBackend(Protocol):
    """metadata() runs once a step and group, attend() once a layer; neither may synchronise with the host."""

    caps: AttnCaps

    def metadata(self, step: RaggedStep, group: int, layer: LayerSpec) -> object:
        """Whatever of the step this backend shares between the layers of a group."""
        ...

    def attend(self, layer: LayerSpec, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, step: RaggedStep,
               group: int, meta: object, sinks: torch.Tensor | None = None,
               scales: KVScales | None = None) -> torch.Tensor:
        """q [T, H, D]; caches [pages, page_size, Hkv, D], already holding the step's own keys and values; `scales`
        where they are e4m3, given only to backends whose caps name that.
        Returns [T, H, D]. Rows of padding tokens are unspecified but finite."""
        ...


@runtime_checkable
class ProjectedBackend(Protocol):
    """A backend that may take a layer's heads as they were projected."""

    def projected(self, layer: LayerSpec, qkv: torch.Tensor, rope: Rope, norm: HeadWeights | None,
                  k_cache: torch.Tensor, v_cache: torch.Tensor, step: RaggedStep, group: int,
                  meta: Callable[[], object], scales: KVScales | None, early: bool) -> torch.Tensor | None:
        """qkv [T, H + 2 Hkv, D]: norms and rotates q and k, writes keys and values into the step's cells, attends, in
        one launch. `meta` gives what `metadata` makes of step and group, for whoever needs it; `early`: another layer
        of this step did. Returns [T, H, D]; None, and nothing is done, where this serves neither the layer nor the
        step."""
        ...


class Attend(Protocol):
    """The one call a model makes, bound to a step: writes the step's keys and values, then attends.

    `layer` is the layer index of the model. q [T, H, D], k and v [T, Hkv, D], rotated. Returns [T, H, D]."""

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                 sinks: torch.Tensor | None = None) -> torch.Tensor: ...
