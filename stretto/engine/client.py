"""EngineClient: the AsyncEngine of an engine that runs in a process of its own."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
from collections.abc import Callable
from typing import Literal

import msgspec
import zmq
import zmq.asyncio

from stretto.engine.handle import EXIT_SECONDS, WATCH_SECONDS, EngineHandle
from stretto.engine.loop import CoreFactory
from stretto.engine.messages import Event, Shutdown
from stretto.engine.process import EngineProcess
from stretto.protocol import EngineDead


class EngineClient(EngineHandle):
    """Made by `await EngineClient.start(factory)`; every method runs on the event loop that started it."""

    def __init__(self, process: EngineProcess, stall_timeout: float):
        super().__init__(process.send, stall_timeout)
        self._process = process
        self._events = zmq.asyncio.Context.shadow(process.context).socket(zmq.PULL)
        self._tasks: list[asyncio.Task] = []
        self._closing = False

    @classmethod
    async def start(cls, factory: CoreFactory, *, stall_timeout: float = 25.0, start_timeout: float = 1800.0,
                    on_progress: Callable[[str], None] | None = None, log_level: int = logging.INFO,
                    log_format: Literal["text", "json"] = "text") -> EngineClient:
        """Spawns the process and waits until its core is ready.

        Args:
            factory: makes the EngineCore in the child; picklable, for the child is spawned.
            on_progress: called with each line that the start-up logs.
        Raises EngineDead with the child's error when it cannot start, or compat.ConfigError with what it refuses; the
        child is gone by then."""
        client = cls(EngineProcess(factory, log_level, log_format), stall_timeout)
        try:
            client._begin(on_progress)
            client.info = await asyncio.wait_for(asyncio.shield(client._router.started), start_timeout)
        except TimeoutError:
            await client._stop(0.0)
            raise EngineDead(f"the engine was not ready after {start_timeout:g} s") from None
        except BaseException:
            await client._stop(0.0)
            raise
        client._tasks.append(asyncio.create_task(client._watch_stalls()))
        return client

    async def close(self) -> None:
        """Requests in flight are aborted. Returns when the process has exited."""
        if not self._closing:
            self._process.send(Shutdown())
            await self._stop(EXIT_SECONDS)

    # --------------------------------------------------------------------------------------------- machinery
    def _begin(self, on_progress: Callable[[str], None] | None) -> None:
        self._events.set_hwm(0)
        self._events.bind(self._process.events_address)
        self._process.start()
        atexit.register(self._process.process.kill)  # a front end that ends without close() leaves no child either
        asyncio.get_running_loop().add_reader(self._process.process.sentinel, self._exited)
        self._tasks.append(asyncio.create_task(self._receive(on_progress)))

    async def _receive(self, on_progress: Callable[[str], None] | None) -> None:
        decoder = msgspec.msgpack.Decoder(Event)
        while True:
            self._router.deliver(decoder.decode(await self._events.recv()))
            if on_progress and not self._router.started.done():
                on_progress(self._router.progress)

    def _exited(self) -> None:
        """The child has exited; what it sent last may still be under way, so its own words come first."""
        self._unwatch_exit()
        asyncio.get_running_loop().call_later(WATCH_SECONDS, self._report_exit)

    def _report_exit(self) -> None:
        if not self._closing:
            code = self._process.end(0.0)
            self._router.die(f"the engine process ended unexpectedly (exit code {code})")

    def _unwatch_exit(self) -> None:
        with contextlib.suppress(ValueError, OSError):
            asyncio.get_running_loop().remove_reader(self._process.process.sentinel)

    async def _watch_stalls(self) -> None:
        used = 0.0
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            before, used = used, self._process.cpu_seconds()
            self._router.check_stall(WATCH_SECONDS, computing=used - before > WATCH_SECONDS / 10)
            if self._router.hopeless:
                self._router.die("the engine loop has made no progress for too long; its process was ended")
                self._process.process.kill()
                return

    async def _stop(self, timeout: float) -> None:
        self._closing = True
        await asyncio.to_thread(self._process.end, timeout)
        self._unwatch_exit()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._router.die("the engine has been closed")
        atexit.unregister(self._process.process.kill)
        self._events.close(linger=0)
        self._process.close()
