"""Ragged paged attention in Triton: one launch family for chunk, verify and decode rows, lengths read on the device.

Grids depend on the sizes of the step's tensors only, so that a captured CUDA graph serves every step of its bucket.
The kernels, and how work is cut into items, are in `triton_kernels`; tile shapes in `tiles`; docs/kernels.md draws it.

Rounding does not depend on the batch: where the KV cells of a row are cut is a function of that row alone. The one
exception is a step whose partial sums outgrow the workspace; its splits grow, so its results differ by rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton.runtime.interpreter import InterpretedFunction

from stretto.attn.api import AttnCaps, LayerSpec
from stretto.attn.tiles import INTERPRETER, KernelConfig, kernel_config, padded
from stretto.attn.triton_kernels import ITEM_WORDS, LOG2E, attend_kernel, join_kernel, plan_kernel
from stretto.ragged import RaggedStep

INTERPRETED = isinstance(attend_kernel, InterpretedFunction)  # TRITON_INTERPRET=1: the kernels run on the CPU
MAX_HEAD_DIM = 256
_JOIN_SPLITS = 8  # partial sums that the join reads at once


@dataclass(frozen=True)
class RaggedPlan:
    """The work of one step and group, on the device. Valid until the next step; layers use it one after another."""

    items: torch.Tensor  # [items, ITEM_WORDS] int32: small, medium, large, each from a fixed offset
    counts: torch.Tensor  # [8] int32: items of each kind; claims of the launch that runs
    row_splits: torch.Tensor  # [R] int32
    row_partial: torch.Tensor  # [R] int32, first token-split of the row in the workspace
    offset_medium: int
    offset_large: int
    config: KernelConfig


def _capacities(n_rows: int, n_tokens: int, layer: LayerSpec, config: KernelConfig) -> tuple[int, int]:
    """Most items of a row kind that fits one tile, and most items of large tiles, of any step of this bucket."""
    tile_tokens = config.large.rows // (layer.n_heads // layer.n_kv_heads)
    few = n_rows * (config.max_splits + 1)  # one more where a window starts inside a split
    large_rows = min(n_rows, n_tokens)
    tiles = n_tokens // tile_tokens + large_rows
    return few, large_rows * (-(-config.large_items // layer.n_kv_heads)) + 3 * tiles


class TritonRaggedBackend:
    """AttentionBackend. The workspace of partial sums is shared by every step: run one step at a time.

    `config` overrides the tile table; `workspace_bytes` bounds the partial sums of one step."""

    caps = AttnCaps(page_sizes=None, head_dims=frozenset(range(1, MAX_HEAD_DIM + 1)), window=True, sinks=True,
                    softcap=True, empty_rows=True, host_lengths="none", graphs=True,
                    devices=frozenset({"cpu", "cuda"} if INTERPRETED else {"cuda"}))

    def __init__(self, device: torch.device, dtype: torch.dtype, config: KernelConfig | None = None,
                 workspace_bytes: int = 128 << 20):
        if device.type == "cpu" and not INTERPRETED:
            raise ValueError("the Triton attention backend runs on CUDA devices; on the CPU choose the torch backend,"
                             " or set TRITON_INTERPRET=1 to test the kernels there")
        self.dtype, self.config = dtype, config
        self.arch, self.n_sm = 80, 2
        if device.type == "cuda":
            major, minor = torch.cuda.get_device_capability(device)
            self.arch = major * 10 + minor
            self.n_sm = torch.cuda.get_device_properties(device).multi_processor_count
        self.workspace = torch.empty(workspace_bytes // 4, dtype=torch.float32, device=device)

    def config_for(self, layer: LayerSpec) -> KernelConfig:
        """The override, the interpreter's small tiles, or the table's entry for this layer."""
        if self.config is not None:
            return self.config
        return INTERPRETER if INTERPRETED else kernel_config(layer.head_dim, self.dtype.itemsize, self.arch)

    def capacity(self, layer: LayerSpec) -> int:
        """Token-splits whose partial sums (all heads, float32, with their log-sum) fit the workspace."""
        return self.workspace.numel() // (layer.n_heads * (layer.head_dim + 1))

    def metadata(self, step: RaggedStep, group: int, layer: LayerSpec) -> RaggedPlan:
        """Builds the list of work items on the device; one small launch."""
        config, n_rows, device = self.config_for(layer), step.q_len.numel(), step.q_len.device
        few, large = _capacities(n_rows, step.ids.numel(), layer, config)
        items = torch.empty(2 * few + large, ITEM_WORDS, dtype=torch.int32, device=device)
        counts = torch.empty(8, dtype=torch.int32, device=device)
        row_splits = torch.empty(n_rows, dtype=torch.int32, device=device)
        row_partial = torch.empty(n_rows, dtype=torch.int32, device=device)
        plan_kernel[(n_rows,)](
            step.q_len, step.kv_len, step.cu_q, step.slots, items, counts, row_splits, row_partial, n_rows,
            self.capacity(layer), few, 2 * few, ROWS=padded(n_rows), WINDOW=layer.window or 0,
            G=layer.n_heads // layer.n_kv_heads, HEADS_KV=layer.n_kv_heads, SMALL=config.small.rows,
            MEDIUM=config.medium.rows, LARGE=config.large.rows, SPLIT=config.split_keys,
            MAX_SPLITS=config.max_splits, LARGE_SPLIT=config.large_split_keys, LARGE_ITEMS=config.large_items,
            WORDS=ITEM_WORDS, num_warps=4)
        return RaggedPlan(items, counts, row_splits, row_partial, few, 2 * few, config)

    def attend(self, layer: LayerSpec, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, step: RaggedStep,
               group: int, meta: object, sinks: torch.Tensor | None = None) -> torch.Tensor:
        if not isinstance(meta, RaggedPlan):
            raise TypeError(f"attend needs the RaggedPlan of metadata(), not a {type(meta).__name__}")
        if q.dtype != self.dtype or k_cache.dtype != self.dtype:
            raise ValueError(f"this backend was made for {self.dtype}; q is {q.dtype} and the cache {k_cache.dtype}")
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self.launch_attend(out, layer, q, k_cache, v_cache, step, group, meta, sinks)
        self.launch_join(out, layer, step, meta, sinks)
        return out

    def launch_attend(self, out: torch.Tensor, layer: LayerSpec, q: torch.Tensor, k_cache: torch.Tensor,
                      v_cache: torch.Tensor, step: RaggedStep, group: int, meta: RaggedPlan,
                      sinks: torch.Tensor | None) -> None:
        """Rows with one split are written to `out`, the others' partial sums to the workspace."""
        config, tables = meta.config, step.page_tables[group]
        small, medium, large = config.small, config.medium, config.large
        softcap = layer.softcap or 0.0
        in_scale = -2 * LOG2E.value * layer.scale / softcap if softcap else 0.0
        out_scale = LOG2E.value * (softcap or layer.scale)
        partial_out, partial_lse = self._partials(layer)
        def launch(programs, large_first, **options):
            programs = min(programs, meta.items.shape[0] * layer.n_kv_heads)
            attend_kernel[(programs,)](
                q, k_cache, v_cache, tables, meta.items, meta.counts, out, partial_out, partial_lse,
                out if sinks is None else sinks, q.stride(0), q.stride(1), k_cache.stride(0), k_cache.stride(1),
                k_cache.stride(2), tables.stride(0), in_scale, out_scale, meta.offset_medium, meta.offset_large,
                min(programs, large_first), WINDOW=layer.window or 0, SOFTCAP=bool(softcap), SINKS=sinks is not None,
                PAGE=step.page_size, G=layer.n_heads // layer.n_kv_heads, HEADS_KV=layer.n_kv_heads, D=layer.head_dim,
                BLOCK_D=max(padded(layer.head_dim), 16), M0=small.rows, KEYS0=small.keys, STAGES0=small.stages,
                M1=medium.rows, KEYS1=medium.keys, STAGES1=medium.stages, M2=large.rows, KEYS2=large.keys,
                STAGES2=large.stages, DYNAMIC=config.dynamic, TRANSPOSE=config.transpose, WORDS=ITEM_WORDS,
                PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
                UPCAST=INTERPRETED and q.dtype == torch.bfloat16, **options)

        if not config.large_warps:
            launch(config.programs_per_sm * self.n_sm, config.large_programs * self.n_sm, FIRST=0, LAST=2,
                   PDL_FIRST=False, PDL_LAST=False, num_warps=config.warps, maxnreg=config.max_registers)
        else:
            pdl = self.arch >= 90
            extra = {"launch_pdl": True} if pdl else {}
            launch(config.large_programs * self.n_sm, 0, FIRST=2, LAST=2, PDL_FIRST=pdl, PDL_LAST=False,
                   num_warps=config.large_warps, maxnreg=config.large_registers)
            launch(config.programs_per_sm * self.n_sm, 0, FIRST=0, LAST=1, PDL_FIRST=False, PDL_LAST=pdl,
                   num_warps=config.warps, maxnreg=config.max_registers, **extra)

    def launch_join(self, out: torch.Tensor, layer: LayerSpec, step: RaggedStep, meta: RaggedPlan,
                    sinks: torch.Tensor | None) -> None:
        """Joins partial sums into `out`, clears the padding's tokens, and resets the claims."""
        group_size = layer.n_heads // layer.n_kv_heads
        partial_out, partial_lse = self._partials(layer)
        join_kernel[(out.shape[0], layer.n_kv_heads)](
            partial_out, partial_lse, out, out if sinks is None else sinks, step.rows, step.q_len, step.cu_q,
            meta.row_splits, meta.row_partial, meta.counts, step.q_len.numel(), SINKS=sinks is not None, G=group_size,
            BLOCK_G=padded(group_size), HEADS_KV=layer.n_kv_heads, D=layer.head_dim,
            BLOCK_D=padded(layer.head_dim), SPLITS=_JOIN_SPLITS, num_warps=2)

    def _partials(self, layer: LayerSpec) -> tuple[torch.Tensor, torch.Tensor]:
        """The workspace as weighted values [capacity * H * D] and log-sums [capacity * H]."""
        heads = self.capacity(layer) * layer.n_heads
        return self.workspace[: heads * layer.head_dim], self.workspace[heads * layer.head_dim :]
