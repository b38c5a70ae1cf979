"""NGRAM: proposes what followed the last time that the row's latest ids occurred in its own log (prompt and output).

Prompt-lookup decoding (A. Saxena, 2023). Reads only the log, runs on the device, without weights. The longest match
wins, then the latest one; a row without a match is offered nothing.

    log     ... 5 8 2 9 4 ...  ... 8 2        suffix 8 2 occurs at "5 [8 2] 9 4": proposes 9 4 ...
                                      ^known
"""

from __future__ import annotations

import torch

from stretto.ragged import RaggedStep
from stretto.spec.api import DrafterCaps, Offer, SlotView

LONGEST, SHORTEST = 4, 2  # ids of the suffix that is looked up


class NgramDrafter:
    def __init__(self, width: int, longest: int = LONGEST, shortest: int = SHORTEST):
        if not 1 <= shortest <= longest:
            raise ValueError(f"n-grams from {shortest} to {longest} ids: the shortest must lie in 1..longest")
        self.caps = DrafterCaps(shape="chain", max_width=width, variable=True)
        self.longest, self.shortest = longest, shortest

    def ingest(self, step: RaggedStep, taps: dict[str, torch.Tensor]) -> None:
        """Needs nothing: the log is its memory."""

    def propose(self, step: RaggedStep, view: SlotView, width: int) -> Offer:
        width = min(width, self.caps.max_width)
        if view.log.is_cuda:
            from stretto.ops.triton_ngram import launch_ngram

            return Offer(*launch_ngram(view.log, step.slots, view.known, width, self.longest, self.shortest))
        return self.propose_reference(step, view, width)

    def propose_reference(self, step: RaggedStep, view: SlotView, width: int) -> Offer:
        """In torch's operations."""
        log, known = view.log[step.slots], view.known[step.slots].long()
        follow, length = _longest_match(log, known, self.longest, self.shortest)
        place = follow[:, None] + torch.arange(width, device=log.device)
        ids = log.gather(1, place.clamp_(max=log.shape[1] - 1)).long()
        offered = torch.where(length > 0, (known - follow).clamp(0, width), 0)
        return Offer(ids, offered.to(torch.int32))


def _longest_match(log: torch.Tensor, known: torch.Tensor, longest: int,
                   shortest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """log [R, C], known [R]. For each row: the position after the best earlier occurrence of the log's end, and how
    many ids of the end agree there (0: fewer than `shortest`), both [R] int64.

    An occurrence that ends before position e (ids e-n .. e-1) must leave an id to propose, so e < known."""
    context = log.shape[1]
    end = torch.arange(context, device=log.device)
    agree = torch.zeros_like(log, dtype=torch.int64)
    still = (end < known[:, None]) & (end > 0)
    for back in range(1, longest + 1):
        suffix = log.gather(1, (known - back).clamp(min=0)[:, None])
        shifted = torch.nn.functional.pad(log, (back, 0), value=-1)[:, :context]  # shifted[e] = log[e - back]
        still = still & (shifted == suffix) & (known >= back)[:, None]
        agree += still
    best = (agree * context + end).argmax(1)  # the longest, then the latest
    length = agree.gather(1, best[:, None]).squeeze(1)
    return best, torch.where(length >= shortest, length, 0)
