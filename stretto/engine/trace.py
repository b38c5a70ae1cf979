"""Recording of steps: when each was planned, launched and collected, and what it fed. Costs nothing while it is off.

    plan    launch                      collect      process         one record a step; times of time.perf_counter
    |-------|---- device has the step ----|--- wait ---|----|
"""

from __future__ import annotations

import time

from stretto.host.counters import Counters
from stretto.protocol import StepRecord

COUNTED = ("prefill_tokens", "decode_tokens", "verify_tokens", "prefill_rows", "plain_rows", "verify_rows",
           "generated_tokens", "accepted", "retractions")


class StepTrace:
    """Records the next `steps` steps. Steps are launched and collected in order."""

    def __init__(self, steps: int):
        self._left = steps
        self._open: dict[int, StepRecord] = {}  # by seq: launched, not yet processed
        self._before: dict[str, int] = {}
        self.records: list[StepRecord] = []

    def launched(self, seq: int, rows: int, planning: float, planned: float) -> None:
        if self._left > 0:
            self._left -= 1
            self._open[seq] = StepRecord(seq, rows, planning, planned, time.perf_counter())

    def collected(self, seq: int, waiting: float, counters: Counters) -> None:
        record = self._open.get(seq)
        if record is not None:  # None: launched before the recording
            record.waiting, record.collected = waiting, time.perf_counter()
            self._before = {name: getattr(counters, name) for name in COUNTED}

    def processed(self, seq: int, counters: Counters) -> None:
        record = self._open.pop(seq, None)
        if record is not None:
            record.processed = time.perf_counter()
            record.counts = {name: getattr(counters, name) - before for name, before in self._before.items()}
            self.records.append(record)
