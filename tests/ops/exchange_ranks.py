"""Ranks of which all are in one process, on the CPU or on one GPU: each has memory that the others write to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from stretto.ops import triton_exchange
from stretto.ops.exchange import side_by_side, total
from stretto.ops.triton_exchange import launch_exchange, launch_two_shot

SLOT, AHEAD, LAST = 1 << 16, 1 << 30, 2**31 - 4  # counts are about to wrap around


class Ranks:
    """All ranks' memory."""

    def __init__(self, ranks: int, device: str = "cpu", files: Sequence[Path] = ()) -> None:
        """`files`: that hold the memory, one for each rank, of which all but one are in other processes."""
        programs = triton_exchange.PROGRAMS
        self.flags_at = 2 * ranks * programs * SLOT
        size = self.flags_at + 8 * ranks * programs
        self.memory = [torch.from_file(str(file), shared=True, size=size, dtype=torch.uint8) for file in files] or [
            torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(ranks)]
        self.addresses = torch.tensor([m.data_ptr() for m in self.memory], device=device)
        self.counts = [torch.full((2, programs), LAST, dtype=torch.int32, device=device) for _ in range(ranks)]
        self.flags = [memory[self.flags_at :].view(torch.int32).view(2, ranks, programs) for memory in self.memory]

    def run(self, x: list[torch.Tensor], base: torch.Tensor | None, join: bool = False, shots: int = 1
            ) -> list[torch.Tensor]:
        """What every rank makes. They run one after the other, several times: each finds the others' flags set, so that
        it does not wait, and is there to send what it has, until all have what the others send. Counts are put back, as
        they were, before they run again."""
        before = [counts.clone() for counts in self.counts]
        made: list[torch.Tensor] = []
        for flags, counts in zip(self.flags, before):
            flags.copy_((counts + AHEAD).unsqueeze(1).expand_as(flags))
        for _ in range(shots + 1):
            for counts, as_they_were in zip(self.counts, before):
                counts.copy_(as_they_were)
            made = [self.launch(rank, x[rank], base, join, shots) for rank in range(len(x))]
        return made

    def launch(self, rank: int, x: torch.Tensor, base: torch.Tensor | None, join: bool, shots: int) -> torch.Tensor:
        """What one rank makes, beside the others or before them."""
        own = self.addresses, self.counts[rank], rank, SLOT, self.flags_at
        if base is not None:
            out = base.clone()
            base = out
        else:
            out = x.new_full((len(x), x.shape[1] * (len(self.memory) if join else 1)), 77)
        if shots == 2:
            launch_two_shot(x, out, *own, base)
        else:
            launch_exchange(x if join else x.view(1, -1), out, *own, base, join)
        return out


def draw(rows: int, columns: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same(made: list[torch.Tensor], wanted: torch.Tensor) -> bool:
    return all(torch.equal(one, wanted) for one in made)


KINDS = [(1, False), (2, False), (1, True), (2, False), (2, False), (1, False)]  # (shots, join) of sums in turn


def begin_anew(ranks: Ranks) -> None:
    """All have agreed on everything so far."""
    for counts, flags in zip(ranks.counts, ranks.flags):
        counts.fill_(LAST)
        flags.fill_(LAST)


def wanted(x: list[torch.Tensor], base: torch.Tensor, join: bool) -> torch.Tensor:
    return side_by_side(x) if join else total(x, base)
