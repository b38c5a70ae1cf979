"""`stretto run`: a conversation in the terminal, or one answer. The engine runs in this process; there is no server."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Generator
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter
from rich.console import Console

from stretto.cli.failures import CommandFailed
from stretto.cli.options import ENGINE, EngineOptions
from stretto.cli.prompting import converse
from stretto.cli.screen import error_screen
from stretto.cli.starting import expected_failures
from stretto.engine.llm import LLM
from stretto.params import ParameterError, SamplingParams
from stretto.protocol import RequestError, Usage
from stretto.text.chat_template import ChatTemplateError


@dataclass(frozen=True)
class AnswerOptions:
    """How answers are made."""

    prompt: str | None = None
    """Answer this and exit. Without it, a conversation; or one answer to standard input, where that is no terminal."""
    _: KW_ONLY
    system: str | None = None
    """System message."""
    temperature: float | None = None
    """0: always the likeliest token. Default: the model's generation_config, else 1."""
    top_p: float | None = None
    """Sample from the likeliest tokens that have this share together."""
    max_tokens: int | None = None
    """Longest answer in tokens. Default: as many as the context has room for."""
    raw: bool = False
    """Continue the text as it is, without the chat template."""
    stats: bool = False
    """Say after each answer how long it was and how fast."""


Options = Annotated[AnswerOptions, Parameter(name="*", group=Group("Answer", sort_key=0), negative_bool=())]
ANSWER = AnswerOptions()


@dataclass
class Conversation:
    """One model and the messages so far."""

    llm: LLM
    options: AnswerOptions
    sampling: SamplingParams
    messages: list[dict[str, str]] = field(default_factory=list)
    usage: Usage | None = None

    def __post_init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.messages = [{"role": "system", "content": self.options.system}] if self.options.system else []

    def ask(self, text: str) -> Generator[str, None, None]:
        """Pieces of the answer. Closing the iterator stops the answer; what was said so far stays in the history."""
        self.messages.append({"role": "user", "content": text})
        prompt = self.llm.tokenizer.encode(text) if self.options.raw else \
            self.llm.tokenizer.apply_chat_template(self.messages)
        said: list[str] = []
        try:
            for output in self.llm.stream(prompt, self.sampling):
                said.append(output.text)
                self.usage = output.usage or self.usage
                yield output.text
        finally:
            self.messages.append({"role": "assistant", "content": "".join(said)})

    def forget_last(self) -> None:
        """Takes back a question that could not be asked."""
        while self.messages and self.messages[-1]["role"] != "user":
            self.messages.pop()
        self.messages = self.messages[:-1]


def run(engine: EngineOptions = ENGINE, answer: Options = ANSWER) -> int:
    """Chat with a model in the terminal, or answer one prompt."""
    notes = error_screen()
    named = engine.model.model
    if named is not None and " " in named and not Path(named).exists():
        raise CommandFailed(f"there is no model {named!r}: the model stands before the prompt; for the default model"
                            f" say --prompt {named!r}")
    with expected_failures(), notes.status("loading"):
        llm = LLM(config=engine.config())
    with llm:
        conversation = Conversation(llm, answer, _sampling(llm, answer))
        text = answer.prompt if answer.prompt is not None or sys.stdin.isatty() else sys.stdin.read()
        if text is None:
            return converse(conversation.llm.info.model_name, lambda line: _answer(conversation, line, notes),
                            conversation.clear, notes)
        return 0 if _answer(conversation, text, notes) else 1


def _sampling(llm: LLM, answer: AnswerOptions) -> SamplingParams:
    """The command line's values, else those of the model's generation_config.json."""
    named = {"temperature": answer.temperature, "top_p": answer.top_p, "max_tokens": answer.max_tokens}
    values = dict(llm.prepared.resolved.sampling_defaults) | {k: v for k, v in named.items() if v is not None}
    try:
        sampling = SamplingParams(**values)  # type: ignore[arg-type]
        sampling.check(llm.info.vocab_size)
    except ParameterError as e:
        raise CommandFailed(str(e)) from e
    return sampling


def _answer(conversation: Conversation, text: str, notes: Console) -> bool:
    """Prints the answer as it comes. False if there was none to give."""
    started = time.perf_counter()
    try:
        with contextlib.closing(conversation.ask(text)) as pieces:
            for piece in pieces:
                print(piece, end="", flush=True)
        print()
    except KeyboardInterrupt:
        print()
    except (RequestError, ChatTemplateError) as e:
        conversation.forget_last()
        notes.print(f"error: {e}", style="red")
        return False
    if conversation.options.stats and conversation.usage is not None:
        _print_stats(conversation.usage, time.perf_counter() - started, notes)
    return True


def _print_stats(usage: Usage, seconds: float, notes: Console) -> None:
    drafts = f", {usage.accepted_tokens} of {usage.drafted_tokens} drafts accepted" if usage.drafted_tokens else ""
    notes.print(f"{usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached), {usage.completion_tokens} tokens"
                f" in {seconds:.1f} s ({usage.completion_tokens / seconds:.1f} a second){drafts}", style="dim")
