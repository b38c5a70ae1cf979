"""The life of all: `Fleet.run`, from the first start to the exit code.

    gateway    | starts | no replica: 404, not ready | serves ................................................ | ends
    replica 0  | starts, fetches the model | serves ............... | drains, starts again | serves .. | drains |
    replica 1                              | starts | serves .. X   | starts again | serves .......... | drains |
                                           ready    killed          SIGHUP: one after the other        SIGTERM, Ctrl-C

A replica that is stopped on purpose is withdrawn from the gateway first, and finishes what it has: no request is lost.
One that dies loses what had begun to be answered; the gateway asks another replica for the rest. It is started again,
as often as --engine-restarts allows within ten minutes; then it stays down, and the others go on. When none is left,
the fleet ends. A gateway that dies is started again and told who is there.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import signal
import time
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import httpx

from stretto.replicas import tether
from stretto.replicas.gateway import Control, Gateway
from stretto.replicas.placement import Place

RESTART_WINDOW = 600.0  # seconds; as many restarts as are allowed may fall into it
LONGEST_WAIT = 30.0  # seconds before one more attempt
START_SECONDS = 1800.0  # of a replica: loading and warm-up
GATEWAY_SECONDS = 60.0
GATEWAY_STOP_SECONDS = 10.0
LAST_WORDS_SECONDS = 15.0  # that a replica gets beyond its own --drain-timeout
POLL_SECONDS = 0.1
LONGEST_LINE = 2**20  # bytes of a log's line that are kept
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")

log = logging.getLogger(__name__)
gateway_log = logging.getLogger("gateway")


@dataclass(frozen=True)
class Job:
    """A Python program to run tied to this process. `python`: of the environment that has `module`."""

    name: str
    module: str
    argv: Sequence[str]
    python: str
    cores: Sequence[int] = ()
    environment: dict[str, str] = field(default_factory=dict)

    async def start(self, stdout: int = 2) -> Process:
        """In a session of its own: the terminal's Ctrl-C reaches the fleet alone, which tells the others. Its stdout is
        this process's stderr, unless it is asked for."""
        process = await asyncio.create_subprocess_exec(
            self.python, "-P", str(Path(tether.__file__)), self.name, str(os.getpid()), stdin=PIPE, stdout=stdout,
            env={**os.environ, **self.environment}, start_new_session=True)
        assert process.stdin is not None
        task = {"module": self.module, "argv": list(self.argv), "cores": list(self.cores)}
        with contextlib.suppress(ConnectionError):  # it has died already, which its exit code tells
            process.stdin.write(json.dumps(task).encode() + b"\n")
            await process.stdin.drain()
        process.stdin.close()
        return process


class _Replica:
    """One place and what runs there."""

    def __init__(self, place: Place):
        self.place = place
        self.process: Process | None = None
        self.settled = asyncio.Event()  # it serves, or never will
        self.serving = False  # the gateway sends here
        self.served = False  # has done so once
        self.leaving = False  # stopped on purpose, to be started again
        self.deaths: deque[float] = deque()  # the latest
        self.died = 0  # times, ever

    def signal(self, number: int) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(number)

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.returncode is None


def _wait_before_restart(deaths: deque[float], allowed: int) -> float | None:
    """Seconds, counting a death now; None where there were too many."""
    now = time.monotonic()
    deaths.append(now)
    while deaths[0] < now - RESTART_WINDOW:
        deaths.popleft()
    return None if len(deaths) > allowed else min(2.0 ** (len(deaths) - 1) - 1, LONGEST_WAIT)


class _Failed(Exception):
    """The fleet cannot go on; its exit code is known."""


class Fleet:
    """`job`: what runs in a place. `restarts`: of a replica, or of the gateway, that dies. `drain_timeout`: seconds
    that a replica takes to stop, by itself. Made on the event loop that runs it."""

    def __init__(self, places: Sequence[Place], job: Callable[[Place], Job], gateway: Gateway, gateway_job: Job,
                 restarts: int, drain_timeout: float):
        self._replicas = [_Replica(place) for place in places]
        self._job, self._gateway_job = job, gateway_job
        self._restarts, self._drain_timeout = restarts, drain_timeout
        self._stopping, self._hurry, self._gateway_up = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._exit_code = 0
        self._rolling: asyncio.Task[None] | None = None
        self._control = Control(gateway)

    async def run(self, on_ready: Callable[[], None]) -> int:
        """Until a signal, or until nothing is left. `on_ready`: called once, when all have started. Returns the exit
        code: 0 after a stop that was asked for, that of a replica which could not start, else 1."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop)
        loop.add_signal_handler(signal.SIGHUP, self._roll_soon)
        try:
            async with asyncio.TaskGroup() as group:
                gateway = group.create_task(self._keep_gateway())
                group.create_task(self._keep_replicas(gateway, on_ready))
        except* _Failed:
            log.error("the fleet ends")
        finally:
            await self._control.close()
        return self._exit_code

    # --------------------------------------------------------------------------------------------------- replicas
    async def _keep_replicas(self, gateway: asyncio.Task[None], on_ready: Callable[[], None]) -> None:
        await self._until(self._gateway_up.is_set)
        async with asyncio.TaskGroup() as group:
            for replica in self._replicas:
                group.create_task(self._keep(replica))
                if replica is self._replicas[0]:  # alone: it fetches the model and fills the caches
                    await replica.settled.wait()
            for replica in self._replicas:
                await replica.settled.wait()
            if all(replica.served for replica in self._replicas):
                on_ready()
        if not self._stopping.is_set():
            log.error("no replica is left")
            self._exit_code = 1
        gateway.cancel()

    async def _keep(self, replica: _Replica) -> None:
        """Starts it, and again whenever it ends without the fleet's being told to stop."""
        index = replica.place.index
        try:
            while not self._stopping.is_set():
                code = await self._life(replica)
                if self._stopping.is_set():
                    return
                if replica.leaving:
                    replica.leaving = False
                    if code != 0:
                        log.warning("replica %d, which was to be restarted, has ended with exit code %d", index, code)
                    continue
                if not replica.served:
                    self._fail(code)
                replica.died += 1
                with contextlib.suppress(httpx.HTTPError, TimeoutError):
                    await self._control.withdraw(replica.place.url)
                wait = _wait_before_restart(replica.deaths, self._restarts)
                if wait is None:
                    log.error("replica %d has died %d times in %g s (exit code %d) and stays down; the others go on",
                              index, len(replica.deaths), RESTART_WINDOW, code)
                    return
                log.error("replica %d has died (exit code %d); it is started again in %g s", index, code, wait)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), wait)
        finally:
            replica.settled.set()

    async def _life(self, replica: _Replica) -> int:
        """From the start of its process to the end. Returns the exit code."""
        replica.process = process = await self._job(replica.place).start()
        if self._stopping.is_set():
            replica.signal(signal.SIGTERM)
        try:
            async with asyncio.TaskGroup() as group:
                introducing = group.create_task(self._keep_introduced(replica))
                code = await process.wait()
                introducing.cancel()
            return code
        finally:
            replica.serving = False
            await _killed(process)

    async def _becomes_ready(self, replica: _Replica) -> bool:
        """False where it ends before, or is ended since it takes too long."""
        ends = time.monotonic() + START_SECONDS
        async with httpx.AsyncClient(trust_env=False, timeout=5) as http:
            while replica.alive and time.monotonic() < ends:
                with contextlib.suppress(httpx.TransportError):
                    if (await http.get(f"{replica.place.url}/readyz")).status_code == 200:
                        return True
                await asyncio.sleep(POLL_SECONDS)
        if replica.alive and not self._stopping.is_set():
            log.error("replica %d was not ready after %g s", replica.place.index, START_SECONDS)
            replica.signal(signal.SIGKILL)
        return False

    async def _keep_introduced(self, replica: _Replica) -> None:
        """Tells the gateway of it, and each that is started later, as long as it lives. Nobody else does.

            gateway    | serves .......................... X | starts | serves .................................... |
            serving    | no | yes ..........................  | no         | yes ....... | no: it is withdrawn, drains
                        admit                                             admit
        """
        if not await self._becomes_ready(replica):
            return
        while True:
            await self._until(lambda: self._gateway_up.is_set() and not (replica.serving or replica.leaving))
            if self._stopping.is_set():
                return
            try:
                await self._control.admit(replica.place.url)
            except (httpx.HTTPError, OSError, TimeoutError) as e:
                log.warning("replica %d waits for the gateway: %s", replica.place.index, e)
                await asyncio.sleep(1)
                continue
            if not self._gateway_up.is_set():
                continue  # the one that took it has ended
            replica.serving = replica.served = True
            replica.settled.set()
            log.info("replica %d serves (%s, %s)", replica.place.index, replica.place.hardware, replica.place.url)

    # ---------------------------------------------------------------------------------------------------- gateway
    async def _keep_gateway(self) -> None:
        deaths: deque[float] = deque()
        while True:
            code = await self._gateway_life()
            wait = _wait_before_restart(deaths, self._restarts)
            if wait is None or not any(replica.served for replica in self._replicas):
                log.error("the gateway has ended with exit code %d", code)
                self._fail(1)
            log.error("the gateway has died (exit code %d); it is started again in %g s", code, wait)
            await asyncio.sleep(wait)

    async def _gateway_life(self) -> int:
        """From the start of its process to the end. Returns the exit code."""
        process = await self._gateway_job.start(stdout=PIPE)
        relay = asyncio.create_task(self._relay_logs(process))
        try:
            await self._gateway_answers(process)
            return await process.wait()
        finally:
            self._gateway_up.clear()
            for replica in self._replicas:
                replica.serving = False  # the next gateway knows of none
            await self._end_gateway(process)
            await relay

    async def _gateway_answers(self, process: Process) -> None:
        """Or it has ended before."""
        ends = time.monotonic() + GATEWAY_SECONDS
        while process.returncode is None and time.monotonic() < ends:
            if await self._control.alive():
                self._gateway_up.set()
                return
            await asyncio.sleep(POLL_SECONDS)
        if process.returncode is None:
            log.error("the gateway does not answer after %g s", GATEWAY_SECONDS)
            self._fail(1)

    async def _relay_logs(self, process: Process) -> None:
        """What the gateway logs, as JSON or text, in the form of this process's own logs. Whatever else it prints is
        decoration; that replicas are gone is no news at the end."""
        assert process.stdout is not None
        async for line in _lines(process.stdout):
            entry = _log_entry(line.decode(errors="replace"))
            if entry is None and len(line) == LONGEST_LINE:
                begins = line[:200].decode(errors="replace")
                entry = logging.WARNING, f"a line of {LONGEST_LINE} bytes or more: {begins}"
            if entry is not None and not self._stopping.is_set():
                gateway_log.log(entry[0], "[gateway] %s", entry[1])

    async def _end_gateway(self, process: Process) -> None:
        """It gets time for the last bytes of what the replicas have answered."""
        if process.returncode is None:
            process.terminate()
            ended, hurry = asyncio.create_task(process.wait()), asyncio.create_task(self._hurry.wait())
            await asyncio.wait((ended, hurry), timeout=GATEWAY_STOP_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            hurry.cancel()
        await _killed(process)

    # ---------------------------------------------------------------------------------------------------- signals
    def _stop(self) -> None:
        """The first time: replicas drain, and the gateway tells their answers. The second: they abort."""
        if self._stopping.is_set():
            self._hurry.set()
        else:
            log.info("stopping: replicas finish what they have")
            loop = asyncio.get_running_loop()
            loop.call_later(self._drain_timeout + LAST_WORDS_SECONDS, self._signal_all, signal.SIGKILL)
        self._stopping.set()
        self._signal_all(signal.SIGTERM)

    def _signal_all(self, number: int) -> None:
        for replica in self._replicas:
            replica.signal(number)

    def _roll_soon(self) -> None:
        if self._rolling is not None and not self._rolling.done():
            log.warning("a restart of all replicas is on its way already")
            return
        self._rolling = asyncio.get_running_loop().create_task(self._roll())

    async def _roll(self) -> None:
        """Restarts every replica, one after the other. The next one waits until the last one serves again."""
        for replica in self._replicas:
            if not await self._restart(replica):
                return
        if not self._stopping.is_set():
            log.info("all replicas have been restarted")

    async def _restart(self, replica: _Replica) -> bool:
        """Whether the next one may be restarted: when this one serves again. One that is down is left alone."""
        await self._until(lambda: replica.serving or not replica.alive)
        if self._stopping.is_set() or not replica.alive:
            return True
        index, process, died = replica.place.index, replica.process, replica.died
        replica.leaving = True  # if it dies from now on, that is the restart
        try:
            await self._control.withdraw(replica.place.url)
        except (httpx.HTTPError, TimeoutError) as e:
            replica.leaving = replica.serving = False  # the gateway may have let it go: it is introduced again
            log.error("replica %d is not restarted: %s", index, e or repr(e))
            return False
        replica.serving = False
        if replica.process is process:  # or it has died meanwhile, and there is another one
            log.info("replica %d is restarted: it finishes what it has", index)
            replica.signal(signal.SIGTERM)
        await self._until(lambda: replica.serving or replica.died > died)
        if replica.serving or self._stopping.is_set():
            return True
        log.error("replica %d did not come back; the others are left as they are", index)
        return False

    def _fail(self, code: int) -> NoReturn:
        self._exit_code = code if code > 0 else 1  # a signal's is negative
        raise _Failed

    async def _until(self, reached: Callable[[], bool]) -> None:
        """Or until the fleet is told to stop."""
        while not reached() and not self._stopping.is_set():
            await asyncio.sleep(POLL_SECONDS)


async def _killed(process: Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Without their ends; the first LONGEST_LINE bytes of a longer one."""
    line = b""
    while chunk := await stream.read(2**16):
        first, *others = chunk.split(b"\n")
        line += first[: LONGEST_LINE - len(line)]
        for other in others:
            yield line
            line = other
    if line:
        yield line


def _log_entry(line: str) -> tuple[int, str] | None:
    """(level, message) of a line of a log; None where it is none."""
    try:
        entry = json.loads(line)
        level, message = entry["level"], entry["message"]
    except (ValueError, KeyError, TypeError):
        words = _COLOURS.sub("", line).split(maxsplit=3)  # date, time, level, the rest
        level, message = (words[2], words[3]) if len(words) == 4 else ("", "")
    number = logging.getLevelNamesMapping().get(level.upper())
    return None if number is None else (number, message.strip())
