"""Drives the device half by hand: a tiny planner with all pages mapped at seating. No host half."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from stretto.attn.torch_ragged import TorchRagged
from stretto.device.kv import KVCache, group_layers
from stretto.device.runner import Runner
from stretto.device.slots import SlotTable
from stretto.model.api import CausalModel
from stretto.wire import NEVER, Int, Real, RowResult, Seat, StepPlan, pack_plan, unpack_result


@dataclass
class Job:
    tokens: list[int]
    max_tokens: int = 16
    stop_ids: tuple[int, ...] = ()
    bias: tuple[tuple[int, float], ...] = ()
    ints: dict[Int, int] = field(default_factory=dict)
    reals: dict[Real, float] = field(default_factory=dict)


NEUTRAL = {Real.TEMPERATURE: 0.0, Real.TOP_P: 1.0, Real.MIN_P: 0.0, Real.REPETITION: 1.0, Real.PRESENCE: 0.0,
           Real.FREQUENCY: 0.0}


class Driver:
    """`backend` and `drafter` as the runner takes them. Pages of a slot are shuffled through the pool."""

    def __init__(self, model: CausalModel, *, slots: int = 9, context: int = 256, page_size: int = 16, backend=None,
                 drafter=None):
        groups = group_layers(model.layers)
        self.per_slot = -(-context // page_size) + 1
        self.pool = torch.randperm(slots * self.per_slot, generator=torch.Generator().manual_seed(3)) + 1
        kv = KVCache(model.layers, groups, [len(self.pool)] * len(groups), page_size, model.dtype, model.device)
        table = SlotTable(slots, context, page_size, len(groups), model.device)
        self.runner = Runner(model, backend or TorchRagged(), kv, table, drafter)
        self.drafter, self.groups, self.seq, self.epochs = drafter, groups, 0, 0
        self.verified = self.accepted = self.mixed = 0

    def run(self, jobs: list[Job], *, chunk: int = 1 << 30, caps=None) -> list[list[RowResult]]:
        """All jobs side by side until each is done. `caps(step, row)` chooses q_cap of rows past their prompt."""
        width = self.drafter.caps.max_width if self.drafter else 0
        plan = StepPlan(self.seq, width)
        epochs, fed, results = {}, [0] * len(jobs), [[] for _ in jobs]
        for i, job in enumerate(jobs):
            self.epochs += 1
            epochs[i] = self.epochs
            self._seat(plan, i + 1, self.epochs, job, width)
        live, most = set(range(len(jobs))), self.seq + 20 * sum(len(job.tokens) + job.max_tokens for job in jobs)
        while live:
            assert self.seq < most, f"jobs {sorted(live)} make no progress"
            filling = {i for i in live if fed[i] < len(jobs[i].tokens)}
            for i in sorted(live):
                cap = min(chunk, len(jobs[i].tokens) - fed[i]) if i in filling else \
                    caps(self.seq, i) if caps else 1 + width
                plan.rows.append((i + 1, epochs[i], cap))
            self.mixed += bool(filling) and filling != live
            output = self.runner.step(pack_plan(plan))
            for row in unpack_result(output.packed(output.body.cpu().numpy())).rows:
                i = row.slot - 1
                fed[i] += row.fed
                results[i].append(row)
                self.verified += row.verified
                self.accepted += max(0, len(row.new) - 1)
                if row.done:
                    live.discard(i)
            self.seq += 1
            plan = StepPlan(self.seq, width)
        self.runner.step(pack_plan(StepPlan(self.seq, releases=[i + 1 for i in range(len(jobs))])))
        return results

    def _seat(self, plan: StepPlan, slot: int, epoch: int, job: Job, width: int) -> None:
        n = len(job.tokens)
        ints = {Int.KNOWN: n, Int.LIMIT: n + max(job.max_tokens, 1), Int.EPOCH: epoch, Int.PROMPT: n,
                Int.FIRST_STOP: n, Int.SPECULATION: width, Int.LOGPROBS: -1, Int.SCORE_FROM: NEVER, **job.ints}
        reals = NEUTRAL | job.reals
        plan.seats.append(Seat(slot, True, [ints.get(c, 0) for c in Int], [reals[c] for c in Real], 0, job.tokens,
                               job.stop_ids, job.bias))
        mine = self.pool[(slot - 1) * self.per_slot : slot * self.per_slot].tolist()
        plan.maps += [(slot, g, i, page) for g in range(len(self.groups)) for i, page in enumerate(mine)]


def text(results: list[RowResult]) -> list[int]:
    return [t for row in results for t in row.new]
