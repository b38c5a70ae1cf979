"""A client that goes away frees everything, at once, wherever its request is; slow readers hold up nobody."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time

import pytest

from tests.serve.conftest import Api, events, make_api, make_served
from tests.serve.fakes import ByteTokenizer, CoreOptions

ENDLESS = {"max_tokens": 100_000, "ignore_eos": True}
SLOW = CoreOptions(step_seconds=0.005, max_model_len=200_000)


def raw_post(url: str, body: dict) -> socket.socket:
    """Sends a request over a socket of its own, and reads nothing."""
    host, port = url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect((host, int(port)))
    sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                 b"Content-Length: %d\r\n\r\n" % len(data) + data)
    return sock


async def until(condition, seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not await condition():
            await asyncio.sleep(0.01)


async def assert_freed(api: Api) -> None:
    """Nothing runs within two seconds, and no token is generated after that."""
    await api.until_idle(2.0)
    tokens = (await api.engine.stats()).counters["generated_tokens"]
    await asyncio.sleep(0.1)
    assert (await api.engine.stats()).counters["generated_tokens"] == tokens
    await api.alive()


@pytest.mark.parametrize("stream, n, prompts", [(True, 1, 1), (False, 1, 1), (True, 3, 2), (False, 3, 2)])
async def test_case_6_03_a_closed_socket_ends_the_request(stream: bool, n: int, prompts: int):
    async with make_served(SLOW) as api:
        sock = raw_post(api.url, {"prompt": ["x"] * prompts, "stream": stream, "n": n, **ENDLESS})
        await until(lambda: running(api, n * prompts))
        sock.close()
        await assert_freed(api)
        assert api.service.metrics.aborts["client_disconnected"] == 1


@pytest.mark.parametrize("start", [b"", b"{", b"x" * 100_000], ids=["nothing", "some", "much"])
async def test_a_client_that_hangs_up_inside_its_body_is_no_error(caplog, start: bytes):
    async with make_served() as api:
        host, port = api.url.removeprefix("http://").split(":")
        with caplog.at_level(logging.DEBUG, "stretto"):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 999999\r\n\r\n" + start)
            await writer.drain()
            await asyncio.sleep(0.05)
            writer.close()
            await until(lambda: answered(api, 499))
            await asyncio.sleep(0.05)
        assert not [record for record in caplog.records if record.levelno > logging.INFO or record.exc_info]
        assert [record.getMessage() for record in caplog.records if record.name == "stretto.serve.errors"] == [
            "POST /v1/completions: the client went away inside its body"]
        await api.alive()


@pytest.mark.parametrize("start", [b"", b'{"prompt": "x"'], ids=["nothing", "some"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/start_profile"])
async def test_a_body_that_stalls_gets_its_answer_and_its_connection_closed(path: str, start: bytes):
    async with make_served(body_timeout=0.3) as api:
        host, port = api.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n" % path.encode() + start)
        async with asyncio.timeout(10):
            told = (await reader.read()).decode()  # to the end of the connection
        writer.close()
        assert told.startswith("HTTP/1.1 408 ") and '"body_timeout"' in told and "0.3 s" in told
        assert api.service.live_calls == 0
        await api.alive()


async def test_a_slow_body_that_goes_on_is_read():
    async with make_served(body_timeout=0.5) as api:
        host, port = api.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = b'{"prompt": "say:slow", "max_tokens": 8}'
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
                     % len(body))
        for at in range(0, len(body), 4):  # a second in all
            await asyncio.sleep(0.1)
            writer.write(body[at: at + 4])
            await writer.drain()
        async with asyncio.timeout(10):
            told = (await reader.read()).decode()
        writer.close()
        assert told.startswith("HTTP/1.1 200 ") and '"text":"slow"' in told


async def test_a_body_that_drips_for_ever_is_given_up():
    async with make_served(body_timeout=0.1) as api:
        host, port = api.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999\r\n\r\n")
        told = asyncio.create_task(reader.readline())
        async with asyncio.timeout(20):
            while not told.done():
                writer.write(b" ")
                await asyncio.sleep(0.02)
        writer.close()
        assert b" 408 " in told.result()
        await api.alive()


async def answered(api: Api, status: int) -> bool:
    return api.service.metrics.responses["/v1/completions", status] == 1


async def running(api: Api, count: int) -> bool:
    return (await api.gauges())["running"] == count


async def test_case_6_03_after_three_events():
    async with make_served(SLOW) as api:
        seen = 0
        body = {"prompt": "x", "stream": True, **ENDLESS}
        async with api.http.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                seen += line.startswith("data: ")
                if seen == 3:
                    break
        await assert_freed(api)


@pytest.mark.parametrize("stream", [True, False])
async def test_case_6_03_while_queued(stream: bool):
    async with make_served(CoreOptions(step_seconds=0.005, max_num_seqs=1, max_model_len=200_000)) as api:
        first = raw_post(api.url, {"prompt": "first", **ENDLESS})
        await until(lambda: running(api, 1))
        queued = raw_post(api.url, {"prompt": "queued", "stream": stream, **ENDLESS})
        await until(lambda: waiting(api, 1))
        queued.close()
        await until(lambda: waiting(api, 0))
        assert await running(api, 1)
        first.close()
        await assert_freed(api)


async def waiting(api: Api, count: int) -> bool:
    return (await api.gauges())["waiting"] == count


async def test_pings_keep_a_queued_stream_open():
    async with make_served(CoreOptions(step_seconds=0.01, max_num_seqs=1, max_model_len=200_000),
                           ping_interval=0.1) as api:
        first = raw_post(api.url, {"prompt": "first", **ENDLESS})
        await until(lambda: running(api, 1))
        body = {"prompt": "say:done", "stream": True, "max_tokens": 50}
        text = ""
        async with api.http.stream("POST", "/v1/completions", json=body) as answer:
            async for piece in answer.aiter_text():
                text += piece
                if text.count(": ping") == 2:
                    first.close()
        assert events(text)[-1] == "[DONE]"
        assert "".join(e["choices"][0]["text"] for e in events(text)[:-1]) == "done"


async def test_a_slow_reader_holds_up_nobody_and_misses_nothing():
    async with make_served(CoreOptions(block=8, max_model_len=200_000)) as api:
        tokens = 8_000
        slow = raw_post(api.url, {"prompt": "slow", "stream": True, "max_tokens": tokens, "ignore_eos": True})
        await until(lambda: generated(api, 1000))
        await asyncio.wait_for(api.alive(), 5)
        await until(lambda: running(api, 0), 20)  # the engine finishes although nobody reads
        text = await asyncio.to_thread(read_all, slow)
        whole = (await api.complete("slow", max_tokens=tokens, ignore_eos=True)).json()["choices"][0]["text"]
        chunks = events(text)
        assert "".join(e["choices"][0]["text"] for e in chunks[:-1]) == whole and chunks[-1] == "[DONE]"
        assert max(len(e["choices"][0]["text"]) for e in chunks[:-1]) > 1000  # what it missed came joined


async def generated(api: Api, count: int) -> bool:
    return (await api.engine.stats()).counters["generated_tokens"] >= count


def read_all(sock: socket.socket) -> str:
    """The body of a chunked answer, up to [DONE]."""
    data = b""
    sock.settimeout(10)
    while b"[DONE]" not in data:
        data += sock.recv(1 << 20)
    sock.close()
    body, rest = b"", data.split(b"\r\n\r\n", 1)[1]
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size or b"0", 16)
        body, rest = body + rest[:length], rest[length + 2:]
    return body.decode()


async def test_abort_request_by_id_and_all():
    async with make_api(SLOW) as api:
        async def abort(**body) -> list[str]:
            return (await api.http.post("/abort_request", json=body)).json()["aborted"]

        calls = [asyncio.create_task(api.complete("x", request_id=f"r{i}", stream=i % 2 == 0, **ENDLESS))
                 for i in range(4)]
        await until(lambda: running(api, 4))
        assert await abort(rid="r9") == [] and await abort(rid="r1") == ["r1"]
        answer = await calls[1]
        assert answer.status_code == 499 and answer.json()["error"]["code"] == "request_aborted"
        assert sorted(await abort(abort_all=True)) == ["r0", "r2", "r3"]
        last = events((await calls[0]).text)[-1]  # a stream that had begun: one error event, no [DONE]
        assert last["error"]["code"] == "request_aborted"
        await asyncio.gather(*calls)
        await assert_freed(api)
        assert api.service.metrics.aborts["abort_request"] == 4


async def test_abort_requests_whose_ids_begin_alike():
    async with make_api(SLOW) as api:
        calls = {id: asyncio.create_task(api.complete("x", request_id=id, **ENDLESS)) for id in ("a/1", "a/2", "b/1")}
        await until(lambda: running(api, 3))
        told = await api.http.post("/abort_request", json={"rid_prefix": "a/"})
        assert sorted(told.json()["aborted"]) == ["a/1", "a/2"]
        assert [(await calls[id]).status_code for id in ("a/1", "a/2")] == [499, 499]
        assert await running(api, 1) and not calls["b/1"].done()
        nothing = await api.http.post("/abort_request", json={"rid_prefix": ""})
        assert nothing.status_code == 400 and nothing.json()["error"]["param"] == "rid"
        assert (await api.http.post("/abort_request", json={"rid_prefix": "c"})).json() == {"aborted": []}
        await api.http.post("/abort_request", json={"rid_prefix": "b"})
        await asyncio.gather(*calls.values())
        await assert_freed(api)


async def test_case_6_09_an_aborted_id_is_free_at_once():
    async with make_api(CoreOptions(step_seconds=0.005, max_num_seqs=1, max_model_len=200_000)) as api:
        blocker = asyncio.create_task(api.complete("x", request_id="blocker", **ENDLESS))
        await until(lambda: running(api, 1))
        queued = asyncio.create_task(api.complete("say:old", request_id="x", max_tokens=50))
        await until(lambda: waiting(api, 1))
        assert (await api.http.delete("/v1/requests/x")).status_code == 200
        again = asyncio.create_task(api.complete("say:new", request_id="x", max_tokens=50))
        await until(lambda: waiting(api, 1))
        await api.http.post("/abort_request", json={"rid": "blocker"})
        assert (await again).json()["choices"][0]["text"] == "new"
        assert (await queued).status_code == 499 and (await blocker).status_code == 499
        for text in ("one", "two"):  # immediate reuse after the end
            answer = await api.complete(f"say:{text}", request_id="x", max_tokens=50)
            assert answer.json()["choices"][0]["text"] == text


async def test_case_6_09_an_aborted_id_is_free_although_its_client_does_not_read():
    async with make_served(CoreOptions(block=8, step_seconds=0.002, max_model_len=200_000)) as api:
        stuck = raw_post(api.url, {"prompt": "x", "stream": True, "logprobs": 20, "request_id": "x", **ENDLESS})
        await until(lambda: generated(api, 2000), 20)
        assert await api.service.abort("x")
        answer = await api.complete("say:new", request_id="x", max_tokens=50)
        assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == "new"
        assert api.service.live_calls == 0 and api.engine._router.live == 1  # the stuck reader still has its mailbox
        stuck.close()
        await until(lambda: no_reader(api))


async def no_reader(api: Api) -> bool:
    return api.engine._router.live == 0


async def test_case_16_09_a_duplicate_id_is_one_clean_error():
    async with make_api(SLOW) as api:
        first = asyncio.create_task(api.complete("x", request_id="same", stream=True, max_tokens=40))
        await until(lambda: running(api, 1))
        second = await api.complete("x", request_id="same", max_tokens=1)
        assert second.status_code == 400 and second.json()["error"]["code"] == "duplicate_request_id"
        assert second.json()["error"]["param"] == "request_id"
        chunks = events((await first).text)
        alone = (await api.complete("x", max_tokens=40)).json()["choices"][0]["text"]
        assert "".join(e["choices"][0]["text"] for e in chunks[:-1]) == alone and chunks[-1] == "[DONE]"
        headers = {"X-Request-Id": "traced"}  # a header names a trace, and traces may repeat; the answer says as what
        body = {"prompt": "x", "max_tokens": 20}
        answers = await asyncio.gather(*(api.http.post("/v1/completions", json=body, headers=headers)
                                         for _ in range(3)))
        assert {answer.status_code for answer in answers} == {200}
        ids = [answer.headers["x-request-id"] for answer in answers]
        assert ids == [answer.json()["id"].removeprefix("cmpl-") for answer in answers]
        assert len(set(ids)) == 3 and "traced" in ids and all(id.startswith("traced") for id in ids)
        await api.alive()


async def test_too_many_live_requests_get_429():
    async with make_api(SLOW, max_live_requests=3) as api:
        calls = [asyncio.create_task(api.complete("x", **ENDLESS)) for _ in range(3)]
        await until(lambda: running(api, 3))
        answer = await api.complete("x")
        assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["type"] == "rate_limit_error" and answer.json()["error"]["code"] == "queue_full"
        await api.http.post("/abort_request", json={"abort_all": True})
        await asyncio.gather(*calls)
        await api.alive()


async def test_a_thousand_connections_opened_and_closed():
    async with make_served(CoreOptions(step_seconds=0.001, max_model_len=200_000)) as api:
        for _ in range(10):
            socks = [raw_post(api.url, {"prompt": "x", "stream": i % 2 == 0, **ENDLESS}) for i in range(100)]
            await asyncio.sleep(0.02)
            for sock in socks:
                sock.close()
        await api.until_idle(10.0)
        await api.alive()


class SlowTokenizer(ByteTokenizer):
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        time.sleep(0.5)
        return super().encode(text, add_special_tokens)


async def test_long_prompts_are_tokenised_beside_the_event_loop():
    async with make_served() as api:
        api.service.reader.tokenizer = SlowTokenizer()
        slow, answers, worst = asyncio.create_task(api.complete("x")), 0, 0.0
        while not slow.done():
            started = time.monotonic()
            await api.http.get("/livez")
            answers, worst = answers + 1, max(worst, time.monotonic() - started)
        assert (await slow).status_code == 200 and answers >= 3 and worst < 0.4
