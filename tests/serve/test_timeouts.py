"""The time that a call may take: its own, the server's, the smaller of both; what it held is free afterwards."""

from __future__ import annotations

import asyncio

import pytest

from tests.serve.conftest import Api, events, make_api
from tests.serve.fakes import CoreOptions

SLOW = CoreOptions(step_seconds=0.02, max_model_len=100_000, max_num_seqs=2)
LONG = {"max_tokens": 50_000}


async def over(api: Api, cause: str = "request_timeout") -> None:
    """Nothing is left of it, and the server answers."""
    await api.until_idle()
    assert f'stretto_request_aborts_total{{cause="{cause}",engine="0",model_name="fake/tiny"}} 1.0' in (
        await api.http.get("/metrics")).text
    await api.alive()


@pytest.mark.parametrize("whose", ["client", "server", "both"])
async def test_a_call_takes_no_longer_than_it_may(whose: str):
    server = {"client": None, "server": 0.3, "both": 0.3}[whose]
    client = {"client": {"timeout": 0.3}, "server": {}, "both": {"timeout": 60}}[whose]
    async with make_api(SLOW, request_timeout=server) as api:
        async with asyncio.timeout(5):
            answer = await api.chat("x", **LONG, **client)
        error = answer.json()["error"]
        assert answer.status_code == 408 and error["code"] == "request_timeout" and error["type"] == "timeout_error"
        assert "after 0.3 s" in error["message"]
        await over(api)


async def test_a_stream_ends_with_the_error():
    async with make_api(SLOW) as api:
        *chunks, last = events((await api.chat("x", stream=True, timeout=0.3, **LONG)).text)
        assert len(chunks) > 3 and last["error"]["code"] == "request_timeout"
        await over(api)


async def test_waiting_counts():
    async with make_api(SLOW) as api:
        running = [asyncio.create_task(api.complete("x", **LONG)) for _ in range(2)]
        async with asyncio.timeout(5):
            while (await api.gauges())["running"] < 2:
                await asyncio.sleep(0.01)
        waiting = await api.complete(["a", "b"], timeout=0.2)
        assert waiting.status_code == 408
        assert (await api.gauges())["waiting"] == 0
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def test_answers_in_time_are_whole():
    async with make_api(CoreOptions(), request_timeout=30) as api:
        both = await asyncio.gather(api.complete(["say:one", "say:two"], timeout=20),
                                    api.chat("say:three", stream=True))
        assert [choice["text"] for choice in both[0].json()["choices"]] == ["one", "two"]
        assert events(both[1].text)[-1] == "[DONE]"


@pytest.mark.parametrize("path, body", [
    ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 90_000}),
    ("/v1/responses", {"input": "x"}), ("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 90_000}})])
async def test_every_api_takes_it(path: str, body: dict):
    async with make_api(SLOW) as api:
        answer = await api.http.post(path, json=body | {"timeout": 0.2})
        assert answer.status_code == 408 and "timeout" in str(answer.json()["error"]["type"])
        await over(api)


@pytest.mark.parametrize("timeout", [0, -1, "3", True])
async def test_odd_times_are_refused(api: Api, timeout: object):
    answer = await api.chat(timeout=timeout)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "timeout"
