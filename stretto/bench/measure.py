"""Measuring in turns: round by round each engine runs the same work, so that a noisy machine disturbs all alike.

    warm-up   A B C  |  round 1   A B C  |  round 2   B C A  |  round 3   C A B ...

Before each round an engine forgets earlier prompts, so that a prefix cache does not turn the work into less work.
A ratio is taken within a round and its median over the rounds, which is steadier than a ratio of medians.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from stretto.bench.engines import BenchEngine
from stretto.bench.workload import Workload

Answers = list[list[int]]


@dataclass
class Series:
    """One engine's figures, one value a round. Rates in tokens a second, times in seconds."""

    name: str
    dtype: str
    rates: list[float] = field(default_factory=list)  # latency: tokens after the first; throughput: generated tokens
    first_token: list[float] = field(default_factory=list)  # latency only, mean over the prompts
    seconds: list[float] = field(default_factory=list)  # of the whole round
    answers: Answers = field(default_factory=list)
    counters: dict[str, float] = field(default_factory=dict)
    peak_memory: int | None = None  # bytes, of a process of its own


@dataclass(frozen=True)
class Spread:
    """A median with the extremes around it."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    return Spread(median(values), min(values), max(values))


def ratio(ours: Series, theirs: Series, figure: str = "rates") -> Spread:
    """Ours over theirs, within each round."""
    pairs = zip(getattr(ours, figure), getattr(theirs, figure), strict=True)
    return spread([mine / other for mine, other in pairs])


def agreement(ours: Series, theirs: Series) -> float:
    """Share of answer tokens before the first difference, over all answers; 1.0 where they are equal."""
    same = total = 0
    for mine, other in zip(ours.answers, theirs.answers, strict=True):
        total += max(len(mine), len(other))
        pairs = enumerate(zip(mine, other, strict=False))
        same += next((i for i, (a, b) in pairs if a != b), min(len(mine), len(other)))
    return same / total if total else 1.0


def measure_latency(engines: Sequence[BenchEngine], work: Workload, rounds: int, warmup: int = 1) -> list[Series]:
    """One prompt at a time: seconds to the first token, then tokens a second."""
    return _in_turns(engines, work, rounds, warmup, _latency_round)


def measure_throughput(engines: Sequence[BenchEngine], work: Workload, rounds: int, warmup: int = 1) -> list[Series]:
    """All prompts at once: generated tokens a second."""
    return _in_turns(engines, work, rounds, warmup, _throughput_round)


def _in_turns(engines: Sequence[BenchEngine], work: Workload, rounds: int, warmup: int, run) -> list[Series]:
    series = [Series(engine.name, engine.dtype) for engine in engines]
    for _ in range(warmup):
        for engine in engines:
            run(engine, work, Series("warm-up", ""))
    before = [engine.counters() for engine in engines]
    for number in range(rounds):
        for turn in range(len(engines)):
            index = (number + turn) % len(engines)
            engines[index].forget()
            run(engines[index], work, series[index])
    for one, engine, start in zip(series, engines, before, strict=True):
        one.counters = {name: value - start.get(name, 0.0) for name, value in engine.counters().items()}
    return series


def _latency_round(engine: BenchEngine, work: Workload, into: Series) -> None:
    first, after, tokens, answers = [], 0.0, 0, []
    started = time.perf_counter()
    for prompt in work.prompts:
        clock = _TokenClock()
        answer = engine.stream(prompt, work.output_tokens, clock)
        _check(engine, [answer], work)
        first.append(clock.first - clock.started)
        after += clock.last - clock.first
        tokens += len(answer) - clock.first_count
        answers.append(answer)
    into.seconds.append(time.perf_counter() - started)
    into.first_token.append(sum(first) / len(first))
    into.rates.append(tokens / after if after > 0 else float("nan"))
    into.answers = answers


class _TokenClock:
    """Notes when the first and the last tokens of an answer came."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.first = self.last = self.started
        self.first_count = 0

    def __call__(self, count: int) -> None:
        self.last = time.perf_counter()
        if not self.first_count:
            self.first, self.first_count = self.last, count


def _throughput_round(engine: BenchEngine, work: Workload, into: Series) -> None:
    started = time.perf_counter()
    answers = engine.batch(work.prompts, work.output_tokens)
    seconds = time.perf_counter() - started
    _check(engine, answers, work)
    into.seconds.append(seconds)
    into.rates.append(sum(len(answer) for answer in answers) / seconds)
    into.answers = answers


def _check(engine: BenchEngine, answers: Answers, work: Workload) -> None:
    """A rate of answers that were cut short would be a wrong rate."""
    short = [len(answer) for answer in answers if len(answer) != work.output_tokens]
    if short:
        raise RuntimeError(f"{engine.name} answered with {short[0]} instead of {work.output_tokens} tokens")
