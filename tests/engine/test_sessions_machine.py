"""Sessions in any order of events, over the real engine: every answer equals one-shot recomputation of its history.

Rules: open, turn (tag and append, with offset, replace, earlier turns, branches), overlapping turn, rewind, branch,
abort and disconnect (rolled back or kept), steps, retraction, eviction, plain requests that press on a small pool,
flush, expiry, close. After each rule the books are audited page by page; at the end no page may be held.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import hypothesis.strategies as st
import msgspec
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from stretto.bench.soak import Soak, Subject
from stretto.params import SamplingParams
from stretto.protocol import SessionTurn
from stretto.replay import Ask, Crowd, OneShot, Talk, World, as_good
from stretto.spec.ngram import NgramDrafter
from stretto.spec.scripted import ScriptedDrafter
from stretto.testing import Setup, make_engine
from tests.engine.matrix_run import DRAFTERS, Lab, make_lab
from tests.engine.small import VOCAB, Oracle, make_core
from tests.spec.checkpoints import make_target
from tests.spec.suffix_trees import install

POOL, TTL, ROWS = 144, 100.0, 64
ROUNDING = 1e-4  # of logits up to 40 in float32, summed in another order
QUICK = settings(max_examples=2, stateful_step_count=25, deadline=None, derandomize=True, database=None,
                 phases=(Phase.generate,), suppress_health_check=list(HealthCheck))
LONG = settings(QUICK, max_examples=60, stateful_step_count=60)

ids = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12)
long_ids = st.builds(lambda start, n: [(start + 7 * i) % VOCAB for i in range(n)], st.integers(0, VOCAB - 1),
                     st.sampled_from([3, 17, 40, 90]))
samplings = st.builds(
    lambda n, seed, stops: SamplingParams(max_tokens=n, ignore_eos=True, temperature=0.0 if seed is None else 0.8,
                                          seed=seed, stop_token_ids=stops),
    st.sampled_from([1, 2, 5, 9, 17]), st.one_of(st.none(), st.integers(0, 2**32)),
    st.sampled_from([(), (), tuple(range(0, VOCAB, 10))]))


class Learner(ScriptedDrafter):
    """Is told the answers while it runs; spoils some, offers random widths."""

    def __init__(self) -> None:
        super().__init__([[0] * 250] * ROWS, 4, 0.7, vocab_size=VOCAB, variable=True)
        self.told = 0

    def learn(self, sequence: list[int]) -> None:
        row = self.told % ROWS
        self.told += 1
        self.answers[row, : len(sequence)] = torch.tensor(sequence[:250], dtype=torch.int32)
        self.lengths[row] = len(sequence)


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Setting:
    """One cell of the product, and what happened in all its runs."""

    oracle: Oracle
    answer: OneShot
    drafter: str
    page: int
    host: int = 0  # tokens of host memory
    limits: dict = field(default_factory=dict)
    seen: Counter[str] = field(default_factory=Counter)

    def world(self, clock: Clock, **more) -> World:
        made = {"none": lambda: None, "ngram": lambda: NgramDrafter(3), "scripted": Learner}[self.drafter]()
        core = make_core(self.oracle.model, page_size=self.page, pool_tokens=POOL, drafter=made, slots=5, poison=True,
                         host_tokens=self.host,
                         chunk=16, budget=40, session_ttl=TTL, session_queue=2, clock=clock, **self.limits, **more)
        return World(core, self.answer, getattr(made, "learn", None),
                     partial(as_good, self.answer, ROUNDING))


@dataclass
class TinySetting:
    """The same with the tiny model and one of its drafters, by name."""

    lab: Lab
    answer: OneShot
    drafter: str
    page: int
    seen: Counter[str] = field(default_factory=Counter)

    def world(self, clock: Clock) -> World:
        setup = Setup(page_size=self.page, pool_tokens=max(POOL, 2 * self.page), slots=5, chunk=16, budget=40,
                      overlap=True, context=240)
        return World(make_engine(self.lab.model, self.lab.drafters[self.drafter], self.lab.target, setup,
                                 session_ttl=TTL, session_queue=2, clock=clock), self.answer)


class SessionMachine(RuleBasedStateMachine):
    setting: Setting | TinySetting

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.world = self.setting.world(self.clock)

    def talk(self, data, idle: bool = False) -> Talk:
        return data.draw(st.sampled_from([t for t in self.world.talks.values() if not idle or t.live is None]))

    # ------------------------------------------------------------------------------------------------------- rules
    @rule(sampling=samplings, tokens=ids)
    def open_by_a_turn(self, sampling, tokens):
        self.world.turn(SessionTurn(sid=self.world.name("i"), mode="append"), tokens, sampling)

    @rule(ttl=st.sampled_from([None, TTL / 2, 3 * TTL]), capacity=st.sampled_from([None, None, 20, 60]))
    def open(self, ttl, capacity):
        self.world.open(ttl, capacity)

    @precondition(lambda self: self.world.talks)
    @rule(data=st.data(), tokens=st.one_of(ids, long_ids), sampling=samplings,
          on_busy=st.sampled_from(["wait", "wait", "reject"]), keep=st.booleans(), cut=st.integers(0, 5))
    def append(self, data, tokens, sampling, on_busy, keep, cut):
        talk = self.talk(data)
        more: dict = {}
        if cut == 1 and talk.live is None:
            more["offset"] = data.draw(st.integers(-len(talk.history), len(talk.history)))
        elif cut == 2 and talk.live is None and talk.turns:
            more = {"after": data.draw(st.sampled_from(sorted(talk.turns))), "replace": data.draw(st.booleans())}
        elif cut == 3:
            more["replace" if keep else "drop_previous_output"] = True
        self.world.turn(SessionTurn(sid=talk.sid, mode="append", on_busy=on_busy,
                                    on_disconnect="keep" if keep else "rollback", **more), tokens, sampling)

    @precondition(lambda self: self.world.talks)
    @rule(data=st.data(), tokens=ids, sampling=samplings)
    def tag(self, data, tokens, sampling):
        """The whole history is sent again, or a part of it, and then something new."""
        talk = self.talk(data)
        known = data.draw(st.integers(0, len(talk.history)) | st.just(len(talk.history)))
        self.world.turn(SessionTurn(sid=talk.sid), talk.history[:known] + tokens, sampling)

    @precondition(lambda self: any(t.history for t in self.world.talks.values()))
    @rule(data=st.data(), tokens=ids, sampling=samplings)
    def turn_on_a_branch(self, data, tokens, sampling):
        source = data.draw(st.sampled_from([t for t in self.world.talks.values() if t.history]))
        self.world.turn(SessionTurn(sid=self.world.name("c"), mode="append", branch_from=source.sid), tokens,
                        sampling)

    @precondition(lambda self: any(t.history and t.live is None for t in self.world.talks.values()))
    @rule(data=st.data(), rewind=st.booleans())
    def rewind_or_branch(self, data, rewind):
        talk = data.draw(st.sampled_from([t for t in self.world.talks.values() if t.history and t.live is None]))
        n = data.draw(st.integers(0 if rewind else 1, len(talk.history)))
        if rewind:
            self.world.rewind(talk.sid, n)
        else:
            self.world.branch(talk.sid, n)

    @rule(tokens=long_ids, n=st.sampled_from([4, 40]), choices=st.sampled_from([1, 1, 2, 3]),
          seed=st.one_of(st.none(), st.integers(0, 2**32)))
    def press(self, tokens, n, choices, seed):
        self.world.plain(tokens, SamplingParams(temperature=0.0 if seed is None else 0.8, seed=seed, max_tokens=n,
                                                n=choices, ignore_eos=True))

    @rule(n=st.sampled_from([1, 2, 5, 20]))
    def step(self, n):
        for _ in range(n):
            self.world.step()

    @precondition(lambda self: self.world.asks)
    @rule(data=st.data(), received=st.one_of(st.none(), st.integers(0, 6)))
    def abort(self, data, received):
        self.world.abort(data.draw(st.sampled_from(sorted(self.world.asks))), received)

    @precondition(lambda self: self.world.core.host.slots.running)
    @rule(data=st.data())
    def retract(self, data):
        """Whoever runs, at any moment, as for want of pages."""
        host = self.world.core.host
        host.planner._retract(data.draw(st.sampled_from(sorted(host.slots.running, key=lambda t: t.job.rank))))

    @precondition(lambda self: self.world.asks)
    @rule(data=st.data(), received=st.integers(0, 4))
    def disconnect(self, data, received):
        """A client goes that is answered, and has seen some of it."""
        answered = [rid for rid, ask in self.world.asks.items() if ask.got]
        if answered:
            self.world.abort(data.draw(st.sampled_from(sorted(answered))), received)

    @rule(everything=st.booleans())
    def evict(self, everything):
        """An idle session's pages go, or those of all and the prefix tree's."""
        if everything:
            self.world.core.host.flush_cache()
        else:
            self.world.core.host.sessions.reclaim()

    @rule()
    def flush(self):
        self.world.flush()

    @rule(seconds=st.sampled_from([1.0, TTL / 3, TTL / 3, TTL * 1.1]))
    def wait(self, seconds):
        self.clock.now += seconds
        self.world.tick()

    @precondition(lambda self: any(not t.closing for t in self.world.talks.values()))
    @rule(data=st.data(), abort=st.booleans())
    def close(self, data, abort):
        talk = data.draw(st.sampled_from([t for t in self.world.talks.values() if not t.closing]))
        self.world.close(talk.sid, abort)

    # -------------------------------------------------------------------------------------------------- invariants
    @invariant()
    def books_are_right(self):
        self.world.core.host.audit()
        self.world.check_sessions()

    def teardown(self):
        self.world.finish()
        self.setting.seen.update(counted(self.world))
        self.world.core.close()


@pytest.fixture(scope="module")
def oracles(tmp_path_factory) -> dict[str, tuple[Oracle, OneShot]]:
    made = {}
    for window, (name, width) in {"off": ("llama", None), "16": ("qwen3", 16)}.items():
        oracle = Oracle.make(tmp_path_factory.mktemp(name), name, width)
        made[window] = oracle, OneShot(make_core(oracle.model, prefix_cache=False, chunk=256, overlap=False))
    return made


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rounding_excuses_no_other_ids(oracles, temperature: float):
    """Where ids differ, the one that an engine by itself chooses is the better one, noise included; noise chooses other
    ids than the likeliest."""
    answer, prompt = oracles["off"][1], list(range(40, 90))
    sampling = SamplingParams(max_tokens=12, ignore_eos=True, temperature=temperature, seed=4_179_217_202)
    right, = answer(prompt, sampling)
    outputs = answer.outputs(prompt, msgspec.structs.replace(sampling, logprobs=4))
    tops = [score.top_ids for output in outputs for score in output.logprobs or ()]
    assert len(tops) == len(right) and (all(best[0] == i for best, i in zip(tops, right)) == (temperature == 0))
    for at, best in enumerate(tops):
        wrong = [*right[:at], next(i for i in best if i != right[at])]
        assert not as_good(answer, ROUNDING, Ask("", [], sampling, None, prompt, right, wrong))
        assert as_good(answer, ROUNDING, Ask("", [], sampling, None, prompt, wrong, right))


@pytest.fixture(scope="module")
def labs(tmp_path_factory) -> Callable[[bool], tuple[Lab, OneShot]]:
    made: dict[bool, tuple[Lab, OneShot]] = {}

    def get(window: bool) -> tuple[Lab, OneShot]:
        if window not in made:
            lab = make_lab(tmp_path_factory.mktemp("tiny"), window, "float32")
            setup = Setup(prefix_cache=False, context=240, pool_tokens=512)
            made[window] = lab, OneShot(make_engine(lab.model, None, lab.target, setup))
        return made[window]
    return get


def run_machine(setting: Setting | TinySetting, how: settings) -> Counter[str]:
    machine = type("Machine", (SessionMachine,), {"setting": setting})
    run_state_machine_as_test(machine, settings=how)
    return setting.seen


CELLS = [pytest.param(d, w, p, id=f"{d}-window-{w}-page-{p}") for d in ("none", "ngram", "scripted")
         for w in ("off", "16") for p in (1, 16)]
USUAL = ("answers", "retractions", "reclaimed", "aborts", "turns_rolled_back", "in_place_turns", "mixed_steps")
RARE = ("turns_kept", "branches", "recomputed_tokens", "sessions_busy", "refused: context_length_exceeded")


@pytest.mark.parametrize(("drafter", "window", "page"), CELLS)
def test_any_order(oracles, drafter: str, window: str, page: int):
    seen = run_machine(Setting(*oracles[window], drafter, page), QUICK)
    assert seen["answers"] and seen["faults"] == seen["broken_books"] == 0


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory) -> tuple[Oracle, OneShot]:
    oracle = Oracle.make(tmp_path_factory.mktemp("hybrid"), "qwen3_next")
    return oracle, OneShot(make_core(oracle.model, prefix_cache=False, chunk=256, overlap=False))


@pytest.mark.full
@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("drafter", ["none", "ngram", "scripted"])
def test_any_order_where_layers_keep_states(hybrid, drafter: str, page: int):
    seen = run_machine(Setting(*hybrid, drafter, page), QUICK)
    assert seen["answers"] and seen["faults"] == seen["broken_books"] == 0


TINY = [pytest.param(d, w, p, id=f"{d}-{'window' if w else 'all full'}-page {p}")
        for d in DRAFTERS for w in (False, True) for p in (1, 16, 64, 256)]
ONE_EACH = [pytest.param(d, bool(i % 2), (1, 16, 64, 256)[i // 2 % 4], id=d) for i, d in enumerate(DRAFTERS)]


@pytest.mark.parametrize(("drafter", "window", "page"), ONE_EACH)
def test_any_order_with_every_drafter(labs, monkeypatch, drafter: str, window: bool, page: int):
    install(monkeypatch)
    seen = run_machine(TinySetting(*labs(window), drafter, page), settings(QUICK, max_examples=4))
    assert seen["answers"] and seen["faults"] == seen["broken_books"] == 0


@pytest.mark.full
@pytest.mark.parametrize(("drafter", "window", "page"), TINY)
def test_any_order_with_every_drafter_at_length(labs, monkeypatch, drafter: str, window: bool, page: int):
    install(monkeypatch)
    seen = run_machine(TinySetting(*labs(window), drafter, page), settings(LONG, max_examples=12))
    assert seen["answers"] and seen["drafted"] and seen["aborts"]
    assert seen["retractions"] or page == 256, "the pool never ran short; with pages for a whole sequence it may not"
    assert seen["faults"] == seen["broken_books"] == 0


def crowd(setting: Setting, seed: int, least: int, most: int = 800) -> Counter[str]:
    """Goes on until the usual events have all happened."""
    world = setting.world(Clock())
    crowd = Crowd(world, seed, VOCAB)
    for n in range(most):
        crowd.act()
        world.core.host.audit()
        if n >= least and not missing(seen := counted(world)):
            break
    world.finish()
    seen = counted(world)
    world.core.close()
    return seen


def counted(world: World) -> Counter[str]:
    return Counter(world.count) + Counter({name: int(n) for name, n in world.core.host.stats()[0].items()})


def missing(seen: Counter[str]) -> list[str]:
    return [event for event in USUAL if not seen[event]]


@pytest.mark.parametrize(("drafter", "window", "page"), [
    pytest.param(d, w, p, id=f"{d}-window-{w}-page-{p}") for d, w, p in (
        ("none", "off", 16), ("none", "16", 1), ("ngram", "off", 1), ("ngram", "16", 16), ("scripted", "off", 16),
        ("scripted", "16", 1))])
def test_a_crowd(oracles, drafter: str, window: str, page: int):
    """What the product is about really happens; every pair of options occurs."""
    seen = crowd(Setting(*oracles[window], drafter, page), seed=page, least=50)
    assert not missing(seen) and (drafter == "none" or seen["accepted"] > 0)


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("drafter", "window", "page"), CELLS)
def test_any_order_at_length(oracles, drafter: str, window: str, page: int):
    setting = Setting(*oracles[window], drafter, page)
    assert run_machine(setting, LONG)["sessions_expired"]
    seen = sum((crowd(setting, seed, 500) for seed in range(10)), Counter())
    assert not missing(seen) and all(seen[event] for event in RARE)


@pytest.mark.full
@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.timeout(1200)
def test_a_drafter_with_its_own_cells_never_reads_a_stale_one(tmp_path, monkeypatch, window: int | None):
    """The target drafts for itself: a draft that is refused was made from a cell that some turn, cut, branch or abort
    left behind. Nobody asks for stop ids: the draft that ends a turn emits no id beyond the one of any step, so it does
    not count as accepted."""
    monkeypatch.setattr("stretto.replay.STOPS", 0)
    tiny = make_target(tmp_path, window=window)
    soak = Soak([Subject("tiny", tiny.model, tiny.target, (f"standalone:{tiny.target.path}",))], "float32", 200)
    for seed in range(3):
        assert soak.round(seed), soak.result
    assert soak.result.seen["accepted"] == soak.result.seen["drafted"] > 0
