"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API, spoken as chat.

    message_start, for each block: content_block_start, content_block_delta*, content_block_stop,
    message_delta (stop reason, usage), message_stop
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from stretto.serve.bodies import described, read_body
from stretto.serve.calls import answer, check_generation, prepare_chat
from stretto.serve.errors import ApiError, JSONResponse, from_exception, in_words_of, unsupported
from stretto.serve.message_input import CHAT_NAMES, left_out, to_chat
from stretto.serve.request_fields import ignored_header
from stretto.serve.schemas import ChatRequest, CountTokensRequest, MessagesRequest
from stretto.serve.service import Generation, Service
from stretto.serve.streaming import named_event
from stretto.serve.translate import answer_chunks, as_chunks, chat_body, whole_answer

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}


def messages(service: Service) -> APIRouter:
    router = APIRouter(tags=["messages"])

    async def accept(request: Request, model: type[CountTokensRequest]) -> tuple[ChatRequest, list[str]]:
        """The body as a chat request, and the names of the fields in it that are ignored."""
        service.check_open()
        body = await read_body(service, request, model)
        chat = chat_body(to_chat(body, service.reader.system_anywhere), CHAT_NAMES)
        if (names := left_out(body)) and service.settings.strict_requests:
            raise unsupported(names[0], "nothing here would honour it; leave it out")
        with in_words_of(CHAT_NAMES):
            return chat, check_generation(service, chat) + names

    @router.post("/v1/messages", openapi_extra=described(MessagesRequest))
    async def create(request: Request) -> Response:
        arrival = time.monotonic()
        chat, ignored = await accept(request, MessagesRequest)

        async def prepare() -> Generation:
            return await prepare_chat(service, request, chat, ignored, arrival)

        return await answer(service, request, prepare, _whole, _events, CHAT_NAMES, failure_event)

    @router.post("/v1/messages/count_tokens", openapi_extra=described(CountTokensRequest))
    async def count_tokens(request: Request) -> Response:
        chat, ignored = await accept(request, CountTokensRequest)
        with in_words_of(CHAT_NAMES):
            ids = await service.in_pool(service.reader.chat, chat)
        return JSONResponse({"input_tokens": len(ids)}, headers=ignored_header(ignored))

    return router


def failure_event(error: ApiError) -> bytes:
    return named_event("error", error.anthropic())


async def _whole(service: Service, generation: Generation) -> dict[str, Any]:
    builder = MessageBuilder(generation.adapter or service.names[0], len(generation.requests[0].tokens))
    for chunk in as_chunks(await whole_answer(service, generation)):
        builder.take(chunk)
    builder.finish()
    return builder.message


async def _events(service: Service, generation: Generation) -> AsyncGenerator[bytes, None]:
    builder, opened = MessageBuilder(generation.adapter or service.names[0], len(generation.requests[0].tokens)), False
    async with contextlib.aclosing(answer_chunks(service, generation)) as chunks:
        try:
            async for chunk in chunks:
                events = b"" if opened else builder.opening()
                opened = True
                if events := events + builder.take(chunk):
                    yield events
        except Exception as e:
            if not opened:
                raise
            yield failure_event(from_exception(e))
            return
    yield builder.finish()


class MessageBuilder:
    """Grows `message` by chat chunks and says each time what changed, as events."""

    def __init__(self, model: str, input_tokens: int):
        self._open = False  # the last block grows
        self._call = -1  # which of chat's tool calls it is
        self._finish: tuple[str | None, Any] = (None, None)
        self._arguments = ""
        self.message: dict[str, Any] = {
            "id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": model, "content": [],
            "stop_reason": None, "stop_sequence": None,
            "usage": {"input_tokens": input_tokens, "output_tokens": 0, "cache_creation_input_tokens": 0,
                      "cache_read_input_tokens": 0}}

    def opening(self) -> bytes:
        return named_event("message_start", {"type": "message_start", "message": self.message})

    def take(self, chunk: dict[str, Any]) -> bytes:
        """One chunk of the chat answer."""
        if chunk.get("usage"):
            self.message["usage"] = _usage(chunk["usage"])
        if not chunk["choices"]:
            return b""
        choice = chunk["choices"][0]
        delta, events = choice["delta"], b""
        if thought := delta.get("reasoning_content") or delta.get("reasoning"):
            events += self._grow("thinking", {"thinking": "", "signature": ""}, "thinking", thought)
        if delta.get("content"):
            events += self._grow("text", {"text": ""}, "text", delta["content"])
        for call in delta.get("tool_calls") or []:
            events += self._call_delta(call)
        if choice.get("finish_reason"):
            self._finish = choice["finish_reason"], choice.get("stop_reason")
        return events

    def finish(self) -> bytes:
        """After the last chunk."""
        events = b"" if self.message["content"] else self._grow("text", {"text": ""}, "text", "")
        events += self._close()
        reason, matched = self._finish
        sequence = matched if reason == "stop" and isinstance(matched, str) else None
        told = {"stop_reason": "stop_sequence" if sequence is not None else STOP_REASONS.get(reason or "", "end_turn"),
                "stop_sequence": sequence}
        self.message |= told
        events += named_event("message_delta", {"type": "message_delta", "delta": told, "usage": self.message["usage"]})
        return events + named_event("message_stop", {"type": "message_stop"})

    # -------------------------------------------------------------------------------------------------- blocks
    def _begin(self, block: dict[str, Any]) -> bytes:
        events = self._close()
        event = {"type": "content_block_start", "index": len(self.message["content"]), "content_block": block}
        events += named_event("content_block_start", event)
        self.message["content"].append(block)
        self._open, self._arguments = True, ""
        return events

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return named_event("content_block_delta", {"type": "content_block_delta", "delta": delta,
                                                   "index": len(self.message["content"]) - 1})

    def _grow(self, kind: str, empty: dict[str, Any], field: str, text: str) -> bytes:
        events = b""
        if not self._open or self.message["content"][-1]["type"] != kind:
            events += self._begin({"type": kind, **empty})
        self.message["content"][-1][field] += text
        return events + (self._delta({"type": f"{field}_delta", field: text}) if text else b"")

    def _call_delta(self, call: dict[str, Any]) -> bytes:
        function, events = call.get("function") or {}, b""
        if not self._open or self.message["content"][-1]["type"] != "tool_use" or call["index"] != self._call:
            self._call = call["index"]
            events += self._begin({"type": "tool_use", "id": call.get("id"), "name": function.get("name"), "input": {}})
        if arguments := function.get("arguments"):
            self._arguments += arguments
            events += self._delta({"type": "input_json_delta", "partial_json": arguments})
        return events

    def _close(self) -> bytes:
        """Ends the block that grows, if there is one."""
        if not self._open:
            return b""
        self._open = False
        block = self.message["content"][-1]
        if block["type"] == "tool_use":
            block["input"] = _arguments(self._arguments)
        event = {"type": "content_block_stop", "index": len(self.message["content"]) - 1}
        return named_event("content_block_stop", event)


def _arguments(text: str) -> dict[str, Any]:
    """What the model wrote as a call's arguments; an answer that was cut may hold half an object."""
    try:
        value = msgspec.json.decode(text) if text else {}
    except msgspec.DecodeError:
        return {"_unfinished": text}
    return value if isinstance(value, dict) else {"_value": value}


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    """Here the prompt's tokens are told apart: those read from the cache, and the others."""
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {"input_tokens": usage["prompt_tokens"] - cached, "output_tokens": usage["completion_tokens"],
            "cache_creation_input_tokens": 0, "cache_read_input_tokens": cached, "speculation": usage["speculation"]}
