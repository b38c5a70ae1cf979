"""From a request body to SamplingParams: the request's own value, else the model's default, else OpenAI's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from stretto.params import ProcessorUse, SamplingParams
from stretto.protocol import RequestError
from stretto.serve.errors import ApiError, bad_request, refused
from stretto.serve.schemas import ChatRequest, CompletionRequest, GenerationBody

COMPLETION_MAX_TOKENS = 16  # OpenAI's default for text completions; chat has none
_TOKEN_ID = re.compile(r"-?(0|[1-9][0-9]{0,17})")  # whether the vocabulary has it is checked later
_SAME_NAME = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
              "min_tokens", "n", "seed", "ignore_eos", "skip_special_tokens", "prompt_logprobs")


def asked_max_tokens(body: GenerationBody) -> tuple[int | None, str]:
    """The explicit limit, if any, and the field that holds it."""
    newer = body.max_completion_tokens
    if newer is None:
        return body.max_tokens, "max_tokens"
    if body.max_tokens is not None and body.max_tokens != newer:
        raise bad_request(f"max_tokens is {body.max_tokens} and max_completion_tokens is {newer}; give one of them",
                          "max_tokens")
    return newer, "max_completion_tokens"


def asked_logprobs(body: GenerationBody) -> int | None:
    """Alternatives per generated token; None: no log-probabilities."""
    if isinstance(body, ChatRequest):
        if body.top_logprobs is not None and not body.logprobs:
            if body.top_logprobs == 0:
                return None
            raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
        return (body.top_logprobs or 0) if body.logprobs else None
    return body.logprobs if isinstance(body, CompletionRequest) else None


def _biases(body: GenerationBody) -> dict[int, float]:
    biases = body.logit_bias or {}
    for token in biases:
        if not _TOKEN_ID.fullmatch(token):
            raise bad_request(f"logit_bias has the key {token[:64]!r}; keys are token ids", "logit_bias")
    return {int(token): bias for token, bias in biases.items()}


def chooses(body: CompletionRequest) -> bool:
    """More answers are made than returned."""
    return body.best_of is not None and body.best_of > (body.n or 1)


def _processors(body: GenerationBody) -> tuple[ProcessorUse, ...]:
    named = tuple(ProcessorUse(name=use.name, params=use.params or {}) for use in body.logit_processors or ())
    if body.custom_logit_processor:
        return *named, ProcessorUse(source=body.custom_logit_processor, params=body.custom_params or {})
    if body.custom_params:
        raise bad_request("custom_params are for custom_logit_processor, which is not there; those of the server's"
                          " processors stand beside their names in logit_processors", "custom_params")
    return named


def _prompt_logprobs(body: GenerationBody) -> int | None:
    if isinstance(body, CompletionRequest) and body.echo and body.logprobs is not None:
        wanted = (body.logprobs, body.prompt_logprobs or 0)
        return -1 if -1 in wanted else max(wanted)
    return body.prompt_logprobs


def to_sampling(body: GenerationBody, defaults: Mapping[str, float | int],
                bad_words: tuple[tuple[int, ...], ...] = ()) -> SamplingParams:
    """What the body asks of the sampler; max_tokens as asked, without regard to the prompt (see fit_max_tokens).
    `bad_words`: the body's as ids. Raises ParameterError."""
    if isinstance(body, CompletionRequest):
        defaults = {"max_tokens": COMPLETION_MAX_TOKENS, **defaults}
    fields: dict[str, Any] = dict(defaults)
    for name in _SAME_NAME:
        value = getattr(body, name)
        if value is not None and (name, value) != ("seed", -1):  # vLLM's and llama.cpp's word for a random one
            fields[name] = value
    logprobs = asked_logprobs(body)
    if isinstance(body, CompletionRequest) and chooses(body):
        fields["n"], logprobs = body.best_of, logprobs or 0  # the best of them are chosen by their log-probabilities
    limit, _ = asked_max_tokens(body)
    if limit is not None:
        fields["max_tokens"] = limit
    fields["prompt_logprobs"] = _prompt_logprobs(body)
    return SamplingParams(
        **fields, logit_processors=_processors(body), logprobs=logprobs, logit_bias=_biases(body),
        stop=tuple(body.stop or ()), stop_token_ids=tuple(body.stop_token_ids or ()),
        include_stop=bool(body.include_stop_str_in_output), bad_words=bad_words,
        allowed_token_ids=tuple(body.allowed_token_ids or ()),
        speculation=body.speculation.tokens if body.speculation is not None else None)


def kept_tokens(body: GenerationBody, context: int) -> int | None:
    """How many of a prompt's last tokens stay; None: all. Of -1, as many as leave room for the answer, or for one token
    where the request names no length."""
    if body.truncate_prompt_tokens != -1:
        return body.truncate_prompt_tokens
    explicit, _ = asked_max_tokens(body)
    return max(1, context - max(1, explicit or 0))


def fit_max_tokens(sampling: SamplingParams, body: GenerationBody, prompt_tokens: int, context: int) -> SamplingParams:
    """The rule for answers that are longer than the room: an explicit max_tokens is refused with all the numbers, as in
    the OpenAI API; a default is cut to the room. Nothing is reserved in advance either way."""
    explicit, param = asked_max_tokens(body)
    room = context - prompt_tokens
    if explicit is not None and explicit > room > 0:
        raise bad_request(
            f"this model's context is {context} tokens; the request asks for {prompt_tokens + explicit}:"
            f" {prompt_tokens} of the prompt and {explicit} of {param}. Shorten the prompt, or ask for at most {room}",
            param, "context_length_exceeded")
    if explicit is None and sampling.max_tokens is not None and sampling.max_tokens > room > 0:
        return msgspec.structs.replace(sampling, max_tokens=room, min_tokens=min(sampling.min_tokens, room))
    return sampling


def in_request_words(error: RequestError, body: GenerationBody) -> ApiError:
    """The engine names SamplingParams' fields; the client is told its own field's name."""
    names = {"include_stop": "include_stop_str_in_output", "max_tokens": asked_max_tokens(body)[1]}
    if isinstance(body, ChatRequest):
        names["logprobs"] = "top_logprobs"
        names["prompt"] = "messages"
    elif isinstance(body, CompletionRequest):
        if body.echo and body.logprobs is not None:
            names["prompt_logprobs"] = "logprobs"
        if chooses(body):
            names["n"] = "best_of"
    if body.session is not None or body.session_params is not None:
        holder = "session" if body.session_params is None else "session_params"
        names |= {name: f"{holder}.{name}" for name in ("offset", "branch_from")}
    param, message = error.param, str(error)
    if param in names:
        if param != "prompt":  # there the word is meant as a word
            message = re.sub(rf"\b{re.escape(param)}\b", names[param], message, count=1)
        param = names[param]
    elif param is not None and param not in message:
        message = f"{param}: {message}"
    return refused(error, message, param)
