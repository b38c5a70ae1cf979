"""EngineHandle: the AsyncEngine verbs of an engine loop somewhere else, all of them over one router. No torch here.

What differs between its kinds is how commands travel and how the loop is started, watched and ended.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from stretto.engine.messages import Command
from stretto.engine.router import Router
from stretto.protocol import Action, EngineInfo, EngineStats, Output, Request, SessionInfo, StepRecord

WATCH_SECONDS = 0.5
EXIT_SECONDS = 10.0  # for a loop to close its core after Shutdown


class EngineHandle:
    """Every method runs on the event loop on which the handle was made."""

    info: EngineInfo

    def __init__(self, send: Callable[[Command], None], stall_timeout: float):
        self._router = Router(send, stall_timeout)

    def generate(self, request: Request) -> AsyncIterator[Output]:
        return self._router.generate(request, self.info)

    async def abort(self, rid: str) -> bool:
        return await self._router.abort(rid)

    async def stats(self) -> EngineStats:
        return await self._router.stats()

    async def manage(self, action: Action) -> list[SessionInfo]:
        return await self._router.manage(action)

    async def start_trace(self, steps: int) -> None:
        await self._router.trace(steps)

    async def stop_trace(self) -> list[StepRecord]:
        return await self._router.trace(0)

    async def healthy(self) -> bool:
        return self._router.healthy()

    async def dead(self) -> str:
        """Returns, with the cause, once the engine has died or been closed."""
        await self._router.dead.wait()
        return self._router.cause or ""
