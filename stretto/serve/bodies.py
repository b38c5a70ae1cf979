"""Reading request bodies: limits of size and silence, strict JSON, pydantic; how a route names its own for OpenAPI.

FastAPI's own parsing is left aside, for it accepts NaN, turns deep nesting into a 500 and reads bodies of any size.
"""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from pydantic import BaseModel, ValidationError

from stretto.serve.errors import SHOWN, ApiError, bad_request, from_validation
from stretto.serve.schemas import Body
from stretto.serve.service import Service

BodyT = TypeVar("BodyT", bound=Body)
MAX_NESTING = 200  # lists and objects within each other; what is parsed here must be written again, on any thread
PATIENCES = 20  # a body may take so many times the time in which some of it must come
LARGE = 64 * 1024  # bodies from this size on are parsed off the event loop
_JSON_WORDS = {list: "a list", str: "a string", int: "a number", float: "a number", bool: "true or false",
               type(None): "null"}
_COMPONENT = "#/components/schemas/{model}"


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the request body is larger than {limit} bytes, which is this server's limit",
                    code="request_too_large")


def _too_deep() -> ApiError:
    return bad_request(f"the request body is nested too deeply: lists and objects may lie at most {MAX_NESTING} deep"
                       " within each other", None, "invalid_json")


def _check_plain(request: Request) -> None:
    encoding = ", ".join(request.headers.getlist("content-encoding")).strip()
    if encoding.lower() not in ("", "identity"):
        raise ApiError(415, f"the request body has Content-Encoding {encoding[:SHOWN]}; this server reads bodies as"
                       " they are: send it without an encoding", code="unsupported_content_encoding",
                       headers={"Accept-Encoding": "identity"})


def _stalled(patience: float) -> ApiError:
    return ApiError(408, f"the request body is not whole, and none of it has come for {patience:g} s, or it has taken"
                    f" {PATIENCES * patience:g} s: send it again, with a Content-Length that is its length",
                    code="body_timeout", headers={"Connection": "close"})  # the rest is no other request


async def read(request: Request, limit: int, patience: float) -> bytes:
    """The whole body. Raises ApiError 413 as soon as it is known to be larger than `limit` bytes, 415 for one that is
    compressed, 408 when none of it has come for `patience` seconds or it takes PATIENCES times as long,
    ClientDisconnect where its client leaves."""
    _check_plain(request)
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit:
        raise _too_large(limit)
    parts, size, now = [], 0, asyncio.get_running_loop().time
    latest = now() + PATIENCES * patience
    try:
        async with asyncio.timeout(patience) as silence:
            async for part in request.stream():
                silence.reschedule(min(now() + patience, latest))
                size += len(part)
                if size > limit:
                    raise _too_large(limit)
                parts.append(part)
    except TimeoutError:
        raise _stalled(patience) from None
    return b"".join(parts)


async def _read(service: Service, request: Request) -> bytes:
    return await read(request, service.settings.max_body_bytes, service.settings.body_timeout)


def parse(model: type[BodyT], raw: bytes) -> BodyT:
    """Raises ApiError 400, naming the field where there is one."""
    try:
        data = msgspec.json.decode(raw)
    except RecursionError:
        raise _too_deep() from None
    except (msgspec.MsgspecError, ValueError) as e:
        raise bad_request(f"the request body is not valid JSON: {e}", None, "invalid_json") from None
    if not _shallow(raw, data):
        raise _too_deep()
    if not isinstance(data, dict):
        raise bad_request(f"the request body must be a JSON object, not {_JSON_WORDS[type(data)]}", None,
                          "invalid_json")
    try:
        return model.model_validate(data)
    except ValidationError as e:
        raise from_validation(e) from None


def _shallow(raw: bytes, data: Any) -> bool:
    """Nothing in `data` lies deeper than MAX_NESTING. Level by level, so that no stack grows with the depth."""
    if raw.count(b"[") + raw.count(b"{") <= MAX_NESTING:
        return True
    level = [data] if isinstance(data, (list, dict)) else []
    for _ in range(MAX_NESTING):
        level = [value for container in level
                 for value in (container.values() if isinstance(container, dict) else container)
                 if isinstance(value, (list, dict))]
    return not level


async def read_body(service: Service, request: Request, model: type[BodyT]) -> BodyT:
    raw = await _read(service, request)
    return await service.in_pool(parse, model, raw) if len(raw) >= LARGE else parse(model, raw)


async def read_optional_body(service: Service, request: Request, model: type[BodyT]) -> BodyT:
    """As read_body; no body at all is an empty object."""
    raw = await _read(service, request)
    return parse(model, raw or b"{}")


def described(model: type[BaseModel]) -> dict[str, Any]:
    """The `openapi_extra` of a route whose handler reads `model` by itself."""
    schema = {"$ref": _COMPONENT.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
