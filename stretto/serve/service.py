"""What every route shares: the engine, the prompt reader, who is live, and one way to run a generation.

    body -> Generation (one engine request per prompt) -> merged outputs -> chat.py / completions.py -> client

Closing the merged iterator, for whatever reason, aborts what still runs: a client that goes away frees everything.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import threading
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from stretto.params import Grammar, ParameterError
from stretto.protocol import (
    ENGINE_DEAD,
    AsyncEngine,
    EngineDead,
    EngineInfo,
    EngineRestarting,
    Output,
    Request,
    RequestError,
    TokenLogprob,
    Usage,
    reached,
)
from stretto.serve.clock import CallClock
from stretto.serve.errors import CLIENT_CLOSED, ApiError, bad_request, did_you_mean, model_not_found, unsupported
from stretto.serve.grammars import INVALID, refused
from stretto.serve.interfaces import ServeTokenizer
from stretto.serve.metrics import ServerMetrics
from stretto.serve.prompts import PromptReader
from stretto.serve.replies import ReplyPlan, ReplyPlanner
from stretto.serve.sampling import chooses, fit_max_tokens, in_request_words, kept_tokens, to_sampling
from stretto.serve.schemas import CompletionRequest, GenerationBody
from stretto.serve.settings import ServeSettings
from stretto.serve.tracing import Tracing
from stretto.text.grammar import GrammarError, check_grammar, is_quick

DRAINING = "draining"
T = TypeVar("T")
Outputs = AsyncGenerator[Output, None]
MAX_ID_LENGTH = 256
GRAMMAR_SECONDS = 10.0  # for the check of one grammar, and for which one waits for others that take long
CHECKED = 1024  # grammars that need no second check
STATS_TIMEOUT = 5.0  # a scrape of a busy engine waits so long for fresh numbers


@dataclass
class Generation:
    """One API call: its engine requests, in prompt order."""

    id: str
    body: GenerationBody
    requests: list[Request]
    ignored: list[str]
    reply: ReplyPlan = field(default_factory=ReplyPlan)
    trace_parent: Mapping[str, str] = field(default_factory=dict)  # the headers that name the client's span
    created: int = field(default_factory=lambda: int(time.time()))
    begun: bool = False  # something of it has come back from the engine

    @property
    def adapter(self) -> str | None:
        return self.requests[0].adapter

    @property
    def choices(self) -> int:
        """Per prompt."""
        return self.requests[0].sampling.n


class Service:
    """Made once per app; every method runs on the event loop."""

    def __init__(self, engine: AsyncEngine, tokenizer: ServeTokenizer, settings: ServeSettings,
                 trace_provider: Any = None):
        self.engine, self.tokenizer, self.settings = engine, tokenizer, settings
        self.names = settings.served_model_names or (self.info.model_name,)
        self.reader = PromptReader(tokenizer, self.info.vocab_size, self.info.max_model_len)
        self.replies = ReplyPlanner(tokenizer)
        self.metrics = ServerMetrics(self.info, self.names[0], settings.replica)
        self.metrics.adapters = self._adapters
        self.tracing = Tracing(trace_provider, self.names[0]) if trace_provider is not None else None
        self.started = int(time.time())
        self.draining = False
        self._drain_ended = ""  # why what was left of a drain has been withdrawn
        self._interruption: str | None = None  # why there is no engine just now
        self._live: dict[str, Generation] = {}
        self._live_requests = 0
        self._pool = ThreadPoolExecutor(settings.tokenizer_threads, "tokenizer")
        self._quick_grammars = ThreadPoolExecutor(1, "grammar check")
        self._slow_grammars = ThreadPoolExecutor(2, "slow grammar check")
        self._checked: dict[Grammar, None] = {}  # the latest
        self._stats_lock = asyncio.Lock()
        self.token_bytes = functools.lru_cache(maxsize=65536)(tokenizer.token_bytes)

    # ------------------------------------------------------------------------------------------------- helpers
    async def in_pool(self, work: Callable[..., T], *args) -> T:
        """Runs CPU work off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *args)

    def token_text(self, token: int) -> str:
        """One token as text; a part of a character shows as U+FFFD."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in self.names and name not in self.info.adapters:
            raise model_not_found(name, [*self.names, *self.info.adapters])

    def adapter(self, name: str | None) -> str | None:
        """The LoRA adapter that a checked model name stands for; None: the model itself."""
        return name if name is not None and name not in self.names else None

    def check_open(self) -> None:
        if self.draining:
            raise _draining(" and takes no new requests")
        if self._interruption is not None:
            raise EngineRestarting(self._interruption)

    def note_interruption(self, cause: str | None) -> None:
        """The engine has died and is started again (its cause), or is there once more (None)."""
        self._interruption = cause
        self.metrics.info = self.info

    @property
    def info(self) -> EngineInfo:
        return self.engine.info

    def _adapters(self) -> tuple[set[str], set[str]]:
        """Of calls that have begun; of those that wait, or have their prompt computed."""
        live = [one for one in self._live.values() if one.adapter is not None]
        return ({str(one.adapter) for one in live if one.begun}, {str(one.adapter) for one in live if not one.begun})

    @property
    def live_calls(self) -> int:
        return len(self._live)

    async def refresh_stats(self) -> None:
        """Brings the engine's numbers into metrics; keeps the old ones where the engine does not answer in time."""
        async with self._stats_lock:
            with contextlib.suppress(TimeoutError, EngineDead):
                self.metrics.take(await asyncio.wait_for(self.engine.stats(), STATS_TIMEOUT))

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._quick_grammars.shutdown(wait=False, cancel_futures=True)
        self._slow_grammars.shutdown(wait=False, cancel_futures=True)
        if self.tracing is not None:
            self.tracing.close()

    # ------------------------------------------------------------------------------------------ a call begins
    def choose_id(self, body: GenerationBody, http_id: str) -> str:
        """The body's request_id, which must be free; else the HTTP request's id, made unique."""
        if body.request_id is not None:
            _check_id(body.request_id, "request_id")
            if body.request_id in self._live:
                raise _duplicate(body.request_id)
            return body.request_id
        return http_id if http_id not in self._live else f"{http_id}-{uuid.uuid4().hex[:8]}"

    def make_requests(self, id: str, body: GenerationBody, prompts: list[list[int]], arrival: float,
                      reply: ReplyPlan | None = None, bad_words: tuple[tuple[int, ...], ...] = ()) -> list[Request]:
        """One engine request per prompt. Raises ApiError for what can be refused without the engine."""
        try:
            sampling = to_sampling(body, self.info.sampling_defaults, bad_words)
            if reply is not None and (reply.grammar or reply.keep_special):
                skip = sampling.skip_special_tokens and not reply.keep_special
                sampling = msgspec.structs.replace(sampling, grammar=reply.grammar, skip_special_tokens=skip)
        except ParameterError as e:
            raise in_request_words(RequestError(str(e), param=e.param), body) from e
        total = len(prompts) * max(sampling.n, 1)
        if total > self.settings.max_choices:
            param = "best_of" if isinstance(body, CompletionRequest) and chooses(body) else "n"
            raise bad_request(f"{param} times the number of prompts is {total}; the limit is"
                              f" {self.settings.max_choices}", param)
        keep = kept_tokens(body, self.info.max_model_len)
        requests = []
        for i, prompt in enumerate(prompts):
            tokens = prompt[-keep:] if keep else prompt
            fitted = fit_max_tokens(sampling, body, len(tokens), self.info.max_model_len)
            requests.append(Request(rid=id if len(prompts) == 1 else f"{id}-{i}", tokens=tokens, sampling=fitted,
                                    priority=body.priority or 0, cache_salt=body.cache_salt or "", arrival=arrival,
                                    adapter=self.adapter(body.model)))
        return requests

    async def check_grammars(self, generation: Generation) -> None:
        """Raises ApiError for a grammar that cannot be used. A grammar that has been checked is known from then on."""
        if generation.reply.grammar is not None and not self.info.eos_token_ids:
            raise unsupported("a grammar", "this model names no token that ends an answer")
        for grammar, param in generation.reply.checks:
            if grammar in self._checked:
                continue
            quick = asyncio.get_running_loop().run_in_executor(self._quick_grammars, is_quick, grammar)
            if not await quick:
                await self._check_slowly(grammar, param)
            self._checked[grammar] = None
            if len(self._checked) > CHECKED:
                del self._checked[next(iter(self._checked))]

    async def _check_slowly(self, grammar: Grammar, param: str) -> None:
        begun = threading.Event()

        def check() -> None:
            begun.set()
            check_grammar(grammar)
        checking = asyncio.get_running_loop().run_in_executor(self._slow_grammars, check)
        try:
            await asyncio.wait({checking}, timeout=GRAMMAR_SECONDS)
            if begun.is_set():
                await asyncio.wait({checking}, timeout=GRAMMAR_SECONDS)
            if checking.done():
                return checking.result()
        except GrammarError as e:
            raise refused(param, e) from e
        finally:
            checking.cancel()
        if begun.is_set():
            raise bad_request(f"{param} takes more than {GRAMMAR_SECONDS:g} s to check; simplify it", param, INVALID)
        raise ApiError(429, f"{param} takes long to check, and others that do are checked before it; try again",
                       code="queue_full", headers={"Retry-After": "1"})

    @contextlib.contextmanager
    def registered(self, generation: Generation):
        """While it is open, the call counts as live and can be found by its id."""
        self.check_open()
        count = len(generation.requests)
        if self._live_requests + count > self.settings.max_live_requests:
            raise ApiError(429, f"{self._live_requests} requests are running or waiting; the limit is"
                           f" {self.settings.max_live_requests}", code="queue_full", headers={"Retry-After": "1"})
        if generation.id in self._live:
            raise _duplicate(generation.id)
        self._live[generation.id] = generation
        self._live_requests += count
        try:
            yield
        finally:
            self._live_requests -= count
            self._forget(generation)

    def _forget(self, generation: Generation) -> None:
        if self._live.get(generation.id) is generation:
            del self._live[generation.id]

    # ------------------------------------------------------------------------------------------------- running
    async def outputs(self, generation: Generation) -> AsyncGenerator[tuple[int, Output], None]:
        """(prompt index, Output) of every choice as they come. Raises ApiError for whatever goes wrong."""
        clock = CallClock(self.metrics, generation.id, generation.requests)
        prompts = {request.rid: i for i, request in enumerate(generation.requests)}
        failure: BaseException | None = None
        try:
            with self.registered(generation):
                streams = [self.engine.generate(request) for request in generation.requests]
                async with contextlib.aclosing(self._in_time(generation, _merge(streams))) as merged:
                    async for output in merged:
                        generation.begun, index = True, prompts[output.rid]
                        clock.note(index, output)
                        if output.finish_reason is not None:
                            _raise_failure(output, self._drain_ended)
                        if output.prompt_logprobs is not None:
                            output.prompt_logprobs = _of_every_new_token(generation.requests[index],
                                                                         output.prompt_logprobs)
                        yield index, output
        except RequestError as e:
            failure = in_request_words(_with_grammars_field(e, generation), generation.body)
            raise failure from e
        except BaseException as e:  # the client that went away, too
            failure = e
            raise
        finally:
            clock.end(_withdrawn(failure))
            if self.tracing is not None:
                self.tracing.record(generation, clock, None if clock.finished else failure)

    def _in_time(self, generation: Generation, outputs: Outputs) -> Outputs:
        """The outputs, until the call has taken the time that it may."""
        limits = [one for one in (generation.body.timeout, self.settings.request_timeout) if one is not None]
        return self._until(generation.requests[0].arrival, min(limits), outputs) if limits else outputs

    async def _until(self, arrival: float, limit: float, outputs: Outputs) -> Outputs:
        """Raises ApiError `limit` seconds after the arrival. What a slow reader takes counts, and is noticed when the
        next output is asked for."""
        async with contextlib.aclosing(outputs):
            while True:
                try:
                    async with asyncio.timeout(arrival + limit - time.monotonic()):
                        output = await anext(outputs)
                except StopAsyncIteration:
                    return
                except TimeoutError:
                    self.metrics.aborts["request_timeout"] += 1
                    raise ApiError(408, f"the answer was not complete after {limit:g} s, which is all that this call"
                                   " may take", param="timeout", code="request_timeout") from None
                yield output

    async def abort(self, id: str) -> bool:
        """Withdraws a live call; its client gets an error. Returns once the engine has released it; its id is free."""
        generation = self._live.get(id)
        if generation is None:
            return False
        results = await asyncio.gather(*(self.engine.abort(request.rid) for request in generation.requests))
        self._forget(generation)
        self.metrics.aborts["abort_request"] += any(results)
        return any(results)

    async def abort_all(self, prefix: str = "") -> list[str]:
        """Those whose ids begin with `prefix`; the ids of those that were still there."""
        ids = [id for id in self._live if id.startswith(prefix)]
        done = await asyncio.gather(*(self.abort(id) for id in ids))
        return [id for id, live in zip(ids, done, strict=True) if live]

    async def end_drain(self, why: str) -> None:
        """Withdraws every call that is left of a drain; their clients are told why, and may ask again elsewhere."""
        self._drain_ended = why
        await self.abort_all()

    def find_hint(self, id: str) -> str:
        return did_you_mean(id, self._live)


def _duplicate(id: str) -> ApiError:
    return bad_request(f"a request with the id {id!r} is still running; take another id, or wait for it", "request_id",
                       "duplicate_request_id")


def _check_id(id: str, param: str) -> None:
    if not 0 < len(id) <= MAX_ID_LENGTH or not id.isascii() or not id.isprintable():
        raise bad_request(f"{param} must have 1 to {MAX_ID_LENGTH} printable ASCII characters", param)


def _with_grammars_field(error: RequestError, generation: Generation) -> RequestError:
    """The engine knows of one grammar; the client is told which of its fields asked for it."""
    if error.code != INVALID and error.param != "grammar":
        return error
    checks = generation.reply.checks
    return RequestError(str(error), param=checks[0].param if checks else "tools", code=INVALID)


def _withdrawn(failure: BaseException | None) -> bool:
    """The call ended because nobody waits for it any more: the client has gone (its task is cancelled, or the outputs
    are closed), it was aborted, or its time or the server's was up."""
    if isinstance(failure, ApiError):
        return failure.status in (CLIENT_CLOSED, 408) or failure.code == DRAINING
    return isinstance(failure, (asyncio.CancelledError, GeneratorExit))


def _draining(message: str) -> ApiError:
    return ApiError(503, f"the server is shutting down{message}", code=DRAINING, headers={"Retry-After": "10"})


def _raise_failure(output: Output, drain_ended: str) -> None:
    if output.error_code == ENGINE_DEAD:
        raise EngineDead(output.error or "")
    if output.finish_reason == "error" and output.error_code is not None:
        raise RequestError(output.error or "", param=output.error_param, code=output.error_code)
    if output.finish_reason == "error":
        raise ApiError(500, f"the engine failed on this request: {output.error}", code="engine_error")
    if output.finish_reason == "abort" and drain_ended:
        raise _draining(f", and this answer was not complete when {drain_ended}")
    if output.finish_reason == "abort":
        raise ApiError(CLIENT_CLOSED, "the request was aborted", code="request_aborted")


def _of_every_new_token(request: Request, scores: list[TokenLogprob]) -> list[TokenLogprob]:
    """The prompt's scores with an entry for its first token, which has none. Behind the history of a session the
    engine scores what follows the first new token alone:

        history | first new  second new  third new
                              score       score"""
    turn = request.session
    if turn is None or turn.mode != "append" or (scores and scores[0].logprob is None):
        return scores
    new = new_tokens(request)  # of which a joined id may be left out
    return [TokenLogprob(new[-len(scores) - 1], None, [], []), *scores]


def new_tokens(request: Request) -> list[int]:
    """The prompt; of a turn that is appended to a session, what it adds to the history."""
    turn = request.session
    appended = turn.continuation if turn is not None and turn.mode == "append" else None
    return request.tokens if appended is None else appended


def _merge(streams: list[AsyncIterator[Output]]) -> Outputs:
    """Outputs of several requests as they come; of one request without any detour. Closes every stream at its end."""
    return streams[0] if len(streams) == 1 else _interleaved(streams)  # type: ignore[return-value]


async def _interleaved(streams: list[AsyncIterator[Output]]) -> Outputs:
    waiting = {asyncio.ensure_future(anext(stream)): i for i, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                i = waiting.pop(task)
                if isinstance(task.exception(), StopAsyncIteration):
                    continue
                output = task.result()
                waiting[asyncio.ensure_future(anext(streams[i]))] = i
                yield output
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for stream in streams:
            await stream.aclose()  # type: ignore[attr-defined]


def total_usage(last: dict[tuple[int, int], Usage], requests: list[Request]) -> dict:
    """OpenAI's usage object over all choices, with what speculation did. Prompts count once, whatever n is; what the
    prefix cache held is that of each prompt's first choice, since the others share its prompt."""
    found = {prompt: usage.prompt_tokens for (prompt, index), usage in last.items() if index == 0}  # with histories
    prompt_tokens = sum(found.get(prompt) or len(request.tokens) for prompt, request in enumerate(requests))
    completion = sum(usage.completion_tokens for usage in last.values())
    cached = sum(min(usage.cached_tokens, usage.prompt_tokens or len(requests[prompt].tokens))
                 for (prompt, index), usage in last.items() if index == 0)
    return {
        "prompt_tokens": prompt_tokens, "completion_tokens": completion, "total_tokens": prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "speculation": speculated(list(last.values())),
    }


def speculated(usages: Sequence[Usage]) -> dict[str, Any]:
    """What speculation did for some choices. `accepted_runs`: item n is in how many steps n drafts were accepted;
    `drafted_at`, `accepted_at`: by place in the draft; `tokens_per_step`: the mean accepted length, the last id, which
    is no draft, included."""
    steps = sum(usage.steps for usage in usages)
    tokens = sum(usage.completion_tokens for usage in usages)
    runs = [_summed([getattr(usage, name) for usage in usages]) for name in ("verified_runs", "accepted_runs")]
    return {"drafted_tokens": sum(usage.drafted_tokens for usage in usages),
            "accepted_tokens": sum(usage.accepted_tokens for usage in usages), "steps": steps,
            "tokens_per_step": round(tokens / steps, 4) if steps else None, "accepted_runs": runs[1],
            "drafted_at": reached(runs[0]), "accepted_at": reached(runs[1] + [0] * (len(runs[0]) - len(runs[1])))}


def _summed(histograms: Sequence[Sequence[int]]) -> list[int]:
    return [sum(counts) for counts in itertools.zip_longest(*histograms, fillvalue=0)]
