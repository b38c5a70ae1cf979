"""The Triton kernel behind `spec/ngram.py`. Imported only where it is going to run."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stretto.ops.launch import dependent, overlaps
from stretto.ops.triton_launch import begin

BLOCK = 2048  # positions of the log that a program compares at a time


@triton.jit
def ngram_kernel(log, slots, known_of, ids, offered, log_stride, context, width, LONGEST: tl.constexpr,
                 SHORTEST: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One program a row. An occurrence that ends before position e counts as (ids that agree) * context + e: the
    longest wins, then the latest."""
    row = tl.program_id(0)
    begin(PDL)
    slot = tl.load(slots + row)
    known = tl.load(known_of + slot)
    line = log + slot.to(tl.int64) * log_stride
    best = 0
    for start in tl.range(0, known, BLOCK):
        end = start + tl.arange(0, BLOCK)
        still = (end < known) & (end > 0)
        agree = tl.zeros((BLOCK,), tl.int32)
        for back in tl.static_range(1, LONGEST + 1):
            wanted = tl.load(line + tl.maximum(known - back, 0))
            still = still & (end >= back) & (known >= back)
            still = still & (tl.load(line + end - back, mask=still, other=-1) == wanted)
            agree += still.to(tl.int32)
        best = tl.maximum(best, tl.max(tl.where(agree > 0, agree * context + end, 0), 0))
    length, follow = best // context, best % context
    o = tl.arange(0, WIDTH)
    draft = tl.load(line + tl.minimum(follow + o, context - 1), mask=o < width, other=0)
    tl.store(ids + row * width + o, draft.to(tl.int64), mask=o < width)
    tl.store(offered + row, tl.where(length >= SHORTEST, tl.minimum(known - follow, width), 0))


def launch_ngram(log: torch.Tensor, slots: torch.Tensor, known: torch.Tensor, width: int, longest: int,
                 shortest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """log [S, C] int32, slots [R], known [S] int32. Returns ids [R, width] int64 and how many of them are offered [R]
    int32. ValueError for a context whose places times `longest` do not fit 32 bits."""
    n, context, device = len(slots), log.shape[1], log.device
    if (longest + 1) * context >= 1 << 31:
        raise ValueError(f"a context of {context} tokens with n-grams of {longest} ids: their product must stay below"
                         " 2^31, choose shorter n-grams")
    ids = torch.empty(n, width, dtype=torch.int64, device=device)
    offered = torch.empty(n, dtype=torch.int32, device=device)
    if n and width:
        ngram_kernel[(n,)](log, slots, known, ids, offered, log.stride(0), context, width, LONGEST=longest,
                           SHORTEST=shortest, WIDTH=triton.next_power_of_2(width), BLOCK=BLOCK, PDL=overlaps(device),
                           num_warps=8, **dependent(device))
    return ids, offered
