"""How long an engine takes from nothing to its first answer, each time in a process of its own.

    spawn --- Python, imports --- phases that the engine reports --- ready --- one short answer --- first answer

The files are read from the disk the first time only; the first round therefore stands apart in the figures.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

from stretto.config import Config
from stretto.engine.llm import LLM
from stretto.params import SamplingParams

IMPORTS = "Python and imports"


@dataclass(frozen=True)
class Start:
    """Seconds. `phases` add up to `ready`."""

    phases: dict[str, float]
    ready: float
    first_answer: float


class StartFailed(RuntimeError):
    """The engine did not start; the message is its own."""


def measure_start(config: Config) -> Start:
    """Raises StartFailed."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    started = time.perf_counter()
    child = context.Process(target=_start, args=(config, theirs))
    child.start()
    theirs.close()
    try:
        phases = _receive(ours.recv)
        ready = time.perf_counter() - started
        _receive(ours.recv)
        answered = time.perf_counter() - started
    finally:
        child.join()
    return Start({IMPORTS: ready - sum(phases.values()), **phases}, ready, answered)


def _receive(receive: Callable[[], object]) -> dict[str, float]:
    try:
        message = receive()
    except EOFError:
        message = "the process ended without a word"
    if isinstance(message, dict):
        return message
    raise StartFailed(str(message))


def _start(config: Config, answers: Connection) -> None:
    try:
        with LLM(config=config) as llm:
            answers.send(dict(llm.info.server_info["start"]))
            llm.generate([[1]], SamplingParams(max_tokens=1, ignore_eos=True))
            answers.send({})
    except Exception as e:  # the parent tells it
        answers.send(f"{type(e).__name__}: {e}")
