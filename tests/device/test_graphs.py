"""Buckets of captured steps, and what a capture must be kept from. Captures themselves are tested in tests/gpu."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from stretto.device.graphs import MOST_LATER, GraphExecutor, bucketed, chunk_shapes, tokens_bucket, usual_shapes
from stretto.device.runner import Finish
from stretto.sample.features import SHORT, StepShape
from stretto.sample.processors import TokenMasks


@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 64, 65, 257, 512])
@pytest.mark.parametrize("tokens", [1, 64, 130, 513, 1111, 2112, 4000])
def test_a_bucket_holds_its_shape_with_little_padding(rows: int, tokens: int, short: bool) -> None:
    tokens = max(rows, tokens)
    shape = StepShape(rows=rows, tokens=tokens, logits=rows, width=1, draft_width=0, short=short)
    bucket = bucketed(shape)
    assert bucket.rows >= rows and bucket.tokens >= tokens and bucket.logits >= rows
    assert bucketed(bucket) == bucket
    if tokens > 128 and bucket.rows < tokens:
        assert bucket.tokens <= max(tokens * 9 / 8, tokens + 63)
    if rows >= 64 and short:
        assert bucket.rows <= rows * 5 / 4


def test_steps_of_chunks_have_few_buckets_where_weights_take_the_time() -> None:
    shapes = [StepShape(rows=r, tokens=t, logits=r, width=1, draft_width=0) for r in range(1, 65)
              for t in range(r, 513)]
    assert len({bucketed(s) for s in shapes}) < 50


def test_steps_of_chunks_beside_up_to_64_rows_are_captured_at_the_start() -> None:
    """However many rows and tokens they have, greedy or drawn: in 10 graphs."""
    shapes = [StepShape(rows=r, tokens=t, logits=r, width=1, draft_width=4, sampled=sampled) for r in range(1, 65)
              for t in range(r + SHORT, 513) for sampled in (False, True)]
    captured = {bucketed(shape) for shape in chunk_shapes(8192, 4)}
    assert {bucketed(shape) for shape in shapes} == captured and len(captured) == 10
    assert {b.tokens for b in captured} > {bucketed(shape).tokens for shape in chunk_shapes(300, 4)} >= {64, 320}


@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("rows, tokens", [(1, 8), (64, 200), (70, 71), (256, 900), (3, 2500)])
def test_a_number_of_drafts_that_changes_from_step_to_step_shares_graphs(rows: int, tokens: int, short: bool) -> None:
    """What the cost model of steps is told is what a step becomes."""
    shapes = [StepShape(rows, tokens, tokens, width, 0, short=short) for width in range(2, 1 + SHORT)]
    buckets = {bucketed(shape) for shape in shapes}
    assert len(buckets) == 1 and buckets.pop().tokens == tokens_bucket(rows, tokens, short)
    assert bucketed(replace(shapes[0], width=1)).width == 1


def test_usual_shapes_are_buckets_of_their_own() -> None:
    shapes = usual_shapes(256, 5, 4)
    assert len({bucketed(s) for s in shapes}) > 0.6 * len(shapes)
    assert {s.short for s in shapes} == {True} and SHORT >= 5
    assert {s.short for s in usual_shapes(4, 1 + SHORT, SHORT) if s.width > 1} == {False}
    assert bucketed(replace(shapes[0], short=False)) != bucketed(shapes[0])


class FakeGraph:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def capture_begin(self, **_) -> None:
        self.calls.append("begin")

    def capture_end(self) -> None:
        assert not gc.isenabled()
        self.calls.append("end")


@pytest.mark.parametrize("fails", [False, True])
def test_the_collector_stands_still_during_a_capture(fails: bool) -> None:
    executor, graph = GraphExecutor.__new__(GraphExecutor), FakeGraph()
    executor.pool = None
    assert gc.isenabled()
    try:
        with executor._capturing(graph):
            assert not gc.isenabled()
            if fails:
                raise RuntimeError("of a kernel")
    except RuntimeError:
        assert fails
    assert gc.isenabled() and graph.calls == ["begin", "end"]


class CountingRunner:
    """Of a `GraphExecutor`: which buckets were run outside a capture."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model = SimpleNamespace(device=torch.device("cpu"), vocab_size=64, graphs=True)
        self.backend = SimpleNamespace(caps=SimpleNamespace(graphs=True))
        self.table = SimpleNamespace(custom=SimpleNamespace(graph_safe=lambda processors: True))
        self.ran, self.capturing = [], False
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    def run(self, rows: torch.Tensor, bucket: StepShape) -> torch.Tensor:
        if not self.capturing:
            self.ran.append((bucket.rows, bucket.sampled))
        return torch.zeros(1)

    def halve_now(self, rows: torch.Tensor, bucket: StepShape) -> tuple[StepShape, Finish]:
        return bucket, lambda masks: torch.zeros(1)

    def first(self, rows: torch.Tensor, bucket: StepShape) -> None:
        self.run(rows, bucket)

    def second(self, forward: None, rows: torch.Tensor, bucket: StepShape, masks: TokenMasks) -> torch.Tensor:
        return torch.zeros(1)


class CountingExecutor(GraphExecutor):
    @contextmanager
    def _capturing(self, graph) -> Iterator[None]:
        self.runner.capturing = True
        yield
        self.runner.capturing = False


def executor_of(monkeypatch: pytest.MonkeyPatch) -> CountingExecutor:
    return CountingExecutor(CountingRunner(monkeypatch), 4096)  # type: ignore[arg-type]


def test_each_kernel_runs_once_before_it_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes once and features once, not every pair of them."""
    executor = executor_of(monkeypatch)
    for bucket in sorted((bucketed(s) for s in usual_shapes(64, 1, 0)), key=lambda s: -s.tokens):
        executor.capture(bucket)
    ran = executor.runner.ran
    assert len({rows for rows, _ in ran}) == len({s.rows for s in executor.graphs})
    assert {(64, False), (64, True), (1, False), (1, True)} <= set(ran)
    assert len(ran) == len(executor.graphs) // 2 + 2


def test_the_graph_that_was_used_least_recently_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = executor_of(monkeypatch)
    executor.most = 3
    buckets = [bucketed(s) for s in usual_shapes(8, 1, 0) if not s.sampled]
    for bucket in buckets[:3]:
        executor.capture(bucket)
    executor._use(buckets[0], executor.graphs)  # as a replay does
    executor.capture(buckets[3])
    assert set(executor.graphs) == {buckets[2], buckets[0], buckets[3]}


def test_graphs_and_pairs_have_one_bound_together(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = executor_of(monkeypatch)
    executor.most = 3
    plain = [bucketed(s) for s in usual_shapes(8, 1, 0) if not s.sampled]
    masked = [replace(bucket, masked=True) for bucket in plain]
    for n in range(4):
        executor.capture(plain[n])
        executor.capture_halves(masked[n])
        assert len(executor.graphs) + len(executor.halves) <= 3
    assert set(executor.graphs) == {plain[3]} and set(executor.halves) == {masked[2], masked[3]}
    executor.halve(torch.zeros(1, 3, dtype=torch.int32), masked[2])  # replayed, so it stays longest
    for n in range(2):
        executor.capture(plain[n])
    assert set(executor.halves) == {masked[2]}
    executor.clear()
    assert not executor.graphs and not executor.halves
    executor.capture(plain[0])


def replays(executor: CountingExecutor, shapes: list[StepShape]) -> tuple[int, int]:
    """(steps that were replayed, captures) of these steps."""
    captures, before = [], executor.replays
    capture, halves = executor.capture, executor.capture_halves
    executor.capture = lambda bucket: (captures.append(bucket), capture(bucket))[1]  # type: ignore[method-assign]
    executor.capture_halves = lambda bucket: (captures.append(bucket), halves(bucket))[1]  # type: ignore
    for shape in shapes:
        step = executor.halve if shape.masked else executor
        step(torch.zeros(shape.rows, 3, dtype=torch.int32), shape)
    executor.capture, executor.capture_halves = capture, halves  # type: ignore[method-assign]
    return executor.replays - before, len(captures)


def shapes_of(n: int, masked: int = 0) -> list[StepShape]:
    """So many buckets; every `masked`-th of them of a step with grammars."""
    shapes = [StepShape(rows=1, tokens=64 * i, logits=1, width=1, draft_width=0, short=False,
                        masked=masked > 0 and i % masked == 0) for i in range(3, 3 + n)]
    assert len({bucketed(shape) for shape in shapes}) == n
    return shapes


@pytest.mark.parametrize("masked", [0, 2])
def test_more_buckets_than_places_do_not_chase_each_other(masked: int, monkeypatch: pytest.MonkeyPatch) -> None:
    executor, shapes = executor_of(monkeypatch), shapes_of(60, masked)
    replays(executor, shapes * 2)
    assert len(executor.graphs) + len(executor.halves) == executor.most == MOST_LATER
    replayed, captures = replays(executor, shapes * 10)
    assert captures == 0 and replayed == 10 * MOST_LATER
    executor.largest_tokens = 1 << 20
    chosen = random.Random(1).choices(shapes_of(200), k=2000)
    assert replays(executor, chosen)[1] < 400


def test_a_new_load_takes_the_places_of_the_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of graphs that were captured before the first request, and never used."""
    executor, shapes = executor_of(monkeypatch), shapes_of(MOST_LATER + 8)
    old, new = shapes[:MOST_LATER], shapes[MOST_LATER:]
    executor.warm_up(old)
    executor.most = len(old)
    assert replays(executor, old * 4) == (4 * len(old), 0)
    replays(executor, new * 16)
    assert replays(executor, new * 4) == (4 * len(new), 0)


@pytest.mark.parametrize("feature", [{"filtered": True}, {"masked": True}, {"penalised": True}, {"adapted": True}])
def test_steps_of_rare_features_run_before_each_capture(feature: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = executor_of(monkeypatch)
    for rows in (1, 2, 4):
        executor.capture(bucketed(replace(usual_shapes(4, 1, 0)[0], rows=rows, tokens=rows, logits=rows, **feature)))
    assert [rows for rows, _ in executor.runner.ran] == [1, 2, 4]
