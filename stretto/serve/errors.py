"""Errors of the HTTP API, all in OpenAI's shape: {"error": {"message", "type", "param", "code"}}.

A handler raises ApiError before the first byte of its answer; what breaks an answer that has begun is sent as one
`data: {"error": ...}` event by streaming.py.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from stretto.protocol import ENGINE_DEAD, EngineDead, EngineRestarting, RequestError

SHOWN = 200  # most characters of a client's own words that an error repeats
CLIENT_CLOSED = 499  # not a registered status; the de-facto one for a request that its client or an operator withdrew
TYPES = {401: "authentication_error", 403: "permission_error", 408: "timeout_error", 409: "conflict_error",
         429: "rate_limit_error", 500: "server_error", 503: "overloaded_error"}
ANTHROPIC_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error",
                   408: "timeout_error",
                   413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error"}

log = logging.getLogger(__name__)


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    error: ErrorDetail


class ApiError(Exception):
    """Becomes a response. `type` follows from the status: invalid_request_error for the other 4xx."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None,
                 headers: dict[str, str] | None = None):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = headers or {}

    @property
    def body(self) -> bytes:
        kind = TYPES.get(self.status, "invalid_request_error")
        return msgspec.json.encode(ErrorBody(ErrorDetail(self.message, kind, self.param, self.code)))

    def anthropic(self) -> dict[str, Any]:
        """The same in the shape of the Messages API."""
        kind = ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.message, "param": self.param,
                                           "code": self.code}, "request_id": None}

    def response(self, path: str = "", request_id: str | None = None) -> Response:
        """As the API of the path would have it."""
        body = self.body
        if path.startswith("/v1/messages"):
            body = msgspec.json.encode(self.anthropic() | {"request_id": request_id})
        return Response(body, self.status, self.headers, media_type="application/json")


class JSONResponse(Response):
    """A response body that is ready JSON, or anything that msgspec encodes."""

    media_type = "application/json"

    def render(self, content) -> bytes:
        return content if isinstance(content, bytes) else msgspec.json.encode(content)


REFUSALS = {"session_busy": 409, "session_closing": 409, "session_exists": 409, "session_not_found": 404,
            "session_turn_not_found": 404, "model_not_found": 404, "too_many_sessions": 429,
            "queue_full": 429,
            "logit_processor_failed": 500}  # codes of RequestError that are not 400


def refused(error: RequestError, message: str | None = None, param: str | None = None) -> ApiError:
    """What a client is told of a request that cannot be served as asked."""
    status = REFUSALS.get(error.code or "", 400)
    return ApiError(status, message or str(error), param=param or error.param, code=error.code,
                    headers={"Retry-After": "1"} if status == 429 else None)


def bad_request(message: str, param: str | None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def unsupported(param: str, reason: str) -> ApiError:
    return bad_request(f"{param} is not supported: {reason}", param, "unsupported_parameter")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence with the nearest known name, or nothing."""
    return _hint(_nearest(name, known))


def _nearest(name: str, known: Iterable[str]) -> str | None:
    return next(iter(difflib.get_close_matches(name[:SHOWN], list(known), n=1, cutoff=0.62)), None)


def _hint(near: str | None) -> str:
    return f" Did you mean {near!r}?" if near else ""


def model_not_found(name: str, served: Iterable[str]) -> ApiError:
    served = list(served)
    return ApiError(404, f"the model {name[:SHOWN]!r} is not served here.{did_you_mean(name, served)} Served: "
                    f"{', '.join(served)}", param="model", code="model_not_found")


def from_exception(error: Exception) -> ApiError:
    """What a client is told of an exception. Client mistakes are 400; an engine that has stopped is 503."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return refused(error)
    if isinstance(error, EngineRestarting):
        return ApiError(503, f"the engine has stopped and is being started again: {error}", code="engine_restarting",
                        headers={"Retry-After": "5"})
    if isinstance(error, EngineDead):
        return ApiError(503, f"the engine has stopped: {error}", code=ENGINE_DEAD, headers={"Retry-After": "30"})
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail), headers=dict(error.headers or {}))
    log.error("unexpected error while serving a request", exc_info=error)
    return ApiError(500, f"internal error ({type(error).__name__}); the server's log has the details",
                    code="internal_error")


def place(location: tuple[int | str, ...]) -> str:
    """A pydantic location in JSON's own words: ("messages", 0, "role") is messages[0].role."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def from_validation(error: ValidationError) -> ApiError:
    """The first complaint of pydantic, which names the field and what was wrong with it."""
    errors = error.errors(include_url=False, include_context=False)
    first = errors[0]
    param = place(first["loc"])
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    text = first["msg"].removeprefix("Value error, ")
    given = first["input"]
    if first["type"] not in ("missing", "value_error") and isinstance(given, (str, int, float)):
        text += f"; it is {msgspec.json.encode(given[:64] if isinstance(given, str) else given).decode()}"
    message = f"{param}: {text}{more}" if param else f"{text}{more}"
    return bad_request(message, param or None, "missing_required_parameter" if first["type"] == "missing" else None)


def renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """The error in the words of another API: a field's name, also at the head of a path, becomes that API's."""
    if error.param is None:
        return error
    head = min((error.param.split(mark)[0] for mark in ".["), key=len)
    if head in names:
        error.param = names[head] + error.param[len(head):]
        as_field = rf"\b{re.escape(head)}\b(?=[\[.:]| is\b| names\b)"  # elsewhere the word may be meant as a word
        error.message = re.sub(as_field, lambda _: names[head], error.message, count=1)
    return error


@contextlib.contextmanager
def in_words_of(names: Mapping[str, str]) -> Iterator[None]:
    """Whatever ApiError comes out of it is `renamed`."""
    try:
        yield
    except ApiError as e:
        raise renamed(e, names) from e


def install(app: FastAPI) -> None:
    """Makes every error of the app OpenAI-shaped."""

    async def handle(request: Request, error: Exception) -> Response:
        return from_exception(error).response(request.url.path, request.scope.get("state", {}).get("request_id"))

    async def no_route(request: Request, error: Exception) -> Response:
        path = request.url.path
        hint = _instead(path) or _near_path(path, known_paths(app))
        return ApiError(404, f"there is no {path[:SHOWN]}.{hint}", code="unknown_url").response()

    async def wrong_method(request: Request, error: Exception) -> Response:
        allowed = dict(getattr(error, "headers", None) or {})
        return ApiError(405, f"{request.url.path} does not answer {request.method}; it answers "
                        f"{allowed.get('Allow', 'another method')}", code="method_not_allowed",
                        headers=allowed).response()

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        param = place(tuple(first["loc"][1:]))
        return bad_request(f"{param}: {first['msg']}", param).response()

    async def gone(request: Request, error: Exception) -> Response:
        log.debug("%s %s: the client went away inside its body", request.method, request.url.path)
        return Response(status_code=CLIENT_CLOSED)  # nobody reads it; the count of answers does

    app.add_exception_handler(404, no_route)
    app.add_exception_handler(405, wrong_method)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(ClientDisconnect, gone)
    for kind in (ApiError, RequestError, EngineDead, HTTPException, Exception):
        app.add_exception_handler(kind, handle)


# Paths of servers that this one is not: the beginning -> what there is instead.
_TEXT_ONLY = "This server reads and writes text only."
_ELSEWHERE = {"/api/": "This server does not speak Ollama's API; OpenAI's is at /v1: give that as the base URL.",
              "/v1/audio": _TEXT_ONLY, "/v1/images": _TEXT_ONLY, "/v1/videos": _TEXT_ONLY, "/v1/realtime": _TEXT_ONLY,
              "/v1/files": "Files of requests are answered by `stretto run-batch`.",
              "/v1/batches": "Files of requests are answered by `stretto run-batch`.",
              "/v1/conversations": "Conversations go on by previous_response_id, or as sessions (/v1/sessions).",
              "/v1/assistants": "Assistants are not served; /v1/responses is.",
              "/v1/threads": "Assistants are not served; /v1/responses is.",
              "/v1/moderations": "There is no moderation.", "/v1/fine_tuning": "Models are not trained here."}


def _instead(path: str) -> str | None:
    return next((f" {words}" for start, words in _ELSEWHERE.items() if path.startswith(start)), None)


def _near_path(path: str, known: Iterable[str]) -> str:
    """As did_you_mean, by what follows the /v1 that most paths begin with: it makes no two of them alike."""
    paths = {place.removeprefix("/v1").strip("/"): place for place in known}
    return _hint(paths.get(_nearest(path.removeprefix("/v1").strip("/"), paths) or ""))


def known_paths(app: FastAPI) -> list[str]:
    return list(app.openapi()["paths"])
