"""The Triton kernels of a drafter's bookkeeping: where its stream lies, what a step adds to it, what seams keep, and
the write of what is offered. References: `spec/steps.py`, `device/seams.py`, `device/slots.py`. Imported only where
they are going to run.

A drafter's pass over a few tokens is shorter than its launches, so each of these is one launch for what takes torch ten
to fifty.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from stretto.ops.launch import dependent, overlaps
from stretto.ops.triton_launch import begin
from stretto.wire import Int

KNOWN, LIMIT, DONE = tl.constexpr(int(Int.KNOWN)), tl.constexpr(int(Int.LIMIT)), tl.constexpr(int(Int.DONE))
NDRAFT, SPECULATION = tl.constexpr(int(Int.NDRAFT)), tl.constexpr(int(Int.SPECULATION))
ITEMS = 128  # of one program
ENTRIES = 1024  # of a table that one program writes


# ------------------------------------------------------------------------------------------------------------ offers
@triton.jit(do_not_specialize=["n_slots", "places"])
def offer_kernel(slots, n_out, ids, offered, ints, log, widths, n_slots, log_stride, ids_stride, places,
                 WIDTH: tl.constexpr, PDL: tl.constexpr):
    """`SlotTable.offer`, one program a row."""
    row = tl.program_id(0)
    o = tl.arange(0, WIDTH)
    begin(PDL)
    slot = tl.load(slots + row).to(tl.int64)
    column = ints + slot
    known = tl.load(column + KNOWN * n_slots)
    room = tl.minimum(tl.load(column + LIMIT * n_slots) - 1 - known, tl.load(column + SPECULATION * n_slots))
    may = (tl.load(n_out + row) > 0) & (tl.load(column + DONE * n_slots) == 0)
    width = tl.where(may, tl.minimum(tl.load(offered + row).to(tl.int32), tl.maximum(room, 0)), 0)
    mine = (o < width) & (o < places)
    draft = tl.load(ids + row * ids_stride + o, mask=mine, other=0)
    tl.store(log + slot * log_stride + known + o, draft.to(tl.int32), mask=mine)
    tl.store(column + NDRAFT * n_slots, width, mask=may)
    tl.store(widths + row, width)


def launch_offer(slots: torch.Tensor, n_out: torch.Tensor, ids: torch.Tensor, offered: torch.Tensor,
                 ints: torch.Tensor, log: torch.Tensor) -> torch.Tensor:
    """As `SlotTable.offer`: slots, n_out and offered [R], ids [R, K]. Returns widths, [R] int32."""
    widths = torch.empty(len(slots), dtype=torch.int32, device=log.device)
    if len(slots):
        ids = ids if ids.stride(1) == 1 else ids.contiguous()
        offer_kernel[(len(slots),)](
            slots, n_out, ids, offered, ints, log, widths, ints.stride(0), log.stride(0), ids.stride(0), ids.shape[1],
            WIDTH=triton.next_power_of_2(max(ids.shape[1], 1)), PDL=overlaps(log.device), num_warps=1,
            **dependent(log.device))
    return widths


# ------------------------------------------------------------------------------------------------------------- seams
@triton.jit(do_not_specialize=["n_rows", "n_tokens"])
def seam_kernel(taps, of_slot, of_page, slots, cu_q, base, q_len, length, positions, cells, n_rows, n_tokens,
                taps_stride, width, PAGE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """`Seams.record` of one tap: the first `n_tokens` programs have a token each, the others a row each."""
    program = tl.program_id(0)
    e = tl.arange(0, BLOCK)
    begin(PDL)
    if program < n_tokens:
        at_end = (program < tl.load(cu_q + n_rows)) & (tl.load(positions + program) % PAGE == PAGE - 1)
        if at_end:
            page = tl.load(cells + program) // PAGE
            values = tl.load(taps + program.to(tl.int64) * taps_stride + e, mask=e < width)
            tl.store(of_page + page * width + e, values, mask=e < width)
    else:
        row = program - n_tokens
        start, new = tl.load(base + row), tl.load(length + row)
        if (tl.load(q_len + row) > 0) & (new > start):
            token = tl.minimum(tl.load(cu_q + row) + new - 1 - start, n_tokens - 1)
            values = tl.load(taps + token.to(tl.int64) * taps_stride + e, mask=e < width)
            tl.store(of_slot + tl.load(slots + row).to(tl.int64) * width + e, values, mask=e < width)


def launch_seam(taps: torch.Tensor, of_slot: torch.Tensor, of_page: torch.Tensor, slots: torch.Tensor,
                cu_q: torch.Tensor, base: torch.Tensor, q_len: torch.Tensor, length: torch.Tensor,
                positions: torch.Tensor, cells: torch.Tensor, page_size: int) -> None:
    """taps [T, E]; of_slot [S, E] and of_page [pages, E] are written; the others as in a RaggedStep, length [R]."""
    n, tokens, width = len(slots), len(positions), taps.shape[1]
    if tokens:
        seam_kernel[(tokens + n,)](
            taps, of_slot, of_page, slots, cu_q, base, q_len, length, positions, cells, n, tokens, taps.stride(0),
            width, PAGE=page_size, BLOCK=triton.next_power_of_2(width), PDL=overlaps(taps.device), num_warps=4,
            **dependent(taps.device))


# ------------------------------------------------------------------------------------------------------------ streams
@triton.jit(do_not_specialize=["items", "pages"])
def stream_kernel(slots, table, out, table_stride, items, pages, SHIFT: tl.constexpr, PAGE: tl.constexpr,
                  ENTRIES: tl.constexpr, PDL: tl.constexpr):
    """The cells of a row's items, [R, items] int32: see `stream_of`."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * ENTRIES + tl.arange(0, ENTRIES)
    cell = i + SHIFT
    begin(PDL)
    line = table + tl.load(slots + row).to(tl.int64) * table_stride
    number = tl.load(line + tl.minimum(cell // PAGE, pages - 1), mask=i < items, other=0)
    tl.store(out + row * items + i, number * PAGE + cell % PAGE, mask=i < items)


def launch_stream(slots: torch.Tensor, table: torch.Tensor, page_size: int, shift: int, items: int) -> torch.Tensor:
    """table [S, pages] -> [R, items] int32: cell shift, shift + 1, ... of each row's slot."""
    out = torch.empty(len(slots), items, dtype=torch.int32, device=table.device)
    if out.numel():
        stream_kernel[(len(slots), triton.cdiv(items, ENTRIES))](
            slots, table, out, table.stride(0), items, table.shape[1], SHIFT=shift, PAGE=page_size, ENTRIES=ENTRIES,
            PDL=overlaps(table.device), num_warps=4, **dependent(table.device))
    return out


@triton.jit
def _cell_of(table, slot, cell, written, table_stride, pages, PAGE: tl.constexpr):
    """Where the cell of a position lies, 0 where it is not written. int64."""
    page = cell // PAGE
    inside = written & (page < pages)
    number = tl.load(table + slot.to(tl.int64) * table_stride + page, mask=inside, other=0)
    return tl.where(inside, number.to(tl.int64) * PAGE + cell % PAGE, 0)


@dataclass(frozen=True)
class Extended:
    """Of an extension's R rows and N items: see `spec.steps.Extension`."""

    count: torch.Tensor  # [R] int32
    starts: torch.Tensor  # [R + 1] int32
    base: torch.Tensor  # [R] int32
    kv_len: torch.Tensor  # [R] int32
    last: torch.Tensor  # [R] int64
    rows: torch.Tensor  # [N] int64
    cell: torch.Tensor  # [N] int64
    positions: torch.Tensor  # [N] int64
    ids: torch.Tensor  # [N] int64
    sources: torch.Tensor  # [N] int64
    cells: tuple[torch.Tensor, ...]  # a group: [N] int64


@triton.jit(do_not_specialize=["n_rows", "size"])
def extension_rows_kernel(base, q_len, length, count, starts, base_out, kv_len, last, n_rows, size,
                          SHIFT: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr):
    """What all rows of an extension come to, in one program."""
    r = tl.arange(0, ROWS)
    ok = r < n_rows
    begin(PDL)
    start, q = tl.load(base + r, mask=ok, other=0), tl.load(q_len + r, mask=ok, other=0)
    first = tl.maximum(start, SHIFT)
    n = tl.where(q > 0, start + q + 1 - first, 0)
    at = tl.cumsum(n, 0) - n
    item = tl.where(q > 0, first - SHIFT, 0)
    stands = at + tl.load(length + r, mask=ok, other=0) - first
    tl.store(count + r, n, mask=ok)
    tl.store(starts + r, at, mask=ok)
    tl.store(starts + n_rows, tl.sum(n, 0))
    tl.store(base_out + r, item, mask=ok)
    tl.store(kv_len + r, item + n, mask=ok)
    tl.store(last + r, tl.minimum(tl.maximum(stands, 0), tl.maximum(size - 1, 0)).to(tl.int64), mask=ok)


@triton.jit(do_not_specialize=["n_rows", "size", "n_tokens", "most", "pages", "context"])
def extension_items_kernel(slots, base, cu_q, length, stands, starts, log, table, rows_out, cell_out, positions,
                           ids, sources, cells, n_rows, size, n_tokens, most, log_stride, table_stride, pages, context,
                           SHIFT: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr, ITEMS: tl.constexpr,
                           PDL: tl.constexpr):
    """The items of an extension: see `extension`."""
    i = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    r = tl.arange(0, ROWS)
    begin(PDL)
    ends = tl.load(starts + 1 + r, mask=r < n_rows, other=2147483647)
    row = tl.minimum(tl.sum((ends[None, :] <= i[:, None]).to(tl.int32), 1), n_rows - 1)
    start = tl.load(base + row)
    real = i < tl.load(starts + n_rows)
    cell = tl.where(real, tl.maximum(start, SHIFT) + i - tl.load(starts + row), SHIFT)
    item = cell - SHIFT
    slot = tl.load(slots + row).to(tl.int64)
    written = real & (cell >= tl.load(stands + row)) & (cell <= tl.load(length + row)) & (item < most)
    ahead = cell - 1 - start
    source = tl.where(ahead >= 0, tl.load(cu_q + row) + ahead, n_tokens + row)
    token = tl.load(log + slot * log_stride + tl.minimum(cell, context - 1))
    ok = i < size
    tl.store(rows_out + i, row.to(tl.int64), mask=ok)
    tl.store(cell_out + i, cell.to(tl.int64), mask=ok)
    tl.store(positions + i, tl.minimum(item, most - 1).to(tl.int64), mask=ok)
    tl.store(ids + i, tl.maximum(token, 0).to(tl.int64), mask=ok)
    tl.store(sources + i, tl.minimum(source, n_tokens + n_rows - 1).to(tl.int64), mask=ok)
    tl.store(cells + i, _cell_of(table, slot, cell, written, table_stride, pages, PAGE), mask=ok)


def launch_extension(slots: torch.Tensor, base: torch.Tensor, q_len: torch.Tensor, cu_q: torch.Tensor, n_tokens: int,
                     length: torch.Tensor, stands: torch.Tensor, log: torch.Tensor, tables: tuple[torch.Tensor, ...],
                     page_size: int, shift: int, most: int) -> Extended:
    """Of a step of R rows and `n_tokens` tokens; at most n_tokens + R items. slots [R] int64; base, q_len, length and
    stands [R] int32; tables: a group [S, pages] int32."""
    n, size, device = len(slots), n_tokens + len(slots), log.device
    rows = triton.next_power_of_2(max(n, 1))
    count, base_out, kv_len = torch.empty(3, n, dtype=torch.int32, device=device).unbind(0)
    starts = torch.empty(n + 1, dtype=torch.int32, device=device)
    row, cell, positions, ids, sources = torch.empty(5, size, dtype=torch.int64, device=device).unbind(0)
    made = Extended(count, starts, base_out, kv_len, torch.empty(n, dtype=torch.int64, device=device), row, cell,
                    positions, ids, sources,
                    tuple(torch.empty(len(tables), size, dtype=torch.int64, device=device).unbind(0)))
    pdl, options = overlaps(device), dependent(device)
    extension_rows_kernel[(1,)](base, q_len, length, count, starts, base_out, kv_len, made.last, n, size, SHIFT=shift,
                                ROWS=rows, PDL=pdl, num_warps=4, **options)
    for table, cells in zip(tables, made.cells, strict=True):
        extension_items_kernel[(triton.cdiv(size, ITEMS),)](
            slots, base, cu_q, length, stands, starts, log, table, made.rows, made.cell, made.positions, made.ids,
            made.sources, cells, n, size, n_tokens, most, log.stride(0), table.stride(0), table.shape[1], log.shape[1],
            SHIFT=shift, PAGE=page_size, ROWS=rows, ITEMS=ITEMS, PDL=pdl, num_warps=4, **options)
    return made


@triton.jit(do_not_specialize=["n", "count", "most", "pages"])
def ahead_kernel(owners, length, table, base, kv_len, positions, cells, ones, starts, rows, n, count, most,
                 table_stride, pages, SHIFT: tl.constexpr, PAGE: tl.constexpr, ITEMS: tl.constexpr, PDL: tl.constexpr):
    """The steps of `one_by_one`: item j of them is step j // n of row j % n. The first n + 1 items also write what all
    steps have in common."""
    j = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    row, step = j % n, j // n
    ok = j < n * count
    begin(PDL)
    cell = tl.load(length + row, mask=ok, other=0) + 1 + step
    item = cell - SHIFT
    owner = tl.load(owners + row, mask=ok, other=0).to(tl.int64)
    tl.store(base + j, item, mask=ok)
    tl.store(kv_len + j, item + 1, mask=ok)
    tl.store(positions + j, tl.minimum(item, most - 1).to(tl.int64), mask=ok)
    tl.store(cells + j, _cell_of(table, owner, cell, ok & (item < most), table_stride, pages, PAGE), mask=ok)
    tl.store(ones + j, tl.zeros_like(j) + 1, mask=j < n)
    tl.store(rows + j, j.to(tl.int64), mask=j < n)
    tl.store(starts + j, j, mask=j <= n)


@dataclass(frozen=True)
class Ahead:
    """Of `count` steps of N rows, one item a row."""

    base: torch.Tensor  # [count, N] int32
    kv_len: torch.Tensor  # [count, N] int32
    positions: torch.Tensor  # [count, N] int64
    cells: tuple[torch.Tensor, ...]  # a group: [count, N] int64
    ones: torch.Tensor  # [N] int32
    starts: torch.Tensor  # [N + 1] int32
    rows: torch.Tensor  # [N] int64


def launch_ahead(owners: torch.Tensor, length: torch.Tensor, tables: tuple[torch.Tensor, ...], page_size: int,
                 shift: int, count: int, most: int) -> Ahead:
    """owners [N] int64, length [N] int32; tables: a group [S, pages] int32."""
    n, device = len(length), length.device
    base, kv_len = torch.empty(2, count, n, dtype=torch.int32, device=device).unbind(0)
    made = Ahead(base, kv_len, torch.empty(count, n, dtype=torch.int64, device=device),
                 tuple(torch.empty(len(tables), count, n, dtype=torch.int64, device=device).unbind(0)),
                 torch.empty(n, dtype=torch.int32, device=device), torch.empty(n + 1, dtype=torch.int32, device=device),
                 torch.empty(n, dtype=torch.int64, device=device))
    grid = (triton.cdiv(max(n * count, n + 1), ITEMS),)
    if n == 0:
        return made
    for table, cells in zip(tables, made.cells, strict=True):
        ahead_kernel[grid](owners, length, table, base, kv_len, made.positions, cells, made.ones, made.starts,
                           made.rows, n, count, most, table.stride(0), table.shape[1], SHIFT=shift, PAGE=page_size,
                           ITEMS=ITEMS, PDL=overlaps(device), num_warps=4, **dependent(device))
    return made


# ------------------------------------------------------------------------------------------------------------- blocks
@triton.jit(do_not_specialize=["n", "most", "pages", "context", "mask_id"])
def block_kernel(owners, length, log, table, ids, positions, rows, cells, base, kv_len, counts, starts, wide_owners,
                 wide_base, wide_kv_len, wide_positions, ones, wide_starts, n, most, mask_id, log_stride, table_stride,
                 pages, context, SIZE: tl.constexpr, COPIES: tl.constexpr, PAGE: tl.constexpr, ITEMS: tl.constexpr,
                 PDL: tl.constexpr):
    """`SIZE` items of each row from its length on, the last known id first, then masks; and `COPIES` rows of one item
    that stand at the block's last cell: see `block` and `last_cell`."""
    j = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    row, place = j // SIZE, j % SIZE
    ok = j < n * SIZE
    begin(PDL)
    start = tl.load(length + row, mask=ok, other=0)
    owner = tl.load(owners + row, mask=ok, other=0).to(tl.int64)
    cell = start + place
    known = tl.load(log + owner * log_stride + tl.minimum(start, context - 1), mask=ok & (place == 0), other=0)
    tl.store(ids + j, tl.where(place == 0, tl.maximum(known, 0), mask_id).to(tl.int64), mask=ok)
    tl.store(positions + j, tl.minimum(cell, most - 1).to(tl.int64), mask=ok)
    tl.store(rows + j, row.to(tl.int64), mask=ok)
    tl.store(cells + j, _cell_of(table, owner, cell, ok & (cell < most), table_stride, pages, PAGE), mask=ok)
    first = ok & (place == 0)
    tl.store(base + row, start, mask=first)
    tl.store(kv_len + row, start + SIZE, mask=first)
    tl.store(counts + row, tl.zeros_like(row) + SIZE, mask=first)
    tl.store(starts + row, row * SIZE, mask=row <= n)
    copied = ok & (place < COPIES)
    wide = row * COPIES + place
    tl.store(wide_owners + wide, owner, mask=copied)
    tl.store(wide_base + wide, start + SIZE - 1, mask=copied)
    tl.store(wide_kv_len + wide, start + SIZE, mask=copied)
    tl.store(wide_positions + wide, (start + SIZE - 1).to(tl.int64), mask=copied)
    tl.store(ones + wide, tl.zeros_like(wide) + 1, mask=copied)
    tl.store(wide_starts + j, j, mask=j <= n * COPIES)


@dataclass(frozen=True)
class Block:
    """Blocks of N rows, B items each, and of W = N * copies rows at their last cells."""

    ids: torch.Tensor  # [N * B] int64, as `positions` and `rows`
    positions: torch.Tensor
    rows: torch.Tensor
    cells: tuple[torch.Tensor, ...]  # a group: [N * B] int64
    base: torch.Tensor  # [N] int32, as `kv_len` and `counts`
    kv_len: torch.Tensor
    counts: torch.Tensor
    starts: torch.Tensor  # [N + 1] int32
    wide_owners: torch.Tensor  # [W] int64, as `wide_positions`
    wide_positions: torch.Tensor
    wide_base: torch.Tensor  # [W] int32, as `wide_kv_len` and `ones`
    wide_kv_len: torch.Tensor
    ones: torch.Tensor
    wide_starts: torch.Tensor  # [W + 1] int32


def launch_block(owners: torch.Tensor, length: torch.Tensor, log: torch.Tensor, tables: tuple[torch.Tensor, ...],
                 page_size: int, size: int, copies: int, most: int, mask_id: int) -> Block:
    """owners [N] int64, length [N] int32; tables: a group [S, pages] int32; copies <= size."""
    n, device = len(length), log.device

    def empty(many: int, count: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        return torch.empty(many, count, dtype=dtype, device=device).unbind(0)
    ids, positions, rows = empty(3, n * size, torch.int64)
    base, kv_len, counts = empty(3, n, torch.int32)
    wide_owners, wide_positions = empty(2, n * copies, torch.int64)
    wide_base, wide_kv_len, ones = empty(3, n * copies, torch.int32)
    made = Block(ids, positions, rows, empty(len(tables), n * size, torch.int64), base, kv_len, counts,
                 torch.empty(n + 1, dtype=torch.int32, device=device), wide_owners, wide_positions, wide_base,
                 wide_kv_len, ones, torch.empty(n * copies + 1, dtype=torch.int32, device=device))
    for table, cells in zip(tables, made.cells, strict=True):
        block_kernel[(triton.cdiv(n * size + 1, ITEMS),)](
            owners, length, log, table, ids, positions, rows, cells, base, kv_len, counts, made.starts, wide_owners,
            wide_base, wide_kv_len, wide_positions, ones, made.wide_starts, n, most, mask_id, log.stride(0),
            table.stride(0), table.shape[1], log.shape[1], SIZE=size, COPIES=copies, PAGE=page_size, ITEMS=ITEMS,
            PDL=overlaps(device), num_warps=4, **dependent(device))
    return made
