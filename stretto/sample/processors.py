"""Logit processors, applied at every sampled position of every row, through the slot table.

Order (documented for users in `stretto.params`): logit bias, bad words, min_tokens, penalties, custom processors
(`custom.py`), allowed ids, grammar; then temperature, top-k, top-p and min-p in `sampler`. Penalties and bad words read
the row's own log, so a rewind, a retraction or a rejected draft has nothing to undo: the ids before a position are the
log before it, drafts of the same window included.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stretto.wire import Int, Real

_FORBIDDEN = -1e9  # finite: what a grammar demands is still found


class Positions:
    """The sampled positions of a step. Shapes: L logit rows. `at` is the log position that is being sampled."""

    @property
    def used(self) -> torch.Tensor | None:
        """[L] bool: which are no padding; None: all."""
        return None

    def __init__(self, slots: torch.Tensor, at: torch.Tensor, ints: torch.Tensor, reals: torch.Tensor):
        self.slots, self.at, self.ints, self.reals = slots, at, ints, reals

    def int(self, name: Int) -> torch.Tensor:
        return self.ints[name][self.slots]

    def real(self, name: Real) -> torch.Tensor:
        return self.reals[name][self.slots]

    def take(self, index: torch.Tensor) -> Positions:
        return Positions(self.slots[index], self.at[index], self.ints, self.reals)


def add_bias(logits: torch.Tensor, where: Positions, bias_ids: torch.Tensor, bias_values: torch.Tensor) -> None:
    """logits [L, V], changed in place; bias tables [S, B], unused entries 0.0."""
    logits.scatter_add_(1, bias_ids[where.slots], bias_values[where.slots])


def forbid_stops(logits: torch.Tensor, where: Positions, stops: torch.Tensor) -> None:
    """min_tokens: a stop id may not be sampled below FIRST_STOP. stops [S, M], -1 unused."""
    ids = stops[where.slots].long()
    forbidden = (ids >= 0) & (where.at < where.int(Int.FIRST_STOP))[:, None]
    penalty = torch.where(forbidden, float("-inf"), 0.0)
    logits.scatter_add_(1, ids.clamp_(min=0), penalty.to(logits.dtype))


def forbid_words(logits: torch.Tensor, where: Positions, log: torch.Tensor, bad_words: torch.Tensor) -> None:
    """An id that would complete a bad word is as good as never sampled, unless a grammar leaves no other. logits
    [L, V], changed in place; log [S, C]; bad_words [S, N, length]: ids from each word's end backwards, -1 behind it."""
    words = bad_words[where.slots]
    before = where.at[:, None] - 1 - torch.arange(words.shape[2] - 1, device=log.device)
    history = torch.where(before >= 0, log[where.slots[:, None], before.clamp(min=0)], -2)
    begun = ((words[:, :, 1:] == history[:, None, :]) | (words[:, :, 1:] < 0)).all(-1) & (words[:, :, 0] >= 0)
    logits.scatter_add_(1, words[:, :, 0].clamp(min=0).long(), torch.where(begun, _FORBIDDEN, 0.0).to(logits.dtype))


def keep_allowed(logits: torch.Tensor, where: Positions, allowed: torch.Tensor, restricted: torch.Tensor) -> None:
    """logits [L, V], changed in place; allowed [S, V] bool, of the slots in restricted [S]."""
    logits.masked_fill_(~allowed[where.slots] & restricted[where.slots][:, None], float("-inf"))


def penalise(logits: torch.Tensor, where: Positions, log: torch.Tensor) -> None:
    """Repetition (over prompt and output), presence and frequency (over output). log [S, C], changed: logits."""
    history = log[where.slots].long()
    place = torch.arange(log.shape[1], device=log.device)
    before = place < where.at[:, None]
    output = before & (place >= where.int(Int.PROMPT)[:, None])
    ids = torch.where(before, history, 0).clamp_(0, logits.shape[1] - 1)
    seen = torch.zeros_like(logits).scatter_add_(1, ids, before.to(logits.dtype)) > 0
    counts = torch.zeros_like(logits).scatter_add_(1, ids, output.to(logits.dtype))
    repetition = where.real(Real.REPETITION)[:, None]
    scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits.copy_(torch.where(seen, scaled, logits))
    logits.sub_(counts * where.real(Real.FREQUENCY)[:, None])
    logits.sub_((counts > 0) * where.real(Real.PRESENCE)[:, None])


@dataclass(frozen=True)
class TokenMasks:
    """What some positions may sample (layout: `stretto.wire.LateMask`)."""

    index: torch.Tensor  # [R, W] int32: the row of `bits` of each row and offset in its window; -1: no mask
    bits: torch.Tensor  # [M, ceil(V / 32)] int32, M > 0


def apply_masks(logits: torch.Tensor, rows: torch.Tensor, offsets: torch.Tensor, masks: TokenMasks) -> None:
    """logits [L, V], changed in place: -inf where a position's mask has no bit. rows, offsets [L] int64: the row of the
    step and the place in its window of each position; places beyond the index have no mask."""
    width = masks.index.shape[1]
    at = torch.where(offsets < width, masks.index[rows, offsets.clamp(0, width - 1)], -1).long()
    if logits.device.type == "cpu":  # the host can read which positions these are
        chosen = (at >= 0).nonzero().flatten()
        logits[chosen] = logits[chosen].masked_fill_(~_unpacked(masks.bits[at[chosen]], logits.shape[1]), float("-inf"))
        return
    allowed = _unpacked(masks.bits[at.clamp(min=0)], logits.shape[1])
    logits.masked_fill_(~(allowed | (at < 0)[:, None]), float("-inf"))


def _unpacked(bits: torch.Tensor, vocab: int) -> torch.Tensor:
    """[N, words] int32 -> [N, vocab] bool, lowest bit first."""
    eights = bits.contiguous().view(torch.uint8)
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return ((eights[:, :, None] >> shifts) & 1).view(len(bits), -1)[:, :vocab].bool()
