"""The OpenAPI document: what FastAPI knows of the routes, with the schemas of requests, answers and errors.

Handlers read bodies and write answers themselves (bodies.py says why), so both are described here: a request's model
stands at its route (`described`), its answer in ANSWERS.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from stretto.serve import answer_schemas as a
from stretto.serve import schemas
from stretto.serve.chat import ChatChunk, ChatCompletion
from stretto.serve.completions import Completion
from stretto.serve.errors import ErrorBody
from stretto.serve.middleware import ADMIN_PATHS, OPEN_PATHS

_REF = "#/components/schemas/{name}"
_KEYS = {"bearer": {"type": "http", "scheme": "bearer"},
         "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"}}


@dataclass(frozen=True)
class Answer:
    """`whole`: of a 200. `event`: of a stream, where there is one. `media`: of answers that are no JSON."""

    whole: Any
    event: Any = None
    media: str = "application/json"


_LISTED = list[a.Generated] | a.Generated
ANSWERS: Mapping[str, Answer] = {
    "POST /v1/chat/completions": Answer(ChatCompletion, ChatChunk),
    "POST /v1/completions": Answer(Completion, Completion),
    "POST /v1/responses": Answer(a.ResponseObject, a.ResponseEvent),
    "GET /v1/responses/{id}": Answer(a.ResponseObject),
    "DELETE /v1/responses/{id}": Answer(a.Deleted),
    "GET /v1/responses/{id}/input_items": Answer(a.ResponseItems),
    "POST /v1/responses/{id}/cancel": Answer(a.ResponseState),
    "POST /v1/messages": Answer(a.MessageObject, a.MessageEvent),
    "POST /v1/messages/count_tokens": Answer(a.InputTokens),
    "POST /generate": Answer(_LISTED, a.Generated),
    "POST /v1/embeddings": Answer(a.EmbeddingList),
    "POST /encode": Answer(list[a.Encoded] | a.Encoded),
    **dict.fromkeys(("POST /v1/score", "POST /score"), Answer(a.ScoreList)),
    **dict.fromkeys(("POST /v1/rerank", "POST /rerank"), Answer(a.Ranking)),
    **dict.fromkeys(("GET /ping", "GET /readyz", "GET /health", "GET /livez", "GET /startupz", "GET /health_generate"),
                    Answer(a.Status)),
    "GET /metrics": Answer(str, media="text/plain"),
    "GET /v1/models": Answer(a.ModelList),
    "GET /v1/models/{model}": Answer(a.ModelCard),
    "GET /version": Answer(a.Version),
    **dict.fromkeys(("GET /server_info", "GET /get_server_info"), Answer(a.ServerInfo)),
    **dict.fromkeys(("GET /model_info", "GET /get_model_info"), Answer(a.ModelInfo)),
    "GET /tokenizer_info": Answer(a.TokenizerInfo),
    "POST /tokenize": Answer(a.Tokens),
    "POST /detokenize": Answer(a.PromptText),
    "POST /apply-template": Answer(a.PromptText),
    "POST /abort_request": Answer(a.AbortedIds),
    "DELETE /v1/requests/{id}": Answer(a.Deleted),
    "GET /v1/loads": Answer(a.Loads),
    "GET /get_load": Answer(list[a.Load]),
    "POST /flush_cache": Answer(a.Flushed),
    **dict.fromkeys(("POST /v1/load_lora_adapter", "POST /load_lora_adapter", "POST /v1/unload_lora_adapter",
                     "POST /unload_lora_adapter"), Answer(a.LoadedAdapters)),
    "POST /start_profile": Answer(a.Recording),
    "POST /stop_profile": Answer(a.ChromeTrace),
    "GET /v1/sessions": Answer(a.SessionList),
    "POST /v1/sessions": Answer(a.SessionObject),
    "GET /v1/sessions/{id}": Answer(a.SessionObject),
    "DELETE /v1/sessions/{id}": Answer(a.Deleted),
    "POST /v1/sessions/{id}/rewind": Answer(a.SessionObject),
    "POST /open_session": Answer(str),
    "POST /close_session": Answer(None, media=""),
}


def complete_openapi(app: FastAPI) -> Callable[[], dict[str, Any]]:
    """A replacement for `app.openapi`."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            parts = document.setdefault("components", {})
            parts["schemas"], shapes = _schemas()
            parts["securitySchemes"] = _KEYS
            for path, operations in document["paths"].items():
                for method, operation in operations.items():
                    _complete(operation, path, f"{method.upper()} {path}", shapes)
            app.openapi_schema = document
        return app.openapi_schema

    return openapi


def _schemas() -> tuple[dict[str, Any], dict[Any, dict[str, Any]]]:
    """(components by name, schema of each type in ANSWERS)."""
    types = [ErrorBody, a.AnthropicError]
    for answer in ANSWERS.values():
        types += [kind for kind in (answer.whole, answer.event) if kind is not None and kind not in types]
    found, components = msgspec.json.schema_components(types, ref_template=_REF)
    for model in vars(schemas).values():
        if isinstance(model, type) and issubclass(model, schemas.Body):
            schema = model.model_json_schema(ref_template=_REF.replace("{name}", "{model}"))
            components |= schema.pop("$defs", {})
            components[model.__name__] = schema
    return components, dict(zip(types, found, strict=True))


def _complete(operation: dict[str, Any], path: str, name: str, shapes: Mapping[Any, dict[str, Any]]) -> None:
    answer = ANSWERS.get(name, Answer(None))  # tests see to it that every route has one
    content: dict[str, Any] = {}
    if answer.whole is not None:
        content[answer.media] = {"schema": shapes[answer.whole]}
    if answer.event is not None:
        content["text/event-stream"] = {"schema": shapes[answer.event]}
    error = shapes[a.AnthropicError if path.startswith("/v1/messages") else ErrorBody]
    told = {"content": {"application/json": {"schema": error}}}
    operation["responses"] = {
        "200": {"description": "The answer; its events, each as data, where a stream was asked for"
                if answer.event is not None else "The answer"} | ({"content": content} if content else {}),
        "4XX": {"description": "The request cannot be served as asked; `param` names the field"} | told,
        "5XX": {"description": "The server cannot answer, or not now: see Retry-After"} | told}
    if path not in OPEN_PATHS:
        operation["security"] = [{"bearer": []}, {"x-api-key": []}, *([] if path in ADMIN_PATHS else [{}])]
