"""Load on any server with OpenAI's API, and what its clients see. No torch in this module.

    closed loop   N clients, each sends its next request when its answer is complete
    open loop     requests arrive at random with a given rate (a gamma process; a Poisson one where burstiness is 1),
                  whether or not earlier ones are complete; times count from the arrival that was due, so a server
                  (or client) that lags hides nothing

A conversation is a list of user turns, sent one after the other with the answers that the server gave.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import re
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import httpx
import msgspec

from stretto.bench.events import EventClient
from stretto.bench.workload import WORDS

Message = dict[str, str]


@dataclass(frozen=True)
class Target:
    """A server. `base`: without /v1."""

    name: str
    base: str
    model: str
    api_key: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)  # further fields of every request


@dataclass(frozen=True)
class Conversation:
    turns: tuple[str, ...]
    output_tokens: int


@dataclass(frozen=True)
class Load:
    """How conversations are sent. `rate`: arrivals a second (open loop); None: closed loop of `concurrency`."""

    conversations: tuple[Conversation, ...]
    rate: float | None = None
    burstiness: float = 1.0  # open loop: 1 is a Poisson process; below it arrivals come in bursts, above it evenly
    concurrency: int = 8  # open loop: most in flight; what is over waits, and its time counts
    api: Literal["chat", "completions"] = "chat"
    timeout: float = 600.0
    ignore_eos: bool = True
    sessions: bool = False  # each conversation has a session id, in a header that gateways route by
    seed: int = 0


@dataclass
class Sample:
    """One request as its client saw it. Times in seconds from the moment it was due."""

    first: float | None = None  # until the first text
    end: float = 0.0
    gaps: list[float] = field(default_factory=list)  # between pieces of text
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    counted: bool = False  # the server reported usage; else pieces are counted as tokens
    error: str | None = None
    text: str = ""

    @property
    def per_token(self) -> float | None:
        """Seconds a token after the first."""
        if self.first is None or self.output_tokens < 2:
            return None
        return (self.end - self.first) / (self.output_tokens - 1)


@dataclass
class Run:
    target: Target
    samples: list[Sample]
    seconds: float
    client_cpu: float  # share of one core that this client used: near 1 the client is what is measured
    server_cpu: float | None = None  # processor seconds of the server's front process; None where it does not tell
    version: str | None = None  # of the server, where it tells


def synthetic_conversations(count: int, *, words: int, output_tokens: int, turns: int = 1, shared: int = 0,
                            long_every: int = 0, long_words: int = 0, seed: int = 0) -> tuple[Conversation, ...]:
    """Plain words, about 1.1 tokens each. `shared`: words that every first turn begins with. Each `long_every`th
    conversation begins with `long_words` words, which is felt by the others' gaps."""
    chance = random.Random(seed)
    prefix = " ".join(chance.choices(WORDS, k=shared))
    found = []
    for i in range(count):
        size = long_words if long_every and i % long_every == long_every - 1 else words
        said = [" ".join(chance.choices(WORDS, k=size))] + [
            " ".join(chance.choices(WORDS, k=words)) for _ in range(turns - 1)]
        said[0] = f"{prefix} {said[0]}".strip()
        found.append(Conversation(tuple(said), output_tokens))
    return tuple(found)


def marked(conversations: Sequence[Conversation], mark: str) -> tuple[Conversation, ...]:
    """The same, beginning otherwise: whoever has answered them once finds nothing of it in a prefix cache."""
    return tuple(replace(one, turns=(f"({mark}) {one.turns[0]}", *one.turns[1:])) for one in conversations)


def conversations_of(path: Path, count: int, output_tokens: int) -> tuple[Conversation, ...]:
    """Of a file with one JSON object a line ("prompt", "question", "turns") or a ShareGPT list ("conversations").
    Raises ValueError, naming the file and what is wrong."""
    try:
        text = path.read_text(encoding="utf-8")
        records = json.loads(text) if text.lstrip().startswith("[") else [
            json.loads(line) for line in text.splitlines() if line.strip()]
    except OSError as e:
        raise ValueError(f"{path} cannot be read: {e.strerror}") from e
    except ValueError as e:
        raise ValueError(f"{path} is neither a JSON list nor one JSON object a line: {e}") from e
    found = list(itertools.islice((turns for record in records if (turns := _turns(record))), count))
    if not found:
        raise ValueError(f'{path} has no record with "prompt", "question", "turns" or "conversations"')
    return tuple(Conversation(turns, output_tokens) for turns in found)


def _turns(record: Any) -> tuple[str, ...]:
    if not isinstance(record, dict):
        return ()
    for name in ("prompt", "question"):
        if isinstance(record.get(name), str):
            return (record[name],)
    if isinstance(record.get("turns"), list):
        return tuple(turn for turn in record["turns"] if isinstance(turn, str))
    said = record.get("conversations") or record.get("conversation") or []
    return tuple(part["value"] for part in said if isinstance(part, dict) and part.get("from") in ("human", "user")
                 and isinstance(part.get("value"), str))


def _nobody(sample: Sample) -> None:
    pass


async def run_load(target: Target, load: Load, on_end: Callable[[Sample], None] = _nobody) -> Run:
    """Sends every conversation of the load. `on_end` is called after each answer, failed ones too."""
    headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    samples: list[Sample] = []
    async with httpx.AsyncClient(base_url=target.base, timeout=load.timeout, headers=headers, trust_env=False) as http:
        with contextlib.closing(EventClient(target.base, headers, load.timeout)) as events:
            client = _Client(events, target, load, samples, on_end)
            server_before = await _server_cpu(http)
            cpu, started = time.process_time(), time.perf_counter()
            if load.rate is None:
                await client.closed_loop()
            else:
                await client.open_loop(load.rate)
            seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
            server_after, version = await _server_cpu(http), await _version(http)
    used = None if server_before is None or server_after is None else server_after - server_before
    return Run(target, samples, seconds, cpu / seconds, used, version)


async def _server_cpu(http: httpx.AsyncClient) -> float | None:
    """Of the usual metric of Prometheus' clients, which other engines have too."""
    try:
        answer = await http.get("/metrics")
    except httpx.HTTPError:
        return None
    found = re.search(r"^process_cpu_seconds_total(?:{.*})? (\S+)", answer.text, re.MULTILINE)
    return float(found[1]) if answer.status_code == 200 and found else None


async def _version(http: httpx.AsyncClient) -> str | None:
    """By the route that vLLM has for it too."""
    try:
        return str((await http.get("/version")).json()["version"])
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return None


class _Client:
    def __init__(self, events: EventClient, target: Target, load: Load, samples: list[Sample],
                 on_end: Callable[[Sample], None]):
        self._events, self._target, self._load, self._samples, self._on_end = events, target, load, samples, on_end

    async def closed_loop(self) -> None:
        left = iter(self._load.conversations)

        async def one_client() -> None:
            for conversation in left:
                await self._converse(conversation, time.perf_counter())

        async with asyncio.TaskGroup() as group:
            for _ in range(min(self._load.concurrency, len(self._load.conversations))):
                group.create_task(one_client())

    async def open_loop(self, rate: float) -> None:
        places = asyncio.Semaphore(self._load.concurrency)

        async def one(conversation: Conversation, due: float) -> None:
            async with places:
                await self._converse(conversation, due)

        async with asyncio.TaskGroup() as group:
            for conversation, due in zip(self._load.conversations, self._arrivals(rate), strict=False):
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                group.create_task(one(conversation, due))

    def _arrivals(self, rate: float) -> Iterator[float]:
        chance, due = random.Random(self._load.seed), time.perf_counter()
        while True:
            yield due
            due += chance.gammavariate(self._load.burstiness, 1 / (rate * self._load.burstiness))

    async def _converse(self, conversation: Conversation, due: float) -> None:
        messages: list[Message] = []
        headers = {"X-Session-Id": f"bench-{uuid.uuid4().hex}"} if self._load.sessions else {}
        for number, turn in enumerate(conversation.turns, 1):
            messages.append({"role": "user", "content": turn})
            if headers and number == len(conversation.turns):
                headers["X-Dynamo-Session-Final"] = "true"
            sample = Sample()
            self._samples.append(sample)
            try:
                await self._ask(messages, conversation.output_tokens, sample, due, headers)
            except (OSError, ValueError) as e:  # TimeoutError is an OSError
                told = str(e) if isinstance(e, ValueError) else f"{type(e).__name__}: {e}"
                sample.error, sample.end = told[:300], time.perf_counter() - due
                return
            finally:
                self._on_end(sample)
            messages.append({"role": "assistant", "content": sample.text})
            due = time.perf_counter()

    def _body(self, messages: list[Message], output_tokens: int) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self._target.model, "stream": True, "temperature": 0,
                                "stream_options": {"include_usage": True}, "max_tokens": output_tokens}
        if self._load.ignore_eos:
            body["ignore_eos"] = True
        if self._load.api == "chat":
            body["messages"] = messages
        else:
            body["prompt"] = "\n".join(message["content"] for message in messages)
        return body | self._target.extra

    async def _ask(self, messages: list[Message], output_tokens: int, sample: Sample, due: float,
                   headers: dict[str, str]) -> None:
        path = "/v1/chat/completions" if self._load.api == "chat" else "/v1/completions"
        body = msgspec.json.encode(self._body(messages, output_tokens))
        listener = _Listener(sample, due, self._load.api)
        answer = await self._events.post(path, body, listener.hear, headers)
        if answer.status != 200:
            raise ValueError(f"status {answer.status}: {answer.rest.decode('utf-8', 'replace')[:200]}")
        listener.end()


class _Listener:
    """Notes what the events of one answer tell, and when."""

    def __init__(self, sample: Sample, due: float, api: str):
        self._sample, self._due, self._last, self._api = sample, due, due, api
        self._error, self._complete = "", False

    def hear(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self._complete = True
            return
        try:
            self._note(_decoder.decode(data), now)
        except (msgspec.DecodeError, KeyError, TypeError, AttributeError, IndexError) as e:
            self._error = f"an event of the stream cannot be read: {type(e).__name__}: {e}"

    def _note(self, chunk: dict[str, Any], now: float) -> None:
        sample = self._sample
        if "error" in chunk:
            self._error = f"the stream broke: {chunk['error']}"
        if text := _text(chunk, self._api):
            sample.text += text
            if sample.first is None:
                sample.first = now - self._due
            else:
                sample.gaps.append(now - self._last)
            self._last = now
            sample.output_tokens += not sample.counted
        if usage := chunk.get("usage"):
            _note_usage(sample, usage)

    def end(self) -> None:
        """Raises ValueError for a stream that did not end as it should."""
        if self._error or not self._complete:
            raise ValueError(self._error or "the stream ended without [DONE]")
        self._sample.end = (self._last if self._sample.first is not None else time.perf_counter()) - self._due


_decoder = msgspec.json.Decoder()


def _text(chunk: dict[str, Any], api: str) -> str:
    if not chunk.get("choices"):
        return ""
    choice = chunk["choices"][0]
    if api == "completions":
        return choice.get("text") or ""
    delta = choice.get("delta") or {}
    return (delta.get("reasoning_content") or delta.get("reasoning") or "") + (delta.get("content") or "")


def _note_usage(sample: Sample, usage: dict[str, Any]) -> None:
    sample.counted = True
    sample.prompt_tokens, sample.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    sample.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    drafts = usage.get("speculation") or {}
    sample.drafted_tokens = drafts.get("drafted_tokens", 0)
    sample.accepted_tokens = drafts.get("accepted_tokens", 0)
