"""The Python interface: a model in this process, without a server.

    with LLM("path/or/hub-id") as llm:
        for completion in llm.generate(["Once upon a time"], SamplingParams(max_tokens=32)):
            print(completion.text)
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from types import TracebackType
from typing import Any, Literal

import msgspec
import numpy as np
from rich.console import Console
from rich.progress import Progress

from stretto.config import Config
from stretto.engine.build import build_core
from stretto.engine.core import EngineCore
from stretto.engine.locate import configured_tokenizer
from stretto.engine.options import make_config, tell_missing
from stretto.engine.prepare import Prepared, prepare
from stretto.foreign.python import OF_COMPLETION, OF_LLM, missing
from stretto.params import SamplingParams
from stretto.protocol import (
    Action,
    BranchSession,
    CloseSession,
    EngineDead,
    EngineInfo,
    GetSession,
    OpenSession,
    Output,
    Request,
    RequestError,
    RewindSession,
    SessionInfo,
    SessionTurn,
    TokenLogprob,
    Usage,
)
from stretto.text.grammar import GrammarError, check_grammar
from stretto.text.tokenizer import Tokenizer
from stretto.vectors import cosines, unit_vectors

Prompt = str | Sequence[int] | Mapping[str, Any]  # a text, token ids, {"prompt": text} or {"prompt_token_ids": ids}
Message = Mapping[str, Any]


@dataclass
class Completion:
    """One choice of one prompt."""

    index: int
    prompt_tokens: list[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    usage: Usage | None = None

    def __getattr__(self, name: str) -> Any:
        raise missing(self, name, OF_COMPLETION)

    def add(self, output: Output) -> None:
        self.text += output.text
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or []
        self.prompt_logprobs += output.prompt_logprobs or []
        self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
        self.usage = output.usage or self.usage


class GenerationError(RuntimeError):
    """A request that ended with an error of the engine; the message carries the cause."""


def prompt_tokens(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    """The prompt's token ids. Raises TypeError, which shows what was given, for what is no `Prompt`."""
    if isinstance(prompt, Mapping):
        if len(prompt) != 1 or not prompt.keys() <= {"prompt", "prompt_token_ids"}:
            raise TypeError("a prompt as a mapping has either 'prompt' or 'prompt_token_ids' and nothing else; this one"
                            f" has {', '.join(map(repr, prompt)) or 'nothing'}")
        (prompt,) = prompt.values()
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    if not isinstance(prompt, (Sequence, np.ndarray)) or not all(isinstance(token, Integral) for token in prompt):
        raise TypeError(f"a prompt is a text or a list of token ids, not {str(prompt)[:64]!r}"
                        f" ({type(prompt).__name__})")
    return [int(token) for token in prompt]


def check_call(sampling: object, session: object, adapter: object) -> None:
    """Raises TypeError for what stands where these do and is none."""
    for name, value, kind, word in (("sampling_params", sampling, SamplingParams, "SamplingParams"),
                                    ("session", session, SessionTurn, "a SessionTurn"),
                                    ("adapter", adapter, str, "the name of an adapter")):
        if value is not None and not isinstance(value, kind):
            raise TypeError(f"{name} is {str(value)[:64]!r} ({type(value).__name__}); it must be {word}, or None")


def chat_tokens(tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None,
                add_generation_prompt: bool, continue_final_message: bool, more: Mapping[str, Any] | None) -> list[int]:
    """A conversation's token ids. Raises ValueError for what the template cannot do, TypeError for no conversation."""
    if not isinstance(messages, Sequence) or not all(isinstance(message, Mapping) for message in messages):
        raise TypeError(f"a conversation is a list of messages, each a mapping with role and content, not"
                        f" {str(messages)[:64]!r} ({type(messages).__name__})")
    if continue_final_message and add_generation_prompt:
        raise ValueError("continue_final_message goes with add_generation_prompt=False: the answer goes on where the"
                         " last message ends")
    variables = {**(more or {}), **({"continue_final_message": True} if continue_final_message else {})}
    return tokenizer.encode(tokenizer.render_chat_template(messages, tools, add_generation_prompt, **variables),
                            add_special_tokens=False)


def check_embedding(info: EngineInfo, pooling: str | None, dimensions: int | None) -> None:
    """Raises RequestError."""
    if pooling not in (None, "last", "mean"):
        raise RequestError(f"pooling is {pooling!r}; it must be 'last', 'mean' or None", param="pooling")
    if dimensions is not None and (type(dimensions) is not int or not 1 <= dimensions <= info.hidden_size):
        raise RequestError(f"dimensions is {dimensions!r}; it must be a whole number of 1..{info.hidden_size}, the size"
                           " of this model's embeddings", param="dimensions")


def score_texts(text_1: str | Sequence[str], text_2: str | Sequence[str]) -> tuple[list[str], list[str]]:
    """Both as lists. Raises ValueError for several texts that are no pairs."""
    for name, text in (("text_1", text_1), ("text_2", text_2)):
        if not isinstance(text, Sequence) or not all(isinstance(one, str) for one in text):
            raise TypeError(f"{name} is {str(text)[:64]!r} ({type(text).__name__}); it must be a text or a list of"
                            " texts")
    left, right = ([text] if isinstance(text, str) else list(text) for text in (text_1, text_2))
    if len(left) not in (1, len(right)):
        raise ValueError(f"text_1 has {len(left)} texts and text_2 has {len(right)}; give one, or as many")
    return left, right


class LLM:
    """A model and its engine, stepped on the caller's thread. Several threads may use one: what they ask for at the
    same time runs in the same steps, which one of them drives at a time. `AsyncLLM` is for asyncio.

    Options are the fields of the sections in `stretto.config`, such as max_model_len=4096 or speculation="ngram"."""

    def __init__(self, model: str | None = None, *, config: Config | None = None, **options: Any):
        if config is not None and (model is not None or options):
            raise TypeError("give either config or model and options")
        self.prepared: Prepared = prepare(config or make_config(model, options))
        tell_missing(self.prepared)
        self.core: EngineCore = build_core(self.prepared)
        self.tokenizer: Tokenizer = configured_tokenizer(self.prepared.resolved.config,
                                                         self.prepared.tokenizer_path)
        self._serial = itertools.count()
        self._readers: dict[str, deque[Output]] = {}
        self._lock = threading.RLock()  # of the engine and of what its outputs are sorted into
        self._closed = False

    @property
    def info(self) -> EngineInfo:
        return self.core.info

    def get_tokenizer(self) -> Tokenizer:
        """The same as `tokenizer`."""
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What a server of this model samples by where a request says nothing: its generation_config.json's values."""
        return SamplingParams(**dict(self.prepared.resolved.sampling_defaults))  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        raise missing(self, name, OF_LLM)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Ends the engine. Whatever is asked of it afterwards raises EngineDead."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self.core.close()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineDead("this LLM has been closed, by close() or at the end of its `with`; make another one")

    def generate(self, prompts: Prompt | Sequence[Prompt],
                 sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, *,
                 session: SessionTurn | Sequence[SessionTurn | None] | None = None,
                 adapter: str | Sequence[str | None] | None = None, use_tqdm: bool = False) -> list[Completion]:
        """Completes every prompt (text or token ids), all in one batch. A prompt's n choices follow each other.
        `session`: whose turn it is, of one prompt or of each. `adapter`: the LoRA adapter that answers all, or each.
        `use_tqdm`: show a bar of progress, where standard error is a terminal.

        Raises RequestError for a request that cannot be served, before any of them runs."""
        listed = self._listed(prompts)
        requests = self._requests([self._tokens(p) for p in listed], sampling_params, session, adapter)
        completions = {(r.rid, i): Completion(i, r.tokens) for r in requests for i in range(r.sampling.n)}
        with Progress(console=Console(stderr=True), disable=not (use_tqdm and sys.stderr.isatty())) as bar:
            task = bar.add_task("answers", total=len(completions))
            for output in self._run(requests):
                completions[output.rid, output.index].add(output)
                bar.advance(task, output.finish_reason is not None)
        return list(completions.values())

    def chat(self, messages: Sequence[Message] | Sequence[Sequence[Message]],
             sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, *,
             tools: Sequence[Mapping[str, Any]] | None = None, add_generation_prompt: bool = True,
             continue_final_message: bool = False, chat_template_kwargs: Mapping[str, Any] | None = None,
             **options: Any) -> list[Completion]:
        """Answers one conversation, or each of several. `tools`: what the template tells the model of them; the answers
        are text as the model writes it. `continue_final_message`: the answer goes on where the last message ends; then
        `add_generation_prompt` must be False. `chat_template_kwargs`: further variables of the template. `options`:
        those of `generate`."""
        several = isinstance(messages, (list, tuple)) and bool(messages) and not isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = messages if several else [messages]
        prompts = [chat_tokens(self.tokenizer, one, tools, add_generation_prompt, continue_final_message,
                               chat_template_kwargs) for one in conversations]
        return self.generate(prompts, sampling_params, **options)

    def score(self, text_1: str | Sequence[str], text_2: str | Sequence[str]) -> np.ndarray:
        """How near texts are to each other: the cosine of their embeddings, [N] float32, of one text with each of
        several, or of several pairs. Raises RequestError."""
        left, right = score_texts(text_1, text_2)
        return cosines(self.embed([*left, *right]), len(left))

    def embed(self, texts: Prompt | Sequence[Prompt], *, pooling: Literal["last", "mean"] | None = None,
              dimensions: int | None = None) -> np.ndarray:
        """A vector of length 1 for each text, [N, hidden_size] float32: the hidden state of its last token, or the mean
        over all of them, as the checkpoint wants it where nothing is said. `dimensions`: only so many of the first
        numbers. Raises RequestError."""
        check_embedding(self.info, pooling, dimensions)
        tokens = [self._tokens(text) for text in self._listed(texts)]
        requests = [msgspec.structs.replace(request, pooling=pooling or self.info.pooling, want_text=False)
                    for request in self._requests(tokens, SamplingParams(max_tokens=0))]
        if not requests:
            return np.zeros((0, 0), np.float32)
        found = {output.rid: output.embedding or b"" for output in self._run(requests)}
        return unit_vectors([found[request.rid] for request in requests], dimensions)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None, *,
               session: SessionTurn | None = None, adapter: str | None = None) -> Iterator[Output]:
        """Outputs of one prompt as they come. Closing the iterator aborts the request."""
        yield from self._run(self._requests([self._tokens(prompt)], sampling_params, session, adapter))

    def manage(self, action: Action) -> list[SessionInfo]:
        """Opens, shows, branches, rewinds or closes sessions; loads and unloads adapters (see stretto.protocol). Raises
        RequestError."""
        with self._lock:
            self._check_open()
            sessions, outputs = self.core.manage(action)
            self._sort(outputs)
        return sessions

    def open_session(self, sid: str | None = None, **options: Any) -> Conversation:
        """A session to which prompts are appended. Options are those of `protocol.OpenSession`."""
        sid = f"llm-session-{next(self._serial)}" if sid is None else sid
        self.manage(OpenSession(sid=sid, **options))
        return Conversation(self, sid)

    @staticmethod
    def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
        if isinstance(prompts, (str, Mapping)):
            return [prompts]
        if not isinstance(prompts, Sequence):
            raise TypeError(f"prompts are a text, token ids, or a list of such, not {type(prompts).__name__}")
        return [prompts] if prompts and isinstance(prompts[0], Integral) else list(prompts)  # type: ignore[list-item, arg-type]

    def _tokens(self, prompt: Prompt) -> list[int]:
        return prompt_tokens(self.tokenizer, prompt)

    def _requests(self, prompts: list[list[int]],
                  sampling: SamplingParams | Sequence[SamplingParams] | None,
                  session: SessionTurn | Sequence[SessionTurn | None] | None = None,
                  adapter: str | Sequence[str | None] | None = None) -> list[Request]:
        given = list(sampling) if isinstance(sampling, (list, tuple)) else [sampling] * len(prompts)
        each: list[Any] = [SamplingParams() if params is None else params for params in given]
        if len(each) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts and {len(each)} sampling parameters: give one, or one for each")
        for params in each:
            check_call(params, None, None)
        for grammar in dict.fromkeys(params.grammar for params in each if params.grammar is not None):
            try:
                check_grammar(grammar)
            except GrammarError as e:
                raise RequestError(str(e), param="grammar", code="invalid_grammar") from e
        several = isinstance(session, (list, tuple))
        turns: list[Any] = list(session) if several else ([session] + [None] * len(prompts))[: len(prompts)]  # type: ignore[arg-type]
        if len(turns) != len(prompts) or (session is not None and not several and len(turns) > 1):
            raise ValueError(f"{len(prompts)} prompts and {len(turns)} turns of sessions: give one for each prompt")
        named = [adapter] * len(prompts) if adapter is None or isinstance(adapter, str) else list(adapter)
        if len(named) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts and {len(named)} adapters: give one, or one for each")
        for turn, name in zip(turns, named, strict=True):
            check_call(None, turn, name)
        return [Request(rid=f"llm-{next(self._serial)}", tokens=tokens, sampling=params, arrival=time.monotonic(),
                        session=turn, adapter=name)
                for tokens, params, turn, name in zip(prompts, each, turns, named, strict=True)]

    def _run(self, requests: list[Request]) -> Iterator[Output]:
        """Steps the engine until these requests are done; aborts what is left when the caller stops early. Outputs of
        other streams of this object, which may be open at the same time, wait for their own readers."""
        unfinished = {request.rid: request.sampling.n for request in requests}
        mine: deque[Output] = deque()
        try:
            with self._lock:
                self._check_open()
                for request in requests:
                    self.core.submit(request)
                    self._readers[request.rid] = mine
            while unfinished:
                while not mine:
                    self._step(mine)
                output = mine.popleft()
                if output.finish_reason is not None:
                    unfinished[output.rid] -= 1
                    if not unfinished[output.rid]:
                        del unfinished[output.rid]
                if output.finish_reason == "error" and output.error_code is not None:
                    raise RequestError(output.error or "", param=output.error_param, code=output.error_code)
                if output.finish_reason == "error":
                    raise GenerationError(output.error or "the engine failed")
                yield output
        finally:
            with self._lock:
                for request in requests:
                    self._readers.pop(request.rid, None)
                for rid in () if self._closed else unfinished:
                    self._sort(self.core.abort(rid))

    def _step(self, mine: deque[Output]) -> None:
        """A step, unless another thread's has filled `mine` in the meantime."""
        with self._lock:
            self._check_open()
            if not mine:
                self._sort(self.core.step())

    def _sort(self, outputs: list[Output]) -> None:
        for output in outputs:
            if output.rid in self._readers:
                self._readers[output.rid].append(output)


class Conversation:
    """A session of an LLM: each prompt follows all that was said before, and only what is new is computed.

        with llm.open_session() as talk:
            print(talk.generate("Once upon a time").text)
            other = talk.branch()
    """

    def __init__(self, llm: LLM, sid: str):
        self.llm, self.sid = llm, sid

    def generate(self, prompt: Prompt, sampling_params: SamplingParams | None = None, **order: Any) -> Completion:
        """The next turn. A begin-of-sequence token stands at the start of the history only. `order`: fields of
        `protocol.SessionTurn`, such as offset=-1. Raises RequestError."""
        return self.llm.generate([prompt], sampling_params, session=self._turn(prompt, order))[0]

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None, **order: Any) -> Iterator[Output]:
        """Closing the iterator aborts the turn, which then leaves no trace, or with on_disconnect="keep" what came."""
        return self.llm.stream(prompt, sampling_params, session=self._turn(prompt, order))

    def _turn(self, prompt: Prompt, order: Mapping[str, Any]) -> SessionTurn:
        bos, tokens = self.llm.tokenizer.bos_token_id, self.llm._tokens(prompt)
        continuation = tokens[1:] if bos is not None and tokens[:1] == [bos] else None
        if isinstance(prompt, str):
            continuation = self.llm.tokenizer.encode_inside(prompt)
        usual = {"sid": self.sid, "mode": "append", "create": False, "continuation": continuation}
        return SessionTurn(**{**usual, **order})

    @property
    def info(self) -> SessionInfo:
        return self.llm.manage(GetSession(self.sid))[0]

    def branch(self, at: int | None = None) -> Conversation:
        """Another one with the same history, or its first `at` tokens."""
        sid = f"{self.sid}-{next(self.llm._serial)}"
        self.llm.manage(BranchSession(self.sid, sid, at))
        return Conversation(self.llm, sid)

    def rewind(self, at: int) -> None:
        """The first `at` tokens of the history stay."""
        self.llm.manage(RewindSession(self.sid, at))

    def close(self) -> None:
        self.llm.manage(CloseSession(self.sid, abort=True))

    def __enter__(self) -> Conversation:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()
