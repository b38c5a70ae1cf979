"""Load: many streams at once, thousands of requests with clients that leave, slow readers, large and deep bodies."""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections import Counter
from dataclasses import dataclass

import httpx
import psutil
import pytest

from stretto.engine.build import text_streams
from stretto.engine.core import EngineCore
from stretto.model.scripted import ScriptedModel
from stretto.spec.ngram import NgramDrafter
from tests.engine.small import make_core
from tests.serve.conftest import Api, events, make_served
from tests.serve.fakes import EOS, VOCAB, ByteTokenizer, CoreOptions
from tests.serve.stream_cost import measure, read_streams, scripted
from tests.serve.test_disconnect import generated, raw_post, read_all, until
from tests.serve.test_server import program

CUE = "*"  # the character of a prompt that starts the script
SCRIPT = "written down, and down again"
BEHIND_CUE = len(ByteTokenizer().apply_chat_template([{"role": "user", "content": CUE}])) - len("<user\n*")
STEPS_KEPT = 8  # results of the last steps, which may hold a row or none
MOST_MICROSECONDS = 60.0  # of the server's processor time a streamed token


def real_core() -> EngineCore:
    """The whole engine over the product's scripted model, with drafts: its slots, pages and prefix tree are real."""
    model = ScriptedModel(VOCAB, {ord(CUE): SCRIPT.encode()}, EOS)
    return make_core(model, drafter=NgramDrafter(3), text=text_streams(ByteTokenizer()), slots=33, pool_tokens=4096,
                     chunk=64, budget=256, eos_token_ids=frozenset([EOS]))


# ------------------------------------------------------------------------------------------------------------- leaks
class Clients:
    """Requests of many kinds; a tenth of them are left by their client at some moment."""

    def __init__(self, api: Api, seed: int):
        self.api, self.chance, self.seen = api, random.Random(seed), Counter[str]()

    async def run(self, count: int, at_once: int) -> None:
        left = iter(range(count))

        async def one_client() -> None:
            for number in left:
                await self.one(number)

        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(one_client())

    async def one(self, number: int) -> None:
        kinds = (self.whole, self.stream, self.choices, self.session, self.chat)
        kind = kinds[number % len(kinds)]
        call = asyncio.create_task(kind(number))
        if self.chance.random() < 0.1:
            await asyncio.sleep(self.chance.choice([0.0, 0.002, 0.01, 0.03]))
            self.seen["left"] += call.cancel()
            await asyncio.gather(call, return_exceptions=True)
        else:
            await call
            self.seen[kind.__name__] += 1

    async def whole(self, number: int, **fields: object) -> httpx.Response:
        answer = await self.api.complete(f"{number % 40} words before {CUE}", model=None, max_tokens=99, temperature=0,
                                         **fields)
        assert answer.status_code == 200, answer.text
        if not fields.get("stream"):
            assert {choice["text"] for choice in answer.json()["choices"]} == {SCRIPT}
        return answer

    async def stream(self, number: int) -> None:
        answer = await self.whole(number, stream=True)
        assert "".join(chunk["choices"][0]["text"] for chunk in events(answer.text)[:-1]) == SCRIPT

    async def choices(self, number: int) -> None:
        await self.whole(number, n=2)

    async def session(self, number: int) -> None:
        await self.whole(number, session_id=f"s{number}")
        assert (await self.api.http.delete(f"/v1/sessions/s{number}")).status_code == 200

    async def chat(self, number: int) -> None:
        answer = await self.api.chat(f"{number % 40} words {CUE}", model=None, max_tokens=99, temperature=0)
        assert answer.json()["choices"][0]["message"]["content"] == SCRIPT[BEHIND_CUE:], answer.text


@dataclass
class Holdings:
    """What a request could leave behind. Files, tasks and objects are the whole process's: what an earlier test has
    left may go in between. `engine`: readers, calls, slots, pages, sessions."""

    files: int
    tasks: int
    objects: Counter[str]
    engine: dict[str, float]


async def holdings(api: Api) -> Holdings:
    """Once nothing runs."""
    for session in (await api.http.get("/v1/sessions")).json()["data"]:
        await api.http.delete(f"/v1/sessions/{session['id']}")
    await api.until_idle(20.0)
    await api.complete(f"alone {CUE}", model=None, max_tokens=99)  # the last steps are kept: of one row each
    await api.until_idle(20.0)
    await api.http.post("/flush_cache")
    await until(lambda: no_connections(api))
    gauges = await api.gauges()
    gc.collect()
    kinds = (type(each) for each in gc.get_objects())
    objects = Counter(kind.__qualname__ for kind in kinds if str(kind.__module__).startswith("stretto."))
    kept = {name: gauges[name] for name in ("running", "waiting", "sessions", "pages_used_0", "pages_evictable_0")}
    return Holdings(psutil.Process().num_fds(), len(asyncio.all_tasks()), objects,
                    {"readers": api.engine._router.live, "calls": api.service.live_calls, **kept})


async def no_connections(api: Api) -> bool:
    """Those of clients that have left are closed; the pool's own may stay open."""
    await asyncio.sleep(0.05)
    return sum(c.status == psutil.CONN_CLOSE_WAIT for c in psutil.Process().net_connections("tcp")) == 0


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=[pytest.mark.full, pytest.mark.timeout(900)])])
async def test_clients_that_leave_leave_nothing_behind(count: int):
    core = real_core()
    async with make_served(lambda: core, served_model_names=("tiny",)) as api:
        await Clients(api, seed=1).run(40, at_once=20)  # caches that only fill once
        await api.http.aclose()
        before = await fresh(api)
        clients = Clients(api, seed=2)
        await clients.run(count, at_once=40)
        await api.http.aclose()
        after = await fresh(api)
        grown = after.objects - before.objects
        assert after.engine == before.engine and after.files <= before.files and after.tasks <= before.tasks
        assert max(grown.values(), default=0) <= STEPS_KEPT, grown
    core.host.audit()
    assert clients.seen["left"] > count / 20 and min(clients.seen.values()) > count / 20, clients.seen


async def fresh(api: Api) -> Holdings:
    """The holdings, seen through a client without open connections."""
    api.http = httpx.AsyncClient(base_url=api.url, timeout=30, trust_env=False)
    return await holdings(api)


# ----------------------------------------------------------------------------------------------------------- streams
async def test_500_streams_at_once():
    async with make_served(CoreOptions(**scripted(500, 0.01))) as api:
        port = int(api.url.rpartition(":")[2])
        assert await read_streams(port, 500, 8) >= 500 * 3  # the role, a token and the end; others may have been joined
        await api.until_idle()
        assert api.service.metrics.finished == {"length": 500}
        await api.alive()


@pytest.mark.full
def test_a_streamed_token_costs_little():
    """The least of three: what else the machine does can only add."""
    with program(scripted(500, 0.15)) as server:
        server.until("/readyz", 200)
        costs = [measure(server, 500, 60) for _ in range(3)]
    assert min(cost.server for cost in costs) < MOST_MICROSECONDS, costs
    assert all(cost.events > 0.9 * cost.tokens for cost in costs), "tokens were joined into fewer events"


async def test_fifty_slow_readers_block_nobody():
    async with make_served(CoreOptions(block=8, max_num_seqs=60, max_model_len=200_000)) as api:
        body = {"prompt": "slow", "stream": True, "max_tokens": 2_000, "ignore_eos": True}
        slow = [raw_post(api.url, body) for _ in range(50)]
        await until(lambda: generated(api, 10_000), 20)
        started = time.monotonic()
        await asyncio.wait_for(api.alive(), 5)
        assert time.monotonic() - started < 3
        await until(lambda: idle(api), 30)
        texts = [await asyncio.to_thread(read_all, each) for each in slow]
        whole = (await api.complete("slow", max_tokens=2_000, ignore_eos=True)).json()["choices"][0]["text"]
        for text in texts:
            assert "".join(e["choices"][0]["text"] for e in events(text)[:-1]) == whole


async def idle(api: Api) -> bool:
    """The engine has nothing to do, whoever still reads."""
    return (await api.gauges())["running"] == 0


# ------------------------------------------------------------------------------------------------------------ bodies
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages",
                                  "/generate", "/tokenize", "/v1/sessions"])
async def test_large_and_deep_bodies_are_refused_at_once(served: Api, path: str):
    """10 MB of text is longer than any context; a thousand brackets are deeper than any request."""
    text = "x" * 10_000_000
    started = time.monotonic()
    for body in (f'{{"prompt": "{text}", "input": "{text}", "text": "{text}", "model": "fake/tiny", "max_tokens": 5,'
                 f' "messages": [{{"role": "user", "content": "{text}"}}], "session_id": "{text}"}}',
                 '{"prompt": ' + "[" * 1000 + "]" * 1000 + "}", "[" * 100_000, '{"a":' * 1000 + "1" + "}" * 1000):
        answer = await served.http.post(path, content=body.encode(), headers={"content-type": "application/json"})
        assert 400 <= answer.status_code < 500 or (path == "/tokenize" and answer.status_code == 200), answer.text[:300]
        assert len(answer.content) < 20_000 or path == "/tokenize"
    assert time.monotonic() - started < 20
    await served.alive()
