"""The HTTP API as one FastAPI app over any AsyncEngine."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import Response

from stretto import __version__
from stretto.protocol import AsyncEngine
from stretto.serve import errors, operations
from stretto.serve.bodies import described, openapi_with, read_body
from stretto.serve.chat import chat_completion, chat_events
from stretto.serve.completions import completion, completion_events
from stretto.serve.errors import CLIENT_CLOSED, JSONResponse, bad_request
from stretto.serve.interfaces import ServeTokenizer
from stretto.serve.middleware import AnswerCounts, ApiKeys, RequestIds
from stretto.serve.request_fields import check_fields, ignored_header
from stretto.serve.schemas import (
    AbortBody,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationBody,
    TokenizeRequest,
)
from stretto.serve.service import Generation, Service
from stretto.serve.settings import ServeSettings
from stretto.serve.streaming import ClientGone, EventStream, while_connected


def build_app(engine: AsyncEngine, tokenizer: ServeTokenizer, settings: ServeSettings) -> FastAPI:
    """The app of a started engine; `app.state.service` is its Service. The engine is closed by whoever started it."""
    service = Service(engine, tokenizer, settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI):
        yield
        service.close()

    app = FastAPI(title="Stretto", version=__version__, root_path=settings.root_path, lifespan=lifespan,
                  description="A language-model serving engine with an OpenAI-compatible API.")
    app.state.service = service
    errors.install(app)
    for router in (inference(service), operations.probes(service), operations.facts(service),
                   operations.tokens(service), operations.aborts(service)):
        app.include_router(router)
    app.openapi = openapi_with(  # type: ignore[method-assign]
        app, [ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest, AbortBody])
    if settings.api_keys:
        app.add_middleware(ApiKeys, keys=settings.api_keys)
    app.add_middleware(AnswerCounts, metrics=service.metrics)
    app.add_middleware(RequestIds)  # outermost: a refusal has its id as well
    return app


def inference(service: Service) -> APIRouter:
    router = APIRouter(tags=["inference"])

    @router.post("/v1/chat/completions", openapi_extra=described(ChatRequest))
    async def chat(request: Request) -> Response:
        arrival = time.monotonic()
        body, ignored = await _accept(service, request, ChatRequest)

        async def prepare() -> Generation:
            ids = await service.in_pool(service.reader.chat, body)
            return _generation(service, request, body, [ids], ignored, arrival)

        return await _answer(service, request, prepare, chat_completion, chat_events)

    @router.post("/v1/completions", openapi_extra=described(CompletionRequest))
    async def complete(request: Request) -> Response:
        arrival = time.monotonic()
        body, ignored = await _accept(service, request, CompletionRequest)
        _check_completion(service, body)
        prompts = service.reader.prompts(body.prompt, body.add_special_tokens is not False)
        texts = [prompt if isinstance(prompt, str) else None for prompt in prompts]

        async def prepare() -> Generation:
            ids = await service.in_pool(_encode_all, service, prompts, body.add_special_tokens is not False)
            return _generation(service, request, body, ids, ignored, arrival)

        async def whole(service: Service, generation: Generation):
            return await completion(service, generation, texts)

        def events(service: Service, generation: Generation) -> AsyncGenerator[bytes, None]:
            return completion_events(service, generation, texts)

        return await _answer(service, request, prepare, whole, events)

    return router


async def _accept(service: Service, request: Request, model: type[Any]) -> tuple[Any, list[str]]:
    """The body, and the names of the fields in it that are ignored."""
    service.check_open()
    body = await read_body(service, request, model)
    ignored = check_fields(body, service.settings.strict_requests)
    service.check_model(body.model)
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options is only allowed when stream is true", "stream_options")
    return body, ignored


def _check_completion(service: Service, body: CompletionRequest) -> None:
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise errors.unsupported("best_of", f"it can only equal n, which is {body.n or 1}; all n choices are returned")
    if isinstance(body.prompt, list) and type(body.prompt[0]) is not int:
        limit = service.settings.max_prompts
        if len(body.prompt) > limit:
            raise bad_request(f"{len(body.prompt)} prompts; the limit is {limit} in one call", "prompt")


def _encode_all(service: Service, prompts: list[str | list[int]], special: bool) -> list[list[int]]:
    return [service.reader.encode(prompt, "prompt", special) if isinstance(prompt, str) else prompt
            for prompt in prompts]


def _generation(service: Service, request: Request, body: GenerationBody, prompts: list[list[int]], ignored: list[str],
                arrival: float) -> Generation:
    state = request.scope["state"]
    id = service.choose_id(body, state["request_id"])
    if not state["request_id_given"]:
        state["request_id"] = id
    return Generation(id, body, service.make_requests(id, body, prompts, arrival), ignored)


async def _answer(service: Service, request: Request, prepare: Callable[[], Awaitable[Generation]],
                  whole: Callable[[Service, Generation], Awaitable[Any]],
                  events: Callable[[Service, Generation], AsyncGenerator[bytes, None]]) -> Response:
    """Streamed or whole; a client that goes away ends the work either way."""

    async def run() -> Response:
        generation = await prepare()
        headers = ignored_header(generation.ignored)
        if generation.body.stream:
            return EventStream(events(service, generation), service.settings.ping_interval, headers, gone)
        return JSONResponse(await whole(service, generation), headers=headers)

    def gone() -> None:
        service.metrics.aborts["client_disconnected"] += 1

    try:
        return await while_connected(request.receive, run())
    except ClientGone:
        gone()
        return Response(status_code=CLIENT_CLOSED)  # nobody reads it; the count of answers does
