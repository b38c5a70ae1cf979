"""Sessions over HTTP, over a real engine with a tiny random model: what a client sends, and what it may rely on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from stretto.engine.build import text_streams
from stretto.engine.core import EngineCore
from stretto.engine.messages import AbortRequest, Command, Event, Manage, Managed, Submit
from stretto.params import SamplingParams
from stretto.protocol import (
    BranchSession,
    CloseSession,
    FlushCache,
    GetSession,
    OpenSession,
    Request,
    RewindSession,
    SessionInfo,
    SessionTurn,
)
from stretto.serve.schemas import SessionOptions
from stretto.serve.sessions import HEADERS
from stretto.spec.ngram import NgramDrafter
from tests.engine.small import Oracle, make_core
from tests.serve.conftest import Api, events, make_api, make_served
from tests.serve.fakes import EOS, IM_END, IM_START, ByteTokenizer

NAME = {"served_model_names": ("fake/tiny",)}
FIRST, SECOND, THIRD = [1, 7, 3, 7, 3, 7, 3], [5, 9, 2], [4, 4, 8, 30]
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return Oracle.make(Path(tmp_path_factory.mktemp("model")), "llama")


class Talker:
    """A client that keeps its own copy of the history."""

    def __init__(self, api: Api, oracle: Oracle, core: EngineCore):
        self.api, self.oracle, self.core = api, oracle, core

    async def say(self, sid: str, prompt: list[int], n: int = 6, **session: Any) -> httpx.Response:
        more = {"session": session} if session else {}
        return await self.api.complete(prompt, max_tokens=n, session_id=sid, **more, **GREEDY)

    async def append(self, sid: str, prompt: list[int], n: int = 6, **session: Any) -> httpx.Response:
        return await self.say(sid, prompt, n, mode="append", **session)

    async def shown(self, sid: str) -> dict[str, Any]:
        return (await self.api.http.get(f"/v1/sessions/{sid}")).json()


def make(oracle: Oracle, **limits: Any) -> EngineCore:
    return make_core(oracle.model, drafter=NgramDrafter(3), text=text_streams(ByteTokenizer()), chunk=16, budget=48,
                     poison=True, eos_token_ids=frozenset({EOS, IM_END}), **limits)


@contextlib.asynccontextmanager
async def talking(oracle: Oracle, served: bool = False, **limits: Any) -> AsyncIterator[Talker]:
    core = make(oracle, **limits)
    async with (make_served if served else make_api)(lambda: core, **NAME) as api:
        yield Talker(api, oracle, core)
    core.host.audit()


@pytest.fixture
async def talk(oracle: Oracle) -> AsyncIterator[Talker]:
    async with talking(oracle) as made:
        yield made


def ids(answer: httpx.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


def cached(answer: httpx.Response) -> int:
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


# ------------------------------------------------------------------------------------------------------- tag, append
@pytest.mark.parametrize("mode", ["tag", "append"])
async def test_each_turn_computes_only_what_is_new(talk: Talker, oracle: Oracle, mode: str):
    history: list[int] = []
    for turn, new in enumerate([FIRST, SECOND, THIRD, SECOND]):
        answer = await talk.say("s", history + new if mode == "tag" else new, mode=mode)
        assert ids(answer) == oracle.answer(history + new, 6)
        assert answer.json()["usage"]["prompt_tokens"] == len(history + new)
        assert cached(answer) >= len(history) - 1 and (turn == 0 or cached(answer) > 0)
        history += new + ids(answer)
    shown = await talk.shown("s")
    assert (shown["state"], shown["tokens"], shown["turns"]) == ("idle", len(history), 4)
    assert shown["last_turn"] == "finished" and shown["cached_tokens"] >= len(history) - 1


async def test_case_8_13_history_that_differs_is_shared_up_to_there(talk: Talker, oracle: Oracle):
    prompt = list(range(20, 60))
    thought = ids(await talk.say("s", prompt, 12))
    again = prompt + thought[5:] + SECOND  # what came first of the answer is not sent back
    answer = await talk.say("s", again)
    assert ids(answer) == oracle.answer(again, 6) and cached(answer) >= len(prompt) // 16 * 16


async def test_history_cuts(talk: Talker, oracle: Oracle):
    one = ids(await talk.append("s", FIRST))
    answer = await talk.append("s", SECOND, drop_previous_output=True)
    assert ids(answer) == oracle.answer(FIRST + SECOND, 6)
    answer = await talk.append("s", THIRD, offset=5)
    assert ids(answer) == oracle.answer(FIRST[:5] + THIRD, 6)
    answer = await talk.append("s", SECOND, offset=-1)
    assert ids(answer) == oracle.answer((FIRST[:5] + THIRD + oracle.answer(FIRST[:5] + THIRD, 6))[:-1] + SECOND, 6)
    answer = await talk.append("s", SECOND, replace=True)
    assert ids(answer) == oracle.answer(SECOND, 6)
    assert code(await talk.append("s", SECOND, offset=999))[0] == 400
    assert one == oracle.answer(FIRST, 6)


async def test_branches(talk: Talker, oracle: Oracle):
    first = FIRST + ids(await talk.append("s", FIRST))
    for child, new in (("a", SECOND), ("b", THIRD)):
        answer = await talk.append(child, new, branch_from="s")
        assert ids(answer) == oracle.answer(first + new, 6) and cached(answer) >= len(first) - 2
    made = await talk.api.http.post("/v1/sessions", json={"session_id": "c", "branch_from": "s", "offset": 5})
    assert made.json()["tokens"] == 5
    assert ids(await talk.append("c", THIRD)) == oracle.answer(first[:5] + THIRD, 6)
    assert ids(await talk.append("s", THIRD)) == oracle.answer(first + THIRD, 6)
    assert (await talk.api.http.post("/v1/sessions/s/rewind", json={"offset": 4})).json()["tokens"] == 4
    assert ids(await talk.append("s", SECOND)) == oracle.answer(FIRST[:4] + SECOND, 6)


# ------------------------------------------------------------------------------------------------------ what goes wrong
async def test_case_8_01_an_over_long_turn_is_refused_and_the_session_stays(talk: Talker, oracle: Oracle):
    first = FIRST + ids(await talk.append("s", FIRST))
    assert code(await talk.append("s", [9] * 250)) == (400, "context_length_exceeded")
    assert code(await talk.append("s", [9] * 245)) == (400, "context_length_exceeded")  # with the history
    assert (await talk.shown("s"))["tokens"] == len(first)
    answer = await talk.append("s", SECOND)
    assert ids(answer) == oracle.answer(first + SECOND, 6) and cached(answer) == len(first) - 1


async def test_case_8_03_overlapping_turns_wait_or_are_told(oracle: Oracle):
    async with talking(oracle, session_queue=1) as talk:
        live = asyncio.create_task(talk.append("s", FIRST, 60))
        while not (found := (await talk.api.http.get("/v1/sessions")).json()["data"]) or found[0]["state"] == "idle":
            await asyncio.sleep(0.001)
        waits = asyncio.create_task(talk.append("s", SECOND))
        assert code(await talk.append("s", THIRD, on_busy="reject")) == (409, "session_busy")
        while (await talk.shown("s"))["waiting"] == 0:
            await asyncio.sleep(0.001)
        assert code(await talk.append("s", THIRD)) == (409, "session_busy")
        first = FIRST + ids(await live)
        assert ids(await waits) == oracle.answer(first + SECOND, 6)


async def test_case_8_03_a_busy_session_closes_when_its_turn_ends(oracle: Oracle):
    async with talking(oracle) as talk:
        live = asyncio.create_task(talk.append("s", FIRST, 60))
        while not (await talk.api.http.get("/v1/sessions")).json()["data"]:
            await asyncio.sleep(0.001)
        answer = await talk.api.http.delete("/v1/sessions/s")
        assert answer.status_code == 200 and answer.json()["deleted"] is False
        assert code(await talk.append("s", SECOND)) == (409, "session_closing")
        assert len(ids(await live)) == 60
        assert code(await talk.api.http.get("/v1/sessions/s")) == (404, "session_not_found")


async def test_case_8_03_a_closing_session_can_be_aborted(oracle: Oracle):
    async with talking(oracle) as talk:
        live = asyncio.create_task(talk.append("s", FIRST, 60))
        while not (await talk.api.http.get("/v1/sessions")).json()["data"]:
            await asyncio.sleep(0.001)
        waits = asyncio.create_task(talk.append("s", SECOND, on_busy="wait"))
        while (await talk.shown("s"))["waiting"] == 0:
            await asyncio.sleep(0.001)
        assert (await talk.api.http.delete("/v1/sessions/s")).json()["deleted"] is False
        answer = await talk.api.http.delete("/v1/sessions/s?abort=true")
        assert answer.status_code == 200 and answer.json()["deleted"] is True
        async with asyncio.timeout(10):
            assert [code(await turn) for turn in (live, waits)] == [(499, "request_aborted")] * 2
        assert code(await talk.api.http.get("/v1/sessions/s")) == (404, "session_not_found")


async def test_case_8_03_idle_sessions_give_way(oracle: Oracle):
    """Their pages fill the pool; an ordinary request takes what it needs, and they go on from their ids."""
    async with talking(oracle, pool_tokens=256) as talk:
        prompts = [[20 + i] * 10 + list(range(1, 31)) for i in range(6)]
        history = [p + ids(await talk.append(f"s{i}", p)) for i, p in enumerate(prompts)]
        plain = await talk.api.complete([9, 8] * 80, max_tokens=20, **GREEDY)
        assert ids(plain) == oracle.answer([9, 8] * 80, 20)
        for i, past in enumerate(history):
            assert ids(await talk.append(f"s{i}", SECOND)) == oracle.answer(past + SECOND, 6)
        counters = (await talk.api.engine.stats()).counters
        assert counters["reclaimed"] and counters["recomputed_tokens"]


@pytest.mark.parametrize("page", [1, 16])
async def test_case_8_05_a_session_ends_where_its_text_ends(oracle: Oracle, page: int):
    async with talking(oracle, page_size=page) as talk:
        for n in (*range(1, 6), 15, 16, 17):
            first = FIRST * 2 + ids(await talk.append(f"s{n}", FIRST * 2, n))
            assert (await talk.shown(f"s{n}"))["tokens"] == len(first) == 14 + n
            answer = await talk.append(f"s{n}", SECOND)
            assert ids(answer) == oracle.answer(first + SECOND, 6) and cached(answer) == len(first) - 1


async def test_case_8_07_each_page_counts_once_while_turns_run(oracle: Oracle):
    async with talking(oracle, pool_tokens=512) as talk:
        async def watch() -> None:
            while True:
                gauges = (await talk.api.engine.stats()).gauges
                parts = gauges["pages_free_0"] + gauges["pages_evictable_0"] + gauges["pages_used_0"]
                assert parts == gauges["pages_total_0"]
                await asyncio.sleep(0)
        watcher = asyncio.create_task(watch())
        for _ in range(2):
            await asyncio.gather(*(talk.append(f"s{i}", FIRST * 3, 20) for i in range(5)))
        assert not watcher.done()
        watcher.cancel()


@pytest.mark.parametrize("on_disconnect", ["rollback", "keep"])
async def test_a_client_that_leaves(oracle: Oracle, on_disconnect: str):
    async with talking(oracle, served=True) as talk:
        first = FIRST + ids(await talk.append("s", FIRST))
        got: list[int] = []
        body = {"prompt": SECOND, "max_tokens": 200, "stream": True, "session_id": "s", **GREEDY,
                "session": {"mode": "append", "on_disconnect": on_disconnect}}
        async with talk.api.http.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    got += events(line + "\n\n")[0]["choices"][0].get("token_ids", [])
                if len(got) >= 8:
                    break
        await talk.api.until_idle(10.0)
        shown = await talk.shown("s")
        history = list(talk.core.host.sessions.get("s").tokens)
        if on_disconnect == "rollback":
            assert (shown["last_turn"], shown["tokens"]) == ("rolled_back", len(first))
        else:
            kept = first + SECOND + got
            assert shown["last_turn"] == "kept" and history[: len(kept)] == kept  # what was sent, read or not
        answer = await talk.append("s", THIRD)
        assert ids(answer) == oracle.answer(history + THIRD, 6) and cached(answer) >= len(history) - 2


async def test_refusals(talk: Talker):
    complete = talk.api.complete
    assert code(await complete(FIRST, session_id="s", n=2))[0] == 400
    assert code(await complete([FIRST, SECOND], session_id="s"))[0] == 400
    assert code(await complete(FIRST, session_id=""))[0] == 400
    assert code(await complete(FIRST, session={"mode": "append"}))[0] == 400  # of no session
    assert code(await complete(FIRST, session_id="s", session={"offset": 3}))[0] == 400  # in mode tag
    assert code(await complete(FIRST, session_id="s", session={"create": False})) == (404, "session_not_found")
    assert (await talk.api.http.get("/v1/sessions")).json()["data"] == []  # nothing was opened
    assert ids(await talk.append("s", FIRST))
    assert code(await talk.append("s", FIRST, after="nobody")) == (404, "session_turn_not_found")
    assert (await complete(FIRST, session_id="s", cache_salt="x")).status_code == 400
    assert code(await talk.api.http.post("/v1/sessions", json={"session_id": "s"})) == (409, "session_exists")


def field(answer: httpx.Response) -> tuple[int, str, str]:
    error = answer.json()["error"]
    return answer.status_code, error["param"], error["message"]


async def test_a_refused_turn_names_the_field_of_the_request(talk: Talker):
    history = len(FIRST + ids(await talk.append("s", FIRST)))
    status, param, message = field(await talk.append("s", SECOND, offset=99))
    assert (status, param) == (400, "session.offset") and message.startswith("session.offset is 99")
    assert str(history) in message
    sglang = await talk.api.http.post("/generate", json={"input_ids": SECOND, "session_params": {
        "id": "s", "offset": 99}})
    assert field(sglang)[:2] == (400, "session_params.offset")
    made = await talk.api.http.post("/v1/sessions", json={"session_id": "empty"})
    assert made.status_code == 200
    assert field(await talk.append("child", SECOND, branch_from="empty"))[:2] == (400, "session.branch_from")
    for body, param in (({"branch_from": "s", "offset": 99}, "offset"), ({"branch_from": "empty"}, "branch_from")):
        assert field(await talk.api.http.post("/v1/sessions", json=body))[:2] == (400, param)
    status, param, message = field(await talk.api.http.post("/v1/sessions/s/rewind", json={"offset": 99}))
    assert (status, param) == (400, "offset") and str(history) in message and "live turn" not in message


async def test_a_turn_that_is_refused_after_it_has_waited_names_the_field(talk: Talker):
    """And a busy session says that it is busy, whatever the offset."""
    live = asyncio.create_task(talk.append("s", FIRST, 100))
    while not (found := (await talk.api.http.get("/v1/sessions")).json()["data"]) or found[0]["state"] == "idle":
        await asyncio.sleep(0.001)
    waits = [asyncio.create_task(talk.append("s", [9] * 200)),
             asyncio.create_task(talk.append("s", SECOND, offset=9999)),
             asyncio.create_task(talk.api.chat("x" * 150, session_id="s", session={"mode": "append"}))]
    while (await talk.shown("s"))["waiting"] < 3:
        await asyncio.sleep(0.001)
    for offset in (1, 9999):
        answer = await talk.api.http.post("/v1/sessions/s/rewind", json={"offset": offset})
        assert code(answer) == (409, "session_busy") and "live turn" in field(answer)[2]
        assert "0.." not in field(answer)[2]
    branch = await talk.api.http.post("/v1/sessions", json={"branch_from": "s"})
    assert code(branch) == (409, "session_busy")
    assert len(ids(await live)) == 100
    long, cut, chat = [field(await one)[:2] for one in waits]
    assert (long, cut, chat) == ((400, "prompt"), (400, "session.offset"), (400, "messages"))


@pytest.mark.parametrize("path, name", [("/v1/sessions", "ttl"), ("/open_session", "timeout")])
async def test_a_session_has_time(talk: Talker, path: str, name: str):
    for value in (0, 0.0, -1):
        status, param, message = field(await talk.api.http.post(path, json={"session_id": "s0", name: value}))
        assert (status, param) == (400, name) and f"{name}: must be above 0" in message
    made = await talk.api.http.post(path, json={"session_id": "s0", name: 1e-9})  # gone before the answer is read
    assert made.status_code == 200 and (await talk.api.http.get("/v1/sessions/s0")).status_code == 404


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("bos", [False, True])
async def test_an_appended_turn_echoes_every_new_token(talk: Talker, stream: bool, bos: bool):
    """Of its first one, whose logits were computed in the turn before, there is no log-probability."""
    async def turn(prompt: str) -> dict[str, Any]:
        answer = await talk.api.complete(prompt, max_tokens=3, temperature=0, ignore_eos=True, echo=True, logprobs=1,
                                         prompt_logprobs=1, session_id="s", session={"mode": "append"},
                                         add_special_tokens=bos, stream=stream)
        assert answer.status_code == 200, answer.text
        if not stream:
            return answer.json()["choices"][0]
        chunks = [chunk["choices"][0] for chunk in events(answer.text)[:-1]]
        merged = {"text": "".join(chunk["text"] for chunk in chunks), "prompt_logprobs": chunks[0]["prompt_logprobs"]}
        lists = [chunk["logprobs"] for chunk in chunks if chunk["logprobs"]]
        return merged | {"logprobs": {name: [x for one in lists for x in one[name]] for name in lists[0]}}

    for at, prompt in enumerate(("abc def", " ghi jkl", "x")):
        choice = await turn(prompt)
        lists, head = choice["logprobs"], (["<s>"] if bos and at == 0 else [])
        assert lists["tokens"][:-3] == [*head, *prompt] and choice["text"].startswith(prompt)
        assert lists["text_offset"][: len(head) + len(prompt)] == [0] * len(head) + list(range(len(prompt)))
        assert lists["token_logprobs"][0] is None and lists["top_logprobs"][0] is None
        assert None not in lists["token_logprobs"][1:]
        assert {len(values) for values in lists.values()} == {len(head) + len(prompt) + 3}
        assert len(choice["prompt_logprobs"]) == len(head) + len(prompt) and choice["prompt_logprobs"][0] is None


@pytest.mark.parametrize("messages", [1, 2])
async def test_other_apis_score_every_new_token(talk: Talker, messages: int):
    for at in range(2):
        answer = await talk.api.http.post("/generate", json={
            "input_ids": SECOND[:messages], "session_params": {"id": "g"}, "return_logprob": True,
            "logprob_start_len": 0, "sampling_params": {"max_new_tokens": 2}} if at else {
            "input_ids": FIRST, "session_id": "g", "sampling_params": {"max_new_tokens": 2}})
    scores = answer.json()["meta_info"]["input_token_logprobs"]
    assert [token for _, token, _ in scores] == SECOND[:messages]
    assert [value is None for value, _, _ in scores] == [True] + [False] * (messages - 1)
    for _ in range(2):
        chat = await talk.api.chat("hi", session_id="c", session={"mode": "append"}, prompt_logprobs=0, max_tokens=2)
        found = chat.json()["prompt_logprobs"]
        assert found[0] is None and None not in found[1:]


async def test_capacity_and_expiry(oracle: Oracle):
    now = [0.0]
    async with talking(oracle, max_sessions=2, session_ttl=50.0, clock=lambda: now[0]) as talk:
        made = await talk.api.http.post("/v1/sessions", json={"session_id": "small", "capacity": 12, "ttl": 500})
        assert made.json()["capacity"] == 12
        assert len(ids(await talk.append("small", FIRST, 50))) == 5  # up to the capacity
        assert code(await talk.append("small", SECOND)) == (400, "context_length_exceeded")
        assert ids(await talk.append("s", FIRST))
        assert code(await talk.append("third", FIRST)) == (429, "too_many_sessions")  # nobody else has their history
        now[0] = 51.0
        assert code(await talk.append("s", SECOND)) == (404, "session_not_found")  # not silently begun anew
        assert ids(await talk.say("s", FIRST)) and ids(await talk.append("s", SECOND, replace=True))
        assert (await talk.shown("small"))["idle_seconds"] == 51.0


async def test_what_is_appended_never_begins_anew_unknowingly(oracle: Oracle):
    """Nor where the turns before were in mode tag, and the session expired or made room for another."""
    now = [0.0]
    async with talking(oracle, max_sessions=1, session_ttl=50.0, clock=lambda: now[0]) as talk:
        assert ids(await talk.say("s", FIRST))
        now[0] = 51.0
        assert code(await talk.append("s", SECOND)) == (404, "session_not_found")
        assert ids(await talk.say("s", FIRST)) and ids(await talk.say("other", FIRST))
        assert code(await talk.append("s", SECOND)) == (404, "session_not_found")
        assert ids(await talk.say("s", FIRST)) and ids(await talk.append("s", SECOND))
        await talk.api.http.delete("/v1/sessions/s")
        assert ids(await talk.append("s", SECOND)) == oracle.answer(SECOND, 6)  # its client closed it: that is new


# ------------------------------------------------------------------------------------------------------------ chat
async def test_chat_turns_are_appended_as_the_template_writes_them(talk: Talker):
    """The same ids as if all messages were sent, whether or not the answers end with an end-of-sequence id."""
    tokenizer, core = ByteTokenizer(), talk.core
    messages: list[dict[str, str]] = []
    for text in ("hello", "and then?", "why"):
        new = [{"role": "user", "content": text}]
        body = {"model": "fake/tiny", "messages": new, "max_tokens": 5, "session_id": "c", "temperature": 0,
                "session": {"mode": "append"}, "return_token_ids": True}
        history = list(core.host.sessions.get("c").tokens) if messages else []
        answer = (await talk.api.http.post("/v1/chat/completions", json=body)).json()
        more = tokenizer.apply_chat_template(new)
        if history:
            closing = [10] if history[-1] == IM_END else [IM_END, 10]
            assert core.host.sessions.get("c").tokens[: len(history)] == history
            more = [*closing, *more]
        assert core.host.sessions.get("c").tokens == history + more + answer["choices"][0]["token_ids"]
        assert more[-11:] == [IM_START, *b"assistant\n"]
        messages += [*new, {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}]


# ------------------------------------------------------------------------------------------------- hints, the end
@pytest.mark.parametrize("header", ["X-Session-Id", "X-SMG-Routing-Key", "X-Dynamo-Session-ID", "X-Session-Affinity",
                                    "X-Correlation-ID", "session_id", "x-opencode-session"])
async def test_headers_name_sessions(talk: Talker, oracle: Oracle, header: str):
    async def call(prompt: list[int], **headers: str) -> httpx.Response:
        return await talk.api.http.post("/v1/completions", headers={header: "h", **headers}, json={
            "model": "fake/tiny", "prompt": prompt, "max_tokens": 6, **GREEDY})
    history = FIRST + ids(await call(FIRST))
    answer = await call(history + SECOND)
    assert ids(answer) == oracle.answer(history + SECOND, 6) and cached(answer) == len(history) - 1
    both = await asyncio.gather(*(call(history + new) for new in (SECOND, THIRD)))  # beside each other
    assert [ids(one) for one in both] == [oracle.answer(history + new, 6) for new in (SECOND, THIRD)]
    assert (await talk.shown("h"))["turns"] >= 3
    assert ids(await call(history, **{"X-Dynamo-Session-Final": "true"}))
    assert (await talk.api.http.get("/v1/sessions")).json()["data"] == []


async def test_hazard_10_every_way_to_name_a_session_names_the_same_one(talk: Talker, oracle: Oracle):
    """SGLang has two features under one word, which exclude each other."""
    history = FIRST + ids(await talk.append("s", FIRST))
    answer = await Sglang(talk.api).generate(SECOND, id="s")
    second = answer.json()["output_ids"]
    assert second == oracle.answer(history + SECOND, 6)
    assert answer.json()["meta_info"]["prompt_tokens"] == len(history + SECOND)
    history += SECOND + second
    answer = await talk.api.http.post("/v1/completions", headers={"X-Session-Id": "s"}, json={
        "model": "fake/tiny", "prompt": history + THIRD, "max_tokens": 6, **GREEDY})
    assert ids(answer) == oracle.answer(history + THIRD, 6) and cached(answer) >= len(history) - 1
    assert (await talk.shown("s"))["turns"] == 3 and len((await talk.api.http.get("/v1/sessions")).json()["data"]) == 1


async def test_bodies_of_agents_name_sessions(talk: Talker):
    user = "user_abc_account__session_0d1b4a5c-1111-2222-3333-444455556666"
    assert ids(await talk.api.complete(FIRST, metadata={"user_id": user}, max_tokens=2, **GREEDY))
    assert ids(await talk.api.complete(SECOND, prompt_cache_key="key", max_tokens=2, **GREEDY))
    found = (await talk.api.http.get("/v1/sessions")).json()["data"]
    assert [one["id"] for one in found] == ["key", user.rpartition("_session_")[2]]
    newer = {"device_id": "d", "account_uuid": "", "session_id": "1d1b4a5c-1111-2222-3333-444455556666"}
    for text in (json.dumps(newer), "{", "{" + "[" * 900, '{"session_id": 5}'):
        assert ids(await talk.api.complete(THIRD, metadata={"user_id": text}, max_tokens=2, **GREEDY))
    found = (await talk.api.http.get("/v1/sessions")).json()["data"]
    assert found[0]["id"] == newer["session_id"] and len(found) == 3


@pytest.mark.parametrize("sid", [".", "..", "", "ä", "x" * 257])
async def test_ids_that_no_path_can_name_are_refused(talk: Talker, sid: str):
    for path, body in (("/v1/sessions", {}), ("/open_session", {}), ("/v1/completions", {"prompt": "x"})):
        if sid or path != "/open_session":  # there an empty one asks for one
            answer = await talk.api.http.post(path, json=body | {"session_id": sid})
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "session_id", answer.text


async def test_the_last_call_closes(talk: Talker):
    assert ids(await talk.append("s", FIRST))
    assert ids(await talk.api.complete(SECOND, session_id="s", session={"mode": "append"}, session_final=True,
                                       **GREEDY))
    assert (await talk.api.http.get("/v1/sessions")).json() == {"object": "list", "data": []}
    assert (await talk.api.engine.stats()).gauges["pages_used_0"] == 0


# ---------------------------------------------------------------------------------------------------------- SGLang's
class Sglang:
    """What its clients send."""

    def __init__(self, api: Api):
        self.http = api.http

    async def open(self, **fields: Any) -> httpx.Response:
        return await self.http.post("/open_session", json={"capacity_of_str_len": 1000, **fields})

    async def generate(self, prompt: list[int], **params: Any) -> httpx.Response:
        return await self.http.post("/generate", json={
            "input_ids": prompt, "session_params": params,
            "sampling_params": {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}})


async def test_sglangs_clients(talk: Talker, oracle: Oracle):
    client = Sglang(talk.api)
    sid = (await client.open()).json()
    rids, history, rid = [], [], None
    for new in (FIRST, SECOND, THIRD):
        answer = (await client.generate(new, id=sid, rid=rid, offset=0, replace=True)).json()
        assert answer["output_ids"] == oracle.answer(history + new, 6)
        assert answer["meta_info"]["prompt_tokens"] == len(history + new)
        history += new + answer["output_ids"]
        rid = answer["meta_info"]["id"]
        rids.append(rid)
    first = FIRST + oracle.answer(FIRST, 6)
    for new in (THIRD, SECOND):  # two branches from the first turn
        answer = (await client.generate(new, id=sid, rid=rids[0], offset=0, replace=False)).json()
        assert answer["output_ids"] == oracle.answer(first + new, 6)
    answer = await client.generate(THIRD, id=sid, rid=rids[0], offset=0, replace=True)  # forgets what followed
    assert answer.json()["output_ids"] == oracle.answer(first + THIRD, 6)
    assert code(await client.generate(THIRD, id=sid, rid=rids[2])) == (404, "session_turn_not_found")
    assert (await talk.api.http.post("/close_session", json={"session_id": sid})).status_code == 200
    assert code(await client.generate(THIRD, id=sid)) == (404, "session_not_found")


async def test_sglangs_streaming_sessions(talk: Talker, oracle: Oracle):
    client = Sglang(talk.api)
    assert (await client.open(session_id="x", streaming=True, timeout=60)).json() == "x"
    assert code(await client.open(session_id="x")) == (409, "session_exists")
    history: list[int] = []
    for new in (FIRST, SECOND):
        answer = (await client.generate(new, id="x")).json()
        assert answer["output_ids"] == oracle.answer(history + new, 6)
        assert answer["meta_info"]["cached_tokens"] >= len(history) - 1
        history += new + answer["output_ids"]


# ------------------------------------------------------------------------------------------------------------- the page
PAGE = Path(__file__).resolve().parents[2] / "docs" / "sessions.md"


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
async def test_the_examples_of_the_page_work(oracle: Oracle):
    blocks = re.findall(r"```bash\n(.*?)```", PAGE.read_text(), re.S)
    assert len(blocks) == 4
    async with talking(oracle, served=True) as talk:
        for block in blocks:
            script = "set -e\n" + block.replace("localhost:8000", talk.api.url).replace("curl -s", "curl -sS -f")
            made = await asyncio.create_subprocess_exec("bash", "-c", script, stdout=subprocess.PIPE,
                                                        stderr=subprocess.PIPE)
            out, err = await made.communicate()
            assert made.returncode == 0, (block, out, err)
        found = (await talk.api.http.get("/v1/sessions")).json()["data"]
        assert {one["id"]: one["turns"] for one in found} == {"agent-7": 1, "agent-8": 2, "other-plan": 0}


def test_the_page_names_every_option():
    text = PAGE.read_text()
    for name in (*SessionOptions.model_fields, *SessionInfo.__struct_fields__[1:6], *HEADERS):
        assert name in text.lower(), name


def test_everything_about_sessions_travels_between_processes():
    turn = SessionTurn(sid="s", mode="append", continuation=[1], on_busy="beside", offset=-1)
    info = SessionInfo(id="a", state="idle", tokens=1, cached_tokens=1, turns=1, waiting=0, last_turn="none",
                       idle_seconds=0.0, ttl=1.0, capacity=None)
    commands = [Submit(Request(rid="r", tokens=[1], sampling=SamplingParams(), session=turn)), AbortRequest("r", 3)]
    commands += [Manage(i, action) for i, action in enumerate((
        OpenSession(sid="x", ttl=3.0), CloseSession("x", True), GetSession(), BranchSession("x", "y"),
        RewindSession("x", 1), FlushCache()))]
    for command in commands:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(command), type=Command) == command
    for event in (Managed(1, [info]), Managed(1, [], "why", "param", "code")):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(event), type=Event) == event
