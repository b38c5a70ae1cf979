"""The engine's supervisor over clients that die on command. What a whole server does: tests/serve/test_server.py."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from stretto.engine.supervisor import Supervisor
from stretto.protocol import (
    Action,
    EngineDead,
    EngineInfo,
    EngineRestarting,
    EngineStats,
    LoadAdapter,
    RequestError,
    UnloadAdapter,
)


class Client:
    """An engine that does nothing; it starts with one adapter."""

    def __init__(self, refuses: str = ""):
        self.info = EngineInfo(model_name="m", vocab_size=1, max_model_len=1, max_num_seqs=1, kv_tokens=1,
                               eos_token_ids=[], adapters={"first": "/first"})
        self.done: list[Action] = []
        self.refuses, self.closed, self.counter = refuses, False, 0.0
        self._death: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def die(self, cause: str = "it fell") -> None:
        self._death.set_result(cause)

    async def dead(self) -> str:
        return await asyncio.shield(self._death)

    async def close(self) -> None:
        self.closed = True

    async def healthy(self) -> bool:
        return not self._death.done()

    async def stats(self) -> EngineStats:
        return EngineStats(counters={"tokens": self.counter})

    async def manage(self, action: Action) -> list[Any]:
        if isinstance(action, LoadAdapter) and action.path == self.refuses:
            raise RequestError("no such folder")
        self.done.append(action)
        return []


class Starts:
    """Makes clients; may hold the next start up, or let it fail."""

    def __init__(self) -> None:
        self.made: list[Client] = []
        self.refuses = ""
        self.failures = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self) -> Client:
        await self.gate.wait()
        if self.failures:
            self.failures -= 1
            raise EngineDead("no memory")
        self.made.append(Client(self.refuses))
        return self.made[-1]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.engine.supervisor.LONGEST_WAIT", 0.0)


async def test_a_new_engine_takes_over_and_counters_go_on(quick: None):
    starts = Starts()
    supervisor = await Supervisor.start(starts, 3)
    changes: list[str | None] = []
    supervisor.on_change = changes.append
    starts.made[0].counter = 5.0
    assert (await supervisor.stats()).counters == {"tokens": 5.0, "engine_restarts": 0.0}
    starts.gate.clear()
    starts.made[0].die()
    await until(lambda: bool(changes))
    assert changes == ["it fell"] and await supervisor.healthy()
    with pytest.raises(EngineRestarting, match="it fell"):
        await supervisor.stats()
    starts.gate.set()
    await until(lambda: len(changes) == 2)
    assert changes[1] is None and starts.made[0].closed and supervisor.info is starts.made[1].info
    starts.made[1].counter = 2.0
    assert (await supervisor.stats()).counters == {"tokens": 7.0, "engine_restarts": 1.0}
    await supervisor.close()
    assert starts.made[1].closed and await supervisor.dead() == "the engine has been closed"


async def test_starts_that_fail_count_and_the_last_cause_is_told(quick: None):
    starts = Starts()
    supervisor = await Supervisor.start(starts, 3)
    starts.failures = 2
    starts.made[0].die()
    await until(lambda: len(starts.made) == 2)
    starts.failures = 9
    starts.made[1].die()
    cause = await asyncio.wait_for(supervisor.dead(), 5)
    assert cause.startswith("it fell") and "died 4 times" in cause
    assert not await supervisor.healthy()
    with pytest.raises(EngineDead, match="it fell"):
        await supervisor.stats()
    await supervisor.close()


async def test_without_restarts_the_first_death_is_the_last():
    starts = Starts()
    supervisor = await Supervisor.start(starts, 0)
    starts.made[0].die("first")
    assert await asyncio.wait_for(supervisor.dead(), 5) == "first"
    await supervisor.close()


async def test_the_first_start_is_not_tried_again():
    starts = Starts()
    starts.failures = 1
    with pytest.raises(EngineDead, match="no memory"):
        await Supervisor.start(starts, 3)


async def test_adapters_are_as_they_were(quick: None):
    starts = Starts()
    supervisor = await Supervisor.start(starts, 3)
    for action in (LoadAdapter("more", "/more"), LoadAdapter("gone", "/gone"), UnloadAdapter("first"),
                   LoadAdapter("brief", "/brief"), UnloadAdapter("brief")):
        await supervisor.manage(action)
    starts.refuses = "/gone"
    starts.made[0].die()
    await until(lambda: supervisor.restarts == 1 and supervisor.info is not starts.made[0].info)
    assert starts.made[1].done == [LoadAdapter("more", "/more"), UnloadAdapter("first")]
    assert supervisor.info.adapters == {"more": "/more"}
    await supervisor.manage(LoadAdapter("first", "/other"))
    starts.made[1].die()
    await until(lambda: supervisor.restarts == 2 and supervisor.info is starts.made[-1].info)
    assert starts.made[2].done[-2:] == [UnloadAdapter("first"), LoadAdapter("first", "/other")]
    assert supervisor.info.adapters == {"more": "/more", "first": "/other"}
    await supervisor.close()


async def test_a_close_while_an_engine_starts_leaves_none(quick: None):
    starts = Starts()
    supervisor = await Supervisor.start(starts, 3)
    starts.gate.clear()
    starts.made[0].die()
    await until(lambda: starts.made[0].closed)
    await asyncio.wait_for(supervisor.close(), 5)
    assert len(starts.made) == 1 and not await supervisor.healthy()
