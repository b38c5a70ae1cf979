"""The policy of a step, as numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.host.limits import CAP_POLICIES
from stretto.host.share import share_budget

FILLS = st.lists(st.integers(1, 300), max_size=12)
DRAFTS = st.lists(st.integers(0, 8), max_size=40)
SIZES = dict(chunk=st.integers(1, 128), budget=st.integers(2, 200), policy=st.sampled_from(CAP_POLICIES))


@given(fills=FILLS, drafts=DRAFTS, **SIZES)
def test_promises_of_every_policy(fills, drafts, chunk, budget, policy):
    chunks, tails = share_budget(fills, drafts, chunk=chunk, budget=budget, policy=policy)
    assert len(chunks) == len(fills) and len(tails) == len(drafts)
    assert sum(chunks) + sum(tails) <= budget
    assert all(0 <= cap <= min(chunk, n) for cap, n in zip(chunks, fills))
    assert all(0 <= cap <= 1 + n for cap, n in zip(tails, drafts))
    assert sum(chunks) >= min(sum(min(chunk, n) for n in fills), max(1, budget // 4)), "prompts starve"
    assert not drafts or tails[0] >= 1, "decode rows starve"
    if policy == "one_in_mixed" and fills:
        assert max(tails, default=0) <= 1


@given(fills=FILLS, drafts=DRAFTS, **SIZES)
def test_nothing_is_held_back(fills, drafts, chunk, budget, policy):
    """Where a row gets less than it wants, the budget is spent (by "full" but for the drafts' share of the floor)."""
    chunks, tails = share_budget(fills, drafts, chunk=chunk, budget=budget, policy=policy)
    wanted = [1 if policy == "one_in_mixed" and fills else 1 + n for n in drafts]
    short = sum(min(chunk, n) for n in fills) > sum(chunks) or sum(wanted) > sum(tails)
    assert not short or sum(chunks) + sum(tails) == budget


@given(drafts=DRAFTS, budget=st.integers(2, 200), policy=st.sampled_from(CAP_POLICIES))
def test_every_row_gets_its_token_before_any_draft(drafts, budget, policy):
    _, tails = share_budget([], drafts, chunk=8, budget=budget, policy=policy)
    assert max(tails, default=0) <= 1 or min(tails) >= 1


def test_budget_policy_feeds_prompts_before_drafts():
    chunks, tails = share_budget([100], [7] * 4, chunk=20, budget=30, policy="budget")
    assert chunks == [20] and tails == [3, 3, 2, 2]
    chunks, tails = share_budget([100], [7] * 2, chunk=20, budget=30, policy="full")
    assert chunks == [14] and tails == [8, 8]
    chunks, tails = share_budget([100], [7] * 2, chunk=20, budget=30, policy="one_in_mixed")
    assert chunks == [20] and tails == [1, 1]


@pytest.mark.parametrize("policy", CAP_POLICIES)
def test_no_rows(policy):
    assert share_budget([], [], chunk=8, budget=8, policy=policy) == ([], [])
