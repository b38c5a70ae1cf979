"""A drafter's bookkeeping: the kernels equal their references on random tables, bit for bit."""

from __future__ import annotations

import pytest
import torch

from stretto.device.seams import Seams
from stretto.ops.bind import bind_reference
from stretto.ops.triton_draft import (
    launch_ahead,
    launch_block,
    launch_extension,
    launch_offer,
    launch_seam,
    launch_stream,
)
from stretto.ragged import RaggedStep
from stretto.spec.api import Offer
from stretto.spec.steps import blocks_reference, extension_reference, one_by_one_reference, stream_of, stream_reference
from stretto.wire import Int
from tests.ops.test_step_ends import CONTEXT, DEVICE, SLOTS, rows_of, table_of

PAGE = 4


def bound(seed: int, groups: int = 1, n: int = 6, padding: int = 2):
    """A table and a step of it, with padding rows and tokens."""
    table, g = table_of(seed, groups)
    rows = rows_of(table, g, n, padding)
    q = int(bind_reference(rows, table.ints, table.log, table.page_tables, PAGE, None, None).q_len.sum())
    step = bind_reference(rows, table.ints, table.log, table.page_tables, PAGE, q + 3, n + padding + 2 * q)
    return table, step, g


def equal(got: RaggedStep, want: RaggedStep) -> None:
    for name in ("slots", "q_len", "cu_q", "base", "kv_len", "positions", "rows"):
        assert getattr(got, name).tolist() == getattr(want, name).tolist(), name
    for mine, theirs in zip(got.cells, want.cells, strict=True):
        assert mine.tolist() == theirs.tolist()


@pytest.mark.parametrize("seed", range(6))
def test_offer(seed: int) -> None:
    (table, step, g), (other, _, _) = bound(seed, n=11), bound(seed, n=11)
    wanted = torch.randint(0, 6, (SLOTS,), generator=g).int().to(DEVICE)
    table.ints[Int.SPECULATION] = other.ints[Int.SPECULATION] = wanted
    n = len(step.slots)
    ids = torch.randint(0, 99, (n, 5), generator=g).to(DEVICE)
    width = torch.randint(0, 6, (n,), generator=g).int().to(DEVICE)
    want = table.offer_reference(step.slots, Offer(ids, width), step.n_out)
    got = launch_offer(step.slots, step.n_out, ids[:, :5], width, other.ints, other.log)
    assert got.tolist() == want.tolist() and sum(got.tolist()) > 0
    assert torch.equal(other.log[1:], table.log[1:]) and torch.equal(other.ints[:, 1:], table.ints[:, 1:])


@pytest.mark.parametrize("seed", range(4))
def test_seams(seed: int) -> None:
    _, step, g = bound(seed)
    accepted = torch.randint(0, 9, (len(step.slots),), generator=g).to(DEVICE)
    length = step.base + torch.minimum(step.q_len, accepted).int()
    taps = torch.randn(len(step.ids), 24, generator=g).to(DEVICE)[:, :20]
    mine, theirs = (Seams(["a"], SLOTS, 90, PAGE, 20, torch.float32, DEVICE) for _ in range(2))
    theirs.record_reference(step, {"a": taps}, length)
    launch_seam(taps, mine.of_slot["a"], mine.of_page["a"], step.slots, step.cu_q, step.base, step.q_len, length,
                step.positions, step.cells[0], PAGE)
    assert torch.equal(mine.of_slot["a"][1:], theirs.of_slot["a"][1:]) and bool(mine.of_slot["a"].any())
    assert torch.equal(mine.of_page["a"][1:], theirs.of_page["a"][1:]) and bool(mine.of_page["a"].any())


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_streams(seed: int, groups: int, shift: int) -> None:
    """A stream's tables, the items that a step adds to it, and the drafter's own steps after them."""
    table, step, g = bound(seed, groups, n=11)
    stream, most, count = stream_reference(step, shift, CONTEXT), CONTEXT - 2, 3
    for mine, theirs in zip((launch_stream(step.slots, t, PAGE, shift, CONTEXT) for t in step.page_tables),
                            stream.tables, strict=True):
        assert mine.tolist() == theirs.tolist()
    accepted = torch.randint(1, 5, (len(step.slots),), generator=g).to(DEVICE)
    length = (step.base + torch.minimum(step.q_len, accepted)).int()
    stands = torch.maximum(step.base - accepted % 3, torch.zeros_like(step.base)).int()
    want = extension_reference(step, stream, length, stands, most, False, table.log)
    got = launch_extension(stream.owners, step.base, step.q_len, step.cu_q, len(step.ids), length, stands, table.log,
                           stream.page_tables, PAGE, shift, most)
    real = int(want.step.cu_q[-1])
    for name in ("rows", "cell", "ids", "sources"):
        assert getattr(got, name)[:real].tolist() == getattr(want, name)[:real].tolist(), name
    fed = (step.q_len > 0).tolist()
    assert [a for a, f in zip(got.last.tolist(), fed) if f] == [a for a, f in zip(want.last.tolist(), fed) if f]
    for name, mine in (("q_len", got.count), ("cu_q", got.starts), ("base", got.base), ("kv_len", got.kv_len)):
        assert mine.tolist() == getattr(want.step, name).tolist(), name
    assert got.positions[:real].tolist() == want.step.positions[:real].tolist() and real > 3
    assert [c.tolist() for c in got.cells] == [c.tolist() for c in want.step.cells]
    steps = one_by_one_reference(stream, length, count, most)
    ahead = launch_ahead(stream.owners, length, stream.page_tables, PAGE, shift, count, most)
    for i, single in enumerate(steps):
        assert ahead.base[i].tolist() == single.base.tolist() and ahead.kv_len[i].tolist() == single.kv_len.tolist()
        assert ahead.positions[i].tolist() == single.positions.tolist()
        assert [c[i].tolist() for c in ahead.cells] == [c.tolist() for c in single.cells]
    assert ahead.ones.tolist() == steps[0].q_len.tolist() and ahead.starts.tolist() == steps[0].cu_q.tolist()
    assert ahead.rows.tolist() == steps[0].rows.tolist()


@pytest.mark.parametrize(("size", "copies"), [(5, 1), (6, 3), (4, 4)])
@pytest.mark.parametrize("groups", [1, 2])
def test_blocks(size: int, copies: int, groups: int) -> None:
    table, step, g = bound(7, groups, n=11)
    stream = stream_of(step, 0, 0)
    length = torch.randint(0, CONTEXT, (len(step.slots),), generator=g).int().to(DEVICE)
    want = blocks_reference(stream, length, table.log, size, copies, CONTEXT - 1, 17)
    got = launch_block(stream.owners, length, table.log, stream.page_tables, PAGE, size, copies, CONTEXT - 1, 17)
    assert got.ids.tolist() == want.ids.tolist()
    causal, whole = want.causal, want.whole
    for mine, theirs in (
            (got.counts, causal.q_len), (got.starts, causal.cu_q), (got.base, causal.base), (got.rows, causal.rows),
            (got.kv_len, causal.kv_len), (got.positions, causal.positions), (got.wide_owners, whole.slots),
            (got.wide_base, whole.base), (got.wide_kv_len, whole.kv_len), (got.wide_positions, whole.positions),
            (got.ones, whole.q_len), (got.wide_starts, whole.cu_q)):
        assert mine.tolist() == theirs.tolist()
    assert [c.tolist() for c in got.cells] == [c.tolist() for c in causal.cells]
