"""Which sizes of steps a device is prepared for: it captures a graph for each, which takes as long as some steps, and
some memory. No torch here."""

from __future__ import annotations

import numpy as np

from stretto.host.cost import CostModel, StepWork

FIRST = 512  # tokens of the largest step with drafts that is prepared at the start; larger ones seldom pay
PREPARING = 0.01  # seconds: a part of what the device takes for a new size, which is then used again and again


def is_first(rows: int, tokens: int) -> bool:
    """Whether steps of such a size are prepared at the start, of those in which all rows have no draft or all they may
    have."""
    return tokens <= max(rows, FIRST)


class Sizes:
    """A size that is new is used only once new ones have promised to save a part of what that costs:

        promised     ...:::|||   prepare the best     ...:::|||   prepare ...        until nothing is left to gain

    Steps with prompt chunks are of any size whatever is chosen, and run without a graph until one comes again."""

    def __init__(self, cost: CostModel, width: int, preparing: float):
        """It is prepared from the start for what `is_first` says, and for steps that both verified and proposed when
        step times were measured."""
        self._cost, self._width, self._preparing = cost, width, preparing
        self._prepared: dict[int, np.ndarray] = {}  # by the size without drafts: bool, by size
        self._promised: dict[int, float] = {}  # seconds

    def _of(self, work: StepWork) -> tuple[int, np.ndarray]:
        base = int(self._cost.computed(work, work.rows))
        found = self._prepared.get(base)
        if found is None:
            found = self._prepared[base] = np.zeros(self._cost.most + 1, dtype=bool)
            first = [n for n in (base, base * (1 + self._width)) if is_first(base, n)]
            first += [w.tokens for w in self._cost.verifying if int(self._cost.computed(w, w.rows)) == base]
            found[self._cost.computed(work, np.asarray(first))] = True
        return base, found

    def ran(self, work: StepWork) -> None:
        """A step is launched, so that the device is prepared for its size from now on."""
        if not work.pairs:
            self._of(work)[1][self._cost.computed(work, work.tokens)] = True

    def prepared(self, work: StepWork, tokens: np.ndarray) -> np.ndarray:
        """Whether it is for variants of a step, bool [N]; where nothing has to be prepared, for all."""
        if not self._preparing:
            return np.ones(len(tokens), dtype=bool)
        return self._of(work)[1][self._cost.computed(work, tokens)]

    def best(self, work: StepWork, tokens: np.ndarray, value: np.ndarray) -> int:
        """The best of some variants of a step, by `value` in seconds; the first has no drafts. tokens, value [N]."""
        best = int(value.argmax())
        if not self._preparing or work.pairs:
            return best
        (base, prepared), sizes = self._of(work), self._cost.computed(work, tokens)
        if prepared[sizes[best]]:
            return best
        familiar = np.where(prepared[sizes], value, -np.inf)
        familiar[0] = value[0]
        other = int(familiar.argmax())
        promised = self._promised.get(base, 0.0) + float(value[best] - value[other])
        pays = promised >= self._preparing
        self._promised[base] = 0.0 if pays else promised
        return best if pays else other
