"""The Python interface for asyncio: many callers, one engine on a thread of this process.

    async with await AsyncLLM.start("path/or/hub-id") as llm:
        async for output in llm.generate("Once upon a time", SamplingParams(max_tokens=32)):
            print(output.text, end="")
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Literal

import numpy as np

from stretto.config import Config
from stretto.engine.build import build_core
from stretto.engine.inprocess import InProcessEngine
from stretto.engine.llm import (
    GenerationError,
    Message,
    Prompt,
    chat_tokens,
    check_call,
    check_embedding,
    prompt_tokens,
    score_texts,
)
from stretto.engine.locate import configured_tokenizer
from stretto.engine.options import make_config, tell_missing
from stretto.engine.prepare import prepare
from stretto.foreign.python import OF_LLM, missing
from stretto.params import SamplingParams
from stretto.protocol import Action, EngineInfo, EngineStats, Output, Request, SessionInfo, SessionTurn
from stretto.text.tokenizer import Tokenizer
from stretto.vectors import cosines, unit_vectors


class AsyncLLM:
    """Made by `await AsyncLLM.start(...)`; used on the event loop that started it."""

    def __init__(self, engine: InProcessEngine, tokenizer: Tokenizer):
        self.engine, self.tokenizer = engine, tokenizer

    @classmethod
    async def start(cls, model: str | None = None, *, config: Config | None = None, **options: Any) -> AsyncLLM:
        """Options as for `LLM`. Raises what `prepare` raises, and EngineDead if the engine cannot start."""
        if config is not None and (model is not None or options):
            raise TypeError("give either config or model and options")
        prepared = await asyncio.to_thread(prepare, config or make_config(model, options))
        tell_missing(prepared)
        engine = await InProcessEngine.start(partial(build_core, prepared))
        return cls(engine, configured_tokenizer(prepared.resolved.config, prepared.tokenizer_path))

    @property
    def info(self) -> EngineInfo:
        return self.engine.info

    def get_tokenizer(self) -> Tokenizer:
        """The same as `tokenizer`."""
        return self.tokenizer

    def __getattr__(self, name: str) -> Any:
        raise missing(self, name, OF_LLM)

    def generate(self, prompt: Prompt, sampling_params: SamplingParams | None = None, *,
                 request_id: str | None = None, session: SessionTurn | None = None,
                 adapter: str | None = None) -> AsyncIterator[Output]:
        """Outputs of every choice as they come. Closing the iterator aborts the request. `session`: whose turn it is.
        Raises RequestError."""
        check_call(sampling_params, session, adapter)
        tokens = prompt_tokens(self.tokenizer, prompt)
        return self.engine.generate(Request(rid=request_id or uuid.uuid4().hex, tokens=tokens,
                                            sampling=sampling_params or SamplingParams(), arrival=time.monotonic(),
                                            session=session, adapter=adapter))

    def chat(self, messages: Sequence[Message], sampling_params: SamplingParams | None = None, *,
             tools: Sequence[Mapping[str, Any]] | None = None, add_generation_prompt: bool = True,
             continue_final_message: bool = False, chat_template_kwargs: Mapping[str, Any] | None = None,
             **options: Any) -> AsyncIterator[Output]:
        """Answers a conversation. Arguments are those of `LLM.chat`; `options`: those of `generate`."""
        tokens = chat_tokens(self.tokenizer, messages, tools, add_generation_prompt, continue_final_message,
                             chat_template_kwargs)
        return self.generate(tokens, sampling_params, **options)

    async def embed(self, texts: Sequence[Prompt], *, pooling: Literal["last", "mean"] | None = None,
                    dimensions: int | None = None) -> np.ndarray:
        """As `LLM.embed`, of a list."""
        check_embedding(self.info, pooling, dimensions)
        return unit_vectors(await asyncio.gather(*(self._vector(text, pooling) for text in texts)), dimensions)

    async def score(self, text_1: str | Sequence[str], text_2: str | Sequence[str]) -> np.ndarray:
        """As `LLM.score`."""
        left, right = score_texts(text_1, text_2)
        return cosines(await self.embed([*left, *right]), len(left))

    async def _vector(self, text: Prompt, pooling: Literal["last", "mean"] | None) -> bytes:
        tokens = prompt_tokens(self.tokenizer, text)
        request = Request(rid=uuid.uuid4().hex, tokens=tokens, sampling=SamplingParams(max_tokens=0),
                          pooling=pooling or self.info.pooling,
                          arrival=time.monotonic(), want_text=False)
        (output,) = [output async for output in self.engine.generate(request)]
        if output.embedding is None:
            raise GenerationError(output.error or f"the engine ended a request with {output.finish_reason!r}")
        return output.embedding

    async def abort(self, request_id: str) -> bool:
        return await self.engine.abort(request_id)

    async def manage(self, action: Action) -> list[SessionInfo]:
        """Opens, shows, branches, rewinds or closes sessions (see stretto.protocol). Raises RequestError."""
        return await self.engine.manage(action)

    async def stats(self) -> EngineStats:
        return await self.engine.stats()

    async def close(self) -> None:
        await self.engine.close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None,
                        trace: TracebackType | None) -> None:
        await self.close()
