"""How likely each draft of a row is to be accepted: decayed counts per slot and place, resting on those of all rows.

    survival[i, j] = P(row i is offered draft j) * P(accepted | offered, all before it accepted), multiplied up to j

A row that has been verified often speaks for itself; a new one is believed to be like the others of its kind: greedy
rows accept more than those that sample. How much a row's own
counts say depends on how different rows are, which is estimated, too (empirical Bayes, as in Efron and Morris 1973):
where all are alike, whoever was lucky lately would otherwise get the drafts. No torch here.
"""

from __future__ import annotations

import numpy as np

ROW_MEMORY = 0.96  # of a row's counts, kept with each step, verified or not: what is old says little
ALL_MEMORY = 0.99  # of everybody's counts, kept with each verified row
OFFER_MEMORY = 0.8  # offers come in runs (a matching n-gram), so they are forgotten sooner
OFFER_ALL_MEMORY = 0.98  # of everybody's offers, kept with each row that might have been offered drafts
DRY = 0.7  # of everybody's share of offers, which rows that found nothing lately are expected to find again
WEIGHT = 10.0  # verified drafts by which everybody's average counts in a row's estimate, at first
LEAST_WEIGHT, MOST_WEIGHT = 4.0, 250.0  # where rows differ much, and not at all
COMPARED_STEPS, COMPARING = 4, 0.3  # steps from one look at how different rows are to the next, and by which share
# one at many rows moves the estimate
LEAST_TRIED = 3.0  # counts of a row from which it tells how different rows are
FIRST_GUESS = 0.7  # before anything was verified


class Acceptance:
    """`width`: most drafts of a row and step; slots are numbered 0 .. n_slots - 1."""

    def __init__(self, n_slots: int, width: int):
        self.width = width
        self._tried = np.zeros((n_slots, width))  # drafts at each place whose predecessors were accepted
        self._passed = np.zeros((n_slots, width))
        self._squares = np.zeros(n_slots)  # of the weights that first drafts have in the counts
        self._spread = FIRST_GUESS * (1 - FIRST_GUESS) / WEIGHT  # variance of true acceptance between rows
        self._weight = WEIGHT
        self._offered = np.ones((n_slots, width))  # share of the steps in which a draft stood there, though it might
        self._steps = 0
        self._kind = np.zeros(n_slots, dtype=np.int64)  # 0 greedy, 1 sampled
        self._all_tried = np.zeros((2, width))  # of each kind
        self._all_passed = np.zeros((2, width))
        self._all_asked, self._all_found = np.ones(width), np.ones(width)

    def forget(self, slot: int, sampled: bool = False) -> None:
        """The slot has a new occupant, of whom nothing is known but how it samples."""
        self._kind[slot] = sampled
        self._tried[slot] = self._passed[slot] = self._squares[slot] = 0.0
        self._offered[slot] = self._all_found / self._all_asked

    def remember(self, slot: int) -> np.ndarray:
        """What is known of the occupant, for `recall`: [3, width]."""
        return np.stack([self._tried[slot], self._passed[slot], self._offered[slot]])

    def recall(self, slot: int, known: np.ndarray) -> None:
        self._tried[slot], self._passed[slot], self._offered[slot] = known
        self._squares[slot] = self._tried[slot, :1].sum()

    def note_offers(self, slots: np.ndarray, asked: np.ndarray, offered: np.ndarray) -> None:
        """Rows of one step, all [R] and each slot once: of `asked` drafts the drafter found `offered`."""
        places = np.arange(self.width)
        may, found = places < asked[:, None], places < offered[:, None]
        self._offered[slots] += np.where(may, (1 - OFFER_MEMORY) * (found - self._offered[slots]), 0)
        seen = may.sum(0)
        keep = OFFER_ALL_MEMORY**seen
        self._all_asked = keep * self._all_asked + seen
        self._all_found = keep * self._all_found + (may & found).sum(0)

    def note(self, slots: np.ndarray, verified: np.ndarray, accepted: np.ndarray) -> None:
        """Rows of one step, all [R] and each slot once: `verified` drafts of a row were looked at, `accepted` were
        right."""
        self._steps += 1
        if verified.any():
            self._count(slots, verified, accepted)
        if self.width and self._steps % COMPARED_STEPS == 0:
            self._compare(slots)

    def _count(self, slots: np.ndarray, verified: np.ndarray, accepted: np.ndarray) -> None:
        places = np.arange(self.width)
        tried = places < np.minimum(accepted + 1, verified)[:, None]  # behind the first wrong one nothing is learnt
        passed = tried & (places < accepted[:, None])
        self._tried[slots] += tried
        self._passed[slots] += passed
        kinds = self._kind[slots]
        for kind in set(kinds.tolist()):
            own = kinds == kind
            keep = ALL_MEMORY ** int((verified[own] > 0).sum())  # at every place: what was not tried for long fades
            self._all_tried[kind] = keep * self._all_tried[kind] + tried[own].sum(0)
            self._all_passed[kind] = keep * self._all_passed[kind] + passed[own].sum(0)
        self._squares[slots] += tried[:, 0]

    def _compare(self, slots: np.ndarray) -> None:
        """How different rows of a kind are: the variance of their rates at the first place, less what chance alone
        makes."""
        slots = slots[self._tried[slots, 0] >= LEAST_TRIED]
        tried, passed, kinds = self._tried[slots, 0], self._passed[slots, 0], self._kind[slots]
        counts, sums = np.bincount(kinds, minlength=2), np.bincount(kinds, tried, 2)
        free = len(slots) - int((counts > 0).sum())  # degrees of freedom
        if free < 1:
            return
        mean = (np.bincount(kinds, passed, 2) / np.maximum(sums, 1e-9))[kinds]
        alone = mean * (1 - mean)  # variance of one draft
        chance = float((alone * self._squares[slots] / tried**2).mean())
        found = float(((passed / tried - mean) ** 2).sum()) / free - chance
        self._spread += COMPARING * free / (free + 16) * (found - self._spread)
        self._weight = min(max(float(alone.mean()) / max(self._spread, 1e-9), LEAST_WEIGHT), MOST_WEIGHT)

    def step(self, slots: np.ndarray) -> None:
        """Time passes for these slots."""
        self._tried[slots] *= ROW_MEMORY
        self._passed[slots] *= ROW_MEMORY
        self._squares[slots] *= ROW_MEMORY**2

    def survival(self, slots: np.ndarray) -> np.ndarray:
        """slots [R] -> [R, width]: the chance that each draft brings a token; falls from left to right."""
        return self.accepted(slots) * self.offered(slots)

    def accepted(self, slots: np.ndarray) -> np.ndarray:
        """slots [R] -> [R, width]: the chance that each draft brings a token once it is offered."""
        weight, usual = self._weight, np.asarray([self.usual(False), self.usual(True)])[self._kind[slots]]
        rate = (self._passed[slots] + weight * usual) / (self._tried[slots] + weight)
        return np.cumprod(rate, axis=1)

    def offered(self, slots: np.ndarray) -> np.ndarray:
        """slots [R] -> [R, width]: the chance that a draft stands at each place at all."""
        return np.minimum.accumulate(self._offered[slots], axis=1)

    @property
    def lasting(self) -> np.ndarray:
        """[width]: the least chance that a draft stands at each place of a row again, though it found nothing lately.
        For whether to propose at all: after a dry spell of a row that is alone, nothing else would."""
        return DRY * np.minimum.accumulate(self._all_found / self._all_asked)

    @property
    def best(self) -> float:
        """Everybody's chance at the first place, of the kind that accepts more."""
        return max(self._usual_first(sampled) for sampled in (False, True))

    def usual(self, sampled: bool = False) -> list[float]:
        """The chance at each place of all rows of a kind, given that those before it were accepted. A place that was
        hardly ever tried is believed to be like the one before it, a kind like the other one."""
        rates, before = [], self._guess(sampled)
        for tried, passed in zip(self._all_tried[int(sampled)].tolist(), self._all_passed[int(sampled)].tolist()):
            before = (passed + WEIGHT * before) / (tried + WEIGHT)
            rates.append(before)
        return rates

    def _guess(self, sampled: bool) -> float:
        """The chance at the first place of a kind of which nothing is known: that of the other one."""
        return _rate(self._all_tried, self._all_passed, int(not sampled), FIRST_GUESS)

    def _usual_first(self, sampled: bool) -> float:
        """`usual` at the first place."""
        return _rate(self._all_tried, self._all_passed, int(sampled), self._guess(sampled))


def _rate(tried: np.ndarray, passed: np.ndarray, kind: int, guess: float) -> float:
    """Of a kind's first drafts, if there are any; [2, width]."""
    if not tried.shape[1]:
        return guess
    return (float(passed[kind, 0]) + WEIGHT * guess) / (float(tried[kind, 0]) + WEIGHT)
