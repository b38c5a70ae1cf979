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

PROGRAMS = 64
WARPS = 16


@triton.jit
def exchange_kernel(x, base, out, memory, counts, n, columns, slot_bytes, flags_at, RANK: tl.constexpr,
                    RANKS: tl.constexpr, JOIN: tl.constexpr, BASE: tl.constexpr, TILE: tl.constexpr,
                    ALL: tl.constexpr):
    """`n` elements of x, those of a program in tiles; memory [RANKS] int64, addresses; counts [ALL] int32; with JOIN,
    rows of `columns` elements, which stand side by side in `out`."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    tiles = tl.cdiv(tl.cdiv(n, TILE), programs)
    first = program.to(tl.int64) * tiles * TILE
    count = tl.load(counts + program) + 1
    turn = count % 2
    kind: tl.constexpr = x.dtype
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            there = tl.load(memory + peer)
            slot = there + ((turn * RANKS + RANK) * ALL + program).to(tl.int64) * slot_bytes
            slot = tl.multiple_of(slot.to(kind), 16)
            for tile in range(tiles):
                i = tile * TILE + tl.arange(0, TILE)
                part = tl.load(x + first + i, mask=first + i < n)
                tl.store(slot + i, part, mask=first + i < n)
    tl.debug_barrier()
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            flags = (tl.load(memory + peer) + flags_at).to(tl.pointer_type(tl.int32))
            tl.atomic_xchg(flags + RANK * ALL + program, count, sem="release", scope="sys")
    here = tl.load(memory + RANK)
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            flag = (here + flags_at).to(tl.pointer_type(tl.int32)) + peer * ALL + program
            while tl.atomic_add(flag, 0, sem="acquire", scope="sys") < count:
                pass
    tl.debug_barrier()
    slots = here + (turn * RANKS * ALL + program).to(tl.int64) * slot_bytes
    for tile in range(tiles):
        i = tile * TILE + tl.arange(0, TILE)
        inside = first + i < n
        if JOIN:
            at = (first + i) // columns * (columns * RANKS) + (first + i) % columns
        else:
            made = tl.zeros([TILE], tl.float32)
        for peer in tl.static_range(RANKS):
            if peer == RANK:
                part = tl.load(x + first + i, mask=inside)
            else:
                slot = tl.multiple_of((slots + peer * ALL * slot_bytes).to(kind), 16)
                part = tl.load(slot + i, mask=inside, cache_modifier=".cg")
            if JOIN:
                tl.store(out + at + peer * columns, part, mask=inside)
            else:
                made += part.to(tl.float32)
        if BASE:
            made += tl.load(base + first + i, mask=inside).to(tl.float32)
        if not JOIN:
            tl.store(out + first + i, made.to(out.dtype.element_ty), mask=inside)
    tl.store(counts + program, count)


def launch_exchange(x: torch.Tensor, out: torch.Tensor, memory: torch.Tensor, counts: torch.Tensor, rank: int,
                    slot_bytes: int, flags_at: int, base: torch.Tensor | None = None, columns: int = 0) -> None:
    """x, contiguous, of the same size on every rank; out as x, or with `columns` the joined rows; base as out, or out
    itself. memory [ranks] int64: where each rank's memory begins; counts [PROGRAMS] int32, at first 0."""
    n = x.numel()
    tile = max(1024, 16 // x.element_size() * 32 * WARPS // 2)
    exchange_kernel[(min(PROGRAMS, triton.cdiv(n, tile)),)](
        x, base, out, memory, counts, n, columns, slot_bytes, flags_at, RANK=rank, RANKS=len(memory),
        JOIN=columns > 0, BASE=base is not None, TILE=tile, ALL=PROGRAMS, num_warps=WARPS)
