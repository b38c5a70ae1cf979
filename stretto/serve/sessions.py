"""Sessions over HTTP: whose turn a call is, and the routes that open, show, branch, rewind and close sessions.

    named in the body      session_id, session, session_params (SGLang's): the turn is the session's, or it is refused
    named by a header      of gateways, routers and agents, or by prompt_cache_key: a hint. The history comes whole with
                           every call; one that overlaps another of its session runs beside it, without the session

Without an id there is no session; prefixes are shared all the same.
"""

from __future__ import annotations

import math
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from stretto.protocol import (
    BranchSession,
    CloseSession,
    GetSession,
    OpenSession,
    RewindSession,
    SessionInfo,
    SessionTurn,
)
from stretto.serve.bodies import described, read_body
from stretto.serve.errors import JSONResponse, bad_request
from stretto.serve.request_fields import check_fields, ignored_header
from stretto.serve.schemas import (
    ChatRequest,
    CloseSessionBody,
    GenerationBody,
    OpenSessionBody,
    RewindBody,
    SessionBody,
    SessionOptions,
)
from stretto.serve.service import MAX_ID_LENGTH, Generation, Service

HEADERS = ("x-session-id", "x-smg-routing-key", "x-dynamo-session-id", "x-session-affinity", "x-correlation-id",
           "session_id", "x-opencode-session")  # the first that is there counts
FINAL_HEADER = "x-dynamo-session-final"
_CLAUDE = re.compile(r"_session_([0-9a-f-]{36})$")  # the end of Claude Code's metadata.user_id


# --------------------------------------------------------------------------------------------------- whose turn it is
def attach_session(request: Request, generation: Generation, continuation: list[int] | None, bos: int | None) -> None:
    """Makes the call's request a turn of its session, where it names one. Raises ApiError."""
    body, first = generation.body, generation.requests[0]
    sid, named = _sid(request, body)
    if sid is None:
        return
    single = len(generation.requests) == 1 and first.sampling.n == 1
    if not single and not named:
        return
    if not single:
        raise bad_request("a session's turn has one prompt and one answer; branch the session for others",
                          "n" if first.sampling.n > 1 else "prompt")
    turn = _turn(sid, body) if named else SessionTurn(sid=sid, on_busy="beside")
    final = request.headers.get(FINAL_HEADER, "").lower() in ("1", "true")
    turn.final, turn.turn_id = bool(body.session_final) or final, generation.id
    if not body.stream:
        turn.on_disconnect = "rollback"  # the client has received nothing before it has all
    if turn.mode == "append":
        if body.truncate_prompt_tokens is not None:
            raise bad_request("truncate_prompt_tokens cannot be used with an appended turn: the prompt is the session's"
                              " history; use session.offset", "truncate_prompt_tokens")
        if continuation is not None:
            turn.continuation, turn.join = continuation, isinstance(body, ChatRequest)
        elif bos is not None and first.tokens[:1] == [bos]:
            turn.continuation = first.tokens[1:]
    first.session = turn


def appends(body: GenerationBody) -> bool:
    """The body is a turn of a session whose history only the server has."""
    return body.session_params is not None or (body.session is not None and body.session.mode == "append")


def text_continuation(service: Service, body: GenerationBody, prompts: Sequence[str | list[int]]) -> list[int] | None:
    """The ids of a text that is appended to a session's history; None where ids or other texts are."""
    if not appends(body) or len(prompts) != 1 or not isinstance(prompts[0], str):
        return None
    return service.tokenizer.encode_inside(prompts[0])


def chat_continuation(service: Service, body: ChatRequest) -> list[int]:
    """The ids that lead from the end of an answer through the new messages, as the template writes them.

    Rendered behind a made-up exchange and cut where its answer ends: at the end-of-sequence id that closes it. Raises
    ApiError for templates that close answers with none."""
    eos = set(service.info.eos_token_ids)
    opening = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}]
    before = service.reader.tokenizer.apply_chat_template(opening, add_generation_prompt=False)
    closings = sum(i in eos for i in before)
    made_up = ChatRequest.model_validate({"messages": opening}).messages
    ids = service.reader.chat(body.model_copy(update={"messages": [*made_up, *body.messages]}))
    ends = [at for at, i in enumerate(ids) if i in eos]
    if not closings or len(ends) < closings:
        raise bad_request("this model's chat template does not mark where an answer ends, so messages cannot be"
                          " appended to a session: send them all, with session.mode \"tag\"", "session.mode",
                          "unsupported_parameter")
    return ids[ends[closings - 1]:]


def _sid(request: Request, body: GenerationBody) -> tuple[str | None, bool]:
    """(id, whether the body named it)."""
    given = body.session_id
    if given is None and body.session_params is not None:
        given = body.session_params.id
    if given is not None:
        check_session_id(given, "session_id")
        return given, True
    if body.session is not None or body.session_final:
        raise bad_request("session and session_final belong to a session: give its session_id", "session_id",
                          "missing_required_parameter")
    hints = [request.headers.get(name) for name in HEADERS]
    return next((hint for hint in [*hints, _claude(body.metadata), body.prompt_cache_key] if _good(hint)), None), False


def _good(hint: Any) -> bool:
    return isinstance(hint, str) and 0 < len(hint) <= MAX_ID_LENGTH and hint.isascii() and hint.isprintable()


def _claude(metadata: Any) -> str | None:
    """Claude Code's session: the end of metadata.user_id, or a part of the JSON text that newer ones write there."""
    user = metadata.get("user_id") if isinstance(metadata, Mapping) else None
    if not isinstance(user, str):
        return None
    if found := _CLAUDE.search(user):
        return found[1]
    if not user.startswith("{") or len(user) > 1024:
        return None
    try:
        told = msgspec.json.decode(user)
    except (msgspec.DecodeError, RecursionError):
        return None
    return told.get("session_id") if isinstance(told, dict) else None


def check_session_id(sid: str, param: str) -> None:
    if sid in (".", ".."):
        raise bad_request(f"{param} is {sid!r}, which no path can name; take another id", param)
    if not _good(sid):
        raise bad_request(f"{param} must have 1 to {MAX_ID_LENGTH} printable ASCII characters", param)


def _turn(sid: str, body: GenerationBody) -> SessionTurn:
    params = body.session_params
    if params is not None:  # SGLang: always appended, 0 is no offset
        if body.session is not None:
            raise bad_request("session and session_params exclude each other", "session")
        return SessionTurn(sid=sid, mode="append", create=False, after=params.rid, offset=params.offset or None,
                           replace=bool(params.replace), drop_previous_output=bool(params.drop_previous_output))
    o = body.session or SessionOptions()
    turn = SessionTurn(sid=sid, mode=o.mode or "tag", create=o.create is not False, branch_from=o.branch_from,
                       after=o.after, offset=o.offset, replace=bool(o.replace),
                       drop_previous_output=bool(o.drop_previous_output), on_busy=o.on_busy or "wait",
                       on_disconnect=o.on_disconnect or "rollback")
    if turn.mode == "tag":
        for name in ("after", "offset", "replace", "drop_previous_output"):
            if getattr(o, name):
                raise bad_request(f"session.{name} needs session.mode \"append\": in mode \"tag\" the prompt is the"
                                  " whole history", f"session.{name}")
    return turn


# ------------------------------------------------------------------------------------------------------------- routes
def sessions(service: Service) -> APIRouter:
    router = APIRouter(tags=["sessions"])

    @router.post("/v1/sessions", summary="Open a session, or branch one", openapi_extra=described(SessionBody))
    async def open_session(request: Request) -> Response:
        body = await read_body(service, request, SessionBody)
        ignored = check_fields(body, service.settings.strict_requests)
        sid = body.session_id if body.session_id is not None else f"session-{uuid.uuid4().hex}"
        check_session_id(sid, "session_id")
        if body.branch_from is None:
            if body.offset is not None:
                raise bad_request("offset is where a branch begins: give branch_from", "offset")
            service.check_model(body.model)
            found = await service.engine.manage(OpenSession(sid=sid, cache_salt=body.cache_salt or "", ttl=body.ttl,
                                                            capacity=body.capacity,
                                                            adapter=service.adapter(body.model)))
        else:
            found = await service.engine.manage(BranchSession(body.branch_from, sid, body.offset))
        return JSONResponse(shown(found[0]), headers=ignored_header(ignored))

    @router.get("/v1/sessions", summary="Open sessions, most recently used first")
    async def listed() -> Response:
        found = await service.engine.manage(GetSession())
        return JSONResponse({"object": "list", "data": [shown(info) for info in found]})

    @router.get("/v1/sessions/{id:path}", summary="One session")
    async def get(id: str) -> Response:
        return JSONResponse(shown((await service.engine.manage(GetSession(id)))[0]))

    @router.post("/v1/sessions/{id}/rewind", summary="Cut a session's history", openapi_extra=described(RewindBody))
    async def rewind(id: str, request: Request) -> Response:
        body = await read_body(service, request, RewindBody)
        check_fields(body, service.settings.strict_requests)
        return JSONResponse(shown((await service.engine.manage(RewindSession(id, body.offset)))[0]))

    @router.delete("/v1/sessions/{id:path}", summary="Close a session when its live turn has ended; with abort, now")
    async def delete(id: str, abort: bool = False) -> Response:
        info = (await service.engine.manage(CloseSession(id, abort)))[0]
        return JSONResponse({"id": id, "object": "session", "deleted": abort or info.state == "idle"})

    _like_sglang(router, service)
    return router


def _like_sglang(router: APIRouter, service: Service) -> None:
    """The routes of SGLang's clients. `streaming` changes nothing: every session appends."""

    @router.get("/open_session", include_in_schema=False)
    @router.post("/open_session", summary="Open a session; the answer is its id",
                 openapi_extra=described(OpenSessionBody))
    async def open_session(request: Request) -> Response:
        body = await read_body(service, request, OpenSessionBody)
        check_fields(body, service.settings.strict_requests)
        sid = body.session_id or uuid.uuid4().hex
        check_session_id(sid, "session_id")
        # A capacity in characters: a token is at least one, so a history within it in tokens may still be longer.
        await service.engine.manage(OpenSession(sid=sid, ttl=body.timeout, capacity=body.capacity_of_str_len or None))
        return JSONResponse(sid)

    @router.get("/close_session", include_in_schema=False)
    @router.post("/close_session", summary="Close a session", openapi_extra=described(CloseSessionBody))
    async def close_session(request: Request) -> Response:
        body = await read_body(service, request, CloseSessionBody)
        check_fields(body, service.settings.strict_requests)
        await service.engine.manage(CloseSession(body.session_id))
        return Response(status_code=200)


def shown(info: SessionInfo) -> dict[str, Any]:
    """As JSON; a time without end is null."""
    fields = {"object": "session", **msgspec.structs.asdict(info)}
    fields["ttl"] = info.ttl if math.isfinite(info.ttl) else None
    return fields
