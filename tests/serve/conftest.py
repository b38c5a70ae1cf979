"""An app over the scripted core: in process (`api`), and behind a real server on a loopback port (`served`)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import uvicorn

from stretto.engine.inprocess import InProcessEngine
from stretto.serve.app import build_app
from stretto.serve.service import Service
from stretto.serve.settings import ServeSettings
from tests.serve.fakes import ByteTokenizer, CoreOptions


@dataclass
class Api:
    """A client, and what is behind it."""

    http: httpx.AsyncClient
    engine: InProcessEngine
    service: Service
    url: str

    async def chat(self, content: Any = "hello", **fields: Any) -> httpx.Response:
        return await self.http.post("/v1/chat/completions", json={
            "model": "fake/tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 8} | fields)

    async def complete(self, prompt: Any = "hello", **fields: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={
            "model": "fake/tiny", "prompt": prompt, "max_tokens": 8} | fields)

    async def gauges(self) -> dict[str, float]:
        return (await self.engine.stats()).gauges

    async def until_idle(self, seconds: float = 2.0) -> None:
        """The engine holds nothing, within the time."""
        async with asyncio.timeout(seconds):
            while (gauges := await self.gauges())["running"] + gauges["waiting"] > 0 or self.service.live_calls:
                await asyncio.sleep(0.01)

    async def alive(self) -> None:
        """Case check L: healthy, and an ordinary request is answered right."""
        assert (await self.http.get("/health")).status_code == 200
        answer = (await self.chat("say:alive")).json()
        assert answer["choices"][0]["message"]["content"] == "alive"


def events(text: str) -> list[Any]:
    """The payloads of an event stream; "[DONE]" as a string. Comments are left out."""
    found = []
    for block in text.split("\n\n"):
        for line in block.splitlines():
            assert line.startswith((":", "data: ")), line
            if line.startswith("data: "):
                data = line.removeprefix("data: ")
                found.append(data if data == "[DONE]" else json.loads(data))
    return found


Make = Callable[..., contextlib.AbstractAsyncContextManager[Api]]


@contextlib.asynccontextmanager
async def make_api(options: CoreOptions | None = None, tokenizer: ByteTokenizer | None = None,
                   **settings: Any) -> AsyncIterator[Api]:
    """The app called directly, without sockets."""
    engine = await InProcessEngine.start(options or CoreOptions(), stall_timeout=settings.get("stall_timeout", 30.0))
    app = build_app(engine, tokenizer or ByteTokenizer(), ServeSettings(**settings))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        try:
            yield Api(http, engine, app.state.service, "http://test")
        finally:
            await engine.close()
            app.state.service.close()


@contextlib.asynccontextmanager
async def make_served(options: CoreOptions | None = None, **settings: Any) -> AsyncIterator[Api]:
    """The app behind uvicorn on a loopback port."""
    engine = await InProcessEngine.start(options or CoreOptions(), stall_timeout=settings.get("stall_timeout", 30.0))
    app = build_app(engine, ByteTokenizer(), ServeSettings(**settings))
    sock = socket.create_server(("127.0.0.1", 0), backlog=2048)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)  # of its connections: a slow reader is felt soon
    config = uvicorn.Config(app, http="httptools", lifespan="off", log_level="warning", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    async with httpx.AsyncClient(base_url=url, timeout=20, trust_env=False) as http:
        try:
            yield Api(http, engine, app.state.service, url)
        finally:
            await http.aclose()
            server.should_exit = True
            await serving
            await engine.close()
            app.state.service.close()


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    async with make_api() as made:
        yield made


@pytest.fixture
async def served() -> AsyncIterator[Api]:
    async with make_served() as made:
        yield made
