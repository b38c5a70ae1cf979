"""`stretto serve` where torchrun made this process rank 1 or higher: it follows rank 0's engine. No torch here.

    this process   | locate | waits ............................................ | exit, as rank 0 closed
    its child                 | joins, loads, runs plans ... X | joins again ...

The child ends with rank 0's engine; where that has died, another one joins the engine that rank 0's server starts next.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import time

from stretto.config import Config
from stretto.engine.launch import Launch
from stretto.engine.locate import Deferred, locate

CLOSED, REFUSED, GONE = 0, 2, 3  # exit codes of the child: rank 0 closed; it refused this rank; it did not come
RUN = "stretto.engine.build:follow_engine"  # by name: it needs torch
LEAST_SECONDS = 5.0  # from one child to the next

log = logging.getLogger(__name__)


def follow(config: Config, launch: Launch) -> int:
    """Until rank 0 closes. Returns the exit code. Raises what `locate` raises. A signal is left to rank 0, which gets
    it too, and has requests to finish."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    located = locate(config)
    context = multiprocessing.get_context("spawn")
    while True:
        started = time.monotonic()
        child = context.Process(target=Deferred(RUN, (located, launch, os.getpid())),
                                name=f"stretto rank {launch.rank}")
        child.start()
        child.join()
        if child.exitcode in (CLOSED, REFUSED, GONE):
            return 0 if child.exitcode == CLOSED else 1
        log.error("rank %d has lost rank 0's engine (exit code %s); it joins the next one", launch.rank, child.exitcode)
        time.sleep(max(0.0, LEAST_SECONDS - (time.monotonic() - started)))
