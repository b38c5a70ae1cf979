"""What the Responses and the Messages API share: both are spoken as chat.

    their body  ->  a ChatRequest  ->  the chat route's own work  ->  its message or its chunks  ->  their shapes

The chat answer is read as a client would read it, so that whatever chat learns (tools, reasoning, schemas) is learnt
here too, and a refusal is the same refusal, in the words of the other API.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import msgspec
from pydantic import ValidationError

from stretto.serve.chat import chat_completion, chat_events
from stretto.serve.errors import from_validation, renamed
from stretto.serve.schemas import ChatRequest
from stretto.serve.service import Generation, Service

_decoder = msgspec.json.Decoder()


def chat_body(fields: Mapping[str, Any], names: Mapping[str, str]) -> ChatRequest:
    """The chat request of a translated body. `names`: chat's field to the client's, for errors. Raises ApiError."""
    try:
        return ChatRequest.model_validate({name: value for name, value in fields.items() if value is not None})
    except ValidationError as e:
        raise renamed(from_validation(e), names) from None


async def whole_answer(service: Service, generation: Generation) -> dict[str, Any]:
    """The chat completion as plain data."""
    return msgspec.to_builtins(await chat_completion(service, generation))


async def answer_chunks(service: Service, generation: Generation) -> AsyncGenerator[dict[str, Any], None]:
    """The chat completion's chunks as plain data, as they come."""
    async with contextlib.aclosing(chat_events(service, generation)) as events:
        async for item in events:
            for line in item.splitlines():
                data = line.removeprefix(b"data: ")
                if data and data != b"[DONE]":
                    yield _decoder.decode(data)


def as_chunks(answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A whole answer as the chunks of a stream that has only one step; so that one builder makes both forms."""
    (choice,) = answer["choices"]
    calls = [{**call, "index": i} for i, call in enumerate(choice["message"].get("tool_calls") or [])]
    delta = {**choice["message"], **({"tool_calls": calls} if calls else {})}
    return [{"choices": [{**choice, "delta": delta}], "usage": answer["usage"]}]
