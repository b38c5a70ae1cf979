"""Elastic speculation: the cost model, the acceptance model, each choice, and a simulated GPU to play on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.device.graphs import tokens_bucket
from stretto.engine.step_times import points
from stretto.host.acceptance import Acceptance
from stretto.host.cost import CostModel, StepClock, StepWork, non_negative_least_squares
from stretto.host.elastic import LEAST_CHUNK, Choice, Demand, Elastic
from stretto.host.sizes import PREPARING, Sizes
from stretto.wire import RowResult, StepResult
from tests.host.elastic_world import (
    CHUNK,
    MOST_TOKENS,
    WIDTH,
    ByTokens,
    Fixed,
    HeldUp,
    Point,
    cpu_profile,
    cpu_seconds,
    elastic,
    measured_seconds,
    play,
    profile,
    true_seconds,
)


def always(rate: float):
    return lambda row, step: rate


def mixed(row: int, step: int) -> float:
    return (0.3, 0.6, 0.85)[row % 3]


def drifting(row: int, step: int) -> float:
    return 0.3 if step // 300 % 2 == 0 else 0.85


POINTS = [Point(f"{rows} rows, context {context}, {name}{', prompts' if prompts else ''}", rows, context, rate, prompts)
          for rows, context, name, rate, prompts in [
              (1, 300, "0.3", always(0.3), 0), (1, 1000, "0.85", always(0.85), 4), (1, 8000, "0.6", always(0.6), 0),
              (8, 300, "mixed", mixed, 0), (8, 1000, "0.3", always(0.3), 4), (8, 8000, "0.85", always(0.85), 0),
              (32, 300, "0.6", always(0.6), 0), (32, 1000, "0.85", always(0.85), 0), (32, 8000, "0.3", always(0.3), 4),
              (32, 1000, "drifting", drifting, 0), (64, 300, "0.3", always(0.3), 0), (64, 300, "0.85", always(0.85), 4),
              (64, 1000, "0.6", always(0.6), 0), (64, 1000, "mixed", mixed, 4), (64, 8000, "0.85", always(0.85), 0),
              (64, 8000, "drifting", drifting, 4), (128, 300, "0.3", always(0.3), 4), (128, 300, "0.6", always(0.6), 0),
              (128, 1000, "mixed", mixed, 0), (128, 1000, "drifting", drifting, 0), (256, 300, "0.3", always(0.3), 0),
              (256, 300, "0.85", always(0.85), 0), (256, 1000, "0.6", always(0.6), 4), (256, 1000, "mixed", mixed, 0)]]


@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.name)
def test_never_far_below_the_best_fixed_width(point: Point):
    """Once the sizes that pay are prepared, as in a server that has run for some seconds."""
    steps, skip = (900, 300) if point.acceptance is drifting else (400, 150)
    best = max(play(point, Fixed(width), steps, skip=skip) for width in (0, 1, 3, 5, 7))
    assert play(point, elastic(), steps, skip=skip) >= 0.98 * best


@pytest.mark.parametrize("rows, rate", [(64, 0.3), (64, 0.6), (128, 0.85), (256, 0.6), (256, 0.85)])
def test_better_than_a_rule_that_knows_only_how_many_tokens_a_step_has(rows: int, rate: float):
    point = Point("", rows, 1000, always(rate))
    assert play(point, elastic(), 300) >= 1.05 * play(point, ByTokens(), 300)


def test_rows_that_accept_get_the_drafts():
    policy = elastic()
    gained = play(Point("", 64, 300, mixed), policy, 300)
    assert gained >= 1.1 * max(play(Point("", 64, 300, mixed), Fixed(width), 300) for width in (0, 1, 3, 5, 7))
    usual = policy.acceptance.survival(np.arange(1, 65))[:, 0].reshape(-1)
    assert usual[2::3].mean() > usual[1::3].mean() > usual[0::3].mean()


class Proposing(Elastic):
    """Keeps for each step whether it proposes, and how many probes there were until then."""

    def __init__(self, exact: bool) -> None:
        super().__init__(CostModel(profile(), MOST_TOKENS, None if exact else tokens_bucket), 257, (0, WIDTH), exact)
        self.steps: list[tuple[bool, int]] = []

    def launched(self, seq: int, choice: Choice, *args) -> None:
        super().launched(seq, choice, *args)
        self.steps.append((choice.draft_width > 0, self.counters.probes))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("rows, learns", [(1, 100), (64, 50)])
def test_a_drafter_that_finds_nothing_costs_nothing_to_speak_of(rows: int, learns: int, exact: bool):
    """Once that is known nothing is proposed but for probes, and they are counted."""
    point, policy = Point("", rows, 1000, always(0.9), offers=0.0), Proposing(exact)
    assert play(point, policy, 400, skip=learns) >= 0.99 * play(point, Fixed(0), 400, skip=learns)
    proposing = sum(proposes for proposes, _ in policy.steps[learns:])
    assert policy.favourite == 0 and proposing == policy.counters.probes - policy.steps[learns - 1][1]
    assert 0 < proposing < (400 - learns) / 4


def test_steps_have_room_for_what_is_likely_to_be_offered():
    """A drafter that finds something for one row in four: rows that find nothing are no reason to verify nothing."""
    point = Point("", 64, 1000, always(0.9), offers=0.25)
    policy = elastic()
    gained = play(point, policy, 400, skip=150)
    assert gained >= 1.15 * max(play(point, Fixed(width), 400, skip=150) for width in (0, 1, 3, 5, 7))
    assert policy.counters.absent_drafts > 100


@pytest.mark.parametrize("rows, gain", [(8, 1.0), (64, 1.12), (256, 1.15)])
def test_a_drafter_that_knows_its_chances_brings_more(rows: int, gain: float):
    point = Point("", rows, 1000, always(0.0), knows=(0.95, 0.95, 0.2))
    blind, knowing = (play(point, elastic(confident=c), 500, skip=200) for c in (False, True))
    assert knowing >= 0.99 * gain * blind
    assert knowing >= 0.98 * max(play(point, Fixed(width), 500, skip=200) for width in (0, 1, 3, 7))


@pytest.mark.parametrize("exact", [False, True])
def test_a_drafter_that_found_nothing_for_long_is_heard_when_it_does(exact: bool):
    policy = elastic(exact)
    play(Point("", 32, 1000, always(0.9), offers=0.0), policy, 300)
    assert policy.acceptance.offered(np.arange(1, 33)).max() < 0.05
    before = sum(policy.counters.chosen[4:])
    point = Point("", 32, 1000, always(0.9))
    assert play(point, policy, 300, skip=100) > 1.5 * play(point, Fixed(0), 300)
    assert sum(policy.counters.chosen[4:]) - before > 32 * 100


def test_few_sizes_of_steps_serve():
    """Each is a graph to capture: where acceptance differs from row to row, the best size differs from step to step."""
    for preparing, most in ((0.0, 40), (PREPARING, 15)):
        policy = elastic()
        policy._sizes = Sizes(policy.cost, WIDTH, preparing)
        play(Point("", 128, 1000, mixed), policy, 400)
        prepared = sum(int(sizes.sum()) for sizes in policy._sizes._prepared.values())
        assert 3 <= prepared <= most, preparing


def test_a_new_size_runs_once_it_has_promised_what_preparing_it_costs():
    cost = CostModel(profile(), MOST_TOKENS, tokens_bucket)
    sizes, work, tokens = Sizes(cost, WIDTH, 0.05), StepWork(32, 32, 32_000), np.asarray([32, 64, 256])
    value = np.asarray([0.0, 0.02, 0.01])
    assert [sizes.best(work, tokens, value) for _ in range(6)] == [2, 2, 2, 2, 1, 2]  # the fifth prepares it
    sizes.ran(work._replace(tokens=64))
    assert sizes.best(work, tokens, value) == 1
    assert Sizes(cost, WIDTH, 0.0).best(work, tokens, value) == 1


def test_the_price_of_a_draft_rises_with_the_load_and_requests_that_name_their_number_get_it():
    policy = Elastic(CostModel(profile(), MOST_TOKENS, tokens_bucket), 257, (0, WIDTH), exact=False, confident=True)
    asked = {}
    for rows in (1, 64, 256):
        for fixed in (False, True):
            demand = Demand(np.arange(1, rows + 1), np.full(rows, WIDTH), np.full(rows, fixed), rows * 300)
            for seq in range(3):
                choice = policy.choose(demand)
                policy.launched(seq, choice, dict.fromkeys(range(1, rows + 1), 1), rows, WIDTH, 0)
            asked[rows, fixed] = choice.least
    assert asked[1, False] <= 0.05 < asked[64, False] < asked[256, False] <= 0.9
    assert not any(least for (_, fixed), least in asked.items() if fixed)


@pytest.mark.parametrize("rows, rate", [(1, 0.9), (1, 0.45), (4, 0.75), (4, 0.45), (16, 0.75)])
def test_on_a_cpu_with_a_drafter_that_has_weights(rows: int, rate: float):
    """A few tokens more cost a part of a step there, and so do proposals: with four rows it is close."""
    on_cpu = partial(play, Point("", rows, 200, always(rate)), steps=400, skip=100, true=cpu_seconds, exact=True)
    best = max(on_cpu(policy=Fixed(width)) for width in (0, 1, 3, 5, 7))
    assert on_cpu(policy=Elastic(CostModel(cpu_profile(0.0, 0), 1024), 257, (0, WIDTH), exact=True)) >= 0.98 * best


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("rows, rate", [(1, 0.9), (16, 0.75)])
def test_times_measured_in_a_bad_moment_are_found_out(rows: int, rate: float, seed: int):
    """A start on a busy machine: each of its measured steps took up to twice as long as it does later."""
    on_cpu = partial(play, Point("", rows, 200, always(rate)), steps=500, skip=200, true=cpu_seconds, exact=True)
    best = max(on_cpu(policy=Fixed(width)) for width in (0, 1, 3, 5, 7))
    assert on_cpu(policy=Elastic(CostModel(cpu_profile(1.0, seed), 1024), 257, (0, WIDTH), exact=True)) >= 0.96 * best


TWO_A_ROW = StepWork(256, 512, 256 * 32, draft_width=WIDTH)  # so that the start has prepared and measured it


def grown(step: int) -> int:
    """Contexts grow, and are those of new requests again: what one size was measured with differs from another's."""
    return step if step < 100 else 2 * ((step - 100) % 32)


def share_of_the_best(samples: list[tuple[StepWork, float]], true: Callable[[], Callable[[StepWork], float]],
                      seed: int) -> float:
    """Of 256 rows, once two seconds are over."""
    point = Point("", 256, 250, always(0.85), grown=grown)
    best = max(play(point, Fixed(width), 400, skip=130, true=measured_seconds) for width in (0, 1, 3))
    policy = Elastic(CostModel(samples, MOST_TOKENS, tokens_bucket), 257, (0, WIDTH), exact=False)
    return play(point, policy, 400, skip=130, seed=seed, true=true()) / best


@pytest.mark.parametrize("true, seed", [(lambda: measured_seconds, 1), (lambda: measured_seconds, 2), (HeldUp, 2)],
                         ids=["1", "2", "held up"])
def test_a_size_that_seemed_too_dear_at_the_start_is_tried(true: Callable[[], Callable[[StepWork], float]], seed: int):
    """All that was measured of the best size says so; and steps that were held up say nothing of theirs."""
    samples = [(work, seconds * (1.2 if int(tokens_bucket(*work[:2], True)) == 512 and not work.pairs else 1))
               for work, seconds in [*profile(measured_seconds), (TWO_A_ROW, measured_seconds(TWO_A_ROW))]]
    assert share_of_the_best(samples, true, seed) >= 0.985


def first_points(seed: int) -> list[tuple[StepWork, float]]:
    """Where there was time for 20 points, each of them longer by up to 3 %: on a host that was slow."""
    limits = SimpleNamespace(max_model_len=4096, width=WIDTH, max_slots=257, budget=MOST_TOKENS, chunk=CHUNK,
                             drafter=None, kv_tokens=1_000_000)
    rng = np.random.default_rng(seed)
    return [(point.work, measured_seconds(point.work) * (1 + 0.03 * float(rng.random())))
            for point in points(limits)[:20]]  # type: ignore[arg-type]


def test_what_the_first_points_tell_is_enough():
    assert share_of_the_best(first_points(0), HeldUp, 1) >= 0.98


@pytest.mark.parametrize("seed", range(5))
def test_the_first_points_tell_tokens_rows_and_contexts_apart(seed: int):
    cost = CostModel(first_points(seed), MOST_TOKENS, tokens_bucket)
    for rows, tokens, each in [(256, 256, 300), (256, 512, 300), (256, 512, 1024), (128, 128, 1024), (256, 1024, 64)]:
        work = StepWork(rows, tokens, rows * each)
        assert cost.seconds(work) == pytest.approx(measured_seconds(work), rel=0.09), work


def test_saturation_turns_proposals_off_and_relief_turns_them_on():
    policy = Proposing(exact=False)
    play(Point("", 256, 300, always(0.3)), policy, 200)
    probes, speculating = policy.counters.probes, policy.counters.speculating_steps
    play(Point("", 256, 300, always(0.3)), policy, 200)
    proposing = sum(proposes for proposes, _ in policy.steps[200:])
    verifying = policy.counters.speculating_steps - speculating
    assert verifying <= 20 and verifying <= proposing == policy.counters.probes - probes <= 200 / 6
    play(Point("", 4, 300, always(0.3)), policy, 100)
    assert sum(policy.counters.chosen[1:]) > 100


class Watched(Elastic):
    """Keeps which width paid best, step by step."""

    def __init__(self) -> None:
        super().__init__(CostModel(profile(), MOST_TOKENS, tokens_bucket), 257, (0, WIDTH), exact=False)
        self.favourites: list[int] = []

    def choose(self, demand: Demand) -> Choice:
        choice = super().choose(demand)
        self.favourites.append(self.favourite)
        return choice


def test_it_does_not_oscillate():
    """Where drafts are about as good as none, the choice changes seldom."""
    policy = Watched()
    play(Point("", 256, 300, always(0.62)), policy, 600)
    assert sum(a != b for a, b in pairwise(policy.favourites)) <= 3


# ---------------------------------------------------------------------------------------------------- each choice
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_choice_keeps_every_bound(data: st.DataObject):
    rows = data.draw(st.integers(0, 40))
    policy = elastic(data.draw(st.booleans()), data.draw(st.none() | st.floats(0.001, 0.1)))
    for seq in range(4):
        widths = np.asarray(data.draw(st.lists(st.integers(0, WIDTH), min_size=rows, max_size=rows)), dtype=np.int64)
        fixed = np.asarray(data.draw(st.lists(st.booleans(), min_size=rows, max_size=rows)), dtype=bool)
        owed = data.draw(st.integers(0, CHUNK))
        choice = policy.choose(Demand(np.arange(1, rows + 1), widths, fixed, rows * 100, owed, owed))
        assert len(choice.drafts) == rows and all(0 <= k <= w for k, w in zip(choice.drafts, widths))
        assert all(k == w for k, w, f in zip(choice.drafts, widths, fixed) if f)
        assert min(owed, LEAST_CHUNK) <= choice.chunk_tokens <= owed
        assert choice.draft_width in policy.widths and choice.draft_width >= max(widths[fixed], default=0)
        assert all(k <= choice.verifiable for k, f in zip(choice.drafts, fixed) if not f)
        tokens = rows + sum(choice.drafts) + choice.chunk_tokens
        policy.launched(seq, choice, {i + 1: 1 + k for i, k in enumerate(choice.drafts)}, tokens, choice.draft_width,
                        choice.absent)


def test_a_latency_goal_bounds_the_step():
    goal = 0.012
    policy = elastic(goal=goal)
    demand = Demand(np.arange(1, 65), np.full(64, WIDTH), np.zeros(64, bool), 64_000, CHUNK, CHUNK)
    unbounded = elastic().choose(demand)
    choice = policy.choose(demand)
    assert LEAST_CHUNK < choice.chunk_tokens < unbounded.chunk_tokens == CHUNK
    assert true_seconds(choice.work) <= 1.1 * goal


def test_a_new_occupant_is_judged_afresh_and_one_that_returns_as_before():
    policy = elastic()
    policy.seated(1, "first")
    note(policy.acceptance, 1, WIDTH, WIDTH, 0, times=20)
    bad = policy.acceptance.survival(np.asarray([1]))[0, 0]
    note(policy.acceptance, 2, WIDTH, WIDTH, WIDTH, times=200)  # everybody else accepts
    policy.seated(1, "second")
    assert policy.acceptance.survival(np.asarray([1]))[0, 0] > bad + 0.3
    policy.seated(3, "first")
    assert policy.acceptance.survival(np.asarray([3]))[0, 0] < bad + 0.3


def test_proposals_of_the_host_can_be_verified_at_once():
    cost = CostModel(profile(), MOST_TOKENS, tokens_bucket)
    policy = Elastic(cost, 9, (0, 4), exact=False, on_host=True)
    demand = Demand(np.asarray([1]), np.asarray([4]), np.asarray([False]), 100)
    assert policy.choose(demand).verifiable == 4
    assert Elastic(cost, 9, (0, 4), exact=False).choose(demand).verifiable == 0


@pytest.mark.parametrize("widths", [(), (1, 4), (0, 4, 2), (0, 4, 4)])
def test_widths_that_do_not_rise_from_none_are_refused(widths: tuple[int, ...]):
    with pytest.raises(ValueError, match="must rise from 0"):
        Elastic(CostModel(profile(), MOST_TOKENS), 9, widths, exact=True)


# ------------------------------------------------------------------------------------------------- acceptance, cost
def note(acceptance: Acceptance, slot: int, asked: int, verified: int, accepted: int, times: int = 1) -> None:
    """A row of which all that was offered was verified."""
    for _ in range(times):
        acceptance.note_offers(*(np.asarray([n]) for n in (slot, asked, verified)))
        acceptance.note(*(np.asarray([n]) for n in (slot, verified, accepted)))


def test_acceptance_follows_what_was_verified():
    acceptance = Acceptance(4, 3)
    note(acceptance, 1, 3, 3, 1, times=100)  # the first is right, the second never
    chances = acceptance.survival(np.asarray([1]))[0]
    assert chances[0] > 0.9 and chances[1] < 0.15 and np.all(np.diff(chances) <= 0)
    note(acceptance, 2, 3, 0, 0, times=20)  # nothing was offered
    assert acceptance.survival(np.asarray([2]))[0, 0] < 0.05
    assert acceptance.survival(np.asarray([1]))[0, 0] > 0.9


@pytest.mark.parametrize("rates, differ", [((0.6,), False), ((0.2, 0.9), True)])
def test_how_much_a_row_says_of_itself_depends_on_how_different_rows_are(rates: tuple[float, ...], differ: bool):
    rng, slots = np.random.default_rng(0), np.arange(1, 65)
    acceptance, truth = Acceptance(65, 1), np.resize(rates, 64)
    for _ in range(150):
        acceptance.step(slots)
        right = (rng.random(64) < truth).astype(np.int64)
        acceptance.note(slots, np.ones(64, np.int64), right)
    error = np.abs(acceptance.survival(slots)[:, 0] - truth).mean()
    assert error < (0.08 if differ else 0.03)
    assert (acceptance._weight < 15) is differ


def test_greedy_rows_and_rows_that_sample_are_told_apart():
    acceptance = Acceptance(5, 2)
    for slot in (1, 2, 3, 4):
        acceptance.forget(slot, sampled=slot > 2)
    note(acceptance, 1, 2, 2, 2, times=60)
    assert acceptance.usual(True)[0] > 0.9  # nothing is known of the others: like those
    note(acceptance, 3, 2, 2, 0, times=60)
    unseen = acceptance.survival(np.asarray([2, 4]))[:, 0]
    assert unseen[0] > 0.8 and unseen[1] < 0.2 and acceptance.best > 0.8


def test_what_was_not_tried_for_long_is_believed_to_be_like_what_was():
    acceptance = Acceptance(3, 4)
    note(acceptance, 1, 4, 4, 0, times=50)
    low = acceptance.usual()
    note(acceptance, 2, 1, 1, 1, times=400)  # only first drafts are verified, and all are right
    assert low[3] < acceptance.usual()[3] and acceptance.usual()[0] > 0.95


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_least_squares_finds_what_is_there(seed: int):
    rng = np.random.default_rng(seed)
    a = rng.random((40, 6))
    wanted = np.where(rng.random(6) < 0.5, 0, rng.random(6))
    assert np.allclose(non_negative_least_squares(a, a @ wanted, 20_000), wanted, atol=2e-3)


def test_the_cost_model_predicts_what_it_did_not_see():
    cost = CostModel(profile(), MOST_TOKENS, tokens_bucket)
    for rows, tokens, context in [(32, 32, 32_000), (32, 128, 32_000), (100, 300, 50_000), (200, 1600, 200_000)]:
        work = StepWork(rows, tokens, context)
        assert cost.seconds(work) == pytest.approx(true_seconds(work), rel=0.15)
    curve = cost.curve(StepWork(1, 1, 0), np.arange(MOST_TOKENS + 1))
    assert np.all(np.diff(curve) >= 0) and curve[129] == curve[150]  # one bucket


def test_the_cost_model_learns_that_the_machine_is_slower_and_forgives_an_outlier():
    cost = CostModel(profile(), MOST_TOKENS, tokens_bucket)
    work = StepWork(64, 64, 64_000)
    before = cost.seconds(work)
    cost.observe(work, 100 * before)
    assert cost.seconds(work) < 1.1 * before
    for _ in range(200):
        cost.observe(work, 1.5 * before)
    assert cost.seconds(work) == pytest.approx(1.5 * before, rel=0.1)


def test_the_cost_model_learns_that_one_size_is_slow_and_believes_it_of_no_other():
    """Measured were 64 and 128 tokens; 80 take nearly as long as 128. The first runs, which prepare it, say nothing."""
    cost = CostModel([(StepWork(n, n, 0), s) for n, s in ((1, 0.004), (64, 0.006), (128, 0.009), (512, 0.02))], 512,
                     tokens_bucket)
    slow, others = StepWork(70, 70, 0), [StepWork(n, n, 0) for n in (64, 128)]
    before = [cost.seconds(work) for work in others]
    for seconds in (0.15, 0.13, *[0.0088] * 12):
        cost.observe(slow, seconds)
    assert cost.seconds(slow) == pytest.approx(0.0088, rel=0.06)
    for _ in range(100):
        for work, seconds in zip(others, before):
            cost.observe(work, seconds)
        cost.observe(slow, 0.0088)
    assert [cost.seconds(work) for work in others] == pytest.approx(before, rel=0.03)
    assert cost.seconds(slow) == pytest.approx(0.0088, rel=0.03)


def test_a_machine_that_got_slower_while_every_step_proposes_makes_no_drafts_dear():
    """Nothing runs without proposals for long: all of a step takes longer, and so does all that is foretold."""
    cost = CostModel(profile(), MOST_TOKENS, tokens_bucket)
    plain = StepWork(64, 512, 64 * 300)
    both = plain._replace(draft_width=WIDTH)
    proposals = true_seconds(both) - true_seconds(plain)
    for work, slower, times in ((plain, 1, 12), (both, 1, 100), (both, 2, 200)):
        for _ in range(times):
            cost.observe(work, slower * true_seconds(work))
    assert cost.seconds(plain) == pytest.approx(2 * true_seconds(plain), rel=0.05)
    assert cost.proposing(64, WIDTH) == pytest.approx(2 * proposals, rel=0.1)
    other = StepWork(8, 8, 8 * 300)
    assert cost.seconds(other) == pytest.approx(2 * true_seconds(other), rel=0.1)


def test_what_proposals_cost_is_learnt_beside_plain_steps_for_each_width():
    cost = CostModel(profile(), MOST_TOKENS, tokens_bucket)
    plain = StepWork(64, 64, 64 * 300)
    both, before, narrow = plain._replace(draft_width=WIDTH), cost.seconds(plain), cost.proposing(64, 4)
    dear = true_seconds(plain) + 0.002
    for step in range(200):
        cost.observe(*((both, dear) if step > 20 and step % 4 == 0 else (plain, true_seconds(plain))))
    assert cost.proposing(64, WIDTH) == pytest.approx(0.002, rel=0.1)
    assert cost.proposing(64, 4) == pytest.approx(narrow, rel=0.1), "nothing was seen of it"
    assert cost.seconds(plain) == pytest.approx(true_seconds(plain), rel=0.02) == pytest.approx(before, rel=0.1)


def test_a_cost_model_needs_two_sizes():
    with pytest.raises(ValueError, match="two different counts"):
        CostModel([(StepWork(1, 1, 1), 0.1)], 8)


def test_a_step_is_timed_from_the_end_of_the_one_before():
    now = [0.0]
    clock = StepClock(lambda: now[0])
    clock.launched(0)
    now[0] = 1.0
    clock.launched(1)
    now[0] = 3.0
    assert clock.ended(0) == 3.0
    now[0] = 5.0
    assert clock.ended(1) == 2.0
    now[0] = 9.0
    clock.launched(2)  # the device was idle
    now[0] = 10.0
    assert clock.ended(2) == 1.0


def test_results_of_rows_nobody_chose_are_left_out():
    policy = elastic()
    demand = Demand(np.asarray([1]), np.asarray([WIDTH]), np.asarray([False]), 100, 64, 64)
    policy.launched(0, policy.choose(demand), {1: 1}, 65, WIDTH, 0)
    chunk = RowResult(2, 1, 64, 0, 64, 65, False, [5], [])
    decode = RowResult(1, 1, 1, 0, 10, 11, False, [5], [])
    policy.ran(StepResult(0, [chunk, decode]), 0.01)
    policy.ran(StepResult(1, [decode]), 0.01)  # of a step that was never announced
    assert policy.counters.timed_steps == 1 and policy.counters.measured_seconds == 0.01
