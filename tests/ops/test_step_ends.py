"""Bind, the greedy choice, judge, commit and pack: the kernels equal their references on random tables, bit for bit."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from stretto.device.record import pack_rows_reference
from stretto.device.slots import SlotTable
from stretto.ops.bind import bind_reference
from stretto.ops.commit import Commit, judge_reference
from stretto.ops.native import step as native
from stretto.ops.triton_step import (
    launch_argmax,
    launch_bind,
    launch_commit,
    launch_draw,
    launch_judge,
    launch_pack,
)
from stretto.ragged import RaggedStep
from stretto.sample.processors import Positions
from stretto.sample.sampler import sample_all
from stretto.wire import Goal, Int, Real

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CONTEXT, SLOTS, WIDTH = 40, 12, 5


def table_of(seed: int, groups: int) -> tuple[SlotTable, torch.Generator]:
    """Slots in every state: chunks, decoding, with drafts, done, of another epoch, score rows, near their limit."""
    g = torch.Generator().manual_seed(seed)

    def draw(low, high, *shape):
        return torch.randint(low, high, shape or (SLOTS,), generator=g, dtype=torch.int32)
    table = SlotTable(SLOTS, CONTEXT, 4, groups, torch.device("cpu"))
    known = draw(1, 25)
    generating = torch.rand(SLOTS, generator=g) < 0.7
    table.ints[Int.KNOWN], table.ints[Int.EPOCH] = known, draw(1, 3)
    table.ints[Int.LEN] = torch.where(torch.rand(SLOTS, generator=g) < 0.6, known - 1, (known * 0.4).int())
    drafting = (table.ints[Int.LEN] == known - 1) & (torch.rand(SLOTS, generator=g) < 0.6)
    table.ints[Int.NDRAFT] = torch.where(drafting, draw(0, WIDTH), 0)
    table.ints[Int.LIMIT] = torch.minimum(known + table.ints[Int.NDRAFT] + draw(1, 6), torch.tensor(CONTEXT))
    table.ints[Int.GOAL] = torch.where(generating, int(Goal.GENERATE), int(Goal.SCORE)).int()
    table.ints[Int.DONE] = (torch.rand(SLOTS, generator=g) < 0.2).int()
    table.ints[Int.DONE, 0], table.ints[Int.EPOCH, 0] = 1, -1
    table.log.copy_(draw(0, 6, SLOTS, CONTEXT))
    table.stops[:, :2] = draw(0, 6, SLOTS, 2)
    table.tables.copy_(draw(1, 90, *table.tables.shape))
    for name in ("ints", "log", "stops", "tables"):
        setattr(table, name, getattr(table, name).to(DEVICE))
    table.page_tables = table.tables.unbind(0)
    return table, g


def rows_of(table: SlotTable, g: torch.Generator, n: int, padding: int) -> torch.Tensor:
    slots = torch.randperm(SLOTS - 1, generator=g)[:n].int() + 1
    epochs = torch.where(torch.rand(n, generator=g) < 0.8, table.ints[Int.EPOCH].cpu()[slots.long()], 7)
    caps = torch.randint(0, 9, (n,), generator=g, dtype=torch.int32)
    rows = torch.stack([slots, epochs.int(), caps], 1)
    return torch.cat([rows, torch.zeros(padding, 3, dtype=torch.int32)]).to(DEVICE)


def same(got: object, want: object) -> None:
    for f in dataclasses.fields(want):  # type: ignore[arg-type]
        a, b = getattr(got, f.name), getattr(want, f.name)
        if isinstance(b, tuple):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True)), f.name
        elif isinstance(b, torch.Tensor):
            assert torch.equal(a, b), (f.name, a, b)
        else:
            assert a == b, f.name


def needed_of(table: SlotTable, step: RaggedStep) -> int:
    """Tokens of a step without any drafts."""
    return int(torch.minimum(step.q_len, table.known[step.slots] - step.base).clamp(min=0).sum())


@pytest.mark.parametrize("seed", range(6))
def test_what_is_pending_fits_always_and_drafts_of_earlier_rows_first(seed):
    table, g = table_of(seed, 1)
    table.ints[Int.NDRAFT] *= table.ints[Int.GOAL] == int(Goal.GENERATE)  # others have no drafts
    rows = rows_of(table, g, 11, 2)
    whole = bind_reference(rows, table.ints, table.log, table.page_tables, 4)
    needed, sampling = needed_of(table, whole), int((whole.n_out > 0).sum())
    for room in range(int(whole.cu_q[-1]) - needed + 1):
        step = bind_reference(rows, table.ints, table.log, table.page_tables, 4, needed + room, sampling + room)
        kept, waiting = step.q_len - (whole.q_len - (whole.n_out - 1).clamp(min=0)), whole.q_len - step.q_len
        assert int(step.cu_q[-1]) == needed + room and int(step.cu_out[-1]) == sampling + room
        assert torch.equal(whole.n_out - step.n_out, waiting) and torch.equal(step.n_out > 0, whole.n_out > 0)
        first = int(waiting.ne(0).int().argmax()) if bool(waiting.any()) else len(waiting)
        assert not waiting[:first].any() and not kept[first + 1 :].any()
    fewer = bind_reference(rows, table.ints, table.log, table.page_tables, 4, int(whole.cu_q[-1]), sampling)
    assert int(fewer.cu_out[-1]) == sampling and int(fewer.cu_q[-1]) == needed  # each draft needs logits, too


@pytest.mark.parametrize(("n", "padding", "groups"), [(1, 0, 1), (7, 0, 2), (11, 5, 1)])
@pytest.mark.parametrize("seed", range(4))
def test_a_step_from_end_to_end(seed, n, padding, groups):
    table, g = table_of(seed, groups)
    rows = rows_of(table, g, n, padding)
    sizes = bind_reference(rows, table.ints, table.log, table.page_tables, 4)
    bucket = sizes.cu_q[-1].item() + 3, sizes.cu_out[-1].item() + 2
    step = launch_bind(rows, table.ints, table.log, table.page_tables, 4, *bucket)
    same(step, bind_reference(rows, table.ints, table.log, table.page_tables, 4, *bucket))

    sampling = int((sizes.n_out > 0).sum())  # the smaller step has room for fewer drafts
    smaller = max(needed_of(table, sizes), bucket[0] - 5), max(sampling, bucket[1] - 5)
    cut = launch_bind(rows, table.ints, table.log, table.page_tables, 4, *smaller)
    same(cut, bind_reference(rows, table.ints, table.log, table.page_tables, 4, *smaller))

    # half of the drafts are what is sampled
    sampled = torch.randint(0, 6, (bucket[1],), generator=g).to(DEVICE)
    at = table.known[step.slots[step.out_rows]] + torch.arange(bucket[1], device=DEVICE) - step.cu_out[step.out_rows]
    drafted = table.log[step.slots[step.out_rows], at.clamp(0, CONTEXT - 1)].long()
    sampled = torch.where((torch.rand(bucket[1], generator=g) < 0.7).to(DEVICE), drafted, sampled)
    width = max(int(step.n_out.max()), 1)
    outcome = launch_judge(step, sampled, table.ints, table.log, table.stops, width)
    same(outcome, judge_reference(step, sampled, table.ints, table.log, table.stops, width))

    offered = torch.randint(0, 99, (n + padding, 3), generator=g).to(DEVICE)
    offer_width, wants = torch.full((n + padding,), 2, dtype=torch.int32), torch.full((n + padding,), 5)
    for offers in (offered, offered[:, :0]):
        given = step, rows, outcome, offers, offer_width.to(DEVICE), wants.int().to(DEVICE)
        assert torch.equal(launch_pack(*given), pack_rows_reference(*given))
    _commit_equals_reference(table, step.slots, outcome)


def _commit_equals_reference(table: SlotTable, slots: torch.Tensor, outcome: Commit) -> None:
    """All but the row of slot 0, where the reference drops what is masked."""
    ints, log = table.ints.clone(), table.log.clone()
    launch_commit(slots, outcome, ints, log)
    on_cpu = SlotTable(SLOTS, CONTEXT, 4, 1, torch.device("cpu"))
    on_cpu.ints.copy_(table.ints)
    on_cpu.log.copy_(table.log)
    found = {f.name: getattr(outcome, f.name).cpu() for f in dataclasses.fields(Commit)}
    on_cpu.commit_reference(slots.cpu(), Commit(**found))
    assert torch.equal(ints.cpu()[:, 1:], on_cpu.ints[:, 1:]) and torch.equal(log.cpu()[1:], on_cpu.log[1:])
    assert ints[Int.DONE, 0] == 1


@pytest.mark.parametrize("vocab", [5, 4096, 9001])
def test_argmax_takes_the_lowest_of_equal_maxima(vocab):
    g = torch.Generator().manual_seed(0)
    logits = torch.randint(-3, 3, (4, vocab), generator=g).float()
    logits[1] = -float("inf")
    logits[2, vocab // 2] = float("nan")
    logits[3, -1] = 50.0
    assert launch_argmax(logits.to(DEVICE)).tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("vocab", [7, 5000])
def test_draws_are_the_references(vocab):
    table, g = table_of(0, 1)
    table.ints[Int.SEED_LOW] = torch.randint(-(2**31), 2**31 - 1, (SLOTS,), generator=g).int()
    table.ints[Int.SEED_HIGH] = torch.randint(-(2**31), 2**31 - 1, (SLOTS,), generator=g).int()
    table.ints[Int.CHOICE] = torch.arange(SLOTS).int()
    table.reals[Real.TEMPERATURE] = torch.tensor([0.0, 0.7, 1.0, 30.0] * 3)
    slots, at = torch.arange(SLOTS), torch.randint(0, 99, (SLOTS,), generator=g)
    logits = torch.randn(SLOTS, vocab, generator=g) * 3
    logits[3, 1::2] = -float("inf")
    where = Positions(slots, at, table.ints.cpu(), table.reals.cpu())
    want = torch.where(where.real(Real.TEMPERATURE) > 0, sample_all(logits, where), logits.argmax(-1))
    got = launch_draw(logits.to(DEVICE), slots.to(DEVICE), at.to(DEVICE), table.ints.to(DEVICE),
                      table.reals.to(DEVICE), 0)
    assert got.tolist() == want.tolist() and len(set(want.tolist())) > 3


@pytest.mark.skipif(not native.there(), reason="no C++ compiler")
@pytest.mark.parametrize(("n", "groups"), [(1, 1), (7, 2), (11, 1)])
@pytest.mark.parametrize("seed", range(6))
def test_the_native_kernels_from_end_to_end(seed, n, groups):
    """Bit for bit, over the same tables; padded rows are those of slot 0."""
    table, g = table_of(seed, groups)
    ints, log, stops = table.ints.cpu(), table.log.cpu(), table.stops.cpu()
    pages, rows = tuple(t.cpu() for t in table.page_tables), rows_of(table, g, n, 2).cpu()
    step = native.launch_bind(rows, ints, log, pages, 4)
    same(step, bind_reference(rows, ints, log, pages, 4))
    count = int(step.cu_out[-1])
    at = ints[Int.KNOWN, step.slots[step.out_rows]] + torch.arange(count) - step.cu_out[step.out_rows]
    drafted = log[step.slots[step.out_rows], at.long().clamp(0, CONTEXT - 1)].long()
    sampled = torch.where(torch.rand(count, generator=g) < 0.7, drafted, torch.randint(0, 6, (count,), generator=g))
    width = max(int(step.n_out.max()), 1)
    outcome = native.launch_judge(step, sampled, ints, log, stops, width)
    same(outcome, judge_reference(step, sampled, ints, log, stops, width))
    mine = ints.clone(), log.clone()
    native.launch_commit(step.slots, outcome, *mine)
    on_cpu = SlotTable(SLOTS, CONTEXT, 4, 1, torch.device("cpu"))
    on_cpu.ints.copy_(ints)
    on_cpu.log.copy_(log)
    on_cpu.commit_reference(step.slots, outcome)
    assert torch.equal(mine[0][:, 1:], on_cpu.ints[:, 1:]) and torch.equal(mine[1][1:], on_cpu.log[1:])
    assert mine[0][Int.DONE, 0] == 1
