"""Ragged steps of a draft stream, made on the device from the target's step. Nothing here reads a device value on the
host, except where memory is the host's and sizes may be exact.

A drafter's cell p lies at the target's page and offset of p. Two kinds of cell:

    shift 0   made from token p alone                        (a small language model)
    shift 1   made from token p and the taps of p-1          (EAGLE, MTP); there is no cell 0

With shift 1 attention starts at cell 1, and cell p is item p-1 of the stream. Attention backends know no first cell, so
they are shown the stream's items one by one: pages of one token, whose "page numbers" are the cells themselves.

    cells of a slot     p     0    1    2    3    4  ...        stream (shift 1)   item   0    1    2    3
                              -    t1   t2   t3   t4                               cell   1    2    3    4
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stretto.ops.fp8 import KVScales
from stretto.ragged import RaggedStep
from stretto.spec.context import DraftKV


@dataclass(frozen=True)
class Stream:
    """Where the draft stream of a step's rows lies. Shapes: R rows, C items."""

    slots: torch.Tensor  # [R] int64, the row's entry of `tables`
    tables: tuple[torch.Tensor, ...]  # per group [., pages or items]
    page_size: int
    shift: int
    owners: torch.Tensor  # [R] int64, the row's slot
    page_tables: tuple[torch.Tensor, ...]  # the target's
    target_page_size: int

    def take(self, rows: torch.Tensor | None) -> Stream:
        """The stream of some of the rows, [N] int64; None: of all."""
        if rows is None:
            return self
        return Stream(self.slots[rows], self.tables, self.page_size, self.shift, self.owners[rows], self.page_tables,
                      self.target_page_size)

    def cells(self, owners: torch.Tensor, positions: torch.Tensor, written: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Per group: the cell of each position (same shapes), or the null page's where it is not to be written."""
        page, offset = positions // self.target_page_size, positions % self.target_page_size
        out = []
        for table in self.page_tables:
            inside = written & (page < table.shape[1])
            number = table[owners, page.clamp(max=table.shape[1] - 1)].long()
            out.append(torch.where(inside, number * self.target_page_size + offset, 0))
        return tuple(out)


def stream_of(step: RaggedStep, shift: int, items: int) -> Stream:
    """The draft stream of the step's rows; `items`: the most that any of them will have."""
    slots = step.slots.long()
    if shift == 0:
        return Stream(slots, step.page_tables, step.page_size, 0, slots, step.page_tables, step.page_size)
    rows = torch.arange(len(slots), device=slots.device)
    if slots.is_cuda:
        from stretto.ops.triton_draft import launch_stream

        made = tuple(launch_stream(slots, table, step.page_size, shift, items) for table in step.page_tables)
        return Stream(rows, made, 1, shift, slots, step.page_tables, step.page_size)
    return stream_reference(step, shift, items)


def stream_reference(step: RaggedStep, shift: int, items: int) -> Stream:
    """`stream_of` in torch's operations, where shift is not 0."""
    slots = step.slots.long()
    rows = torch.arange(len(slots), device=slots.device)
    cell = torch.arange(shift, items + shift, device=slots.device)
    page, offset = cell // step.page_size, cell % step.page_size
    tables = []
    for table in step.page_tables:
        number = table[slots][:, page.clamp(max=table.shape[1] - 1)]
        tables.append((number * step.page_size + offset).to(torch.int32))
    return Stream(rows, tuple(tables), 1, shift, slots, step.page_tables, step.page_size)


class StreamKV:
    """A drafter's KV memory as its stream sees it: the same tensors, in pages of the stream's page size."""

    def __init__(self, kv: DraftKV, page_size: int):
        self._kv, self.groups, self.group_of = kv, tuple(kv.groups), kv.group_of
        self.k = [t.view(-1, page_size, *t.shape[2:]) for t in kv.k]
        self.v = [t.view(-1, page_size, *t.shape[2:]) for t in kv.v]
        self.scales = [None if pair is None else KVScales(*(t.view(-1, page_size, t.shape[2]) for t in pair))
                       for pair in kv.scales]
        self.write = kv.write


def scan(lengths: torch.Tensor) -> torch.Tensor:
    """[R] -> [R + 1] int32, exclusive."""
    out = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=lengths.device)
    torch.cumsum(lengths, 0, dtype=torch.int32, out=out[1:])
    return out


def spread(starts: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For each of `size` packed items: its row, its offset in the row, and whether it is no padding."""
    items = torch.arange(size, dtype=torch.int32, device=starts.device)
    rows = torch.searchsorted(starts[1:], items, right=True).clamp_(max=len(starts) - 2)
    return rows, items - starts[rows], items < starts[-1]


@dataclass(frozen=True)
class Extension:
    """The items by which a step extends the draft stream: for a row that fed positions base .. base+q-1, the cells
    base (whose taps come from the seam) .. base+q. Shapes: N items, R rows."""

    step: RaggedStep  # of the stream; `positions` count items
    rows: torch.Tensor  # [N] int64
    cell: torch.Tensor  # [N] int64: the position p of each item's cell
    last: torch.Tensor  # [R] int64: the item of each row that stands at its length: the next draft follows it
    ids: torch.Tensor  # [N] int64: the tokens at the cells
    sources: torch.Tensor  # [N] int64: the token of the step before each cell; T + row: it is of another step


def extension(step: RaggedStep, stream: Stream, length: torch.Tensor, stands: torch.Tensor, most: int,
              exact: bool, log: torch.Tensor) -> Extension:
    """`length` [R]: cells committed after the step; `stands` [R]: cells of the draft stream that stood before it, which
    are not written again; `most`: positions that the drafter knows; `log`: the slot table's. Items past `length` come
    of rejected drafts: they write nothing."""
    if not step.slots.is_cuda:
        return extension_reference(step, stream, length, stands, most, exact, log)
    from stretto.ops.triton_draft import launch_extension

    made = launch_extension(stream.owners, step.base, step.q_len, step.cu_q, len(step.ids), length, stands, log,
                            stream.page_tables, stream.target_page_size, stream.shift, most)
    zeros = torch.zeros_like(made.starts)
    ragged = RaggedStep(
        slots=stream.slots, q_len=made.count, cu_q=made.starts, base=made.base, kv_len=made.kv_len, n_out=zeros[:-1],
        cu_out=zeros, ids=made.positions, positions=made.positions, rows=made.rows, cells=made.cells,
        out_tokens=made.positions[:0], out_rows=made.positions[:0], page_tables=stream.tables,
        page_size=stream.page_size)
    return Extension(ragged, made.rows, made.cell, made.last, made.ids, made.sources)


def extension_reference(step: RaggedStep, stream: Stream, length: torch.Tensor, stands: torch.Tensor, most: int,
                        exact: bool, log: torch.Tensor) -> Extension:
    """In torch's operations. `exact`: no more items than there are."""
    fed = step.q_len > 0
    first = step.base.clamp(min=stream.shift)
    count = torch.where(fed, step.base + step.q_len + 1 - first, 0).to(torch.int32)
    starts = scan(count)
    size = int(starts[-1]) if exact else len(step.ids) + len(fed)
    row, offset, real = spread(starts, size)
    cell = torch.where(real, first[row] + offset, stream.shift).long()
    item = cell - stream.shift
    written = real & (cell >= stands[row]) & (cell <= length[row]) & (item < most)
    cells = stream.cells(torch.where(real, stream.owners[row], 0), cell, written)
    base = torch.where(fed, first - stream.shift, 0).to(torch.int32)
    ragged = _ragged(stream, count, starts, base, item.clamp(max=most - 1), row, cells)
    last = (starts[:-1] + length - first).clamp(0, max(size - 1, 0)).long()
    ids = log[stream.owners[row], cell.clamp(max=log.shape[1] - 1)].long().clamp_(min=0)
    ahead, tokens = cell - 1 - step.base[row], len(step.ids)
    sources = torch.where(ahead >= 0, step.cu_q[row] + ahead, tokens + row).clamp(max=tokens + len(fed) - 1)
    return Extension(ragged, row, cell, last, ids, sources)


def one_by_one(stream: Stream, length: torch.Tensor, count: int, most: int) -> list[RaggedStep]:
    """`count` steps of one item a row, at the cells length + 1, length + 2, ...: the drafter's own proposals. `stream`
    and `length` are of N rows. All are made at once: on a device each operation costs a launch, however small it is."""
    if not length.is_cuda:
        return one_by_one_reference(stream, length, count, most)
    from stretto.ops.triton_draft import launch_ahead

    made = launch_ahead(stream.owners, length, stream.page_tables, stream.target_page_size, stream.shift, count, most)
    zeros = torch.zeros_like(made.starts)
    return [_single(stream, made.ones, made.starts, zeros, made.rows, made.base[i], made.kv_len[i], made.positions[i],
                    tuple(c[i] for c in made.cells)) for i in range(count)]


def one_by_one_reference(stream: Stream, length: torch.Tensor, count: int, most: int) -> list[RaggedStep]:
    """In torch's operations."""
    n, device = len(length), length.device
    cell = length.long() + torch.arange(1, count + 1, device=device)[:, None]  # [count, N]
    item = cell - stream.shift
    cells = stream.cells(stream.owners, cell, item < most)
    base, positions = item.to(torch.int32), item.clamp(max=most - 1)
    kv_len, ones = base + 1, torch.ones(n, dtype=torch.int32, device=device)
    starts, rows = torch.arange(n + 1, dtype=torch.int32, device=device), torch.arange(n, device=device)
    zeros = torch.zeros_like(starts)
    return [_single(stream, ones, starts, zeros, rows, base[i], kv_len[i], positions[i], tuple(c[i] for c in cells))
            for i in range(count)]


def _single(stream: Stream, ones: torch.Tensor, starts: torch.Tensor, zeros: torch.Tensor, rows: torch.Tensor,
            base: torch.Tensor, kv_len: torch.Tensor, positions: torch.Tensor,
            cells: tuple[torch.Tensor, ...]) -> RaggedStep:
    """A step of one item a row."""
    return RaggedStep(
        slots=stream.slots, q_len=ones, cu_q=starts, base=base, kv_len=kv_len, n_out=zeros[:-1], cu_out=zeros,
        ids=positions, positions=positions, rows=rows, cells=cells, out_tokens=rows[:0], out_rows=rows[:0],
        page_tables=stream.tables, page_size=stream.page_size)


@dataclass(frozen=True)
class Blocks:
    """Blocks of masks behind what is known."""

    ids: torch.Tensor  # [N * size] int64: of each row the last known id, then masks
    causal: RaggedStep  # each item sees those before it
    whole: RaggedStep  # rows at the last cell of each block: what they see is all of it


def blocks(stream: Stream, length: torch.Tensor, log: torch.Tensor, size: int, copies: int, most: int,
           mask_id: int) -> Blocks:
    """For N rows, `size` items from `length` [N] on; `copies` rows for each that see all of its block. `most`:
    positions that the drafter knows; `log`: the slot table's."""
    if not length.is_cuda:
        return blocks_reference(stream, length, log, size, copies, most, mask_id)
    from stretto.ops.triton_draft import launch_block

    made = launch_block(stream.owners, length, log, stream.page_tables, stream.target_page_size, size, copies, most,
                        mask_id)
    zeros = torch.zeros_like(made.wide_starts if copies > 1 else made.starts)
    nothing, n = made.positions[:0], len(length)
    causal = RaggedStep(
        slots=stream.slots, q_len=made.counts, cu_q=made.starts, base=made.base, kv_len=made.kv_len, n_out=zeros[:n],
        cu_out=zeros[: n + 1], ids=made.positions, positions=made.positions, rows=made.rows, cells=made.cells,
        out_tokens=nothing, out_rows=nothing, page_tables=stream.tables, page_size=stream.page_size)
    whole = RaggedStep(
        slots=made.wide_owners, q_len=made.ones, cu_q=made.wide_starts, base=made.wide_base, kv_len=made.wide_kv_len,
        n_out=zeros[: n * copies], cu_out=zeros[: n * copies + 1], ids=made.wide_positions,
        positions=made.wide_positions, rows=made.wide_starts[:-1], cells=(), out_tokens=nothing, out_rows=nothing,
        page_tables=stream.tables, page_size=stream.page_size)
    return Blocks(made.ids, causal, whole)


def blocks_reference(stream: Stream, length: torch.Tensor, log: torch.Tensor, size: int, copies: int, most: int,
                     mask_id: int) -> Blocks:
    """In torch's operations."""
    ids = torch.full((len(length), size), mask_id, dtype=torch.int64, device=length.device)
    ids[:, 0] = log[stream.owners, length.long().clamp(max=log.shape[1] - 1)].clamp(min=0)
    return Blocks(ids.flatten(), block(stream, length, size, most), last_cell(stream, length, size, copies))


def block(stream: Stream, length: torch.Tensor, size: int, most: int) -> RaggedStep:
    """`size` items a row, at cells length .. length + size - 1, each of which sees those before it."""
    n, device = len(length), length.device
    cell = (length.long()[:, None] + torch.arange(size, device=device)).flatten()
    row = torch.arange(n, device=device).repeat_interleave(size)
    cells = stream.cells(stream.owners[row], cell, cell < most)
    counts = torch.full((n,), size, dtype=torch.int32, device=device)
    starts = torch.arange(n + 1, dtype=torch.int32, device=device) * size
    return _ragged(stream, counts, starts, length.to(torch.int32), cell.clamp(max=most - 1), row, cells)


def last_cell(stream: Stream, length: torch.Tensor, size: int, copies: int) -> RaggedStep:
    """`copies` rows of one item for each row, all at its cell length + size - 1: they see the whole block."""
    n, device = len(length) * copies, length.device
    wide = Stream(stream.slots.repeat_interleave(copies), stream.tables, stream.page_size, stream.shift,
                  stream.owners.repeat_interleave(copies), stream.page_tables, stream.target_page_size)
    at = length.repeat_interleave(copies) + (size - 1)
    ones = torch.ones(n, dtype=torch.int32, device=device)
    starts = torch.arange(n + 1, dtype=torch.int32, device=device)
    return _ragged(wide, ones, starts, at.to(torch.int32), at.long(), torch.arange(n, device=device), ())


def _ragged(stream: Stream, count: torch.Tensor, starts: torch.Tensor, base: torch.Tensor, positions: torch.Tensor,
            rows: torch.Tensor, cells: tuple[torch.Tensor, ...]) -> RaggedStep:
    nothing = positions[:0]
    return RaggedStep(
        slots=stream.slots, q_len=count, cu_q=starts, base=base, kv_len=base + count, n_out=torch.zeros_like(count),
        cu_out=torch.zeros_like(starts), ids=positions, positions=positions, rows=rows, cells=cells,
        out_tokens=nothing, out_rows=nothing, page_tables=stream.tables, page_size=stream.page_size)
