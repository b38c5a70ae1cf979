"""What a step costs: seconds as a function of what it holds, fitted to measured steps and kept fresh by new ones.

    T = fixed + curve(tokens) + rows + context + pairs + proposing

The curve is piecewise linear and never falls: flat while the weights are read anyway, rising once the step computes.
A device that pads steps to buckets pays for the bucket, which makes a staircase of it:

    seconds |              ____/
            |        _____|
            |_______|
            +-----------------> tokens

No coefficient is negative, so the model stays plausible where nothing was measured. No torch in this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

LEAST_RATIO, MOST_RATIO = 0.5, 2.0  # of a measured step to its prediction, as far as one step is believed
STRANGE, STRANGE_RUNS = 1.5, 3  # ratio from which a step was held up, by a graph that was captured meanwhile or by
# something else, unless so many of its size follow each other
RUSTY = 12  # steps after which a size that runs again tells something new
FASTER, FASTER_RATE = 0.95, 0.6  # ratio below which such a size is believed at once: nothing makes a step shorter
SCALE_RATE, CURVE_RATE = 0.02, 0.05  # shares by which one step moves the corrections
REFRESH = 16  # steps after which corrections come into force
SLOW_RUNS = 2  # first runs of a size, while the device prepares it: they tell nothing
MEASURED = 20  # runs that a size counts as having had which was measured at the start
MEASURED_SHARED = 1  # on a device that others may use as well
PROPOSING_RATE = 0.1  # share by which a step that proposes moves what that is believed to cost; the first ones more
PLAIN_RUNS = 8  # of a size without proposals, after which one with proposals tells what these cost
RECENT = 32  # steps after the last one without proposals for which that holds: later, the machine may have changed
LONG_AGO = -(1 << 30)
TABLES = 1024  # of sizes, kept for numbers of rows


class StepWork(NamedTuple):
    """What a step holds, as far as its cost depends on it."""

    rows: int
    tokens: int  # packed, of prompt chunks and decode rows
    context: int  # KV cells that its rows read, in all
    pairs: int = 0  # of prompt chunks: tokens times the context each of them attends to
    draft_width: int = 0  # proposed at its end for every row


def _features(work: StepWork, tokens: int, knots: np.ndarray) -> np.ndarray:
    """Fixed part, shares of the curve's segments, then the linear terms."""
    width = work.draft_width
    linear = (work.rows, work.context, work.pairs, float(width > 0), width, work.rows * width)
    return np.concatenate([[1.0], _segments(tokens, knots), linear])


def _proposing(terms: Sequence[float], work: StepWork) -> float:
    """Seconds of the proposals at a step's end: once, of each pass, of each draft."""
    once, each_pass, each_draft = terms
    width = work.draft_width
    return once + width * (each_pass + work.rows * each_draft) if width else 0.0


def _segments(tokens: int, knots: np.ndarray) -> np.ndarray:
    """How far into each segment so many tokens reach, 0..1; beyond the last knot the last segment goes on."""
    lengths = np.diff(knots)
    reach = (tokens - knots[:-1]) / lengths
    return np.concatenate([np.clip(reach[:-1], 0, 1), np.maximum(reach[-1:], 0)])


def non_negative_least_squares(a: np.ndarray, b: np.ndarray, rounds: int = 2000) -> np.ndarray:
    """x >= 0 that makes |a x - b| least; a [N, F], b [N]. Sequential coordinate-wise descent (Franc, Hlavac and
    Navara, CAIP 2005): each coordinate in turn goes to its own optimum, until none moves."""
    gram, gradient = a.T @ a, -(a.T @ b)
    x = np.zeros(a.shape[1])
    for _ in range(rounds):
        moved = 0.0
        for j, curvature in enumerate(np.diag(gram)):
            if curvature > 0:
                step = max(0.0, x[j] - gradient[j] / curvature) - x[j]
                if step:
                    x[j] += step
                    gradient += step * gram[:, j]
                    moved = max(moved, abs(step) * curvature**0.5)
        if moved < 1e-7:
            break
    return x


def _exact_sizes(most: int) -> list[int]:
    """Numbers of tokens between which steps hardly differ: 1, 2, 3, 4, 6, 8, 12, 16, 24, 32 ..."""
    sizes = sorted({1, 2, *(n << k for n in (2, 3) for k in range(most.bit_length()))})
    return [n for n in sizes if n <= most]


Padding = Callable[[int, int, bool], int]
"""(rows, tokens, whether no row holds more than a verify window) -> tokens that the device computes for so many."""


class CostModel:
    """Seconds of a step. `padded`: None where sizes are exact. `most`: tokens of the largest step."""

    def __init__(self, samples: Sequence[tuple[StepWork, float]], most: int, padded: Padding | None = None):
        """Raises ValueError without samples of at least two token counts."""
        self.most, self._padded = most, padded
        self._tables: dict[tuple[int, bool], np.ndarray] = {}  # by rows: the computed tokens of every count
        counts = sorted({int(self.computed(work, work.tokens)) for work, _ in samples})
        if len(counts) < 2:
            raise ValueError(f"steps of {counts} tokens were measured: a curve needs two different counts")
        self._knots = np.asarray(counts, dtype=float)
        self.samples = len(samples)
        self.verifying = [work for work, _ in samples if work.draft_width and work.tokens > work.rows]  # and proposing
        self._coefficients = self._fit(samples)
        self._terms: list[float] = self._coefficients[len(counts) :].tolist()
        self._scale = 1.0
        sizes = _exact_sizes(most) if padded is None else self._sizes(padded, 1, True).tolist()
        self._grid = np.unique([*counts, *sizes])  # where steps are observed: the device's own sizes, if it has some
        self._corrections = np.ones((2, len(self._grid)))  # of steps without and with prompt chunks
        self._plain = np.zeros_like(self._corrections, dtype=np.int64)  # runs of each size that proposed nothing
        # by bits of the rows and width: steps, seconds beyond the fitted ones, as `_scale` was 1
        self._proposing: dict[tuple[int, int], tuple[int, float]] = {}
        self._plain_ran = LONG_AGO  # how much had been observed when a step without proposals ran last
        self._slow, measured = (0, MEASURED_SHARED) if padded is None else (SLOW_RUNS, MEASURED)
        self._seen = np.where(np.isin(self._grid, counts), measured, 0) * np.ones((2, 1), dtype=np.int64)
        self._last = np.full_like(self._seen, LONG_AGO)  # how much had been observed when a size ran last
        self._strange = np.zeros_like(self._seen)  # steps of a size that were held up, since one was not
        self._observed = self._runs = 0  # steps; of them, those without prompt chunks that said something
        self._curve = self._tabulate()  # by computed tokens
        self._corrected = np.ones((2, most + 1))  # the corrections, likewise

    def _fit(self, samples: Sequence[tuple[StepWork, float]]) -> np.ndarray:
        """Relative errors count alike for short and long steps."""
        seconds = np.asarray([s for _, s in samples])
        rows = np.stack([_features(work, int(self.computed(work, work.tokens)), self._knots) for work, _ in samples])
        size = np.maximum(rows.max(0), 1e-12)
        return non_negative_least_squares(rows / size / seconds[:, None], np.ones(len(samples))) / size

    def computed(self, work: StepWork, tokens: int | np.ndarray) -> np.ndarray:
        """How many tokens the device computes for a step like this that holds so many; scalar or [N], to `most`."""
        at = np.minimum(np.maximum(tokens, 0), self.most)
        if self._padded is None:
            return at
        key = work.rows, work.pairs == 0
        sizes = self._tables.get(key)
        if sizes is None:
            if len(self._tables) >= TABLES:
                self._tables.clear()
            sizes = self._tables[key] = self._sizes(self._padded, *key)
        return sizes[np.searchsorted(sizes, at)]

    def _sizes(self, padded: Padding, rows: int, short: bool) -> np.ndarray:
        """Every number of tokens that is computed in steps of so many rows; there are few."""
        sizes, n = [], 0
        while n <= self.most:
            sizes.append(padded(rows, n, short))
            n = sizes[-1] + 1
        return np.minimum(sizes, self.most)

    def _tabulate(self) -> np.ndarray:
        """The fixed part and the curve for every number of computed tokens, [most + 1]."""
        n = len(self._knots) - 1
        heights = self._coefficients[0] + np.concatenate([[0.0], np.cumsum(self._coefficients[1 : 1 + n])])
        slope = self._coefficients[n] / (self._knots[-1] - self._knots[-2])
        counts = np.arange(self.most + 1)
        return np.interp(counts, self._knots, heights) + slope * np.maximum(counts - self._knots[-1], 0)

    def seconds(self, work: StepWork) -> float:
        return float(self.curve(work, work.tokens))

    def curve(self, work: StepWork, tokens: int | np.ndarray) -> np.ndarray:
        """Seconds of `work` if it held so many tokens instead; scalar or tokens [N] -> [N]."""
        at = self.computed(work, tokens)
        step = self._scale * self._corrected[int(work.pairs > 0), at] * (self._curve[at] + self._linear(work))
        return step + self.proposing(work.rows, work.draft_width)

    def _linear(self, work: StepWork) -> float:
        rows, context, pairs, *_ = self._terms
        return rows * work.rows + context * work.context + pairs * work.pairs

    def proposing(self, rows: int, width: int) -> float:
        """Seconds that proposing so many drafts for so many rows adds to a step."""
        if not width:
            return 0.0
        beyond = self._proposing.get((rows.bit_length(), width), (0, 0.0))[1]
        return self._scale * max(0.0, self._fitted_proposing(rows, width) + beyond)

    def _fitted_proposing(self, rows: int, width: int) -> float:
        return _proposing(self._terms[3:], StepWork(rows, rows, 0, draft_width=width))

    def attending(self, pairs: np.ndarray) -> np.ndarray:
        """Seconds that so many pairs of prompt token and context cell add; [N] -> [N]."""
        return self._scale * self._terms[2] * pairs

    def place(self, work: StepWork, tokens: int | np.ndarray) -> np.ndarray:
        """Steps of which numbers of tokens are told apart: the number of such a size, from 0; scalar or [N]. Those
        between two sizes count as the larger one: one token more may be what takes longer."""
        return np.minimum(np.searchsorted(self._grid, self.computed(work, tokens)), len(self._grid) - 1)

    def age(self, places: np.ndarray) -> np.ndarray:
        """Steps that ran since one without prompt chunks was of each of these sizes; [N] -> [N]."""
        return self._observed - self._last[0, places]

    def observe(self, work: StepWork, seconds: float) -> float:
        """A step took so long. Returns what was predicted. One outlier moves nothing far: ratios are clipped, and steps
        that were held up tell nothing. Kernels change with the size of a step, so a size that was not measured may take
        much longer than its neighbours."""
        predicted = self.seconds(work)
        if seconds <= 0 or predicted <= 0:
            return predicted
        ratio = min(max(seconds / predicted, LEAST_RATIO), MOST_RATIO)
        kind, at = int(work.pairs > 0), int(self.place(work, work.tokens))
        self._observed += 1
        rusty, self._last[kind, at] = self._observed - self._last[kind, at] > RUSTY, self._observed
        self._strange[kind, at] = self._strange[kind, at] + 1 if ratio > STRANGE else 0
        if 0 < self._strange[kind, at] < STRANGE_RUNS:
            return predicted
        if work.draft_width and self._plain[kind, at] >= PLAIN_RUNS:
            if self._observed - self._plain_ran <= RECENT:
                self._observe_proposing(work, seconds)
            else:  # nobody knows what the step would have taken without: it is all of it that takes longer, or less
                self._scale *= ratio**CURVE_RATE
            return predicted
        if not work.draft_width:
            self._plain[kind, at] += 1
            self._plain_ran = self._observed
        self._seen[kind, at] += 1
        runs = int(self._seen[kind, at]) - self._slow
        if runs <= 0:
            return predicted
        self._runs += kind == 0
        self._scale *= ratio ** (SCALE_RATE if kind else max(SCALE_RATE, 1 / (16 + self._runs)))
        found = rusty and ratio < FASTER
        self._corrections[kind, at] *= ratio ** max(CURVE_RATE, 1 / max(2, runs), FASTER_RATE * found)
        if self._observed % REFRESH == 0 or runs < REFRESH or found:
            self._correct()
        return predicted

    def _observe_proposing(self, work: StepWork, seconds: float) -> None:
        """What a step that proposes takes beyond one of its size that does not."""
        plain, key = self.seconds(work._replace(draft_width=0)), (work.rows.bit_length(), work.draft_width)
        fitted, (runs, before) = self._fitted_proposing(work.rows, work.draft_width), self._proposing.get(key, (0, 0.0))
        found = min(max(seconds - plain, -plain), plain) / self._scale - fitted
        after = before + max(PROPOSING_RATE, 1 / (2 + runs)) * (found - before)
        self._proposing[key] = runs + 1, max(-fitted, after)

    def _correct(self) -> None:
        """Sizes that never ran lie between those that did."""
        counts, known = np.arange(self.most + 1), self._seen > self._slow
        self._corrected = np.stack([np.interp(counts, self._grid[known[kind]], self._corrections[kind, known[kind]])
                                    for kind in range(2)])

    def describe(self) -> list[dict[str, float]]:
        """The curve at its knots, for people."""
        at = self._knots.astype(int)
        seconds = self._scale * self._corrected[0, at] * self._curve[at]
        return [{"tokens": int(n), "milliseconds": round(1e3 * float(s), 3)} for n, s in zip(at, seconds)]


class StepClock:
    """How long each step kept the others waiting: from its launch, or from the end of the one before it.

        launch N |---- N ----| launch N+1 ... |- N+1 -|      N+1 was launched early: it counts from the end of N
    """

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._launched: dict[int, float] = {}
        self._last = 0.0

    def launched(self, seq: int) -> None:
        self._launched[seq] = self._clock()

    def ended(self, seq: int) -> float:
        """Seconds. Steps end in order."""
        now = self._clock()
        began = max(self._launched.pop(seq, now), self._last)
        self._last = now
        return now - began
