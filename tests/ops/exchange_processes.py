"""One rank of several that run at the same time, each a process of its own. Their memory is in files that all map.

    TRITON_INTERPRET=1 python -m tests.ops.exchange_processes FOLDER RANK RANKS ROUNDS     writes FOLDER/RANK.pt: what it made, in order
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

import torch

from stretto.ops import triton_exchange
from tests.ops.exchange_ranks import KINDS, Ranks, draw

PROGRAMS = 2
ROWS, COLUMNS = 3, 3000  # some tiles for each program, of which the last is cut
LATE = 0.003  # seconds, at most, that a rank comes late


def files(folder: Path, count: int) -> list[Path]:
    return [folder / f"{rank}.memory" for rank in range(count)]


def inputs(round: int, rank: int) -> torch.Tensor:
    return draw(ROWS, COLUMNS, torch.float32, 100 * round + rank)


def base_of_all() -> torch.Tensor:
    return draw(ROWS, COLUMNS, torch.float32, 99)


def main() -> None:
    folder, (rank, count, rounds) = Path(sys.argv[1]), map(int, sys.argv[2:])
    torch.set_num_threads(1)
    triton_exchange.PROGRAMS = PROGRAMS
    ranks, rng, made = Ranks(count, files=files(folder, count)), random.Random(rank), []
    (folder / f"{rank}.ready").touch()
    while len(list(folder.glob("*.ready"))) < count:
        time.sleep(0.01)
    for round in range(rounds):
        shots, join = KINDS[round % len(KINDS)]
        time.sleep(rng.random() * LATE)
        made.append(ranks.launch(rank, inputs(round, rank), None if join else base_of_all(), join, shots))
    torch.save(made, folder / f"{rank}.pt")


if __name__ == "__main__":
    main()
