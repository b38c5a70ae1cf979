"""Counters of a real engine add up, and a trace of its steps says the same as they do."""

from __future__ import annotations

import itertools

import pytest

from stretto.protocol import StepRecord
from tests.engine.small import Oracle, Run, greedy, make_core
from tests.engine.test_behaviour import PROMPTS, drafter

NEW = 16


@pytest.fixture(scope="module")
def oracle(tmp_path_factory) -> Oracle:
    return Oracle.make(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def answers(oracle: Oracle) -> list[list[int]]:
    return [oracle.answer(prompt, NEW) for prompt in PROMPTS]


def run_all(oracle: Oracle, answers: list[list[int]], overlap: bool, steps: int) -> tuple[Run, list[StepRecord]]:
    run = Run(make_core(oracle.model, overlap=overlap, drafter=drafter(answers, 0.7), chunk=16))
    assert run.core.trace(steps) == []
    for i, prompt in enumerate(PROMPTS):
        run.submit(f"r{i}", prompt, greedy(NEW))
    run.finish()
    return run, run.core.trace(0)


@pytest.mark.parametrize("overlap", [False, True])
def test_tokens_by_kind_add_up_and_the_trace_agrees(oracle: Oracle, answers, overlap: bool) -> None:
    run, records = run_all(oracle, answers, overlap, 10_000)
    counters = run.core.stats().counters
    assert counters["prefill_tokens"] == counters["prompt_tokens"] - counters["cached_tokens"]  # nothing was retracted
    assert counters["prefill_tokens"] + counters["decode_tokens"] + counters["verify_tokens"] == counters["fed_tokens"]
    assert counters["verify_tokens"] == counters["drafted"] + counters["verify_rows"] and counters["verify_rows"] > 0
    assert counters["decode_tokens"] == counters["plain_rows"]
    places = sorted(int(name.partition(".")[2]) for name in counters if name.startswith("drafted_at."))
    drafted, accepted = ([counters[f"{name}.{p}"] for p in places] for name in ("drafted_at", "accepted_at"))
    assert sum(drafted) == counters["drafted"] and sum(accepted) == counters["accepted"] > 0
    assert drafted[0] == counters["verify_rows"]
    assert all(later <= earlier for earlier, later in itertools.pairwise(accepted))
    runs = [counters.get(f"accepted_runs.{n}", 0) for n in range(len(places) + 1)]
    assert sum(runs) == counters["verify_rows"] and accepted == [sum(runs[p + 1 :]) for p in places]
    assert len(records) == counters["steps"] and [record.seq for record in records] == list(range(len(records)))
    for kind in ("prefill_tokens", "decode_tokens", "verify_tokens", "generated_tokens", "accepted"):
        assert sum(record.counts[kind] for record in records) == counters[kind]
    for record in records:
        times = [record.planning, record.planned, record.launched, record.collected, record.processed]
        assert times == sorted(times) and record.waiting <= record.collected
    flying = sum(after.planned < before.collected for before, after in itertools.pairwise(records))
    assert (flying > 0) == overlap  # a step is planned while the one before it is on the device


def test_a_trace_has_its_limit_and_none_runs_unasked(oracle: Oracle, answers) -> None:
    run, records = run_all(oracle, answers, True, 3)
    assert [record.seq for record in records] == [0, 1, 2] and run.core.trace(0) == []
