"""Random clients of an engine, and the replay oracle: every answer equals a one-shot computation of its history.

    Crowd     clients that act at random
    World     what clients have asked and what they must get: plain requests, sessions, aborts, branches, rewinds
    OneShot   the same prompt on an engine of its own: nothing shared, nothing drafted, nothing else running

The world keeps its own books of every session, from what clients see alone; nothing is read from the engine but its
outputs. `stretto soak` and the tests drive it.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import torch

from stretto.engine.core import EngineCore
from stretto.host.turn import POOL_FULL
from stretto.params import SamplingParams
from stretto.protocol import (
    BranchSession,
    CloseSession,
    FlushCache,
    GetSession,
    OpenSession,
    Output,
    Request,
    RequestError,
    RewindSession,
    SessionTurn,
)
from stretto.sample.noise import gumbel, noise_keys

WIDEST = 20  # alternatives of a token that are looked through when an answer differs
BURST_PROMPTS = 12  # that bursts choose from
STOPS = 8  # ids that end some answers
BURST_ANSWER = 96  # ids of each answer of one, at most: several times what admission leaves room for

Answer = Callable[[list[int], SamplingParams], list[list[int]]]
"""(prompt, sampling) -> the ids of each choice."""


class Wrong(AssertionError):
    """The engine did something else than it must; the message says what, and what was expected."""


class OneShot:
    """Answers of an engine that does one request at a time. Its prefix cache should be off."""

    def __init__(self, core: EngineCore, most: int = 4096):
        self.core, self._most = core, most
        self._known: dict[tuple[tuple[int, ...], bytes], tuple[int, list[list[int]]]] = {}  # max_tokens, choices
        self._serial = 0

    def __call__(self, prompt: list[int], sampling: SamplingParams) -> list[list[int]]:
        """A shorter answer is the beginning of a longer one, if that is known."""
        most = sampling.max_tokens or 0
        key = tuple(prompt), msgspec.msgpack.encode(msgspec.structs.replace(sampling, max_tokens=None))
        asked, choices = self._known.get(key, (-1, []))
        if asked < most:
            if len(self._known) >= self._most:
                self._known.clear()
            choices = [[] for _ in range(sampling.n)]
            for output in self.outputs(prompt, sampling):
                choices[output.index] += output.token_ids
            self._known[key] = most, choices
        return [ids[:most] for ids in choices]

    def outputs(self, prompt: list[int], sampling: SamplingParams) -> list[Output]:
        self._serial += 1
        self.core.submit(Request(rid=f"once-{self._serial}", tokens=prompt, sampling=sampling, want_text=False))
        outputs: list[Output] = []
        while self.core.has_work:
            outputs += self.core.step()
        return outputs


@dataclass(eq=False)
class Ask:
    """One choice of a client's request, and what came back; the first has the others."""

    rid: str
    tokens: list[int]
    sampling: SamplingParams
    order: SessionTurn | None = None
    prompt: list[int] = field(default_factory=list)  # once it has started
    expected: list[int] = field(default_factory=list)
    got: list[int] = field(default_factory=list)
    excused: bool = False  # it differs where rounding decides
    choice: int = 0
    others: list[Ask] = field(default_factory=list)
    ended: bool = False

    @property
    def choices(self) -> list[Ask]:
        return [self, *self.others]


def as_good(once: OneShot, tolerance: float, ask: Ask) -> bool:
    """Whether the first id that differs is as good as the expected one, up to `tolerance` in log-probability. Drawn ids
    are compared with the noise of their seed: the larger sum of log-probability / temperature and noise wins."""
    at = next((i for i, (a, b) in enumerate(zip(ask.got, ask.expected)) if a != b), None)
    if at is None:
        return False
    outputs = once.outputs(ask.prompt + ask.got[:at], SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True,
                                                                     logprobs=WIDEST))
    score = next(output.logprobs for output in outputs if output.logprobs)[0]
    known = dict(zip(score.top_ids, score.top_logprobs, strict=True))
    got, expected = ask.got[at], ask.expected[at]
    if got not in known or expected not in known:
        return False
    lead = known[expected] - known[got]
    if (temperature := ask.sampling.temperature) > 0:
        lead += temperature * _lead_of_noise(ask, len(ask.prompt) + at, expected, got)
    return lead <= tolerance


def _lead_of_noise(ask: Ask, position: int, first: int, second: int) -> float:
    """How much more noise a draw adds to one id than to another."""
    seed = ask.sampling.seed or 0
    low, high, choice, at = (torch.tensor([value]) for value in (seed & 0xFFFFFFFF, seed >> 32, ask.choice, position))
    one, other = gumbel(noise_keys(low, high, choice, at), torch.tensor([first, second]))[0].tolist()
    return one - other


class Kept(NamedTuple):
    """A turn that became history."""

    history: list[int]
    prompt: int
    before: frozenset[str]  # the turns that it follows, near and far


@dataclass(eq=False)
class Talk:
    """A session, as its client knows it."""

    sid: str
    used: float
    history: list[int] = field(default_factory=list)
    prompt: int = 0  # of the last turn
    turns: dict[str, Kept] = field(default_factory=dict)
    head: str | None = None  # the last turn
    live: Ask | None = None
    waiting: deque[Ask] = field(default_factory=deque)
    closing: bool = False
    ttl: float | None = None  # seconds; None: the engine's
    capacity: int | None = None  # tokens


class World:
    """Clients of one engine. `answer` is the oracle; `learn` is told every sequence that will come, for drafters that
    know the answers; `same` says whether ids that differ are right all the same (rounding). Raises Wrong."""

    def __init__(self, core: EngineCore, answer: Answer, learn: Callable[[list[int]], None] | None = None,
                 same: Callable[[Ask], bool] | None = None):
        self.core, self.limits = core, core.host.limits
        self._answer, self._learn, self._same = answer, learn, same
        self.asks: dict[str, Ask] = {}  # live and waiting
        self.talks: dict[str, Talk] = {}
        self.count: Counter[str] = Counter()
        self._serial = 0

    # ------------------------------------------------------------------------------------------------ what clients do
    def plain(self, tokens: list[int], sampling: SamplingParams) -> str:
        """A request without a session, of one or more choices."""
        ask = Ask(self.name("r"), tokens, sampling)
        if self._refused(ask, lambda: self._too_long(tokens, tokens)):
            return ask.rid
        self._begin(ask, tokens)
        return ask.rid

    def turn(self, order: SessionTurn, tokens: list[int], sampling: SamplingParams) -> str:
        """A turn of a session that is open, or that it opens."""
        ask = Ask(self.name("t"), tokens, sampling, order)
        source = self.talks.get(order.branch_from or "")
        talk = self.talks.get(order.sid) or Talk(order.sid, self.now)
        if source is not None:
            talk = _branch(source, order.sid, len(source.history), self.now)
        if self._refused(ask, lambda: self._turn_refused(talk, ask, source)):
            return ask.rid
        self.talks[order.sid] = talk
        talk.closing |= order.final
        talk.used = self.now
        if talk.live is None:
            self._begin_turn(talk, ask)
        else:
            self.asks[ask.rid] = ask
            talk.waiting.append(ask)
        return ask.rid

    def abort(self, rid: str, received: int | None = None) -> None:
        """`received`: how many of the ids that came the client has seen; None: all."""
        ask = self.asks[rid]
        outputs = self.core.abort(rid, received)
        last = [output.index for output in outputs if output.rid == rid and output.finish_reason == "abort"]
        if last != [part.choice for part in ask.choices if not part.ended]:
            raise Wrong(f"an abort of {rid} gave {outputs}")
        del self.asks[rid]
        talk = self._talk_of(ask)
        if talk is not None and talk.live is not ask:
            talk.waiting.remove(ask)
        elif talk is not None:
            kept = len(ask.got) if received is None else min(received, len(ask.got))
            assert ask.order is not None
            if ask.order.on_disconnect == "keep" and kept:
                self._keep(talk, ask, ask.prompt + ask.got[:kept])
            self._after(talk)
        self._take([output for output in outputs if output.rid != rid])

    def open(self, ttl: float | None = None, capacity: int | None = None) -> str:
        sid = self.name("s")
        self.core.manage(OpenSession(sid=sid, ttl=ttl, capacity=capacity))
        self.talks[sid] = Talk(sid, self.now, ttl=ttl, capacity=capacity)
        return sid

    def close(self, sid: str, abort: bool = False) -> None:
        talk = self.talks[sid]
        _, outputs = self.core.manage(CloseSession(sid, abort))
        for ask in [*talk.waiting, talk.live] if abort else []:
            if ask is not None:
                del self.asks[ask.rid]
        if abort or talk.live is None:
            del self.talks[sid]
        talk.closing = True
        if not all(output.finish_reason == "abort" for output in outputs):
            raise Wrong(f"closing {sid} gave {outputs}")

    def branch(self, sid: str, n: int) -> str:
        child, talk = self.name("b"), self.talks[sid]
        self.core.manage(BranchSession(sid, child, n))
        self.talks[child] = _branch(talk, child, n, self.now)
        return child

    def rewind(self, sid: str, n: int) -> None:
        talk = self.talks[sid]
        self.core.manage(RewindSession(sid, n))
        talk.history, talk.prompt, talk.used = talk.history[:n], min(talk.prompt, n), self.now

    def flush(self) -> None:
        self.core.manage(FlushCache())

    def tick(self) -> None:
        """Sessions idle for too long are gone."""
        self.core.tick()
        for talk in list(self.talks.values()):
            ttl = self.limits.session_ttl if talk.ttl is None else talk.ttl
            if talk.live is None and self.now - talk.used > ttl:
                del self.talks[talk.sid]
        self.check_sessions()

    # -------------------------------------------------------------------------------------------- what the engine does
    def step(self) -> None:
        self._take(self.core.step())

    def finish(self, most: int = 20_000) -> None:
        """Runs everything to its end, closes every session; then no page may be held."""
        for _ in range(most):
            if not self.core.has_work:
                break
            self.step()
        if self.asks or self.core.has_work:
            raise Wrong(f"not idle after {most} steps: {list(self.asks)}")
        self.check_sessions()
        for sid in list(self.talks):
            self.close(sid)
        self.core.host.audit()
        held = {name: value for name, value in self.core.host.stats()[1].items()
                if value and name.startswith(("pages_used", "session"))}
        if held:
            raise Wrong(f"held with nothing running and no session open: {held}")

    def check_sessions(self) -> None:
        """The engine's sessions are those of the clients, as long and in the same state."""
        found = {info.id: info for info in self.core.manage(GetSession())[0]}
        if found.keys() != self.talks.keys():
            raise Wrong(f"sessions {sorted(found)} are open; clients have {sorted(self.talks)}")
        for sid, talk in self.talks.items():
            state = "closing" if talk.closing else "running" if talk.live is not None else "idle"
            seen = found[sid].state, found[sid].tokens, found[sid].waiting
            if seen != (state, len(talk.history), len(talk.waiting)):
                raise Wrong(f"session {sid} is {seen}; its client expects {state, len(talk.history)}")

    @property
    def now(self) -> float:
        return self.limits.clock()

    def _take(self, outputs: list[Output]) -> None:
        for output in outputs:
            ask = self.asks.get(output.rid)
            if ask is None:
                raise Wrong(f"an output came for {output.rid}, which has ended: {output}")
            ask = ask.choices[output.index]
            if ask.ended:
                raise Wrong(f"an output came for choice {output.index} of {output.rid}, which has ended: {output}")
            if output.finish_reason == "error":
                self._told_late(ask, output)
                continue
            ask.got += output.token_ids
            if ask.got != ask.expected[: len(ask.got)] and not self._may_differ(ask):
                raise Wrong(f"request {ask.rid} ({ask.order}) with prompt {ask.prompt} got {ask.got}; one-shot gives"
                            f" {ask.expected}")
            if output.finish_reason is not None:
                self._ended(ask, output)

    def _may_differ(self, ask: Ask) -> bool:
        if not ask.excused and self._same is not None:
            ask.excused = self._same(ask)
            self.count["rounding"] += ask.excused
        return ask.excused

    def _ended(self, ask: Ask, output: Output) -> None:
        self.count["answers"] += 1
        if len(ask.got) != len(ask.expected) and output.stop_reason != POOL_FULL and not self._may_differ(ask):
            raise Wrong(f"request {ask.rid} ended after {len(ask.got)} ids of {len(ask.expected)}: {output}")
        if output.usage is None or output.usage.prompt_tokens != len(ask.prompt):
            raise Wrong(f"request {ask.rid} has a prompt of {len(ask.prompt)} ids, its usage says {output.usage}")
        ask.ended, whole = True, self.asks[ask.rid]
        if not all(part.ended for part in whole.choices):
            return
        del self.asks[ask.rid]
        talk = self._talk_of(ask)
        if talk is not None:
            self._keep(talk, ask, ask.prompt + ask.got)
            self._after(talk)

    def _told_late(self, ask: Ask, output: Output) -> None:
        """A turn that waited could not be served: it would have been refused had it not waited."""
        talk = self._talk_of(ask)
        if output.error_code is None or talk is None or talk.live is not ask or not ask.expected == [-1]:
            raise Wrong(f"request {ask.rid} failed: {output.error}")
        self.count["told late"] += 1
        del self.asks[ask.rid]
        self._after(talk)

    # ------------------------------------------------------------------------------------------------------ the books
    def name(self, kind: str) -> str:
        self._serial += 1
        return f"{kind}{self._serial}"

    def _talk_of(self, ask: Ask) -> Talk | None:
        return self.talks[ask.order.sid] if ask.order is not None else None

    def _refused(self, ask: Ask, must: Callable[[], str | None]) -> bool:
        """Submits; the engine must refuse it with this code, or take it."""
        code = must()
        request = Request(rid=ask.rid, tokens=list(ask.tokens), sampling=ask.sampling, want_text=False,
                          session=ask.order)
        try:
            self.core.submit(request)
        except RequestError as e:
            if code is None or e.code != code:
                raise Wrong(f"{ask.rid} was refused with {e.code} ({e}); expected {code}") from e
            self.count[f"refused: {code}"] += 1
            return True
        if code is not None:
            raise Wrong(f"{ask.rid} was taken; expected {code}")
        return False

    def _turn_refused(self, talk: Talk, ask: Ask, source: Talk | None) -> str | None:
        order = ask.order
        assert order is not None
        if self._too_long(ask.tokens, []):
            return "context_length_exceeded"
        if source is not None and source.live is not None:
            return "session_busy"
        if talk.closing:
            return "session_closing"
        if talk.live is not None:
            full = order.on_busy == "reject" or len(talk.waiting) >= self.limits.session_queue
            return "session_busy" if full else None
        return self._too_long(ask.tokens, self._prompt(talk, ask), talk.capacity)

    def _too_long(self, tokens: list[int], prompt: list[int], capacity: int | None = None) -> str | None:
        limits = self.limits
        fits = len(tokens) < min(limits.max_model_len, limits.kv_tokens)
        fits &= len(prompt) < min(limits.max_model_len, limits.kv_tokens + 1)
        fits &= capacity is None or len(prompt) < capacity
        return None if fits else "context_length_exceeded"

    def _prompt(self, talk: Talk, ask: Ask) -> list[int]:
        order = ask.order
        assert order is not None
        if order.mode == "tag":
            return ask.tokens
        history, prompt = talk.history, talk.prompt
        if order.after is not None:
            history, prompt, _ = talk.turns[order.after]
        if order.replace and order.after is None:
            history = []
        if order.drop_previous_output:
            history = history[:prompt]
        return (history if order.offset is None else history[: order.offset]) + ask.tokens

    def _begin_turn(self, talk: Talk, ask: Ask) -> None:
        talk.live = ask
        self._begin(ask, self._prompt(talk, ask), talk.capacity)

    def _begin(self, ask: Ask, prompt: list[int], capacity: int | None = None) -> None:
        self.asks[ask.rid] = ask
        ask.prompt = prompt
        most = min(self.limits.max_model_len, self.limits.kv_tokens + 1)
        room = (most if capacity is None else min(most, capacity)) - len(prompt)
        if room <= 0:
            ask.expected = [-1]  # it waited, and is told now
            return
        most = min(room, ask.sampling.max_tokens or room)
        ask.expected, *more = self._answer(prompt, msgspec.structs.replace(ask.sampling, max_tokens=most))
        ask.others = [Ask(ask.rid, ask.tokens, ask.sampling, None, prompt, expected, choice=choice)
                      for choice, expected in enumerate(more, 1)]
        if self._learn is not None:
            self._learn(prompt + ask.expected)

    def _keep(self, talk: Talk, ask: Ask, history: list[int]) -> None:
        order = ask.order
        assert order is not None
        before = order.after or (None if order.replace and order.mode == "append" else talk.head)
        if order.mode == "tag" and talk.history[:1] != ask.tokens[:1]:
            before = None
        if order.replace:
            talk.turns = {name: kept for name, kept in talk.turns.items()
                          if before is not None and (name == before or before not in kept.before)}
        line = talk.turns[before].before | {before} if before in talk.turns else frozenset()
        talk.history, talk.prompt, talk.head = history, len(ask.prompt), ask.rid
        talk.turns[ask.rid] = Kept(history, len(ask.prompt), line)

    def _after(self, talk: Talk) -> None:
        talk.live, talk.used = None, self.now
        if talk.waiting:
            self._begin_turn(talk, talk.waiting.popleft())
        elif talk.closing:
            del self.talks[talk.sid]


def _branch(talk: Talk, sid: str, n: int, now: float) -> Talk:
    return Talk(sid, now, talk.history[:n], min(talk.prompt, n), dict(talk.turns), talk.head, ttl=talk.ttl,
                capacity=talk.capacity)


class Crowd:
    """Clients that act at random, often enough on the same sessions that everything meets everything. The same seed
    does the same to the same engine."""

    def __init__(self, world: World, seed: int, vocab_size: int, most_talks: int = 6, sampled: bool = True):
        self._sampled = 0.3 if sampled else 0.0  # share of requests with a temperature
        self.world, self.rng, self.vocab_size, self.most_talks = world, random.Random(seed), vocab_size, most_talks
        longest = min(world.limits.max_model_len, world.limits.kv_tokens)
        self._longest, self._most_new = max(2, longest // 3), max(2, longest // 5)
        self._shared = [self.rng.randrange(vocab_size) for _ in range(longest)]
        self._actions = {self.steps: 30, self.append: 16, self.tag: 6, self.plain: 6, self.follow: 4, self.abort: 8,
                         self.burst: 16, self.fork: 3, self.rewind: 2, self.close: 2, self.flush: 1}

    def act(self) -> None:
        """One thing that some client does, or some steps of the engine."""
        if len(self.world.talks) < 2:
            self._open()
        self.rng.choices(list(self._actions), list(self._actions.values()))[0]()

    # ------------------------------------------------------------------------------------------------------- actions
    def steps(self) -> None:
        for _ in range(self.rng.choice([1, 2, 4, 12])):
            self.world.step()

    def append(self) -> None:
        rng, talk = self.rng, self._any()
        more: dict[str, Any] = {}
        if rng.random() < 0.1:
            more["replace"] = True
        elif rng.random() < 0.15:
            more["drop_previous_output"] = True
        elif talk.live is None and rng.random() < 0.1:
            more["offset"] = rng.randint(-len(talk.history), len(talk.history))
        self._turn(talk.sid, self._ids(12), mode="append", **more)

    def follow(self) -> None:
        """A turn after one that is not the last."""
        talk = self._any(lambda t: t.live is None and bool(t.turns))
        if talk is not None:
            self._turn(talk.sid, self._ids(12), mode="append", after=self.rng.choice(list(talk.turns)),
                       replace=self.rng.random() < 0.3)

    def tag(self) -> None:
        talk = self._any()
        n = len(talk.history)
        kept = talk.history[: self.rng.choice([n, n, n, self.rng.randint(0, n)])]
        self._turn(talk.sid, kept + self._ids(12))

    def plain(self) -> None:
        kept = self._shared[: self.rng.choice([0, 0, self._longest // 2])]
        sampling = msgspec.structs.replace(self._sampling(), n=self.rng.choice([1, 1, 2, 3]))
        self.world.plain(kept + self._ids(self._longest), sampling)

    def burst(self) -> None:
        """As many short prompts as are admitted together, and answers that then need several times the pool, so that
        one after the other has to give way; then half of the clients leave. The prompts are some of a few, and the
        answers greedy: the oracle knows them soon."""
        limits, most = self.world.limits, max(2, min(BURST_ANSWER, self._longest * 3 // 2))
        n = max(1, min(limits.max_slots - 1, limits.kv_tokens // max(limits.page_size, 16)))
        sampling = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True)
        came = [self.world.plain([(11 * start + 7 * i) % self.vocab_size for i in range(1 + start % 4)], sampling)
                for start in self.rng.choices(range(BURST_PROMPTS), k=max(0, n - len(self.world.asks) // 2))]
        for _ in range(most * 3 // 4):
            self.world.step()
        for rid in came:
            if rid in self.world.asks and self.rng.random() < 0.5:
                self._leave(rid)

    def fork(self) -> None:
        talk = self._any(lambda t: bool(t.history) and len(self.world.talks) < self.most_talks)
        if talk is None:
            self._any_open()
        elif talk.live is None and self.rng.random() < 0.5:
            self.world.branch(talk.sid, self.rng.randint(1, len(talk.history)))
        else:
            self._turn(self.world.name("c"), self._ids(12), mode="append", branch_from=talk.sid)

    def rewind(self) -> None:
        talk = self._any(lambda t: t.live is None)
        if talk is not None:
            self.world.rewind(talk.sid, self.rng.randint(0, len(talk.history)))

    def abort(self) -> None:
        if self.world.asks:
            answering = [rid for rid, ask in self.world.asks.items() if ask.got]
            self._leave(self.rng.choice(answering or list(self.world.asks)))

    def _leave(self, rid: str) -> None:
        self.world.abort(rid, self.rng.choice([None, None, 0, self.rng.randint(0, 8)]))

    def close(self) -> None:
        talk = self._any(lambda t: not t.closing)
        if talk is not None and len(self.world.talks) >= self.most_talks // 2:
            self.world.close(talk.sid, abort=self.rng.random() < 0.5)

    def flush(self) -> None:
        self.world.flush()

    # -------------------------------------------------------------------------------------------------------- details
    def _any_open(self) -> None:
        if len(self.world.talks) < self.most_talks:
            self._open()

    def _open(self) -> None:
        small = self.rng.random() < 0.2
        self.world.open(capacity=self.rng.randint(1, 2 * self._longest) if small else None)

    def _any(self, fits: Callable[[Talk], bool] = lambda t: True) -> Any:
        """One of the sessions that fit, mostly of the first ones; None where none does."""
        found = [talk for talk in self.world.talks.values() if fits(talk)]
        return self.rng.choice(found[:3] if self.rng.random() < 0.7 else found) if found else None

    def _turn(self, sid: str, tokens: list[int], **order: Any) -> None:
        rng = self.rng
        self.world.turn(SessionTurn(sid=sid, on_busy=rng.choice(["wait", "wait", "reject"]),
                                    on_disconnect=rng.choice(["rollback", "keep"]), final=rng.random() < 0.03, **order),
                        tokens, self._sampling())

    def _ids(self, most: int) -> list[int]:
        luck = self.rng.random()
        n = self.rng.randint(1, most if luck < 0.9 else self._longest) if luck < 0.97 else 3 * self._longest
        return [self.rng.randrange(self.vocab_size) for _ in range(n)]

    def _sampling(self) -> SamplingParams:
        rng = self.rng
        seeded: dict[str, Any] = {"temperature": 0.0}
        if rng.random() < self._sampled:
            seeded = {"temperature": 0.8, "seed": rng.getrandbits(32)}
        stops = tuple(rng.sample(range(self.vocab_size), STOPS)) if rng.random() < 0.3 else ()
        return SamplingParams(max_tokens=rng.choice([1, 3, 8, self._most_new]), ignore_eos=True, stop_token_ids=stops,
                              **seeded)
