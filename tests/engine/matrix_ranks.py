"""The second rank of runs of the matrix: one process for all of them, which makes for each what rank 0 has."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from stretto.device.ranks import RanksDevice, RankShard, join_ranks, leave_ranks, serve_rank
from stretto.device.streams import LocalDevice
from stretto.engine.process import end_with_parent
from stretto.engine.ranks import store_in
from stretto.model.load import load_model
from stretto.model.lora import AdapterBank
from stretto.testing import target_of
from tests.engine.matrix_run import Lab, engine_of, lab_key
from tests.spec.suffix_trees import install

CPU = torch.device("cpu")


@dataclass
class SecondRank:
    """Rank 0's view of it."""

    shard: RankShard
    connection: Connection
    led: RanksDevice | None = None  # what is not closed yet

    def prepare(self, lab: Lab, features: frozenset[str]) -> None:
        """It makes its half of a run; `lead` joins it to the half here."""
        self.connection.send((lab.target.path, lab.drafters, features))

    def lead(self, own: LocalDevice) -> RanksDevice:
        self.led = RanksDevice(own, self.shard, [self.connection], self._closed)
        return self.led

    def _closed(self, failed: bool) -> None:
        self.led = None

    def finish(self) -> None:
        """Whatever became of the run, the process is free for the next one."""
        if self.led is not None:
            self.led.close()


@contextmanager
def second_rank(folder: Path) -> Iterator[SecondRank]:
    """Two ranks of this machine, joined through a file in `folder`."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(os.getpid(), folder, there), daemon=True)
    process.start()
    there.close()
    try:
        yield SecondRank(join_ranks(0, 2, store_in(str(folder), 2), CPU), here)
    finally:
        here.close()
        leave_ranks()
        process.join(timeout=10)
        process.kill()


def _serve(parent: int, folder: Path, leader: Connection) -> None:
    end_with_parent(parent)
    torch.set_num_threads(1)
    shard = join_ranks(1, 2, store_in(str(folder), 2), CPU)
    install(pytest.MonkeyPatch())
    labs: dict[tuple, Lab] = {}
    while True:
        try:
            path, drafters, features = leader.recv()
        except EOFError:
            return
        key = lab_key(features)
        if key not in labs:
            bank = AdapterBank(1, 4) if key.lora else None
            model = load_model(path, dtype=getattr(torch, key.dtype), device=CPU, adapters=bank, shard=shard,
                               fixed=key.fixed)
            labs[key] = Lab(model, target_of(model, path, "tiny"), drafters, None, bank)  # type: ignore[arg-type]
        serve_rank(engine_of(labs[key], features).device, leader, int("overlap" in features))
