"""The Triton kernels behind `exchange`: ranks of one host add up, or join, what each has, in one launch.

`exchange_kernel`, one shot: everybody sends all that he has to everybody.

    rank 0, program b   my part of x --> rank 1's slot 0 | flag there = n |  wait: my flags >= n  | my x + slots --> out
    rank 1, program b   my part of x --> rank 0's slot 1 | flag there = n |  wait: my flags >= n  | my x + slots --> out

`two_shot_kernel`, for sums of more than two ranks that are not small: each rank adds up one tile in so many and sends
the sum, so that less crosses the links, in two crossings.

    rank r   tile p of x --> rank p's slot r, for every p | meet | my tile: x + slots --> out, others' slots r | meet |
             slots --> the other tiles of out

Each program exchanges its own part with the program of the same number on the other ranks, and with no other. Its slots
come in two sets, used in turn by both kernels: when a rank's flag says n + 1, that rank has read what was sent to it
for n, so the set of n may be written again for n + 2. The count n of every program is kept on the device, so that a
captured graph goes on counting; second meetings have a count of their own, so that no flag is ever half a lap behind.
All programs must be on the device at one time, so there are never more than PROGRAMS.

Memory of a rank, visible to the others:  slots [2][ranks][PROGRAMS][slot bytes] | flags int32 [2][ranks][PROGRAMS]
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stretto.ops.exchange import PROGRAMS, WARPS, tile_of
from stretto.ops.launch import dependent, overlaps
from stretto.ops.triton_launch import begin


@triton.jit
def _slot(memory, number, slot_bytes, like, offset):
    """Of a rank whose memory begins there, as a pointer like `like`; `offset`: bytes."""
    return tl.multiple_of((memory + number.to(tl.int64) * slot_bytes + offset).to(like.dtype), 16)


@triton.jit
def _meet(memory, flags_at, program, count, RANK: tl.constexpr, RANKS: tl.constexpr, ALL: tl.constexpr):
    """Tells the other ranks that what was sent to them is there, and waits until they have said so; `flags_at`: bytes
    from where a rank's memory begins."""
    tl.debug_barrier()
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            flags = (tl.load(memory + peer) + flags_at).to(tl.pointer_type(tl.int32))
            tl.atomic_xchg(flags + RANK * ALL + program, count, sem="release", scope="sys")
    here = (tl.load(memory + RANK) + flags_at).to(tl.pointer_type(tl.int32))
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            flag = here + peer * ALL + program
            while tl.atomic_add(flag, 0, sem="acquire", scope="sys") - count < 0:  # so that counts may wrap around
                pass
    tl.debug_barrier()


@triton.jit
def exchange_kernel(x, base, out, memory, counts, tiles, every_tile, columns, slot_bytes, flags_at, RANK: tl.constexpr,
                    RANKS: tl.constexpr, JOIN: tl.constexpr, BASE: tl.constexpr, TILE: tl.constexpr,
                    ALL: tl.constexpr, PDL: tl.constexpr):
    """x [rows, columns], of which each program has `tiles` of `every_tile` in all, none of two rows; memory [RANKS]
    int64, addresses; counts [ALL] int32. With JOIN, the rows of all ranks stand side by side in `out`. The launch after
    may fetch its weights while this one waits for the others."""
    begin(PDL)
    program = tl.program_id(0)
    first, in_row = program * tiles, tl.cdiv(columns, TILE)
    count = tl.load(counts + program) + 1
    turn = count & 1
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            slot = _slot(tl.load(memory + peer), (turn * RANKS + RANK) * ALL + program, slot_bytes, x, 0)
            for tile in range(tiles):
                row, at = (first + tile) // in_row, (first + tile) % in_row * TILE + tl.arange(0, TILE)
                inside = (first + tile < every_tile) & (at < columns)
                part = tl.load(x + row.to(tl.int64) * columns + at, mask=inside)
                tl.store(slot + tile * TILE + tl.arange(0, TILE), part, mask=inside)
    here = tl.load(memory + RANK)
    _meet(memory, flags_at, program, count, RANK, RANKS, ALL)
    for tile in range(tiles):
        row, at = (first + tile) // in_row, (first + tile) % in_row * TILE + tl.arange(0, TILE)
        inside = (first + tile < every_tile) & (at < columns)
        start = row.to(tl.int64) * columns
        made = tl.zeros([TILE], tl.float32)
        for peer in tl.static_range(RANKS):
            if peer == RANK:
                part = tl.load(x + start + at, mask=inside)
            else:
                slot = _slot(here, (turn * RANKS + peer) * ALL + program, slot_bytes, x, 0)
                part = tl.load(slot + tile * TILE + tl.arange(0, TILE), mask=inside, cache_modifier=".cg")
            if JOIN:
                tl.store(out + start * RANKS + peer * columns + at, part, mask=inside)
            else:
                made += part.to(tl.float32)
        if BASE:
            made += tl.load(base + start + at, mask=inside).to(tl.float32)
        if not JOIN:
            tl.store(out + start + at, made.to(out.dtype.element_ty), mask=inside)
    tl.store(counts + program, count)


@triton.jit
def two_shot_kernel(x, base, out, memory, counts, groups, size, slot_bytes, flags_at, RANK: tl.constexpr,
                    RANKS: tl.constexpr, BASE: tl.constexpr, TILE: tl.constexpr, ALL: tl.constexpr, PDL: tl.constexpr):
    """x [size], in groups of RANKS tiles, one for each rank to add up; each program has `groups` of them. Parts go to
    the first halves of slots, sums to the second."""
    begin(PDL)
    program = tl.program_id(0)
    count, second = tl.load(counts + program) + 1, tl.load(counts + ALL + program) + 1
    slots, half = (count & 1) * RANKS * ALL + program, slot_bytes // 2
    first, o = program * groups * RANKS, tl.arange(0, TILE)
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            slot = _slot(tl.load(memory + peer), slots + RANK * ALL, slot_bytes, x, 0)
            for group in range(groups):
                at = (first + group * RANKS + peer) * TILE + o
                tl.store(slot + group * TILE + o, tl.load(x + at, mask=at < size), mask=at < size)
    _meet(memory, flags_at, program, count, RANK, RANKS, ALL)
    here = tl.load(memory + RANK)
    for group in range(groups):
        at = (first + group * RANKS + RANK) * TILE + o
        made = tl.zeros([TILE], tl.float32)
        for peer in tl.static_range(RANKS):
            if peer == RANK:
                part = tl.load(x + at, mask=at < size)
            else:
                slot = _slot(here, slots + peer * ALL, slot_bytes, x, 0)
                part = tl.load(slot + group * TILE + o, mask=at < size, cache_modifier=".cg")
            made += part.to(tl.float32)
        if BASE:
            made += tl.load(base + at, mask=at < size).to(tl.float32)
        total = made.to(out.dtype.element_ty)
        tl.store(out + at, total, mask=at < size)
        for peer in tl.static_range(RANKS):
            if peer != RANK:
                slot = _slot(tl.load(memory + peer), slots + RANK * ALL, slot_bytes, x, half)
                tl.store(slot + group * TILE + o, total, mask=at < size)
    _meet(memory, flags_at + 4 * RANKS * ALL, program, second, RANK, RANKS, ALL)
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            slot = _slot(here, slots + peer * ALL, slot_bytes, x, half)
            for group in range(groups):
                at = (first + group * RANKS + peer) * TILE + o
                part = tl.load(slot + group * TILE + o, mask=at < size, cache_modifier=".cg")
                tl.store(out + at, part, mask=at < size)
    tl.store(counts + program, count)
    tl.store(counts + ALL + program, second)


def launch_exchange(x: torch.Tensor, out: torch.Tensor, memory: torch.Tensor, counts: torch.Tensor, rank: int,
                    slot_bytes: int, flags_at: int, base: torch.Tensor | None = None, join: bool = False) -> None:
    """`exchange.total`, or with `join` `exchange.side_by_side`, on every rank at the same time.

    x [rows, columns], contiguous, of the same shape on every rank, at most `rows_that_fit`; a sum may have all its
    elements in one row. out as x, or with `join` [rows, ranks * columns]; base as out, or out itself. memory [ranks]
    int64: where each rank's memory begins; counts [2, PROGRAMS] int32, at first 0 as that memory is."""
    rows, columns = x.shape
    every_tile = rows * triton.cdiv(columns, tile_of(x))
    tiles = triton.cdiv(every_tile, PROGRAMS)
    exchange_kernel[(triton.cdiv(every_tile, tiles),)](
        x, base, out, memory, counts, tiles, every_tile, columns, slot_bytes, flags_at, RANK=rank, RANKS=len(memory),
        JOIN=join, BASE=base is not None, TILE=tile_of(x), ALL=PROGRAMS, PDL=overlaps(x.device), num_warps=WARPS,
        **dependent(x.device))


def launch_two_shot(x: torch.Tensor, out: torch.Tensor, memory: torch.Tensor, counts: torch.Tensor, rank: int,
                    slot_bytes: int, flags_at: int, base: torch.Tensor | None = None) -> None:
    """`exchange.total` in two crossings. As `launch_exchange`, of at most `two_shot_bytes`; out may not be x."""
    ranks, tile = len(memory), tile_of(x)
    every_group = triton.cdiv(x.numel(), tile * ranks)
    groups = triton.cdiv(every_group, PROGRAMS)
    two_shot_kernel[(triton.cdiv(every_group, groups),)](
        x, base, out, memory, counts, groups, x.numel(), slot_bytes, flags_at, RANK=rank, RANKS=ranks,
        BASE=base is not None, TILE=tile, ALL=PROGRAMS, PDL=overlaps(x.device), num_warps=WARPS, **dependent(x.device))
