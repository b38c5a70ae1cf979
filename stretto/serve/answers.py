"""Gathering a generation's outputs: what chat.py and completions.py share."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

from stretto import __version__
from stretto.protocol import Output, TokenLogprob, Usage
from stretto.serve.schemas import GenerationBody
from stretto.serve.service import Generation, Service

FINGERPRINT = f"stretto-{__version__}"


@dataclass
class Wants:
    """What a body asks about the form of its answer."""

    usage_chunk: bool
    usage_always: bool
    ids: bool
    ids_as_names: bool
    logprobs: bool

    @classmethod
    def of(cls, body: GenerationBody, logprobs: bool) -> Wants:
        options = body.stream_options
        usage = bool(options and options.include_usage)
        return cls(usage, usage and bool(options and options.continuous_usage_stats), bool(body.return_token_ids),
                   bool(body.return_tokens_as_token_ids), logprobs)


@dataclass
class Answer:
    """One choice, all of it."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, output: Output) -> None:
        self.text.append(output.text)
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or []
        if output.finish_reason is not None:
            self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason


@dataclass
class Answers:
    """Every choice of a generation, by (prompt, index)."""

    choices: dict[tuple[int, int], Answer]
    usages: dict[tuple[int, int], Usage]
    prompt_logprobs: dict[int, list[TokenLogprob]]  # by prompt


async def collect(service: Service, generation: Generation) -> Answers:
    """Runs the generation to its end."""
    every = [(p, i) for p in range(len(generation.requests)) for i in range(generation.choices)]
    answers = Answers({key: Answer() for key in every}, {}, {})
    async with contextlib.aclosing(service.outputs(generation)) as outputs:
        async for prompt, output in outputs:
            key = (prompt, output.index)
            answers.choices[key].add(output)
            if output.usage is not None:
                answers.usages[key] = output.usage
            if output.prompt_logprobs is not None:
                answers.prompt_logprobs[prompt] = output.prompt_logprobs
    return answers
