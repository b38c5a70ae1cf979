"""Ragged paged attention in plain torch: the reference beside the kernels, and the backend of the CPU.

Rows with few queries (decoded tokens, verify windows) are gathered into one padded batch; rows with many queries (a
prompt's chunks) run one by one. Both read pages through the slot's table, so the numbers are those of any page size.

    pages of a row's slot    | p0 | p1 | p2 | p3 |        first page read: that of base - window + 1 (or 0)
    positions                0 ......... base .. kv_len   query i stands at base + i and sees <= base + i
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from stretto.attn.api import AttnCaps, LayerSpec
from stretto.ops.fp8 import KVScales, dequantize_heads
from stretto.ragged import RaggedStep

FEW_QUERIES = 16  # rows with at most this many queries share a padded batch
SIMILAR = 4  # rows share a batch while the longest reads at most this many times the shortest (or 256 cells)


@dataclass(frozen=True)
class Batch:
    """Rows that one call serves. Shapes: B rows, Q the most queries of a row, N pages, C = N * page_size cells."""

    tokens: torch.Tensor  # [B, Q] int64, index into the packed tokens (repeated where a row has fewer)
    pages: torch.Tensor  # [B, N] int64
    mask: torch.Tensor | None  # [B, 1, Q, C] bool; None: all cells of one query, or causal as said
    causal: bool  # one row from position 0 whose queries are all its cells
    cells: int  # cells of the gathered pages that may be read; the rest is cut off before attending
    skipped: int = 0  # cells of the gathered pages before those
    where: torch.Tensor | None = None  # [B, Q] bool, the real queries; None: all
    held: tuple[int, int] | None = None  # only cells of this span hold something; others count as zeros


class TorchRagged:
    """`AttentionBackend` on any device. Reads a step's lengths on the host, so it cannot be captured in a graph."""

    caps = AttnCaps(page_sizes=None, head_dims=None, window=True, sinks=True, softcap=True, empty_rows=True,
                    host_lengths="none", graphs=False,
                    kv_dtypes=frozenset({"float32", "bfloat16", "float16", "fp8_e4m3"}))

    def metadata(self, step: RaggedStep, group: int, layer: LayerSpec) -> list[Batch]:
        q_len, base = step.q_len.tolist(), step.base.tolist()
        rows = [r for r in range(len(q_len)) if q_len[r]]
        few = sorted((r for r in rows if q_len[r] <= FEW_QUERIES), key=lambda r: base[r])
        batches = [self._batch(step, group, layer.window, part, q_len, base) for part in _similar(few, base)]
        batches += [self._batch(step, group, layer.window, [r], q_len, base) for r in rows if q_len[r] > FEW_QUERIES]
        return batches

    def _batch(self, step: RaggedStep, group: int, window: int | None, rows: list[int], q_len: list[int],
               base: list[int]) -> Batch:
        device, size = step.q_len.device, step.page_size
        index = torch.tensor(rows, device=device)
        most = max(q_len[r] for r in rows)
        first = [max(0, base[r] - window + 1) // size if window else 0 for r in rows]
        span = max(-(-(base[r] + q_len[r]) // size) - f for r, f in zip(rows, first, strict=True))
        first_page = torch.tensor(first, device=device)
        table = step.page_tables[group]
        columns = (first_page[:, None] + torch.arange(span, device=device)).clamp_(max=table.shape[1] - 1)
        pages = table[step.slots[index][:, None], columns].long()
        offset = torch.arange(most, device=device)
        tokens = step.cu_q[index].long()[:, None] + torch.minimum(offset, step.q_len[index].long()[:, None] - 1)
        cells = max(base[r] + q_len[r] - f * size for r, f in zip(rows, first, strict=True))
        causal = len(rows) == 1 and base[rows[0]] == 0 and (window is None or most <= window)
        mask = None if causal else _mask(step, index, offset, first_page, cells, window)
        where = offset < step.q_len[index][:, None] if min(q_len[r] for r in rows) < most else None
        return Batch(tokens, pages, mask, causal, cells, where=where)

    def attend(self, layer: LayerSpec, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, step: RaggedStep,
               group: int, meta: object, sinks: torch.Tensor | None = None,
               scales: KVScales | None = None) -> torch.Tensor:
        assert isinstance(meta, list)
        if len(meta) == 1 and meta[0].tokens.shape == (1, len(q)):  # a lone row needs no scatter
            return _attend(layer, q[None], k_cache, v_cache, meta[0], sinks, scales)[0]
        out = torch.zeros_like(q)
        for batch in meta:
            found = _attend(layer, q[batch.tokens], k_cache, v_cache, batch, sinks, scales)
            if batch.where is None:
                out[batch.tokens.flatten()] = found.flatten(0, 1)
            else:
                out[batch.tokens[batch.where]] = found[batch.where]
        return out


def _similar(rows: list[int], base: list[int]) -> list[list[int]]:
    """Splits rows, sorted by context, so that padding to the longest of a part wastes little."""
    parts: list[list[int]] = []
    for row in rows:
        if parts and base[row] <= max(256, SIMILAR * base[parts[-1][0]]):
            parts[-1].append(row)
        else:
            parts.append([row])
    return parts


def _mask(step: RaggedStep, index: torch.Tensor, offset: torch.Tensor, first_page: torch.Tensor, cells: int,
          window: int | None) -> torch.Tensor:
    """[B, 1, Q, C] bool: the gathered cells that each query sees; a padded query sees what its row's last one does."""
    query = torch.minimum(step.base[index][:, None] + offset, step.kv_len[index][:, None] - 1)[:, :, None]
    place = (first_page[:, None] * step.page_size + torch.arange(cells, device=offset.device))[:, None, :]
    mask = place <= query
    if window is not None:
        mask &= place > query - window
    return mask[:, None]


def _gather(cache: torch.Tensor, exponents: torch.Tensor | None, batch: Batch, dtype: torch.dtype) -> torch.Tensor:
    """[B, Hkv, C, D] as numbers of `dtype`."""
    gathered = _cells(cache, batch)
    gathered = (gathered.to(dtype) if exponents is None else
                dequantize_heads(gathered, _cells(exponents, batch), dtype))
    if batch.held is not None:
        gathered[:, : batch.held[0]] = 0
        gathered[:, batch.held[1] :] = 0
    return gathered.transpose(1, 2)


def _cells(cache: torch.Tensor, batch: Batch) -> torch.Tensor:
    """[B, C, ...], a view of the gathered pages."""
    rows, pages = batch.pages.shape
    gathered = cache.index_select(0, batch.pages.flatten()).view(rows, pages * cache.shape[1], *cache.shape[2:])
    return gathered[:, batch.skipped : batch.skipped + batch.cells]


def _attend(layer: LayerSpec, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, batch: Batch,
            sinks: torch.Tensor | None, scales: KVScales | None) -> torch.Tensor:
    """q [B, Q, H, D] -> [B, Q, H, D]."""
    k_scales, v_scales = scales or (None, None)
    q, k, v = q.transpose(1, 2), _gather(k_cache, k_scales, batch, q.dtype), _gather(v_cache, v_scales, batch, q.dtype)
    if layer.softcap is None and sinks is None:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=batch.mask, is_causal=batch.causal, scale=layer.scale,
                                             enable_gqa=layer.n_heads != layer.n_kv_heads)
    else:
        out = _attend_by_hand(layer, q, k, v, batch, sinks)
    return out.transpose(1, 2)


def _attend_by_hand(layer: LayerSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch,
                    sinks: torch.Tensor | None) -> torch.Tensor:
    """Soft-capped logits (Gemma 2) and sinks (gpt-oss: one logit a head that takes probability and gives nothing)."""
    repeat = layer.n_heads // layer.n_kv_heads
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    logits = (q.float() @ k.float().transpose(2, 3)) * layer.scale
    if layer.softcap is not None:
        logits = layer.softcap * torch.tanh(logits / layer.softcap)
    mask = batch.mask
    if mask is None:
        queries, cells = logits.shape[-2:]
        mask = torch.ones(queries, cells, dtype=torch.bool, device=q.device).tril(cells - queries)
    logits = logits.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        column = sinks.float().view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, column], -1)
    weights = logits.softmax(-1)[..., : k.shape[2]]
    return (weights @ v.float()).to(q.dtype)
