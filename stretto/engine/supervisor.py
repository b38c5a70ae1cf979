"""Supervisor: the AsyncEngine of an engine process that is started again when it dies. No torch in this module.

    engine     | runs ........ X    | waits | starts ...... | runs ..............
    requests   | answered     EngineDead    EngineRestarting  answered

A new engine knows nothing of the old one: requests in flight have failed, and sessions are gone with the ids that they
held. Adapters that were loaded or unloaded meanwhile are so again before it gets a request. Counters go on from where
they were last seen, so that nothing that reads them sees them fall.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable

from stretto.compat import ConfigError
from stretto.engine.client import EngineClient
from stretto.protocol import (
    Action,
    EngineDead,
    EngineInfo,
    EngineRestarting,
    EngineStats,
    LoadAdapter,
    Output,
    Request,
    RequestError,
    SessionInfo,
    StepRecord,
    UnloadAdapter,
)

RESTART_WINDOW = 600.0  # seconds; as many restarts as are allowed may fall into it
LONGEST_WAIT = 30.0  # seconds before one more attempt

log = logging.getLogger(__name__)
Start = Callable[[], Awaitable[EngineClient]]
OnChange = Callable[[str | None], None]
"""Told the cause when the engine has gone, None when there is one again."""


class Supervisor:
    """Made by `await Supervisor.start(...)`; every method runs on the event loop that started it."""

    def __init__(self, client: EngineClient, start: Start, restarts: int):
        self.info: EngineInfo = client.info
        self.on_change: OnChange = lambda cause: None
        self.restarts = 0
        self._client: EngineClient | None = client
        self._start, self._allowed = start, restarts
        self._recent: deque[float] = deque()  # when engines died
        self._cause = ""  # of the latest death
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._adapters: dict[str, str | None] = {}  # name -> path of what was loaded, None: unloaded
        self._base: dict[str, float] = {}  # counters of engines that have died
        self._last: dict[str, float] = {}  # of the one that runs
        self._watch = asyncio.create_task(self._supervise())

    @classmethod
    async def start(cls, start: Start, restarts: int) -> Supervisor:
        """`restarts`: most of them within RESTART_WINDOW; one more death ends the engine for good. Raises what the
        first start raises: that one is not tried again."""
        return cls(await start(), start, restarts)

    # ------------------------------------------------------------------------------------------- AsyncEngine
    def generate(self, request: Request) -> AsyncIterator[Output]:
        return self._engine().generate(request)

    async def abort(self, rid: str) -> bool:
        return await self._engine().abort(rid)

    async def stats(self) -> EngineStats:
        stats = await self._engine().stats()
        self._last = stats.counters
        stats.counters = _sum(self._base, self._last) | {"engine_restarts": float(self.restarts)}
        return stats

    async def manage(self, action: Action) -> list[SessionInfo]:
        found = await self._engine().manage(action)
        if isinstance(action, LoadAdapter | UnloadAdapter):
            self._adapters[action.name] = action.path if isinstance(action, LoadAdapter) else None
        return found

    async def start_trace(self, steps: int) -> None:
        await self._engine().start_trace(steps)

    async def stop_trace(self) -> list[StepRecord]:
        return await self._engine().stop_trace()

    async def healthy(self) -> bool:
        """True as well while another engine is being started: this process does what it should."""
        if self._ended.done():
            return False
        return self._client is None or await self._client.healthy()

    async def dead(self) -> str:
        """Returns, with the cause, once there will be no engine any more."""
        return await asyncio.shield(self._ended)

    async def close(self) -> None:
        """Requests in flight are aborted. Returns when no engine process is left."""
        self._watch.cancel()
        await asyncio.gather(self._watch, return_exceptions=True)
        if self._client is not None:
            await self._client.close()
        self._end("the engine has been closed")

    # --------------------------------------------------------------------------------------------- machinery
    def _engine(self) -> EngineClient:
        if self._client is not None:
            return self._client
        if self._ended.done():
            raise EngineDead(self._cause)
        raise EngineRestarting(self._cause)

    def _end(self, cause: str) -> None:
        self._client, self._cause = None, cause
        if not self._ended.done():
            self._ended.set_result(cause)

    async def _supervise(self) -> None:
        assert self._client is not None
        while True:
            cause = await self._client.dead()
            client, self._client, self._cause = self._client, None, cause
            self._base, self._last = _sum(self._base, self._last), {}
            self.on_change(cause)
            await client.close()
            started = await self._restarted()
            if started is None:
                return
            try:
                await self._adapt(started)
            except BaseException:  # closed meanwhile
                await started.close()
                raise
            before, now = self.info.kv_tokens, started.info.kv_tokens
            log.log(logging.INFO if before == now else logging.WARNING,
                    "the engine runs again; its KV cache holds %d tokens, that of the one before held %d", now, before)
            self._client, self.info = started, started.info
            self.on_change(None)

    async def _adapt(self, client: EngineClient) -> None:
        """Adapters as they were. One that cannot be loaded any more is not there, which requests for it are told; an
        engine that dies of it is found dead by whoever watches it."""
        for name, path in self._adapters.items():
            present = client.info.adapters.pop(name, None)
            try:
                if present is not None and present != path:
                    await client.manage(UnloadAdapter(name))
                if path is not None and present != path:
                    await client.manage(LoadAdapter(name, path))
            except (RequestError, EngineDead) as e:
                log.error("the adapter %s is not as it was before the engine died: %s", name, e)
                continue
            if path is not None:
                client.info.adapters[name] = path

    async def _restarted(self) -> EngineClient | None:
        """A new engine; None where too many have died."""
        while True:
            now = time.monotonic()
            self._recent.append(now)
            while self._recent[0] < now - RESTART_WINDOW:
                self._recent.popleft()
            failures = len(self._recent)
            if failures > self._allowed:
                self._end(self._cause if self._allowed == 0 else
                          f"{self._cause}; it has died {failures} times in {RESTART_WINDOW:g} s")
                return None
            wait = min(2.0 ** (failures - 1) - 1, LONGEST_WAIT)
            log.error("the engine has died: %s; it is started again in %g s (%d of %d)", self._cause, wait, failures,
                      self._allowed)
            await asyncio.sleep(wait)
            self.restarts += 1
            with contextlib.suppress(EngineDead, ConfigError):
                return await self._try()

    async def _try(self) -> EngineClient:
        try:
            return await self._start()
        except (EngineDead, ConfigError) as e:
            self._cause = f"it could not start again: {e}"
            raise


def _sum(a: dict[str, float], b: dict[str, float]) -> dict[str, float]:
    return {name: a.get(name, 0.0) + b.get(name, 0.0) for name in a | b}
