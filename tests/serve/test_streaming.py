"""Events of streams whose form is encoded once, and what is written while a client does not read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from stretto.serve.chat import ChatChunk, ChunkChoice, Delta
from stretto.serve.completions import Completion, CompletionChoice
from stretto.serve.streaming import PING, EventForm, EventStream, event

TEXTS = ["a", "", 'say "content":""', "\\", "\n\r\t", "\u2028\u2029\x85", "é🙂", '"text":""']


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("field", ["content", "reasoning_content", "text"])
def test_an_event_of_a_form_is_the_event(field: str, text: str):
    def payload(said: str):
        names = {"id": 'x"content":""', "created": 1, "model": 'm "text":"" \u2028'}
        if field == "text":
            return Completion(**names, choices=[CompletionChoice(2, said, None, None)])
        return ChatChunk(**names, choices=[ChunkChoice(1, Delta(**{field: said}))])

    assert EventForm.of(payload(""), field).event(text) == event(payload(text))


@pytest.mark.parametrize("payload", [{"content": "x"}, {"choices": [{"content": ""}, {"content": ""}]}])
def test_a_form_has_one_place(payload: dict):
    with pytest.raises(ValueError, match="no place, or several, for 'content'"):
        EventForm.of(payload, "content")


class Client:
    """Reads where `reading` is set; notes what it gets."""

    def __init__(self) -> None:
        self.reading, self.got = asyncio.Event(), list[bytes]()
        self.inside = 0

    async def receive(self) -> dict:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(self, message: dict) -> None:
        self.inside += 1
        assert self.inside == 1, "two writes at once"
        await self.reading.wait()
        self.got.append(b"" if message["type"] == "http.response.start" else message["body"])
        self.inside -= 1


async def test_pings_and_events_are_written_one_at_a_time():
    """A ping that the client has not read holds up the event behind it; an event that it has not read needs no ping."""
    client, asked = Client(), asyncio.Event()

    async def events() -> AsyncGenerator[bytes, None]:
        await asyncio.sleep(0.03)  # the ping is under way by then
        yield b"data: 1\n\n"
        client.reading.clear()
        asked.set()
        yield b"data: 2\n\n"

    stream = asyncio.create_task(EventStream(events(), 0.01, {}, lambda: None)({}, client.receive, client.send))
    await asyncio.sleep(0.05)
    assert client.got == [] and client.inside == 1
    client.reading.set()
    await asked.wait()
    await asyncio.sleep(0.05)
    assert client.inside == 1  # the second event alone: no ping waits behind it
    client.reading.set()
    await stream
    said = [each for each in client.got if each != PING]
    assert said == [b"", b"data: 1\n\n", b"data: 2\n\n", b""] and client.got[1] == PING
