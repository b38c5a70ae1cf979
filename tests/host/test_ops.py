"""Operations are decided in any order and executed in one: what remains of them in a plan."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.host.faults import HostFault
from stretto.host.ops import Ops
from stretto.wire import (
    HEADER,
    N_INT,
    N_REAL,
    ROW_FED,
    ROW_FLAGS,
    ROW_NEW,
    ROW_OFFERED,
    ROW_SLOT,
    ROW_VERIFIED,
    HostDraft,
    PageOp,
    ResultLayout,
    Seat,
    StepResult,
    pack_plan,
    split_plan,
    unpack_result,
)


def seat(slot: int, fresh: bool = True) -> Seat:
    return Seat(slot, fresh, [slot] * N_INT, [0.0] * N_REAL, 0, [1, 2])


def test_a_release_drops_what_was_pending_for_the_slot():
    ops = Ops()
    ops.map(1, [(0, 3, 7)])
    ops.seat(seat(2))
    ops.map(2, [(0, 0, 8)])
    ops.draft(HostDraft(1, 5, 9, [1]))
    ops.release(1)
    ops.release(2)
    plan = ops.take(0, 0, [])
    assert plan.releases == [1, 2]
    assert plan.seats == plan.maps == plan.drafts == []


def test_a_fresh_seat_takes_the_place_of_a_release():
    ops = Ops()
    ops.map(1, [(0, 3, 7)])
    ops.release(1)
    ops.seat(seat(1))
    ops.map(1, [(0, 0, 9)])
    plan = ops.take(0, 0, [])
    assert plan.releases == [] and [s.slot for s in plan.seats] == [1]
    assert plan.maps == [(1, 0, 0, 9)]


def test_a_seat_in_place_keeps_the_maps_before_it():
    ops = Ops()
    ops.map(1, [(0, 3, 7)])
    ops.seat(seat(1, fresh=False))
    assert ops.take(0, 0, []).maps == [(1, 0, 3, 7)]


def test_a_seat_that_finds_what_was_left_takes_the_place_of_a_release_too():
    """Of its pages the device knows what it was told before; `release` says what it was not."""
    ops = Ops()
    ops.map(1, [(0, 3, 7), (1, 2, 5)])
    assert list(ops.release(1)) == [(0, 3), (1, 2)]
    ops.seat(seat(1, fresh=False))
    ops.map(1, [(0, 3, 7)])
    plan = ops.take(0, 0, [])
    assert plan.releases == [] and not plan.seats[0].fresh and plan.maps == [(1, 0, 3, 7)]
    ops.seat(seat(2))
    assert ops.release(2) is None and list(ops.release(3)) == []


@pytest.mark.parametrize("first", ["seat", "map"])
def test_what_cannot_be_ordered_is_a_fault(first: str):
    ops = Ops()
    if first == "seat":
        ops.seat(seat(1))
    else:
        ops.map(1, [(0, 0, 3)])
    with pytest.raises(HostFault):
        ops.seat(seat(1, fresh=first == "map"))


def test_page_operations_keep_their_order():
    """A page that is freed, taken again, and copied into."""
    ops = Ops()
    ops.poison(0, 5)
    ops.copy(0, 3, 5)
    ops.poison(0, 3)
    assert ops.take(0, 0, []).page_ops == [(PageOp.POISON, 0, 0, 5), (PageOp.COPY, 0, 3, 5), (PageOp.POISON, 0, 0, 3)]


def test_a_plan_takes_everything():
    ops = Ops()
    ops.release(3)
    ops.poison(0, 1)
    assert ops.take(4, 2, [(1, 1, 1)]).seq == 4
    plan = ops.take(5, 0, [])
    assert plan.releases == plan.seats == plan.maps == plan.page_ops == plan.drafts == plan.rows == []


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 1), st.integers(0, 2), st.integers(0, 9)), max_size=30))
def test_the_last_map_of_a_table_entry_counts(entries):
    """Through the packed plan, as a device reads it."""
    ops, table = Ops(), {}
    for slot, group, index, page in entries:
        ops.map(slot, [(group, index, page)])
        table[slot, group, index] = page
    packed = pack_plan(ops.take(0, 0, []))
    views = split_plan(packed[:HEADER], packed)
    assert packed.dtype == np.int32
    assert {(s, g, i): page for s, g, i, page in views.maps.tolist()} == table
    assert len(views.maps) == len(table)


def test_counts_of_a_result_are_those_of_its_rows():
    """As it travelled, and as whoever makes a result by hand has it."""
    layout = ResultLayout(2, 3, 2)
    body = [5, 9, 3, 2, 12, 13, 1 | 1 << 1, 3, 1, 70, 71, 72, 80, 0,
            6, -1, 0, 0, 4, 5, 0, 0, 0, 0, 0, 0, 0, 0]
    travelled = unpack_result(np.asarray([*layout.header(4), *body], dtype=np.int32))
    by_hand = StepResult(4, travelled.rows)
    assert [(row.new, row.offered, row.done) for row in travelled.rows] == [([70, 71, 72], [80], True), ([], [], False)]
    flags = [(1, 1), (0, 0)]
    for result in (travelled, by_hand):
        counts = result.counts()
        assert counts[:, [ROW_SLOT, ROW_FED, ROW_VERIFIED, ROW_NEW, ROW_OFFERED]].tolist() == [
            [5, 3, 2, 3, 1], [6, 0, 0, 0, 0]]
        assert [(flag & 1, done) for flag, (_, done) in zip(counts[:, ROW_FLAGS].tolist(), flags)] == flags
    assert StepResult(4, []).counts().shape == (0, 9)
