"""The sampler: distributions, filters, and noise that depends on nothing but request and position."""

from __future__ import annotations

import math

import pytest
import torch

from stretto.sample.noise import gumbel, noise_keys
from stretto.sample.processors import Positions, add_bias, forbid_stops, penalise
from stretto.sample.sampler import FIRST_CANDIDATES, sample_all, sample_filtered
from stretto.wire import N_INT, N_REAL, Int, Real

DRAWS = 40_000


def positions(n: int, *, seed: int = 7, **settings: float) -> Positions:
    """n positions 0..n-1 of one slot with the given settings."""
    ints, reals = torch.zeros(N_INT, 2, dtype=torch.int32), torch.zeros(N_REAL, 2)
    reals[Real.TOP_P], reals[Real.REPETITION], reals[Real.TEMPERATURE] = 1.0, 1.0, 1.0
    ints[Int.SEED_LOW] = seed
    for name, value in settings.items():
        if name in Int.__members__:
            ints[Int[name]] = int(value)
        else:
            reals[Real[name]] = value
    return Positions(torch.ones(n, dtype=torch.int64), torch.arange(n), ints, reals)


def chi_square(counts: torch.Tensor, p: torch.Tensor) -> float:
    """Chi-square statistic per degree of freedom over the cells that can occur."""
    expected = p * counts.sum()
    cells = expected > 0
    assert counts[~cells].sum() == 0, "a token of probability 0 was drawn"
    statistic = ((counts[cells] - expected[cells]) ** 2 / expected[cells]).sum()
    return float(statistic) / max(int(cells.sum()) - 1, 1)


def reference(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """The distribution, by the definitions, one token at a time."""
    p = (logits.double() / temperature).softmax(-1)
    order = sorted(range(len(p)), key=lambda i: -float(p[i]))
    kept = order[:top_k] if top_k else order
    total, mass, nucleus = sum(float(p[i]) for i in kept), 0.0, []
    for i in kept:
        if mass < top_p:
            nucleus.append(i)
        mass += float(p[i]) / total
    kept = [i for i in nucleus if float(p[i]) >= min_p * float(p[order[0]])]
    out = torch.zeros_like(p)
    out[kept] = p[kept]
    return out / out.sum()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(0, 1.0, 0.0), (3, 1.0, 0.0), (0, 0.7, 0.0), (0, 1.0, 0.2),
                                                       (5, 0.8, 0.05)])
def test_distribution(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    logits = torch.randn(11, generator=torch.Generator().manual_seed(3)) * 2
    where = positions(DRAWS, TEMPERATURE=temperature, TOP_K=top_k, TOP_P=top_p, MIN_P=min_p)
    draw = sample_filtered if (top_k or top_p < 1 or min_p) else sample_all
    ids = draw(logits.expand(DRAWS, -1).contiguous(), where)
    counts = torch.bincount(ids, minlength=11).double()
    assert chi_square(counts, reference(logits, temperature, top_k, top_p, min_p)) < 3.0


def test_filtering_over_a_large_vocabulary_equals_sorting_all_of_it() -> None:
    """Few candidates, then everything: the fast look at the best tokens changes no drawn id."""
    vocab = 4 * FIRST_CANDIDATES
    flat = torch.randn(64, vocab, generator=torch.Generator().manual_seed(1)) * 0.1  # the nucleus is most of it
    peaked = torch.randn(64, vocab, generator=torch.Generator().manual_seed(2)) * 4
    logits = torch.cat([flat, peaked])
    for settings in ({"TOP_P": 0.95}, {"TOP_K": FIRST_CANDIDATES + 50}, {"MIN_P": 0.01}, {"TOP_K": 20, "TOP_P": 0.9}):
        where = positions(len(logits), **settings)
        got = sample_filtered(logits, where)
        for row in range(0, len(logits), 9):
            one = where.take(torch.tensor([row]))
            top_k, top_p, min_p = (settings.get(k, d) for k, d in (("TOP_K", 0), ("TOP_P", 1.0), ("MIN_P", 0.0)))
            p = reference(logits[row], 1.0, top_k, top_p, min_p)
            ids = torch.arange(vocab)
            keys = noise_keys(one.int(Int.SEED_LOW), one.int(Int.SEED_HIGH), one.int(Int.CHOICE), one.at)
            best = torch.where(p > 0, logits[row] + gumbel(keys, ids)[0], -math.inf).argmax()
            assert got[row] == best


def test_case_1_07_seeds_give_different_text_and_one_seed_the_same() -> None:
    logits = torch.randn(64, generator=torch.Generator().manual_seed(0)).expand(8, -1).contiguous()
    texts = {tuple(sample_all(logits, positions(8, seed=s)).tolist()) for s in range(50)}
    assert len(texts) > 45
    assert torch.equal(sample_all(logits, positions(8, seed=4)), sample_all(logits, positions(8, seed=4)))


def test_noise_is_a_function_of_its_key_alone() -> None:
    where = positions(32)
    keys = noise_keys(where.int(Int.SEED_LOW), where.int(Int.SEED_HIGH), where.int(Int.CHOICE), where.at)
    ids = torch.arange(1000)
    whole = gumbel(keys, ids)
    some = torch.tensor([5, 999, 0])
    assert torch.equal(gumbel(keys[7:9], some), whole[7:9][:, some])
    assert torch.isfinite(whole).all()
    assert abs(float(whole.mean()) - 0.5772) < 0.03  # Euler's constant, the mean of the Gumbel distribution
    assert abs(float(whole.var()) - math.pi**2 / 6) < 0.06


def test_noise_differs_by_seed_choice_position_and_stream() -> None:
    one = torch.ones(1, dtype=torch.int32)
    base = noise_keys(one, one, one, one)
    others = [noise_keys(*(one * 2 if i == at else one for i in range(4))) for at in range(4)]
    others.append(noise_keys(one, one, one, one, stream=1))
    assert len({int(k) for k in (base, *others)}) == 6


def test_greedy_ties_take_the_lowest_id() -> None:
    logits = torch.zeros(3, 50_000)
    logits[1, 700], logits[1, 90] = 2.0, 2.0
    logits[2, 49_999], logits[2, 1] = 1.0, 1.0
    assert logits.argmax(-1).tolist() == [0, 90, 1]


def test_bias_and_min_tokens() -> None:
    where = positions(4, FIRST_STOP=2)
    logits = torch.zeros(4, 6)
    add_bias(logits, where, torch.tensor([[0, 0], [3, 5]]), torch.tensor([[0.0, 0.0], [2.5, -1.0]]))
    assert logits[0].tolist() == [0, 0, 0, 2.5, 0, -1.0]
    stops = torch.full((2, 4), -1, dtype=torch.int32)
    stops[1, :2] = torch.tensor([3, 0])
    forbid_stops(logits, where, stops)
    assert torch.isinf(logits[:2, [0, 3]]).all() and torch.isfinite(logits[2:]).all()
    assert torch.isfinite(logits[:, [1, 2, 4, 5]]).all()


def test_case_2_01_penalties_count_ids_accepted_earlier_in_the_window() -> None:
    """A window of three positions after `known`: each counts the prompt, the output and the drafts before it."""
    log = torch.full((2, 8), -1, dtype=torch.int32)
    log[1, :6] = torch.tensor([1, 2, 2, 3, 3, 4])  # two prompt ids, then output, then drafts
    where = positions(6, PROMPT=2, REPETITION=2.0, PRESENCE=0.5, FREQUENCY=0.25)
    logits = torch.tensor([1.0, 1.0, -1.0, 1.0, -1.0]).repeat(6, 1)
    penalise(logits, where, log)
    for at in range(6):
        seen, output = log[1, :at].tolist(), log[1, 2:at].tolist()
        for token, raw in enumerate((1.0, 1.0, -1.0, 1.0, -1.0)):
            want = (raw / 2 if raw > 0 else raw * 2) if token in seen else raw
            want -= 0.25 * output.count(token) + 0.5 * (token in output)
            assert float(logits[at, token]) == pytest.approx(want)
