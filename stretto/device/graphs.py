"""One CUDA graph for any ragged step of a bucket: prompt chunks, decoded tokens, verify windows, drafter included.

Every length is on the device, so a graph serves each split of its sizes into rows. Sizes are rounded up to a bucket;
what is left over is padding (rows of slot 0, which is never live; tokens that write to the null page).

    shape asked (5 rows, 9 tokens, 9 logits)  ->  bucket (8, 16, 16)  ->  captured once, replayed ever after

Shapes whose kernels are chosen by data-dependent sizes (prompt log-probabilities, logit processors, rare features) run
without a graph; the counters say how often.
"""

from __future__ import annotations

import gc
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from stretto.device.runner import Finish, Forward, Runner
from stretto.sample.features import SHORT, StepShape
from stretto.sample.processors import TokenMasks

MOST_LATER = 48  # graphs and pairs of them kept at a time besides those wanted from the start
CHUNK_ROWS = 64  # of a step with chunks, at least: the head reads its weights for as many in the same time as for one
CHUNK_TOKENS = 512  # most of such a step whose graph is captured at the start: longer ones hide what launching costs
OFTENER = 4  # a bucket that takes another one's place comes back so many times sooner
_FINE = [1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128]
_STEPS = _FINE + list(range(160, 513, 32)) + list(range(576, 1025, 64)) + list(range(1152, 2049, 128))


def bucket_of(size: int) -> int:
    """The smallest bucket that holds `size`: at most 1/8 of it is padding from 64 on."""
    if size > _STEPS[-1]:
        return -(-size // 256) * 256
    return _STEPS[bisect_left(_STEPS, size)]


def coarse_bucket_of(size: int) -> int:
    """For steps with chunks of prompts, whose rows, tokens and logits come in any combination: few buckets up to 128,
    where reading the weights is what takes time; above, padding costs what tokens cost."""
    return max(8, 1 << (size - 1).bit_length()) if size <= 128 else -(-size // 64) * 64


def tokens_bucket(rows: int, tokens: int, short: bool) -> int:
    """Packed tokens (or logits) that are computed for so many, in a step of so many rows."""
    bucket = bucket_of if short else coarse_bucket_of
    return max(bucket(rows), bucket(tokens))


def bucketed(shape: StepShape) -> StepShape:
    """The bucket of a shape. Tokens and logits are at least the rows, as one of each is the common case. Widths, which
    cost a few ids a row, are 1 or large: a graph for each of them would be captured in the middle of serving. For the
    same reason steps with chunks have as many rows as cost nothing beside their tokens, and are as if some row drew."""
    assert shape.tokens is not None and shape.logits is not None
    rows = bucket_of(shape.rows) if shape.short else coarse_bucket_of(shape.rows)
    tokens = tokens_bucket(rows, shape.tokens, shape.short)
    width = 1 if shape.width == 1 else max(SHORT, 1 << (shape.width - 1).bit_length())
    if not shape.short:
        rows = max(rows, min(tokens, CHUNK_ROWS))
    return replace(shape, rows=rows, width=width, tokens=tokens, logits=tokens_bucket(rows, shape.logits, shape.short),
                   sampled=shape.sampled or (width == 1 and not shape.short))


def _kernels_of(bucket: StepShape) -> set[object]:
    """What decides which kernels a bucket needs. Of plain steps its sizes (products, attention, drafters) and, whatever
    the sizes, its features (greedy or drawn; torch has some kernels of its own for one row): which kernels of either
    run does not depend on the other. Of other steps the bucket itself: sorts, for one, differ by size."""
    if not is_usual(bucket) or bucket.filtered or bucket.masked or bucket.processors or bucket.adapted:
        return {bucket}
    sizes = bucket.rows, bucket.tokens, bucket.logits, bucket.short, bucket.single, bucket.draft_width, bucket.fixed
    return {sizes, (replace(bucket, rows=0, tokens=0, logits=0), bucket.rows == 1)}


def is_usual(shape: StepShape) -> bool:
    """False for features that are rare and would multiply the graphs."""
    return not (shape.penalised or shape.biased or shape.restricted or shape.min_tokens or shape.scores_prompt
                or shape.pools or shape.alternatives >= 0)


@dataclass(frozen=True)
class Captured:
    graph: torch.cuda.CUDAGraph
    rows: torch.Tensor  # [R, 3] int32, read by the graph
    body: torch.Tensor  # written by it


@dataclass(frozen=True)
class CapturedHalves:
    """A pair of graphs, cut at the logits; the mask is copied to where the second one reads it."""

    first: torch.cuda.CUDAGraph
    second: torch.cuda.CUDAGraph
    rows: torch.Tensor  # [R, 3] int32
    masks: TokenMasks  # index [R, W], bits [L, words]
    forward: Forward  # from the first to the second
    body: torch.Tensor

    def start(self, rows: torch.Tensor) -> None:
        self.rows[: len(rows)] = rows
        self.rows[len(rows) :] = 0
        self.first.replay()

    def finish(self, masks: TokenMasks | None) -> torch.Tensor:
        self.masks.index.fill_(-1)
        if masks is not None:
            n, width = masks.index.shape
            self.masks.index[:n, :width] = masks.index
            self.masks.bits[: len(masks.bits)] = masks.bits
        self.second.replay()
        return self.body.clone()


class GraphExecutor:
    """`runner.Executor` on CUDA. Captures a bucket when it is asked for again; graphs share one memory pool."""

    def __init__(self, runner: Runner, largest_tokens: int):
        self.runner, self.largest_tokens = runner, largest_tokens
        self.graphs: dict[StepShape, Captured] = {}
        self.halves: dict[StepShape, CapturedHalves] = {}
        self._kept: dict[StepShape, dict[StepShape, Any]] = {}  # which of the two has it, the one used last at the end
        self.steps = 0
        self.seen: dict[StepShape, int] = {}  # the step when a bucket was asked for last
        self.loaded: set[object] = set()  # sizes and features whose kernels have run, see `_kernels_of`
        self.most = MOST_LATER
        self.pool = torch.cuda.graph_pool_handle()
        self.capture_everything = False  # also what is rare
        self.replays = self.eager_steps = 0
        self.capture_seconds = 0.0

    def __call__(self, rows: torch.Tensor, shape: StepShape) -> tuple[torch.Tensor, StepShape]:
        bucket = bucketed(shape)
        captured = self.graphs.get(bucket)
        if captured is None and self._comes_again(bucket) and self._worth_it(bucket):
            captured = self.capture(bucket)
        self._note(bucket)
        if captured is None:
            self.eager_steps += 1
            return self.runner.run(self._padded(rows, bucket.rows), bucket), bucket
        self.replays += 1
        self._use(bucket, self.graphs)
        captured.rows[: len(rows)] = rows
        captured.rows[len(rows) :] = 0
        captured.graph.replay()
        return captured.body.clone(), bucket  # the next replay writes the same memory

    def halve(self, rows: torch.Tensor, shape: StepShape) -> tuple[StepShape, Finish]:
        """`runner.Halver`."""
        bucket = bucketed(shape)
        captured = self.halves.get(bucket)
        if captured is None and self._comes_again(bucket) and self._worth_it(bucket):
            captured = self.capture_halves(bucket)
        self._note(bucket)
        if captured is None:
            self.eager_steps += 1
            bucket, finish = self.runner.halve_now(self._padded(rows, bucket.rows), bucket)
            return bucket, lambda masks: finish(None if masks is None else _padded_masks(masks, bucket.rows))
        self.replays += 1
        self._use(bucket, self.halves)
        captured.start(rows)
        return bucket, captured.finish

    def _use(self, bucket: StepShape, graphs: dict[StepShape, Any]) -> None:
        self._kept.pop(bucket, None)
        self._kept[bucket] = graphs

    def _make_room(self) -> None:
        """For one more: beyond `most` graphs and pairs, those that were used least recently go."""
        while len(self._kept) >= self.most:
            bucket = next(iter(self._kept))
            del self._kept.pop(bucket)[bucket]

    def _note(self, bucket: StepShape) -> None:
        self.steps += 1
        self.seen[bucket] = self.steps

    def _comes_again(self, bucket: StepShape) -> bool:
        """A capture takes as long as launching the step once more, and some memory. Where every place is taken, it also
        takes away a graph, which would be captured again at its own return if that came soon: of more buckets than
        places, each step would be a capture. So the bucket must have come back much sooner than that graph.

            the graph used longest ago   x . . . . . . . . . . . . . . . . . .
            a bucket to be captured                                  x . . . x   OFTENER times sooner
        """
        if bucket not in self.seen:
            return False
        if len(self._kept) < self.most:
            return True
        now, oldest = self.steps + 1, next(iter(self._kept))
        return OFTENER * (now - self.seen[bucket]) <= now - self.seen.get(oldest, 0)

    def _worth_it(self, bucket: StepShape) -> bool:
        assert bucket.tokens is not None
        capable = self.runner.backend.caps.graphs and getattr(self.runner.model, "graphs", False)
        capable = capable and self.runner.table.custom.graph_safe(bucket.processors)
        return capable and (self.capture_everything or is_usual(bucket)) and bucket.tokens <= self.largest_tokens

    @staticmethod
    def _padded(rows: torch.Tensor, n: int) -> torch.Tensor:
        out = torch.zeros(n, 3, dtype=rows.dtype, device=rows.device)
        out[: len(rows)] = rows
        return out

    def capture(self, bucket: StepShape) -> Captured:
        """Captures a step of padding rows, which change nothing; before it runs them, if the bucket's kernels may have
        never run."""
        started = time.perf_counter()
        rows = torch.zeros(bucket.rows, 3, dtype=torch.int32, device=self.runner.model.device)
        if self._is_new(bucket):
            self.runner.run(rows, bucket)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()  # torch.cuda.graph would also empty the allocator's cache, each time
        self._make_room()
        with self._capturing(graph):
            body = self.runner.run(rows, bucket)
        self.graphs[bucket] = captured = Captured(graph, rows, body)
        self._use(bucket, self.graphs)
        self.capture_seconds += time.perf_counter() - started
        return captured

    def capture_halves(self, bucket: StepShape) -> CapturedHalves:
        started, runner, device = time.perf_counter(), self.runner, self.runner.model.device
        rows = torch.zeros(bucket.rows, 3, dtype=torch.int32, device=device)
        words = -(-runner.model.vocab_size // 32)
        masks = TokenMasks(torch.full((bucket.rows, bucket.width), -1, dtype=torch.int32, device=device),
                           torch.full((bucket.logits or 1, words), -1, dtype=torch.int32, device=device))
        if self._is_new(bucket):
            runner.second(runner.first(rows, bucket), rows, bucket, masks)
        torch.cuda.synchronize()
        self._make_room()
        first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with self._capturing(first):
            forward = runner.first(rows, bucket)
        with self._capturing(second):
            body = runner.second(forward, rows, bucket, masks)
        self.halves[bucket] = captured = CapturedHalves(first, second, rows, masks, forward, body)
        self._use(bucket, self.halves)
        self.capture_seconds += time.perf_counter() - started
        return captured

    def _is_new(self, bucket: StepShape) -> bool:
        """Whether some kernel of this bucket may never have run: kernels are compiled and loaded before a capture."""
        needed, known = _kernels_of(bucket), self.loaded
        if bucket not in self.seen and not needed <= known:
            known |= needed
            return True
        known |= needed
        return False

    @contextmanager
    def _capturing(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """Captures what is launched inside. Python's collector stands still meanwhile: the end of an old graph or of
        pinned memory on this thread would end the capture."""
        collecting = gc.isenabled()
        gc.disable()
        try:
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                yield
            finally:
                graph.capture_end()
        finally:
            if collecting:
                gc.enable()

    def warm_up(self, shapes: Iterable[StepShape], progress: Callable[[int, int], None] | None = None) -> None:
        """Captures the given shapes before the first request, with progress."""
        wanted = [s for s in dict.fromkeys(bucketed(s) for s in shapes) if self._worth_it(s)]
        self.most = len(wanted) + MOST_LATER
        for done, bucket in enumerate(sorted(wanted, key=lambda s: -(s.tokens or 0)), 1):
            if bucket not in self.graphs:
                self.capture(bucket)
            if progress:
                progress(done, len(wanted))
        torch.cuda.empty_cache()  # what the steps before the captures left

    def clear(self) -> None:
        """Lets the graphs go: NCCL does not end before all that hold one of its launches have."""
        self.graphs.clear()
        self.halves.clear()
        self._kept.clear()


def _padded_masks(masks: TokenMasks, rows: int) -> TokenMasks:
    """With a row of the index for each row of the bucket: padding has no mask."""
    index = torch.full((rows, masks.index.shape[1]), -1, dtype=torch.int32, device=masks.index.device)
    index[: len(masks.index)] = masks.index
    return TokenMasks(index, masks.bits)


def usual_shapes(max_rows: int, width: int, draft_width: int) -> list[StepShape]:
    """Decode and verify steps of every number of rows, greedy and sampled."""
    sizes = [s for s in _STEPS if s < max_rows] + [max_rows]
    return [StepShape(rows=r, tokens=r * w, logits=r * w, width=w, draft_width=draft_width, short=w <= SHORT,
                      single=w == 1, sampled=sampled)
            for r in sizes for w in sorted({1, width}) for sampled in (False, True)]


def chunk_shapes(budget: int, draft_width: int) -> list[StepShape]:
    """Steps with chunks of prompts, of up to `budget` tokens, beside up to 64 rows that decode."""
    sizes = [2 * SHORT, 4 * SHORT, *range(64, coarse_bucket_of(min(budget, CHUNK_TOKENS)) + 1, 64)]
    return [StepShape(rows=1, tokens=tokens, logits=1, width=1, draft_width=draft_width) for tokens in sizes]
