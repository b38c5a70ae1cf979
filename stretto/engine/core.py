"""The engine: the host half and the device half, joined by one loop body.

    submit, abort  ->  host.plan  ->  device.launch           plan N + 1 is made while the device runs plan N
                       host.process  <-  device.collect       (depth 1; depth 0: one after the other)

A plan with a late mask is launched like any other. Its mask is made once every step before it is processed, while the
device runs its forward pass; so at most one step is in flight beside the one that is planned.
"""

from __future__ import annotations

import time
from pathlib import Path

from msgspec.structs import replace

from stretto.device.streams import DeviceHalf
from stretto.engine.adapters import AdapterLoader
from stretto.engine.trace import StepTrace
from stretto.host.half import HostHalf
from stretto.host.saved import load_sessions, save_sessions
from stretto.protocol import (
    Action,
    EngineInfo,
    EngineStats,
    LoadAdapter,
    Output,
    Request,
    RequestError,
    SessionInfo,
    StepRecord,
    UnloadAdapter,
    check_request,
)
from stretto.spec.plugin import faults_of
from stretto.wire import LateMask, StepPlan, pack_mask, pack_plan, unpack_result

REST_SECONDS = 0.01  # for which a step waits where all work waits for something else than the device


def _counted(request: Request, vocab_size: int) -> Request:
    """With numbers of alternatives, where the request says "all"."""
    sampling = request.sampling
    if -1 not in (sampling.logprobs, sampling.prompt_logprobs):
        return request
    of_output, of_prompt = sampling.alternatives(vocab_size)
    return replace(request, sampling=replace(sampling, logprobs=of_output, prompt_logprobs=of_prompt))


class EngineCore:
    """Not thread-safe: one thread calls it (engine/loop.py). `depth`: steps in flight while the host plans. `adapters`:
    of an engine that has room for some."""

    def __init__(self, host: HostHalf, device: DeviceHalf, info: EngineInfo, depth: int,
                 adapters: AdapterLoader | None = None, session_file: Path | None = None):
        """`session_file`: where sessions wait while the engine is away."""
        self.host, self.device, self.info, self.depth, self.adapters = host, device, info, depth, adapters
        self.session_file = session_file
        if session_file is not None:
            load_sessions(host.sessions, info.model_name, session_file)
        self.in_flight = 0
        self.busy_seconds = self.wait_seconds = self.mask_seconds = 0.0
        self.late_masks = self.late_masks_overlapped = 0
        self._unmasked: StepPlan | None = None  # launched, and waiting for its mask
        self._trace: StepTrace | None = None

    def submit(self, request: Request) -> None:
        """Raises RequestError for a request that can never run here."""
        check_request(request, self.info)
        self.host.submit(_counted(request, self.info.vocab_size))

    def abort(self, rid: str, received: int | None = None) -> list[Output]:
        return self.host.abort(rid, received)

    def manage(self, action: Action) -> tuple[list[SessionInfo], list[Output]]:
        """(the sessions that the action is about, last outputs of turns that it ended). Raises RequestError."""
        if not isinstance(action, LoadAdapter | UnloadAdapter):
            return self.host.manage(action)
        if self.adapters is None:
            raise RequestError("this engine has no room for adapters: start it with --enable-lora", param="lora_name",
                               code="lora_disabled")
        self.adapters.carry_out(action)
        self.info.adapters = self.adapters.names
        return [], []

    def tick(self) -> None:
        """Called now and then, also when idle."""
        self.host.tick()
        self.device.check()

    @property
    def has_work(self) -> bool:
        return self.host.has_work or self.in_flight > 0

    def step(self) -> list[Output]:
        """Launches at most one step, collects what is due, returns what became ready."""
        started = time.perf_counter()
        plan = self.host.plan()
        if plan is not None:
            planned = time.perf_counter()
            self.device.launch(pack_plan(plan))
            self.in_flight += 1
            if self._trace is not None:
                self._trace.launched(plan.seq, len(plan.rows), started, planned)
        outputs = self.host.take_outputs()
        if plan is None and not self.in_flight and not outputs:
            self.host.rest(REST_SECONDS)
        if plan is not None and plan.late_mask:
            self._unmasked = plan
            outputs += self._send_mask(plan)
        if self.in_flight > (self.depth if plan is not None else 0):
            outputs += self._collect()
        self.busy_seconds += time.perf_counter() - started
        return outputs

    def _send_mask(self, plan: StepPlan) -> list[Output]:
        """Processes every step before the plan's, which runs its forward pass meanwhile; then sends its mask."""
        outputs: list[Output] = []
        self.late_masks += 1
        self.late_masks_overlapped += self.in_flight > 1
        while self.in_flight > 1:
            outputs += self._collect()
        before = time.perf_counter()
        mask = self.host.mask(plan)
        self.device.mask(pack_mask(mask))
        self._unmasked = None
        self.mask_seconds += time.perf_counter() - before
        self.host.spread(plan)
        return outputs + self.host.take_outputs()

    def _collect(self) -> list[Output]:
        before = time.perf_counter()
        packed = self.device.collect()
        self.wait_seconds += time.perf_counter() - before
        self.in_flight -= 1
        result = unpack_result(packed)
        if self._trace is None:
            return self.host.process(result)
        self._trace.collected(result.seq, before, self.host.counters)
        outputs = self.host.process(result)
        self._trace.processed(result.seq, self.host.counters)
        return outputs

    def trace(self, steps: int) -> list[StepRecord]:
        """Records up to `steps` steps from now on; 0: none. Returns what was recorded until now."""
        records = self._trace.records if self._trace is not None else []
        self._trace = StepTrace(steps) if steps > 0 else None
        return records

    def stats(self) -> EngineStats:
        counters, gauges = self.host.stats()
        faults = faults_of(self.host.limits.drafter)
        counters |= {"loop_seconds": self.busy_seconds, "device_wait_seconds": self.wait_seconds,
                     "mask_seconds": self.mask_seconds, "late_masks": float(self.late_masks),
                     "late_masks_overlapped": float(self.late_masks_overlapped),
                     "drafter_faults": float(faults)} | self.device.counts()
        return EngineStats(counters=counters, gauges=gauges | {"steps_in_flight": float(self.in_flight)})

    def close(self) -> None:
        """Collects what is in flight and ends the device half."""
        try:
            if self._unmasked is not None:  # a step failed between launch and mask
                self.device.mask(pack_mask(LateMask.nothing(self._unmasked.seq, len(self._unmasked.rows))))
            while self.in_flight:
                self.in_flight -= 1
                self.device.collect()
        finally:
            self.device.close()
            self.host.close()
        if self.session_file is not None:
            save_sessions(self.host.sessions, self.info.model_name, self.session_file)
