"""Steps with exact lengths, and dense attention over gathered cells in float64: what every backend must return."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stretto.attn.api import LayerSpec
from stretto.ragged import RaggedStep


@dataclass
class Case:
    step: RaggedStep
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    sinks: torch.Tensor | None
    layer: LayerSpec


def scan(lengths: torch.Tensor) -> torch.Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()


def make_step(q_lens, kv_lens, tables, slots, page_size, pad_rows=0, pad_tokens=0, device="cpu") -> RaggedStep:
    """A step of rows with q_lens tokens that read kv_lens cells; the bucket leaves pad_rows and pad_tokens over."""
    q = torch.tensor([*q_lens, *[0] * pad_rows], dtype=torch.int32)
    kv = torch.tensor([*kv_lens, *[0] * pad_rows], dtype=torch.int32)
    base = kv - q
    n_tokens = int(q.sum()) + pad_tokens
    rows = torch.zeros(n_tokens, dtype=torch.int64)
    positions = torch.zeros(n_tokens, dtype=torch.int64)
    cells = torch.zeros(n_tokens, dtype=torch.int64)
    slot = torch.tensor([*slots, *[0] * pad_rows], dtype=torch.int32)
    cu_q = scan(q)
    for r, n in enumerate(q_lens):
        at = torch.arange(int(base[r]), int(base[r]) + n)
        span = slice(int(cu_q[r]), int(cu_q[r]) + n)
        rows[span], positions[span] = r, at
        cells[span] = tables[slot[r].item()].long()[at // page_size] * page_size + at % page_size
    out = torch.zeros_like(q)
    empty = torch.zeros(0, dtype=torch.int64, device=device)
    return RaggedStep(slots=slot.to(device), q_len=q.to(device), cu_q=cu_q.to(device), base=base.to(device),
                      kv_len=kv.to(device), n_out=out.to(device), cu_out=scan(out).to(device),
                      ids=torch.zeros(n_tokens, dtype=torch.int64, device=device), positions=positions.to(device),
                      rows=rows.to(device), cells=(cells.to(device),), out_tokens=empty, out_rows=empty,
                      page_tables=(tables.to(device),), page_size=page_size)


def make_case(layer: LayerSpec, q_lens, kv_lens, page_size=16, dtype=torch.float32, seed=0, pad_rows=0, pad_tokens=0,
              device="cpu") -> Case:
    """Random pages in random order. Every cell that no query may read, the null page included, holds NaN; so do the
    queries of padding tokens."""
    g = torch.Generator().manual_seed(seed)
    n_rows = len(q_lens)
    slots = torch.randperm(n_rows + 2, generator=g)[:n_rows].tolist()
    pages = [-(-n // page_size) for n in kv_lens]
    order = (torch.randperm(sum(pages) + 3, generator=g) + 1).int()
    tables = torch.zeros(n_rows + 2, max([*pages, 1]) + 2, dtype=torch.int32)
    shape = (len(order) + 1, page_size, layer.n_kv_heads, layer.head_dim)
    k_cache, v_cache = torch.full(shape, torch.nan, dtype=dtype), torch.full(shape, torch.nan, dtype=dtype)
    used = 0
    for row, slot in enumerate(slots):
        tables[slot, : pages[row]] = order[used : used + pages[row]]
        used += pages[row]
        low = 0 if layer.window is None else max(0, kv_lens[row] - q_lens[row] - layer.window + 1)
        t = torch.arange(low, kv_lens[row]) if q_lens[row] else torch.arange(0)
        for cache in (k_cache, v_cache):
            values = torch.randn(len(t), layer.n_kv_heads, layer.head_dim, generator=g)
            cache[tables[slot].long()[t // page_size], t % page_size] = values.to(dtype)
    step = make_step(q_lens, kv_lens, tables, slots, page_size, pad_rows, pad_tokens, device)
    q = torch.full((sum(q_lens) + pad_tokens, layer.n_heads, layer.head_dim), torch.nan, dtype=dtype)
    q[: sum(q_lens)] = torch.randn(sum(q_lens), layer.n_heads, layer.head_dim, generator=g).to(dtype)
    sinks = torch.randn(layer.n_heads, generator=g) if layer.has_sinks else None
    return Case(step, q.to(device), k_cache.to(device), v_cache.to(device),
                None if sinks is None else sinks.to(device), layer)


def dense_row(layer: LayerSpec, q, k, v, base: int, sinks=None) -> torch.Tensor:
    """q [n, H, D] at positions base..; k and v [kv, Hkv, D]; returns [n, H, D] in float64."""
    group = layer.n_heads // layer.n_kv_heads
    k, v = k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    logits = torch.einsum("qhd,khd->hqk", q.double(), torch.nan_to_num(k)) * layer.scale
    if layer.softcap is not None:
        logits = layer.softcap * torch.tanh(logits / layer.softcap)
    pos = base + torch.arange(q.shape[0], device=q.device)[:, None]
    t = torch.arange(k.shape[0], device=q.device)[None, :]
    seen = t <= pos
    if layer.window is not None:
        seen &= t > pos - layer.window
    logits = logits.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        column = sinks.double()[:, None, None].expand(-1, q.shape[0], 1)
        logits = torch.cat([logits, column], 2)
    weights = logits.softmax(-1)[:, :, : k.shape[0]]
    return torch.einsum("hqk,khd->qhd", weights, torch.nan_to_num(v))


def expected(case: Case) -> torch.Tensor:
    """[sum of q, H, D], float64."""
    step, parts = case.step, []
    for r in range(step.q_len.numel()):
        n, kv = int(step.q_len[r]), int(step.kv_len[r])
        if n == 0:
            continue
        t = torch.arange(kv, device=case.q.device)
        page = step.page_tables[0][step.slots[r].long()].long()[t // step.page_size]
        k, v = case.k_cache[page, t % step.page_size], case.v_cache[page, t % step.page_size]
        start = int(step.cu_q[r])
        parts.append(dense_row(case.layer, case.q[start : start + n], k, v, kv - n, case.sinks))
    return torch.cat(parts)


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    return float((value.double() - reference).norm() / reference.norm())
