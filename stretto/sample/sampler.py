"""From processed logits to one id a position: temperature, top-k, top-p, min-p, Gumbel noise, argmax.

Every decision is a function of the row's logits, parameters, seed and position. Greedy is the lowest id among equal
maxima. top-p keeps the smallest set of best tokens, after top-k, whose probability reaches top_p.
"""

from __future__ import annotations

import torch

from stretto.sample.noise import TARGET_STREAM, gumbel, noise_keys
from stretto.sample.processors import Positions
from stretto.wire import Int, Real

FIRST_CANDIDATES = 256  # best tokens looked at before the whole vocabulary is sorted


def keys_of(where: Positions, stream: int = TARGET_STREAM) -> torch.Tensor:
    """Of the noise at each position, [L] int64."""
    return noise_keys(where.int(Int.SEED_LOW), where.int(Int.SEED_HIGH), where.int(Int.CHOICE), where.at, stream)


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """[L, V] -> [L] int64."""
    if logits.is_cuda:
        from stretto.ops.triton_step import launch_argmax

        return launch_argmax(logits)
    return logits.argmax(-1)


def sample_all(logits: torch.Tensor, where: Positions) -> torch.Tensor:
    """Draws from softmax(logits / temperature). [L, V] -> [L] int64."""
    ids = torch.arange(logits.shape[1], device=logits.device)
    scaled = logits / where.real(Real.TEMPERATURE)[:, None]
    return (scaled + gumbel(keys_of(where), ids)).argmax(-1)


def greedy_or_sampled(logits: torch.Tensor, where: Positions) -> torch.Tensor:
    """`greedy` for rows without a temperature, `sample_all` for the others, in two launches on CUDA. [L, V] -> [L]."""
    if logits.is_cuda:
        from stretto.ops.triton_step import launch_draw

        return launch_draw(logits, where.slots, where.at, where.ints, where.reals, TARGET_STREAM)
    return torch.where(where.real(Real.TEMPERATURE) > 0, sample_all(logits, where), greedy(logits))


def sample_filtered(logits: torch.Tensor, where: Positions) -> torch.Tensor:
    """Draws from the distribution that top-k, top-p and min-p leave. [L, V] -> [L] int64.

    Looks at the best few hundred tokens; only where they do not hold all that may be drawn is everything sorted. The
    drawn id is the same either way."""
    scaled = logits / where.real(Real.TEMPERATURE)[:, None]
    vocab = logits.shape[1]
    if vocab <= 2 * FIRST_CANDIDATES or logits.device.type != "cpu":
        return _draw(scaled, where, vocab)[0]
    drawn, complete = _draw(scaled, where, FIRST_CANDIDATES)
    if not bool(complete.all()):
        rest = (~complete).nonzero().flatten()
        drawn[rest] = _draw(scaled[rest], where.take(rest), vocab)[0]
    return drawn


def log_probabilities(logits: torch.Tensor, where: Positions, filtered: bool) -> torch.Tensor:
    """Of what `what_is_left` makes of processed logits: [L, V] float32, -inf for what cannot be drawn."""
    return what_is_left(logits, where, filtered).log_softmax(-1)


def what_is_left(logits: torch.Tensor, where: Positions, filtered: bool) -> torch.Tensor:
    """What temperature and, if some position is `filtered`, top-k, top-p and min-p make of processed logits: [L, V],
    -inf for what cannot be drawn. Positions of temperature 0 stay as they are."""
    sampled = (where.real(Real.TEMPERATURE) > 0)[:, None]
    scaled = logits / torch.where(sampled, where.real(Real.TEMPERATURE)[:, None], 1.0)
    if not filtered:
        return scaled
    vocab = logits.shape[1]
    if vocab <= 2 * FIRST_CANDIDATES or logits.device.type != "cpu":
        return torch.where(sampled, _left(scaled, where, vocab)[0], logits)
    left, complete = _left(scaled, where, FIRST_CANDIDATES)
    if not bool(complete.all()):
        rest = (~complete).nonzero().flatten()
        left[rest] = _left(scaled[rest], where.take(rest), vocab)[0]
    return torch.where(sampled, left, logits)


def _left(scaled: torch.Tensor, where: Positions, candidates: int) -> tuple[torch.Tensor, torch.Tensor]:
    """scaled, with -inf for all but those of the `candidates` best that may be drawn; and as `_draw`."""
    best, ids = _best(scaled, candidates)
    keep, complete = _kept(scaled, best, where)
    kept = torch.where(keep, best, float("-inf"))
    return torch.full_like(scaled, float("-inf")).scatter_(1, ids, kept), complete


def _best(scaled: torch.Tensor, candidates: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The best ones, best first, and their ids."""
    if candidates == scaled.shape[1]:
        return torch.sort(scaled, dim=-1, descending=True, stable=True)
    return torch.topk(scaled, candidates, -1)


def _draw(scaled: torch.Tensor, where: Positions, candidates: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws among the `candidates` best. Also says whether those hold every token that may be drawn."""
    best, ids = _best(scaled, candidates)
    keep, complete = _kept(scaled, best, where)
    noise = gumbel(keys_of(where), ids)
    winner = torch.where(keep, best + noise, float("-inf")).argmax(-1, keepdim=True)
    return ids.gather(1, winner).squeeze(1), complete


def _kept(scaled: torch.Tensor, best: torch.Tensor, where: Positions) -> tuple[torch.Tensor, torch.Tensor]:
    """Which of the best-first candidates survive top-k, top-p and min-p; and whether a later token could, [L]."""
    n = best.shape[1]
    rank = torch.arange(n, device=best.device)
    top_k = where.int(Int.TOP_K)
    limit = torch.where(top_k > 0, top_k, scaled.shape[1]).to(torch.int64)
    by_rank = rank < limit[:, None]
    within_k = torch.where(by_rank, best, float("-inf")).logsumexp(-1)
    total = torch.where(limit <= n, within_k, scaled.logsumexp(-1))
    probability = torch.where(by_rank, (best - total[:, None]).exp(), 0.0)
    mass = probability.cumsum(-1)
    top_p = where.real(Real.TOP_P)[:, None]
    by_mass = (mass - probability < top_p) | (top_p >= 1)
    floor = best[:, :1] + where.real(Real.MIN_P)[:, None].log()  # log 0 = -inf: off
    keep = by_rank & by_mass & (best >= floor)
    complete = (limit <= n) | ~keep[:, -1]
    return keep, torch.ones_like(complete) if n == scaled.shape[1] else complete
