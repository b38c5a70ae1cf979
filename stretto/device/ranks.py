"""Several device halves that run one model together: tensor parallelism.

    rank 0   host half -> plan N -+-> own device half ---- sums with the others inside the layers ---- result N
    rank 1                        +-> the same plan  ---- ...                                     ---- its check sum
    rank 2                        +-> ...

Every rank keeps the whole slot table and page tables, runs the same plans in the same order, and samples the same ids:
sums over ranks give the same bits everywhere, and the noise is a function of seed and position. So nothing but plans
goes out and nothing but check sums comes back; a rank whose results differ ends the engine with its name.
"""

from __future__ import annotations

import datetime
import zlib
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from stretto.device.streams import DeviceHalf
from stretto.model.shard import Shard
from stretto.ops.exchange import side_by_side, total
from stretto.sample.features import StepShape
from stretto.wire import HEADER, split_plan, without_times

if TYPE_CHECKING:
    from stretto.device.symmetric import SymmetricMemory

PLAN, MASK, WARM_UP, CLOSE = "plan", "mask", "warm up", "close"
BLAME_SECONDS = 2.0  # in which a rank that fails can say so
TIMEOUT = datetime.timedelta(seconds=120)  # of a sum that some rank does not join


class RankFailed(RuntimeError):
    """A rank has died, or computes something else than the others."""


class RankDied(RankFailed):
    """Without a word."""


class RankShard(Shard):
    """A rank of several, joined by torch.distributed.

    On GPUs of one host what is small goes through their own memory (`device/symmetric.py`), in one launch, and what is
    larger through NCCL. Both give the same bits on every rank. NCCL's sum of more than two ranks depends on where in
    the tensor it stands; `fixed` has everything added up in the order of the ranks, and rounded once."""

    def __init__(self, rank: int, ranks: int, memory: SymmetricMemory | None = None, nccl: bool = False):
        """`nccl`: sums that `memory` does not take are NCCL's, rather than in order."""
        super().__init__(rank, ranks)
        self._memory, self._nccl = memory, nccl

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        if self._memory is not None and self._memory.takes(x):
            return self._memory.total(x)
        if self._nccl:
            dist.all_reduce(x)
            return x
        return total(self._parts(x))

    def add(self, base: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        if self._memory is not None and self._memory.takes(x):
            return self._memory.total(x, base)
        if self._nccl:
            dist.all_reduce(x)
            return base.add_(x)
        return base.copy_(total(self._parts(x), base))

    def join(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        if self._memory is not None and self._memory.takes(x):
            return self._memory.side_by_side(x)
        return side_by_side(self._parts(x))

    def _parts(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """x, contiguous, of every rank, in order."""
        parts = x.new_empty(self.ranks, *x.shape)
        gather(parts.flatten(0, 1), x)
        return parts.unbind(0)


gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name up to torch 2.12


def join_ranks(rank: int, ranks: int, address: str, device: torch.device, fixed: bool = False) -> RankShard:
    """Meets the other ranks at `address` (an init_method of torch.distributed). Waits for all of them."""
    if device.type == "cpu":
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=ranks, timeout=TIMEOUT)
        return RankShard(rank, ranks)
    from stretto.device.symmetric import SymmetricMemory  # imports triton, which installations for CPU may lack

    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=address, rank=rank, world_size=ranks, timeout=TIMEOUT,
                            device_id=device)
    return RankShard(rank, ranks, SymmetricMemory(rank, ranks, device), nccl=not fixed)


def leave_ranks() -> None:
    """The end of an orderly meeting; no graph may be left that holds one of its sums."""
    if dist.is_initialized():
        dist.destroy_process_group()


class RanksDevice:
    """`DeviceHalf` of rank 0: what it runs, the others run. `fellows` are connections to ranks 1, 2, ...; `close_all`
    ends their processes."""

    def __init__(self, own: DeviceHalf, fellows: Sequence[Connection], close_all: Callable[[], None]):
        self.own, self.fellows, self._close_all = own, list(fellows), close_all

    def _tell(self, kind: str, content: Any = None) -> None:
        for rank, fellow in enumerate(self.fellows, 1):
            try:
                fellow.send((kind, content))
            except OSError as e:
                raise RankFailed(f"rank {rank} is gone: {e}") from e

    def launch(self, packed: np.ndarray) -> None:
        self._tell(PLAN, packed)
        self.own.launch(packed)

    def mask(self, packed: np.ndarray) -> None:
        self._tell(MASK, packed)
        self.own.mask(packed)

    def collect(self) -> np.ndarray:
        try:
            packed = self.own.collect()
        except Exception as e:  # often only that somebody else did not come to a sum
            self._blame(e)
            raise
        mine = check_sum(packed)
        for rank in range(1, 1 + len(self.fellows)):
            if self._answer_of(rank) != mine:
                raise RankFailed(f"rank {rank} computed another result than rank 0: their weights or devices differ")
        return packed

    def _answer_of(self, rank: int) -> int:
        """The check sum that a rank sends next. Raises RankFailed with the reason where it sends none."""
        try:
            answer = self.fellows[rank - 1].recv()
        except (OSError, EOFError) as e:
            raise RankDied(f"rank {rank} has died") from e
        if isinstance(answer, str):
            raise RankFailed(f"rank {rank} failed: {answer}")
        return answer

    def _blame(self, cause: Exception) -> None:
        """Raises RankFailed where another rank has failed within the last moments: one that has died rather than one
        that only says that somebody did not come to a sum."""
        found: list[RankFailed] = []
        for rank, fellow in enumerate(self.fellows, 1):
            try:
                while fellow.poll(BLAME_SECONDS):
                    self._answer_of(rank)
            except RankFailed as e:
                found.append(e)
        if found:
            raise min(found, key=lambda e: not isinstance(e, RankDied)) from cause

    def warm_up(self, shapes: Iterable[StepShape], progress: Callable[[int, int], None] | None = None) -> None:
        shapes = list(shapes)
        self._tell(WARM_UP, shapes)
        self.own.warm_up(shapes, progress)

    def between(self, action: Callable[[], None]) -> None:
        """Not for several ranks: what needs it is refused with them."""
        raise NotImplementedError("actions between steps would have to reach every rank")

    def counts(self) -> dict[str, float]:
        return self.own.counts()

    def close(self) -> None:
        for fellow in self.fellows:
            try:
                fellow.send((CLOSE, None))
            except OSError:
                continue  # it is gone already
        self.own.close()
        self._close_all()


def check_sum(packed: np.ndarray) -> int:
    """Of a packed result, without the times in its header, which differ from rank to rank."""
    return zlib.crc32(np.ascontiguousarray(without_times(packed)).tobytes())


def serve_rank(device: DeviceHalf, leader: Connection, depth: int) -> None:
    """The loop of ranks 1, 2, ...: runs what rank 0 says until it closes or dies. Up to `depth` steps stay in flight
    while there is more to do, as at rank 0."""
    in_flight, unmasked = 0, False  # unmasked: the last step waits for its mask, so it cannot end

    def report(most: int) -> int:
        for _ in range(in_flight - max(most, unmasked)):
            leader.send(check_sum(device.collect()))
        return min(in_flight, max(most, unmasked))

    try:
        while True:
            if in_flight > unmasked and not leader.poll(0):
                in_flight = report(in_flight - 1)
                continue
            kind, content = leader.recv()
            if kind == CLOSE:
                break
            if kind == WARM_UP:
                device.warm_up(content)
            elif kind == MASK:
                device.mask(content)
                unmasked = False
            else:
                device.launch(content)
                in_flight, unmasked = in_flight + 1, split_plan(content[:HEADER], content).late_mask
                in_flight = report(depth)
    except EOFError:
        return  # rank 0 is gone
    except Exception as e:
        leader.send(f"{type(e).__name__}: {e}")
        raise
    finally:
        device.close()
