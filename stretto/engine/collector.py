"""What Python's cycle collector looks at, and when, in the processes of an engine and of a server.

    start    | work ............ | no work for a while | work ....
    freeze     young objects,                a pass
               each once                  over all of them
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

from stretto.engine.loop import Inbox
from stretto.engine.messages import Command, Submit

IDLE_SECONDS = 20.0  # without a request, before a pass over everything: it takes a second where the tree is large
WORTH_A_PASS = 10_000  # objects that have grown old since the last one


def spare_collector() -> None:
    """What this process has made so far is left to Python's cycle collector no more: it would look through all of it
    again and again (70 ms a time), while steps and streams wait, and find nothing there. Called once it is ready. What
    comes later is still looked through, less often: messages hold containers and no cycles."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)


def look_once() -> None:
    """From now on the collector looks at each object once, while it is young:

        young objects | pass | what is left is not looked at again, but by `RestingInbox`

    An engine's heap grows with its prefix tree, by millions of objects that live until their pages are evicted, and no
    cycle keeps them: the host half makes none (tests/host/test_half.py). A pass over the middle generation would hold
    up a step by half a second."""
    gc.set_threshold(10_000, 10, 10)
    gc.callbacks.append(_spare_survivors)


def _spare_survivors(phase: str, info: dict[str, int]) -> None:
    if phase == "stop":
        gc.freeze()


class RestingInbox:
    """An engine's inbox. When no request has come or been at work for IDLE_SECONDS, cycles that have grown old (of a
    library, of an error's traceback) are freed: nobody waits for a step then."""

    def __init__(self, inbox: Inbox, clock: Callable[[], float] = time.monotonic):
        self._inbox, self._clock = inbox, clock
        self._worked, self._seen = clock(), gc.get_freeze_count()

    def take(self, timeout: float) -> list[Command]:
        """As `Inbox.take`; a timeout of 0 says that there is work."""
        commands = self._inbox.take(timeout)
        if not timeout or any(isinstance(command, Submit) for command in commands):
            self._worked = self._clock()
        elif self._clock() - self._worked > IDLE_SECONDS and gc.get_freeze_count() - self._seen > WORTH_A_PASS:
            gc.unfreeze()
            gc.collect()
            gc.freeze()
            self._seen = gc.get_freeze_count()
        return commands
