"""The processes of ranks 1, 2, ... of a model that several devices share; rank 0 is the engine's own process."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from stretto.device.ranks import FAILED, RanksDevice, RankShard, join_ranks, leave_ranks, serve_rank
from stretto.device.streams import DeviceHalf, LocalDevice
from stretto.engine.process import deaf_children, end_with_parent

MakeDevice = Callable[[Any, RankShard], tuple[DeviceHalf, int]]
"""(what the engine was prepared with, the rank) -> (its device half, steps in flight); a function of a module."""

START_SECONDS = 600.0  # until a rank must have joined


class Ranks:
    """Starts the other ranks, each of which loads its own part. `prepared` travels to them."""

    def __init__(self, ranks: int, device_type: str, prepared: Any, make: MakeDevice, fixed: bool = False):
        """`fixed`: as `device.ranks.join_ranks`."""
        self._folder = tempfile.mkdtemp(prefix="stretto-ranks-")
        self._ranks, self._type, self._fixed = ranks, device_type, fixed
        context = multiprocessing.get_context("spawn")
        self._processes, self._connections = [], []
        for rank in range(1, ranks):
            here, there = context.Pipe()
            process = context.Process(target=_run, args=(os.getpid(), rank, ranks, self._folder, device_type, prepared,
                                                         make, fixed, there),
                                      name=f"stretto rank {rank}", daemon=True)
            with deaf_children():
                process.start()
            there.close()
            self._processes.append(process)
            self._connections.append(here)

    def join(self) -> RankShard:
        """Rank 0's part in the meeting."""
        self._shard = join_ranks(0, self._ranks, store_in(self._folder, self._ranks), rank_device(self._type, 0),
                                 self._fixed)
        return self._shard

    def lead(self, own: LocalDevice) -> RanksDevice:
        return RanksDevice(own, self._shard, self._connections, self.close,
                           [process.sentinel for process in self._processes])

    def close(self, failed: bool = False) -> None:
        """`failed`: nobody waits for anybody."""
        if failed:
            for process in self._processes:
                process.kill()
        else:
            leave_ranks()
        for process in self._processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
        for connection in self._connections:
            connection.close()
        with contextlib.suppress(OSError):
            for name in os.listdir(self._folder):
                os.unlink(os.path.join(self._folder, name))
            os.rmdir(self._folder)


def store_in(folder: str, ranks: int) -> torch.distributed.FileStore:
    """By which the ranks of one host find each other."""
    return torch.distributed.FileStore(os.path.join(folder, "meet"), ranks)


def rank_device(device_type: str, rank: int) -> torch.device:
    return torch.device(device_type, rank) if device_type == "cuda" else torch.device(device_type)


def _run(parent: int, rank: int, ranks: int, folder: str, device_type: str, prepared: Any, make: MakeDevice,
         fixed: bool, leader: Connection) -> None:
    end_with_parent(parent)  # it may be waiting for the others when the engine is killed
    if device_type == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    try:
        shard = join_ranks(rank, ranks, store_in(folder, ranks), rank_device(device_type, rank), fixed)
        device, depth = make(prepared, shard)
    except Exception as e:
        leader.send((FAILED, f"{type(e).__name__}: {e}"))
        raise
    if serve_rank(device, leader, depth):
        leave_ranks()
