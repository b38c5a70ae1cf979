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

Pages move between device and host memory on a stream of their own, in the order of the plans. What a plan moves begins
after the steps before it; a step waits for the moves of the plan that it names as its fence, and for no others:

                step stream   | step N-1 | step N   | step N+1 | step N+2, fence N  |
                page stream              | moves of N .........| moves of N+1 ..........
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from itertools import groupby
from typing import Protocol

import numpy as np
import torch

from stretto.device.graphs import GraphExecutor
from stretto.device.kv import Pages
from stretto.device.record import StepOutput
from stretto.device.runner import HalfStep, Runner
from stretto.sample.features import StepShape
from stretto.wire import HEADER, Moved, PackedPlan, PageOp, split_plan, with_times

EXIT_SECONDS = 60  # that a CPU's steps have to end
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

    def between(self, action: Callable[[Runner], None]) -> None:
        """Does something after every step that was launched and before any that will be. Raises what it raises."""
        ...

    def counts(self) -> dict[str, float]:
        """What happened here, monotone: `graph_replays`, and `eager_steps`, launched kernel by kernel, where there are
        graphs."""
        ...

    def check(self) -> None:
        """Raises what has gone wrong where no step is in flight that would tell. Called now and then."""
        ...

    def close(self) -> None: ...


class LocalDevice(DeviceHalf, Protocol):
    """A device half of this process alone, which can be asked without waiting for it."""

    def ready(self) -> bool:
        """Whether `collect` would return, or raise, at once."""
        ...

    def worked(self) -> float:
        """Seconds that the processor worked on all steps collected so far, on the thread that runs them: what serial
        work takes in full, of what several threads share its part. 0 where another device does the work."""
        ...


def _runs(plan: PackedPlan[np.ndarray]) -> Iterator[tuple[int, list[tuple[int, int, int]]]]:
    """Page operations of one kind that stand together, as (group, source, target)."""
    for kind, ops in groupby(plan.page_ops.tolist(), key=lambda op: op[0]):
        yield kind, [(group, source, target) for _, group, source, target in ops]


class CpuMoves:
    """Moves pages at once. Device and host memory are the same here; what is copied when is as on a GPU."""

    def __init__(self, pages: Pages):
        self.pages = pages
        self._done: list[Moved] = []
        self._began = 0.0

    def before(self, packed: np.ndarray) -> None:
        """A plan's moves. Call it before the plan's step; the step is timed from here."""
        plan = split_plan(packed[:HEADER], packed)
        if plan.moves:
            seconds: Counter[int] = Counter()
            for kind, ops in _runs(plan):
                began = time.perf_counter()
                self.pages.run(kind, ops)
                seconds[kind] += time.perf_counter() - began  # type: ignore[assignment]
            self._done.append(Moved(plan.seq, seconds[PageOp.SAVE], seconds[PageOp.RESTORE]))
        self._began = time.perf_counter()

    def after(self, result: np.ndarray) -> np.ndarray:
        """The packed result of the step, with what `before` and the step took."""
        done, self._done = self._done, []
        return with_times(result, time.perf_counter() - self._began, done)


class CudaMoves:
    """Moves pages on a stream beside the steps."""

    def __init__(self, pages: Pages, steps: torch.cuda.Stream, device: torch.device):
        self.pages, self.steps, self.stream = pages, steps, torch.cuda.Stream(device)
        self._under_way: deque[tuple[int, list[tuple[int, torch.cuda.Event, torch.cuda.Event]]]] = deque()

    def before(self, packed: np.ndarray) -> torch.cuda.Event:
        """Enqueues a plan's moves, and lets the plan's step wait for its fence. Returns the event of the step's
        begin."""
        plan = split_plan(packed[:HEADER], packed)
        if plan.moves:
            self._enqueue(plan)
        awaited = [timed[-1][2] for seq, timed in self._under_way if seq <= plan.fence]
        if awaited:
            self.steps.wait_event(awaited[-1])
        began = torch.cuda.Event(enable_timing=True)
        began.record(self.steps)
        return began

    def _enqueue(self, plan: PackedPlan[np.ndarray]) -> None:
        timed = []
        self.stream.wait_stream(self.steps)
        with torch.cuda.stream(self.stream), torch.inference_mode():
            for kind, ops in _runs(plan):
                began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                began.record()
                self.pages.run(kind, ops)
                ended.record()
                timed.append((kind, began, ended))
        self._under_way.append((plan.seq, timed))

    def done(self) -> list[Moved]:
        """Plans whose moves are done, and were not told before. Waits for nothing."""
        done = []
        while self._under_way and self._under_way[0][1][-1][2].query():
            seq, timed = self._under_way.popleft()
            seconds: Counter[int] = Counter()
            for kind, began, ended in timed:
                seconds[kind] += began.elapsed_time(ended) / 1e3  # type: ignore[assignment]
            done.append(Moved(seq, seconds[PageOp.SAVE], seconds[PageOp.RESTORE]))
        return done

    def close(self) -> None:
        self.stream.synchronize()
        if self.pages.host is not None:
            self.pages.host.close()


class InlineDevice:
    """Runs each step at launch, on the caller's thread. For debugging and tests."""

    def __init__(self, runner: Runner):
        self.runner = runner
        self.results: deque[np.ndarray] = deque()
        self.half: HalfStep | None = None
        self.moves = CpuMoves(runner.pages) if runner.pages.host is not None else None
        self._worked = 0.0

    def launch(self, packed: np.ndarray) -> None:
        began = time.thread_time()
        if self.moves is not None:
            self.moves.before(packed)
        output = self.runner.begin(packed)
        if isinstance(output, HalfStep):
            self.half = output
        else:
            self._keep(output)
        self._worked += time.thread_time() - began

    def mask(self, packed: np.ndarray) -> None:
        assert self.half is not None, "no plan waits for a mask"
        began = time.thread_time()
        half, self.half = self.half, None
        self._keep(self.runner.end(half, packed))
        self._worked += time.thread_time() - began

    def _keep(self, output: StepOutput) -> None:
        result = output.packed(output.body.cpu().numpy())
        self.results.append(result if self.moves is None else self.moves.after(result))

    def collect(self) -> np.ndarray:
        return self.results.popleft()

    def ready(self) -> bool:
        return bool(self.results)

    def worked(self) -> float:
        return self._worked

    def warm_up(self, shapes: Iterable[StepShape], progress: Callable[[int, int], None] | None = None) -> None:
        """Nothing: there are no graphs on a CPU."""

    def between(self, action: Callable[[Runner], None]) -> None:
        action(self.runner)

    def counts(self) -> dict[str, float]:
        return self.runner.counts()

    def check(self) -> None:
        """Nothing goes wrong between steps."""

    def close(self) -> None:
        self.results.clear()


class _CpuSteps:
    """What the thread of a `ThreadDevice` runs on. It does not know that: an engine that nobody has any more ends."""

    def __init__(self, runner: Runner):
        self.runner = runner
        self.plans: queue.SimpleQueue[np.ndarray | Callable[[], None] | None] = queue.SimpleQueue()
        self.masks: queue.SimpleQueue[np.ndarray | None] = queue.SimpleQueue()
        self.results: queue.SimpleQueue[tuple[np.ndarray | BaseException, float]] = queue.SimpleQueue()
        self.moves = CpuMoves(runner.pages) if runner.pages.host is not None else None

    def run(self, threads: int) -> None:
        torch.set_num_threads(threads)  # a new thread starts with its own count
        worked = 0.0
        while (packed := self.plans.get()) is not None:
            if callable(packed):
                packed()
                continue
            result: np.ndarray | BaseException
            began = time.thread_time()
            try:
                result = self._step(packed)
            except BaseException as e:  # handed to the caller, who waits for this result
                result = e
            worked += time.thread_time() - began
            self.results.put((result, worked))
            del result  # an exception would hold the frames of the step that raised it

    def _step(self, packed: np.ndarray) -> np.ndarray:
        if self.moves is not None:
            self.moves.before(packed)
        output = self.runner.begin(packed)
        if isinstance(output, HalfStep):
            mask = self.masks.get()
            if mask is None:
                raise RuntimeError("the engine has ended before it gave the mask of this step")
            output = self.runner.end(output, mask)
        result = output.packed(output.body.numpy())
        return result if self.moves is None else self.moves.after(result)


class ThreadDevice:
    """Runs steps on a thread of its own, so that the host plans while the CPU's kernels run (they hold no GIL).

    The thread ends by `close`, with the object, or with the interpreter, which kernels must not outlive."""

    def __init__(self, runner: Runner):
        self._steps = steps = _CpuSteps(runner)
        self.runner, self.moves = runner, steps.moves
        self._worked = 0.0  # as of the result that was collected last, not of what has run since
        thread = threading.Thread(target=steps.run, args=(torch.get_num_threads(),), name="stretto-device", daemon=True)
        thread.start()
        self._end = weakref.finalize(self, _end_steps, steps, thread)

    def launch(self, packed: np.ndarray) -> None:
        self._steps.plans.put(packed)

    def mask(self, packed: np.ndarray) -> None:
        self._steps.masks.put(packed)

    def ready(self) -> bool:
        return not self._steps.results.empty()

    def worked(self) -> float:
        return self._worked

    def collect(self) -> np.ndarray:
        result, self._worked = self._steps.results.get()
        if isinstance(result, BaseException):
            raise result
        return result

    def warm_up(self, shapes: Iterable[StepShape], progress: Callable[[int, int], None] | None = None) -> None:
        """Nothing: there are no graphs on a CPU."""

    def between(self, action: Callable[[Runner], None]) -> None:
        done: Future[None] = Future()

        def run() -> None:
            try:
                action(self.runner)
                done.set_result(None)
            except BaseException as e:  # of whoever asked
                done.set_exception(e)

        self._steps.plans.put(run)
        done.result()

    def counts(self) -> dict[str, float]:
        return self.runner.counts()

    def check(self) -> None:
        """Nothing goes wrong between steps."""

    def close(self) -> None:
        self._end()


def _end_steps(steps: _CpuSteps, thread: threading.Thread) -> None:
    """Once the steps that were launched have run; one of them may wait for a mask that nobody will give."""
    steps.plans.put(None)
    steps.masks.put(None)
    if thread is not threading.current_thread():  # the last reference may go anywhere
        thread.join(timeout=EXIT_SECONDS)


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
        self.moves = CudaMoves(runner.pages, self.steps, device) if runner.pages.host is not None else None
        self.timed: deque[tuple[torch.cuda.Event, torch.cuda.Event] | None] = deque()  # as `in_flight`, with `moves`

    def warm_up(self, shapes: Iterable[StepShape], progress: Callable[[int, int], None] | None = None) -> None:
        with torch.cuda.stream(self.steps), torch.inference_mode():
            self.graphs.warm_up(shapes, progress)

    def launch(self, packed: np.ndarray) -> None:
        pinned = _pinned(packed)
        began = self.moves.before(packed) if self.moves is not None else None
        with torch.cuda.stream(self.steps):
            output = self.runner.begin(pinned.numpy())
        if isinstance(output, HalfStep):
            self.half = output, pinned
        else:
            self._send_home(output, (pinned,), began)

    def mask(self, packed: np.ndarray) -> None:
        assert self.half is not None, "no plan waits for a mask"
        (half, plan), self.half = self.half, None
        pinned = _pinned(packed)
        with torch.cuda.stream(self.steps):
            output = self.runner.end(half, pinned.numpy())
        self._send_home(output, (plan, pinned))

    def _send_home(self, output: StepOutput, pinned: tuple[torch.Tensor, ...],
                   began: torch.cuda.Event | None = None) -> None:
        """`began`: of a step whose time is measured; that of one which waits for a mask is not."""
        if began is not None:
            ended = torch.cuda.Event(enable_timing=True)
            ended.record(self.steps)
        self.timed.append((began, ended) if began is not None else None)
        self.copies.wait_stream(self.steps)
        with torch.cuda.stream(self.copies):
            on_host = torch.empty(output.body.shape, dtype=output.body.dtype, pin_memory=True)
            on_host.copy_(output.body, non_blocking=True)
            done = torch.cuda.Event()
            done.record()
        output.body.record_stream(self.copies)
        self.in_flight.append((output, on_host, pinned, done))  # `pinned` lives until its copy is surely done

    def ready(self) -> bool:
        return bool(self.in_flight) and self.in_flight[0][3].query()

    def worked(self) -> float:
        return 0.0

    def collect(self) -> np.ndarray:
        output, on_host, _, done = self.in_flight.popleft()
        done.synchronize()
        result, timed = output.packed(on_host.numpy()), self.timed.popleft()
        if self.moves is None:
            return result
        return with_times(result, timed[0].elapsed_time(timed[1]) / 1e3 if timed else 0.0, self.moves.done())

    def between(self, action: Callable[[Runner], None]) -> None:
        with torch.cuda.stream(self.steps), torch.inference_mode():
            action(self.runner)
        self.steps.synchronize()  # so that what it copies from may go

    def counts(self) -> dict[str, float]:
        return self.runner.counts() | {"graph_replays": float(self.graphs.replays),
                                       "eager_steps": float(self.graphs.eager_steps)}

    def check(self) -> None:
        """Nothing goes wrong between steps."""

    def close(self) -> None:
        self.in_flight.clear()
        if self.moves is not None:
            self.moves.close()
        self.steps.synchronize()
        self.copies.synchronize()
        self.graphs.clear()


def _pinned(packed: np.ndarray) -> torch.Tensor:
    """A copy in pinned memory. Made by numpy, on this thread: torch's own copy of a megabyte of masks wakes a thread
    for every 32,768 numbers and waits for the slowest of them, which on a busy machine may take as long as a step."""
    made = torch.empty(packed.shape, dtype=torch.int32, pin_memory=True)
    np.copyto(made.numpy(), packed)
    return made


def make_device(runner: Runner, overlap: bool, graphs: bool = True) -> LocalDevice:
    """The device half for the runner's device. `graphs`: of CUDA, where there is one."""
    if runner.model.device.type == "cuda":
        return CudaDevice(runner, runner.model.device, graphs)
    return ThreadDevice(runner) if overlap else InlineDevice(runner)
