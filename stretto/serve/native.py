"""POST /generate: tokens or text in, text and tokens out, in the shape that SGLang's clients and routers speak.

A text completion under other names: every sampling parameter, refusal and extension is that of /v1/completions.
Streams repeat the whole text so far in each event, as those clients expect; `incremental: true` sends what is new.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from pydantic import ValidationError
from starlette.responses import Response

from stretto.protocol import Output, TokenLogprob, Usage
from stretto.serve.answers import Answer, collect
from stretto.serve.bodies import described, read_body
from stretto.serve.calls import answer, check_generation, make_generation
from stretto.serve.errors import bad_request, from_validation, in_words_of, renamed, unsupported
from stretto.serve.logprobs import floored
from stretto.serve.schemas import CompletionRequest, GenerateRequest
from stretto.serve.service import Generation, Service, new_tokens, speculated
from stretto.serve.sessions import text_continuation
from stretto.serve.streaming import DONE, event

UNNAMED = "unknown"  # what gateways put in where the client named no model, as clients of this API do not
DEFAULT_NEW_TOKENS = 128
# the name here -> the field of a completion
SAMPLING = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed",
            "no_stop_trim": "include_stop_str_in_output"}
_NAMES = {ours: theirs for theirs, ours in SAMPLING.items()} | {"logprobs": "top_logprobs_num"}
Triple = tuple[float | None, int, str | None]


def native(service: Service) -> APIRouter:
    router = APIRouter(tags=["native"])

    @router.post("/generate", openapi_extra=described(GenerateRequest))
    async def generate(request: Request) -> Response:
        arrival = time.monotonic()
        service.check_open()
        body = await read_body(service, request, GenerateRequest)
        call = _Call(service, body)
        with in_words_of(_NAMES):
            ignored = check_generation(service, call.completion)

        async def prepare() -> Generation:
            ids = await service.in_pool(call.encode)
            more = await service.in_pool(text_continuation, service, call.completion, call.prompts)
            generation = await make_generation(service, request, call.completion, ids, ignored, arrival, more)
            call.check_start(generation)
            return generation

        return await answer(service, request, prepare, call.whole, call.events, _NAMES)

    return router


def _completion(body: GenerateRequest, prompts: list[Any]) -> CompletionRequest:
    """The completion that the body asks for. Raises ApiError."""
    fields: dict[str, Any] = {"max_tokens": DEFAULT_NEW_TOKENS, **(body.model_extra or {})}
    for name, value in (body.sampling_params or {}).items():
        if value is not None:
            fields[SAMPLING.get(name, name)] = value
    fields |= {"prompt": prompts if len(prompts) > 1 or isinstance(prompts[0], list) else prompts[0],
               "stream": body.stream, "model": None if body.model == UNNAMED else body.model,
               "priority": body.priority, "request_id": body.rid}
    if body.return_logprob:
        fields["logprobs"] = body.top_logprobs_num or 0
        if body.logprob_start_len is not None and body.logprob_start_len >= 0:
            fields["prompt_logprobs"] = body.top_logprobs_num or 0
    if fields.get("best_of") not in (None, fields.get("n", 1)):
        raise unsupported("best_of", "/v1/completions has it")
    try:
        return CompletionRequest.model_validate({name: value for name, value in fields.items() if value is not None})
    except ValidationError as e:
        raise renamed(from_validation(e), _NAMES) from None


class _Call:
    """One call: what was asked, and how its answer is shaped."""

    def __init__(self, service: Service, body: GenerateRequest):
        if (body.text is None) == (body.input_ids is None):
            raise bad_request("give either text or input_ids", "text")
        given = body.text if body.text is not None else body.input_ids
        self.is_list = not isinstance(given, str) and isinstance(given[0], (str, list))
        self.prompts = given if self.is_list else [given]
        limit = service.settings.max_prompts
        if len(self.prompts) > limit:
            raise bad_request(f"{len(self.prompts)} prompts; the limit is {limit} in one call", "text")
        self._service, self._body = service, body
        self.completion = _completion(body, self.prompts)

    def encode(self) -> list[list[int]]:
        return [self._service.reader.encode(prompt, "text") if isinstance(prompt, str) else prompt
                for prompt in self.prompts]

    def check_start(self, generation: Generation) -> None:
        """Raises ApiError where the first log-probability that is wanted lies behind a prompt."""
        start = self._body.logprob_start_len
        if start is None or not self._body.return_logprob:
            return
        for request in generation.requests:
            new = len(new_tokens(request))
            if start >= new:
                raise bad_request(f"logprob_start_len is {start}; the prompt has {new} tokens, so it must lie in"
                                  f" -1..{new - 1}", "logprob_start_len")

    # ------------------------------------------------------------------------------------------------- answers
    async def whole(self, service: Service, generation: Generation) -> Any:
        answers = await collect(service, generation)
        found = []
        for (prompt, index), one in sorted(answers.choices.items(), key=lambda item: item[0]):
            usage = answers.usages.get((prompt, index), Usage())
            found.append(self._shape(generation, prompt, one, usage, answers.prompt_logprobs.get(prompt, [])))
        return found if self.is_list or generation.choices > 1 else found[0]

    async def events(self, service: Service, generation: Generation) -> AsyncGenerator[bytes, None]:
        said: dict[tuple[int, int], Answer] = {}
        usages: dict[tuple[int, int], Usage] = {}
        scores: dict[int, list[TokenLogprob]] = {}
        async with contextlib.aclosing(service.outputs(generation)) as outputs:
            async for prompt, output in outputs:
                key = (prompt, output.index)
                usages[key] = output.usage or usages.get(key, Usage())
                if output.prompt_logprobs is not None:
                    scores[prompt] = output.prompt_logprobs
                if self._body.incremental or key not in said:
                    said[key] = Answer()
                said[key].add(output)
                if self._tells(output):
                    shaped = self._shape(generation, prompt, said[key], usages[key], scores.get(prompt, []))
                    if self.is_list or generation.choices > 1:
                        shaped["index"] = prompt * generation.choices + output.index
                    yield event(shaped)
        yield DONE

    @staticmethod
    def _tells(output: Output) -> bool:
        return bool(output.text or output.token_ids or output.finish_reason)

    def _shape(self, generation: Generation, prompt: int, one: Answer, usage: Usage, scores: list[TokenLogprob]
               ) -> dict[str, Any]:
        request = generation.requests[prompt]
        meta: dict[str, Any] = {
            "id": request.rid, "finish_reason": _finish(one, usage),
            "prompt_tokens": usage.prompt_tokens or len(request.tokens),
            "completion_tokens": usage.completion_tokens, "cached_tokens": usage.cached_tokens,
            "spec_verify_ct": usage.steps, **speculated([usage]), "e2e_latency": time.monotonic() - request.arrival}
        if self._body.return_logprob:
            start = max(self._body.logprob_start_len or 0, 0)
            meta |= self._logprobs("output", one.logprobs) | self._logprobs("input", scores[start:])
        return {"text": "".join(one.text), "output_ids": one.token_ids, "meta_info": meta}

    def _logprobs(self, side: str, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        def triple(logprob: float | None, token: int) -> Triple:
            text = self._service.token_text(token) if self._body.return_text_in_logprobs else None
            return None if logprob is None else floored(logprob), token, text

        top = [[triple(p, i) for i, p in zip(e.top_ids, e.top_logprobs, strict=True)] or None for e in entries]
        return {f"{side}_token_logprobs": [triple(e.logprob, e.token_id) for e in entries],
                f"{side}_top_logprobs": top}


def _finish(one: Answer, usage: Usage) -> dict[str, Any] | None:
    if one.finish_reason is None:
        return None
    if one.finish_reason == "length":
        return {"type": "length", "length": usage.completion_tokens}
    matched = one.stop_reason if one.stop_reason is not None else one.token_ids[-1] if one.token_ids else None
    return {"type": one.finish_reason, "matched": matched}
