"""Peak memory of an engine: it loads and answers the workload once, alone, in a process of its own."""

from __future__ import annotations

import multiprocessing
import resource
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from stretto.bench.engines import BenchEngine
from stretto.bench.workload import Workload

Opener = Callable[[], BenchEngine]


def peak_memory(open_engine: Opener, work: Workload, device: str) -> int:
    """Bytes: resident memory of the process on a CPU (Python and its libraries included), allocated memory on a GPU.
    `open_engine` must be picklable. Raises RuntimeError with the child's error."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_run, args=(open_engine, work, device, torch.get_num_threads(), theirs))
    child.start()
    theirs.close()
    try:
        answer = ours.recv()
    except EOFError:
        answer = "the process ended without an answer"
    child.join()
    if isinstance(answer, str):
        raise RuntimeError(f"peak memory could not be measured: {answer}")
    return answer


def _run(open_engine: Opener, work: Workload, device: str, threads: int, answer: Connection) -> None:
    torch.set_num_threads(threads)
    try:
        engine = open_engine()
        engine.batch(work.prompts, work.output_tokens)
        engine.close()
    except Exception as e:  # the parent tells it
        answer.send(f"{type(e).__name__}: {e}")
        return
    if device == "cuda":
        answer.send(torch.cuda.max_memory_allocated())
    else:
        answer.send(peak_resident())


def peak_resident() -> int:
    """Most bytes that this process has had resident. Not getrusage where it can be helped: on Linux its figure begins
    with what the parent had when it made this process."""
    if sys.platform == "linux":
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
        return int(status["VmHWM"].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
