"""The engine: the host half and the device half, joined by one loop body.

    submit, abort  ->  host.plan  ->  device.launch           plan N + 1 is made while the device runs plan N
                       host.process  <-  device.collect       (depth 1; depth 0: one after the other)
"""

from __future__ import annotations

import time

from stretto.device.streams import DeviceHalf
from stretto.host.half import HostHalf
from stretto.protocol import Action, EngineInfo, EngineStats, Output, Request, SessionInfo, check_request
from stretto.wire import pack_plan, unpack_result


class EngineCore:
    """Not thread-safe: one thread calls it (engine/loop.py). `depth`: steps in flight while the host plans."""

    def __init__(self, host: HostHalf, device: DeviceHalf, info: EngineInfo, depth: int):
        self.host, self.device, self.info, self.depth = host, device, info, depth
        self.in_flight = 0
        self.busy_seconds = self.wait_seconds = 0.0

    def submit(self, request: Request) -> None:
        """Raises RequestError for a request that can never run here."""
        check_request(request, self.info)
        self.host.submit(request)

    def abort(self, rid: str, received: int | None = None) -> list[Output]:
        return self.host.abort(rid, received)

    def manage(self, action: Action) -> tuple[list[SessionInfo], list[Output]]:
        """(the sessions that the action is about, last outputs of turns that it ended). Raises RequestError."""
        return self.host.manage(action)

    def tick(self) -> None:
        """Called now and then, also when idle."""
        self.host.tick()

    @property
    def has_work(self) -> bool:
        return self.host.has_work or self.in_flight > 0

    def step(self) -> list[Output]:
        """Launches at most one step, collects at most one result, returns what became ready."""
        started = time.perf_counter()
        plan = self.host.plan()
        if plan is not None:
            self.device.launch(pack_plan(plan))
            self.in_flight += 1
        outputs = self.host.take_outputs()
        if self.in_flight > (self.depth if plan is not None else 0):
            before = time.perf_counter()
            packed = self.device.collect()
            self.wait_seconds += time.perf_counter() - before
            self.in_flight -= 1
            outputs += self.host.process(unpack_result(packed))
        self.busy_seconds += time.perf_counter() - started
        return outputs

    def stats(self) -> EngineStats:
        counters, gauges = self.host.stats()
        counters |= {"loop_seconds": self.busy_seconds, "device_wait_seconds": self.wait_seconds}
        return EngineStats(counters=counters, gauges=gauges | {"steps_in_flight": float(self.in_flight)})

    def close(self) -> None:
        """Collects what is in flight and ends the device half."""
        while self.in_flight:
            self.device.collect()
            self.in_flight -= 1
        self.device.close()
