"""Many requests to one server with OpenAI's API, some at a time, patiently. No torch in this module."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx

T = TypeVar("T")
BUSY = (429, 502, 503, 504)  # a server that says so may be asked again
PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds, doubled each time; a Retry-After header wins


@dataclass(frozen=True)
class Reply:
    """An answer, whatever its status. `body`: JSON, or text where it is none."""

    status: int
    body: Any
    request_id: str | None


class Unreachable(RuntimeError):
    """No answer at all, however often it was tried."""


async def ask(http: httpx.AsyncClient, path: str, body: Any, patience: float = 600.0) -> Reply:
    """POSTs `body`. A busy or absent server is asked again for up to `patience` seconds; then its last answer stands.
    Raises Unreachable where there was none."""
    ends, pause = time.monotonic() + patience, PAUSE
    while True:
        wait = pause
        try:
            answer = await http.post(path, json=body)
            if answer.status_code not in BUSY or time.monotonic() >= ends:
                return Reply(answer.status_code, _content(answer), answer.headers.get("x-request-id"))
            wait = _retry_after(answer) or pause
        except httpx.TransportError as e:
            if time.monotonic() >= ends:
                raise Unreachable(f"{type(e).__name__}: {e}") from e
        await asyncio.sleep(min(wait, max(ends - time.monotonic(), 0.0)))
        pause = min(2 * pause, LONGEST_PAUSE)


def _content(answer: httpx.Response) -> Any:
    try:
        return answer.json()
    except ValueError:
        return answer.text


def _retry_after(answer: httpx.Response) -> float | None:
    try:
        return float(answer.headers["retry-after"])
    except (KeyError, ValueError):
        return None


def message_of(reply: Reply) -> str:
    """What an error says, for people."""
    try:
        return str(reply.body["error"]["message"])
    except (KeyError, TypeError):
        return str(reply.body)[:300]


async def for_each(items: Iterable[T], work: Callable[[T], Awaitable[None]], concurrency: int) -> None:
    """Runs `work` on every item, `concurrency` at a time; items are taken from the iterable only when their turn comes,
    so it may be longer than memory. The first exception ends all."""
    left = iter(items)

    async def worker() -> None:
        for item in left:
            await work(item)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(worker())
