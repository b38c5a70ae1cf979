"""Loading and unloading LoRA adapters: vLLM's routes, and SGLang's names for the same.

A loaded adapter is a model to clients: it stands in /v1/models, and a request that names it is answered by it."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from stretto.protocol import LoadAdapter, UnloadAdapter
from stretto.serve.bodies import described, read_body
from stretto.serve.errors import JSONResponse, bad_request
from stretto.serve.request_fields import check_fields, ignored_header
from stretto.serve.schemas import LoadAdapterBody, UnloadAdapterBody
from stretto.serve.service import Service


def adapters(service: Service) -> APIRouter:
    router = APIRouter(tags=["operations"])

    @router.post("/v1/load_lora_adapter", summary="Load a LoRA adapter", openapi_extra=described(LoadAdapterBody))
    @router.post("/load_lora_adapter", summary="The same", openapi_extra=described(LoadAdapterBody))
    async def load(request: Request) -> Response:
        body = await read_body(service, request, LoadAdapterBody)
        ignored = check_fields(body, service.settings.strict_requests)
        if body.lora_name in service.names:
            raise bad_request(f"lora_name {body.lora_name!r} is the name of the model itself", "lora_name")
        await service.engine.manage(LoadAdapter(body.lora_name, body.lora_path))
        service.info.adapters[body.lora_name] = body.lora_path
        return _shown(service, f"the adapter {body.lora_name!r} is loaded", ignored)

    @router.post("/v1/unload_lora_adapter", summary="Unload one; its running requests go on",
                 openapi_extra=described(UnloadAdapterBody))
    @router.post("/unload_lora_adapter", summary="The same", openapi_extra=described(UnloadAdapterBody))
    async def unload(request: Request) -> Response:
        body = await read_body(service, request, UnloadAdapterBody)
        ignored = check_fields(body, service.settings.strict_requests)
        await service.engine.manage(UnloadAdapter(body.lora_name))
        service.info.adapters.pop(body.lora_name, None)
        return _shown(service, f"the adapter {body.lora_name!r} is unloaded", ignored)

    return router


def _shown(service: Service, message: str, ignored: list[str]) -> Response:
    return JSONResponse({"success": True, "message": message, "loaded_adapters": service.info.adapters},
                        headers=ignored_header(ignored))
