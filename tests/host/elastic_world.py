"""A model of a GPU that serves one model, to play a speculation policy on: true step times, true acceptances.

Figures of one H200 and an 8B model in bfloat16 (docs/benchmarks.md): weights once a step, KV per cell, matrix products
per token, and what lies between kernels. Sizes are padded to buckets, as CUDA graphs are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from stretto.device.graphs import tokens_bucket
from stretto.host.cost import CostModel, StepWork
from stretto.host.elastic import Demand, Elastic
from stretto.wire import RowResult, StepResult

WIDTH = 7
MOST_TOKENS = 8192
BYTES, CELL, RATE = 16.0e9, 131072, 4.2e12  # weights, KV of a token, bytes a second
FLOPS, PRODUCTS = 2 * 8.0e9, 6.6e14  # of a token, a second
LAUNCHES = 0.35e-3
CHUNK = 2048


def true_seconds(work: StepWork) -> float:
    n = tokens_bucket(work.rows, work.tokens, not work.pairs)
    products = max(BYTES / RATE, FLOPS * n / PRODUCTS) + 0.1 * min(BYTES / RATE, FLOPS * n / PRODUCTS)
    attention = work.context * CELL / RATE + 4 * 32 * 4096 * work.pairs / 4.5e14
    proposals = (0.05e-3 + 2e-7 * work.rows * work.draft_width) if work.draft_width else 0.0
    if n > 64:  # other kernels, which take longer for a little more
        products += 0.8e-3 if n <= 160 else 0.4e-3
    return LAUNCHES + products + attention + proposals + 1e-6 * work.rows


LARGE_SIZES = (1, 32, 64, 128, 256, 320, 512, 576, 768, 1024, 2048)
LARGE_TIMES = (0.00425, 0.0044, 0.00495, 0.00545, 0.0077, 0.0093, 0.0123, 0.0143, 0.019, 0.0234, 0.048)


def measured_seconds(work: StepWork) -> float:
    """As measured on an H200 with an 8B model, where 512 tokens are a good size: two a row of 256."""
    n = tokens_bucket(work.rows, work.tokens, not work.pairs)
    proposals = 0.1e-3 if work.draft_width else 0.0
    return float(np.interp(n, LARGE_SIZES, LARGE_TIMES)) + 32e-9 * work.context + 3e-10 * work.pairs + proposals


class HeldUp:
    """Graphs are captured in the first steps: each takes long, and it is the step beside it that seems to."""

    def __init__(self) -> None:
        self.steps = 0

    def __call__(self, work: StepWork) -> float:
        self.steps += 1
        return measured_seconds(work) + 0.15 * (self.steps <= 96 and self.steps % 6 < 2)


CPU_SIZES = (1, 4, 8, 16, 32, 64, 128, 512)
CPU_TIMES = (0.055, 0.055, 0.070, 0.087, 0.143, 0.235, 0.415, 1.25)


def cpu_seconds(work: StepWork) -> float:
    """A CPU core with weights of four bits (SmolLM2 135M): steps are as large as what they feed, a few tokens more cost
    little, and a block drafter with weights of its own a part of a step."""
    proposals = 0.010 + 0.0042 * work.rows if work.draft_width else 0.0
    return float(np.interp(work.tokens, CPU_SIZES, CPU_TIMES)) + 1e-8 * work.context + proposals


def cpu_profile(noise: float, seed: int) -> list[tuple[StepWork, float]]:
    """What a start-up measures while others use the machine: each time is longer by up to `noise`."""
    rng = np.random.default_rng(seed)
    works = [StepWork(r, r * (1 + k), r * 32, draft_width=w) for r in (1, 4, 16) for k, w in
             ((0, 0), (WIDTH, 0), (0, WIDTH))]
    works += [StepWork(r, 4 * r, r * 32) for r in (1, 4)] + [StepWork(1, n, n, n * n) for n in (64, 512)]
    return [(work, cpu_seconds(work) * (1 + noise * float(rng.random()))) for work in works]


def profile(true: Callable[[StepWork], float] | None = None) -> list[tuple[StepWork, float]]:
    """What a start-up would measure; of the usual GPU, or of another one."""
    works = [StepWork(r, r * (1 + k), r * c) for r in (1, 4, 16, 64, 256) for k in (0, 1, 3, 7) for c in (64, 2048)
             if r * c <= 600_000]
    works += [StepWork(r, r, r * 64, draft_width=WIDTH) for r in (1, 16, 256)]
    works += [StepWork(r, r * (1 + WIDTH), r * 64) for r in (24, 48, 96)]
    works += [StepWork(1, n, n, n * c) for n in (512, 2048, 8192) for c in (0, 4096)]
    return [(work, (true or true_seconds)(work)) for work in works]


Acceptances = Callable[[int, int], float]
"""(row, step) -> chance that a draft is accepted."""


@dataclass(frozen=True)
class Point:
    name: str
    rows: int
    context: int
    acceptance: Acceptances
    prompts: float = 0.0  # prompt tokens for each generated one: of the requests that replace those that end
    offers: float = 1.0  # chance that the drafter finds anything for a row
    knows: tuple[float, ...] = ()  # a draft's chance is one of these, in place of `acceptance`; the drafter knows which
    grown: Callable[[int], int] = lambda step: 0  # cells of each row's context more, by step


class Fixed:
    """The same number of drafts, always."""

    def __init__(self, width: int):
        self.width = width

    def choose(self, demand: Demand) -> tuple[list[int], int]:
        return [self.width] * len(demand.slots), self.width


class ByTokens:
    """A rule that knows how many tokens a step holds and nothing of contexts: speculates while there are few rows."""

    def choose(self, demand: Demand) -> tuple[list[int], int]:
        rows = len(demand.slots)
        width = next((k for most, k in ((8, 7), (32, 5), (64, 3), (128, 1)) if rows <= most), 0)
        return [width] * rows, width


def elastic(exact: bool = False, goal: float | None = None, confident: bool = False) -> Elastic:
    cost = CostModel(profile(), MOST_TOKENS, None if exact else tokens_bucket)
    return Elastic(cost, 257, (0, WIDTH), exact, goal, confident=confident)


def play(point: Point, policy, steps: int, seed: int = 0, skip: int = 0, noise: float = 0.03,
         true: Callable[[StepWork], float] = true_seconds, exact: bool = False) -> float:
    """Generated tokens a second, prompts being fed in between as they come. `exact`: steps are as large as what they
    feed, not as what they have room for."""
    rng = np.random.default_rng(seed)
    slots = np.arange(1, point.rows + 1)
    offered, tokens, seconds, owed = np.zeros(point.rows, np.int64), 0, 0.0, 0.0
    chances = np.zeros((point.rows, WIDTH))
    for step in range(steps):
        chunk = int(min(owed, CHUNK)) if owed >= CHUNK / 4 else 0
        context = point.rows * (point.context + point.grown(step))
        demand = Demand(slots, np.full(point.rows, WIDTH), np.zeros(point.rows, bool), context, chunk, chunk)
        if isinstance(policy, Elastic):
            choice = policy.choose(demand)
            drafts, width, chunk, absent = choice.drafts, choice.draft_width, choice.chunk_tokens, choice.absent
        else:
            (drafts, width), absent = policy.choose(demand), 0
        verified = np.minimum(drafts, offered)
        before = np.cumsum(verified) - verified
        verified = np.clip(sum(drafts) - absent - before, 0, verified)  # those that do not fit wait (ops/bind.py)
        if not point.knows:
            chances = np.asarray([[point.acceptance(row, step)] for row in range(point.rows)])
        right = np.cumprod(rng.random((point.rows, WIDTH)) < chances, axis=1)
        emitted = 1 + np.where(np.arange(WIDTH) < verified[:, None], right, 0).sum(1)
        exact = exact or (isinstance(policy, Elastic) and policy.exact)
        planned = point.rows + (int(verified.sum()) if exact else sum(drafts) - absent) + chunk
        work = StepWork(point.rows, planned, demand.context + chunk, chunk * chunk, width)
        took = true(work) * float(np.exp(noise * rng.standard_normal()))
        offered = np.where(rng.random(point.rows) < point.offers, width, 0)
        if point.knows:
            chances = rng.choice(point.knows, (point.rows, WIDTH))
            least = choice.least if isinstance(policy, Elastic) else 0.0
            offered = np.minimum(offered, (np.cumprod(chances, axis=1) >= least).sum(1))
        if isinstance(policy, Elastic):
            policy.launched(step, choice, {slot: 1 + k for slot, k in zip(slots.tolist(), drafts)}, planned, width,
                            absent)
            rows = [RowResult(slot, 1, 1 + k, n, 0, 0, False, [0] * out, [0] * found) for slot, k, n, out, found
                    in zip(slots.tolist(), drafts, verified.tolist(), emitted.tolist(), offered.tolist())]
            policy.ran(StepResult(step, rows), took)
        owed += point.prompts * int(emitted.sum()) - chunk
        if step >= skip:
            tokens += int(emitted.sum())
            seconds += took
    chunk_seconds = true(StepWork(1, CHUNK, CHUNK, CHUNK * CHUNK))
    return tokens / (seconds + chunk_seconds * max(owed, 0.0) / CHUNK)  # prompts that are still owed will cost, too
