"""When what happened in one call: the source of latency histograms, of the call's line in the log, of its spans.

    arrival      | queue        | prefill      | decode ....................... |
                 arrival        admitted       first token          last token, end
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from stretto.protocol import Output, Request, Usage
from stretto.serve.metric_names import INTER_TOKEN_LATENCY, QUEUE_TIME, REQUEST_LATENCY, TIME_TO_FIRST_TOKEN
from stretto.serve.metrics import ServerMetrics

log = logging.getLogger(__name__)
Choice = tuple[int, int]  # (prompt, index)


class CallClock:
    """Fed with one call's outputs as its client sees them. Times of time.monotonic, in seconds."""

    def __init__(self, metrics: ServerMetrics, id: str, requests: Sequence[Request]):
        self._metrics, self._id = metrics, id
        self._between = metrics.histograms[INTER_TOKEN_LATENCY]
        self.arrival = requests[0].arrival
        self.first: dict[Choice, float] = {}  # of tokens; a prompt-only request has none
        self.last: dict[Choice, float] = {}
        self.usages: dict[Choice, Usage] = {}
        self.reasons: list[str] = []
        self.ended = 0.0
        self._choices = self._unfinished = sum(request.sampling.n for request in requests)
        self._prompt = sum(len(request.tokens) for request in requests)

    def note(self, prompt: int, output: Output) -> None:
        key, tokens = (prompt, output.index), len(output.token_ids)
        if tokens:
            now, before = time.monotonic(), self.last.get(key)
            if before is None:
                self._note_first(key, now, output.usage)
            else:
                self._between.observe((now - before) / tokens, tokens)
            self.last[key] = now
        if output.usage is not None:
            self.usages[key] = output.usage
        if output.finish_reason is not None:
            self._metrics.finished[output.finish_reason] += 1
            self.reasons.append(output.finish_reason)
            self._unfinished -= 1

    def _note_first(self, key: Choice, now: float, usage: Usage | None) -> None:
        self.first[key] = now
        self._metrics.histograms[TIME_TO_FIRST_TOKEN].observe(now - self.arrival)
        if usage is not None and key[1] == 0:  # the other choices wait for the first one
            self._metrics.histograms[QUEUE_TIME].observe(usage.queue_seconds)

    @property
    def finished(self) -> bool:
        """Every choice has."""
        return self._unfinished == 0

    def end(self, withdrawn: bool) -> None:
        """`withdrawn`: by its client, an operator or the time limit; choices that were still running end with it."""
        if withdrawn:
            self._metrics.finished["abort"] += self._unfinished
        self.ended = time.monotonic()
        seconds = self.ended - self.arrival
        if self.finished:
            self._metrics.histograms[REQUEST_LATENCY].observe(seconds)
        reasons = sorted(set(self.reasons))
        log.info("%s: %d prompt tokens, %d of %d choices finished (%s), %.3f s", self._id, self._prompt,
                 len(self.reasons), self._choices, ", ".join(reasons) or "none", seconds,
                 extra={"id": self._id, "prompt_tokens": self._prompt, "choices": self._choices, "seconds": seconds,
                        "finished": len(self.reasons), "finish_reasons": reasons})
