"""The Triton kernel behind `exchange`: ranks of one host add up, or join, what each has, in one launch.

    rank 0, program b   my part of x --> rank 1's slot 0 | flag there = n |  wait: my flags >= n  | my x + slots --> out
    rank 1, program b   my part of x --> rank 0's slot 1 | flag there = n |  wait: my flags >= n  | my x + slots --> out

Each program exchanges its own part with the program of the same number on the other ranks, and with no other. Its slots
come in two sets, used in turn: when a rank's flag says n + 1, that rank has read what was sent to it for n, so the set
of n may be written again for n + 2. The count n of every program is kept on the device, so that a captured graph goes
on counting. All programs must be on the device at one time, so there are never more than PROGRAMS.

Memory of a rank, visible to the others:    slots [2][ranks][PROGRAMS][slot bytes] | flags int32 [ranks][PROGRAMS]
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stretto.ops.exchange import PROGRAMS, WARPS, tile_of
from stretto.ops.launch import dependent, overlaps
from stretto.ops.triton_launch import begin


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
    kind: tl.constexpr = x.dtype
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            there = tl.load(memory + peer)
            slot = there + ((turn * RANKS + RANK) * ALL + program).to(tl.int64) * slot_bytes
            slot = tl.multiple_of(slot.to(kind), 16)
            for tile in range(tiles):
                row, at = (first + tile) // in_row, (first + tile) % in_row * TILE + tl.arange(0, TILE)
                inside = (first + tile < every_tile) & (at < columns)
                part = tl.load(x + row.to(tl.int64) * columns + at, mask=inside)
                tl.store(slot + tile * TILE + tl.arange(0, TILE), part, mask=inside)
    tl.debug_barrier()
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            flags = (tl.load(memory + peer) + flags_at).to(tl.pointer_type(tl.int32))
            tl.atomic_xchg(flags + RANK * ALL + program, count, sem="release", scope="sys")
    here = tl.load(memory + RANK)
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            flag = (here + flags_at).to(tl.pointer_type(tl.int32)) + peer * ALL + program
            while tl.atomic_add(flag, 0, sem="acquire", scope="sys") - count < 0:  # so that counts may wrap around
                pass
    tl.debug_barrier()
    slots = here + (turn * RANKS * ALL + program).to(tl.int64) * slot_bytes
    for tile in range(tiles):
        row, at = (first + tile) // in_row, (first + tile) % in_row * TILE + tl.arange(0, TILE)
        inside = (first + tile < every_tile) & (at < columns)
        start = row.to(tl.int64) * columns
        made = tl.zeros([TILE], tl.float32)
        for peer in tl.static_range(RANKS):
            if peer == RANK:
                part = tl.load(x + start + at, mask=inside)
            else:
                slot = tl.multiple_of((slots + peer * ALL * slot_bytes).to(kind), 16)
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


def launch_exchange(x: torch.Tensor, out: torch.Tensor, memory: torch.Tensor, counts: torch.Tensor, rank: int,
                    slot_bytes: int, flags_at: int, base: torch.Tensor | None = None, join: bool = False) -> None:
    """`exchange.total`, or with `join` `exchange.side_by_side`, on every rank at the same time.

    x [rows, columns], contiguous, of the same shape on every rank, at most `rows_that_fit`; a sum may have all its
    elements in one row. out as x, or with `join` [rows, ranks * columns]; base as out, or out itself. memory [ranks]
    int64: where each rank's memory begins; counts [PROGRAMS] int32, at first 0 as that memory is."""
    rows, columns = x.shape
    every_tile = rows * triton.cdiv(columns, tile_of(x))
    tiles = triton.cdiv(every_tile, PROGRAMS)
    exchange_kernel[(triton.cdiv(every_tile, tiles),)](
        x, base, out, memory, counts, tiles, every_tile, columns, slot_bytes, flags_at, RANK=rank, RANKS=len(memory),
        JOIN=join, BASE=base is not None, TILE=tile_of(x), ALL=PROGRAMS, PDL=overlaps(x.device), num_warps=WARPS,
        **dependent(x.device))
