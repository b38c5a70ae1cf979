"""A byte-level tokenizer and a scripted engine core: what the API does is tested in seconds, without weights.

The core's answers are a function of the prompt, the seed and the choice index alone. Prompts give it orders:

    say:TEXT     the answer is TEXT, then end of sequence          refuse:X   submit() raises RequestError
    odd:HEX      the same with raw bytes                           crash:X    submit() raises RuntimeError
    fault:X      step() raises                                     exit:X     the process exits without a word
    wedge:N      step() sleeps for N seconds                       spin:N     step() computes for N seconds
    other        lowercase words without an end
"""

from __future__ import annotations

import codecs
import hashlib
import itertools
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stretto.params import SamplingParams
from stretto.protocol import (
    Action,
    EngineInfo,
    EngineStats,
    FlushCache,
    GetSession,
    OpenSession,
    Output,
    Request,
    RequestError,
    SessionInfo,
    StepRecord,
    TokenLogprob,
    Usage,
)
from stretto.text.stream import IncrementalText

BOS, EOS, IM_START, IM_END, PAD = 256, 257, 258, 259, 260
SPECIAL = {BOS: "<s>", EOS: "</s>", IM_START: "<|im_start|>", IM_END: "<|im_end|>", PAD: "<pad>"}
VERBS = ("say", "odd", "refuse", "crash", "fault", "exit", "wedge", "spin")
VOCAB = 264  # three ids have no token, as in models whose logits are wider than their vocabulary
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


class ByteDecoder:
    def __init__(self, tokenizer: ByteTokenizer, skip: bool):
        self._tokenizer, self._skip = tokenizer, skip
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def follow(self, prompt: Sequence[int]) -> None:
        pass

    def feed(self, token_id: int) -> str:
        skipped = self._skip and token_id in SPECIAL
        return "" if skipped else self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class ByteTokenizer:
    """One token per UTF-8 byte, five special tokens, a ChatML template."""

    bos_token_id, eos_token_id, pad_token_id = BOS, EOS, PAD
    special_ids = frozenset(SPECIAL)
    chat_template = TEMPLATE
    response_template = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return ([BOS] if add_special_tokens else []) + list(text.encode())

    def encode_inside(self, text: str) -> list[int]:
        return self.encode(text, False)

    def begins_text(self, prompt: Sequence[int]) -> bool:
        return not prompt or prompt[-1] in SPECIAL

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        kept = (i for i in ids if not (skip_special_tokens and i in SPECIAL))
        return b"".join(map(self.token_bytes, kept)).decode("utf-8", "replace")

    def decoder(self, skip_special_tokens: bool = True) -> ByteDecoder:
        return ByteDecoder(self, skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else SPECIAL.get(token_id, "").encode()

    def apply_chat_template(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None,
                            add_generation_prompt: bool = True, continue_final_message: bool = False,
                            **kwargs: Any) -> list[int]:
        ids: list[int] = []
        for i, message in enumerate(messages):
            content = message["content"]
            if isinstance(content, list):
                content = "\n".join(part["text"] for part in content)
            if content and content.startswith("template-error"):
                raise ValueError("this template does not like you")
            ids += [IM_START, *f"{message['role']}\n{content or ''}".encode()]
            if not (continue_final_message and i == len(messages) - 1):
                ids += [IM_END, ord("\n")]
        if "mark" in kwargs:
            ids += f"mark={kwargs['mark']}".encode()
        return ids + ([IM_START, *b"assistant\n"] if add_generation_prompt else [])


class CallingTokenizer(ByteTokenizer):
    """Its template reads tools, and calls of them are written between <tool_call> markers."""

    chat_template = TEMPLATE + "{{ tools }} <tool_call>"


TOKENIZERS = {"bytes": ByteTokenizer, "calling": CallingTokenizer}


def order(tokens: Sequence[int]) -> tuple[str, str]:
    """(verb, argument) of the last order in a prompt."""
    text = ByteTokenizer().decode(tokens)
    found = [(text.rfind(verb + ":"), verb) for verb in VERBS]
    at, verb = max(found)
    if at < 0:
        return "", text
    argument = text[at + len(verb) + 1:]
    return verb, argument.removesuffix("\nassistant\n")


def script(tokens: Sequence[int], seed: int, index: int) -> Iterator[int]:
    """The ids of a choice, for ever."""
    verb, argument = order(tokens)
    if verb in ("say", "odd"):
        yield from argument.encode() if verb == "say" else bytes.fromhex(argument)
        yield from itertools.repeat(EOS)
    state = hashlib.sha256(repr((list(tokens), seed, index)).encode()).digest()
    for step in itertools.count():
        for byte in state:
            yield ord(" ") if byte % 6 == 0 else ord("a") + byte % 26
        state = hashlib.sha256(state + bytes([step % 256])).digest()


def score(token: int, alternatives: int | None) -> TokenLogprob:
    """A log-probability that depends on the token alone; the third alternative is impossible."""
    others = [token, (token + 1) % 256, (token + 2) % 256, *((token + 3 + i) % 256 for i in range(20))]
    values = [-0.125 - token / 512, -1.5, float("-inf"), *[float("-inf")] * 20]
    return TokenLogprob(token, values[0], others[:alternatives or 0], values[:alternatives or 0])


def embedding(request: Request, size: int) -> bytes:
    """How often each residue occurs among the ids; of the last id alone, or of all."""
    ids = request.tokens if request.pooling == "mean" else request.tokens[-1:]
    return np.bincount([i % size for i in ids], minlength=size).astype("<f4").tobytes()


@dataclass
class Choice:
    request: Request
    index: int
    ids: Iterator[int]
    text: IncrementalText
    usage: Usage
    done: bool = False
    first: bool = True


@dataclass
class CoreOptions:
    """Picklable: the engine process gets it as its factory."""

    block: int = 1  # tokens a step, as with speculation
    miss_every: int = 0  # in every so many-th step of a choice only one draft is accepted
    step_seconds: float = 0.0
    max_num_seqs: int = 8
    max_model_len: int = 512
    start_error: str = ""
    start_seconds: float = 0.0
    model_name: str = "fake/tiny"
    server_info: dict = field(default_factory=dict)
    sampling_defaults: dict = field(default_factory=dict)
    hidden_size: int = 8
    adapters: dict = field(default_factory=dict)

    def __call__(self) -> ScriptedCore:
        time.sleep(self.start_seconds)
        if self.start_error:
            raise ValueError(self.start_error)
        return ScriptedCore(self)


class ScriptedCore:
    def __init__(self, options: CoreOptions):
        self.options = options
        self.info = EngineInfo(model_name=options.model_name, vocab_size=VOCAB, max_model_len=options.max_model_len,
                               max_num_seqs=options.max_num_seqs, kv_tokens=16 * options.max_model_len,
                               eos_token_ids=[EOS], speculation_tokens=options.block - 1,
                               server_info=options.server_info, sampling_defaults=options.sampling_defaults,
                               hidden_size=options.hidden_size, adapters=dict(options.adapters),
                               max_loras=2 * len(options.adapters))
        self.waiting: list[Choice] = []
        self.running: list[Choice] = []
        self.seen: set[tuple[int, ...]] = set()
        self.traced = self.trace_limit = 0
        self.counters = dict.fromkeys(("prompt_tokens", "generated_tokens", "cached_tokens", "retractions", "drafted",
                                       "accepted", "steps", "prefill_tokens", "decode_tokens", "verify_tokens"), 0.0)
        self.sessions: dict[str, SessionInfo] = {}

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def submit(self, request: Request) -> None:
        verb, argument = order(request.tokens)
        if verb == "refuse":
            raise RequestError(f"refused: {argument}", param="prompt", code="refused_by_core")
        if verb == "crash":
            raise RuntimeError("submit failed")
        seed = request.sampling.seed or 0
        key = tuple(request.tokens)
        cached = len(key) - 1 if key in self.seen else 0
        self.seen.add(key)
        for i in range(request.sampling.n):
            usage = Usage(prompt_tokens=len(key), cached_tokens=cached if i == 0 else len(key) - 1)
            text = IncrementalText.for_request(ByteTokenizer(), request.sampling)
            self.waiting.append(Choice(request, i, script(key, seed, i), text, usage))
        self.counters["prompt_tokens"] += len(key)
        self.counters["cached_tokens"] += cached

    def tick(self) -> None:
        self.counters["ticks"] = self.counters.get("ticks", 0.0) + 1

    def trace(self, steps: int) -> list[StepRecord]:
        """The scripted core has nothing to time: every step since the last call, in order."""
        now = int(self.counters["steps"])
        records = [StepRecord(seq, 1, seq, seq + 0.1, seq + 0.2, seq + 0.3, seq + 0.8, seq + 0.9, {"decode_tokens": 1})
                   for seq in range(self.traced, min(now, self.traced + self.trace_limit))]
        self.traced, self.trace_limit = now, steps
        return records

    def manage(self, action: Action) -> tuple[list[SessionInfo], list[Output]]:
        if isinstance(action, FlushCache):
            self.seen.clear()
            return [], []
        if isinstance(action, OpenSession):
            self.sessions[action.sid] = SessionInfo(id=action.sid, state="idle", tokens=0, cached_tokens=0, turns=0,
                                                    waiting=0, last_turn="none", idle_seconds=0.0, ttl=60.0,
                                                    capacity=action.capacity)
            return [self.sessions[action.sid]], []
        if isinstance(action, GetSession) and action.sid is None:
            return list(self.sessions.values()), []
        raise RequestError("a scripted core has no sessions", param="session_id")

    def abort(self, rid: str, received: int | None = None) -> list[Output]:
        gone = [c for c in self.waiting + self.running if c.request.rid == rid]
        self.waiting = [c for c in self.waiting if c.request.rid != rid]
        self.running = [c for c in self.running if c.request.rid != rid]
        return [Output(rid, c.index, [], "", "abort", usage=c.usage) for c in gone]

    def step(self) -> list[Output]:
        if self.options.step_seconds:
            time.sleep(self.options.step_seconds)
        self.waiting.sort(key=lambda c: c.request.priority)
        while self.waiting and len(self.running) < self.options.max_num_seqs:
            self.running.append(self.waiting.pop(0))
        self.counters["steps"] += 1
        outputs = [self.advance(choice) for choice in self.running]
        self.running = [c for c in self.running if not c.done]
        return outputs

    def advance(self, choice: Choice) -> Output:
        verb, argument = order(choice.request.tokens)
        if verb == "fault":
            raise RuntimeError(f"step failed: {argument}")
        if verb == "exit":
            os._exit(3)
        if verb == "wedge" and choice.first:
            time.sleep(float(argument))
        if verb == "spin" and choice.first:
            ends = time.monotonic() + float(argument)
            while time.monotonic() < ends:
                hashlib.sha256(bytes(1 << 20)).digest()
        if choice.request.pooling is not None:
            choice.done = True
            return Output(choice.request.rid, 0, [], "", "length", usage=choice.usage,
                          embedding=embedding(choice.request, self.options.hidden_size))
        out = self.generate(choice, choice.request.sampling)
        choice.usage.steps += bool(out.token_ids)
        choice.usage.note_drafts(self.options.block - 1, max(0, len(out.token_ids) - 1))
        self.counters["generated_tokens"] += len(out.token_ids)
        for place in range(1, self.options.block):
            drafted, accepted = f"drafted_at.{place}", f"accepted_at.{place}"
            self.counters[drafted] = self.counters.get(drafted, 0.0) + 1
            self.counters[accepted] = self.counters.get(accepted, 0.0) + (len(out.token_ids) > place)
        if choice.first:
            self.counters["prefill_tokens"] += len(choice.request.tokens)
        self.counters["verify_tokens" if self.options.block > 1 else "decode_tokens"] += self.options.block
        self.counters["drafted"] += self.options.block - 1
        self.counters["accepted"] += max(0, len(out.token_ids) - 1)
        out.usage = Usage(*(getattr(choice.usage, name) for name in Usage.__struct_fields__))
        choice.first, choice.done = False, out.finish_reason is not None
        return out

    def generate(self, choice: Choice, sampling: SamplingParams) -> Output:
        room = self.options.max_model_len - len(choice.request.tokens)
        limit = room if sampling.max_tokens is None else min(room, sampling.max_tokens)
        out = Output(choice.request.rid, choice.index, [], "")
        shown: list[int] = []
        every = self.options.miss_every
        missed = every and choice.usage.steps % every == every - 1
        for _ in range(min(2, self.options.block) if missed else self.options.block):
            if choice.usage.completion_tokens == limit:
                out.finish_reason = "length"
                break
            token = next(choice.ids)
            while token == EOS and (sampling.ignore_eos or choice.usage.completion_tokens < sampling.min_tokens):
                token = ord(".")
                break
            out.token_ids.append(token)
            choice.usage.completion_tokens += 1
            if token in (EOS, *sampling.stop_token_ids):
                out.finish_reason, out.stop_reason = "stop", None if token == EOS else token
                break
            shown.append(token)
            delta = choice.text.push([token])
            out.text += delta.text
            if delta.stop is not None:
                out.finish_reason, out.stop_reason = "stop", delta.stop
                break
            if choice.usage.completion_tokens == limit:
                out.finish_reason = "length"
                break
        if out.finish_reason is not None and out.stop_reason not in sampling.stop:
            out.text += choice.text.push([], final=True).text
        if sampling.logprobs is not None:
            out.logprobs = [score(token, sampling.logprobs) for token in out.token_ids]
        if sampling.prompt_logprobs is not None and choice.first and choice.index == 0:
            scores = [score(token, sampling.prompt_logprobs) for token in choice.request.tokens]
            scores[0] = TokenLogprob(scores[0].token_id, None, [], [])
            out.prompt_logprobs = scores
        return out

    def stats(self) -> EngineStats:
        return EngineStats(counters=dict(self.counters),
                           gauges={"running": len(self.running), "waiting": len(self.waiting), "pages_total_0": 512,
                                   "pages_used_0": len(self.running), "pages_free_0": 512 - len(self.running)})

    def close(self) -> None:
        self.running = self.waiting = []
