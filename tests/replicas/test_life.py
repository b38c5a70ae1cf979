"""The life of a fleet by itself: small stand-ins for the gateway and the replicas, which real ones follow in
test_fleet.py."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import psutil
import pytest

from stretto.config import Config, ServeSection
from stretto.replicas.fleet import Fleet, Job
from stretto.replicas.gateway import VllmRouter
from stretto.replicas.placement import LOOPBACK, Place, Ports, place, ports_after, reserved

ROOT = Path(__file__).resolve().parents[2]
STAND_INS = "tests.replicas.stand_ins"


class Life:
    """A fleet in this process, its parts in their own."""

    def __init__(self, folder: Path, ports: Ports, restarts: int, fails: dict[int, int],
                 faults: dict[str, str | float]):
        serve = ServeSection(port=0, replicas=len(ports.replicas))
        self.places = place(Config(serve=serve), (), (), ports.replicas)
        self.gateway = VllmRouter(sys.executable, ports.gateway, ports.metrics, serve)
        self.ready, self.fails, self._journal = asyncio.Event(), fails, folder / "journal"
        job = self._program("gateway", self.gateway.port, self._journal, json.dumps(faults))
        self.fleet = Fleet(self.places, self._job, self.gateway, job, restarts, drain_timeout=5.0)

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
        """Those that requests are sent to."""
        async with httpx.AsyncClient(base_url=self.gateway.control_url, trust_env=False) as http:
            with contextlib.suppress(httpx.HTTPError):
                return sorted(url for url, healthy in (await self.gateway.workers(http)).items() if healthy)
        return []

    async def until(self, reached: Callable[[list[str]], bool], seconds: float = 20) -> None:
        async with asyncio.timeout(seconds):
            while not reached(await self.workers()):
                await asyncio.sleep(0.05)

    def told(self) -> list[str]:
        """What the gateways did and were asked to do: "start 1", "add 1", ..."""
        return self._journal.read_text().splitlines()

    @property
    def urls(self) -> list[str]:
        return sorted(one.url for one in self.places)


@contextlib.asynccontextmanager
async def life(count: int = 2, restarts: int = 3, faults: dict[str, str | float] | None = None,
               **fails: int) -> AsyncIterator[tuple[Life, asyncio.Task[int]]]:
    with (tempfile.TemporaryDirectory() as folder, reserved(LOOPBACK, 0, "") as gateway,
          ports_after(gateway, 0, count) as ports):
        made = Life(Path(folder), ports, restarts, {int(name[-1]): code for name, code in fails.items()}, faults or {})
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


async def test_a_gateway_that_cannot_start_ends_the_start():
    async with life(faults={"start 1": "die"}) as (made, running):
        assert await asyncio.wait_for(running, 10) == 1
        assert made.told() == ["start 1"]


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


# ------------------------------------------------------------------------------------------------ gateways with faults
async def test_a_gateway_that_dies_while_it_is_told_is_started_again_and_told_of_each_once():
    async with life(faults={"add 2": "die"}) as (made, _):
        await asyncio.wait_for(made.ready.wait(), 15)
        assert await made.workers() == made.urls
        assert made.told() == ["start 1", "add 1", "add 2", "start 2", "add 3", "add 4"], "each has one introducer"


@pytest.mark.parametrize("moment", ["add 3", "start 2"])
async def test_one_that_dies_at_any_moment_of_its_second_start_is_started_once_more(moment: str):
    async with life(faults={moment: "die"}) as (made, _):
        await asyncio.wait_for(made.ready.wait(), 20)
        gateway = made.child("gateway")
        assert gateway is not None
        gateway.kill()
        await made.until(lambda known: "start 3" in made.told() and known == made.urls, 10)


async def test_one_replica_that_a_gateway_finds_unhealthy_keeps_nobody_else_out_and_comes_in_later(
        monkeypatch: pytest.MonkeyPatch):
    async with life(faults={"add 3": "stick", "add 4": "refuse"}) as (made, _):
        await asyncio.wait_for(made.ready.wait(), 20)
        monkeypatch.setattr("stretto.replicas.gateway.REGISTER_SECONDS", 3.0)
        gateway = made.child("gateway")
        assert gateway is not None
        gateway.kill()
        await made.until(lambda known: "add 5" in made.told() and len(known) == 1, 5)
        await made.until(lambda known: known == made.urls, 10)
        assert "remove 1" in made.told(), "what the first attempt had left"


async def test_a_long_line_of_the_gateway_ends_no_relay(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    async with life(count=1, faults={"add 1": "shout"}) as (made, running):
        await asyncio.wait_for(made.ready.wait(), 10)
        made.fleet._stop()
        assert await asyncio.wait_for(running, 10) == 0
    said = [record.getMessage() for record in caplog.records if record.name == "gateway"]
    assert "[gateway] and goes on" in said
    assert any(line.startswith("[gateway] a line of 1048576 bytes or more") and len(line) < 400 for line in said)


async def test_a_replica_that_dies_while_it_is_withdrawn_is_restarted_once(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    async with life(faults={"remove 1": 1.5}) as (made, _):
        await asyncio.wait_for(made.ready.wait(), 20)
        old, started = made.child("replica-0"), set[int]()
        assert old is not None
        os.kill(os.getpid(), signal.SIGHUP)
        await made.until(lambda _: "remove 1" in made.told())
        old.kill()

        def restarted(_: list[str]) -> bool:
            now = made.child("replica-0")
            started.update({now.pid} if now is not None and now.pid != old.pid else ())
            return "all replicas have been restarted" in caplog.messages

        await made.until(restarted, 15)
        await made.until(lambda known: known == made.urls, 5)
        assert len(started) == 1, "the one that had just been started was stopped"
        assert "replica 0, which was to be restarted, has ended with exit code -9" in caplog.messages


async def test_a_replica_whose_withdrawal_fails_serves_again(caplog: pytest.LogCaptureFixture):
    async with life(faults={"remove 1": "hang up"}) as (made, _):
        await asyncio.wait_for(made.ready.wait(), 20)
        before = made.child("replica-0")
        os.kill(os.getpid(), signal.SIGHUP)
        await made.until(lambda _: any("replica 0 is not restarted" in line for line in caplog.messages), 5)
        await made.until(lambda known: known == made.urls, 5)
        assert made.child("replica-0") == before
