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
import logging
import os
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from stretto.device.runner import Runner
from stretto.device.streams import DeviceHalf, LocalDevice
from stretto.device.symmetric import SymmetricMemory
from stretto.model.shard import Shard
from stretto.ops.exchange import side_by_side, total
from stretto.sample.features import StepShape
from stretto.wire import HEADER, Moved, split_plan, split_times, with_times, without_times

logger = logging.getLogger(__name__)
PLAN, MASK, WARM_UP, BETWEEN, CLOSE = "plan", "mask", "warm up", "between", "close"  # to the other ranks
SUM, DONE, FAILED = "sum", "done", "failed"  # from them
BLAME_SECONDS = 2.0  # in which a rank that fails can say so
LOOK_SECONDS = 0.05  # how often rank 0 looks at itself while it waits for the others
NCCL_HANDLING = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""torch would end this process where another rank has died; whoever waits for this one shall hear why first."""
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

    def __init__(self, rank: int, ranks: int, device: torch.device, memory: SymmetricMemory | None = None,
                 nccl: bool = False):
        """`nccl`: sums that `memory` does not take are NCCL's, rather than in order."""
        super().__init__(rank, ranks)
        self.device, self._memory, self._nccl = device, memory, nccl
        self._letting_go = threading.Lock()

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
        if self._memory is not None and self._memory.joins(x):
            return self._memory.side_by_side(x)
        return side_by_side(self._parts(x))

    def let_go(self) -> None:
        """After a rank has died: sums that wait for it end, with nonsense."""
        if self.device.type != "cuda":
            return  # gloo notices by itself
        with self._letting_go:
            if self._memory is not None:
                self._memory.let_go()
            if dist.is_initialized():
                dist.distributed_c10d._abort_process_group()

    def _parts(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """x, contiguous, of every rank, in order."""
        parts = x.new_empty(self.ranks, *x.shape)
        gather(parts.flatten(0, 1), x)
        return parts.unbind(0)


gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name up to torch 2.12


def join_ranks(rank: int, ranks: int, store: dist.Store, device: torch.device, fixed: bool = False,
               one_host: bool = True) -> RankShard:
    """Meets the other ranks through a store that all can reach, each with a device of its own. Waits for all of them.
    `one_host`: the GPUs may reach each other's memory."""
    if device.type == "cpu":
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=TIMEOUT)
        return RankShard(rank, ranks, device)
    os.environ |= NCCL_HANDLING
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=ranks, timeout=TIMEOUT, device_id=device)
    return RankShard(rank, ranks, device, _common_memory(rank, ranks, device) if one_host else None, nccl=not fixed)


def _common_memory(rank: int, ranks: int, device: torch.device) -> SymmetricMemory | None:
    """None where some rank cannot have it."""
    memory = None
    try:
        memory = SymmetricMemory(rank, ranks, device)
    except RuntimeError as e:
        logger.warning("sums of these GPUs all go through NCCL, which takes longer for small ones: %s", e)
    everywhere = torch.tensor(int(memory is not None), device=device)
    dist.all_reduce(everywhere, dist.ReduceOp.MIN)
    return memory if everywhere.item() else None


def leave_ranks() -> None:
    """The end of an orderly meeting; no graph may be left that holds one of its sums."""
    if dist.is_initialized():
        dist.destroy_process_group()


class Fellow:
    """Rank 0's end of the connection to another rank. What comes is kept until it is asked for, in order of each
    kind."""

    def __init__(self, rank: int, connection: Connection):
        self.rank, self.connection = rank, connection
        self._came: dict[str, deque[Any]] = {SUM: deque(), DONE: deque()}

    def tell(self, kind: str, content: Any = None) -> None:
        try:
            self.connection.send((kind, content))
        except OSError as e:
            self.hear_last_words()
            raise RankDied(f"rank {self.rank} has died") from e

    def hear_last_words(self) -> None:
        """Raises RankFailed where it has said why it fails."""
        with suppress(OSError, EOFError):
            while self.connection.poll():
                self._receive()

    def has(self, kind: str) -> bool:
        return bool(self._came[kind])

    def take(self, kind: str) -> Any:
        """The oldest of a kind; waits for it. Raises RankFailed."""
        while not self._came[kind]:
            self.receive()
        return self._came[kind].popleft()

    def receive(self) -> None:
        """Whatever comes next. Raises RankFailed where that is the end."""
        try:
            self._receive()
        except (OSError, EOFError) as e:
            raise RankDied(f"rank {self.rank} has died") from e

    def _receive(self) -> None:
        kind, content = self.connection.recv()
        if kind == FAILED:
            raise RankFailed(f"rank {self.rank} failed: {content}")
        self._came[kind].append(content)


class RanksDevice:
    """`DeviceHalf` of rank 0: what it runs, the others run. A step's result is given out when all have the same."""

    def __init__(self, own: LocalDevice, shard: RankShard, connections: Sequence[Connection],
                 close_all: Callable[[bool], None], lives: Sequence[Any] = ()):
        """`connections`: to ranks 1, 2, ...; `close_all(failed)` ends their processes. `lives`: what can be waited for
        (`multiprocessing.connection.wait`), and is ready when that rank's process has ended."""
        self.own, self._shard, self._close_all = own, shard, close_all
        self._lost, self._closing = 0, False  # the rank that has died
        threading.Thread(target=self._watch, args=(lives,), name="lives of the ranks", daemon=True).start()
        self.fellows = [Fellow(rank, connection) for rank, connection in enumerate(connections, 1)]
        self._moved: dict[int, list[Moved]] = {}  # by plan: of the ranks that have moved its pages
        self._failed = False
        self._await_done()  # they have loaded their parts

    def _watch(self, lives: Sequence[Any]) -> None:
        """A rank that dies leaves this one's GPU in the middle of a sum, and whoever waits for the GPU with it."""
        if not lives:
            return
        ended = wait(list(lives))
        if not self._closing:
            self._lost = 1 + min(lives.index(life) for life in ended)
            logger.error("rank %d has died", self._lost)
            self._shard.let_go()

    def _tell(self, kind: str, content: Any = None) -> None:
        for fellow in self.fellows:
            fellow.tell(kind, content)

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        """An engine that has failed ends without waiting for anybody."""
        if self._failed:
            raise RankFailed("the ranks have failed before")
        try:
            yield
        except RankFailed:
            self._failed = True
            raise
        except Exception as e:  # often only that somebody else did not come to a sum
            self._failed = True
            self._blame(e)
            raise

    def launch(self, packed: np.ndarray) -> None:
        with self._noting_failure():
            self._tell(PLAN, packed)
            self.own.launch(packed)

    def mask(self, packed: np.ndarray) -> None:
        with self._noting_failure():
            self._tell(MASK, packed)
            self.own.mask(packed)

    def collect(self) -> np.ndarray:
        found: list[np.ndarray] = []

        def look() -> None:  # if this one fails, the others may wait for it, and never answer
            if not found and self.own.ready():
                found.append(self.own.collect())

        with self._noting_failure():
            self._await(SUM, look)
            packed = found[0] if found else self.own.collect()
            mine, moved = check_sum(packed)
            self._note_moved(moved)
            for fellow in self.fellows:
                sum_of_rank, moved = fellow.take(SUM)
                self._note_moved(moved)
                if sum_of_rank != mine:
                    raise RankFailed(f"rank {fellow.rank} computed another result than rank 0: their weights or devices"
                                     " differ")
            return self._with_moves(packed)

    def _await(self, kind: str, look: Callable[[], None] = lambda: None) -> None:
        """Until every other rank has answered; `look` is called now and then. The first that dies ends it, whichever it
        is: the others may be waiting for it."""
        owing = {fellow.connection: fellow for fellow in self.fellows if not fellow.has(kind)}
        while owing:
            for connection in wait(list(owing), timeout=LOOK_SECONDS):
                fellow = owing[connection]  # type: ignore[index]
                fellow.receive()
                if fellow.has(kind):
                    del owing[connection]  # type: ignore[arg-type]
            look()

    def _await_done(self) -> list[Exception | None]:
        """Until all others have done what they were told; what went wrong on each of them."""
        with self._noting_failure():
            self._await(DONE)
        return [fellow.take(DONE) for fellow in self.fellows]

    def _blame(self, cause: Exception) -> None:
        """Raises RankFailed where another rank has failed within the last moments: one that has died rather than one
        that only says that somebody did not come to a sum."""
        found: list[RankFailed] = []
        for fellow in self.fellows:
            try:
                while fellow.connection.poll(BLAME_SECONDS):
                    fellow.receive()
            except RankFailed as e:
                found.append(e)
        if found:
            raise min(found, key=lambda e: not isinstance(e, RankDied)) from cause

    def _note_moved(self, moved: Sequence[Moved]) -> None:
        for one in moved:
            self._moved.setdefault(one.seq, []).append(one)

    def _with_moves(self, packed: np.ndarray) -> np.ndarray:
        """A result that tells of the moves which are done on every rank, and how long the slowest took."""
        body, seconds, _ = split_times(packed)
        done = []
        for seq in sorted(self._moved):
            of_plan = self._moved[seq]
            if len(of_plan) == 1 + len(self.fellows):
                done.append(Moved(seq, max(m.save_seconds for m in of_plan), max(m.restore_seconds for m in of_plan)))
                del self._moved[seq]
        return with_times(body, seconds, done)

    def warm_up(self, shapes: Iterable[StepShape], progress: Callable[[int, int], None] | None = None) -> None:
        shapes = list(shapes)
        with self._noting_failure():
            self._tell(WARM_UP, shapes)
            self.own.warm_up(shapes, progress)

    def between(self, action: Callable[[Runner], None]) -> None:
        """On every rank at the same time, so it may hold sums; it must be picklable. Raises what it raises on any of
        them, the others' first."""
        with self._noting_failure():
            self._tell(BETWEEN, action)
        mine = _attempt(self.own, action)
        errors = [error for error in self._await_done() if error is not None]
        if mine is not None:
            errors.append(mine)
        if errors:
            raise errors[0]

    def counts(self) -> dict[str, float]:
        return self.own.counts()

    def check(self) -> None:
        if self._lost:
            self._failed = True
            raise RankDied(f"rank {self._lost} has died")

    def close(self) -> None:
        self._closing = True
        if self._failed:
            self._close_all(True)  # first: nobody waits for them then
            self._shard.let_go()
        else:
            for fellow in self.fellows:
                with suppress(OSError):
                    fellow.connection.send((CLOSE, None))
        self.own.close()
        if self._failed:
            leave_ranks()
        else:
            self._close_all(False)


def check_sum(packed: np.ndarray) -> tuple[int, list[Moved]]:
    """Of a packed result: its sum without what differs from rank to rank, and the moves that it tells of."""
    return zlib.crc32(np.ascontiguousarray(without_times(packed)).tobytes()), split_times(packed)[2]


def serve_rank(device: DeviceHalf, leader: Connection, depth: int) -> bool:
    """The loop of ranks 1, 2, ..., whose part is loaded: runs what rank 0 says until it closes or dies. Up to `depth`
    steps stay in flight while there is more to do, as at rank 0. Returns whether rank 0 has closed."""
    in_flight, unmasked = 0, False  # unmasked: the last step waits for its mask, so it cannot end

    def report(most: int) -> int:
        for _ in range(in_flight - max(most, unmasked)):
            leader.send((SUM, check_sum(device.collect())))
        return min(in_flight, max(most, unmasked))

    try:
        leader.send((DONE, None))
        while True:
            if in_flight > unmasked and not leader.poll(0):
                in_flight = report(in_flight - 1)
                continue
            kind, content = leader.recv()
            if kind == CLOSE:
                device.close()
                return True
            if kind == WARM_UP:
                device.warm_up(content)
            elif kind == BETWEEN:
                leader.send((DONE, _attempt(device, content)))
            elif kind == MASK:
                device.mask(content)
                unmasked = False
            else:
                device.launch(content)
                in_flight, unmasked = in_flight + 1, split_plan(content[:HEADER], content).late_mask
                in_flight = report(depth)
    except (EOFError, ConnectionError):
        return False
    except Exception as e:
        with suppress(OSError):
            leader.send((FAILED, f"{type(e).__name__}: {e}"))
        raise


def _attempt(device: DeviceHalf, action: Callable[[Runner], None]) -> Exception | None:
    """What an action between steps raises is of whoever asked for it."""
    try:
        device.between(action)
    except Exception as e:
        return e
    return None
