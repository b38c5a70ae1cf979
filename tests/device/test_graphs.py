"""Buckets of captured steps, and what a capture must be kept from. Captures themselves are tested in tests/gpu."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest

from stretto.device.graphs import GraphExecutor, bucketed, usual_shapes
from stretto.sample.features import SHORT, StepShape


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
