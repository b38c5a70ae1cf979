"""Ragged paged attention on CPUs by kernels of our own (ops/native/attention.cpp): rows of any length in one call.

What a token becomes depends on its position and on the cells before it alone, bit for bit: spans of cells that stand at
fixed positions are folded together in their order, whatever the rows beside, the chunk, or the threads. So this serves
`--deterministic` as it is.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from stretto.attn.api import AttnCaps, LayerSpec
from stretto.ops.fp8 import KVScales
from stretto.ops.layer import HeadWeights, Rope
from stretto.ops.native.attention import BoundStep, attend_projected, attend_rows, bound, layer_of
from stretto.ops.native.layer import heads_of, heads_together
from stretto.ragged import RaggedStep


class NativeRagged:
    """`AttentionBackend` and `ProjectedBackend` for activations in float32 and bfloat16. Where the machine has the
    kernels: see `select.choose_backend`."""

    caps = AttnCaps(page_sizes=None, head_dims=None, window=True, sinks=True, softcap=True, empty_rows=True,
                    host_lengths="none", graphs=False, devices=frozenset({"cpu"}),
                    kv_dtypes=frozenset({"float32", "bfloat16", "fp8_e4m3"}))

    def metadata(self, step: RaggedStep, group: int, layer: LayerSpec) -> BoundStep:
        return bound(step, group)

    def attend(self, layer: LayerSpec, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, step: RaggedStep,
               group: int, meta: object, sinks: torch.Tensor | None = None,
               scales: KVScales | None = None) -> torch.Tensor:
        assert isinstance(meta, BoundStep)
        made = layer_of(layer.n_heads, layer.scale, layer.window, layer.softcap, k_cache, v_cache, scales)
        return attend_rows(made, meta, heads_together(q), None if sinks is None else sinks.float().contiguous())

    def projected(self, layer: LayerSpec, qkv: torch.Tensor, rope: Rope, norm: HeadWeights | None,
                  k_cache: torch.Tensor, v_cache: torch.Tensor, step: RaggedStep, group: int,
                  meta: Callable[[], object], scales: KVScales | None, early: bool) -> torch.Tensor | None:
        bound_step = meta()
        assert isinstance(bound_step, BoundStep)
        made = layer_of(layer.n_heads, layer.scale, layer.window, layer.softcap, k_cache, v_cache, scales)
        qkv = heads_together(qkv)
        heads = heads_of(qkv, layer.n_heads, rope, norm, k_cache, v_cache, step.cells[group], scales)
        return attend_projected(made, bound_step, heads, qkv)
