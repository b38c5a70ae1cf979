"""How many replicas a load needs, from what each of them tells: no cluster's own, so that any autoscaler can ask."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

TARGET = 0.7  # share of a replica that the load may take: what is left bears the time until another one has started


class Load(NamedTuple):
    """One replica's. `kv_usage`: share of the KV pages that cannot be given to others, 0 to 1."""

    running: float
    waiting: float
    seats: float  # sequences that can run at once
    kv_usage: float

    @property
    def demand(self) -> float:
        """Of one replica's capacity; above 1 where requests wait. Whichever is scarcer counts, places or pages, and who
        waits needs as much of it as who runs.

            demand = max(running / seats, kv usage) * (running + waiting) / running
        """
        taken = max(self.running / self.seats, self.kv_usage)
        if self.running:
            return taken * (self.running + self.waiting) / self.running
        return taken + self.waiting / self.seats


def replicas_for(loads: Iterable[Load], target: float = TARGET) -> int:
    """The fewest replicas of which none has more than `target` of its capacity to do, the load being shared evenly."""
    return math.ceil(sum(load.demand for load in loads) / target - 1e-9)
