"""Sums and joins over ranks that run at the same time: streams of one GPU, each with memory that the others write to.
What differs between GPUs is the way between them alone."""

from __future__ import annotations

import random

import pytest
import torch

from tests.ops.exchange_ranks import KINDS, Ranks, begin_anew, draw, same, wanted

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
              pytest.mark.timeout(120)]
ROUNDS, LONGEST = 60, 200_000  # sums one after the other; cycles that a rank comes late


@pytest.mark.parametrize("count", [2, 3, 4])
def test_ranks_that_wait_for_each_other_agree(count: int) -> None:
    """One shot, two shots and joins in turn, over the counts' wrap, each rank late at random. All programs fit a GPU at
    once: 32 of each rank."""
    rng, ranks = random.Random(count), Ranks(count, "cuda")
    x = [[draw(32, 4096, torch.bfloat16, 10 * round + rank).cuda() for rank in range(count)] for round in range(6)]
    base = draw(32, 4096, torch.bfloat16, 99).cuda()
    for (shots, join), parts in zip(KINDS, x):  # one by one at first: no kernel could be loaded beside one that waits
        ranks.run(parts, None if join else base, join, shots)
        ranks.run(parts, None, join, shots)
    begin_anew(ranks)
    streams = [torch.cuda.Stream() for _ in range(count)]
    torch.cuda.synchronize()
    made: list[list[torch.Tensor]] = []
    for round in range(ROUNDS):
        shots, join = KINDS[round % 6]
        made.append([torch.empty(0)] * count)
        for rank in rng.sample(range(count), count):
            with torch.cuda.stream(streams[rank]):
                torch.cuda._sleep(rng.randrange(LONGEST))
                made[-1][rank] = ranks.launch(rank, x[round % 6][rank], None if join else base, join, shots)
    torch.cuda.synchronize()
    for round, outs in enumerate(made):
        shots, join = KINDS[round % 6]
        assert same(outs, wanted(x[round % 6], base, join)), f"sum {round}, {shots} shots"
