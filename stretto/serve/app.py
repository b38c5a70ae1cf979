"""The HTTP API as one FastAPI app over any AsyncEngine."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from stretto import __version__
from stretto.protocol import AsyncEngine
from stretto.serve import errors, operations
from stretto.serve.adapters import adapters
from stretto.serve.bodies import described
from stretto.serve.calls import accept, answer, make_generation, prepare_chat
from stretto.serve.chat import chat_completion, chat_events
from stretto.serve.completions import completion, completion_events
from stretto.serve.control import control, traces
from stretto.serve.embeddings import embeddings
from stretto.serve.errors import bad_request
from stretto.serve.interfaces import ServeTokenizer
from stretto.serve.messages import messages
from stretto.serve.middleware import AnswerCounts, ApiKeys, Heads, Origins, RequestIds
from stretto.serve.native import native
from stretto.serve.openapi import complete_openapi
from stretto.serve.page import page
from stretto.serve.responses import responses
from stretto.serve.schemas import ChatRequest, CompletionRequest
from stretto.serve.service import Generation, Service
from stretto.serve.sessions import sessions, text_continuation
from stretto.serve.settings import ServeSettings

READABLE_HEADERS = ["X-Request-Id", "X-Stretto-Ignored", "Retry-After"]  # by pages of other origins


def build_app(engine: AsyncEngine, tokenizer: ServeTokenizer, settings: ServeSettings,
              trace_provider: Any = None) -> FastAPI:
    """The app of a started engine; `app.state.service` is its Service. The engine is closed by whoever started it.
    `trace_provider`: a TracerProvider of OpenTelemetry, closed with the service."""
    service = Service(engine, tokenizer, settings, trace_provider)

    @asynccontextmanager
    async def lifespan(app: FastAPI):
        yield
        service.close()

    app = FastAPI(title="Stretto", version=__version__, root_path=settings.root_path, lifespan=lifespan,
                  docs_url=None, redoc_url=None,  # FastAPI's load their code from elsewhere; page.py has ours
                  description="A language-model serving engine with an OpenAI-compatible API.")
    app.state.service = service
    errors.install(app)
    for router in (inference(service), responses(service), messages(service), native(service), embeddings(service),
                   operations.probes(service), operations.facts(service), operations.tokens(service),
                   operations.aborts(service), control(service), traces(service), sessions(service), adapters(service),
                   page()):
        app.include_router(router)
    app.openapi = complete_openapi(app)  # type: ignore[method-assign]
    if settings.api_keys or settings.admin_keys:
        app.add_middleware(ApiKeys, keys=settings.api_keys, admin_keys=settings.admin_keys)
    app.add_middleware(Origins, allowed=settings.allowed_origins)
    app.add_middleware(AnswerCounts, metrics=service.metrics)
    app.add_middleware(RequestIds)  # outside of them: a refusal has its id as well
    app.add_middleware(Heads)
    if settings.allowed_origins:  # outermost: a browser asks without a key what it may do
        app.add_middleware(CORSMiddleware, allow_origins=settings.allowed_origins, allow_methods=["*"],
                           allow_headers=["*"], expose_headers=READABLE_HEADERS)
    return app


def inference(service: Service) -> APIRouter:
    router = APIRouter(tags=["inference"])

    @router.post("/v1/chat/completions", openapi_extra=described(ChatRequest))
    async def chat(request: Request) -> Response:
        arrival = time.monotonic()
        body, ignored = await accept(service, request, ChatRequest)

        async def prepare() -> Generation:
            return await prepare_chat(service, request, body, ignored, arrival)

        return await answer(service, request, prepare, chat_completion, chat_events)

    @router.post("/v1/completions", openapi_extra=described(CompletionRequest))
    async def complete(request: Request) -> Response:
        arrival = time.monotonic()
        body, ignored = await accept(service, request, CompletionRequest)
        _check_completion(service, body)
        prompts = service.reader.prompts(body.prompt, body.add_special_tokens is not False)
        texts = [prompt if isinstance(prompt, str) else None for prompt in prompts]

        async def prepare() -> Generation:
            ids = await service.in_pool(service.reader.encode_all, prompts, "prompt",
                                        body.add_special_tokens is not False)
            more = await service.in_pool(text_continuation, service, body, prompts)
            return await make_generation(service, request, body, ids, ignored, arrival, more)

        async def whole(service: Service, generation: Generation):
            return await completion(service, generation, texts)

        def events(service: Service, generation: Generation) -> AsyncGenerator[bytes, None]:
            return completion_events(service, generation, texts)

        return await answer(service, request, prepare, whole, events)

    return router


def _check_completion(service: Service, body: CompletionRequest) -> None:
    n = body.n or 1
    best_of = n if body.best_of is None else body.best_of
    if best_of < n:
        raise bad_request(f"best_of is {best_of}, fewer than the {n} choices of n", "best_of")
    if best_of > n and body.stream:
        raise bad_request("best_of chooses when all answers have ended, so it cannot be streamed: leave out stream",
                          "best_of")
    if isinstance(body.prompt, list) and type(body.prompt[0]) is not int:
        limit = service.settings.max_prompts
        if len(body.prompt) > limit:
            raise bad_request(f"{len(body.prompt)} prompts; the limit is {limit} in one call", "prompt")
