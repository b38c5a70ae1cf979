"""Log-probabilities of the model's own distribution, before any processor, as OpenAI and vLLM report them."""

from __future__ import annotations

from functools import partial

import torch

from stretto.ops.fixed import by_rows


def token_scores(logits: torch.Tensor, ids: torch.Tensor, alternatives: int, fixed: bool = False) -> torch.Tensor:
    """logits [N, V] float32, ids [N]. Returns [N, 1 + 2 * alternatives] int32: the bits of the id's log-probability,
    the ids of the best alternatives, and the bits of theirs, best first. `fixed`: rounded alike in any batch."""
    if fixed:
        return by_rows(partial(token_scores, alternatives=alternatives), logits, ids)
    total = logits.logsumexp(-1, keepdim=True)
    own = logits.gather(1, ids[:, None]) - total
    parts = [own.view(torch.int32)]
    if alternatives > 0:
        best, best_ids = logits.topk(min(alternatives, logits.shape[1]), -1)
        best = best - total
        if best.shape[1] < alternatives:  # a vocabulary smaller than the number asked for
            pad = (0, alternatives - best.shape[1])
            best = torch.nn.functional.pad(best, pad, value=float("-inf"))
            best_ids = torch.nn.functional.pad(best_ids, pad, value=-1)
        parts += [best_ids.to(torch.int32), best.contiguous().view(torch.int32)]
    return torch.cat(parts, 1)
