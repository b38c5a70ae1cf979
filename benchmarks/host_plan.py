"""What the host costs a step of R decode rows, on one core, without a device: every part of it, speculation included.

    python -m benchmarks.host_plan [--rows 256 512] [--width 0 7] [--page-size 16 1] [--steps 200]

    plan      who runs, with which cap; with a width: what speculation pays (`--width 7`: at most 7 drafts, auto)
    pack      the plan as one array, `unpack` the result from one
    process   lengths, pages, ids, outputs
    text      of it, what the text of the ids takes, by a real tokenizer of 49k ids
    send      the step's outputs as one message

The device is a loop that answers every row at once. Aim: plan + process at most 2 ms at 256 rows, pages of 1 included.
Python's cycle collector runs as it does in an engine (`--collect`: as Python would by itself).
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
import numpy as np

from stretto.config import Config
from stretto.engine.collector import look_once, spare_collector
from stretto.engine.locate import locate
from stretto.engine.messages import Outputs
from stretto.host.cost import CostModel, StepWork
from stretto.host.elastic import Elastic
from stretto.host.half import HostHalf
from stretto.host.limits import HostLimits
from stretto.params import SamplingParams
from stretto.protocol import Request
from stretto.text.stream import IncrementalText, TextDelta
from stretto.text.tokenizer import load_tokenizer
from stretto.wire import RESULT_HEADER, Int, ResultLayout, StepPlan, pack_plan, unpack_result

T = TypeVar("T")
BUDGET = 8192


class NoText:
    """Text costs what the tokeniser costs."""

    @classmethod
    def of(cls, sampling: SamplingParams) -> NoText:
        return cls()

    def follow(self, prompt: Sequence[int]) -> None:
        pass

    def push(self, ids: list[int], final: bool) -> TextDelta:
        return TextDelta("", None, len(ids))


class Echo:
    """Answers every row of a plan: lengths as the row formula says, ids at random, drafts that are often right."""

    def __init__(self, width: int):
        self.width, self.rng = width, random.Random(0)
        self.slots: dict[int, list[int]] = {}
        self.offers = 0  # drafts that each row has waiting

    def run(self, plan: StepPlan) -> np.ndarray:
        for seat in plan.seats:
            self.slots[seat.slot] = [seat.ints[Int.LEN], seat.ints[Int.KNOWN], seat.ints[Int.LIMIT]]
        layout = ResultLayout(len(plan.rows), 1 + self.width, self.width)
        rows = [self._row(*row) for row in plan.rows]
        self.offers = plan.draft_width
        body = np.asarray(rows, dtype=np.int32).reshape(-1)
        assert len(body) == layout.words - RESULT_HEADER
        return np.concatenate([np.asarray(layout.header(plan.seq), dtype=np.int32), body])

    def _row(self, slot: int, epoch: int, q_cap: int) -> list[int]:
        state = self.slots[slot]
        length, known, limit = state
        q = max(0, min(q_cap, known - length + self.offers, limit - 1 - length))
        verified = max(0, length + q - known)
        n_new = 1 + min(verified, self.rng.choice((0, 1, 2, 3, 7))) if length + q >= known and q else 0
        new = [self.rng.randrange(1000, 40_000) for _ in range(n_new)]
        known += n_new
        state[0], state[1] = (known - 1, known) if n_new else (length + q, known)
        head = [slot, epoch, q, verified, state[0], known, int(known >= limit), n_new, 0]
        return head + new + [0] * (1 + self.width - n_new) + [0] * self.width


def speculation(rows: int, width: int) -> Elastic | None:
    """On a device whose step is bound by memory up to 200 tokens or so."""
    if not width:
        return None
    times = [(StepWork(r, r * (1 + k), r * c), 4e-3 + 2e-5 * max(0, r * (1 + k) - 200) + 3e-8 * r * c)
             for r in (1, 16, 64, 256) for k in (0, 3, 7) for c in (32, 2048)]
    return Elastic(CostModel(times, BUDGET), rows + 1, (0, width), exact=False)


class Clock:
    """CPU time of each part, by step."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}
        self.step: dict[str, float] = {}

    def time(self, part: str, action: Callable[..., T], *args: object) -> T:
        start = time.thread_time()
        found = action(*args)
        self.step[part] = self.step.get(part, 0.0) + time.thread_time() - start
        return found

    def next(self, counts: bool) -> None:
        for part, seconds in self.step.items() if counts else ():
            self.seconds.setdefault(part, []).append(seconds)
        self.step = {}


def measure(rows: int, steps: int, width: int, page_size: int, prompt: int,
            text: Callable[[SamplingParams], object]) -> Clock:
    """Of steps whose rows all decode."""
    context = prompt + 16 + (1 + width) * (steps + 40)
    pages = rows * (context // page_size + 2)
    limits = HostLimits(page_size=page_size, pages=(pages,), max_slots=rows + 1, width=width, depth=1, chunk=4096,
                        max_model_len=context + 1, budget=BUDGET, elastic=speculation(rows, width))
    half, device, rng, clock = HostHalf(limits, text), Echo(width), random.Random(1), Clock()  # type: ignore[arg-type]
    encoder = msgspec.msgpack.Encoder()
    for i in range(rows):
        tokens = [rng.randrange(1000) for _ in range(prompt + i % 16)]  # pages fill at different steps
        half.submit(Request(rid=f"request-{i}", tokens=tokens, sampling=SamplingParams(ignore_eos=True)))
    flight: deque[np.ndarray] = deque()
    while len(clock.seconds.get("plan", ())) < steps:
        plan = clock.time("plan", half.plan)
        assert plan is not None
        clock.time("pack", pack_plan, plan)
        flight.append(device.run(plan))
        if len(flight) > limits.depth:
            result = clock.time("unpack", unpack_result, flight.popleft())
            outputs = clock.time("process", half.process, result)
            clock.time("send", encoder.encode, Outputs(outputs))
            clock.next(not plan.seats and len(plan.rows) == rows)
    return clock


def real_text() -> Callable[[SamplingParams], object]:
    """Of the default model's tokenizer. Fetches it where it is not in the cache."""
    tokenizer = load_tokenizer(locate(Config()).tokenizer_path)
    return lambda sampling: IncrementalText.for_request(tokenizer, sampling)


def told(clock: Clock, bare: Clock) -> str:
    """Medians in ms; of text: what it adds to `process`. The 10th percentile is that of a quiet core."""
    ms = {part: 1e3 * statistics.median(seconds) for part, seconds in bare.seconds.items()}
    ms["text"] = 1e3 * statistics.median(clock.seconds["process"]) - ms["process"]
    both = sorted(a + b for a, b in zip(bare.seconds["plan"], bare.seconds["process"]))
    parts = "  ".join(f"{part} {value:.2f}" for part, value in ms.items())
    p10, p50, p99 = (1e3 * both[int(share * len(both))] for share in (0.1, 0.5, 0.99))
    return f"{parts}  all {sum(ms.values()):.2f}  |  plan + process {p50:.2f}, p10 {p10:.2f}, p99 {p99:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, values in (("rows", [256, 512]), ("width", [0, 7]), ("page-size", [16, 1])):
        parser.add_argument(f"--{name}", type=int, nargs="+", default=values)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--collect", action="store_true")
    parser.add_argument("--no-text", action="store_true", help="without a tokenizer")
    args = parser.parse_args()
    streams = [NoText.of] if args.no_text else [real_text(), NoText.of]
    if not args.collect:
        spare_collector()
        look_once()
    for rows in args.rows:
        for width in args.width:
            for page_size in args.page_size:
                clocks = [measure(rows, args.steps, width, page_size, args.prompt, stream) for stream in streams]
                print(f"rows {rows}  width {width}  page {page_size}: {told(clocks[0], clocks[-1])} ms", flush=True)


if __name__ == "__main__":
    main()
