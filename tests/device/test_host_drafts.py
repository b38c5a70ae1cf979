"""Late proposals of the host: the vectorised operation against the rule, row by row."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.device.slots import SlotTable
from stretto.wire import HEADER, HostDraft, Int, StepPlan, pack_plan, split_plan

CONTEXT = 12


def offered(table: SlotTable, draft: HostDraft) -> list[int]:
    """What the rule of DESIGN section 6 offers."""
    c = {name: int(table.ints[name, draft.slot]) for name in Int}
    behind = c[Int.KNOWN] - draft.at
    if c[Int.EPOCH] != draft.epoch or c[Int.DONE] or c[Int.KNOWN] - c[Int.LEN] != 1 or behind < 0:
        return []
    if draft.ids[:behind] != table.log[draft.slot, draft.at : c[Int.KNOWN]].tolist()[: len(draft.ids[:behind])]:
        return []
    return draft.ids[behind:][: max(0, min(c[Int.LIMIT] - 1 - c[Int.KNOWN], c[Int.SPECULATION]))]


rows = st.tuples(st.integers(1, 9), st.integers(0, 3), st.integers(0, 5), st.booleans(), st.booleans(), st.booleans(),
                 st.lists(st.integers(0, 1), min_size=1, max_size=6))


@settings(max_examples=300)
@given(st.lists(rows, min_size=1, max_size=4))
def test_offers_what_the_rule_offers(made) -> None:
    table = SlotTable(6, CONTEXT, 4, 1, torch.device("cpu"))
    table.log[:] = torch.randint(0, 2, table.log.shape, generator=torch.Generator().manual_seed(len(made)))
    drafts = []
    for slot, (known, behind, room, done, stale, fed, ids) in enumerate(made, 1):
        values = {Int.KNOWN: known, Int.LEN: known - 1 if fed else max(known - 2, 0), Int.EPOCH: 5, Int.DONE: int(done),
                  Int.LIMIT: min(known + 1 + room, CONTEXT), Int.SPECULATION: 4}
        for name, value in values.items():
            table.ints[name, slot] = value
        drafts.append(HostDraft(slot, 4 if stale else 5, max(known - behind, 0), ids))
    want = [offered(table, d) for d in drafts]
    before = table.log.clone()
    packed = pack_plan(StepPlan(0, drafts=drafts))
    on_host = split_plan(packed[:HEADER], packed)
    table.apply(split_plan(packed[:HEADER], torch.from_numpy(np.copy(packed))), on_host, None)  # type: ignore[arg-type]
    for draft, ids in zip(drafts, want, strict=True):
        known = int(table.known[draft.slot])
        assert int(table.ints[Int.NDRAFT, draft.slot]) == len(ids)
        assert table.log[draft.slot, known : known + len(ids)].tolist() == ids
        assert torch.equal(table.log[draft.slot, :known], before[draft.slot, :known])
