"""Sums and joins over ranks: the kernels equal the reference, in Triton's interpreter, one rank after the other. On
GPUs tests/gpu/test_exchange_cuda.py tries them."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from stretto.ops import triton_exchange
from stretto.ops.exchange import Ways, fewer_bytes, side_by_side, total, two_shot_bytes
from tests.ops.exchange_processes import PROGRAMS, base_of_all, files, inputs
from tests.ops.exchange_ranks import KINDS, Ranks, begin_anew, draw, same, wanted

ROOT = Path(__file__).resolve().parents[2]
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the ranks would have to run at the same time")


@interpreted
@pytest.mark.parametrize(("rows", "columns", "dtype"), [
    (1, 4096, torch.float32), (18, 24, torch.float32), (20, 513, torch.float16)])  # the interpreter cuts bfloat16 off
def test_every_exchange_is_that_of_the_reference(monkeypatch: pytest.MonkeyPatch, rows: int, columns: int,
                                                 dtype: torch.dtype) -> None:
    monkeypatch.setattr(triton_exchange, "PROGRAMS", 8)
    ranks = Ranks(2)
    for round in range(3):  # both sets of slots, and the first one again
        x = [draw(rows, columns, dtype, 10 * round + rank) for rank in range(2)]
        base = draw(rows, columns, dtype, 99)
        assert same(ranks.run(x, None), total(x))
        assert same(ranks.run(x, base), total(x, base))
        assert same(ranks.run(x, None, join=True), side_by_side(x))


@interpreted
@pytest.mark.parametrize(("count", "rows", "columns", "dtype"), [
    (3, 1, 5, torch.float32), (4, 3, 4099, torch.float16), (3, 4, 6200, torch.float32)])
def test_two_shots_are_one(monkeypatch: pytest.MonkeyPatch, count: int, rows: int, columns: int, dtype: torch.dtype
                           ) -> None:
    """A part of one rank's only tile; tiles of which the last is cut; several groups a program. Between sums of one
    shot, whose slots they share."""
    monkeypatch.setattr(triton_exchange, "PROGRAMS", 2)
    ranks = Ranks(count)
    for round in range(3):
        x = [draw(rows, columns, dtype, 10 * round + rank) for rank in range(count)]
        base = draw(rows, columns, dtype, 99)
        assert same(ranks.run(x, base, shots=2), total(x, base))
        assert same(ranks.run([part[:1] for part in x], None), total([part[:1] for part in x]))
        assert same(ranks.run(x, None, shots=2), total(x))


@interpreted
@pytest.mark.full
@pytest.mark.timeout(170)
def test_ranks_that_wait_for_each_other_agree(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Three processes, each late at random: one shot, two shots and joins in turn, over the counts' wrap. What is read
    too early, or written over too soon, is another round's."""
    count, rounds = 3, 24
    monkeypatch.setattr(triton_exchange, "PROGRAMS", PROGRAMS)
    begin_anew(Ranks(count, files=files(tmp_path, count)))
    command = [sys.executable, "-m", "tests.ops.exchange_processes", str(tmp_path)]
    processes = [subprocess.Popen([*command, str(rank), str(count), str(rounds)], cwd=ROOT) for rank in range(count)]
    try:
        assert [process.wait(150) for process in processes] == [0] * count
    finally:
        for process in processes:
            process.kill()
    made = [torch.load(tmp_path / f"{rank}.pt") for rank in range(count)]
    for round in range(rounds):
        x = [inputs(round, rank) for rank in range(count)]
        assert same([outs[round] for outs in made], wanted(x, base_of_all(), KINDS[round % 6][1])), f"sum {round}"


def test_two_shots_where_they_send_less_in_the_time_of_a_crossing() -> None:
    assert not any(fewer_bytes(size, 2) for size in (1, 1 << 20, 1 << 30)), "of two ranks the same bytes cross"
    least = {ranks: next(rows for rows in itertools.count(1) if fewer_bytes(rows * 8192, ranks)) for ranks in (3, 4, 8)}
    assert least == {3: 121, 4: 54, 8: 16}
    assert two_shot_bytes(4, 16 << 10) == 4 << 20


def test_two_shots_are_off_until_they_are_asked_for() -> None:
    """In rows of 4096 in 16 bits: how many go in one shot at most, and in two."""
    def most(ways: Ways, shots: int) -> int:
        rows = (1 << i for i in range(14))
        return max((n for n in rows if ways.shots(torch.empty(n, 4096, dtype=torch.bfloat16)) == shots), default=0)
    assert [most(Ways(ranks), 1) for ranks in (2, 3, 4, 8)] == [1024, 128, 128, 64]
    assert not any(most(Ways(ranks), 2) for ranks in (2, 3, 4, 8))
    assert [most(Ways(ranks, two_shots=True), 2) for ranks in (2, 3, 4, 8)] == [0, 256, 512, 1024]
    assert [most(Ways(ranks, two_shots=True), 1) for ranks in (2, 3, 4, 8)] == [1024, 64, 32, 8]


def test_a_rows_sum_does_not_depend_on_its_batch() -> None:
    x, base = [draw(50, 64, torch.bfloat16, rank) for rank in range(3)], draw(50, 64, torch.bfloat16, 7)
    alone = torch.cat([total([part[i : i + 1] for part in x], base[i : i + 1]) for i in range(50)])
    assert torch.equal(total(x, base), alone)
