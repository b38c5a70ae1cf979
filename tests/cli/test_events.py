"""The load generator's own client, against servers that say what the test wants, byte by byte."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from stretto.bench.events import Answer, ConnectionLost, EventClient

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
EVENTS = b"data: one\n\n: a comment\n\nevent: x\r\ndata:two\r\n\r\ndata: [DONE]\n\n"


def chunked(data: bytes, size: int) -> bytes:
    parts = [data[i : i + size] for i in range(0, len(data), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


class Server:
    """Answers each request with the next of its answers, in pieces; "close" hangs up."""

    def __init__(self, answers: list[list[bytes]], close: bool = False):
        self.answers, self.close, self.requests, self.connections = answers, close, [], 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while self.answers:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                for piece in self.answers.pop(0):
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.005)
                if self.close:
                    break
        writer.close()


@contextlib.asynccontextmanager
async def client_of(answers: list[list[bytes]], close: bool = False, timeout: float = 5.0
                    ) -> AsyncIterator[tuple[EventClient, Server]]:
    server = Server(answers, close)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    client = EventClient(f"http://127.0.0.1:{port}/under/", {"X-A": "b"}, timeout)
    try:
        yield client, server
    finally:
        client.close()
        listening.close()


async def heard(client: EventClient) -> tuple[Answer, list[bytes]]:
    events: list[tuple[bytes, float]] = []
    answer = await client.post("/v1/x", b"{}", lambda data, now: events.append((data, now)))
    assert [now for _, now in events] == sorted(now for _, now in events)
    return answer, [data for data, _ in events]


@pytest.mark.parametrize("size", [1, 3, 1000])
async def test_events_come_in_any_pieces_on_one_connection(size: int):
    whole = CHUNKED + chunked(EVENTS, size)
    in_pieces = [whole[i : i + 7] for i in range(0, len(whole), 7)]
    async with client_of([[whole], in_pieces, [whole]]) as (client, server):
        for _ in range(3):
            assert await heard(client) == (Answer(200, b""), [b"one", b"two", b"[DONE]"])
        assert server.connections == 1
        assert server.requests[0].startswith(b"POST /under/v1/x HTTP/1.1\r\n") and b"X-A: b\r\n" in server.requests[0]


async def test_a_body_may_have_a_length_or_end_with_its_connection():
    sized = HEAD + b"Content-Length: %d\r\n\r\n" % len(EVENTS) + EVENTS
    async with client_of([[sized], [HEAD + b"\r\n" + EVENTS]], close=True) as (client, server):
        for _ in range(2):
            assert (await heard(client))[1] == [b"one", b"two", b"[DONE]"]
        assert server.connections == 2


async def test_errors_have_their_body():
    refused = b'HTTP/1.1 429 Too Many\r\nContent-Length: 17\r\n\r\n{"error": "busy"}'
    async with client_of([[refused]]) as (client, _):
        assert await heard(client) == (Answer(429, b'{"error": "busy"}'), [])


async def test_a_connection_that_the_server_closed_while_idle_is_replaced():
    async with client_of([[CHUNKED + chunked(EVENTS, 9)]] * 3, close=True) as (client, server):
        for _ in range(3):
            assert (await heard(client))[0].status == 200
        assert server.connections == 3


async def test_what_breaks_is_told():
    async with client_of([[CHUNKED + b"5\r\ndata"]], close=True) as (client, _):
        with pytest.raises(ConnectionLost):
            await heard(client)
    async with client_of([[b"SSH-2.0-OpenSSH\r\n"]], close=True) as (client, _):
        with pytest.raises(ValueError, match="no HTTP"):
            await heard(client)
    async with client_of([[CHUNKED]] * 2, timeout=0.1) as (client, _):
        with pytest.raises(TimeoutError):
            await heard(client)
    with pytest.raises(OSError):
        await heard(EventClient("http://127.0.0.1:1", {}, 5.0))


async def test_an_answer_that_was_given_up_does_not_reach_the_next_request():
    late, good = [CHUNKED, *[chunked(b"data: late\n\n", 5)] * 3], [CHUNKED + chunked(EVENTS, 9)]
    async with client_of([late, good, good]) as (client, server):
        client._timeout = 0.004
        with pytest.raises(TimeoutError):
            await heard(client)
        client._timeout = 5.0
        assert (await heard(client))[1] == [b"one", b"two", b"[DONE]"] and server.connections == 2
