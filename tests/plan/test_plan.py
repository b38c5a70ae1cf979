"""The simulation and the options: what must hold for any load, whatever the figures are."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.cli.main import build_app, run_app
from stretto.host.cost import CostModel, StepWork
from stretto.plan import load as drawing
from stretto.plan.hardware import Hardware, engine, find_hardware, known_hardware
from stretto.plan.load import Lengths, Load, Talk, Turn, parse_load, read_trace, shares
from stretto.plan.options import MOST_SEATS, SCHEDULES, Goals, Option, Question, kv_room, plan
from stretto.plan.report import _advice, as_data
from stretto.plan.shapes import find_shape, known_shapes
from stretto.plan.simulate import CostTable, Outcome, Replica, _steps_until, simulate, simulate_long
from stretto.plan.steps import Steps

SMALL = find_shape("qwen3-0.6b")
ONE = replace(find_hardware("l4"), node=1)


@pytest.fixture(scope="module", autouse=True)
def _short_loads():
    """What must hold of any load, holds of short ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drawing, "USUAL_SECONDS", 40.0)
        patch.setattr(drawing, "MOST_TURNS", 900)
        patch.setattr(drawing, "LEAST_TURNS", 200)
        yield


def flat_cost(fixed: float = 0.01, token: float = 1e-4, cell: float = 1e-7) -> CostModel:
    works = [StepWork(n, n, n * c) for n in (1, 8, 64, 512) for c in (1, 1000)]
    return CostModel([(w, fixed + token * w.tokens + cell * w.context) for w in works], 512)


# ---------------------------------------------------------------------------------------------------------- simulation
turns = st.builds(Turn, prompt=st.integers(1, 900), output=st.integers(1, 40), think=st.floats(0, 2))
talks = st.lists(st.builds(Talk, at=st.floats(0, 5), turns=st.lists(turns, min_size=1, max_size=4).map(tuple),
                           history=st.integers(0, 500)), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(talks=talks, kv=st.integers(500, 20_000), seats=st.integers(1, 8), chunk=st.sampled_from([64, 512]))
def test_every_token_of_every_turn_comes_once(talks: list[Talk], kv: int, seats: int, chunk: int):
    outcome = simulate(Replica(flat_cost(), kv, seats, 512, chunk), talks)
    every = [turn for talk in talks for turn in talk.turns]
    assert outcome.output_tokens == sum(turn.output for turn in every)
    assert len(outcome.first) == outcome.turns == len(every) and min(outcome.first) > 0
    assert sum(n for _, n in outcome.gaps) == outcome.output_tokens - len(every)
    assert outcome.busy <= outcome.seconds + 1e-9
    longest = max(talk.history + sum(turn.prompt + turn.output for turn in talk.turns) for talk in talks)
    assert outcome.most_kv <= max(kv, longest)
    assert 0 <= outcome.cached_tokens <= outcome.prompt_tokens


@settings(max_examples=100, deadline=None)
@given(seconds=st.floats(0, 5), first=st.floats(1e-3, 0.1), more=st.floats(0, 1e-3))
def test_steps_taken_together_are_as_many_as_one_by_one(seconds: float, first: float, more: float):
    passed, count = 0.0, 0
    while passed < seconds:
        passed += first + more * count
        count += 1
    assert abs(_steps_until(seconds, first, more) - count) <= 1


@settings(deadline=None)
@given(rows=st.integers(0, 400), chunk=st.integers(0, 500), context=st.integers(0, 10**6), pairs=st.integers(0, 10**7))
def test_the_table_of_costs_is_the_cost_model(rows: int, chunk: int, context: int, pairs: int):
    cost = real_cost()
    expected = cost.seconds(StepWork(rows, rows + chunk, context, pairs))
    assert CostTable(cost, 1000).seconds(rows, rows + chunk, context, pairs) == pytest.approx(expected, rel=1e-6)


@cache
def real_cost() -> CostModel:
    return Steps(SMALL, ONE, engine()).cost(1000)


def test_a_request_alone_takes_the_steps_of_its_tokens():
    cost = flat_cost()
    outcome = simulate(Replica(cost, 10_000, 4, 512, 512, overhead=0.0), [Talk(3.0, (Turn(800, 3),))])
    chunks = cost.seconds(StepWork(1, 512, 512, 512 * 513 // 2)) + cost.seconds(
        StepWork(1, 288, 800, 288 * 512 + 288 * 289 // 2))
    assert outcome.first == [pytest.approx(chunks)]
    assert outcome.between(0.5) == pytest.approx(cost.seconds(StepWork(1, 1, 801)), rel=1e-2)


@settings(max_examples=30, deadline=None)
@given(talks=talks, accepted=st.floats(1.0, 4.9))
def test_drafts_change_when_tokens_come_and_never_how_many(talks: list[Talk], accepted: float):
    plain = Replica(flat_cost(), 20_000, 4, 512, 512)
    drafting = replace(plain, drafts=4, accepted=accepted)
    ahead, behind = simulate(drafting, talks), simulate(plain, talks)
    assert ahead.output_tokens == pytest.approx(sum(turn.output for talk in talks for turn in talk.turns))
    assert len(ahead.first) == len(behind.first)


def test_drafts_are_verified_where_they_pay():
    def seconds(token: float, **drafter) -> float:
        replica = Replica(flat_cost(token=token), 20_000, 4, 512, 512, **drafter)
        return simulate(replica, [Talk(0.0, (Turn(10, 401),))]).seconds

    assert seconds(1e-5, drafts=4, accepted=2.0) == pytest.approx(seconds(1e-5) / 2, rel=0.05)
    assert seconds(1e-2, drafts=4, accepted=2.0) == pytest.approx(seconds(1e-2)), "five tokens cost three times one"


def test_a_next_turn_finds_its_history_where_there_is_room():
    talk = Talk(0.0, (Turn(400, 10), Turn(20, 10, think=1.0)))
    other = Talk(0.2, (Turn(400, 10),))
    roomy = simulate(Replica(flat_cost(), 2000, 4, 512, 512), [talk, other])
    tight = simulate(Replica(flat_cost(), 450, 4, 512, 512), [talk, other])
    assert roomy.cached_tokens == 409 and tight.cached_tokens == 0
    assert roomy.first[-1] < tight.first[-1]
    fresh = simulate(Replica(flat_cost(), 2000, 4, 512, 512), [Talk(0.0, (Turn(400, 10), Turn(20, 10, 1.0, True)))])
    assert fresh.cached_tokens == 0 and fresh.prompt_tokens == 420


def test_decoding_goes_on_beside_prompts():
    """A long prompt costs those that run a longer step each, and never a pause of the whole prompt."""
    running, long = Talk(0.0, (Turn(10, 200),)), Talk(0.5, (Turn(8000, 1),))
    cost = flat_cost()
    outcome = simulate(Replica(cost, 20_000, 4, 513, 512), [running, long])
    assert outcome.between(1.0) <= 1.3 * cost.seconds(StepWork(2, 513, 8300)) < 0.2 * outcome.first[-1]


# ------------------------------------------------------------------------------------------------------------- options
def load(rate: float, **changes) -> Load:
    return Load(Lengths(300, 600), Lengths(50, 100), rate=rate, **changes)


def question(load: Load, hardware: Hardware = ONE, **changes) -> Question:
    return Question(SMALL, hardware, engine(), load, Goals(1.0, 0.1), **changes)


def devices(options: list[Option]) -> int:
    assert options[0].fits
    return options[0].devices


def test_more_load_never_needs_fewer_devices():
    counts = [devices(plan(question(load(rate)))) for rate in (0.1, 60, 1e6)]
    assert counts == sorted(counts) and counts[0] == 1 and counts[-1] > 10_000


SHORT = Load(Lengths(100, 100), Lengths(10, 10), rate=1e5)


@pytest.mark.parametrize("asked, limit", [
    (SHORT, "throughput"), (replace(SHORT, rate=None, users=10**5, think=1.0), ""),
    (replace(SHORT, turns=3, think=5.0), "throughput")])
def test_a_replica_bears_no_more_than_it_does_when_it_is_always_full(asked: Load, limit: str):
    """However short the drawn load is beside the goals, and however much is asked."""
    best = plan(question(asked))[0]
    done = simulate(Replica(Steps(SMALL, ONE, engine()).cost(8500), best.kv_tokens, 256, 8192, 2048),
                    asked.incessant(300, 3000)).steady_rate / asked.output.mean
    turns_a_second = best.per_replica if asked.users is None else best.per_replica / (asked.think + 2.0)
    assert turns_a_second < 1.1 * done and best.limit.startswith(limit) and best.limit
    assert best.outcome is not None
    if asked.users is None:
        assert best.outcome.steady_rate == pytest.approx(asked.amount / best.replicas * asked.output.mean, rel=0.15)


def test_a_long_load_queues_just_above_what_is_always_done(monkeypatch: pytest.MonkeyPatch):
    """The bound that the search keeps to, beside loads that are drawn long enough to show it."""
    monkeypatch.setattr(drawing, "MOST_TURNS", 12_000)
    best = plan(question(SHORT))[0]
    replica = Replica(Steps(SMALL, ONE, engine()).cost(8500), best.kv_tokens, 256, best.schedule.budget,
                      best.schedule.chunk)
    below, above = (simulate_long(replica, SHORT.with_amount(share * best.per_replica).draw()) for share in (0.9, 1.15))
    assert below.first_token(0.99) < 1.0 < above.first_token(0.99)


def test_a_better_device_is_never_needed_more_often():
    better = replace(ONE, read=2 * ONE.read, multiply=2 * ONE.multiply, memory=2 * ONE.memory)
    assert devices(plan(question(load(200), better))) <= devices(plan(question(load(200))))


def test_less_headroom_and_softer_goals_need_no_more():
    asked = question(load(100))
    assert devices(plan(replace(asked, headroom=1.0, goals=Goals(10.0, 1.0)))) <= devices(plan(asked))


def test_the_prediction_keeps_the_goals():
    best = plan(question(load(60)))[0]
    assert best.outcome is not None and best.limit
    assert best.outcome.first_token(0.99) <= 1.0 and best.outcome.between(0.99) <= 0.1


@pytest.mark.parametrize("asked, turns_a_second", [
    (load(4, turns=4, think=20.0), 4.0), (load(4), 4.0),
    (Load(Lengths(300, 300), Lengths(50, 100), users=40, turns=5, think=10.0), 40 / 11.0)])
def test_a_drawn_load_is_what_it_says_from_the_beginning_to_the_end(asked: Load, turns_a_second: float,
                                                                    monkeypatch: pytest.MonkeyPatch):
    """Conversations that last longer than what is simulated have begun before it."""
    monkeypatch.setattr(drawing, "USUAL_SECONDS", 120.0)
    monkeypatch.setattr(drawing, "LEAST_TURNS", 400)
    replica = Replica(Steps(SMALL, ONE, engine()).cost(1100), 150_000, 256, 1024, 512)
    drawn = asked.draw()
    outcome = simulate_long(replica, drawn)
    assert outcome.steady_rate == pytest.approx(turns_a_second * asked.output.mean, rel=0.15)
    assert outcome.seconds == pytest.approx(drawn.seconds, rel=0.05)
    assert len(outcome.first) == pytest.approx(0.8 * turns_a_second * drawn.seconds, rel=0.15)


def test_one_user_needs_one_device_and_sees_bare_speed():
    best = plan(question(Load(Lengths(100, 100), Lengths(50, 50), users=1, turns=3, think=1.0)))[0]
    assert best.outcome is not None and best.replicas == 1
    steps = Steps(SMALL, ONE, engine())
    assert best.outcome.between(0.5) == pytest.approx(steps.seconds(StepWork(1, 1, 300)), rel=0.1)


def test_several_devices_share_what_one_cannot_hold():
    big, node = find_shape("llama-3.1-70b"), replace(find_hardware("h100"), node=8)
    found = plan(Question(big, node, engine(), load(1), Goals()))
    refused = {option.ranks: option.limit for option in found if not option.fits}
    assert "memory" in refused[1] and 1 < found[0].ranks <= 4
    assert kv_room(big, node, 8, 256) > kv_room(big, node, 4, 256) > 0 > kv_room(big, node, 1, 256)


def test_devices_that_cannot_share_a_model_are_named():
    shape = find_shape("smollm2-135m")  # 9 heads, 3 KV heads
    found = plan(Question(shape, find_hardware("l4"), engine(), load(1), Goals()))
    assert {option.ranks for option in found if option.fits} == {1}
    assert all("9 heads" in option.limit for option in found if not option.fits)


def test_a_trace_is_planned_too(tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    lines = [{"at": i * 0.05, "prompt": 400, "output": 60, "session": i % 150} for i in range(600)]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    trace = read_trace(path)
    assert len(trace) == 150 and all(len(talk.turns) == 4 for talk in trace)
    assert trace[0].turns[1].think == pytest.approx(7.5)
    found = plan(Question(SMALL, ONE, engine(), trace, Goals(1.0, 0.05)))
    assert found[0].fits and found[0].replicas >= 1
    twice = sorted([*trace, *trace])
    assert devices(plan(Question(SMALL, ONE, engine(), twice, Goals(1.0, 0.05)))) >= devices(found)


@pytest.mark.parametrize("node, ranks, replicas, told", [
    (8, 8, 5, ""), (8, 1, 1, ""), (8, 2, 3, "or on one host: once, with --replicas 3"),
    (8, 2, 9, "or on hosts of 8 GPUs: 3 x the same with --replicas 4")])
def test_replicas_that_fit_a_host_are_one_command(node: int, ranks: int, replicas: int, told: str):
    question = Question(SMALL, replace(ONE, node=node), engine(), load(1), Goals())
    option = Option(ranks, SCHEDULES[0], 1000, 1.0, replicas, "", outcome=Outcome())
    first, *others = _advice(question, [option]).splitlines()
    assert first.startswith(f"{replicas} x stretto serve MODEL") and "\n".join(others) == told


def test_every_replica_of_a_trace_is_judged():
    """Dealt out to an even number, the first replicas have all the short questions and the second ones all the long."""
    trace = [Talk(0.05 * n, (Turn(3000, 40) if n % 2 else Turn(20, 40),)) for n in range(300)]
    goals = Goals(0.5, 0.1)
    (best, *_) = plan(Question(SMALL, ONE, engine(), trace, goals))
    assert best.fits and best.outcome is not None
    first_of_two = simulate(_replica_of(best), trace[::2])
    assert first_of_two.first_token(0.99) < goals.first and first_of_two.between(0.99) < goals.between
    assert best.replicas > 2, "only the first of two was looked at"
    seen = [one for n in range(best.replicas) for one in simulate(_replica_of(best), trace[n::best.replicas]).first]
    assert sorted(seen) == sorted(best.outcome.first) and len(seen) == 300
    assert np.quantile(seen, 0.99) <= goals.first


def _replica_of(option: Option) -> Replica:
    steps = Steps(SMALL, ONE, engine(), option.ranks)
    return Replica(steps.cost(option.schedule.budget + MOST_SEATS), option.kv_tokens, MOST_SEATS,
                   option.schedule.budget, option.schedule.chunk)


def test_of_a_long_trace_enough_is_looked_at(monkeypatch: pytest.MonkeyPatch):
    trace = [Talk(float(n), (Turn(1, 1), Turn(1, 1))) for n in range(1000)]
    assert [len(share) for share in shares(trace, 4)] == [250] * 4
    monkeypatch.setattr(drawing, "LOOKED_AT", 500)
    assert [list(share) for share in shares(trace, 8)] == [trace[0::8], trace[4::8]]
    assert [len(share) for share in shares(trace, 3)] == [334], "one at least"


def test_a_short_trace_has_its_own_tokens_a_second(tmp_path: Path):
    """185 tokens in 5 seconds, whatever a request's place in them, the replicas, and the clock that the trace has."""
    path = tmp_path / "trace.jsonl"
    for start in (0.0, 1.7e9):
        entries = [{"at": start + at, "prompt": 100, "output": n} for at, n in ((0.0, 100), (0.5, 80), (5.0, 5))]
        path.write_text("\n".join(map(json.dumps, entries)))
        trace = read_trace(path)
        assert trace[0].at == 0.0
        for ranks in (1, 2):
            for option in plan(Question(SMALL, replace(ONE, node=ranks), engine(), trace, Goals())):
                assert option.fits and option.output_rate == pytest.approx(185 / 5, rel=0.05)
    tight = Goals(0.4, 0.2)
    crowd = [Talk(0.001 * n, (Turn(2000, 10),)) for n in range(40)] + [Talk(9.0, (Turn(10, 10),))]
    several = plan(Question(SMALL, ONE, engine(), crowd, tight))
    best = next(option for option in several if option.replicas > 1)
    assert best.output_rate == pytest.approx(410 / 9, rel=0.05)


@pytest.mark.parametrize("changes, why", [
    ({"at": float("inf")}, "times 0 or more"), ({"output": 0}, "1 or more"),
    ({"session": []}, "a text or a whole number"), ({"prompt": float("inf")}, "infinity to integer")])
def test_bad_lines_of_a_trace_are_named(changes: dict[str, object], why: str, tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps({"at": 0.0, "prompt": 5, "output": 5} | changes))
    with pytest.raises(ValueError, match=f"line 1.*{why}"):
        read_trace(path)


def test_requests_without_a_session_are_conversations_of_their_own(tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    lines = [{"at": 0.0, "prompt": 5, "output": 5} | more for more in ({}, {"session": None}, {"session": None})]
    path.write_text("\n".join(map(json.dumps, lines)))
    assert len(read_trace(path)) == 3


def test_shared_tokens_come_before_prompts():
    assert str(parse_load("rate=1,prompt=100,output=10,shared=1000")) == (
        "1 requests/s: 1000 tokens that are the same in all, prompts of 100, answers of 10")


def test_the_catalogue_and_the_shapes_are_whole():
    for name in known_hardware():
        hardware = find_hardware(name)
        assert 0.2e12 < hardware.read < 20e12 and 20e12 < hardware.multiply < 5e15 and hardware.memory > 2e10
    weights = {name: find_shape(name).weight_bytes for name in known_shapes()}
    assert weights["llama-3.1-8b"] == pytest.approx(16.06e9, rel=0.01)
    assert weights["qwen3-30b-a3b"] == pytest.approx(61.1e9, rel=0.01)
    assert find_shape("llama-3.1-8b", weight_bits=4).weight_bytes < 0.4 * weights["llama-3.1-8b"]
    assert find_shape("llama-3.1-8b", kv_bits=8).kv_token_bytes == 65536


@pytest.mark.parametrize("text, why", [
    ("prompt=5", "lacks output"), ("rate=1,prompt=5,output=x", "output=x: 'x' is no number of tokens"),
    ("rate=1,users=2,prompt=1,output=1", "either"),
    ("rate=0,prompt=1,output=1", "above 0"), ("speed=1,prompt=1,output=1", "no part of a load"),
    ("rate=1,prompt=9..3,output=1", "LEAST..MOST"), ("rate=nan,prompt=1,output=1", "above 0"),
    ("rate=inf,prompt=1,output=1", "rate=inf: it must be above 0 and finite"),
    ("rate=1,prompt=1e9,output=1", "prompt=1e9: '1e9' is no number of tokens: .* whole numbers"),
    ("rate=1,prompt=5..,output=1", "prompt=5..: .* LEAST..MOST"),
    ("rate=x,prompt=1,output=1", "rate=x: 'x' is no number"),
    ("rate=1,turns=1.5,prompt=1,output=1", "turns=1.5: '1.5' is no whole number"),
    ("rate=1,think=inf,prompt=1,output=1", "think=inf: it must be 0 or more, and finite")])
def test_bad_loads_say_why(text: str, why: str):
    with pytest.raises(ValueError, match=why):
        parse_load(text)


def test_the_page_names_every_shape_and_device():
    page = (Path(__file__).parents[2] / "docs" / "scaling.md").read_text(encoding="utf-8")
    assert f"`{' '.join(known_shapes())}`" in page and f"`{' '.join(known_hardware())}`" in page


# ------------------------------------------------------------------------------------------------------------- command
class Lines:
    def __init__(self):
        self.text = ""

    def print(self, line: str, **_: object) -> None:
        self.text += line + "\n"


def command(*arguments: str) -> tuple[int, str]:
    errors = Lines()
    return run_app(["plan", *arguments], {}, errors), errors.text  # type: ignore[arg-type]


ASKED = ("--load", "rate=2,prompt=300,output=50", "--gpus-per-host", "1")


def test_the_command_prints_a_table_and_json(capsys: pytest.CaptureFixture[str]):
    assert command("qwen3-0.6b", "--hw", "l4", *ASKED)[0] == 0
    shown = capsys.readouterr().out
    assert "tokens/s" in shown and "1 x stretto serve MODEL" in shown
    assert command("Qwen/Qwen3-0.6B", "--hw", "l4", *ASKED, "--json")[0] == 0
    told = json.loads(capsys.readouterr().out)
    assert told["options"][0]["devices"] == 1 and told["options"][0]["first_token"]["p99"] <= 2.0
    assert told == as_data(*_same())


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """The server's command that a plan ends with, in words."""
    assert command("llama-3.1-8b", "--hw", "h200", *ASKED, *arguments, "--json")[0] == 0
    return json.loads(capsys.readouterr().out)["options"][0]["command"].split()


@pytest.mark.parametrize("arguments, flags", [
    ((), "--max-num-seqs 256"), (("--max-num-seqs", "32"), "--max-num-seqs 32"),
    (("--kv-bits", "8"), "--kv-cache-dtype fp8_e4m3"), (("--drafts", "4", "--accepted", "2"), "--speculation DRAFTER"),
    (("--drafts", "7", "--accepted", "2"), "--speculation-tokens 7")])
def test_the_printed_command_is_what_was_planned(arguments: tuple[str, ...], flags: str,
                                                 capsys: pytest.CaptureFixture[str]):
    words = printed(capsys, *arguments)
    assert flags in " ".join(words)
    assert ("--kv-cache-dtype" in words) == ("--kv-bits" in arguments)
    assert ("--speculation" in words) == ("--drafts" in arguments)
    build_app().parse_args(words[1:], exit_on_error=False, print_error=False)


def test_weights_of_few_bits_are_said_to_be_the_checkpoints(capsys: pytest.CaptureFixture[str]):
    assert command("llama-3.1-8b", *ASKED, "--weight-bits", "4", "--kv-bits", "8", "--max-num-seqs", "32")[0] == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "--max-num-seqs 32 --kv-cache-dtype fp8_e4m3 MODEL: a checkpoint with weights of 4 bits" in shown


def _same() -> tuple[Question, list[Option]]:
    asked = Question(SMALL, replace(ONE, origin="as given"), engine(), parse_load(ASKED[1]), Goals())
    return asked, plan(asked)


def test_settings_of_a_server_are_not_read(capsys: pytest.CaptureFixture[str]):
    errors, variables = Lines(), {"STRETTO_KV_MEMORY": "4GiB", "STRETTO_MAX_NUM_SEQS": "3"}
    assert run_app(["plan", "qwen3-0.6b", "--hw", "l4", *ASKED], variables, errors) == 0  # type: ignore[arg-type]


def test_exit_code_where_nothing_fits(capsys: pytest.CaptureFixture[str]):
    assert command("llama-3.1-70b", "--hw", "l4", *ASKED)[0] == 3
    assert "nothing fits" in capsys.readouterr().out


@pytest.mark.parametrize("arguments, why", [
    (("no-such-model", *ASKED), "no sizes of 'no-such-model'"), (("qwen3-0.6b", "--hw", "tpu", *ASKED), "catalogue"),
    (("qwen3-0.6b", "--load", "nothing"), "neither a file"), (("qwen3-0.6b", *ASKED, "--headroom", "2"), "headroom"),
    (("qwen3-0.6b", *ASKED, "--weight-bits", "3"), "3 bits"), (("/nonexistent", *ASKED), "no sizes of '/nonexistent'"),
    (("qwen3-0.6b", *ASKED[:2], "--gpus-per-host", "0"), "--gpus-per-host 0: it must be above 0"),
    (("qwen3-0.6b", *ASKED, "--read-tb-s", "-2"), "--read-tb-s -2: it must be above 0"),
    (("qwen3-0.6b", *ASKED, "--hw", "foo", "--read-tb-s", "2"), "give --memory, --tflops too")])
def test_bad_arguments_are_told(arguments: tuple[str, ...], why: str):
    code, told = command(*arguments)
    assert code == 2 and why in told


def test_a_device_of_ones_own(capsys: pytest.CaptureFixture[str]):
    own = ("--hw", "mine", "--memory", "24GB", "--read-tb-s", "0.5", "--tflops", "80")
    assert command("qwen3-0.6b", *own, *ASKED, "--json")[0] == 0
    assert json.loads(capsys.readouterr().out)["hardware"]["read"] == 0.5e12
