"""A client that costs little: POSTs that are answered with server-sent events, many at once. No torch in this module.

A load generator must not be what it measures. A general HTTP client spends more on an event than a server does; here a
connection's bytes go through httptools' parser straight to whoever counts them, with the time at which they came:

    socket -> Connection.data_received -> httptools -> lines -> on_event(data, time)

Connections are kept and used again.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

import httptools

OnEvent = Callable[[bytes, float], None]
"""The data of an event, and the time (perf_counter) at which it came. Must not raise."""
MOST_OF_AN_ERROR = 2000  # bytes that are kept of an answer that is no stream


@dataclass(frozen=True)
class Answer:
    """`rest`: the beginning of the body where the status is not 200."""

    status: int
    rest: bytes


class ConnectionLost(ConnectionError):
    """The server closed a connection on which an answer was due. `unused`: before a byte of it had come."""

    def __init__(self, message: str, unused: bool):
        super().__init__(message)
        self.unused = unused


class Connection(asyncio.Protocol):
    """One connection, one request at a time. The methods named on_... are httptools' callbacks."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[Answer] | None = None
        self._now = 0.0
        self.alive = False

    # ------------------------------------------------------------------------------------------------- the request
    async def post(self, request: bytes, on_event: OnEvent) -> Answer:
        """Raises ConnectionLost, and ValueError for what is no HTTP."""
        assert self._transport is not None and self._done is None
        self._on_event, self._line, self._rest, self._heard = on_event, b"", b"", False
        self._status, self._to_end = 0, False
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            return await self._done
        finally:
            if not self._done.done() or self._done.cancelled():
                self.close()  # what still comes must not be taken for the next answer
            self._done = None

    def close(self) -> None:
        self.alive = False
        if self._transport is not None:
            self._transport.close()

    # ---------------------------------------------------------------------------------------------- asyncio.Protocol
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self.alive = transport, True

    def data_received(self, data: bytes) -> None:
        self._now, self._heard = time.perf_counter(), True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as e:
            self._fail(ValueError(f"what came is no HTTP answer: {e}"))
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.alive = False
        if self._status and self._to_end and error is None:
            self._finish()  # a body without a length ends with its connection
        self._fail(ConnectionLost(f"the server closed the connection{f': {error}' if error else ''}", not self._heard))

    # ----------------------------------------------------------------------------------------------------- httptools
    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._to_end = False

    def on_message_begin(self) -> None:
        self._to_end = True

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._status != 200:
            self._rest = (self._rest + body)[:MOST_OF_AN_ERROR]
            return
        *lines, self._line = (self._line + body).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._on_event(line[5:].strip(), self._now)

    def on_message_complete(self) -> None:
        self.alive = self.alive and self._parser.should_keep_alive()
        self._finish()

    def _finish(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(Answer(self._status, self._rest))

    def _fail(self, error: Exception) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)


class EventClient:
    """Of one server. `base`: its address, with a path where the API is under one."""

    def __init__(self, base: str, headers: Mapping[str, str], timeout: float):
        parts = urlsplit(base)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host, self._port = parts.hostname or "", parts.port or (443 if self._tls else 80)
        self._path, self._timeout = parts.path.rstrip("/"), timeout
        fields = {"Host": parts.netloc.rpartition("@")[2], "Content-Type": "application/json",
                  "Accept": "text/event-stream, application/json", **headers}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self._idle: list[Connection] = []

    async def post(self, path: str, body: bytes, on_event: OnEvent, headers: Mapping[str, str] | None = None) -> Answer:
        """Raises OSError (ConnectionLost among them), TimeoutError, and ValueError for what is no HTTP."""
        own = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        request = (f"POST {self._path}{path} HTTP/1.1\r\n{self._head}{own}Content-Length: {len(body)}\r\n\r\n"
                   .encode("latin-1") + body)
        async with asyncio.timeout(self._timeout):
            while True:
                connection, is_new = await self._connection()
                try:
                    answer = await connection.post(request, on_event)
                except ConnectionLost as e:
                    if e.unused and not is_new:
                        continue  # closed by the server while it was idle
                    raise
                if connection.alive:
                    self._idle.append(connection)
                return answer

    async def _connection(self) -> tuple[Connection, bool]:
        while self._idle:
            connection = self._idle.pop()
            if connection.alive:
                return connection, False
        loop = asyncio.get_running_loop()
        _, made = await loop.create_connection(Connection, self._host, self._port, ssl=self._tls)
        return made, True

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()
