"""Ragged paged attention in Triton: one launch family for chunk, verify and decode rows, lengths read on the device.

Grids depend on the sizes of the step's tensors only, so that a captured CUDA graph serves every step of its bucket.
The kernels, and how work is cut into items, are in `triton_kernels`; tile shapes in `tiles`; docs/kernels.md draws it.

Rounding does not depend on the batch: where the KV cells of a row are cut is a function of that row and of the size of
the bucket, and a decoded token runs in the same tile as a verify window. The one exception is a step whose partial
sums outgrow the workspace; its splits grow, so its results differ by rounding.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from triton.runtime.interpreter import InterpretedFunction

from stretto.attn.api import AttnCaps, LayerSpec
from stretto.attn.tiles import INTERPRETER, KernelConfig, Tile, kernel_config, padded, unsplit
from stretto.attn.triton_kernels import ITEM_WORDS, LOG2E, attend_kernel, plan_kernel
from stretto.attn.triton_short import launch_short, short_launch
from stretto.ops.fp8 import KV_FP8, KVScales
from stretto.ops.launch import overlaps
from stretto.ops.layer import HeadWeights, Rope
from stretto.ragged import RaggedStep

logger = logging.getLogger(__name__)
INTERPRETED = isinstance(attend_kernel, InterpretedFunction)  # TRITON_INTERPRET=1: the kernels run on the CPU
MAX_HEAD_DIM = 256
HOPPER = 90
FP8_ARCH = 89  # the first whose multiprocessors convert e4m3


@dataclass
class RaggedPlan:
    """The work of one step and group, on the device. Valid until the next step; layers use it one after another."""

    items: torch.Tensor  # [items, ITEM_WORDS] int32: those of chunks, then, from `offset_few` on, those of few tokens
    counts: torch.Tensor  # [5] int32: items of the two kinds, their claims, programs for chunks
    arrivals: torch.Tensor  # [items * Hkv] int32, by tile and KV head: splits that have arrived
    offset_few: int
    tiles: tuple[Tile, Tile]  # of chunks, of few tokens
    layer: LayerSpec  # the one it was made for
    attended: bool = False  # a layer has used it


def _capacities(n_rows: int, n_tokens: int, layer: LayerSpec, config: KernelConfig) -> tuple[int, int]:
    """Most items of chunk rows and of rows of few tokens, of any step of this bucket."""
    tile_tokens = config.chunk.rows // (layer.n_heads // layer.n_kv_heads)
    chunk_rows = min(n_rows, n_tokens)
    tiles = n_tokens // tile_tokens + chunk_rows
    # a row of t tiles has splits <= items / (t * Hkv) + 1, and one more where a window starts inside a split
    return chunk_rows * (-(-config.chunk_items // layer.n_kv_heads)) + 3 * tiles, n_rows * (config.max_splits + 1)


class TritonRagged:
    """AttentionBackend. The workspace of partial sums is shared by every step: run one step at a time.

    `config` overrides the tile table; `workspace_bytes` bounds the partial sums of one step. `fixed`: every row is a
    chunk whose keys are not split, so that a token's result does not depend on what is beside it (`tiles.unsplit`).
    `hopper`: chunks go to `gluon_chunks` where that serves them (on sm_90); False: to the kernel of all devices. These
    go there, too, where this Triton has another Gluon, which is experimental; `caps.lack` then says so."""

    caps = AttnCaps(page_sizes=None, head_dims=frozenset(range(1, MAX_HEAD_DIM + 1)), window=True, sinks=True,
                    softcap=True, empty_rows=True, host_lengths="none", graphs=True,
                    devices=frozenset({"cpu", "cuda"} if INTERPRETED else {"cuda"}),
                    kv_dtypes=frozenset({"float32", "bfloat16", "float16", "fp8_e4m3"}))

    def __init__(self, device: torch.device, dtype: torch.dtype, config: KernelConfig | None = None,
                 workspace_bytes: int = 128 << 20, fixed: bool = False, hopper: bool = True):
        if device.type == "cpu" and not INTERPRETED:
            raise ValueError("the Triton attention backend runs on CUDA devices; on the CPU choose the torch backend,"
                             " or set TRITON_INTERPRET=1 to test the kernels there")
        self.dtype, self.config, self.fixed = dtype, config, fixed
        self.arch, self.n_sm = 80, 2
        if device.type == "cuda":
            major, minor = torch.cuda.get_device_capability(device)
            self.arch = major * 10 + minor
            self.n_sm = torch.cuda.get_device_properties(device).multi_processor_count
            if self.arch < FP8_ARCH:
                self.caps = replace(self.caps, kv_dtypes=self.caps.kv_dtypes - {"fp8_e4m3"})
        self._serves, self._launch_chunks = self._for_hopper() if hopper and not fixed else (None, None)
        self.workspace = torch.empty(workspace_bytes // 4, dtype=torch.float32, device=device)
        self.arrivals = torch.zeros(1024, dtype=torch.int32, device=device)  # of `projected`, by row and KV head

    def config_for(self, layer: LayerSpec) -> KernelConfig:
        """The override, the interpreter's small tiles, or the table's entry for this layer. ValueError where a tile
        cannot hold one token's query heads."""
        config = self.config or (INTERPRETER if INTERPRETED else
                                 kernel_config(layer.head_dim, self.dtype.itemsize, self.arch))
        config = unsplit(config) if self.fixed else config
        group_size = layer.n_heads // layer.n_kv_heads
        if group_size > config.chunk.rows:
            raise ValueError(f"{group_size} query heads share a KV head; tiles of this backend hold"
                             f" {config.chunk.rows} query rows: choose the torch backend")
        return config

    def capacity(self, layer: LayerSpec) -> int:
        """Token-splits whose partial sums (all heads, float32, with their log-sum) fit the workspace."""
        return self.workspace.numel() // (layer.n_heads * (layer.head_dim + 1))

    def metadata(self, step: RaggedStep, group: int, layer: LayerSpec) -> RaggedPlan:
        """Builds the list of work items on the device; one small launch."""
        config, n_rows, device = self.config_for(layer), step.q_len.numel(), step.q_len.device
        few = config.few_for(n_rows)
        group_size = layer.n_heads // layer.n_kv_heads
        chunk_items, few_items = _capacities(n_rows, step.ids.numel(), layer, config)
        items = torch.empty(chunk_items + few_items, ITEM_WORDS, dtype=torch.int32, device=device)
        counts = torch.empty(5, dtype=torch.int32, device=device)
        arrivals = torch.empty(items.shape[0] * layer.n_kv_heads, dtype=torch.int32, device=device)
        plan_kernel[(n_rows,)](
            step.q_len, step.kv_len, step.cu_q, step.slots, items, counts, arrivals, n_rows, self.capacity(layer),
            chunk_items, self.n_sm, ROWS=padded(n_rows), WINDOW=layer.window or 0, G=group_size,
            HEADS_KV=layer.n_kv_heads, FEW=0 if self.fixed else few.tile.rows, CHUNK=config.chunk.rows,
            SPLIT=few.split, MAX_SPLITS=config.max_splits, CHUNK_SPLIT=config.chunk_split,
            CHUNK_ITEMS=config.chunk_items, WORDS=ITEM_WORDS, num_warps=4)
        return RaggedPlan(items, counts, arrivals, chunk_items, (config.chunk, few.tile), layer)

    def attend(self, layer: LayerSpec, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, step: RaggedStep,
               group: int, meta: object, sinks: torch.Tensor | None = None,
               scales: KVScales | None = None) -> torch.Tensor:
        plan = self._check(layer, meta, q, k_cache, v_cache, sinks, scales)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        # The chunks' programs start first and keep their places as long as they have work; programs of few-token rows
        # fill what is left of a multiprocessor, then all of it. A launch with nothing to do costs about 1 us.
        # A bucket whose rows all fit one tile of few tokens has no chunks.
        few_only = self._few_only(layer, step, plan)
        for kind in (1,) if few_only else (0, 1):
            self._launch(kind, few_only or kind == 0, out, layer, q, k_cache, v_cache, step, step.page_tables[group],
                         plan, sinks, scales)
        plan.attended = True
        return out

    def projected(self, layer: LayerSpec, qkv: torch.Tensor, rope: Rope, norm: HeadWeights | None,
                  k_cache: torch.Tensor, v_cache: torch.Tensor, step: RaggedStep, group: int,
                  meta: Callable[[], object], scales: KVScales | None, early: bool) -> torch.Tensor | None:
        """`attn.api.ProjectedBackend`: short steps of few rows, where nothing asks for more than plain attention."""
        plain = not self.fixed and scales is None and k_cache.dtype == qkv.dtype and qkv.dtype.itemsize == 2
        sizes = short_launch(layer, step) if plain else None
        if (sizes is None or sizes.rows * layer.n_kv_heads > len(self.arrivals)
                or sizes.partials > self.capacity(layer) or qkv.stride()[1:] != (layer.head_dim, 1)
                or k_cache.stride() != v_cache.stride() or k_cache.stride()[2:] != (layer.head_dim, 1)):
            return None
        return launch_short(sizes, layer, qkv, rope, norm, k_cache, v_cache, step, group, self.workspace, self.arrivals,
                            early, overlaps(qkv.device))

    def _few_only(self, layer: LayerSpec, step: RaggedStep, plan: RaggedPlan) -> bool:
        """Whether no row of the bucket can be a chunk."""
        n_tokens = step.ids.numel()
        most = n_tokens if step.most_tokens is None else min(n_tokens, step.most_tokens)
        return most * (layer.n_heads // layer.n_kv_heads) <= plan.tiles[1].rows and not self.fixed

    def _for_hopper(self) -> tuple[Callable[..., bool] | None, Callable[..., None] | None]:
        """`serves` and `launch_chunks` of the kernel for sm_90, where that is what this device is."""
        if self.arch != HOPPER:
            return None, None
        try:
            from stretto.attn.gluon_chunks import launch_chunks, serves  # imports gluon, which Triton may change
        except Exception as e:
            self._do_without(e)
            return None, None
        return serves, launch_chunks

    def _do_without(self, error: Exception) -> None:
        self._serves = self._launch_chunks = None
        reason = next(iter(str(error).splitlines()), "no reason given")
        lack = ("chunks go through the kernel of all devices, which takes longer: this Triton does not make the one for"
                f" sm_90 ({type(error).__name__}: {reason})")
        logger.warning("%s", lack)
        self.caps = replace(self.caps, lack=lack)

    def _on_hopper(self, layer: LayerSpec, tile: Tile, q: torch.Tensor, k_cache: torch.Tensor) -> bool:
        """Whether the chunks of this call go to the kernel for sm_90 (`gluon_chunks`)."""
        return self._serves is not None and q.dtype == k_cache.dtype and self._serves(layer, tile.rows, k_cache)

    def _check(self, layer: LayerSpec, plan: object, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
               sinks: torch.Tensor | None, scales: KVScales | None) -> RaggedPlan:
        if not isinstance(plan, RaggedPlan):
            raise TypeError(f"attend needs the RaggedPlan of metadata(), not a {type(plan).__name__}")
        if layer.has_sinks != (sinks is not None):
            raise ValueError(f"the layer has {'' if layer.has_sinks else 'no '}sinks, but the call brings"
                             f" {'none' if sinks is None else 'some'}")
        if q.dtype != self.dtype or k_cache.dtype != v_cache.dtype or (k_cache.dtype is KV_FP8) != (scales is not None):
            raise ValueError(f"this backend was made for {self.dtype}; q is {q.dtype} and the caches are"
                             f" {k_cache.dtype} and {v_cache.dtype}, {'without' if scales is None else 'with'} scales")
        for name in ("n_heads", "n_kv_heads", "head_dim", "window"):
            if getattr(layer, name) != getattr(plan.layer, name):
                raise ValueError(f"the plan was made for {name} {getattr(plan.layer, name)}, this layer has"
                                 f" {getattr(layer, name)}: layers of one group must be alike")
        if q.stride(2) != 1 or k_cache.stride(3) != 1 or k_cache.stride() != v_cache.stride():
            raise ValueError(f"strides {q.stride()}, {k_cache.stride()}, {v_cache.stride()}: elements of a head must be"
                             " contiguous, and both caches of one layout")
        return plan

    def _launch(self, kind: int, first: bool, out: torch.Tensor, layer: LayerSpec, q: torch.Tensor,
                k_cache: torch.Tensor, v_cache: torch.Tensor, step: RaggedStep, table: torch.Tensor, plan: RaggedPlan,
                sinks: torch.Tensor | None, scales: KVScales | None) -> None:
        tile, softcap = plan.tiles[kind], layer.softcap or 0.0
        in_scale = -2 * LOG2E.value * layer.scale / softcap if softcap else 0.0  # tanh(x) by exp2 of -2 x / ln 2
        out_scale = LOG2E.value * (softcap or layer.scale)
        heads = self.capacity(layer) * layer.n_heads
        partial_out, partial_lse = self.workspace[: heads * layer.head_dim], self.workspace[heads * layer.head_dim :]
        if kind == 0 and self._launch_chunks is not None and self._on_hopper(layer, tile, q, k_cache):
            try:
                self._launch_chunks(self.n_sm, layer, q, k_cache, v_cache, table, plan.items, plan.counts,
                                    plan.arrivals, out, partial_out, partial_lse, sinks, (in_scale, out_scale),
                                    ITEM_WORDS)
                return
            except Exception as e:  # it does not compile, at the start's first step as a rule; the other kernel may
                self._do_without(e)
        overlap = self.arch >= 90  # programmatic dependent launch: the second launch does not wait for the first
        attend_kernel[(tile.programs * self.n_sm,)](
            q, k_cache, v_cache, *(scales or (q, q)), table, plan.items, plan.counts, plan.arrivals, step.cu_q, out,
            partial_out, partial_lse, out if sinks is None else sinks, q.stride(0), q.stride(1), k_cache.stride(0),
            k_cache.stride(1), k_cache.stride(2), table.stride(0), in_scale, out_scale, kind * plan.offset_few,
            step.q_len.numel(), q.shape[0], int(plan.attended or not first), KIND=kind, WINDOW=layer.window or 0,
            SOFTCAP=bool(softcap), SINKS=sinks is not None, PAGE=step.page_size, G=layer.n_heads // layer.n_kv_heads,
            HEADS_KV=layer.n_kv_heads, D=layer.head_dim, BLOCK_D=max(padded(layer.head_dim), 16), M=tile.rows,
            KEYS=tile.keys, STAGES=tile.stages, WORDS=ITEM_WORDS, FIRST=first, PDL=overlap,
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
            UPCAST=INTERPRETED and q.dtype == torch.bfloat16, FP8=scales is not None, num_warps=tile.warps,
            maxnreg=tile.registers,
            **({"launch_pdl": True} if overlap else {}))
