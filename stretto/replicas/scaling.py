"""How many replicas a load needs, from what each of them tells: no cluster's own, so that any autoscaler can ask."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import msgspec

from stretto.compat import ConfigError, Refusal

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


@dataclass(frozen=True)
class Scaling:
    """What a deployment is told beside the settings of its servers. `target_load`: share of a replica that the load may
    take. `num_cpus`: cores that a replica books."""

    min_replicas: int = 1
    max_replicas: int = 1
    target_load: float = TARGET
    num_cpus: float = 1.0

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Scaling:
        """Numbers, or their digits as text. Other names in `values` are not looked at. Raises ConfigError."""
        read: dict[str, Any] = {}
        refusals: list[Refusal] = []
        for name, kind in ((one.name, type(one.default)) for one in fields(cls) if one.name in values):
            try:
                read[name] = msgspec.convert(values[name], kind, strict=False)
            except msgspec.ValidationError:
                number = "a whole number" if kind is int else "a number"
                refusals.append(Refusal(f"{name} {values[name]}", "any cluster", f"it must be {number}", "set one"))
        if not refusals:
            refusals += cls(**read)._outside()
        if refusals:
            raise ConfigError(refusals)
        return cls(**read)

    def _outside(self) -> Iterator[Refusal]:
        if not 1 <= self.min_replicas <= self.max_replicas:
            yield Refusal(f"min_replicas {self.min_replicas}", f"max_replicas {self.max_replicas}",
                          "at least one replica runs, and no more than the most", "set 1 <= min <= max")
        if not 0 < self.target_load <= 1:
            yield Refusal(f"target_load {self.target_load:g}", "any replica", "it is a share of its capacity",
                          "set a number above 0 and up to 1")
        if not 0 < self.num_cpus < math.inf:
            yield Refusal(f"num_cpus {self.num_cpus:g}", "any replica", "it needs some of a core",
                          "set a number above 0")


SCALING_NAMES = frozenset(one.name for one in fields(Scaling))
