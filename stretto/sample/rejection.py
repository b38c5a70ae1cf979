"""Rejection sampling of drafts (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318), where it
is asked for instead of equality with what the target's own noise chooses.

    draft d, drawn from q (noise of its own)    accepted with probability min(1, p(d) / q(d))
    else                                        an id drawn from max(p - q, 0), normalised
    behind the last draft                       an id drawn from p, as without drafts

p and q are what temperature, filters and every processor leave. Each id is distributed as p, whatever q is; the *text*
of a seed depends on which positions were drafted. Every draw uses a stream of its own at its position: reusing the
draft's noise for the coin or for the residual would be biased.

An accepted draft is a position that "samples" its draft, and the residual never holds the draft it replaces: so what is
accepted follows from equality, here as everywhere (`ops.commit`).
"""

from __future__ import annotations

import torch

from stretto.ragged import RaggedStep
from stretto.sample.noise import gumbel, uniform
from stretto.sample.processors import Positions
from stretto.sample.sampler import greedy, keys_of, log_probabilities
from stretto.wire import Real

DRAFT_STREAM, COIN_STREAM, RESIDUAL_STREAM = 1, 2, 3
NOWHERE = -1


class Proposals:
    """What each slot's drafts were drawn from. Shapes: S slots, K draft width, V vocabulary.

    An entry counts only where the draft being verified is the id that was drawn, for the same position; every other
    draft (of the host: what a grammar forces) was proposed with probability 1."""

    def __init__(self, n_slots: int, width: int, vocab_size: int, device: torch.device):
        self.log_q = torch.zeros(n_slots, width, vocab_size, dtype=torch.float32, device=device)
        self.ids = torch.zeros(n_slots, width, dtype=torch.int64, device=device)
        self.at = torch.full((n_slots, width), NOWHERE, dtype=torch.int64, device=device)

    def forget(self, slots: torch.Tensor) -> None:
        """What stands in these slots now was not drawn from anything known here. slots [N] int64."""
        self.at.index_fill_(0, slots, NOWHERE)

    def draw(self, logits: torch.Tensor, where: Positions, offset: torch.Tensor, filtered: bool) -> torch.Tensor:
        """Ids from the processed logits [N, V] of a drafter, for the places `offset` [N] int64 of the proposals; greedy
        where the temperature is 0. Returns [N] int64."""
        log_q = log_probabilities(logits, where, filtered)
        vocab = torch.arange(logits.shape[1], device=logits.device)
        drawn = (log_q + gumbel(keys_of(where, DRAFT_STREAM), vocab)).argmax(-1)
        ids = torch.where(where.real(Real.TEMPERATURE) > 0, drawn, greedy(logits))
        self.log_q[where.slots, offset], self.ids[where.slots, offset] = log_q, ids
        self.at[where.slots, offset] = where.at.long()
        return ids


def verify(logits: torch.Tensor, sampled: torch.Tensor, where: Positions, step: RaggedStep, log: torch.Tensor,
           proposals: Proposals, filtered: bool) -> torch.Tensor:
    """logits [L, V], processed; sampled [L]: what each position gives without drafts. Returns [L] int64: the drafts
    that are accepted, and ids in place of those that are not."""
    rows = step.out_rows
    offset = torch.arange(len(rows), device=rows.device) - step.cu_out[rows]
    drafted = (offset < step.n_out[rows] - 1) & (where.real(Real.TEMPERATURE) > 0)
    if not logits.is_cuda:  # the host can read which positions these are
        chosen = drafted.nonzero().flatten()
        if len(chosen):
            verified = _verified(logits[chosen], where.take(chosen), offset[chosen], log, proposals, filtered)
            sampled = sampled.index_copy(0, chosen, verified)
        return sampled
    return torch.where(drafted, _verified(logits, where, offset, log, proposals, filtered), sampled)


def _verified(logits: torch.Tensor, where: Positions, offset: torch.Tensor, log: torch.Tensor, proposals: Proposals,
              filtered: bool) -> torch.Tensor:
    """Of positions with a draft; ids [N] int64."""
    place = offset.clamp(0, proposals.ids.shape[1] - 1)
    at = where.at.long().clamp(max=log.shape[1] - 1)
    draft = log[where.slots, at].long().clamp(min=0)
    known = (proposals.at[where.slots, place] == at) & (proposals.ids[where.slots, place] == draft)
    log_p = log_probabilities(logits, where, filtered)
    q = torch.where(known[:, None], proposals.log_q[where.slots, place].exp(), 0.0)
    q.scatter_(1, draft[:, None], torch.where(known[:, None], q.gather(1, draft[:, None]), 1.0))
    p = log_p.exp()
    of_draft = (p.gather(1, draft[:, None]) / q.gather(1, draft[:, None])).squeeze(1)
    accepted = uniform(keys_of(where, COIN_STREAM)) < of_draft
    rest = (p - q).clamp_(min=0)
    rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)  # p = q up to rounding
    vocab = torch.arange(logits.shape[1], device=logits.device)
    replaced = (rest.log() + gumbel(keys_of(where, RESIDUAL_STREAM), vocab)).argmax(-1)
    return torch.where(accepted, draft, replaced)
