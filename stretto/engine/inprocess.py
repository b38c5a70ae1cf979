"""InProcessEngine: the AsyncEngine of an engine loop on a thread of this process. For tests and the Python API.

The thread and the watch know the router weakly: whoever uses the engine, if only by reading one of its streams, holds
the router, and when nobody does, the thread ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
import weakref

from stretto.engine.handle import EXIT_SECONDS, WATCH_SECONDS, EngineHandle
from stretto.engine.loop import CoreFactory, run_loop
from stretto.engine.messages import Command, Event, Shutdown
from stretto.engine.router import Router


class QueueInbox:
    """Commands from the event loop's thread."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self.put = self._queue.put

    def take(self, timeout: float) -> list[Command]:
        commands: list[Command] = []
        try:
            commands.append(self._queue.get(block=timeout > 0, timeout=timeout or None))
            while True:
                commands.append(self._queue.get_nowait())
        except queue.Empty:
            return commands


class Outbox:
    """Events to a router on the event loop's thread, as long as there is one."""

    def __init__(self, router: Router):
        self._loop, self._router = asyncio.get_running_loop(), weakref.ref(router)

    def put(self, event: Event) -> None:
        """On the engine's thread. A front end that has ended needs no more events."""
        router = self._router()
        if router is not None:
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                self._loop.call_soon_threadsafe(router.deliver, event)


class InProcessEngine(EngineHandle):
    """Made by `await InProcessEngine.start(factory)`; every method runs on the event loop that started it. One that is
    dropped without `close` ends its thread."""

    def __init__(self, factory: CoreFactory, stall_timeout: float):
        self._inbox = QueueInbox()
        super().__init__(self._inbox.put, stall_timeout)
        self._thread = threading.Thread(target=run_loop, args=(factory, self._inbox, Outbox(self._router).put),
                                        daemon=True, name="stretto engine")
        self._watch: asyncio.Task | None = None

    @classmethod
    async def start(cls, factory: CoreFactory, *, stall_timeout: float = 25.0) -> InProcessEngine:
        """Starts the thread and waits until its core is ready. Raises EngineDead with the core's own error, or
        compat.ConfigError with what it refuses."""
        engine = cls(factory, stall_timeout)
        engine._thread.start()
        engine.info = await asyncio.shield(engine._router.started)
        weakref.finalize(engine._router, _end, engine._inbox, engine._thread)  # at the latest when the interpreter ends
        engine._watch = asyncio.create_task(_watch_stalls(weakref.ref(engine._router), engine._thread))
        return engine

    async def healthy(self) -> bool:
        return await super().healthy() and self._thread.is_alive()

    async def close(self) -> None:
        """Requests in flight are aborted. Returns when the core is closed, or after ten seconds of a wedged step."""
        if self._watch is None:
            return
        self._watch.cancel()
        self._watch = None
        await asyncio.to_thread(_end, self._inbox, self._thread)
        self._router.die("the engine has been closed")


async def _watch_stalls(watched: weakref.ref[Router], thread: threading.Thread) -> None:
    used = 0.0
    while True:
        await asyncio.sleep(WATCH_SECONDS)
        router = watched()
        if router is None:
            return
        before, used = used, _cpu_seconds(thread)
        router.check_stall(WATCH_SECONDS, computing=used - before > WATCH_SECONDS / 10)
        del router  # not to be held while asleep


def _end(inbox: QueueInbox, thread: threading.Thread) -> None:
    inbox.put(Shutdown())
    if thread is not threading.current_thread():  # the last reference may go anywhere
        thread.join(EXIT_SECONDS)


def _cpu_seconds(thread: threading.Thread) -> float:
    """Processor time that the thread has used; 0 where the system does not tell."""
    clock = getattr(time, "pthread_getcpuclockid", None)
    if clock is None or thread.ident is None or not thread.is_alive():
        return 0.0
    return time.clock_gettime(clock(thread.ident))
