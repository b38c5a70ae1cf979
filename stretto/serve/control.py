"""Routes of gateways and operators: load, the model's facts, a probe that generates, the cache, the step trace.

Where an admin key is set, what changes the server (`ADMIN_PATHS`, and aborting everything) needs that key.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from stretto import __version__
from stretto.params import SamplingParams
from stretto.protocol import FlushCache
from stretto.protocol import Request as EngineRequest
from stretto.serve.bodies import described, read_optional_body
from stretto.serve.errors import ApiError, JSONResponse
from stretto.serve.schemas import TraceBody
from stretto.serve.service import Service
from stretto.serve.trace import chrome_trace


def control(service: Service) -> APIRouter:
    router = APIRouter(tags=["operations"])

    @router.get("/v1/loads", summary="What runs and waits, and how full the KV cache is")
    @router.get("/get_load", summary="The same, one entry a replica")
    async def loads(request: Request) -> Response:
        await service.refresh_stats()
        load = _load(service)
        if request.url.path == "/get_load":
            return JSONResponse([load])
        return JSONResponse({"timestamp": datetime.now(UTC).isoformat(), "version": __version__, "dp_rank_count": 1,
                             "loads": [load], "aggregate": {
                                 "total_running_reqs": load["num_running_reqs"],
                                 "total_waiting_reqs": load["num_waiting_reqs"],
                                 "total_reqs": load["num_total_reqs"], "avg_token_usage": load["token_usage"]}})

    @router.get("/model_info")
    @router.get("/get_model_info")
    async def model_info() -> Response:
        info = service.info
        return JSONResponse({
            "model_path": info.model_name, "tokenizer_path": info.model_name, "is_generation": True,
            "served_model_name": service.names[0], "max_context_length": info.max_model_len,
            "max_total_num_tokens": info.kv_tokens, "max_running_requests": info.max_num_seqs,
            "vocab_size": info.vocab_size, "eos_token_id": info.eos_token_ids,
            "preferred_sampling_params": info.sampling_defaults or None, "weight_version": "default"})

    @router.get("/health_generate", summary="One token is generated, in bounded time")
    async def health_generate() -> Response:
        service.check_open()
        started = time.monotonic()
        timeout = service.settings.generation_probe_timeout
        try:
            async with asyncio.timeout(timeout):
                await _one_token(service)
        except TimeoutError:
            raise ApiError(503, f"no token came within {timeout:g} s", code="engine_slow") from None
        return JSONResponse({"status": "ok", "seconds": time.monotonic() - started})

    @router.post("/flush_cache", summary="Forget every shared page that nothing uses")
    async def flush_cache() -> Response:
        await service.engine.manage(FlushCache())
        return JSONResponse({"success": True, "message": "the prefix cache is empty but for what runs"})

    return router


def traces(service: Service) -> APIRouter:
    """A trace of steps, for ui.perfetto.dev or chrome://tracing."""
    router = APIRouter(tags=["operations"])

    @router.post("/start_profile", summary="Record steps from now on", openapi_extra=described(TraceBody))
    async def start_profile(request: Request) -> Response:
        body = await read_optional_body(service, request, TraceBody)
        steps = body.num_steps if body.num_steps is not None else service.settings.trace_steps
        await service.engine.start_trace(min(steps, service.settings.trace_steps))
        return JSONResponse({"recording": True, "num_steps": min(steps, service.settings.trace_steps)})

    @router.post("/stop_profile", summary="The steps recorded since, as a Chrome trace")
    async def stop_profile() -> Response:
        records = await service.engine.stop_trace()
        return JSONResponse(await service.in_pool(chrome_trace, records, service.names[0]),
                            headers={"Content-Disposition": 'attachment; filename="stretto-steps.json"'})

    return router


async def _one_token(service: Service) -> None:
    probe = EngineRequest(rid=f"health-{uuid.uuid4().hex}", tokens=[service.info.eos_token_ids[0]
                          if service.info.eos_token_ids else 0], want_text=False, priority=-(2**31),
                          sampling=SamplingParams(temperature=0.0, max_tokens=1), arrival=time.monotonic())
    async with contextlib.aclosing(service.engine.generate(probe)) as outputs:  # type: ignore[type-var]
        async for output in outputs:
            if output.finish_reason == "error":
                raise ApiError(503, f"the engine failed on a probe: {output.error}", code="engine_error")


def _load(service: Service) -> dict[str, Any]:
    """SGLang's names, which routers read."""
    snapshot = service.metrics.snapshot
    gauges, counters, info = snapshot.gauges, snapshot.counters, service.info
    running, waiting = int(gauges.get("running", 0)), int(gauges.get("waiting", 0))
    usage, prompt = gauges.get("kv_usage", 0.0), counters.get("prompt_tokens", 0.0)
    drafted = counters.get("drafted", 0.0)
    return {
        "dp_rank": 0, "timestamp": time.time(), "num_running_reqs": running, "num_waiting_reqs": waiting,
        "num_total_reqs": running + waiting, "num_reqs": running + waiting,
        "num_used_tokens": round(usage * info.kv_tokens), "num_tokens": round(usage * info.kv_tokens),
        "max_total_num_tokens": info.kv_tokens, "token_usage": usage, "max_running_requests": info.max_num_seqs,
        "utilization": min(1.0, running / info.max_num_seqs),
        "cache_hit_rate": counters.get("cached_tokens", 0.0) / prompt if prompt else 0.0,
        "spec_accept_rate": counters.get("accepted", 0.0) / drafted if drafted else 0.0,
        "live_requests": service.live_calls, "num_retracted_reqs": int(counters.get("retractions", 0))}
