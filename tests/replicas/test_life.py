"""The life of a fleet by itself: small stand-ins for the gateway and the replicas, which real ones follow in
test_fleet.py."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import psutil
import pytest

from stretto.config import Config, ServeSection
from stretto.replicas.fleet import Fleet, Job
from stretto.replicas.gateway import VllmRouter
from stretto.replicas.placement import Place, free_ports, place

ROOT = Path(__file__).resolve().parents[2]
STAND_INS = "tests.replicas.stand_ins"


class Life:
    """A fleet in this process, its parts in their own."""

    def __init__(self, count: int, restarts: int, fails: dict[int, int]):
        serve = ServeSection(port=0, replicas=count)
        self.places = place(Config(serve=serve), (), ())
        self.gateway = VllmRouter(sys.executable, free_ports([0])[0], 0, serve)
        self.ready, self.fails = asyncio.Event(), fails
        self.fleet = Fleet(self.places, self._job, self.gateway, self._program("gateway", self.gateway.port), restarts,
                           drain_timeout=5.0)

    def _program(self, name: str, *arguments: object) -> Job:
        return Job(name, STAND_INS, [name, *map(str, arguments)], sys.executable,
                   environment={"PYTHONPATH": str(ROOT)})

    def _job(self, one: Place) -> Job:
        code = self.fails.get(one.index)
        return self._program(f"replica-{one.index}", one.port, *([] if code is None else [code]))

    def child(self, name: str) -> psutil.Process | None:
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):  # a zombie as well
                if name in child.cmdline():
                    return child
        return None

    async def workers(self) -> list[str]:
        async with httpx.AsyncClient(base_url=self.gateway.control_url, trust_env=False) as http:
            with contextlib.suppress(httpx.HTTPError):
                return sorted(await self.gateway.workers(http))
        return []

    async def until(self, reached: Callable[[list[str]], bool], seconds: float = 20) -> None:
        async with asyncio.timeout(seconds):
            while not reached(await self.workers()):
                await asyncio.sleep(0.05)

    @property
    def urls(self) -> list[str]:
        return sorted(one.url for one in self.places)


@contextlib.asynccontextmanager
async def life(count: int = 2, restarts: int = 3, **fails: int) -> AsyncIterator[tuple[Life, asyncio.Task[int]]]:
    made = Life(count, restarts, {int(name[-1]): code for name, code in fails.items()})
    running = asyncio.create_task(made.fleet.run(made.ready.set))
    try:
        yield made, running
    finally:
        if not running.done():
            made.fleet._stop()
            made.fleet._stop()
            await running
        names = ["gateway", *(f"replica-{one.index}" for one in made.places)]
        assert [name for name in names if made.child(name)] == [], "something outlives the fleet"


async def test_all_serve_and_one_stop_ends_all():
    async with life() as (made, running):
        await asyncio.wait_for(made.ready.wait(), 20)
        assert await made.workers() == made.urls
        os.kill(os.getpid(), signal.SIGTERM)
        assert await asyncio.wait_for(running, 15) == 0


async def test_a_dead_replica_leaves_the_gateway_and_comes_back():
    async with life() as (made, _):
        await asyncio.wait_for(made.ready.wait(), 20)
        dead = made.child("replica-1")
        assert dead is not None
        dead.kill()
        await made.until(lambda known: len(known) == 1)
        await made.until(lambda known: known == made.urls)
        again = made.child("replica-1")
        assert again is not None and again.pid != dead.pid


async def test_one_that_dies_too_often_stays_down_and_the_last_ends_the_fleet():
    async with life(restarts=0) as (made, running):
        await asyncio.wait_for(made.ready.wait(), 20)
        first, second = made.child("replica-0"), made.child("replica-1")
        assert first is not None and second is not None
        second.kill()
        await made.until(lambda known: known == [made.places[0].url])
        await asyncio.sleep(0.3)
        assert not running.done() and made.child("replica-1") is None
        first.kill()
        assert await asyncio.wait_for(running, 15) == 1


async def test_a_rolling_restart_takes_them_one_by_one():
    async with life(count=3) as (made, _):
        await asyncio.wait_for(made.ready.wait(), 20)
        before, fewest = {i: made.child(f"replica-{i}") for i in range(3)}, 3
        os.kill(os.getpid(), signal.SIGHUP)
        async with asyncio.timeout(30):
            while True:
                now = {i: made.child(f"replica-{i}") for i in range(3)}
                fewest = min(fewest, len(await made.workers()))
                if all(now[i] is not None and now[i] != before[i] for i in range(3)) \
                        and await made.workers() == made.urls:
                    break
                await asyncio.sleep(0.02)
        assert fewest == 2, "more than one was away at a time"


async def test_a_replica_that_cannot_start_ends_the_start_with_its_code():
    async with life(replica_1=3) as (made, running):
        assert await asyncio.wait_for(running, 20) == 3
        assert not made.ready.is_set()


async def test_a_dead_gateway_is_started_again_and_told_who_is_there():
    async with life() as (made, _):
        await asyncio.wait_for(made.ready.wait(), 20)
        gateway = made.child("gateway")
        assert gateway is not None
        gateway.kill()
        await made.until(lambda known: known == made.urls)
        again = made.child("gateway")
        assert again is not None and again.pid != gateway.pid


@pytest.mark.parametrize("early", [True, False])
async def test_a_stop_while_it_starts_leaves_nothing(early: bool):
    async with life() as (made, running):
        if not early:
            await made.until(lambda known: len(known) >= 1)
        made.fleet._stop()
        assert await asyncio.wait_for(running, 15) == 0
