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
    """hidden [T, hidden_size] -> [R, hidden_size] float64: of each row, over the tokens that it fed in this step."""
    sums = torch.zeros(len(step.slots), hidden.shape[1], dtype=torch.float64, device=hidden.device)
    for tokens in torch.arange(len(hidden), device=hidden.device).split(SLICE):
        real = tokens < step.cu_q[-1]  # padding of a bucket belongs to no row
        sums.index_add_(0, step.rows[tokens], torch.where(real[:, None], hidden[tokens], 0).double())
    return sums


def last_states(hidden: torch.Tensor, step: RaggedStep) -> torch.Tensor:
    """hidden [T, hidden_size] -> [R, hidden_size] float32: of the last token that each row fed; 0 where it fed none."""
    if not len(hidden):
        return torch.zeros(len(step.slots), hidden.shape[1], device=hidden.device)
    at = (step.cu_q[1:] - 1).clamp(min=0)
    return torch.where((step.q_len > 0)[:, None], hidden[at], 0).float()
