"""POST /v1/completions. The choices of prompt p are p * n .. p * n + n - 1, as in the OpenAI API.

With `echo` each choice's text begins with its prompt; with `logprobs` as well, so do its lists of log-probabilities:
then the first entry of `token_logprobs` is null.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from stretto.protocol import Output, TokenLogprob, Usage
from stretto.serve.answers import FINGERPRINT, Answer, Answers, Wants, collect
from stretto.serve.logprobs import CompletionLogprobs, LogprobShaper, OffsetCounter, Part, PromptLogprob
from stretto.serve.sampling import chooses
from stretto.serve.schemas import CompletionRequest
from stretto.serve.service import Generation, Service, total_usage
from stretto.serve.streaming import DONE, EventForm, event


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | UnsetType = UNSET


class Completion(msgspec.Struct):
    """The whole answer, and one chunk of a stream: they have the same shape."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    object: Literal["text_completion"] = "text_completion"
    system_fingerprint: str = FINGERPRINT
    usage: dict[str, Any] | UnsetType | None = UNSET


class _Maker:
    """Makes choices from outputs; remembers where each choice's text stands."""

    def __init__(self, service: Service, generation: Generation, texts: list[str | None]):
        assert isinstance(generation.body, CompletionRequest)
        self.service, self.generation, self.body, self.texts = service, generation, generation.body, texts
        self.wants = Wants.of(generation.body, generation.body.logprobs is not None)
        self.echo = bool(generation.body.echo)
        self.special: frozenset[int] = getattr(service.tokenizer, "special_ids", frozenset())
        self.silent = self.special if generation.body.skip_special_tokens is not False else frozenset()
        self.shaper = LogprobShaper(service.token_bytes, self.wants.ids_as_names)
        self._offsets: dict[tuple[int, int], OffsetCounter] = {}
        self.usages: dict[tuple[int, int], Usage] = {}
        self.shown = self.body.n or 1 if chooses(self.body) else generation.choices

    def chosen(self, answers: Answers) -> list[tuple[tuple[int, int], Answer]]:
        """The answers that are returned, by (prompt, index): all, or of `best_of` the n with the highest
        log-probability a token, best first."""
        if self.shown == self.generation.choices:
            return sorted(answers.choices.items(), key=lambda item: item[0])
        found = []
        for prompt in range(len(self.generation.requests)):
            own = [answer for (of, _), answer in sorted(answers.choices.items()) if of == prompt]
            best = sorted(own, key=_mean_logprob, reverse=True)[: self.shown]
            found += [((prompt, index), answer) for index, answer in enumerate(best)]
        return found

    def envelope(self, choices: list[CompletionChoice]) -> Completion:
        return Completion(f"cmpl-{self.generation.id}", self.generation.created,
                          self.generation.adapter or self.service.names[0], choices)

    def prompt_text(self, prompt: int) -> str:
        """The prompt as it was given; of ids, what they decode to."""
        given = self.given_text(prompt)
        if given is not None:
            return given
        skip = self.body.skip_special_tokens is not False
        return self.service.tokenizer.decode(self.generation.requests[prompt].tokens, skip)

    def given_text(self, prompt: int) -> str | None:
        """None where the prompt came as ids, or was cut."""
        return None if self.body.truncate_prompt_tokens else self.texts[prompt]

    def silent_in_prompt(self, prompt: int) -> frozenset[int]:
        """Ids of the prompt that are not in its text: of a given text, those that the tokenizer has added."""
        given = self.given_text(prompt)
        if given is None:
            return self.silent
        return frozenset(i for i in self.special if self.service.token_text(i) not in given)

    def offsets(self, prompt: int, index: int, prompt_scores: list[TokenLogprob]) -> OffsetCounter:
        """Of one choice's text, which begins with the prompt, or behind it."""
        if (prompt, index) not in self._offsets:
            request = self.generation.requests[prompt]
            appended = request.session.continuation if request.session is not None else None
            begins = [e.token_id for e in prompt_scores] != appended if self.echo else \
                self.service.tokenizer.begins_text(request.tokens)
            self._offsets[prompt, index] = OffsetCounter(self._lost if begins else None)
        return self._offsets[prompt, index]

    def _lost(self, token: int) -> int:
        """Bytes of a token that are not in the text that it begins."""
        raw, text = self.service.token_text(token), self.service.tokenizer.decode([token], False)
        return int(raw.startswith(" ") and len(text) < len(raw))

    def choice(self, prompt: int, index: int, text: str, scores: list[TokenLogprob], ids: list[int],
               prompt_scores: list[TokenLogprob] | None, first: bool) -> CompletionChoice:
        """One choice, or what a chunk adds to it. `first`: the prompt, if wanted, comes with it."""
        request = self.generation.requests[prompt]
        echoed = first and self.echo
        logprobs = None
        if self.wants.logprobs and (scores or echoed):
            most = self.body.logprobs or 0
            parts: list[Part] = [(_limited(scores, most), self.silent)]
            if echoed:
                parts.insert(0, (_limited(prompt_scores or [], most), self.silent_in_prompt(prompt)))
            logprobs = self.shaper.completion(parts, self.offsets(prompt, index, prompt_scores or []))
        out = CompletionChoice(prompt * self.shown + index,
                               self.prompt_text(prompt) + text if echoed else text, logprobs, None)
        if self.wants.ids:
            out.token_ids = ids
            if first:
                out.prompt_token_ids = request.tokens
        if first and self.body.prompt_logprobs is not None:
            scores = _limited(prompt_scores or [], self.body.prompt_logprobs)
            out.prompt_logprobs = self.shaper.prompt(scores)
        return out


def _mean_logprob(answer: Answer) -> float:
    scores = [entry.logprob for entry in answer.logprobs if entry.logprob is not None]
    return sum(scores) / len(scores) if scores else float("-inf")


def _limited(entries: list[TokenLogprob], most: int) -> list[TokenLogprob]:
    """With at most so many alternatives each (-1: all); the prompt was scored for the larger of two wishes."""
    return [e if most < 0 or len(e.top_ids) <= most
            else TokenLogprob(e.token_id, e.logprob, e.top_ids[:most], e.top_logprobs[:most]) for e in entries]


async def completion(service: Service, generation: Generation, texts: list[str | None]) -> Completion:
    """`texts`: each prompt as text, None where it was given as ids."""
    maker = _Maker(service, generation, texts)
    answers = await collect(service, generation)
    choices = []
    for (prompt, index), answer in maker.chosen(answers):
        choice = maker.choice(prompt, index, "".join(answer.text), answer.logprobs, answer.token_ids,
                              answers.prompt_logprobs.get(prompt), True)
        choice.finish_reason, choice.stop_reason = answer.finish_reason, answer.stop_reason
        choices.append(choice)
    out = maker.envelope(choices)
    out.usage = total_usage(answers.usages, generation.requests)
    return out


class _Stream:
    """Turns outputs into chunks. A choice whose first chunk carries its prompt's scores waits until they are there:
    they come with choice 0."""

    def __init__(self, maker: _Maker):
        self.maker, self.wants, self.body = maker, maker.wants, maker.body
        self.scored = maker.generation.requests[0].sampling.prompt_logprobs is not None
        self.prompt_scores: dict[int, list[TokenLogprob]] = {}
        self.held: dict[int, list[Output]] = {}
        self.begun: set[tuple[int, int]] = set()
        wants = self.wants
        self._text_alone = not (wants.logprobs or wants.ids or wants.usage_always)
        self._forms: dict[tuple[int, int], EventForm] = {}

    def take(self, prompt: int, output: Output) -> bytes:
        if output.prompt_logprobs is not None:
            self.prompt_scores[prompt] = output.prompt_logprobs
        if self.scored and prompt not in self.prompt_scores:
            self.held.setdefault(prompt, []).append(output)
            return b""
        return b"".join(self.chunk(prompt, each) for each in [*self.held.pop(prompt, []), output])

    def chunk(self, prompt: int, output: Output) -> bytes:
        key = (prompt, output.index)
        if output.usage is not None:
            self.maker.usages[key] = output.usage
        first = key not in self.begun
        if self._text_alone and not first and output.finish_reason is None:
            return self._more(key, output.text)
        choice = self.maker.choice(prompt, output.index, output.text, output.logprobs or [], output.token_ids,
                                   self.prompt_scores.get(prompt), first)
        choice.finish_reason, choice.stop_reason = output.finish_reason, output.stop_reason
        opening = first and (self.maker.echo or self.wants.ids or choice.prompt_logprobs is not UNSET)
        told = choice.text or choice.finish_reason or choice.logprobs or (self.wants.ids and choice.token_ids)
        if not (told or opening):
            return b""
        self.begun.add(key)
        return event(self._envelope(choice))

    def _envelope(self, choice: CompletionChoice) -> Completion:
        chunk = self.maker.envelope([choice])
        if self.wants.usage_always:
            chunk.usage = total_usage(self.maker.usages, self.maker.generation.requests)
        elif self.wants.usage_chunk:
            chunk.usage = None
        return chunk

    def _more(self, key: tuple[int, int], text: str) -> bytes:
        """The chunk that most tokens are: a few characters in a form that stays the same."""
        if not text:
            return b""
        form = self._forms.get(key)
        if form is None:
            choice = CompletionChoice(key[0] * self.maker.shown + key[1], "", None, None)
            form = self._forms[key] = EventForm.of(self._envelope(choice), "text")
        return form.event(text)

    def ending(self) -> bytes:
        rest = b"".join(self.chunk(prompt, output) for prompt, held in self.held.items() for output in held)
        if not self.wants.usage_chunk:
            return rest + DONE
        chunk = self.maker.envelope([])
        chunk.usage = total_usage(self.maker.usages, self.maker.generation.requests)
        return rest + event(chunk) + DONE


async def completion_events(service: Service, generation: Generation, texts: list[str | None]
                            ) -> AsyncGenerator[bytes, None]:
    """The same answer as `completion`, as it comes."""
    stream = _Stream(_Maker(service, generation, texts))
    async with contextlib.aclosing(service.outputs(generation)) as outputs:
        async for prompt, output in outputs:
            if item := stream.take(prompt, output):
                yield item
    yield stream.ending()
