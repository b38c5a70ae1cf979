"""POST /v1/chat/completions."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncGenerator
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from stretto.protocol import Output, Usage
from stretto.serve.answers import FINGERPRINT, Wants, collect
from stretto.serve.logprobs import ChatLogprobs, LogprobShaper, PromptLogprob
from stretto.serve.replies import ReplyPlan
from stretto.serve.schemas import ChatRequest
from stretto.serve.service import Generation, Service, total_usage
from stretto.serve.streaming import DONE, EventForm, event
from stretto.text.reply import CallArguments, CallBegin, Content, Reasoning

PromptLogprobs = list[dict[str, PromptLogprob] | None]


class Function(msgspec.Struct):
    name: str
    arguments: str


class ToolCall(msgspec.Struct):
    id: str
    function: Function
    type: Literal["function"] = "function"


class ChatMessage(msgspec.Struct):
    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: dict[str, Any]
    object: Literal["chat.completion"] = "chat.completion"
    system_fingerprint: str = FINGERPRINT
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class FunctionDelta(msgspec.Struct):
    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct):
    """The first one of a call has its id, type and name."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class Delta(msgspec.Struct):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChunkChoice(msgspec.Struct):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    system_fingerprint: str = FINGERPRINT
    usage: dict[str, Any] | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class _Reader:
    """One choice's text as deltas. What a stream says, joined, is what a whole answer says."""

    def __init__(self, plan: ReplyPlan):
        self._reply = plan.reader() if plan.reader is not None else None
        self._hide, self._short_ids = plan.hide_reasoning, plan.short_call_ids

    def read(self, text: str, ended: bool) -> Delta | None:
        """None where there is nothing to tell."""
        if self._reply is None:
            return Delta(content=text) if text else None
        parts = self._reply.feed(text)
        if ended:
            parts += self._reply.finish()
        content = "".join(part.text for part in parts if isinstance(part, Content))
        reasoning = "" if self._hide else "".join(part.text for part in parts if isinstance(part, Reasoning))
        calls: list[ToolCallDelta] = []
        for part in parts:
            if isinstance(part, CallBegin):
                calls.append(ToolCallDelta(part.call, FunctionDelta("", part.name), self._call_id(), "function"))
            elif isinstance(part, CallArguments):
                if not calls or calls[-1].index != part.call:
                    calls.append(ToolCallDelta(part.call, FunctionDelta("")))
                calls[-1].function.arguments += part.text
        if not (content or reasoning or calls):
            return None
        return Delta(content=content or UNSET, reasoning_content=reasoning or UNSET, tool_calls=calls or UNSET)

    def _call_id(self) -> str:
        name = uuid.uuid4().hex
        return name[:9] if self._short_ids else f"call_{name[:24]}"

    def finish_reason(self, reason: str | None) -> str | None:
        """A call that was cut by the limit is no call that was made."""
        return "tool_calls" if reason == "stop" and self._reply is not None and self._reply.calls else reason


def _message(delta: Delta | None) -> ChatMessage:
    """A whole answer."""
    delta = delta or Delta()
    message = ChatMessage(delta.content or "", reasoning_content=delta.reasoning_content)
    if delta.tool_calls:
        message.content = delta.content or None
        message.tool_calls = [ToolCall(str(call.id), Function(str(call.function.name), call.function.arguments))
                              for call in delta.tool_calls]
    return message


def _wants(generation: Generation) -> Wants:
    assert isinstance(generation.body, ChatRequest)
    return Wants.of(generation.body, bool(generation.body.logprobs))


async def chat_completion(service: Service, generation: Generation) -> ChatCompletion:
    wants = _wants(generation)
    shaper = LogprobShaper(service.token_bytes, wants.ids_as_names)
    answers = await collect(service, generation)
    choices = []
    for (_, index), answer in sorted(answers.choices.items(), key=lambda item: item[0]):
        logprobs = shaper.chat(answer.logprobs) if wants.logprobs else None
        reader = _Reader(generation.reply)
        message = _message(reader.read("".join(answer.text), True))
        choices.append(ChatChoice(index, message, logprobs, reader.finish_reason(answer.finish_reason),
                                  answer.stop_reason, answer.token_ids if wants.ids else UNSET))
    out = ChatCompletion(f"chatcmpl-{generation.id}", generation.created, generation.adapter or service.names[0],
                         choices, total_usage(answers.usages, generation.requests))
    if generation.body.prompt_logprobs is not None:
        out.prompt_logprobs = shaper.prompt(answers.prompt_logprobs.get(0, []))
    if wants.ids:
        out.prompt_token_ids = generation.requests[0].tokens
    return out


class _ChunkMaker:
    def __init__(self, service: Service, generation: Generation):
        self.service, self.generation = service, generation
        self.wants = _wants(generation)
        self.shaper = LogprobShaper(service.token_bytes, self.wants.ids_as_names)
        self.usages: dict[tuple[int, int], Usage] = {}
        self.readers = [_Reader(generation.reply) for _ in range(generation.choices)]
        wants = self.wants
        self._words_alone = not (wants.logprobs or wants.ids or wants.usage_always
                                 or generation.body.prompt_logprobs is not None)
        self._forms: dict[tuple[int, str], EventForm] = {}  # by choice and field

    def chunk(self, choices: list[ChunkChoice]) -> ChatChunk:
        out = ChatChunk(f"chatcmpl-{self.generation.id}", self.generation.created,
                        self.generation.adapter or self.service.names[0], choices)
        if self.wants.usage_always:
            out.usage = total_usage(self.usages, self.generation.requests)
        elif self.wants.usage_chunk:
            out.usage = None
        return out

    def opening(self) -> bytes:
        """One chunk per choice that says who speaks; the first also says what is known of the prompt."""
        chunks = [self.chunk([ChunkChoice(i, Delta("assistant", ""))]) for i in range(self.generation.choices)]
        if self.wants.ids:
            chunks[0].prompt_token_ids = self.generation.requests[0].tokens
        return b"".join(map(event, chunks))

    def addition(self, output: Output) -> bytes:
        """What one Output adds; nothing where the client would learn nothing."""
        if output.usage is not None:
            self.usages[0, output.index] = output.usage
        reader = self.readers[output.index]
        delta = reader.read(output.text, output.finish_reason is not None)
        if self._words_alone and output.finish_reason is None:
            words = self._words(output.index, delta)
            if words is not None:
                return words
        choice = ChunkChoice(output.index, delta or Delta(), finish_reason=reader.finish_reason(output.finish_reason))
        if self.wants.logprobs and output.logprobs:
            choice.logprobs = self.shaper.chat(output.logprobs)
        if self.wants.ids:
            choice.token_ids = output.token_ids
        if output.finish_reason is not None:
            choice.stop_reason = output.stop_reason
        told = delta or output.finish_reason or choice.logprobs or (self.wants.ids and output.token_ids)
        scored = self.generation.body.prompt_logprobs is not None and output.prompt_logprobs is not None
        if not told and not scored:
            return b""
        chunk = self.chunk([choice])
        if scored:
            chunk.prompt_logprobs = self.shaper.prompt(output.prompt_logprobs or [])
        return event(chunk)

    def _words(self, index: int, delta: Delta | None) -> bytes | None:
        """The chunk that most tokens are: a few characters in a form that stays the same. None for any other."""
        if delta is None:
            return b""
        content, reasoning = delta.content, delta.reasoning_content
        if delta.tool_calls or (content and reasoning):
            return None
        field = "content" if content else "reasoning_content"
        form = self._forms.get((index, field))
        if form is None:
            empty = Delta(content="") if content else Delta(reasoning_content="")
            form = self._forms[index, field] = EventForm.of(self.chunk([ChunkChoice(index, empty)]), field)
        return form.event(str(content or reasoning))

    def ending(self) -> bytes:
        if not self.wants.usage_chunk:
            return DONE
        chunk = self.chunk([])
        chunk.usage = total_usage(self.usages, self.generation.requests)
        return event(chunk) + DONE


async def chat_events(service: Service, generation: Generation) -> AsyncGenerator[bytes, None]:
    """The same answer as chat_completion, as it comes."""
    maker, opened = _ChunkMaker(service, generation), False
    async with contextlib.aclosing(service.outputs(generation)) as outputs:
        async for _, output in outputs:
            item = b"" if opened else maker.opening()
            opened = True
            if item := item + maker.addition(output):
                yield item
    yield maker.ending()
