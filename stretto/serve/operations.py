"""Routes for operators and tools: probes, metrics, what is served, tokens, aborts."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from stretto import __version__
from stretto.serve.bodies import described, read_body
from stretto.serve.errors import ApiError, JSONResponse, bad_request, model_not_found
from stretto.serve.metrics import CONTENT_TYPE
from stretto.serve.middleware import admin_only
from stretto.serve.request_fields import check_fields, ignored_header
from stretto.serve.schemas import AbortBody, ChatBody, DetokenizeRequest, TokenizeRequest
from stretto.serve.service import Service

_CHAT_FIELDS = ("messages", "add_generation_prompt", "continue_final_message", "chat_template_kwargs",
                "reasoning_effort", "tools")


def probes(service: Service) -> APIRouter:
    """Started, alive, ready. None of them generates."""
    router = APIRouter(tags=["probes"])

    @router.get("/health", summary="Ready")
    @router.get("/readyz", summary="Ready")
    @router.get("/ping", summary="Ready")
    async def ready() -> Response:
        service.check_open()
        return await alive()

    @router.get("/livez", summary="The engine's loop makes progress")
    async def alive() -> Response:
        if not await service.engine.healthy():
            raise ApiError(503, "the engine makes no progress", code="engine_dead")
        return JSONResponse({"status": "ok"})

    @router.get("/startupz", summary="The model is loaded")
    async def started() -> Response:
        return JSONResponse({"status": "ok"})

    @router.get("/metrics", summary="Prometheus metrics")
    async def metrics() -> Response:
        await service.refresh_stats()
        return Response(service.metrics.render(), media_type=CONTENT_TYPE)

    return router


def facts(service: Service) -> APIRouter:
    """What is served, and how."""
    router = APIRouter(tags=["information"])

    def cards() -> dict[str, dict[str, Any]]:
        """Names of the model, then of its LoRA adapters."""
        usual = {"object": "model", "created": service.started, "owned_by": "stretto", "parent": None,
                 "root": service.info.model_name, "max_model_len": service.info.max_model_len}
        own = {name: {"id": name, **usual} for name in service.names}
        return own | {name: {"id": name, **usual, "parent": service.names[0], "root": path}
                      for name, path in service.info.adapters.items()}

    @router.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": list(cards().values())})

    @router.get("/v1/models/{model:path}")
    async def model(model: str) -> Response:
        found = cards()
        if model not in found:
            raise model_not_found(model, found)
        return JSONResponse(found[model])

    @router.get("/version")
    async def version() -> Response:
        return JSONResponse({"version": __version__})

    @router.get("/get_server_info")
    @router.get("/server_info")
    async def server_info() -> Response:
        info, settings = service.info, service.settings
        return JSONResponse({
            **info.server_info, "version": __version__, "model_name": info.model_name,
            "served_model_names": service.names, "vocab_size": info.vocab_size, "max_model_len": info.max_model_len,
            "max_num_seqs": info.max_num_seqs, "kv_tokens": info.kv_tokens, "eos_token_ids": info.eos_token_ids,
            "speculation_tokens": info.speculation_tokens, "hidden_size": info.hidden_size, "pooling": info.pooling,
            "default_sampling": info.sampling_defaults, "strict_requests": settings.strict_requests,
            "max_body_bytes": settings.max_body_bytes, "max_live_requests": settings.max_live_requests,
            "api_key_required": bool(settings.api_keys)})

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        tokenizer = service.tokenizer

        def text(token: int | None) -> str | None:
            return None if token is None else service.token_text(token)

        return JSONResponse({"tokenizer_class": type(tokenizer).__name__, "vocab_size": service.info.vocab_size,
                             "bos_token": text(tokenizer.bos_token_id), "eos_token": text(tokenizer.eos_token_id),
                             "pad_token": text(tokenizer.pad_token_id), "chat_template": tokenizer.chat_template})

    return router


def tokens(service: Service) -> APIRouter:
    """Text to token ids and back, exactly as the inference routes do it."""
    router = APIRouter(tags=["tokens"])

    @router.post("/tokenize", openapi_extra=described(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        body = await read_body(service, request, TokenizeRequest)
        ignored = check_fields(body, service.settings.strict_requests)
        service.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("give either prompt or messages", "prompt")
        if body.prompt is not None:
            special = body.add_special_tokens is not False
            ids = await service.in_pool(service.reader.encode, body.prompt, "prompt", special)
        else:
            ids = await service.in_pool(service.reader.chat, _as_chat(body))
        names = [service.token_text(i) for i in ids] if body.return_token_strs else None
        return JSONResponse({"count": len(ids), "max_model_len": service.info.max_model_len, "tokens": ids,
                             "token_strs": names}, headers=ignored_header(ignored))

    @router.post("/apply-template", summary="Messages as the text of their prompt",
                 openapi_extra=described(TokenizeRequest))
    async def apply_template(request: Request) -> Response:
        body = await read_body(service, request, TokenizeRequest)
        ignored = check_fields(body, service.settings.strict_requests)
        service.check_model(body.model)
        if body.messages is None or body.prompt is not None:
            raise bad_request("give messages, as in a chat completion", "messages")
        ids = await service.in_pool(service.reader.chat, _as_chat(body))
        text = await service.in_pool(service.tokenizer.decode, ids, False)
        return JSONResponse({"prompt": text}, headers=ignored_header(ignored))

    @router.post("/detokenize", openapi_extra=described(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        body = await read_body(service, request, DetokenizeRequest)
        ignored = check_fields(body, service.settings.strict_requests)
        service.check_model(body.model)
        bad = next((i for i in body.tokens if not 0 <= i < service.info.vocab_size), None)
        if bad is not None:
            raise bad_request(f"token id {bad} is not in the vocabulary (0..{service.info.vocab_size - 1})", "tokens")
        text = await service.in_pool(service.tokenizer.decode, body.tokens, False)
        return JSONResponse({"prompt": text}, headers=ignored_header(ignored))

    return router


def _as_chat(body: TokenizeRequest) -> ChatBody:
    return ChatBody.model_construct(**{name: getattr(body, name) for name in _CHAT_FIELDS})


def aborts(service: Service) -> APIRouter:
    """Withdraw what runs or waits. An answer means that the engine has released it and that its id is free."""
    router = APIRouter(tags=["operations"])

    @router.post("/abort_request", openapi_extra=described(AbortBody))
    async def abort_request(request: Request) -> Response:
        body = await read_body(service, request, AbortBody)
        check_fields(body, service.settings.strict_requests)
        id = body.rid if body.rid is not None else body.request_id
        if body.abort_all or body.rid_prefix:  # short prefixes reach everybody, too
            if not request.scope["state"].get("is_admin", True):
                raise admin_only("abort_all" if body.abort_all else "rid_prefix")
            return JSONResponse({"aborted": await service.abort_all("" if body.abort_all else body.rid_prefix or "")})
        if id is None:
            raise bad_request("give rid, rid_prefix, or abort_all: true", "rid")
        return JSONResponse({"aborted": [id] if await service.abort(id) else []})

    @router.delete("/v1/requests/{id:path}")
    async def delete(id: str) -> Response:
        if not await service.abort(id):
            raise ApiError(404, f"no live request has the id {id!r}.{service.find_hint(id)}", param="id",
                           code="request_not_found")
        return JSONResponse({"id": id, "object": "request", "deleted": True})

    return router
