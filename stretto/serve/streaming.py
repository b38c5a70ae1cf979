"""Server-sent events, and watching for clients that go away.

    no byte is sent before the first event is there, so that whatever is refused is a plain HTTP error; a stream that
    stays silent for a ping interval is opened with a comment, and kept open by more of them
    a failure after that is one event that says so, and the stream ends without [DONE]
    a client that closes its connection ends the events at once, also while nothing is being sent

A client that reads slowly holds up its own events only: sending waits, and what the engine delivers meanwhile is
joined in the request's mailbox.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, NamedTuple, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from stretto.serve.errors import ApiError, from_exception

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}

_encoder = msgspec.json.Encoder()
# The standard ends a line at \r and \n alone; clients that cut decoded text by Unicode's rules end it at these too.
_LINE_ENDS = tuple((c.encode(), f"\\u{ord(c):04x}".encode()) for c in "\x85\u2028\u2029")


class ClientGone(Exception):
    """The client has closed its connection; nobody will read an answer."""


def one_line(payload: Any) -> bytes:
    """JSON in one line, whatever the reader takes for the end of a line."""
    data = _encoder.encode(payload)
    if not data.isascii():
        for character, escaped in _LINE_ENDS:
            data = data.replace(character, escaped)
    return data


def event(payload: Any) -> bytes:
    return b"data: " + one_line(payload) + b"\n\n"


class EventForm(NamedTuple):
    """An event of which one text differs from time to time: what is the same in all of them is encoded once."""

    head: bytes
    tail: bytes

    @classmethod
    def of(cls, payload: Any, field: str) -> EventForm:
        """`payload` has one field of that name, with an empty text. (Where a text holds what looks like it, its quotes
        are escaped.)"""
        gap = b'"%b":""' % field.encode()
        head, found, tail = event(payload).partition(gap)
        if not found or gap in tail:
            raise ValueError(f"an event has no place, or several, for {field!r}")
        return cls(head + gap[:-2], tail)

    def event(self, text: str) -> bytes:
        return self.head + one_line(text) + self.tail


def named_event(name: str, payload: Any) -> bytes:
    """An event with its type in a line of its own, as typed streams have it."""
    return b"event: " + name.encode() + b"\ndata: " + one_line(payload) + b"\n\n"


def openai_failure(error: ApiError) -> bytes:
    """The event by which OpenAI's chat and completion clients learn of a failure."""
    return b"data: " + error.body + b"\n\n"


async def disconnected(receive: Receive) -> None:
    """Returns when the client has gone. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled, and ClientGone raised, when the client goes away first."""
    task, watcher = asyncio.create_task(work), asyncio.create_task(disconnected(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        await _cancel(task, watcher)


async def _cancel(*tasks: asyncio.Task) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(Response):
    """Sends what `events` yields; each item is one or more whole events."""

    def __init__(self, events: AsyncGenerator[bytes, None], ping_interval: float, headers: dict[str, str],
                 on_gone: Callable[[], None], failure: Callable[[ApiError], bytes] = openai_failure):
        super().__init__(headers=HEADERS | headers)
        del self.headers["content-length"]
        self._events, self._ping_interval, self._on_gone = events, ping_interval, on_gone
        self._failure = failure
        self._opened = self._sending = False
        self._last_sent = 0.0
        self._pinging = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._now = asyncio.get_running_loop().time
        sender = asyncio.create_task(self._send_all(send))
        watcher = asyncio.create_task(disconnected(receive))
        pinger = asyncio.create_task(self._ping(send))
        try:
            await asyncio.wait((sender, watcher), return_when=asyncio.FIRST_COMPLETED)
            if sender.done():
                sender.result()
            else:
                self._on_gone()
        finally:
            await _cancel(sender, watcher, pinger)

    async def _send_all(self, send: Send) -> None:
        async with contextlib.aclosing(self._events) as events:
            try:
                async for item in events:
                    await self._write(send, item)
            except Exception as e:
                if not self._opened:
                    raise
                await self._write(send, self._failure(from_exception(e)))
        await self._write(send, b"", more=False)

    async def _ping(self, send: Send) -> None:
        """Whoever has not read the last event yet needs no ping."""
        self._last_sent = self._now()
        while True:
            silent = 0.0 if self._sending else self._now() - self._last_sent
            if silent < self._ping_interval:
                await asyncio.sleep(self._ping_interval - silent)
            else:
                async with self._pinging:
                    await self._put(send, PING)

    async def _write(self, send: Send, body: bytes, more: bool = True) -> None:
        """Once for every token: so it takes no lock, but where a ping is under way."""
        if self._pinging.locked():
            async with self._pinging:
                pass
        self._sending = True
        await self._put(send, body, more)
        self._sending = False

    async def _put(self, send: Send, body: bytes, more: bool = True) -> None:
        if not self._opened:
            self._opened = True
            start: Message = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(start)
        await send({"type": "http.response.body", "body": body, "more_body": more})
        self._last_sent = self._now()
