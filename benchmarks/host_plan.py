"""What the host half costs a step: plan() + process() of full decode batches, on one core, without a device.

    python benchmarks/host_plan.py [--rows 256] [--steps 400] [--width 0] [--page-size 16]

The device is a loop that answers every row at once: `emit` ids a row and step. Target: at most 2 ms at 256 decode rows.
Measured with Python's cycle collector on and off: the host half makes no cycles, so a server need not pay for it.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections import deque

from stretto.host.half import HostHalf
from stretto.host.limits import HostLimits
from stretto.params import SamplingParams
from stretto.protocol import Request
from stretto.text.stream import TextDelta
from stretto.wire import Int, RowResult, StepPlan, StepResult


class NoText:
    """Text costs what the tokeniser costs; it is measured elsewhere."""

    def push(self, ids: list[int], final: bool) -> TextDelta:
        return TextDelta("", None, len(ids))


class Echo:
    """Answers every row of a plan: lengths as the row formula says, ids at random."""

    def __init__(self, emit: int):
        self.emit, self.rng = emit, random.Random(0)
        self.slots: dict[int, list[int]] = {}

    def run(self, plan: StepPlan) -> StepResult:
        for seat in plan.seats:
            self.slots[seat.slot] = [seat.ints[Int.LEN], seat.ints[Int.KNOWN], seat.ints[Int.LIMIT]]
        return StepResult(plan.seq, [self._row(*row) for row in plan.rows])

    def _row(self, slot: int, epoch: int, q_cap: int) -> RowResult:
        state = self.slots[slot]
        length, known, limit = state
        if known >= limit:
            return RowResult(slot, epoch, 0, 0, length, known, True, [], [])
        q = min(q_cap, known - length + self.emit - 1, limit - 1 - length)
        n_new = max(0, length + q - known + 1)
        new = [self.rng.randrange(1000) for _ in range(n_new)]
        known += n_new
        state[0], state[1] = (known - 1, known) if n_new else (length + q, known)
        return RowResult(slot, epoch, q, max(0, n_new - 1), state[0], known, known >= limit, new, [])


def measure(rows: int, steps: int, width: int, page_size: int, prompt: int) -> tuple[list[float], HostHalf]:
    """Seconds of CPU time in plan() + process(), for each step whose rows all decode."""
    emit = 1 + width // 2
    context = prompt + 16 + emit * (steps + 40)
    pages = rows * (context // page_size + 2)
    limits = HostLimits(page_size=page_size, pages=(pages,), max_slots=rows + 1, width=width, depth=1, chunk=4096,
                        max_model_len=context + 1, budget=max(8192, rows * (1 + width)))
    half, device, rng = HostHalf(limits, lambda sampling: NoText()), Echo(emit), random.Random(1)
    for i in range(rows):
        tokens = [rng.randrange(1000) for _ in range(prompt + i % 16)]  # pages fill at different steps
        half.submit(Request(rid=f"r{i}", tokens=tokens, sampling=SamplingParams(ignore_eos=True)))
    flight: deque[StepResult] = deque()
    seconds: list[float] = []
    while len(seconds) < steps:
        start = time.thread_time()
        plan = half.plan()
        planned = time.thread_time() - start
        assert plan is not None
        decoding = not plan.seats and len(plan.rows) == rows
        flight.append(device.run(plan))
        if len(flight) > limits.depth:
            result = flight.popleft()
            start = time.thread_time()
            half.process(result)
            if decoding:
                seconds.append(planned + time.thread_time() - start)
    return seconds, half


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in (("rows", 256), ("steps", 400), ("width", 0), ("page-size", 16), ("prompt", 64)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    for collector in ("on", "off"):
        if collector == "off":
            gc.disable()
        seconds, _ = measure(args.rows, args.steps, args.width, args.page_size, args.prompt)
        ms = sorted(1000 * s for s in seconds)
        median, p99 = statistics.median(ms), ms[int(0.99 * len(ms))]
        print(f"rows {args.rows}  width {args.width}  page {args.page_size}  collector {collector}: CPU time median"
              f" {median:.2f} ms  p99 {p99:.2f} ms  worst {ms[-1]:.2f} ms  ({1000 * median / args.rows:.2f} us a row)")


if __name__ == "__main__":
    main()
