"""Which processors a slot needs, remembered on the host from the seats of the plans, so that a step in which no row
needs one pays nothing for it and nobody has to ask the device. These are settings of requests; no length is kept."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stretto.wire import N_INT, NEVER, Int, PackedPlan, Real


@dataclass(frozen=True)
class Features:
    """Settings of one slot's occupant that decide what the device must run for it."""

    sampled: bool = False  # temperature above 0
    filtered: bool = False  # top-k, top-p or min-p
    penalised: bool = False
    biased: bool = False
    min_tokens: bool = False
    alternatives: int = -1  # log-probabilities: -1 none, else alternatives a token
    scores_prompt: bool = False
    speculation: int = 0


class FeatureMirror:
    def __init__(self) -> None:
        self.of_slot: dict[int, Features] = {}

    def update(self, plan: PackedPlan[np.ndarray]) -> None:
        """`plan`'s arrays on the host."""
        for slot in plan.releases.tolist():
            self.of_slot.pop(slot, None)
        biased = set(plan.biases[:, 0].tolist())
        for seat in plan.seats:
            slot = int(seat[0])
            self.of_slot[slot] = _features(seat[4 : 4 + N_INT], seat[4 + N_INT :].view(np.float32), slot in biased)

    def of_rows(self, slots: list[int]) -> list[Features]:
        none = Features()
        return [self.of_slot.get(slot, none) for slot in slots]


def _features(ints: np.ndarray, reals: np.ndarray, biased: bool) -> Features:
    sampled = bool(reals[Real.TEMPERATURE] > 0)
    filtered = bool(ints[Int.TOP_K] > 0 or reals[Real.TOP_P] < 1 or reals[Real.MIN_P] > 0)
    penalised = bool(reals[Real.REPETITION] != 1 or reals[Real.PRESENCE] != 0 or reals[Real.FREQUENCY] != 0)
    return Features(sampled=sampled, filtered=sampled and filtered, penalised=penalised, biased=biased,
                    min_tokens=bool(ints[Int.FIRST_STOP] > ints[Int.PROMPT]), alternatives=int(ints[Int.LOGPROBS]),
                    scores_prompt=bool(ints[Int.SCORE_FROM] != NEVER), speculation=int(ints[Int.SPECULATION]))
