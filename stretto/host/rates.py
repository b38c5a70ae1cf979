"""What it costs to copy KV from host memory and what it costs to compute it, both measured while the engine runs.

    copying     seconds = start + bytes * slope       from the copies that were made
    computing   seconds = start + tokens * slope      from steps that mostly fed prompts; one start for each chunk

A `Line` is fitted by least squares; what was measured long ago counts less, so it follows a machine that changes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MEMORY = 64  # samples after which an old one counts 1/e
TRY_AGAIN = 16  # of so many refusals one is granted all the same: a rate that is not used is not measured


@dataclass(slots=True)
class Line:
    """y = start + x * slope, neither of them negative, by least squares with exponentially decaying weights."""

    n: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def add(self, x: float, y: float) -> None:
        keep = 1 - 1 / MEMORY
        self.n = self.n * keep + 1
        self.x = self.x * keep + x
        self.y = self.y * keep + y
        self.xx = self.xx * keep + x * x
        self.xy = self.xy * keep + x * y

    @property
    def known(self) -> bool:
        return self.n > 0

    def fit(self) -> tuple[float, float]:
        """(start, slope). Where all samples are of one size, or the fit is negative, the line through the origin."""
        spread = self.n * self.xx - self.x * self.x
        if spread > 1e-9 * self.n * self.xx:
            slope = (self.n * self.xy - self.x * self.y) / spread
            start = (self.y - slope * self.x) / self.n
            if slope >= 0 and start >= 0:
                return start, slope
            if slope < 0:  # larger ones took less: noise
                return self.y / self.n, 0.0
        return 0.0, self.xy / self.xx if self.xx else 0.0

    def at(self, x: float) -> float:
        start, slope = self.fit()
        return start + x * slope


@dataclass
class Rates:
    """Decides whether a prefix is copied back or computed again."""

    saving: Line = field(default_factory=Line)  # bytes -> seconds
    restoring: Line = field(default_factory=Line)  # bytes -> seconds
    computing: Line = field(default_factory=Line)  # tokens of a step -> seconds
    refused: int = 0

    def copy_seconds(self, n_bytes: int) -> float | None:
        """None before anything was copied. Until something was restored, saving tells how fast the way is."""
        line = self.restoring if self.restoring.known else self.saving
        return line.at(n_bytes) if line.known else None

    def compute_seconds(self, tokens: int, chunk: int) -> float | None:
        """In steps of `chunk` tokens; None before any prompt was fed."""
        if not self.computing.known:
            return None
        start, slope = self.computing.fit()
        return -(-tokens // chunk) * start + tokens * slope

    def copying_pays(self, n_bytes: int, tokens: int, chunk: int) -> bool:
        """Whether so many bytes come back sooner than so many tokens are computed. Unmeasured, they are copied."""
        copying, computing = self.copy_seconds(n_bytes), self.compute_seconds(tokens, chunk)
        if copying is None or computing is None or copying < computing:
            return True
        self.refused += 1
        return self.refused % TRY_AGAIN == 0

    def saving_pays(self, page_bytes: int, page_tokens: int) -> bool:
        """Whether a page among many could ever come back sooner than its tokens are computed."""
        line = self.restoring if self.restoring.known else self.saving
        if not (line.known and self.computing.known) or page_bytes * line.fit()[1] < page_tokens * self._slope():
            return True
        self.refused += 1
        return self.refused % TRY_AGAIN == 0

    def _slope(self) -> float:
        """Seconds a token of a long prompt, the starts of its steps included."""
        line = self.computing
        return line.y / line.x if line.x else 0.0

    def gauges(self) -> dict[str, float]:
        """Units a second; 0: not measured."""
        lines = {"host_save_bytes_per_second": self.saving, "host_restore_bytes_per_second": self.restoring,
                 "prefill_tokens_per_second": self.computing}
        return {name: line.x / line.y if line.y else 0.0 for name, line in lines.items()}
