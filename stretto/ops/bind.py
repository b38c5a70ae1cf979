"""Late binding: the one formula that turns rows (slot, epoch, q_cap) into a ragged step, from the slot table alone.

    base  = len[s]            pend = known[s] - base
    q     = 0 if done or of another epoch else min(q_cap, pend + ndraft[s], limit[s] - 1 - base)
    n_out = max(0, base + q - known[s] + 1)      0 where nothing is sampled (score, embed)

A step may be smaller than its rows could make it, where the host counts on fewer drafts than the caps allow. Then the
drafts that do not fit wait, those of later rows first; what is pending fits always:

    needed = min(q, pend)     drafts = q - needed        kept = what of the drafts fits behind those of earlier rows
"""

from __future__ import annotations

import torch

from stretto.ops.native import step as native
from stretto.ragged import RaggedStep
from stretto.wire import Goal, Int


def row_lengths(rows: torch.Tensor, ints: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """rows [R, 3] int32, ints the table's columns. Returns slots int64, base, q, n_out int32, each [R]."""
    slots = rows[:, 0].long()
    column = ints[:, slots]
    base, known = column[Int.LEN], column[Int.KNOWN]
    live = (column[Int.EPOCH] == rows[:, 1]) & (column[Int.DONE] == 0)
    q = torch.minimum(rows[:, 2], known - base + column[Int.NDRAFT])
    q = torch.minimum(q, column[Int.LIMIT] - 1 - base)
    q = torch.where(live, q, 0).clamp_(min=0)
    n_out = (base + q - known + 1).clamp_(min=0)
    n_out = torch.where(live & (column[Int.GOAL] == Goal.GENERATE), n_out, 0)
    return slots, base, q, n_out


def fit(q: torch.Tensor, n_out: torch.Tensor, pending: torch.Tensor, n_tokens: int,
        n_logits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """q, n_out, pending [R] (ids that are known and not fed) -> q and n_out in a step of such sizes."""
    needed = torch.minimum(q, pending.clamp(min=0))
    drafts = q - needed
    room = torch.minimum(n_tokens - needed.sum(), n_logits - (n_out > 0).sum())
    kept = torch.minimum((room - (drafts.cumsum(0) - drafts)).clamp_(min=0), drafts).to(torch.int32)
    return needed + kept, (n_out - drafts + kept).clamp_(min=0)


def _scan(lengths: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=lengths.device)
    torch.cumsum(lengths, 0, dtype=torch.int32, out=out[1:])
    return out


def _spread(scan: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For each of `size` items of a packed sequence: its row, its offset in the row, and whether it is no padding."""
    items = torch.arange(size, dtype=torch.int32, device=scan.device)
    rows = torch.searchsorted(scan[1:], items, right=True).clamp_(max=len(scan) - 2)
    return rows, items - scan[rows], items < scan[-1]


def bind(rows: torch.Tensor, ints: torch.Tensor, log: torch.Tensor, page_tables: tuple[torch.Tensor, ...],
         page_size: int, n_tokens: int | None = None, n_logits: int | None = None) -> RaggedStep:
    """rows [R, 3]; the table's `ints` [N_INT, S], `log` [S, C], page tables [S, pages] a group.

    `n_tokens` and `n_logits` are the sizes of the bucket. None: as many as there are, which reads two lengths on the
    host and so is for devices whose memory is the host's. On CUDA these are two launches, on a CPU two calls where
    there are native kernels."""
    if rows.is_cuda and n_tokens is not None and n_logits is not None:
        from stretto.ops.triton_step import launch_bind

        return launch_bind(rows, ints, log, page_tables, page_size, n_tokens, n_logits)
    if n_tokens is None and n_logits is None and page_tables and native.takes(ints, log):
        return native.launch_bind(rows, ints, log, page_tables, page_size)
    return bind_reference(rows, ints, log, page_tables, page_size, n_tokens, n_logits)


def bind_reference(rows: torch.Tensor, ints: torch.Tensor, log: torch.Tensor, page_tables: tuple[torch.Tensor, ...],
                   page_size: int, n_tokens: int | None = None, n_logits: int | None = None) -> RaggedStep:
    """`bind` in torch's operations."""
    slots, base, q, n_out = row_lengths(rows, ints)
    if n_tokens is not None and n_logits is not None:
        q, n_out = fit(q, n_out, ints[Int.KNOWN, slots] - base, n_tokens, n_logits)
    cu_q, cu_out = _scan(q), _scan(n_out)
    n_tokens = int(cu_q[-1]) if n_tokens is None else n_tokens
    n_logits = int(cu_out[-1]) if n_logits is None else n_logits
    row, offset, real = _spread(cu_q, n_tokens)
    positions = torch.where(real, base[row] + offset, 0).long()
    of_slot = torch.where(real, slots[row], 0)
    ids = torch.where(real, log[of_slot, positions], 0).long()
    page, cell = positions // page_size, positions % page_size
    cells = tuple(torch.where(real, table[of_slot, page].long() * page_size + cell, 0) for table in page_tables)
    out_row, out_offset, out_real = _spread(cu_out, n_logits)
    out_token = cu_q[out_row] + q[out_row] - n_out[out_row] + out_offset
    return RaggedStep(slots=slots, q_len=q, cu_q=cu_q, base=base, kv_len=base + q, n_out=n_out, cu_out=cu_out, ids=ids,
                      positions=positions, rows=row, cells=cells, out_tokens=torch.where(out_real, out_token, 0).long(),
                      out_rows=out_row, page_tables=page_tables, page_size=page_size)
