"""The planner's predictions beside what was measured on an H200 (docs/benchmarks.md): steps and throughput within 15 %
(20 % of a small model), first tokens within 15 to 25 %, next tokens within 15 % in the middle and 30 % at p90."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path

import pytest

from benchmarks.plan_fit import scan_points, table_points
from stretto.host.cost import CostModel, StepWork
from stretto.plan.hardware import engine, find_hardware
from stretto.plan.load import Talk, Turn
from stretto.plan.shapes import find_shape
from stretto.plan.simulate import Outcome, Replica, Simulation, simulate
from stretto.plan.steps import Steps

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks/results"
TABLE = json.loads((RESULTS / "table_h200.json").read_text())
SCAN = json.loads((RESULTS / "step_scan_h200.json").read_text())


@cache
def cost(shape: str) -> CostModel:
    return Steps(find_shape(shape), find_hardware("h200"), engine()).cost(8192 + 256)


def measured(what: str) -> float:
    return next(figure["measured"] for figure in TABLE["figures"] if figure["what"] == what)


def note(what: str) -> list[float]:
    """p50 and p90 beside a p99, ms."""
    text = next(figure["note"] for figure in TABLE["figures"] if figure["what"] == what)
    return [float(part.split()[1]) for part in text.split(";")[0].split(", ")]


POINTS = table_points(TABLE)


def test_there_are_points():
    assert len(POINTS) >= 15 and len(scan_points(SCAN)) >= 50


@pytest.mark.parametrize("shape, work, seconds", POINTS, ids=[f"{s}-{w.rows}-{w.tokens}" for s, w, _ in POINTS])
def test_steps_of_the_table(shape: str, work, seconds: float):
    """Of the 8B shape 15 %; of the 0.6B shape 20 %: launches are most of its time. The cost model that is fitted adds a
    little, since it is linear in rows and contexts."""
    within = 0.15 if shape.startswith("llama") else 0.20
    steps = Steps(find_shape(shape), find_hardware("h200"), engine())
    assert steps.seconds(work) == pytest.approx(seconds, rel=within)
    assert cost(shape).seconds(work) == pytest.approx(seconds, rel=within + 0.02)


def test_steps_of_the_scan():
    """Nine of ten within 10 %. The others ran in buckets much larger than they were, which newer ones are not."""
    off = [abs(cost(shape).seconds(work) / seconds - 1) for shape, work, seconds in scan_points(SCAN)]
    assert sum(one <= 0.10 for one in off) >= 0.88 * len(off) and max(off) < 0.35


def test_steps_over_two_devices():
    """Measured while other programs ran on both of them."""
    steps = json.loads((RESULTS / "ranks_h200.json").read_text())["steps"]
    for ranks, name in ((1, "one rank"), (2, "symmetric memory")):
        made = Steps(find_shape("llama-3.1-8b"), find_hardware("h200"), engine(), ranks)
        for rows, milliseconds in steps[name].items():
            n = int(rows)
            assert 1e3 * made.seconds(StepWork(n, n, n * (512 + 48))) == pytest.approx(milliseconds, rel=0.15)


def test_512_requests_at_once():
    rng = random.Random(0)
    talks = [Talk(0.0, (Turn(int(64 * 32 ** rng.random()), int(16 * 32 ** rng.random())),)) for _ in range(512)]
    outcome = simulate(Replica(cost("llama-3.1-8b"), 800_000, 512, 8192, 8192), talks)
    assert outcome.output_rate == pytest.approx(measured("8B, 512 requests at once"), rel=0.15)


def paced(count: int, rate: float, longest: int, least: int) -> Outcome:
    """The benchmark's own draws; like it, without the requests of the first quarter."""
    rng = random.Random(1)
    sizes = [(int(64 * (longest / 64) ** rng.random()), int(least * (512 / least) ** rng.random()))
             for _ in range(count)]
    at, talks = 0.0, []
    for prompt, new in sizes:
        at += rng.expovariate(rate)
        talks.append(Talk(at, (Turn(prompt, new),)))
    replica = Replica(cost("llama-3.1-8b"), 800_000, 512, 512, 512, overhead=0.0)
    return Simulation(replica, talks, since=talks[count // 4].at).run()


@pytest.mark.parametrize("load, drawn", [
    ("16 a second, prompts 64..2048", (192, 16.0, 2048, 16)), ("8 a second, prompts 64..8000", (96, 8.0, 8000, 64))])
def test_what_clients_of_paced_loads_see(load: str, drawn: tuple[int, float, int, int]):
    outcome = paced(*drawn)
    first, between = f"8B, {load}: TTFT p99", f"8B, {load}: ITL p99"
    assert 1e3 * outcome.first_token(0.5) == pytest.approx(note(first)[0], rel=0.25)
    assert 1e3 * outcome.first_token(0.9) == pytest.approx(note(first)[1], rel=0.15)
    assert 1e3 * outcome.first_token(0.99) == pytest.approx(measured(first), rel=0.20)
    assert 1e3 * outcome.between(0.5) == pytest.approx(note(between)[0], rel=0.15)
    assert 1e3 * outcome.between(0.9) == pytest.approx(note(between)[1], rel=0.30)
    assert 1e3 * outcome.between(0.99) < 1.1 * measured(between)  # graphs were still captured in what was measured
