"""A drafter whose quality is chosen: it knows the answers and spoils a share of them. For tests and benchmarks.

It finds the answer whose beginning is the row's log, and proposes what comes next; each proposed id is replaced by
another one with probability 1 - accuracy. Nothing it does may change any text.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stretto.ragged import RaggedStep
from stretto.sample.noise import mix
from stretto.spec.api import DrafterCaps, Offer, SlotView


class ScriptedDrafter:
    """answers: whole sequences (prompt and answer). accuracy: 1.0 right, 0.0 wrong, between: mixed.

    `variable` makes the offered width of each row and step random in 0..width."""

    def __init__(self, answers: Sequence[Sequence[int]], width: int, accuracy: float = 1.0, *, vocab_size: int,
                 variable: bool = False, seed: int = 0, device: torch.device | None = None):
        self.caps = DrafterCaps(shape="chain", max_width=width, variable=variable)
        self.vocab_size, self.accuracy, self.seed = vocab_size, accuracy, seed
        device = device or torch.device("cpu")
        longest = max((len(a) for a in answers), default=1)
        self.answers = torch.full((max(len(answers), 1), longest + width), 0, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(max(len(answers), 1), dtype=torch.int32, device=device)
        for row, answer in enumerate(answers):
            self.answers[row, : len(answer)] = torch.tensor(list(answer), dtype=torch.int32)
            self.lengths[row] = len(answer)

    def ingest(self, step: RaggedStep, taps: dict[str, torch.Tensor]) -> None:
        """Needs nothing: it reads only the log."""

    def propose(self, step: RaggedStep, view: SlotView, width: int) -> Offer:
        width = min(width, self.caps.max_width)
        self.answers, self.lengths = self.answers.to(view.log.device), self.lengths.to(view.log.device)
        known = view.known[step.slots].long()
        answer = self._answer_of(view.log[step.slots], known)
        place = (known[:, None] + torch.arange(width, device=known.device)).clamp_(max=self.answers.shape[1] - 1)
        ids = self.answers[answer[:, None], place].long()
        luck = self._chance(known[:, None] + torch.arange(width, device=known.device), step.slots[:, None], 1)
        wrong = 1 + (luck * 7919).long() % (self.vocab_size - 1)
        ids = torch.where(luck < self.accuracy, ids, (ids + wrong) % self.vocab_size)
        room = (self.lengths[answer] - known).clamp_(0, width)
        if self.caps.variable:
            room = torch.minimum(room, (self._chance(known, step.slots, 2) * (width + 1)).long())
        return Offer(ids, room.to(torch.int32))

    def _answer_of(self, log: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
        """The answer that agrees longest with each row's confirmed log, [R] int64."""
        n = min(log.shape[1], self.answers.shape[1])
        same = log[:, None, :n] == self.answers[None, :, :n]
        same &= torch.arange(n, device=log.device) < known[:, None, None]
        return same.to(torch.int32).cumprod(2).sum(2).argmax(1)

    def _chance(self, position: torch.Tensor, slot: torch.Tensor, stream: int) -> torch.Tensor:
        """Uniform in [0, 1), a function of (seed, slot, position, stream)."""
        bits = mix(mix(position.long() + self.seed * 1_000_003) ^ (slot.long() * 65_537 + stream))
        return ((bits >> 40) & 0xFFFFFF).float() / 2**24
