"""Which processors a slot needs, remembered on the host from the seats of the plans, so that a step in which no row
needs one pays nothing for it and nobody has to ask the device. These are settings of requests; no length is kept."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from stretto.sample.custom import read_uses
from stretto.wire import N_INT, NEVER, Goal, Int, PackedPlan, Real, unpack_processors


@dataclass(frozen=True)
class Features:
    """Settings of one slot's occupant that decide what the device must run for it."""

    sampled: bool = False  # temperature above 0
    filtered: bool = False  # top-k, top-p or min-p
    penalised: bool = False
    biased: bool = False
    restricted: bool = False  # allowed ids or bad words
    min_tokens: bool = False
    alternatives: int = -1  # log-probabilities: -1 none, else alternatives a token
    scores_prompt: bool = False
    pools: bool = False  # it embeds
    speculation: int = 0
    adapted: bool = False  # it has an adapter
    processors: frozenset[str] = frozenset()  # keys of custom ones


SHORT = 8  # most tokens of a row of a short step: a decoded token, a verify window of up to seven drafts


@dataclass(frozen=True)
class StepShape:
    """All that decides which code a step runs and how large its tensors are, known on the host before it runs. Equal
    shapes run the same kernels on tensors of the same sizes, so a CUDA graph is captured for one shape."""

    rows: int
    tokens: int | None  # packed tokens at most; None: as many as there are, where memory is the host's
    logits: int | None  # sampled positions at most
    width: int  # most ids that a row can emit
    draft_width: int  # drafts to propose at the end of the step
    short: bool = False  # no row feeds more than SHORT tokens
    single: bool = False  # no row feeds more than one
    sampled: bool = False
    filtered: bool = False
    penalised: bool = False
    biased: bool = False
    restricted: bool = False
    min_tokens: bool = False
    alternatives: int = -1
    scores_prompt: bool = False
    pools: bool = False
    adapted: bool = False  # some rows have adapters
    masked: bool = False  # a grammar says what some rows may sample
    processors: tuple[str, ...] = ()  # keys of custom logit processors, in the order in which they act
    fixed: bool = False  # rounding may not depend on the batch


def step_shape(caps: list[int], rows: list[Features], draft_width: int, exact: bool,
               masked: bool = False, most: int = 0) -> StepShape:
    """`caps` are the planned q_cap of the rows. `exact`: sizes of tokens and logits are read, not bounded. `most`:
    tokens of the step, where that is less than the sum of the caps (0: it is not)."""
    kinds = list({id(f): f for f in rows}.values())  # equal features are one object, so that these are few
    custom = frozenset().union(*(f.processors for f in kinds))
    windows = [min(cap, 1 + f.speculation) for cap, f in zip(caps, rows, strict=True)]
    wait = max(0, sum(caps) - most) if most else 0  # drafts that will not fit
    return StepShape(
        rows=len(rows), tokens=None if exact else sum(caps) - wait, logits=None if exact else sum(windows) - wait,
        width=max(windows),
        draft_width=draft_width, short=max(caps) <= SHORT, single=max(caps) <= 1,
        sampled=any(f.sampled for f in kinds),
        filtered=any(f.filtered for f in kinds), penalised=any(f.penalised for f in kinds),
        biased=any(f.biased for f in kinds), restricted=any(f.restricted for f in kinds),
        min_tokens=any(f.min_tokens for f in kinds), alternatives=max(f.alternatives for f in kinds),
        scores_prompt=any(f.scores_prompt for f in kinds), pools=any(f.pools for f in kinds),
        adapted=any(f.adapted for f in kinds), masked=masked, processors=in_order(custom))


def in_order(keys: Iterable[str]) -> tuple[str, ...]:
    """Named processors by name, then those of clients."""
    return tuple(sorted(keys, key=lambda key: (key.startswith("code:"), key)))


@lru_cache(maxsize=1024)
def _one_object(features: Features) -> Features:
    return features


class FeatureMirror:
    def __init__(self) -> None:
        self.of_slot: dict[int, Features] = {}

    def update(self, plan: PackedPlan[np.ndarray]) -> None:
        """`plan`'s arrays on the host."""
        for slot in plan.releases.tolist():
            self.of_slot.pop(slot, None)
        biased = set(plan.biases[:, 0].tolist())
        restricted = {*plan.allowed[:, 0].tolist(), *plan.bad_words[:, 0].tolist()}
        processors = unpack_processors(plan.processors)
        for seat in plan.seats:
            slot = int(seat[0])
            features = _features(seat[4 : 4 + N_INT], seat[4 + N_INT :].view(np.float32), slot in biased,
                                 slot in restricted)
            if slot in processors:
                keys = frozenset(use.key for use in read_uses(processors[slot]))
                features = replace(features, processors=keys)
            self.of_slot[slot] = _one_object(features)

    def of_rows(self, slots: list[int]) -> list[Features]:
        none = Features()
        return [self.of_slot.get(slot, none) for slot in slots]


def _features(ints: np.ndarray, reals: np.ndarray, biased: bool, restricted: bool) -> Features:
    sampled = bool(reals[Real.TEMPERATURE] > 0)
    filtered = bool(ints[Int.TOP_K] > 0 or reals[Real.TOP_P] < 1 or reals[Real.MIN_P] > 0)
    penalised = bool(reals[Real.REPETITION] != 1 or reals[Real.PRESENCE] != 0 or reals[Real.FREQUENCY] != 0)
    return Features(sampled=sampled, filtered=sampled and filtered, penalised=penalised, biased=biased,
                    restricted=restricted,
                    min_tokens=bool(ints[Int.FIRST_STOP] > ints[Int.PROMPT]), alternatives=int(ints[Int.LOGPROBS]),
                    scores_prompt=bool(ints[Int.SCORE_FROM] != NEVER), pools=bool(ints[Int.GOAL] >= Goal.EMBED),
                    speculation=int(ints[Int.SPECULATION]), adapted=bool(ints[Int.ADAPTER] > 0))
