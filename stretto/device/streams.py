"""Where steps run, and how their results come back. The only module that knows of threads, streams and events.

    CPU     launch: queue the plan            device thread: plan N, plan N+1 ...        collect: wait for result N
    CUDA    launch: enqueue on the step stream, then a copy of the result on the copy stream behind an event
            collect: wait for that event; the host has planned the next step meanwhile

                step stream   | step N          | step N+1        |
                copy stream                     | D2H N |          | D2H N+1 |
                host          plan N+1 ........ collect N, plan N+2 ...

A plan with a late mask starts at `launch` and samples after `mask`; in between the host processes the step before:

                step stream   | step N            | forward N+1 ...... | rest of N+1 |
                host          plan N+1, launch it | collect N, mask N+1 ^
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np
import torch

from stretto.device.graphs import GraphExecutor
from stretto.device.record import StepOutput
from stretto.device.runner import HalfStep, Runner
from stretto.sample.features import StepShape

LARGEST_GRAPH = 4096  # packed tokens; above it kernels run so long that launching them one by one costs nothing


class DeviceHalf(Protocol):
    """Takes packed plans in order, gives packed results in the same order."""

    def launch(self, packed: np.ndarray) -> None:
        """Starts a step; returns before it has run (except `InlineDevice`)."""
        ...

    def mask(self, packed: np.ndarray) -> None:
        """The packed late mask of the plan launched last, which waits for it."""
        ...

    def collect(self) -> np.ndarray:
        """The oldest result not yet collected; waits for it. Raises what the step raised."""
        ...

    def warm_up(self, shapes: Iterable[StepShape], progress: Callable[[int, int], None] | None = None) -> None:
        """Prepares steps of these shapes, where there is something to prepare. Before the first launch."""
        ...

    def close(self) -> None: ...


class InlineDevice:
    """Runs each step at launch, on the caller's thread. For debugging and tests."""

    def __init__(self, runner: Runner):
        self.runner = runner
        self.results: deque[np.ndarray] = deque()
        self.half: HalfStep | None = None

    def launch(self, packed: np.ndarray) -> None:
        output = self.runner.begin(packed)
        if isinstance(output, HalfStep):
            self.half = output
        else:
            self._keep(output)

    def mask(self, packed: np.ndarray) -> None:
        assert self.half is not None, "no plan waits for a mask"
        half, self.half = self.half, None
        self._keep(self.runner.end(half, packed))

    def _keep(self, output: StepOutput) -> None:
        self.results.append(output.packed(output.body.cpu().numpy()))

    def collect(self) -> np.ndarray:
        return self.results.popleft()

    def warm_up(self, shapes: Iterable[StepShape], progress: Callable[[int, int], None] | None = None) -> None:
        """Nothing: there are no graphs on a CPU."""

    def close(self) -> None:
        self.results.clear()


class ThreadDevice:
    """Runs steps on a thread of its own, so that the host plans while the CPU's kernels run (they hold no GIL)."""

    def __init__(self, runner: Runner):
        self.runner = runner
        self.plans: queue.SimpleQueue[np.ndarray | None] = queue.SimpleQueue()
        self.masks: queue.SimpleQueue[np.ndarray] = queue.SimpleQueue()
        self.results: queue.SimpleQueue[np.ndarray | BaseException] = queue.SimpleQueue()
        threads = torch.get_num_threads()
        self.thread = threading.Thread(target=self._run, args=(threads,), name="stretto-device", daemon=True)
        self.thread.start()

    def _run(self, threads: int) -> None:
        torch.set_num_threads(threads)  # a new thread starts with its own count
        while (packed := self.plans.get()) is not None:
            try:
                output = self.runner.begin(packed)
                if isinstance(output, HalfStep):
                    output = self.runner.end(output, self.masks.get())
                self.results.put(output.packed(output.body.numpy()))
            except BaseException as e:  # handed to the caller, who waits for this result
                self.results.put(e)

    def launch(self, packed: np.ndarray) -> None:
        self.plans.put(packed)

    def mask(self, packed: np.ndarray) -> None:
        self.masks.put(packed)

    def collect(self) -> np.ndarray:
        result = self.results.get()
        if isinstance(result, BaseException):
            raise result
        return result

    def warm_up(self, shapes: Iterable[StepShape], progress: Callable[[int, int], None] | None = None) -> None:
        """Nothing: there are no graphs on a CPU."""

    def close(self) -> None:
        self.plans.put(None)
        self.thread.join(timeout=60)


class CudaDevice:
    """Enqueues steps on one stream and copies results to pinned memory on another, each behind an event."""

    def __init__(self, runner: Runner, device: torch.device, graphs: bool = True):
        self.runner = runner
        self.steps, self.copies = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self.steps.wait_stream(torch.cuda.current_stream(device))  # weights and tables were written there
        self.graphs = GraphExecutor(runner, LARGEST_GRAPH)
        if graphs:
            runner.execute, runner.halve = self.graphs, self.graphs.halve
        self.in_flight: deque[tuple[StepOutput, torch.Tensor, tuple[torch.Tensor, ...], torch.cuda.Event]] = deque()
        self.half: tuple[HalfStep, torch.Tensor] | None = None

    def warm_up(self, shapes: Iterable[StepShape], progress: Callable[[int, int], None] | None = None) -> None:
        with torch.cuda.stream(self.steps), torch.inference_mode():
            self.graphs.warm_up(shapes, progress)

    def launch(self, packed: np.ndarray) -> None:
        pinned = torch.from_numpy(packed).pin_memory()
        with torch.cuda.stream(self.steps):
            output = self.runner.begin(pinned.numpy())
        if isinstance(output, HalfStep):
            self.half = output, pinned
        else:
            self._send_home(output, (pinned,))

    def mask(self, packed: np.ndarray) -> None:
        assert self.half is not None, "no plan waits for a mask"
        (half, plan), self.half = self.half, None
        pinned = torch.from_numpy(packed).pin_memory()
        with torch.cuda.stream(self.steps):
            output = self.runner.end(half, pinned.numpy())
        self._send_home(output, (plan, pinned))

    def _send_home(self, output: StepOutput, pinned: tuple[torch.Tensor, ...]) -> None:
        self.copies.wait_stream(self.steps)
        with torch.cuda.stream(self.copies):
            on_host = torch.empty(output.body.shape, dtype=output.body.dtype, pin_memory=True)
            on_host.copy_(output.body, non_blocking=True)
            done = torch.cuda.Event()
            done.record()
        output.body.record_stream(self.copies)
        self.in_flight.append((output, on_host, pinned, done))  # `pinned` lives until its copy is surely done

    def collect(self) -> np.ndarray:
        output, on_host, _, done = self.in_flight.popleft()
        done.synchronize()
        return output.packed(on_host.numpy())

    def close(self) -> None:
        self.in_flight.clear()
        self.steps.synchronize()
        self.copies.synchronize()


def make_device(runner: Runner, overlap: bool) -> DeviceHalf:
    """The device half for the runner's device."""
    if runner.model.device.type == "cuda":
        return CudaDevice(runner, runner.model.device)
    return ThreadDevice(runner) if overlap else InlineDevice(runner)
