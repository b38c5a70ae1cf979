"""The ends of a step on CPUs (step.cpp): the launches behind `ops.bind`, `ops.commit` and `SlotTable.commit`."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch

from stretto.ops.native.layer import ADDRESS, SIZE
from stretto.ops.native.library import function, library
from stretto.ops.outcome import Commit
from stretto.ragged import RaggedStep

NAME = "step"


class _Table(ctypes.Structure):
    _fields_ = [("ints", ADDRESS), ("slots", SIZE), ("log", ADDRESS), ("context", SIZE)]


class _Bound(ctypes.Structure):
    _fields_ = [(name, ADDRESS) for name in ("slots", "q_len", "base", "kv_len", "n_out", "cu_q", "cu_out")]


class _Judged(ctypes.Structure):
    _fields_ = [(name, ADDRESS) for name in ("live", "done", "ids", "n_new", "accepted", "known", "length", "ndraft")]


@functools.cache
def there() -> bool:
    """Whether this machine has these kernels; if not, `library.trouble` says why."""
    return library(NAME) is not None


def takes(ints: torch.Tensor, log: torch.Tensor) -> bool:
    """Whether there are kernels for a slot table of these columns and this log."""
    return ints.device.type == "cpu" and ints.is_contiguous() and log.is_contiguous() and there()


def launch_bind(rows: torch.Tensor, ints: torch.Tensor, log: torch.Tensor, page_tables: tuple[torch.Tensor, ...],
                page_size: int) -> RaggedStep:
    """As `bind.bind`, of as many tokens as there are. The page tables have one layout."""
    assert rows.dtype is ints.dtype is log.dtype is torch.int32
    rows, n = rows.contiguous(), len(rows)
    slots, (q_len, base, kv_len, n_out) = torch.empty(n, dtype=torch.int64), _columns(4, n)
    cu_q, cu_out = _columns(2, n + 1)
    table = _table(ints, log)
    bound = _Bound(*(t.data_ptr() for t in (slots, q_len, base, kv_len, n_out, cu_q, cu_out)))
    _row_lengths()(ctypes.addressof(table), rows.data_ptr(), n, ctypes.addressof(bound))
    ids, positions, token_rows, *cells = torch.empty(3 + len(page_tables), int(cu_q[-1]), dtype=torch.int64).unbind(0)
    out_tokens, out_rows = torch.empty(2, int(cu_out[-1]), dtype=torch.int64).unbind(0)
    pages = (ADDRESS * len(page_tables))(*(t.data_ptr() for t in page_tables))
    _spread_rows()(ctypes.addressof(table), ctypes.addressof(bound), n, len(page_tables), ctypes.addressof(pages),
                   page_tables[0].stride(0), page_size, ids.data_ptr(), positions.data_ptr(), token_rows.data_ptr(),
                   cells[0].data_ptr(), out_tokens.data_ptr(), out_rows.data_ptr())
    return RaggedStep(slots=slots, q_len=q_len, cu_q=cu_q, base=base, kv_len=kv_len, n_out=n_out, cu_out=cu_out,
                      ids=ids, positions=positions, rows=token_rows, cells=tuple(cells), out_tokens=out_tokens,
                      out_rows=out_rows, page_tables=page_tables, page_size=page_size)


def launch_judge(step: RaggedStep, sampled: torch.Tensor, ints: torch.Tensor, log: torch.Tensor, stops: torch.Tensor,
                 width: int) -> Commit:
    """As `commit.judge`."""
    n = len(step.slots)
    assert sampled.dtype is torch.int64 and stops.dtype is torch.int32 and stops.is_contiguous()
    live, done = torch.empty(2, n, dtype=torch.bool).unbind(0)
    n_new, accepted, known, length, ndraft = _columns(5, n)
    made = Commit(live=live, ids=torch.empty(n, width, dtype=torch.int64), n_new=n_new, accepted=accepted, known=known,
                  length=length, ndraft=ndraft, done=done)
    table, judged, sampled = _table(ints, log), _judged(made), sampled.contiguous()
    bound = _Bound(*(t.data_ptr() for t in (step.slots, step.q_len, step.base, step.kv_len, step.n_out, step.cu_q,
                                            step.cu_out)))
    _judge()(ctypes.addressof(table), ctypes.addressof(bound), n, sampled.data_ptr(), stops.data_ptr(), stops.shape[1],
             width, ctypes.addressof(judged))
    return made


def launch_commit(slots: torch.Tensor, outcome: Commit, ints: torch.Tensor, log: torch.Tensor) -> None:
    """As `SlotTable.commit`; rows that fed nothing write nothing. slots [R] int64."""
    table, judged = _table(ints, log), _judged(outcome)
    _commit()(ctypes.addressof(table), slots.data_ptr(), len(slots), outcome.ids.shape[1], ctypes.addressof(judged))


def _columns(count: int, size: int) -> tuple[torch.Tensor, ...]:
    return torch.empty(count, size, dtype=torch.int32).unbind(0)


def _table(ints: torch.Tensor, log: torch.Tensor) -> _Table:
    return _Table(ints.data_ptr(), ints.shape[1], log.data_ptr(), log.shape[1])


def _judged(c: Commit) -> _Judged:
    return _Judged(*(t.data_ptr() for t in (c.live, c.done, c.ids, c.n_new, c.accepted, c.known, c.length, c.ndraft)))


@functools.cache
def _row_lengths() -> Callable[..., None]:
    return function(NAME, "row_lengths", ADDRESS, ADDRESS, SIZE, ADDRESS)


@functools.cache
def _spread_rows() -> Callable[..., None]:
    return function(NAME, "spread_rows", ADDRESS, ADDRESS, SIZE, SIZE, ADDRESS, SIZE, SIZE, *[ADDRESS] * 6)


@functools.cache
def _judge() -> Callable[..., None]:
    return function(NAME, "judge_rows", ADDRESS, ADDRESS, SIZE, ADDRESS, ADDRESS, SIZE, SIZE, ADDRESS)


@functools.cache
def _commit() -> Callable[..., None]:
    return function(NAME, "commit_rows", ADDRESS, ADDRESS, SIZE, SIZE, ADDRESS)
