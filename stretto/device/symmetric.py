"""Memory of a GPU that the other ranks' GPUs write to, for sums so small that their latency is all they cost.

torch's symmetric memory (`torch.distributed._symmetric_memory`) maps each rank's allocation at all others of the host.
NVLink multicast is left off: a program that ends in the middle of it can take the links of the whole host with it.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as symmetric

from stretto.ops.exchange import PROGRAMS, Ways, rows_that_fit

MOST_LAUNCHES = 4  # of a join
AHEAD = 1 << 30  # of a count, as far as one can be


class SymmetricMemory:
    """Sums and joins over ranks by one launch each. Made on all ranks at the same time, which must be on one host; then
    they wait for each other once before the first sum."""

    def __init__(self, rank: int, ranks: int, device: torch.device, two_shots: bool = False):
        """`two_shots`: for sums of three ranks and more that are not small (`ops.exchange`). Raises RuntimeError where
        the GPUs cannot reach each other's memory, or the system does not let them."""
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"  # torch reads it when memory is mapped
        self.rank, self._ways = rank, Ways(ranks, two_shots)
        self._slot = self._ways.slot
        self._flags_at = 2 * ranks * PROGRAMS * self._slot
        size = self._flags_at + 4 * 2 * ranks * PROGRAMS
        self._memory = symmetric.empty(size, dtype=torch.uint8, device=device)
        self._flags = self._memory[self._flags_at :].view(torch.int32).view(2, ranks, PROGRAMS)
        self._counts, self._beyond = torch.zeros(2, 2, PROGRAMS, dtype=torch.int32, device=device).unbind(0)
        self._aside = torch.cuda.Stream(device)
        torch.cuda.synchronize(device)
        self.let_go()  # once for nothing: its kernels could not be loaded beside one that waits
        torch.cuda.synchronize(device)
        self._memory.zero_()
        world = dist.group.WORLD
        assert world is not None, "the ranks have not met"
        self._handle = symmetric.rendezvous(self._memory, world)
        self._addresses = torch.tensor(self._handle.buffer_ptrs, dtype=torch.int64, device=device)
        torch.cuda.synchronize(device)  # nobody may write before all are zero

    def takes(self, x: torch.Tensor) -> bool:
        """Whether a sum is small enough. What is not is left to NCCL."""
        return self._ways.shots(x) > 0

    def joins(self, x: torch.Tensor) -> bool:
        """Whether a join takes few launches."""
        return len(x) <= MOST_LAUNCHES * rows_that_fit(x, self._slot)

    def total(self, x: torch.Tensor, base: torch.Tensor | None = None) -> torch.Tensor:
        """As `ops.exchange.total`; on top of `base`, which is contiguous, it is written there."""
        out = torch.empty_like(x) if base is None else base
        if self._ways.shots(x) == 2:
            from stretto.ops.triton_exchange import launch_two_shot  # as below

            launch_two_shot(x, out, self._addresses, self._counts, self.rank, self._slot, self._flags_at, base)
        else:
            self._launch(x.view(1, -1), out, base)
        return out

    def side_by_side(self, x: torch.Tensor) -> torch.Tensor:
        """As `ops.exchange.side_by_side`, of x [L, n]."""
        out = x.new_empty(len(x), x.shape[1] * len(self._addresses))
        most = rows_that_fit(x, self._slot)
        for rows, into in zip(x.split(most), out.split(most), strict=True):
            if len(rows):
                self._launch(rows, into, join=True)
        return out

    def _launch(self, x: torch.Tensor, out: torch.Tensor, base: torch.Tensor | None = None, join: bool = False) -> None:
        from stretto.ops.triton_exchange import launch_exchange  # imports triton, which installations for CPU may lack

        launch_exchange(x, out, self._addresses, self._counts, self.rank, self._slot, self._flags_at, base, join)

    def let_go(self) -> None:
        """Whoever waits here for another rank waits no more. Of an engine that ends: what comes out is nonsense."""
        with torch.cuda.stream(self._aside):  # allocates nothing, for that could wait for the GPU
            torch.add(self._counts, AHEAD, out=self._beyond)
            self._flags.copy_(self._beyond.unsqueeze(1).expand_as(self._flags))
