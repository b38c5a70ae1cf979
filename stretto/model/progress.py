"""How far loading is and how fast, said in the log every few seconds: the server's start-up page shows these lines."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from stretto.model.weights import Progress

logger = logging.getLogger(__name__)
EVERY = 2.0  # seconds


class LoadLog:
    """A `Progress` that logs, and hands on to `then`. `size`: bytes of an element in memory."""

    def __init__(self, size: int, then: Progress | None = None, clock: Callable[[], float] = time.monotonic):
        self._size, self._then, self._clock = size, then, clock
        self._started = self._said = clock()

    def __call__(self, done: int, total: int) -> None:
        now = self._clock()
        gigabytes, whole = done * self._size / 1e9, total * self._size / 1e9
        took = max(now - self._started, 1e-9)
        if done == total:
            logger.info("weights: %.2f GB in %.1f s, %.2f GB/s", whole, took, gigabytes / took)
        elif now - self._said >= EVERY:
            self._said = now
            logger.info("weights: %.0f %% of %.2f GB, %.2f GB/s", 100 * done / total, whole, gigabytes / took)
        if self._then is not None:
            self._then(done, total)
