"""Elastic speculation over the real engine: it changes how many steps an answer takes, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.elastic_gpu import Far
from stretto.device.streams import InlineDevice, ThreadDevice
from stretto.engine.build import _costs_work, _shapes, _times_key
from stretto.engine.step_times import LEAST_POINTS, StepTimes, cached, points
from stretto.host.cost import CostModel, StepWork
from stretto.host.elastic import Elastic
from stretto.host.limits import HostLimits
from stretto.host.sizes import Sizes
from stretto.params import SamplingParams
from stretto.protocol import SessionTurn
from stretto.ragged import RaggedStep
from stretto.spec.api import Offer, SlotView
from stretto.spec.scripted import ScriptedDrafter
from tests.engine.small import VOCAB, Oracle, Run, greedy, make_core

PROMPTS = [[5, 9, 2, 7, 1, 30], [8, 8, 1], [17, 4, 250, 99, 3, 3, 3, 41, 12], [60 + i for i in range(40)]]
TOKENS, WIDTH = 40, 4
CHEAP = [(StepWork(1, 1, 0), 0.010), (StepWork(1, 64, 0), 0.0101), (StepWork(1, 256, 0), 0.0102)]
DEAR = [(StepWork(1, 1, 0), 0.001), (StepWork(1, 64, 0), 0.064), (StepWork(1, 256, 0), 0.256)]


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Oracle]:
    yield Oracle.make(tmp_path_factory.mktemp("elastic"), "llama")


def elastic(samples: list[tuple[StepWork, float]], **more) -> Elastic:
    return Elastic(CostModel(samples, 256), 9, (0, 2, WIDTH), exact=True, **more)


def run(oracle: Oracle, policy: Elastic, accuracy: float = 1.0, sampling: SamplingParams | None = None,
        drafter: ScriptedDrafter | None = None, bounded: bool = False, others: int = 0, **options) -> Run:
    """`bounded`: the device's steps are of the size that their plans say, as they are on a GPU. `others`: requests
    more, which begin first."""
    if drafter is None:
        answers = [prompt + oracle.answer(prompt, TOKENS) for prompt in PROMPTS]
        drafter = ScriptedDrafter(answers, WIDTH, accuracy, vocab_size=VOCAB)
    run = Run(make_core(oracle.model, drafter=drafter, elastic=policy, budget=64, chunk=7, **options))
    assert isinstance(run.core.device, InlineDevice | ThreadDevice)
    run.core.device.runner.exact = not bounded
    run.core.host._clock._clock = lambda: 0.0  # the cost model keeps to what it was given
    for i in range(others):
        run.submit(f"other {i}", PROMPTS[i % 3], sampling or greedy(TOKENS))
    for i, prompt in enumerate(PROMPTS):
        run.submit(str(i), prompt, sampling or greedy(TOKENS))
        run.step(1 if others else 3)
    run.finish()
    return run


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("samples", [CHEAP, DEAR], ids=["cheap", "dear"])
def test_text_is_the_same_whatever_is_chosen(oracle: Oracle, samples: list, overlap: bool):
    policy = elastic(samples)
    got = run(oracle, policy, overlap=overlap, page_size=4)
    for i, prompt in enumerate(PROMPTS):
        assert got.ids(str(i)) == oracle.answer(prompt, TOKENS)
    assert got.counters["mixed_steps"] > 0
    rows, chosen = sum(policy.counters.chosen), policy.counters.chosen
    if samples is CHEAP:
        assert got.counters["accepted"] > TOKENS and chosen[WIDTH] > rows / 2
    else:
        assert chosen[0] > 0.8 * rows


def test_a_small_pool_a_session_of_retractions_and_seeds(oracle: Oracle):
    sampling = SamplingParams(temperature=1.0, top_p=0.9, seed=3, max_tokens=TOKENS)
    plain = run(oracle, elastic(DEAR), sampling=sampling)
    got = run(oracle, elastic(CHEAP), 0.7, sampling, pool_tokens=160, page_size=4)
    assert got.counters["retractions"] > 0
    assert [got.ids(str(i)) for i in range(len(PROMPTS))] == [plain.ids(str(i)) for i in range(len(PROMPTS))]


def test_a_wrong_drafter_is_found_out(oracle: Oracle):
    policy = elastic([(StepWork(1, n, 0), 0.01 + 0.001 * n) for n in (1, 16, 64, 256)])
    run(oracle, policy, accuracy=0.0)
    chosen = policy.counters.chosen
    assert chosen[0] > 0.7 * sum(chosen) and policy.acceptance.usual()[0] < 0.3


def test_a_request_that_names_its_drafts_gets_them(oracle: Oracle):
    policy = elastic(DEAR)
    got = run(oracle, policy, sampling=greedy(TOKENS, speculation=3))
    assert got.counters["accepted"] > TOKENS and policy.counters.chosen[3] > 10
    assert sum(policy.counters.chosen[4:]) == 0


def test_a_goal_for_steps_makes_chunks_smaller(oracle: Oracle):
    """Steps of more than about 100 tokens take too long here; the prompt has 200."""
    cost = CostModel([(StepWork(1, n, 0), n / 1000) for n in (1, 64, 256)], 256)
    policy = Elastic(cost, 9, (0,), exact=True, goal=0.1)
    core = make_core(oracle.model, elastic=policy, budget=256, chunk=256)
    got = Run(core)
    got.core.host._clock._clock = lambda: 0.0
    prompt = [3 + i % 200 for i in range(200)]
    got.submit("a", prompt, greedy(4))
    got.finish()
    assert got.ids("a") == oracle.answer(prompt, 4)
    assert got.counters["chunk_rows"] == 2


class Remembering(Elastic):
    """Keeps who was seated, and how much likelier than usual its first draft was believed to be then."""

    def seated(self, slot: int, who: Hashable, sampled: bool = False) -> None:
        super().seated(slot, who, sampled)
        chance, offered = (f(np.asarray([slot]))[0, 0] for f in (self.acceptance.survival, self.acceptance.offered))
        differs = chance / offered - self.acceptance.usual(sampled)[0]
        self.seats = [*getattr(self, "seats", []), (who, sampled, differs)]


def test_a_session_and_a_retracted_request_are_remembered_and_others_judged_afresh(oracle: Oracle):
    policy = Remembering(CostModel(CHEAP, 256), 9, (0, WIDTH), exact=True)
    wrong, prompt = PROMPTS[0] + [7] * TOKENS, PROMPTS[3]
    drafter = ScriptedDrafter([wrong, prompt + oracle.answer(prompt, TOKENS)], WIDTH, vocab_size=VOCAB)
    got = Run(make_core(oracle.model, drafter=drafter, elastic=policy, prefix_cache=False))
    for rid, ids, more in (("1", PROMPTS[0], {"session": SessionTurn(sid="s")}), ("2", prompt, {}),
                           ("3", prompt, {}), ("4", PROMPTS[0], {"session": SessionTurn(sid="s", mode="append")}),
                           ("5", prompt, {})):
        got.submit(rid, ids, greedy(TOKENS, speculation=WIDTH), **more)
        got.finish_sessions()
    assert [who for who, _, _ in policy.seats] == [("s", -1), ("2", 0), ("3", 0), ("s", -1), ("5", 0)]
    assert all(abs(policy.seats[i][2]) < 1e-6 for i in (0, 1, 2, 4))
    assert policy.seats[3][2] < -0.1

    policy = Remembering(CostModel(CHEAP, 256), 9, (0, WIDTH), exact=True)
    got = run(oracle, policy, 0.5, pool_tokens=120, page_size=4)
    assert got.counters["retractions"] > 0 and len(policy.seats) == len(PROMPTS) + got.counters["retractions"]


class Knowing(ScriptedDrafter):
    """It knows which of its ids are wrong, nearly: chances of 0.9 and 0.2."""

    def __init__(self, answers: list[list[int]], accuracy: float):
        super().__init__(answers, WIDTH, accuracy, vocab_size=VOCAB)
        self.caps = replace(self.caps, variable=True, confidence=True)
        self.told: list[float] = []

    def propose(self, step: RaggedStep, view: SlotView, width: int) -> Offer:
        spoilt = super().propose(step, view, width)
        self.accuracy, kept = 1.0, self.accuracy
        right = super().propose(step, view, width)
        self.accuracy = kept
        chances = torch.where(spoilt.ids == right.ids, 0.9, 0.2).cumprod(1)
        sure = (chances >= view.least).int().cumprod(1).sum(1)
        self.told.append(float(view.least))
        return Offer(spoilt.ids, torch.minimum(spoilt.width, sure).int())


@pytest.mark.parametrize("confident", [False, True])
def test_a_drafter_that_knows_its_chances_is_told_which_pay(oracle: Oracle, confident: bool):
    """Each token more costs as much as half a step: only what is nearly certain pays."""
    costs = [(StepWork(1, n, 0), 0.001 + 0.0006 * n) for n in (1, 16, 64, 256)]
    policy = elastic(costs, confident=confident)
    drafter = Knowing([prompt + oracle.answer(prompt, TOKENS) for prompt in PROMPTS], 0.6)
    got = run(oracle, policy, drafter=drafter)
    for i, prompt in enumerate(PROMPTS):
        assert got.ids(str(i)) == oracle.answer(prompt, TOKENS)
    rate = got.counters["accepted"] / got.counters["drafted"]
    if confident:
        assert max(drafter.told) > 0.3 and rate > 0.85 and got.counters["accepted"] > 20
    else:
        assert set(drafter.told) == {0.0} and rate < 0.75


@pytest.mark.parametrize("overlap", [False, True])
def test_steps_with_room_for_what_is_likely_to_be_offered_say_the_same(oracle: Oracle, overlap: bool):
    """On a device whose steps have a size: here most rows find no drafts, and all of them in some steps."""
    cost = CostModel(CHEAP, 256)
    policy = Elastic(cost, 9, (0, WIDTH), exact=False)
    policy._sizes = Sizes(cost, WIDTH, preparing=0.0)
    drafter = Sometimes([prompt + oracle.answer(prompt, TOKENS) for prompt in PROMPTS], WIDTH, vocab_size=VOCAB)
    got = run(oracle, policy, drafter=drafter, bounded=True, overlap=overlap, others=4)
    for i, prompt in enumerate(PROMPTS):
        assert got.ids(str(i)) == oracle.answer(prompt, TOKENS)
    assert policy.counters.absent_drafts > 20 and got.counters["accepted"] > 20


class Sometimes(ScriptedDrafter):
    """Finds something for a row in one of four steps; now and then for all rows at once."""

    def propose(self, step: RaggedStep, view: SlotView, width: int) -> Offer:
        offer = super().propose(step, view, width)
        at = view.known[step.slots.long()]
        finds = ((at // 3 + step.slots) % 4 == 0) | bool((at % 32 == 0).any())
        return Offer(offer.ids, torch.where(finds, offer.width, 0))


# --------------------------------------------------------------------------------------------------------- step times
def test_step_times_leave_the_engine_as_it_was(oracle: Oracle):
    answers = [prompt + oracle.answer(prompt, TOKENS) for prompt in PROMPTS]
    core = make_core(oracle.model, drafter=ScriptedDrafter(answers, WIDTH, vocab_size=VOCAB), budget=64, chunk=32,
                     overlap=False)
    assert isinstance(core.device, InlineDevice)
    told: list[tuple[int, int]] = []
    samples = StepTimes(core.device, core.host.limits, VOCAB).measure(seconds=60, progress=lambda *n: told.append(n))
    wanted = points(core.host.limits)
    assert len(samples) == len(wanted) == len(told) and all(seconds > 0 for _, seconds in samples)
    assert {work.draft_width for work, _ in samples} == {0, WIDTH} and any(work.pairs for work, _ in samples)
    CostModel(samples, 64)
    got = Run(core)
    for i, prompt in enumerate(PROMPTS):
        got.submit(str(i), prompt, greedy(TOKENS))
    got.finish()
    assert [got.ids(str(i)) for i in range(4)] == [oracle.answer(prompt, TOKENS) for prompt in PROMPTS]


@pytest.mark.parametrize("elastic", [False, True])
@pytest.mark.parametrize("on_host", [False, True])
def test_graphs_at_the_start_are_of_steps_that_will_come(elastic: bool, on_host: bool):
    """Where each step decides about drafts: plain steps without proposals, too, and few large ones with many drafts."""
    resolved = SimpleNamespace(speculation_tokens=4, max_num_seqs=256, elastic=elastic)
    limits = SimpleNamespace(drafter=print if on_host else None, budget=8192)
    shapes = _shapes(resolved, limits)  # type: ignore[arg-type]
    plain = {s.rows for s in shapes if s.width == 1 and s.draft_width == 0}
    proposing = {s.rows for s in shapes if s.draft_width == 4}
    assert (256 in plain) is (elastic or on_host) and (256 in proposing) is not on_host
    assert max(s.tokens or 0 for s in shapes if s.width > 1) == (480 if elastic else 256 * 5)
    assert len(shapes) == len(set(shapes))


def test_steps_on_a_cpu_cost_what_they_work_and_goals_are_in_seconds_of_the_clock():
    def work(device: str, goal: float | None) -> bool:
        schedule = SimpleNamespace(slo_itl_ms=goal)
        return _costs_work(SimpleNamespace(device=device, config=SimpleNamespace(schedule=schedule)))  # type: ignore

    assert work("cpu", None) and not work("cuda", None) and not work("cpu", 30.0)


@pytest.mark.parametrize("bounds", [{"seconds": 0.0}, {"seconds": 1e9, "real_seconds": 0.0}])
def test_measuring_stops_when_its_time_is_over(oracle: Oracle, bounds: dict[str, float]):
    """By the clock of steps, and by that of those who wait for the start."""
    core = make_core(oracle.model, overlap=False)
    assert len(StepTimes(core.device, core.host.limits, VOCAB).measure(**bounds)) == LEAST_POINTS


def test_step_times_are_used_again_only_where_they_were_measured_alike(monkeypatch: pytest.MonkeyPatch):
    def key(limits: dict[str, object] = {}, **changes: object) -> str:  # noqa: B006
        """Of a start in which these settings, by their names in the configuration, differ."""
        of = {"enforce_eager": False, "deterministic": False, "acceptance_method": "exact"} | changes
        config = SimpleNamespace(schedule=SimpleNamespace(**of), model=SimpleNamespace(**of),
                                 speculation=SimpleNamespace(**of), parallel=SimpleNamespace(tensor_parallel_size=1))
        resolved = SimpleNamespace(device="cpu", model_name="m", dtype="bfloat16", kv_dtype="auto", drafter="ngram",
                                   speculation_tokens=4, config=config)
        machine = SimpleNamespace(kind="cpu", name="a", cores=2, kernels=changes.get("kernels", ()))
        facts = SimpleNamespace(devices=[machine],
                                model=SimpleNamespace(parameters=1))
        sizes = HostLimits(page_size=16, pages=(64,), max_slots=9, max_model_len=256, **limits)  # type: ignore[arg-type]
        return json.dumps(_times_key(SimpleNamespace(resolved=resolved, facts=facts), sizes))  # type: ignore[arg-type]

    others = [key({"depth": 0}), key({"step_work": True}), key(enforce_eager=True), key(deterministic=True),
              key(acceptance_method="rejection"), key({"chunk": 64}), key(kernels=("packed",))]
    assert len({key(), *others}) == 1 + len(others) and key() == key()
    before = key()
    monkeypatch.setattr("stretto.engine.build.FORMAT", 1000)
    assert key() != before


@pytest.mark.parametrize("page, pool, context", [(1, 64, 40), (16, 4096, 256), (256, 512, 30)])
def test_every_point_fits_the_engine(oracle: Oracle, page: int, pool: int, context: int):
    core = make_core(oracle.model, overlap=False, page_size=page, pool_tokens=pool, slots=5,
                     chunk=16, budget=24, host_drafter=lambda ids, n: [], host_width=3)
    limits = replace(core.host.limits, max_model_len=context)
    for point in points(limits):
        assert point.work.tokens <= limits.budget and point.rows < limits.max_slots
        assert point.context + point.chunk + 1 < limits.max_model_len
        list(StepTimes(core.device, limits, VOCAB)._times(point))


def test_samples_of_an_equal_start_are_used_again(tmp_path: Path):
    calls: list[int] = []

    def measure() -> list[tuple[StepWork, float]]:
        calls.append(1)
        return CHEAP

    first, second = cached(tmp_path, ["a", 1], measure), cached(tmp_path, ["a", 1], measure)
    assert first == (CHEAP, False) and second == (CHEAP, True) and len(calls) == 1
    assert not cached(tmp_path, ["a", 2], measure)[1]
    for path in (tmp_path / "step_times").glob("*.json"):
        path.write_text(json.dumps([["broken"]]))
    assert cached(tmp_path, ["a", 1], measure) == (CHEAP, False)


# ----------------------------------------------------------------------------------------------------------- benchmark
def test_one_bad_round_removes_no_width_from_the_benchmark():
    far = Far()
    assert far.note({"0": 50.0, "3": 100.0, "7": 60.0, "tokens": 10.0, "elastic": 10.0}, 0.7) == []
    assert far.note({"0": 90.0, "3": 100.0, "7": 60.0, "tokens": 10.0, "elastic": 10.0}, 0.85) == ["7"]
    assert far.note({"0": 100.0, "3": 40.0, "tokens": 10.0, "elastic": 10.0}, 0.85) == []  # the best one, held up
    assert far.note({"0": 90.0, "3": 100.0, "tokens": 10.0, "elastic": 10.0}, 0.85) == [] and far.dropped == ["7"]
