"""POST /v1/responses and what belongs to it: OpenAI's Responses API, stateless and stored.

    body -> items of the conversation -> chat -> output items (reasoning | message | function_call) -> Response

A stored response keeps its whole conversation as chat messages, so that `previous_response_id` goes on from it; its
prompt begins with the same tokens, which the prefix cache holds. The store lives in memory and is bounded.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from stretto.serve.bodies import described, read_body
from stretto.serve.calls import answer, check_generation, prepare_chat
from stretto.serve.errors import ApiError, JSONResponse, bad_request, did_you_mean, from_exception
from stretto.serve.response_events import ResponseBuilder, failure_event
from stretto.serve.response_input import CHAT_NAMES, conversation, left_out, to_chat
from stretto.serve.response_store import ResponseStore, Stored
from stretto.serve.schemas import ChatRequest, ResponsesRequest
from stretto.serve.service import Generation, Service
from stretto.serve.sessions import appends
from stretto.serve.translate import answer_chunks, as_chunks, chat_body, whole_answer


def responses(service: Service) -> APIRouter:
    router = APIRouter(tags=["responses"])
    store = ResponseStore(service.settings.max_stored_responses, service.settings.max_stored_bytes)

    @router.post("/v1/responses", openapi_extra=described(ResponsesRequest))
    async def create(request: Request) -> Response:
        arrival = time.monotonic()
        service.check_open()
        body = await read_body(service, request, ResponsesRequest)
        call = _Call(service, store, body, _previous(store, body.previous_response_id))

        async def prepare() -> Generation:
            ignored = check_generation(service, call.chat) + _left_out(service, body)
            return await prepare_chat(service, request, call.chat, ignored, arrival)

        return await answer(service, request, prepare, call.whole, call.events, CHAT_NAMES, failure_event)

    @router.get("/v1/responses/{id}")
    async def retrieve(id: str) -> Response:
        return JSONResponse(_find(store, id).response)

    @router.get("/v1/responses/{id}/input_items")
    async def input_items(id: str) -> Response:
        items = _find(store, id).input_items
        return JSONResponse({"object": "list", "data": items, "has_more": False,
                             "first_id": items[0]["id"] if items else None,
                             "last_id": items[-1]["id"] if items else None})

    @router.delete("/v1/responses/{id}")
    async def delete(id: str) -> Response:
        _find(store, id)
        store.remove(id)
        return JSONResponse({"id": id, "object": "response", "deleted": True})

    @router.post("/v1/responses/{id}/cancel")
    async def cancel(id: str) -> Response:
        """A response that is being made ends with an error at its client. One that is done has nothing to cancel."""
        if await service.abort(id):
            return JSONResponse({"id": id, "object": "response", "status": "cancelled"})
        _find(store, id)
        raise bad_request(f"the response {id!r} is complete; there is nothing to cancel", "id")

    return router


def _left_out(service: Service, body: ResponsesRequest) -> list[str]:
    """The tools that nobody here runs, as they are named in X-Stretto-Ignored. Raises ApiError if strict."""
    names = [f"tools[{i}]" for i in left_out(body)]
    if names and service.settings.strict_requests:
        raise bad_request(f"{names[0]} is no function; the server has no tools of its own", names[0],
                          "unsupported_parameter")
    return names


def _find(store: ResponseStore, id: str) -> Stored:
    stored = store.get(id)
    if stored is None:
        raise ApiError(404, f"no response with the id {id[:128]!r} is stored here; responses are kept in memory, the"
                       f" oldest go first.{did_you_mean(id, store.ids())}", param="id", code="response_not_found")
    return stored


def _previous(store: ResponseStore, id: str | None) -> Stored | None:
    if id is None:
        return None
    stored = store.get(id)
    if stored is None:
        raise ApiError(404, f"previous_response_id names {id[:128]!r}, which is not stored here: it was made with"
                       " store: false, by another server, or it was among the oldest. Send the whole conversation as"
                       " input", param="previous_response_id", code="previous_response_not_found")
    return stored


def _check_history(body: ResponsesRequest, chat: ChatRequest) -> None:
    if body.previous_response_id is not None and appends(chat):
        holder = "session.mode append" if chat.session_params is None else "session_params"
        raise bad_request(f"previous_response_id and {holder} exclude each other: each puts what was said before in"
                          " front of the input, which would then hold it twice; give one of them",
                          "previous_response_id", "unsupported_parameter")


class _Call:
    """One response in the making."""

    def __init__(self, service: Service, store: ResponseStore, body: ResponsesRequest, previous: Stored | None):
        self._service, self._store, self._body = service, store, body
        self.id = f"resp_{uuid.uuid4().hex}"
        self._items, messages = conversation(body)
        self._messages = [*(previous.messages if previous else []), *messages]
        fields = to_chat(body, self._messages)
        fields.setdefault("request_id", self.id)
        self.chat = chat_body(fields, CHAT_NAMES)
        _check_history(body, self.chat)
        self._builder = ResponseBuilder(self.id, body, service.adapter(body.model) or service.names[0])

    async def whole(self, service: Service, generation: Generation) -> dict[str, Any]:
        for chunk in as_chunks(await whole_answer(service, generation)):
            self._builder.take(chunk)
        self._builder.finish()
        self._keep()
        return self._builder.response

    async def events(self, service: Service, generation: Generation) -> AsyncGenerator[bytes, None]:
        builder, opened = self._builder, False
        async with contextlib.aclosing(answer_chunks(service, generation)) as chunks:
            try:
                async for chunk in chunks:
                    if not opened:
                        opened = True
                        yield builder.opening()
                    if events := builder.take(chunk):
                        yield events
            except Exception as e:
                if not opened:
                    raise
                yield builder.failed(from_exception(e))
                return
        events = builder.finish()
        self._keep()  # before its client learns that it is complete, and may go on from it
        yield events

    def _keep(self) -> None:
        if self._body.store is not False:
            said = self._builder.message()
            self._store.put(self.id, Stored(self._builder.response, self._items, [*self._messages, said]))
