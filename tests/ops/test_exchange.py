"""Sums and joins over ranks: the kernel equals the reference, in Triton's interpreter, one rank after the other. On two
GPUs it is tried by tests/gpu/test_ranks_cuda.py and benchmarks/ranks_gpu.py."""

from __future__ import annotations

import pytest
import torch

from stretto.ops.exchange import PROGRAMS, side_by_side, total
from stretto.ops.triton_exchange import launch_exchange

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the ranks would have to run at the same time")
SLOT, RANKS, AHEAD = 1 << 16, 2, 1 << 30
FLAGS_AT = 2 * RANKS * PROGRAMS * SLOT


class Ranks:
    """Both ranks' memory. The one that goes first finds the other's flags set, so that it does not wait, and is there
    to send what it has."""

    def __init__(self) -> None:
        self.memory = [torch.zeros(FLAGS_AT + 4 * RANKS * PROGRAMS, dtype=torch.uint8) for _ in range(RANKS)]
        self.addresses = torch.tensor([m.data_ptr() for m in self.memory])
        # they are about to wrap around
        self.counts = [torch.full((PROGRAMS,), 2**31 - 4, dtype=torch.int32) for _ in range(RANKS)]
        for memory in self.memory:
            memory[FLAGS_AT:].view(torch.int32).fill_(2**31 - 4)

    def run(self, first: int, x: list[torch.Tensor], base: torch.Tensor | None, join: bool = False) -> torch.Tensor:
        """What the rank that goes second makes."""
        flags = self.memory[first][FLAGS_AT:].view(torch.int32).view(RANKS, PROGRAMS)
        flags.copy_(self.counts[first] + AHEAD)
        for rank in (first, 1 - first):
            out = x[rank].new_full((len(x[rank]), x[rank].shape[1] * (RANKS if join else 1)), 77)
            flat = x[rank] if join else x[rank].view(1, -1)
            launch_exchange(flat, out, self.addresses, self.counts[rank], rank, SLOT, FLAGS_AT, base, join)
        return out


def draw(rows: int, columns: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize(("first", "rows", "columns", "dtype"), [
    (0, 1, 4096, torch.float32), (1, 1, 4096, torch.float32), (0, 130, 24, torch.float32),
    (1, 20, 513, torch.float16)])  # the interpreter cuts bfloat16 off
def test_every_exchange_is_that_of_the_reference(first: int, rows: int, columns: int, dtype: torch.dtype) -> None:
    ranks = Ranks()
    for round in range(3):  # both sets of slots, and the first one again
        x = [draw(rows, columns, dtype, 10 * round + rank) for rank in range(RANKS)]
        base = draw(rows, columns, dtype, 99)
        assert torch.equal(ranks.run(first, x, None), total(x))
        assert torch.equal(ranks.run(first, x, base), total(x, base))
        assert torch.equal(ranks.run(first, x, None, join=True), side_by_side(x))


def test_a_rows_sum_does_not_depend_on_its_batch() -> None:
    x, base = [draw(50, 64, torch.bfloat16, rank) for rank in range(3)], draw(50, 64, torch.bfloat16, 7)
    alone = torch.cat([total([part[i : i + 1] for part in x], base[i : i + 1]) for i in range(50)])
    assert torch.equal(total(x, base), alone)
