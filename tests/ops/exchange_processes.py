"""One rank of several that run at the same time, each a process of its own. Their memory is in files that all map. Each
stands still at random, between sums and in the middle of them.

    TRITON_INTERPRET=1 python -m tests.ops.exchange_processes FOLDER RANK RANKS ROUNDS

writes FOLDER/RANK.pt: what it made, in order.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from pathlib import Path

import torch

from stretto.ops import triton_exchange
from tests.ops.exchange_ranks import KINDS, Ranks, draw

PROGRAMS = 1  # they run one after the other here: at a second one, nobody could be a sum ahead of the others
ROWS, COLUMNS = 3, 3000  # some tiles, of which the last is cut
STILL, APART = 0.1, 0.1  # seconds that a rank stands still, and at most between two such times


def files(folder: Path, count: int) -> list[Path]:
    return [folder / f"{rank}.memory" for rank in range(count)]


def inputs(round: int, rank: int) -> torch.Tensor:
    return draw(ROWS, COLUMNS, torch.float32, 100 * round + rank)


def base_of_all() -> torch.Tensor:
    return draw(ROWS, COLUMNS, torch.float32, 99)


def stand_still(rng: random.Random) -> None:
    """Now and then nobody else in this process can run."""
    while True:
        time.sleep(rng.random() * APART)
        ends = time.monotonic() + STILL
        while time.monotonic() < ends:
            pass


def main() -> None:
    folder, (rank, count, rounds) = Path(sys.argv[1]), map(int, sys.argv[2:])
    torch.set_num_threads(1)
    triton_exchange.PROGRAMS = PROGRAMS
    ranks, made = Ranks(count, files=files(folder, count)), []
    (folder / f"{rank}.ready").touch()
    while len(list(folder.glob("*.ready"))) < count:
        time.sleep(0.01)
    sys.setswitchinterval(2 * STILL)
    threading.Thread(target=stand_still, args=(random.Random(rank),), daemon=True).start()
    for round in range(rounds):
        shots, join = KINDS[round % len(KINDS)]
        made.append(ranks.launch(rank, inputs(round, rank), None if join else base_of_all(), join, shots))
    torch.save(made, folder / f"{rank}.pt")


if __name__ == "__main__":
    main()
