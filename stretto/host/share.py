"""The policy of one step: how many tokens each row may feed. Pure functions of numbers.

Every policy keeps two promises: the caps sum to the budget at most, and where the budget is short neither kind of row
starves the other (prompts keep a quarter of it, decode rows are served in turns).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def share_budget(fills: Sequence[int], drafts: Sequence[int], *, chunk: int, budget: int,
                 policy: str) -> tuple[list[int], list[int]]:
    """Caps of the chunk rows and of the decode rows; 0: not in this step.

    `fills` are the prompt tokens that each chunk row still owes, `drafts` the drafts that each decode row may have to
    verify besides its one pending token. Policies: "full" (every draft), "one_in_mixed" (one token a decode row where
    there is a chunk row), "budget" (drafts from what the chunks leave)."""
    wanted = [min(chunk, n) for n in fills]
    floor = min(sum(wanted), max(1, budget // 4))
    for_tails = budget - floor
    if policy == "one_in_mixed" and fills:
        drafts = [0] * len(drafts)
    if policy == "budget":
        tails = first_come([1] * len(drafts), for_tails)
        chunks = first_come(wanted, budget - sum(tails))
        more = _in_turns([n if tail else 0 for n, tail in zip(drafts, tails)], budget - sum(tails) - sum(chunks))
        return chunks, [a + b for a, b in zip(tails, more)]
    if len(drafts) + sum(drafts) <= for_tails:  # the usual case
        tails = [1 + n for n in drafts]
    else:
        tails = first_come([1] * len(drafts), for_tails)
        more = first_come([n if tail else 0 for n, tail in zip(drafts, tails)], for_tails - sum(tails))
        tails = [a + b for a, b in zip(tails, more)]
    return first_come(wanted, budget - sum(tails)), tails


def first_come(wants: Sequence[int], budget: int) -> list[int]:
    """Each what it wants, in order, until the budget is spent."""
    ends = list(accumulate(wants))
    if not ends or ends[-1] <= budget:
        return list(wants)
    return [max(0, min(n, budget - end + n)) for n, end in zip(wants, ends)]


def _in_turns(wants: Sequence[int], budget: int) -> list[int]:
    """One each, in order, again and again, until the budget is spent."""
    if sum(wants) <= budget:
        return list(wants)
    got, left = [0] * len(wants), budget
    while left > 0:
        hungry = [i for i, n in enumerate(wants) if got[i] < n]
        for i in hungry[:left]:
            got[i] += 1
        left -= min(left, len(hungry))
    return got
