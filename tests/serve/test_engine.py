"""The engine loop in a process of its own and on a thread: results, aborts, and every way of dying."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest

from stretto.engine import process
from stretto.engine.client import EngineClient
from stretto.engine.inprocess import InProcessEngine, QueueInbox, _end
from stretto.engine.loop import run_loop
from stretto.engine.messages import Aborted, AbortRequest, Died, Outputs, Shutdown, Started, Submit
from stretto.engine.router import Mailbox, Router, join_outputs
from stretto.params import SamplingParams
from stretto.protocol import AsyncEngine, EngineDead, Output, Request, RequestError, TokenLogprob, Usage
from tests.serve.fakes import CoreOptions

ROOT = Path(__file__).resolve().parents[2]
KINDS = [InProcessEngine, EngineClient]
Engine = InProcessEngine | EngineClient


@contextlib.asynccontextmanager
async def started(kind: type[Engine], options: CoreOptions | None = None, **settings) -> AsyncIterator[Engine]:
    engine = await kind.start(options or CoreOptions(), **settings)
    try:
        yield engine
    finally:
        await engine.close()


def request(text: str, rid: str = "r", **sampling) -> Request:
    return Request(rid=rid, tokens=list(text.encode()), sampling=SamplingParams(**{"max_tokens": 20} | sampling))


async def text_of(engine: AsyncEngine, asked: Request) -> dict[int, str]:
    texts: dict[int, str] = {}
    async for output in engine.generate(asked):
        assert output.rid == asked.rid
        texts[output.index] = texts.get(output.index, "") + output.text
    return texts


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("kind", KINDS)
async def test_requests_aborts_and_numbers(kind: type[Engine]):
    async with started(kind, CoreOptions(step_seconds=0.002, max_model_len=100_000)) as engine:
        assert engine.info.model_name == "fake/tiny" and await engine.healthy()
        texts = await asyncio.gather(*(text_of(engine, request(f"say:text {i}", f"r{i}")) for i in range(8)))
        assert texts == [{0: f"text {i}"} for i in range(8)]
        assert set(await text_of(engine, request("x", n=3))) == {0, 1, 2}
        long = asyncio.create_task(text_of(engine, request("x", "long", max_tokens=90_000)))
        await asyncio.sleep(0)  # it is submitted
        with pytest.raises(RequestError, match="still running"):
            await text_of(engine, request("x", "long"))
        assert await engine.abort("long") and not await engine.abort("long") and not await engine.abort("none")
        assert await text_of(engine, request("say:again", "long")) == {0: "again"}  # free once abort() has returned
        await long
        stream = engine.generate(request("x", "left", max_tokens=90_000))
        await anext(stream)
        await stream.aclose()
        stats = await engine.stats()
        assert (stats.gauges["running"], stats.gauges["waiting"]) == (0, 0)
        unknown = request("x", allowed_token_ids=(10**6,))
        for refused in (request("refuse:it"), request(""), request("x" * 100_001), unknown):
            with pytest.raises(RequestError):
                await text_of(engine, refused)
        output = [o async for o in engine.generate(request("crash:it"))]
        assert output[0].finish_reason == "error" and "submit failed" in (output[0].error or "")
        assert await engine.healthy()


@pytest.mark.parametrize("kind", KINDS)
async def test_start_errors_reach_the_caller(kind: type[Engine]):
    with pytest.raises(EngineDead, match="ValueError: no such model"):
        await kind.start(CoreOptions(start_error="no such model"))


async def test_a_start_that_takes_too_long_is_given_up():
    with pytest.raises(EngineDead, match=r"not ready after 0\.5 s"):
        await EngineClient.start(CoreOptions(start_seconds=60), start_timeout=0.5)
    assert not children()


async def test_a_cancelled_start_leaves_no_child():
    task = asyncio.create_task(EngineClient.start(CoreOptions(start_seconds=60)))
    await until(lambda: bool(children()))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert not children()


def children() -> list[psutil.Process]:
    """Engine processes of this process; Python's resource tracker is not one of them."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if "spawn_main" in " ".join(child.cmdline()) and child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
    return found


@pytest.mark.parametrize("kind", KINDS)
async def test_case_4_11_a_failing_step_ends_every_request_and_health(kind: type[Engine]):
    async with started(kind, CoreOptions(step_seconds=0.005, max_model_len=100_000)) as engine:
        others = [asyncio.create_task(last(engine, request("x", f"r{i}", n=2, max_tokens=90_000))) for i in range(3)]
        await asyncio.sleep(0.05)
        failed = await last(engine, request("fault:boom", "bad"))
        for outputs in [failed, *await asyncio.gather(*others)]:
            assert all(o.finish_reason == "error" and "RuntimeError: step failed: boom" in (o.error or "")
                       for o in outputs.values())
        assert "boom" in await asyncio.wait_for(engine.dead(), 5) and not await engine.healthy()
        with pytest.raises(EngineDead, match="boom"):
            await text_of(engine, request("x"))
        with pytest.raises(EngineDead, match="boom"):
            await engine.stats()
        if isinstance(engine, EngineClient):
            await until(lambda: engine._process.process.exitcode == 1)


async def last(engine: AsyncEngine, asked: Request) -> dict[int, Output]:
    """The last output of each choice."""
    return {output.index: output async for output in engine.generate(asked)}


async def test_case_17_01_a_killed_engine_is_noticed_at_once():
    async with started(EngineClient) as engine:
        waiting = asyncio.create_task(text_of(engine, request("x", max_tokens=400)))
        with pytest.raises(EngineDead, match="exit code 3"):
            await text_of(engine, request("exit:now", "other"))
        with contextlib.suppress(EngineDead):
            await waiting
        assert not await engine.healthy()
        with pytest.raises(EngineDead):
            await engine.abort("r") or await engine.stats()


async def test_case_17_01_a_stopped_engine_turns_unhealthy_and_recovers():
    async with started(EngineClient, CoreOptions(step_seconds=0.002, max_model_len=100_000),
                       stall_timeout=1.0) as engine:
        (child,) = children()
        waiting = asyncio.create_task(text_of(engine, request("x", max_tokens=90_000)))
        await asyncio.sleep(0.1)
        child.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(EngineDead, match="no progress"):
                await asyncio.wait_for(waiting, 5)
            assert not await engine.healthy()
        finally:
            child.send_signal(signal.SIGCONT)
        async with asyncio.timeout(5):
            while not await engine.healthy():
                await asyncio.sleep(0.05)
        assert await text_of(engine, request("say:back")) == {0: "back"}
        assert (await engine.stats()).gauges["running"] == 0  # the lost request was withdrawn


async def test_case_17_01_an_engine_that_stays_wedged_is_ended():
    async with started(EngineClient, stall_timeout=0.5) as engine:
        (child,) = children()
        child.send_signal(signal.SIGSTOP)
        assert "no progress for too long" in await asyncio.wait_for(engine.dead(), 15)
        await engine.close()
        assert not child.is_running()


async def test_a_wedged_step_is_noticed_in_process():
    async with started(InProcessEngine, stall_timeout=1.0) as engine:
        with pytest.raises(EngineDead, match="no progress"):
            await asyncio.wait_for(text_of(engine, request("wedge:2.5")), 5)
        assert not await engine.healthy()


async def test_a_long_step_that_computes_is_no_stall():
    async with started(InProcessEngine, stall_timeout=1.0) as engine:
        assert await text_of(engine, request("spin:2", max_tokens=1))
        assert await engine.healthy()


async def test_an_engine_that_is_dropped_ends_its_thread():
    """When nobody reads from it any more; without `close`."""
    engine = await InProcessEngine.start(CoreOptions(step_seconds=0.002))
    thread, stream = engine._thread, engine.generate(request("x", max_tokens=150))
    read = [await anext(stream)]
    del engine
    gc.collect()
    read += [output async for output in stream]
    assert read[-1].finish_reason == "length" and sum(len(output.token_ids) for output in read) == 150
    await until(lambda: gc.collect() >= 0 and not thread.is_alive())


@pytest.mark.filterwarnings("error")
def test_the_last_reference_may_go_on_the_engines_own_thread():
    inbox = QueueInbox()
    thread = threading.Thread(target=lambda: _end(inbox, threading.current_thread()))
    thread.start()
    thread.join(5)
    assert inbox.take(0) == [Shutdown()]


async def test_close_ends_a_stopped_child(monkeypatch):
    monkeypatch.setattr("stretto.engine.client.EXIT_SECONDS", 0.3)
    engine = await EngineClient.start(CoreOptions())
    (child,) = children()
    child.send_signal(signal.SIGSTOP)
    await engine.close()
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


async def test_signals_of_the_terminal_do_not_reach_the_engine():
    async with started(EngineClient) as engine:
        (child,) = children()
        child.send_signal(signal.SIGINT)
        child.send_signal(signal.SIGTERM)
        assert await text_of(engine, request("say:still here")) == {0: "still here"}
        await engine.close()
        assert engine._process.process.exitcode == 0


PARENT = """
    import asyncio, sys
    from stretto.engine.client import EngineClient
    from tests.serve.fakes import CoreOptions

    async def main():
        if "loading" in sys.argv:
            task = asyncio.create_task(EngineClient.start(CoreOptions(start_seconds=60)))
            while not task.done():
                await asyncio.sleep(0.1)
                print("loading", flush=True)
        engine = await EngineClient.start(CoreOptions())
        print("ready", flush=True)
        await asyncio.sleep(60)

    if __name__ == "__main__":
        asyncio.run(main())
"""


@pytest.mark.parametrize("when", ["loading", "ready"])
def test_case_17_07_no_orphan_when_the_parent_is_killed(tmp_path: Path, when: str):
    script = tmp_path / "parent.py"
    script.write_text(textwrap.dedent(PARENT))
    parent = subprocess.Popen([sys.executable, str(script), when], stdout=subprocess.PIPE, text=True, cwd=ROOT,
                              env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert parent.stdout is not None
    try:
        assert parent.stdout.readline().strip() == when
        deadline = time.monotonic() + 20
        while not (family := psutil.Process(parent.pid).children(recursive=True)) and time.monotonic() < deadline:
            time.sleep(0.05)
        if when == "loading":
            time.sleep(0.5)  # the child has begun to import
        family = psutil.Process(parent.pid).children(recursive=True)
        assert family
    finally:
        parent.kill()
        parent.wait()
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive


# ------------------------------------------------------------------------------------------------------ the parts
class ListInbox:
    """Commands by round; a round is what one take() gives."""

    def __init__(self, *rounds: list):
        self._rounds = list(rounds)

    def take(self, timeout: float) -> list:
        return self._rounds.pop(0) if self._rounds else [Shutdown()]


def test_the_loop_answers_in_order():
    sent: list = []
    clean = run_loop(CoreOptions(), ListInbox([Submit(request("say:ab"))], [], [], [AbortRequest("r")]), sent.append)
    assert clean and isinstance(sent[0], Started)
    outputs = [o for message in sent if isinstance(message, Outputs) for o in message.outputs]
    assert "".join(o.text for o in outputs) == "ab" and outputs[-1].finish_reason == "stop"
    aborted = [message for message in sent if isinstance(message, Aborted)]
    assert aborted == [Aborted("r", False)]  # it had finished


def test_the_loop_aborts_what_it_holds_at_shutdown():
    sent: list = []
    assert run_loop(CoreOptions(), ListInbox([Submit(request("x", n=2))], []), sent.append)
    ends = {o.index: o.finish_reason for m in sent if isinstance(m, Outputs) for o in m.outputs if o.finish_reason}
    assert ends == {0: "abort", 1: "abort"}


def test_every_choice_of_an_aborted_request_gets_its_end():
    """Also where the core says nothing."""
    core = CoreOptions()()
    core.abort = lambda rid, received=None: []  # type: ignore[method-assign]
    sent: list = []
    assert run_loop(lambda: core, ListInbox([Submit(request("x", n=2))], [AbortRequest("r")]), sent.append)
    ends = [(o.index, o.finish_reason) for m in sent if isinstance(m, Outputs) for o in m.outputs if o.finish_reason]
    assert ends == [(0, "abort"), (1, "abort")] and Aborted("r", True) in sent


def test_the_loop_reports_a_failed_start():
    sent: list = []
    assert not run_loop(CoreOptions(start_error="bad"), ListInbox(), sent.append)
    assert sent == [Died("ValueError: bad")]


def test_joined_outputs_say_what_their_parts_said():
    def part(i: int, finish: str | None = None) -> Output:
        return Output("r", 0, [i], str(i), finish, "x" if finish else None, Usage(completion_tokens=i + 1),
                      [TokenLogprob(i, -1.0, [], [])])

    whole = part(0)
    for i in (1, 2):
        whole = join_outputs(whole, part(i, "stop" if i == 2 else None))
    assert (whole.token_ids, whole.text, whole.finish_reason, whole.stop_reason) == ([0, 1, 2], "012", "stop", "x")
    assert whole.usage == Usage(completion_tokens=3) and [e.token_id for e in whole.logprobs or []] == [0, 1, 2]


async def test_a_mailbox_gives_everything_before_it_fails():
    box = Mailbox("r", 1)
    box.put(Output("r", 0, [1], "a"))
    box.fail(EngineDead("gone"))
    assert [o.text for o in await box.take()] == ["a"]
    with pytest.raises(EngineDead):
        await box.take()


async def test_case_6_09_late_results_never_reach_the_next_user_of_an_id():
    sent: list = []
    router, info = Router(sent.append, 30.0), CoreOptions()().info
    first = router.generate(request("one", "x"), info)
    reading = asyncio.create_task(anext(first))
    await asyncio.sleep(0)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await first.aclose()
    second = router.generate(request("two", "x"), info)
    reading = asyncio.create_task(anext(second))
    await asyncio.sleep(0)
    old, abort, new = sent
    assert abort == AbortRequest(old.request.rid, received=0) and new.request.rid != old.request.rid
    router.deliver(Outputs([Output(old.request.rid, 0, [1], "old")]))
    router.deliver(Outputs([Output(new.request.rid, 0, [2], "new")]))
    assert (await reading).text == "new"
    await second.aclose()


async def test_a_finished_request_frees_its_id_before_its_reader_has_read():
    sent: list = []
    router, info = Router(sent.append, 30.0), CoreOptions()().info
    first = router.generate(request("one", "x"), info)
    reading = asyncio.create_task(anext(first))
    await asyncio.sleep(0)
    router.deliver(Outputs([Output(sent[0].request.rid, 0, [1], "a", "stop")]))
    second = router.generate(request("two", "x"), info)
    other = asyncio.create_task(anext(second))
    assert (await reading).text == "a"
    router.deliver(Outputs([Output(sent[1].request.rid, 0, [2], "b", "stop")]))
    assert (await other).text == "b"
    await first.aclose()
    await second.aclose()
    assert len(sent) == 2  # finished requests are not aborted


def test_folders_of_killed_servers_are_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Those of live processes, and whatever else lies in the folder for temporary files, stay."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    names = {f"stretto-{gone.pid}-ab": False, f"stretto-{os.getpid()}-cd": True, "stretto-notes": True, "other": True}
    for name in names:
        (tmp_path / name).mkdir()
    process.sweep_folders()
    assert {name: (tmp_path / name).exists() for name in names} == names
