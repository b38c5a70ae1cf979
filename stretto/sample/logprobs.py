"""What is reported of tokens: log-probabilities of the model's own distribution, or what the server was told to report.

    raw_logprobs, raw_logits               before any processor acts: the model's own, as OpenAI and vLLM report them
    processed_logprobs, processed_logits   what the token was chosen from: after processors, temperature and filters, or
                                           at temperature 0 after the processors

A prompt's tokens are not chosen, so theirs are always the model's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from stretto.ops.fixed import by_rows
from stretto.sample.processors import Positions
from stretto.sample.sampler import what_is_left


@dataclass(frozen=True)
class Reporting:
    processed: bool = False
    normalised: bool = True  # log-probabilities, not logits

    @classmethod
    def of(cls, mode: str) -> Reporting:
        """`mode`: as after --logprobs-mode."""
        kind, _, unit = mode.partition("_")
        return cls(kind == "processed", unit == "logprobs")


def values_to_report(logits: torch.Tensor, processed: torch.Tensor, where: Positions, filtered: bool, fixed: bool,
                     reporting: Reporting) -> torch.Tensor:
    """[L, V]: the model's logits, or what the tokens were chosen from."""
    if not reporting.processed:
        return logits
    if not fixed:
        return what_is_left(processed, where, filtered)
    places = torch.arange(len(processed), device=processed.device)
    return by_rows(lambda part, index: what_is_left(part, where.take(index), filtered), processed, places)


def token_scores(values: torch.Tensor, ids: torch.Tensor, alternatives: int, normalised: bool = True,
                 fixed: bool = False) -> torch.Tensor:
    """values [N, V] float32, ids [N]. Returns [N, 1 + 2 * alternatives] int32: the bits of the id's log-probability (of
    its value, where not `normalised`), the ids of the best alternatives, and the bits of theirs, best first. `fixed`:
    rounded alike in any batch."""
    if fixed:
        return by_rows(partial(token_scores, alternatives=alternatives, normalised=normalised), values, ids)
    total = values.logsumexp(-1, keepdim=True) if normalised else 0.0
    own = values.gather(1, ids[:, None]) - total
    parts = [own.view(torch.int32)]
    if alternatives > 0:
        best, best_ids = values.topk(min(alternatives, values.shape[1]), -1)
        best = best - total
        if best.shape[1] < alternatives:  # a vocabulary smaller than the number asked for
            pad = (0, alternatives - best.shape[1])
            best = torch.nn.functional.pad(best, pad, value=float("-inf"))
            best_ids = torch.nn.functional.pad(best_ids, pad, value=-1)
        parts += [best_ids.to(torch.int32), best.contiguous().view(torch.int32)]
    return torch.cat(parts, 1)
