"""For authors of drafters: whole engines over any model, small and without text, and the conformance kit.

    engine = make_engine(model, "mine:settings", target, Setup(page_size=1, chunk=8))
    answers = run(engine, [Ask("a", [1, 2, 3], greedy(20))])

    @pytest.mark.parametrize("check", CHECKS)             # everything that a drafter must stand
    def test_my_drafter(check):
        check(Lab(model, target, "mine:settings"))

Each check compares with the same engine without a drafter, request by request. Most also compare what was *offered*:
a proposal is a function of the ids before it, so it may depend on nothing else - no chunk size, page size, prefix hit,
neighbour, or retraction. That finds a lost hidden state or a stale draft cell which exact verification would hide.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from stretto.attn.api import AttentionBackend
from stretto.attn.select import choose_backend
from stretto.attn.torch_fixed import TorchFixed
from stretto.attn.torch_ragged import TorchRagged
from stretto.device.kv import KVCache, kv_dtype
from stretto.device.runner import Runner
from stretto.device.slots import SlotTable
from stretto.device.states import kv_groups, states_of
from stretto.device.streams import make_device
from stretto.engine.core import EngineCore
from stretto.host.grammar import Grammars
from stretto.host.half import HostHalf
from stretto.host.limits import HostLimits
from stretto.host.rates import Rates
from stretto.model.api import CausalModel
from stretto.params import SamplingParams
from stretto.protocol import EngineInfo, Output, Request
from stretto.sample.rejection import Proposals
from stretto.spec.api import Drafter
from stretto.spec.context import Target
from stretto.spec.registry import drafter_sizes, make_drafter, make_host_drafter
from stretto.text.stream import TextStream
from stretto.wire import HEADER, StepPlan, StepResult, split_plan


@dataclass(frozen=True)
class Setup:
    """Sizes and switches of a test engine. `pool_tokens` are held by every KV group."""

    width: int = 4
    page_size: int = 16
    pool_tokens: int = 4096
    chunk: int = 256
    budget: int = 1024
    cap_policy: str = "full"
    mixed: bool = True
    overlap: bool = False
    prefix_cache: bool = True
    slots: int = 9
    context: int = 256
    poison: bool = True  # freed pages become unreadable
    host_tokens: int = 0  # that host memory holds of every KV group; whatever it has is copied back
    rejection: bool = False  # drafts are verified by rejection sampling
    kv_dtype: str | None = None  # as --kv-cache-dtype; None: the model's
    attention: str | None = None  # "torch", "native" or "triton"; None: the one of the model's device


@dataclass(frozen=True)
class Ask:
    """One request."""

    rid: str
    tokens: Sequence[int]
    sampling: SamplingParams


@dataclass
class Answer:
    """What came back for one request."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    drafted: int = 0
    accepted: int = 0
    steps: int = 0
    cached: int = 0
    offers: dict[int, tuple[int, ...]] = field(default_factory=dict)  # ids known -> what was offered to follow them

    def add(self, output: Output) -> None:
        self.token_ids += output.token_ids
        self.finish_reason = output.finish_reason
        if output.usage is not None:
            usage = output.usage
            self.drafted, self.accepted, self.steps = usage.drafted_tokens, usage.accepted_tokens, usage.steps
            self.cached = usage.cached_tokens


class AlwaysCopy(Rates):
    """For tests that must not depend on how fast a machine computes."""

    def copying_pays(self, n_bytes: int, tokens: int, chunk: int) -> bool:
        return True

    def saving_pays(self, page_bytes: int, page_tokens: int) -> bool:
        return True


def greedy(n: int, **more) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=n, **more)


def target_of(model: CausalModel, path: Path, name: str = "target") -> Target:
    """What a drafter may know of a loaded model whose files are at `path`."""
    return Target(name, path, model.vocab_size, model.hidden_size,
                  len(model.layers) + len(states_of(model)), model.max_position)


def make_engine(model: CausalModel, drafter: str | Drafter | None, target: Target,
                setup: Setup | None = None, grammars: Grammars | None = None, eos: frozenset[int] = frozenset(),
                text: Callable[[SamplingParams], TextStream] | None = None, **limits: Any) -> EngineCore:
    """`drafter`: as after --speculation, or an object that needs no memory of its own, or None. `limits`: further
    fields of HostLimits."""
    s, named = setup or Setup(), drafter if isinstance(drafter, str) else None
    sizes = drafter_sizes(named, target, s.width) if named else None
    draft_windows = [group[0] for group in sizes.kv_groups] if sizes else []
    groups = kv_groups(model, draft_windows)
    context = min(s.context, model.max_position)
    caps = sizes.caps if sizes else None if drafter is None or named else drafter.caps  # type: ignore[union-attr]
    width = min(s.width, caps.max_width) if caps else 0
    pages = (-(-s.pool_tokens // s.page_size),) * len(groups)
    kv = KVCache(model.layers, groups, pages, s.page_size, kv_dtype(s.kv_dtype) if s.kv_dtype else model.dtype,
                 model.device)
    table = SlotTable(s.slots, context, s.page_size, len(groups), model.device, caps.lookahead if caps else 0)
    runner = Runner(model, _backend(model, s), kv, table, width=width)
    if s.rejection:
        table.proposals = Proposals(s.slots, width, model.vocab_size, model.device)
    on_host = caps is not None and caps.where == "host"
    if named and not on_host:
        runner.adopt(make_drafter(named, runner.drafting.context(width, context, target)))
    elif not named:
        runner.adopt(drafter)  # type: ignore[arg-type]
    if s.host_tokens:
        counts = (-(-s.host_tokens // s.page_size),) * len(groups)
        limits = {"host_pages": counts, "page_bytes": runner.keep_on_host(counts).page_bytes,
                  "rates": AlwaysCopy()} | limits
    fields: dict[str, Any] = {
        "page_size": s.page_size, "pages": pages, "windows": tuple(g.window for g in groups), "max_slots": s.slots,
        "max_model_len": context, "width": width, "depth": int(s.overlap), "chunk": s.chunk, "budget": s.budget,
        "cap_policy": s.cap_policy, "mixed": s.mixed, "prefix_cache": s.prefix_cache, "poison": s.poison,
        "lookahead": caps.lookahead if caps and width else 0, "seeds": random.Random(0), "eos_token_ids": eos,
        "drafter": make_host_drafter(named, model.vocab_size) if named and on_host else None}
    host = HostLimits(**fields | limits)
    info = EngineInfo(model_name=target.name, vocab_size=model.vocab_size, max_model_len=context,
                      max_num_seqs=s.slots - 1, kv_tokens=host.kv_tokens, eos_token_ids=[], speculation_tokens=width)
    return EngineCore(HostHalf(host, text, grammars), make_device(runner, s.overlap), info, int(s.overlap))


def _backend(model: CausalModel, setup: Setup) -> AttentionBackend:
    fixed = getattr(model, "fixed", False)
    if setup.attention == "triton":
        from stretto.attn.triton_ragged import TritonRagged  # imports triton, which installations for CPU may lack

        return TritonRagged(model.device, model.dtype, fixed=fixed)
    if setup.attention == "torch":
        return TorchFixed() if fixed else TorchRagged()
    return choose_backend(model.layers, setup.page_size, model.device, model.dtype, fixed=fixed)


def run(engine: EngineCore, asks: Sequence[Ask], later: Sequence[Ask] = (), most: int = 50_000) -> dict[str, Answer]:
    """Runs the requests to their ends; `later` ones come when the first output has. Then no page may be held by
    anybody, page by page. Answers by request id, those of further choices as "id/1", "id/2"."""
    answers: dict[str, Answer] = {}
    waiting = list(later)
    watch_offers(engine, answers)

    def submit(ask: Ask) -> None:
        engine.submit(Request(rid=ask.rid, tokens=list(ask.tokens), sampling=ask.sampling, want_text=False))

    for ask in asks:
        submit(ask)
    for _ in range(most):
        if not engine.has_work:
            break
        outputs = engine.step()
        for output in outputs:
            answers.setdefault(_key(output.rid, output.index), Answer()).add(output)
        if outputs and waiting:
            for ask in waiting:
                submit(ask)
            waiting = []
    if engine.has_work:
        raise AssertionError(f"not idle after {most} steps")
    engine.host.audit()
    _, gauges = engine.host.stats()
    held = {name: value for name, value in gauges.items() if name.startswith("pages_used") and value}
    if held:
        raise AssertionError(f"pages are held with nothing running: {held}")
    return answers


def _key(rid: str, index: int) -> str:
    return f"{rid}/{index}" if index else rid


def watch_offers(engine: EngineCore, answers: dict[str, Answer]) -> None:
    """Notes what the device reports as offered, and what the host sends of its own: whose it is while the slot still
    has its owner. What the host sends continues the ids that it knew, and may be longer than what is verified."""
    host = engine.host
    process, plan = (getattr(type(host), name).__get__(host) for name in ("process", "plan"))

    def note(slot: int, epoch: int, known: int, ids: Sequence[int]) -> None:
        turn = host.slots.owner(slot, epoch)
        if turn is not None and ids:
            key = _key(turn.job.request.rid, turn.job.index)
            answers.setdefault(key, Answer()).offers[known] = tuple(ids)

    def watched(result: StepResult) -> list[Output]:
        for row in result.rows:
            note(row.slot, row.epoch, row.known, row.offered)
        return process(result)

    def watched_plan() -> StepPlan | None:
        made = plan()
        for draft in made.drafts if made is not None else ():
            note(draft.slot, draft.epoch, draft.at, draft.ids)
        return made
    host.process, host.plan = watched, watched_plan  # type: ignore[method-assign]


def counters(engine: EngineCore) -> dict[str, float]:
    return engine.host.stats()[0]


# ------------------------------------------------------------------------------------------------- the conformance kit
PROMPTS: tuple[tuple[int, ...], ...] = ((3, 7, 11), (7, 3, 25, 9, 12) * 7, tuple(range(20, 61)), (17,), (5, 9, 31) * 6)
NEW = 18
SAMPLED: dict[str, Any] = dict(temperature=1.3, top_p=0.9, top_k=20, min_p=0.02, frequency_penalty=0.4,
                               repetition_penalty=1.1, logit_bias={5: 1.5, 9: -2.0}, min_tokens=4)


@dataclass
class Lab:
    """A drafter under test: the target's loaded model, what its files say, and the drafter as after --speculation.
    `steady`: what is offered follows from the ids alone (not so where other requests' ids are remembered)."""

    model: CausalModel
    target: Target
    drafter: str
    width: int = 4
    steady: bool = True
    prompts: tuple[tuple[int, ...], ...] = PROMPTS
    kept: dict[str, dict[str, Answer]] = field(default_factory=dict)  # answers without a drafter, by what was asked

    def setup(self, **more) -> Setup:
        return Setup(width=self.width, **more)

    def asks(self, n: int = NEW, wave: str = "", **sampling: Any) -> list[Ask]:
        """One request for each prompt, each with a seed of its own."""
        asked: dict[str, Any] = {"temperature": 0.0, "max_tokens": n, **sampling}
        return [Ask(f"{wave}{i}", [t % self.target.vocab_size for t in p], SamplingParams(seed=i, **asked))
                for i, p in enumerate(self.prompts)]

    def plain(self, asks: Sequence[Ask]) -> dict[str, Answer]:
        """Without a drafter."""
        asked = repr(asks)
        if asked not in self.kept:
            self.kept[asked] = run(make_engine(self.model, None, self.target, self.setup()), asks)
        return self.kept[asked]

    def drafted(self, asks: Sequence[Ask], later: Sequence[Ask] = (), **more) -> tuple[dict[str, Answer], EngineCore]:
        engine = make_engine(self.model, self.drafter, self.target, self.setup(**more))
        return run(engine, asks, later), engine


def same_text(got: dict[str, Answer], want: dict[str, Answer], what: object) -> None:
    for rid, answer in want.items():
        if got[rid].token_ids != answer.token_ids or got[rid].finish_reason != answer.finish_reason:
            raise AssertionError(f"{what}: request {rid} gave {got[rid].token_ids}, without a drafter"
                                 f" {answer.token_ids}")


def same_offers(lab: Lab, got: dict[str, Answer], want: dict[str, Answer], what: object) -> int:
    """Where both offered something after the same ids, it is the same. Returns how many offers were compared."""
    compared = 0
    for rid, answer in want.items():
        for known in answer.offers.keys() & got[rid].offers.keys():
            n = min(len(answer.offers[known]), len(got[rid].offers[known]))
            if lab.steady and answer.offers[known][:n] != got[rid].offers[known][:n]:
                raise AssertionError(f"{what}: after {known} ids request {rid} was offered {got[rid].offers[known]};"
                                     f" the same ids were followed by {answer.offers[known]} before")
            compared += 1
    return compared


def check_greedy_text(lab: Lab) -> None:
    """Over pages, chunks, overlap and cap policies: text as without a drafter; offers whatever the sizes are."""
    want, first = lab.plain(lab.asks()), None
    for page, chunk, overlap, policy in ((16, 256, False, "full"), (1, 8, False, "full"), (64, 128, False, "budget"),
                                         (256, 8, True, "one_in_mixed"), (16, 1, True, "full")):
        what = f"page {page}, chunk {chunk}, overlap {overlap}, {policy}"
        got, _ = lab.drafted(lab.asks(), page_size=page, chunk=chunk, overlap=overlap, cap_policy=policy)
        same_text(got, want, what)
        first = first or got
        if any(a.offers for a in first.values()) and not same_offers(lab, got, first, what):
            raise AssertionError(f"{what}: nothing was offered")
        if policy == "full" and lab.steady and not overlap:
            took = {rid: (a.accepted, a.steps) for rid, a in got.items()}
            if took != {rid: (a.accepted, a.steps) for rid, a in first.items()}:
                raise AssertionError(f"{what}: acceptance depends on it: {took}")


def check_sampled_text(lab: Lab) -> None:
    """Seeded requests with every sampling parameter, some of them beside greedy ones."""
    asks = lab.asks(**SAMPLED)
    want = lab.plain(asks)
    got, _ = lab.drafted(asks, chunk=8)
    same_text(got, want, "sampled")
    mixed = [*lab.asks(wave="g"), *asks]
    got, _ = lab.drafted(mixed, overlap=True, page_size=4)
    same_text(got, lab.plain(mixed), "sampled beside greedy")


def check_distribution(lab: Lab) -> None:
    """The first two ids of many seeds against the target's own probabilities, at three temperatures at which it has a
    choice, with top-k 4: chi-square, refused below p = 1e-4."""
    prompt, n, least = list(lab.asks()[0].tokens), 200, 0.5
    while max(_joint(lab, prompt, least).values()) > 0.6:
        least *= 2
    for temperature in (least, 2 * least, 3 * least):
        asks = [Ask(str(i), prompt, SamplingParams(seed=i, temperature=temperature, top_k=4, max_tokens=3))
                for i in range(n)]
        got, _ = lab.drafted(asks, pool_tokens=1 << 15)
        seen = Counter(tuple(a.token_ids[:2]) for a in got.values())
        expected = _joint(lab, prompt, temperature)
        if set(seen) - set(expected):
            raise AssertionError(f"temperature {temperature}: ids outside top-k: {set(seen) - set(expected)}")
        rare = sum(p for p in expected.values() if p * n < 5)
        cells = [(seen[k], p) for k, p in expected.items() if p * n >= 5]
        cells += [(n - sum(c for c, _ in cells), rare)] if rare * n >= 1 else []
        chi = sum((count - p * n) ** 2 / (p * n) for count, p in cells)
        freedom = max(len(cells) - 1, 1)
        # Wilson and Hilferty 1931: the cube root of chi-square over its degrees of freedom is nearly normal
        z = ((chi / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
        if z > 3.72:
            raise AssertionError(f"temperature {temperature}: chi-square {chi:.1f} of {freedom} degrees of freedom")


def _joint(lab: Lab, prompt: list[int], temperature: float) -> dict[tuple[int, ...], float]:
    """Probabilities of the first two ids under top-k 4, from the target's log-probabilities alone."""
    def best(tokens: list[int]) -> dict[int, float]:
        engine = make_engine(lab.model, None, lab.target, lab.setup())
        engine.submit(Request(rid="p", tokens=tokens, want_text=False,
                              sampling=SamplingParams(temperature=0.0, max_tokens=1, logprobs=4)))
        outputs: list[Output] = []
        while engine.has_work:
            outputs += engine.step()
        score = next(o.logprobs for o in outputs if o.logprobs)[0]
        weights = [math.exp(p / temperature) for p in score.top_logprobs]
        return {i: w / sum(weights) for i, w in zip(score.top_ids, weights, strict=True)}
    return {(a, b): p * q for a, p in best(prompt).items() for b, q in best([*prompt, a]).items()}


def check_random_caps(lab: Lab) -> None:
    """A cap between 1 and what was planned, for every row of every step, as any policy might set."""
    want, (first, _) = lab.plain(lab.asks()), lab.drafted(lab.asks())
    for seed, overlap in ((0, False), (1, True)):
        engine = make_engine(lab.model, lab.drafter, lab.target, lab.setup(overlap=overlap, chunk=16, page_size=4))
        lowered = _lower_caps(engine, random.Random(seed))
        got = run(engine, lab.asks())
        same_text(got, want, f"random caps {seed}")
        same_offers(lab, got, first, f"random caps {seed}")
        if not any(lowered):
            raise AssertionError("no cap was lowered: this check did nothing")


def _lower_caps(engine: EngineCore, rng: random.Random) -> list[int]:
    """Lowers the caps of every plan on its way to the device. Returns by how much, growing."""
    launch, lowered = engine.device.launch, []

    def launch_lower(packed: np.ndarray) -> None:
        for row in split_plan(packed[:HEADER], packed).rows:
            cap = rng.randint(1, int(row[2]))
            lowered.append(int(row[2]) - cap)
            row[2] = cap
        launch(packed)
    engine.device.launch = launch_lower  # type: ignore[method-assign]
    return lowered


def check_skipped_rows(lab: Lab) -> None:
    """A budget that leaves rows out of steps: they keep their drafts."""
    asks = lab.asks()
    want, (first, _) = lab.plain(asks), lab.drafted(asks)
    for policy in ("full", "budget"):
        got, _ = lab.drafted(asks, budget=4, chunk=4, cap_policy=policy, overlap=policy == "full")
        same_text(got, want, f"a budget of 4, {policy}")
        same_offers(lab, got, first, f"a budget of 4, {policy}")


def check_mixed_steps(lab: Lab) -> None:
    """Prompts in chunks arrive while others decode."""
    asks, later = lab.asks(wave="a"), lab.asks(wave="b")
    want, (first, _) = lab.plain([*asks, *later]), lab.drafted([*asks, *later])
    for policy in ("full", "one_in_mixed"):
        got, engine = lab.drafted(asks, later, chunk=4, budget=64, page_size=8, overlap=True, cap_policy=policy)
        same_text(got, want, f"mixed steps, {policy}")
        same_offers(lab, got, first, f"mixed steps, {policy}")
        if not counters(engine)["tail_rows"]:
            raise AssertionError("no decode row rode with a chunk: this check did nothing")


def check_retraction(lab: Lab) -> None:
    """A pool that holds a part of the requests: some give way and come back."""
    asks = [Ask(f"{i}{a.rid}", a.tokens, greedy(44)) for i in range(2) for a in lab.asks()[1:4]]
    want, (first, _) = lab.plain(asks), lab.drafted(asks)
    for page, overlap in ((4, True), (1, False)):
        got, engine = lab.drafted(asks, page_size=page, overlap=overlap, pool_tokens=128, chunk=16)
        same_text(got, want, f"a small pool, page {page}")
        same_offers(lab, got, first, f"a small pool, page {page}")
        grows = None in engine.host.limits.windows  # where every layer has a window, who is admitted needs no more
        if grows and not counters(engine)["retractions"]:
            raise AssertionError("nobody was retracted: this check did nothing")


def check_prefix_hits(lab: Lab) -> None:
    """A prompt that shares n tokens with an earlier one, for every n modulo the page and the width."""
    page = 4
    long = [t % lab.target.vocab_size for t in range(30, 30 + 4 * page + lab.width + 1)]
    for n in range(2 * page, 2 * page + max(page, lab.width) + 1):
        tokens = [*long[:n], 3, 8]
        first = [Ask("a", long[:n], greedy(6))]
        again = [Ask("b", tokens, greedy(12))]
        want, (cold, _) = lab.plain(again), lab.drafted(again, page_size=page)
        engine = make_engine(lab.model, lab.drafter, lab.target, lab.setup(page_size=page))
        run(engine, first)
        got = run(engine, again)
        same_text(got, want, f"a hit at {n}")
        same_offers(lab, got, cold, f"a hit at {n}")
        if got["b"].cached < n - n % page - page:
            raise AssertionError(f"of {n} shared tokens {got['b'].cached} were found: this check did nothing")
    _check_shared_edge(lab, long[: 3 * page], page)


def _check_shared_edge(lab: Lab, tokens: list[int], page: int) -> None:
    """Another request goes on differently after pages that it shares with one that still runs: the last shared cell
    must not depend on what comes next."""
    first, other = Ask("a", tokens, greedy(30)), Ask("b", [*tokens[: 2 * page], 3, 8], greedy(12))
    (alone, _), (got, _) = lab.drafted([first], page_size=page), lab.drafted([first], [other], page_size=page)
    same_text(got, lab.plain([first, other]), "a shared edge")
    same_offers(lab, got, alone, "a shared edge")
    if not got["b"].cached:
        raise AssertionError("nothing was shared: this check did nothing")


def check_host_tier(lab: Lab) -> None:
    """Pages that left the device and came back from host memory give the same text and the same offers: the drafter's
    cells and hidden states travel with them."""
    asks, again = lab.asks(), lab.asks(wave="again ")
    plain = lab.plain(asks)
    offered, _ = lab.drafted(asks)
    for page in (4, 16):
        engine = make_engine(lab.model, lab.drafter, lab.target, lab.setup(
            page_size=page, pool_tokens=112, host_tokens=2048, chunk=16, budget=32))
        got: dict[str, Answer] = {}
        for ask in (*asks, *again):  # one after the other: each finds its pages on the host
            got |= run(engine, [ask])
        for wave in ("", "again "):
            of_wave = {rid: got[wave + rid] for rid in plain}
            same_text(of_wave, plain, f"page {page}, host memory")
            same_offers(lab, of_wave, offered, f"page {page}, host memory")
        if not counters(engine)["host_restored_tokens"]:
            raise AssertionError(f"page {page}: nothing came back from host memory")


def check_choices(lab: Lab) -> None:
    """n choices share the prompt's pages, copy the last one, and feed its last position again."""
    asks = [Ask(a.rid, a.tokens, SamplingParams(temperature=1.2, max_tokens=10, seed=i, n=3))
            for i, a in enumerate(lab.asks()[:3])]
    want, (first, _) = lab.plain(asks), lab.drafted(asks, prefix_cache=False, chunk=1)
    for page, overlap in ((4, True), (1, False)):
        got, engine = lab.drafted(asks, page_size=page, overlap=overlap)
        same_text(got, want, f"choices, page {page}")
        same_offers(lab, got, first, f"choices, page {page}")
        if not counters(engine)["forks"]:
            raise AssertionError("no choice was forked: this check did nothing")


def check_sessions(lab: Lab) -> None:
    """Second turns: one after a pause, one that takes over the slot in place."""
    engine = make_engine(lab.model, lab.drafter, lab.target, lab.setup(page_size=4, overlap=True))
    prompts = [a.tokens for a in lab.asks()]
    turns = {"paused": [prompts[0], [8, 4]], "in place": [prompts[2], [6]]}
    answers: dict[str, Answer] = {}
    watch_offers(engine, answers)

    def append(sid: str, number: int) -> None:
        engine.host.sessions.append(sid, Request(rid=f"{sid} {number}", tokens=list(turns[sid][number]),
                                                 sampling=greedy(9), want_text=False))
    for sid in turns:
        engine.host.sessions.open(sid)
        append(sid, 0)
    append("in place", 1)
    for later in ("paused", None):
        while engine.has_work:
            for output in engine.step():
                answers.setdefault(output.rid, Answer()).add(output)
        if later:
            append(later, 1)
    for sid, parts in turns.items():
        whole = [*parts[0], *answers[f"{sid} 0"].token_ids, *parts[1]]
        asks = [Ask(f"{sid} 0", parts[0], greedy(9)), Ask(f"{sid} 1", whole, greedy(9))]
        same_text(answers, lab.plain(asks), f"session {sid}")
        same_offers(lab, answers, lab.drafted(asks, prefix_cache=False)[0], f"session {sid}")
    if not counters(engine)["in_place_turns"]:
        raise AssertionError("no turn took over a slot: this check did nothing")


def check_switched_off(lab: Lab) -> None:
    """Requests that want no drafts, or fewer, beside others; their ids are ingested all the same."""
    asks = [Ask(a.rid, a.tokens, greedy(NEW, speculation=None if i == 0 else i - 1))
            for i, a in enumerate(lab.asks())]
    want = lab.plain(asks)
    got, _ = lab.drafted(asks, page_size=1, chunk=8)
    same_text(got, want, "speculation 0..K by request")
    if got[asks[1].rid].drafted or any(len(offer) > 1 for offer in got[asks[2].rid].offers.values()):
        raise AssertionError("a request was offered more drafts than it wanted")


def check_soak(lab: Lab) -> None:
    """Requests with common beginnings come and are aborted at random, in a pool too small for them."""
    rng, vocab = random.Random(4), lab.target.vocab_size
    stem = [rng.randrange(vocab) for _ in range(40)]
    asks = [Ask(str(i), [*stem[: rng.choice((0, 9, 16, 24, 33))], *(rng.randrange(vocab) for _ in range(1 + i % 7))],
                SamplingParams(temperature=rng.choice((0.0, 0.9)), seed=i, max_tokens=rng.randint(6, 44)))
            for i in range(20)]
    want, (cold, _) = lab.plain(asks), lab.drafted(asks, prefix_cache=False)
    engine = make_engine(lab.model, lab.drafter, lab.target,
                         lab.setup(page_size=4, pool_tokens=128, chunk=8, budget=48, overlap=True))
    answers: dict[str, Answer] = {}
    watch_offers(engine, answers)
    waiting, aborted = list(asks), set()
    while engine.has_work or waiting:
        while waiting and rng.random() < 0.3:
            ask = waiting.pop(0)
            engine.submit(Request(rid=ask.rid, tokens=list(ask.tokens), sampling=ask.sampling, want_text=False))
        outputs = engine.step()
        live = sorted(rid for rid, answer in answers.items() if answer.finish_reason is None)
        if live and rng.random() < 0.04:
            outputs += engine.abort(rng.choice(live))
        for output in outputs:
            answers.setdefault(output.rid, Answer()).add(output)
            if output.finish_reason == "abort":
                aborted.add(output.rid)
    for rid, answer in answers.items():
        n = len(answer.token_ids) if rid in aborted else None
        if answer.token_ids != want[rid].token_ids[:n]:
            raise AssertionError(f"soak: request {rid} gave {answer.token_ids}, not {want[rid].token_ids[:n]}")
    same_offers(lab, answers, {rid: cold[rid] for rid in answers}, "soak")
    engine.host.audit()
    if not aborted or not counters(engine)["cached_tokens"]:
        raise AssertionError("nobody was aborted, or nothing shared: this check did nothing")


CHECKS: tuple[Callable[[Lab], None], ...] = (
    check_greedy_text, check_sampled_text, check_distribution, check_random_caps, check_skipped_rows,
    check_mixed_steps, check_retraction, check_prefix_hits, check_host_tier, check_choices, check_sessions,
    check_switched_off, check_soak)
