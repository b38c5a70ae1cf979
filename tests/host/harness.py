"""Drives the real host half against the fake device, and compares every output with an oracle that has no engine.

A world is a set of sizes and policies; `make_world` draws one. `Harness` is one run: requests, aborts and sessions come
at random times, results travel up to `depth` steps late, and everything is audited on the way.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field
from dataclasses import replace as replaced
from functools import cache

import numpy as np

from stretto.host.grammar import Grammars
from stretto.host.half import HostHalf
from stretto.host.limits import HostLimits
from stretto.host.rates import Rates
from stretto.host.share import share_budget
from stretto.params import Grammar, SamplingParams
from stretto.protocol import Output, Request, RequestError, TokenLogprob
from stretto.text.grammar import vocabulary
from stretto.text.stream import TextDelta
from stretto.wire import STATE, LateMask, StepPlan, StepResult
from tests.host.fake_device import EOS, EVERY, VOCAB, DeviceWorld, FakeDevice, mix, next_token, prefix_hashes, score

HOST_STOP = 11  # the id whose text is half a stop string, see `piece`
DRAFTERS = ("none", "ngram", "eagle", "host")


class Wrong(AssertionError):
    """What the client got is not what the oracle says."""


def expect(ok: object, message: str) -> None:
    if not ok:
        raise Wrong(message)


# ------------------------------------------------------------------------------------------------------------ text
def piece(token: int) -> str:
    return f"<{token}>"


class PieceStream:
    """The simplest stream that keeps the contract of `results.TextStream`."""

    def __init__(self, sampling: SamplingParams):
        self.stops, self.keep = sampling.stop, sampling.include_stop
        self.text, self.sent = "", 0

    def follow(self, prompt: list[int]) -> None:
        pass

    def push(self, ids: list[int], final: bool) -> TextDelta:
        for i, token in enumerate(ids):
            self.text += piece(token)
            found = [(self.text.index(s, self.sent), s) for s in self.stops if s in self.text[self.sent :]]
            if found:
                at, stop = min(found)
                return self._send(at + len(stop) if self.keep else at, stop, i + 1)
        return self._send(len(self.text) - (0 if final else self._held()), None, len(ids))

    def _held(self) -> int:
        """The longest suffix that may still become a stop string."""
        room = len(self.text) - self.sent
        lengths = [n for s in self.stops for n in range(1, min(len(s), room + 1)) if self.text.endswith(s[:n])]
        return max(lengths, default=0)

    def _send(self, end: int, stop: str | None, kept: int) -> TextDelta:
        out, self.sent = self.text[self.sent : end], end
        return TextDelta(out, stop, kept)


# -------------------------------------------------------------------------------------------------------- grammars
GRAMMARS = [Grammar("regex", source) for source in (
    "[0-9A-F]{3,12}", "(AB|CD|EF){2,9}", "A[0-5]*B", "(0[A-C]1[D-F]2){1,4}", "HELLO[A-Z]{0,6}WORLD", "[A-Z]{9,30}",
    "(00|11|22)+", "(A|AA|AAA)B")] + [Grammar("choice", '["YES", "YESSIR", "NO"]')]


class Characters:
    """A tokenizer: ids are characters of A-Z, 0-9 and more; the last ten ids are a digit twice."""

    bos_token_id, special_ids = None, frozenset({EOS})
    texts = [*"0123456", "", *"ABCDEFGHIJKLMNOPQRSTUVWXYZ789abc", *(2 * digit for digit in "0123456789")]  # noqa: RUF012

    def token_bytes(self, token_id: int) -> bytes:
        return b"" if token_id == EOS else self.texts[token_id].encode()

    def encode_inside(self, text: str) -> list[int]:
        return [self.texts.index(char) for char in text]


@cache
def grammars() -> Grammars:
    return Grammars(lambda: vocabulary(Characters(), VOCAB, [EOS]), VOCAB)


class Guide:
    """One answer's place in its grammar, without an engine."""

    def __init__(self, grammar: Grammar, ends: set[int]):
        self._matcher, self._ends = grammars().state(grammar).compiled.result(timeout=30).deep_copy(), ends

    def allowed(self, withheld: bool) -> frozenset[int]:
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
        ids = frozenset(np.flatnonzero(bits).tolist())
        return ids - self._ends or ids if withheld else ids

    def take(self, token: int) -> bool:
        """Whether the grammar has ended with it."""
        assert self._matcher.try_consume_tokens([token]) == 1
        return self._matcher.is_stopped()


# ---------------------------------------------------------------------------------------------------------- oracle
@dataclass
class Answer:
    tokens: list[int]
    text: str
    finish: str
    stop: int | str | None
    logprobs: list[TokenLogprob] | None
    prompt_logprobs: list[TokenLogprob] | None


def oracle(prompt: list[int], request: Request, index: int, seed: int, limits: HostLimits,
           scores_from: int = 0) -> Answer:
    """What the request must answer, computed one token at a time."""
    s = request.sampling
    asked = limits.max_model_len if s.max_tokens is None else min(limits.max_model_len, len(prompt) + s.max_tokens)
    limit = min(asked, limits.kv_tokens + 1)
    stop_ids = (set() if s.ignore_eos else set(limits.eos_token_ids)) | set(s.stop_token_ids)
    tokens, out, text, end, x = list(prompt), [], "", ("length", None), prefix_hashes(prompt)[-1]
    guide = Guide(s.grammar, stop_ids | set(limits.eos_token_ids)) if s.grammar is not None else None
    if s.max_tokens != 0 and limit < asked:
        end = ("length", "kv_cache_full")
    logprobs = []
    while s.max_tokens != 0 and len(tokens) < limit:
        masked = frozenset(stop_ids) if len(out) < s.min_tokens and guide is None else frozenset()
        t = next_token(x, seed, index, masked, EVERY if guide is None else guide.allowed(len(out) < s.min_tokens))
        if s.logprobs is not None:
            logprobs.append(scored(x, t, s.logprobs))
        tokens.append(t)
        out.append(t)
        x = mix(x, t)
        complete = guide is not None and guide.take(t)
        by_id = t in stop_ids or (complete and t in limits.eos_token_ids)
        text += piece(t) if not by_id or s.include_stop else ""
        hit = min(((text.index(w), w) for w in s.stop if w in text), default=None)
        if hit:  # also where it ends in the visible text of a stop id
            end, text = ("stop", hit[1]), text[: hit[0] + (len(hit[1]) if s.include_stop else 0)]
            break
        if by_id or complete:
            unnamed = t not in stop_ids or (t in limits.eos_token_ids and not s.ignore_eos)
            end = ("stop", None if unnamed else t)
            break
    prompt_logprobs = None
    if s.prompt_logprobs is not None and index == 0:
        h = prefix_hashes(prompt)
        prompt_logprobs = [TokenLogprob(prompt[0], None, [], [])] if scores_from == 0 else []
        prompt_logprobs += [scored(h[p], prompt[p], s.prompt_logprobs) for p in range(scores_from + 1, len(prompt))]
    return Answer(out, text if request.want_text else "", *end, logprobs if s.logprobs is not None else None,
                  prompt_logprobs)


def scored(prefix_hash: int, token: int, alternatives: int) -> TokenLogprob:
    s = score(prefix_hash, token, alternatives)
    return TokenLogprob(token, s.logprob, s.top_ids, s.top_logprobs)


# ----------------------------------------------------------------------------------------------------------- world
@dataclass
class World:
    limits: HostLimits
    drafter: str = "none"
    accept: float = 1.0
    random_caps: bool = False  # any cap, any row skipped: policies that the product does not have yet
    eager: bool = False  # turns are admitted with no thought of growth, so that many are retracted
    session_share: float = 0.3
    score_share: float = 0.15
    fork_share: float = 0.2
    grammar_share: float = 0.0
    long_share: float = 0.03  # requests that go on until the context, or the pool, is full
    max_new: int = 40
    most_waiting: int = 25
    device: type[FakeDevice] = FakeDevice

    def device_world(self) -> DeviceWorld:
        m = self.limits
        return DeviceWorld(m.page_size, m.windows, m.max_model_len, m.max_slots, m.width, self.drafter, self.accept,
                           m.lookahead)


def make_world(rng: random.Random, **force) -> World:
    """A random world; `force` fixes fields of it, of its limits, or the `room` in the pool (1.0: the longest request
    just fits)."""
    k = force.pop("width", rng.choice([0, 1, 3, 7]))
    drafter = force.pop("drafter", rng.choice(DRAFTERS[1:]) if k else "none")
    page, context = force.pop("page_size", rng.choice([1, 4, 8, 16])), rng.choice([90, 150, 260])
    context = force.pop("max_model_len", context)
    lookahead = k if drafter == "eagle" else 0
    windows = force.pop("windows", rng.choice([(None,), (None, rng.choice([5, 16, 33])), (None, 5, 16)]))
    if drafter == "eagle" and windows[0] == STATE:
        windows = (None, *windows)  # a drafter's own layers have cells
    room = force.pop("room", rng.choice([1.0, 1.0, 1.3, 2.0, 3.0]))
    small_windows = force.pop("small_windows", rng.random() < 0.5)
    full = int(-(-(context - 1 + lookahead) // page) * room)
    fields = dict(
        page_size=page, windows=windows, max_slots=rng.choice([4, 9, 14]), max_model_len=context,
        chunk=rng.choice([3, 16, 64]), budget=rng.choice([8, 40, 128]), depth=rng.choice([0, 1, 1, 2, 3]), width=k,
        cap_policy=rng.choice(["full", "one_in_mixed", "budget"]), mixed=rng.random() < 0.8, lookahead=lookahead,
        prefix_cache=rng.random() < 0.85, eos_token_ids=frozenset({EOS}), seeds=random.Random(rng.random()),
        poison=True, rates=RandomRates(random.Random(rng.random())))
    host_room = force.pop("host_room", rng.choice([0, 0, 0.3, 1.0, 4.0]))  # of the pages of each group
    if STATE in windows:
        fields["state_every"] = rng.choice([1, 1, 2, 3])
    fields |= {name: force.pop(name) for name in list(force) if name in HostLimits.__dataclass_fields__}
    pages = tuple(full if w is None or not small_windows else min(full, _least_pages(w, page, lookahead))
                  for w in windows)
    fields.setdefault("host_pages", tuple(max(1, int(n * host_room)) for n in pages) if host_room else ())
    limits = HostLimits(**{"pages": pages, **fields})
    return replaced(World(limits, drafter, rng.choice([0.3, 0.7, 0.95, 1.0]), rng.random() < 0.3,
                          rng.random() < 0.5), **force)


class RandomRates(Rates):
    """Copies back and saves as a coin falls: whatever is decided, the text is the same."""

    def __init__(self, rng: random.Random):
        super().__init__()
        self.rng = rng

    def copying_pays(self, n_bytes: int, tokens: int, chunk: int) -> bool:
        return self.rng.random() < 0.8

    def saving_pays(self, page_bytes: int, page_tokens: int) -> bool:
        return self.rng.random() < 0.9


def _least_pages(window: int, page: int, lookahead: int) -> int:
    return -(-(max(window, 2) + 1 + lookahead) // page) + 2


def plain_world(drafter: str = "none", accept: float = 1.0, **fields) -> World:
    """A world without surprises: room for everything, unless `fields` (of HostLimits) say otherwise."""
    defaults = dict(page_size=4, pages=(1000,), max_slots=17, max_model_len=500, chunk=16, budget=128, depth=1, width=0,
                    eos_token_ids=frozenset({EOS}), seeds=random.Random(5), poison=True)
    fields = defaults | fields
    if "windows" in fields and len(fields["pages"]) != len(fields["windows"]):
        fields["pages"] = fields["pages"] * len(fields["windows"])
    if drafter == "eagle":
        fields.setdefault("lookahead", fields["width"])
    return World(HostLimits(**fields), drafter, accept)


# ------------------------------------------------------------------------------------------------------------- run
@dataclass
class Client:
    """One choice of one request, as its client sees it."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] | None = None
    finish: str | None = None
    stop: int | str | None = None
    last: Output | None = None


@dataclass
class Asked:
    request: Request
    prompt: list[int]
    seed: int
    session: str | None = None
    scores_from: int = 0


class Harness:
    def __init__(self, world: World, seed: int):
        self.world, self.rng = world, random.Random(seed)
        self.device = world.device(world.device_world(), self.rng)
        limits = world.limits
        if world.drafter == "host":
            limits = replaced(limits, drafter=self._propose)
        self.limits = limits
        self.half = HostHalf(limits, PieceStream, grammars())
        if world.random_caps:
            self.half.planner._caps = self._random_caps  # type: ignore[method-assign]
        if world.eager:
            self.half.planner._has_room = self._has_room_for_a_chunk  # type: ignore[method-assign]
        self.flight: deque[StepResult] = deque()
        self.asked: dict[str, Asked] = {}
        self.clients: dict[tuple[str, int], Client] = {}
        self.aborted: set[str] = set()
        self.sessions: dict[str, int] = {}  # turns that each may still take
        self.history: dict[str, list[int]] = {}  # of each session: what its finished turns say
        self.waiting_turns: set[str] = set()  # of sessions, behind a live one
        self.count: Counter[str] = Counter()
        self.rids = 0

    # -- hooks
    def _propose(self, tokens, width: int) -> list[int]:
        """The host drafter: finds whose ids these are and copies the target, spoiling some."""
        turn = next(t for t in self.half.slots.running if t.tokens is tokens)
        slot = self.device.slots[turn.slot]
        return self.device.guess(list(tokens), slot, width)

    def _random_caps(self, fills: list[int], drafts: list[int]) -> tuple[list[int], list[int]]:
        limits = self.limits
        chunks, tails = share_budget(fills, drafts, chunk=limits.chunk, budget=limits.budget, policy=limits.cap_policy)
        return ([self.rng.randint(1, c) if c else 0 for c in chunks],
                [0 if self.rng.random() < 0.05 else self.rng.randint(1, c) if c else 0 for c in tails])

    def _has_room_for_a_chunk(self, turn, claims) -> bool:
        ledger, lease, m = self.half.ledger, turn.lease, self.limits
        upto = min(lease.top, lease.lo + min(m.chunk, len(turn.tokens) - lease.lo)) + m.lookahead
        return all(n <= ledger.available(g) for g, n in enumerate(ledger.needed(lease, upto)))

    # -- requests
    def random_sampling(self, prompt: int, **fixed) -> SamplingParams:
        rng, world = self.rng, self.world
        kind = rng.random()
        scored = kind < world.score_share
        fields = dict(
            temperature=rng.choice([0.0, 1.0]), seed=rng.choice([None, rng.getrandbits(64), -5]),
            max_tokens=0 if scored else None if rng.random() < 0.1 else rng.randint(1, world.max_new),
            prompt_logprobs=rng.choice([0, 2]) if scored or rng.random() < 0.15 else None,
            logprobs=rng.choice([None, None, 0, 3]), ignore_eos=rng.random() < 0.1,
            stop=rng.choice([(), (), (piece(HOST_STOP),), (f"{HOST_STOP}><", "><3")]),
            stop_token_ids=rng.choice([(), (), (23,), (23, 31)]), include_stop=rng.random() < 0.3,
            speculation=rng.choice([None, None, None, 0, 1]))
        if not scored and fields["max_tokens"] and rng.random() < 0.2:
            fields["min_tokens"] = rng.randint(0, fields["max_tokens"])
        if not scored and world.grammar_share and rng.random() < world.grammar_share:
            fields["grammar"] = rng.choice(GRAMMARS)
        if not scored and rng.random() < world.fork_share:
            fields["n"] = rng.choice([2, 3])
        if rng.random() < world.long_share:
            fields |= dict(max_tokens=None, ignore_eos=True, stop=(), stop_token_ids=())
        return SamplingParams(**(fields | fixed))

    def random_prompt(self, most: int = 100) -> list[int]:
        rng = self.rng
        common = [(i * 7 + 3) % VOCAB for i in range(rng.choice([0, 0, 8, 24, 40]))]
        room = min(self.limits.max_model_len - 2, self.limits.kv_tokens)
        return (common + [rng.randrange(VOCAB) for _ in range(rng.randint(1, min(60, most)))])[:room]

    def submit(self, prompt: list[int] | None = None, sampling: SamplingParams | None = None, **fields) -> str:
        prompt = self.random_prompt() if prompt is None else prompt
        self.rids += 1
        rid = fields.pop("rid", f"r{self.rids}")
        fields = {"priority": self.rng.choice([0, 0, 0, 1]), "cache_salt": self.rng.choice(["", "", "s"]),
                  "want_text": self.rng.random() < 0.9} | fields
        request = Request(rid=rid, tokens=prompt, sampling=sampling or self.random_sampling(len(prompt)), **fields)
        self.half.submit(request)
        self._note(request, prompt, None, 0)
        return rid

    def _note(self, request: Request, prompt: list[int], session: str | None, scores_from: int) -> None:
        rid = request.rid
        expect(self.half._live.of(rid)[0].tokens == prompt, "a turn begins with other ids")
        seed = self.half._live.of(rid)[0].job.seed if request.sampling.seed is None else request.sampling.seed
        self.asked[rid] = Asked(request, prompt, seed & (2**64 - 1), session, scores_from)
        self.aborted.discard(rid)
        for index in range(request.sampling.n):
            self.clients[rid, index] = Client()

    # -- sessions
    def open_session(self) -> None:
        self.rids += 1
        sid = f"s{self.rids}"
        self.half.sessions.open(sid)
        self.history[sid] = []
        self.sessions[sid] = self.rng.randint(1, 5)
        self.append(sid)

    def append(self, sid: str) -> None:
        """The session's next turn; it may wait behind a live one."""
        self.rids += 1
        session = self.half.sessions.get(sid)
        ids = [self.rng.randrange(VOCAB) for _ in range(self.rng.randint(1, 12))]
        sampling = self.random_sampling(len(ids), n=1, seed=self.rng.getrandbits(64))
        request = Request(rid=f"r{self.rids}", tokens=ids, sampling=sampling)
        self.sessions[sid] -= 1
        waits = session.turn is not None
        try:
            self.half.sessions.append(sid, request)
        except RequestError:
            self.count["session_refusals"] += 1
            return
        if waits:  # its history is not known yet: see `_note_begun`
            self.asked[request.rid] = Asked(request, [], sampling.seed or 0, sid, -1)
            self.waiting_turns.add(request.rid)
            self.clients[request.rid, 0] = Client()
        else:
            self._note(request, self.history[sid] + ids, sid, len(self.history[sid]))

    def _note_begun(self) -> None:
        """Waiting turns of sessions that have begun: now their prompt is known."""
        for rid in [rid for rid in self.waiting_turns if rid in self.half._live]:
            asked, turn = self.asked[rid], self.half._live.of(rid)[0]
            assert asked.session is not None
            asked.scores_from = len(self.history[asked.session])
            asked.prompt = self.history[asked.session] + asked.request.tokens
            expect(turn.tokens[: turn.job.prompt] == asked.prompt, "a turn begins with another history")
            self.waiting_turns.remove(rid)

    def touch_sessions(self, closing: bool) -> None:
        for sid in list(self.sessions):
            session = self.half.sessions.get(sid)
            if session.turn is not None:
                if self.sessions[sid] > 0 and session.queued is None and self.rng.random() < 0.2 and not closing:
                    self.append(sid)
            elif closing or self.sessions[sid] <= 0:
                self.half.sessions.close(sid)
                del self.sessions[sid]
            elif self.rng.random() < 0.2:
                self.append(sid)
            elif self.rng.random() < 0.25 and session.tokens:
                self.rids += 1
                child = f"s{self.rids}"
                n = self.rng.randint(1, len(session.tokens))
                self.half.sessions.branch(sid, child, n)
                self.sessions[child], self.history[child] = 1, self.history[sid][:n]
            elif self.rng.random() < 0.15 and session.tokens:
                n = self.rng.randint(0, len(session.tokens))
                self.half.sessions.rewind(sid, n)
                self.history[sid] = self.history[sid][:n]

    # -- aborts
    def abort(self, rid: str) -> None:
        outputs = self.half.abort(rid)
        expect(outputs, "an abort of a live request brought no output")
        self.receive(outputs)
        self.aborted.add(rid)
        for (other, _), client in self.clients.items():
            expect(other != rid or client.finish is not None, "an aborted choice has no last output")

    def live(self) -> list[str]:
        return list(dict.fromkeys(turn.job.request.rid for turn in self.half._live))

    # -- steps
    def step(self) -> bool:
        """One turn of the engine's loop. False if nothing happened."""
        for turn in self.half._intake.compiling:
            assert turn.grammar is not None
            turn.grammar.compiled.result(timeout=30)
        plan = self.half.plan()
        self.receive(self.half.take_outputs())
        processed = False
        if plan is not None:
            planned = sum(q for _, _, q in plan.rows)
            expect(planned <= self.limits.budget, "a step over its budget")
            self._check_mixing(plan)
            mask = self._mask_of(plan) if plan.late_mask else None
            self._mark_published()
            self.flight.append(self.device.run(plan, mask))
        while len(self.flight) > (self.limits.depth if plan is not None else 0):
            self.receive(self.half.process(self.flight.popleft()))
            processed = True
            if plan is None:
                break
        return plan is not None or processed

    def _mask_of(self, plan: StepPlan) -> LateMask:
        """As the engine does: every earlier result is processed first."""
        while self.flight:
            self.receive(self.half.process(self.flight.popleft()))
        mask = self.half.mask(plan)
        self.half.spread(plan)
        self.receive(self.half.take_outputs())
        return mask

    def _check_mixing(self, plan) -> None:
        counters = self.half.counters
        if not self.limits.mixed:
            expect(counters.mixed_steps == 0, "a mixed step while mixing is off")
        if self.limits.cap_policy == "one_in_mixed":
            expect(counters.tail_tokens == counters.tail_rows, "a wide tail in a mixed step")

    def _mark_published(self) -> None:
        for pages in self.device.published:
            pages.clear()
        for node in self.half.ledger.tree.nodes():
            for g, page in enumerate(node.pages):
                if page:
                    self.device.published[g].add(page)

    def receive(self, outputs: list[Output]) -> None:
        for out in outputs:
            client = self.clients[out.rid, out.index]
            expect(client.finish is None, "an output after the last one")
            expect(out.rid not in self.aborted, "an output after an abort")
            client.tokens += out.token_ids
            client.text += out.text
            if out.logprobs is not None:
                expect(len(out.logprobs) == len(out.token_ids), "log-probabilities of another span than the ids")
                client.logprobs += out.logprobs
            if out.prompt_logprobs is not None:
                expect(client.prompt_logprobs is None, "prompt log-probabilities came twice")
                expect(len(client.tokens) == len(out.token_ids), "prompt log-probabilities not on the first output")
                client.prompt_logprobs = out.prompt_logprobs
            client.last = out
            if out.finish_reason is not None:
                client.finish, client.stop = out.finish_reason, out.stop_reason
                self._check(out, client)
        self._note_begun()

    def _check(self, out: Output, client: Client) -> None:
        asked = self.asked[out.rid]
        if out.finish_reason == "error":
            expect(asked.session is not None and asked.scores_from < 0, f"an error: {out.error}")
            self.waiting_turns.discard(out.rid)
            self.count["session_refusals"] += 1
            return
        if asked.scores_from < 0:
            expect(out.finish_reason == "abort" and not client.tokens, "a waiting turn ended without having begun")
            return
        want = oracle(asked.prompt, asked.request, out.index, asked.seed, self.limits, asked.scores_from)
        usage = out.usage
        expect(usage is not None and usage.completion_tokens == len(client.tokens), "usage and ids differ")
        expect(usage.prompt_tokens == len(asked.prompt), "usage of the prompt")
        expect(usage.cached_tokens <= len(asked.prompt) - 1 or not asked.prompt, "a hit that leaves nothing to feed")
        if out.finish_reason == "abort":
            expect(client.tokens == want.tokens[: len(client.tokens)], "an aborted output differs from the oracle")
            expect(want.text.startswith(client.text), "an aborted text differs from the oracle")
            self.count["aborted"] += 1
            return
        expect(client.tokens == want.tokens, f"ids differ from the oracle: {client.tokens} {want.tokens}")
        expect(client.text == want.text, f"text differs from the oracle: {client.text!r} {want.text!r}")
        expect((client.finish, client.stop) == (want.finish, want.stop), f"ended by {client.finish} {client.stop}, not"
                                                                         f" {want.finish} {want.stop}")
        expect((client.logprobs or None) == (want.logprobs or None), "log-probabilities differ from the oracle")
        expect(client.prompt_logprobs == want.prompt_logprobs, "prompt log-probabilities differ from the oracle")
        self.count["answers"] += 1
        if asked.session is not None:
            self.history[asked.session] = asked.prompt + client.tokens

    def drain(self, most: int = 5000) -> None:
        """Steps until nothing is left to do; then `finish`."""
        for _ in range(most):
            if not (self.half.has_work or self.flight):
                break
            moved = self.step()
            self.half.audit()
            expect(moved or not self.half.has_work, "the engine stands still with work to do")
        self.finish()

    # -- a whole run
    def new_requests(self) -> None:
        for _ in range(self.rng.choice([0, 0, 1, 1, 2])):
            if len(self.half.queue) >= self.world.most_waiting:
                return
            if self.rng.random() < self.world.session_share:
                self.open_session()
            else:
                self.submit()

    def run(self, steps: int, patience: int = 4000) -> Counter[str]:
        idle = 0
        for i in range(steps + patience):
            closing = i >= steps
            if not closing:
                self.new_requests()
                for chance in (0.03, 0.01):
                    rids = self.live()
                    if rids and self.rng.random() < chance:
                        self.abort(self.rng.choice(rids))
                if self.rng.random() < 0.01:
                    self.half.flush_cache()
            self.touch_sessions(closing)
            moved = self.step()
            if i % 13 == 0:
                self.half.audit()
            if closing and not (self.half.has_work or self.sessions or self.flight):
                break
            idle = 0 if moved or not self.half.has_work else idle + 1
            expect(idle < 3, "the engine stands still with work to do")
        self.finish()
        return self.total()

    def finish(self) -> None:
        while self.flight:
            self.receive(self.half.process(self.flight.popleft()))
        expect(not self.half.has_work, "did not drain: a request starves or is retracted for ever")
        expect(all(client.finish for client in self.clients.values()), "a choice has no last output")
        self.half.audit()
        self.half.flush_cache()
        ledger = self.half.ledger
        expect([len(free) for free in ledger.free] == list(ledger.n_pages), "pages are missing after a flush")
        if ledger.tier is not None:
            expect([len(free) for free in ledger.tier.free] == list(ledger.tier.n_pages), "host pages are missing")
        expect(not ledger.tree._roots, "a root of the prefix tree stays")
        expect(not len(self.half._live) and not self.half.slots.running, "something still lives")

    def total(self) -> Counter[str]:
        return self.count + self.device.count + Counter(
            {name: int(n) for name, n in self.half.stats()[0].items() if n})
