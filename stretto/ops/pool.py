"""One vector for a sequence: the hidden state of its last token, or the mean over all of them.

Both are of the states after the final norm. A sequence is fed over several steps, so the mean is a sum that stands in
the slot table; it is kept in float64, so that neither the sizes of the chunks nor the order in which a device adds
them shows in the vector.

    step        |  chunk 0   |  chunk 1   |  chunk 2, the last one |
    sum            s0           s0 + s1      s0 + s1 + s2           ->  mean = sum / kv_len
    last                                     state of its last token
"""

from __future__ import annotations

import torch

from stretto.ragged import RaggedStep

SLICE = 1024  # tokens whose states exist in float64 at one time


def row_sums(hidden: torch.Tensor, step: RaggedStep) -> torch.Tensor:
    """hidden [T, hidden_size] -> [R, hidden_size] float64: of each row, over the tokens that it fed in this step.

    A product, not a scatter: its order of additions is always the same, so that ranks which share a model agree to the
    last bit. What is not finite stays with its row, as NaN."""
    rows = torch.arange(len(step.slots), device=hidden.device)
    sums = torch.zeros(len(rows), hidden.shape[1], dtype=torch.float64, device=hidden.device)
    broken = torch.zeros(len(rows), dtype=torch.float64, device=hidden.device)
    for tokens in torch.arange(len(hidden), device=hidden.device).split(SLICE):
        real = tokens < step.cu_q[-1]  # padding of a bucket belongs to no row
        member = ((step.rows[tokens] == rows[:, None]) & real).double()
        finite = hidden[tokens].isfinite()
        sums += member @ torch.where(finite, hidden[tokens], 0).double()
        broken += member @ (~finite.all(1)).double()
    return torch.where((broken > 0)[:, None], torch.nan, sums)


def last_states(hidden: torch.Tensor, step: RaggedStep) -> torch.Tensor:
    """hidden [T, hidden_size] -> [R, hidden_size] float32: of the last token that each row fed; 0 where it fed none."""
    if not len(hidden):
        return torch.zeros(len(step.slots), hidden.shape[1], device=hidden.device)
    at = (step.cu_q[1:] - 1).clamp(min=0)
    return torch.where((step.q_len > 0)[:, None], hidden[at], 0).float()
