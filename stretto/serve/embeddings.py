"""POST /v1/embeddings, and what follows from it: /v1/score and /v1/rerank by cosine.

A text becomes one prompt-only request, which runs in ordinary steps beside whatever else does; its vector is the
hidden state of its last token, or the mean over all of them, after the model's final norm, divided by its length.
"""

from __future__ import annotations

import base64
import contextlib
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from fastapi import APIRouter, Request
from pydantic import ValidationError
from starlette.responses import Response

from stretto.serve.bodies import described, read_body
from stretto.serve.calls import check_generation, make_generation
from stretto.serve.errors import (
    CLIENT_CLOSED,
    ApiError,
    JSONResponse,
    bad_request,
    from_validation,
    in_words_of,
    renamed,
    unsupported,
)
from stretto.serve.request_fields import check_fields, ignored_header
from stretto.serve.schemas import (
    CompletionRequest,
    EmbeddingBody,
    EmbeddingRequest,
    EncodeRequest,
    RerankRequest,
    ScoreRequest,
)
from stretto.serve.service import Generation, Service, total_usage
from stretto.serve.streaming import ClientGone, while_connected
from stretto.vectors import cosines, unit_vectors

Vectors = np.ndarray  # [N, dimensions] float32, each of length 1


def embeddings(service: Service) -> APIRouter:
    router = APIRouter(tags=["embeddings"])

    @router.post("/v1/embeddings", openapi_extra=described(EmbeddingRequest))
    async def embed(request: Request) -> Response:
        call = await _Call.of(service, request, EmbeddingRequest, {"prompt": "input"})
        body: EmbeddingRequest = call.body

        async def run() -> Any:
            vectors = await call.vectors(body.input, body.dimensions)
            shown = vectors.tolist() if body.encoding_format != "base64" else [_base64(vector) for vector in vectors]
            return {"object": "list", "model": call.body.model or service.names[0], "usage": call.usage, "data": [
                {"object": "embedding", "index": i, "embedding": one} for i, one in enumerate(shown)]}

        return await call.answer(run())

    @router.post("/encode", openapi_extra=described(EncodeRequest))
    async def encode(request: Request) -> Response:
        call = await _Call.of(service, request, EncodeRequest, {"prompt": "text"})
        body: EncodeRequest = call.body
        if (body.text is None) == (body.input_ids is None):
            raise bad_request("give either text or input_ids", "text")
        given = body.text if body.text is not None else body.input_ids

        async def run() -> Any:
            vectors = await call.vectors(given)
            found = [{"embedding": vector, "meta_info": {"id": call.id, "prompt_tokens": count}}
                     for vector, count in zip(vectors.tolist(), call.counts, strict=True)]
            return found if not isinstance(given, str) and isinstance(given[0], (str, list)) else found[0]

        return await call.answer(run())

    @router.post("/v1/score", openapi_extra=described(ScoreRequest))
    @router.post("/score", openapi_extra=described(ScoreRequest))
    async def score(request: Request) -> Response:
        call = await _Call.of(service, request, ScoreRequest, {"prompt": "text_2"})
        left, right = _list(call.body.text_1), _list(call.body.text_2)
        if len(left) not in (1, len(right)):
            raise bad_request(f"text_1 has {len(left)} texts and text_2 has {len(right)}; give one, or as many",
                              "text_1")

        async def run() -> Any:
            vectors = await call.vectors([*left, *right])
            scores = cosines(vectors, len(left)).tolist()
            return {"object": "list", "id": f"score-{call.id}", "created": int(time.time()),
                    "model": call.body.model or service.names[0], "usage": call.usage, "data": [
                        {"object": "score", "index": i, "score": one} for i, one in enumerate(scores)]}

        return await call.answer(run())

    @router.post("/v1/rerank", openapi_extra=described(RerankRequest))
    @router.post("/rerank", openapi_extra=described(RerankRequest))
    async def rerank(request: Request) -> Response:
        call = await _Call.of(service, request, RerankRequest, {"prompt": "documents"})
        body: RerankRequest = call.body

        async def run() -> Any:
            vectors = await call.vectors([body.query, *body.documents])
            scores = (vectors[1:] @ vectors[0]).tolist()
            best = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[: body.top_n]
            results: list[dict[str, Any]] = [{"index": i, "relevance_score": scores[i]} for i in best]
            if body.return_documents is not False:
                for result in results:
                    result["document"] = {"text": body.documents[result["index"]]}
            return {"id": f"rerank-{call.id}", "model": call.body.model or service.names[0], "usage": call.usage,
                    "results": results}

        return await call.answer(run())

    return router


def _list(text: str | list[str]) -> list[str]:
    return [text] if isinstance(text, str) else text


def _base64(vector: np.ndarray) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


class _Call:
    """One call: its body, what it uses, and the vectors of its texts."""

    def __init__(self, service: Service, request: Request, body: Any, ignored: list[str], names: dict[str, str]):
        self._service, self._request, self._names = service, request, names
        self.body, self._ignored = body, ignored
        self._arrival = time.monotonic()
        self.id = ""
        self.usage: dict[str, int] = {}
        self.counts: list[int] = []  # tokens of each text

    @classmethod
    async def of(cls, service: Service, request: Request, model: type[EmbeddingBody], names: dict[str, str]) -> _Call:
        """Raises ApiError. `names`: of a completion's field, here."""
        service.check_open()
        body = await read_body(service, request, model)
        service.check_model(body.model)
        if service.info.no_embeddings or not service.info.hidden_size:
            why = f": {service.info.no_embeddings}" if service.info.no_embeddings else ""
            raise unsupported("an embedding", f"{service.names[0]} gives none{why}")
        return cls(service, request, body, check_fields(body, service.settings.strict_requests), names)

    async def answer(self, work: Any) -> Response:
        """What the work returns as JSON; the work ends where the client goes away."""
        try:
            with in_words_of(self._names):
                found = await while_connected(self._request.receive, work)
        except ClientGone:
            self._service.metrics.aborts["client_disconnected"] += 1
            return Response(status_code=CLIENT_CLOSED)
        return JSONResponse(found, headers=ignored_header(self._ignored))

    async def vectors(self, given: str | Sequence[Any], dimensions: int | None = None) -> Vectors:
        """One for each text, or list of ids; of length 1. `dimensions`: only so many of its first numbers."""
        size = self._service.info.hidden_size
        if dimensions is not None and dimensions > size:
            raise bad_request(f"dimensions is {dimensions}; this model's embeddings have {size}", "dimensions")
        generation = await self._generation(given)
        found: dict[int, bytes] = {}
        usages = {}
        async with contextlib.aclosing(self._service.outputs(generation)) as outputs:
            async for prompt, output in outputs:
                if output.embedding is not None and output.usage is not None:
                    found[prompt], usages[prompt, 0] = output.embedding, output.usage
        tokens = total_usage(usages, generation.requests)["prompt_tokens"]
        self.counts = [len(request.tokens) for request in generation.requests]
        self.usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        try:
            return unit_vectors([found[i] for i in range(len(generation.requests))], dimensions)
        except FloatingPointError as e:
            raise ApiError(500, str(e), code="engine_error") from e

    async def _generation(self, given: Any) -> Generation:
        """Through the gate of completions: the same limits, prompts and refusals."""
        service, body = self._service, self.body
        fields = {"prompt": given, "max_tokens": 0, "request_id": body.request_id, "cache_salt": body.cache_salt,
                  "model": body.model,
                  "priority": body.priority, "timeout": body.timeout,
                  "truncate_prompt_tokens": body.truncate_prompt_tokens, "add_special_tokens": body.add_special_tokens}
        try:
            completion = CompletionRequest.model_validate({k: v for k, v in fields.items() if v is not None})
        except ValidationError as e:
            raise renamed(from_validation(e), self._names) from None
        check_generation(service, completion)
        special = body.add_special_tokens is not False
        prompts = service.reader.prompts(completion.prompt, special)
        limit = service.settings.max_prompts
        if len(prompts) > limit:
            raise bad_request(f"{len(prompts)} texts; the limit is {limit} in one call", "prompt")
        ids = await service.in_pool(service.reader.encode_all, prompts, "prompt", special)
        generation = await make_generation(service, self._request, completion, ids, [], self._arrival)
        self.id = generation.id
        pooling = body.pooling or service.info.pooling
        generation.requests = [msgspec.structs.replace(request, pooling=pooling, want_text=False, session=None)
                               for request in generation.requests]
        return generation
