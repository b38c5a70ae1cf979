"""How a route that generates takes a call and answers it; what every inference API has in common.

    accept (open? body, model, fields)  ->  prepare (tokenise, one engine request per prompt)  ->  whole answer | events
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import Response

from stretto.serve.bodies import read_body
from stretto.serve.errors import CLIENT_CLOSED, ApiError, JSONResponse, bad_request, in_words_of
from stretto.serve.request_fields import check_fields, ignored_header
from stretto.serve.schemas import Body, ChatRequest, GenerationBody
from stretto.serve.service import Generation, Service
from stretto.serve.sessions import appends, attach_session, chat_continuation
from stretto.serve.streaming import ClientGone, EventStream, openai_failure, while_connected
from stretto.serve.tracing import PARENT_HEADERS

BodyT = TypeVar("BodyT", bound=Body)
Whole = Callable[[Service, Generation], Awaitable[Any]]
Events = Callable[[Service, Generation], AsyncGenerator[bytes, None]]


async def accept(service: Service, request: Request, model: type[BodyT]) -> tuple[BodyT, list[str]]:
    """The body, and the names of the fields in it that are ignored. Raises ApiError."""
    service.check_open()
    body = await read_body(service, request, model)
    return body, check_generation(service, body)


def check_generation(service: Service, body: Body) -> list[str]:
    """What can be said of a body alone. Returns the names of the fields that are ignored; raises ApiError."""
    ignored = check_fields(body, service.settings.strict_requests)
    if isinstance(body, GenerationBody):
        service.check_model(body.model)
        if body.stream_options is not None and not body.stream:
            raise bad_request("stream_options is only allowed when stream is true", "stream_options")
        ignored = ignored + _beyond_drafts(service, body)
    return ignored


def _beyond_drafts(service: Service, body: GenerationBody) -> list[str]:
    """A bound on drafts that bounds nothing here: it is kept, but whoever set it may have wanted so many. Raises
    ApiError if strict."""
    most = service.info.speculation_tokens
    if body.speculation is None or body.speculation.tokens <= most:
        return []
    if service.settings.strict_requests:
        raise bad_request(f"speculation.tokens is {body.speculation.tokens}; this server drafts at most {most} tokens a"
                          " step (--speculation, --speculation-tokens)", "speculation.tokens")
    return ["speculation.tokens"]


async def make_generation(service: Service, request: Request, body: GenerationBody, prompts: list[list[int]],
                          ignored: list[str], arrival: float, continuation: list[int] | None = None) -> Generation:
    """One call under the id that its client, its header or the server chose; the answer's header repeats it, unless
    the client named one in the header and another one in the body.

    `continuation`: the ids that an appended turn adds to its session's history."""
    bad_words = await service.in_pool(service.reader.bad_words, body.bad_words) if body.bad_words else ()
    state = request.scope["state"]
    id = service.choose_id(body, state["request_id"])
    if body.request_id is None or not state["request_id_given"]:
        state["request_id"] = id
    reply = service.replies.plan(body, prompts[0])
    requests = service.make_requests(id, body, prompts, arrival, reply, bad_words)
    parent = {name: request.headers[name] for name in PARENT_HEADERS if name in request.headers}
    generation = Generation(id, body, requests, ignored, reply, parent)
    attach_session(request, generation, continuation, service.tokenizer.bos_token_id)
    return generation


async def prepare_chat(service: Service, request: Request, body: ChatRequest, ignored: list[str], arrival: float
                       ) -> Generation:
    """A chat turn, whichever API it came by: tokenised, and of its session if it names one. Raises ApiError."""
    ids = await service.in_pool(service.reader.chat, body)
    more = await service.in_pool(chat_continuation, service, body) if appends(body) else None
    return await make_generation(service, request, body, [ids], ignored, arrival, more)


async def _in_words_of(names: Mapping[str, str], events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    async with contextlib.aclosing(events):
        with in_words_of(names):
            async for item in events:
                yield item


async def answer(service: Service, request: Request, prepare: Callable[[], Awaitable[Generation]], whole: Whole,
                 events: Events, names: Mapping[str, str] | None = None,
                 failure: Callable[[ApiError], bytes] = openai_failure) -> Response:
    """Streamed or whole; a client that goes away ends the work either way.

    `names`: field of the chat or completion body -> field of the API that was called, for errors; None: the same.
    `failure`: the event that ends a stream which was opened and cannot go on."""

    async def run() -> Response:
        with in_words_of(names or {}):
            generation = await prepare()
            await service.check_grammars(generation)
            headers = ignored_header(generation.ignored)
            if not generation.body.stream:
                return JSONResponse(await whole(service, generation), headers=headers)
        stream = events(service, generation)
        return EventStream(_in_words_of(names, stream) if names else stream, service.settings.ping_interval, headers,
                           gone, failure)

    def gone() -> None:
        service.metrics.aborts["client_disconnected"] += 1

    try:
        return await while_connected(request.receive, run())
    except ClientGone:
        gone()
        return Response(status_code=CLIENT_CLOSED)  # nobody reads it; the count of answers does
