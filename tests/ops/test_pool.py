"""Pooling over a padded step: padding, which may hold anything, and other rows leave no trace."""

from __future__ import annotations

import torch

from stretto.ops.bind import bind_reference
from stretto.ops.pool import SLICE, last_states, row_sums
from stretto.ragged import RaggedStep
from stretto.wire import N_INT, Goal, Int


def step_of(lengths: list[int], padded_rows: int, padded_tokens: int) -> RaggedStep:
    """Prompt chunks of these lengths in slots 1, 2 ...; then padding."""
    n, context = len(lengths) + 1, max(lengths) + 1
    ints = torch.zeros(N_INT, n, dtype=torch.int32)
    ints[Int.KNOWN, 1:] = torch.tensor(lengths)
    ints[Int.LIMIT], ints[Int.GOAL] = context, Goal.EMBED
    ints[Int.DONE, 0], ints[Int.EPOCH, 0] = 1, -1
    rows = torch.zeros(padded_rows, 3, dtype=torch.int32)
    for i, length in enumerate(lengths):
        rows[i] = torch.tensor([i + 1, 0, length])
    tables = (torch.zeros(n, context, dtype=torch.int32),)
    return bind_reference(rows, ints, torch.zeros(n, context, dtype=torch.int32), tables, 1, padded_tokens, padded_rows)


def test_sums_and_last_states_of_a_padded_step() -> None:
    lengths = [3, SLICE + 5, 1]
    step = step_of(lengths, 5, 2 * SLICE)
    hidden = torch.randn(2 * SLICE, 6, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    hidden[sum(lengths):] = float("nan")
    hidden[3:5] = float("inf")  # of the second row: the others stay finite
    sums, last = row_sums(hidden, step), last_states(hidden, step)
    begin = 0
    for row, length in enumerate(lengths):
        mine = hidden[begin : begin + length]
        if row != 1:
            torch.testing.assert_close(sums[row], mine.double().sum(0))
        else:
            assert sums[row].isnan().all()
        assert torch.equal(last[row], mine[-1].float())
        begin += length
    assert not sums[3:].any() and not last[3:].any()


def test_a_step_that_feeds_nothing() -> None:
    step = step_of([1], 2, 0)
    nothing = torch.zeros(0, 6)
    assert not row_sums(nothing, step).any() and last_states(nothing, step).shape == (2, 6)
