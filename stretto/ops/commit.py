"""From sampled ids to what a step proved: accepted runs, stops, limits, lengths.

The id sampled at a position is a function of logits, seed and position; a draft is accepted iff it equals that id. A
row emits its accepted run and one id more, cut at the first stop id:

    window    known ...                              sampled   t0 t1 t2 t3
    drafts    d0 d1 d2        d0 = t0, d1 = t1, d2 != t2   ->   emitted t0 t1 t2
"""

from __future__ import annotations

import torch

from stretto.ops.native import step as native
from stretto.ops.outcome import Commit
from stretto.ragged import RaggedStep
from stretto.wire import Goal, Int

__all__ = ["Commit", "judge", "judge_reference"]


def judge(step: RaggedStep, sampled: torch.Tensor, ints: torch.Tensor, log: torch.Tensor, stops: torch.Tensor,
          width: int) -> Commit:
    """sampled [L] int64, aligned with the step's logit rows; `width` is at least the largest n_out of the step. One
    launch on CUDA, one call of a native kernel on a CPU that has them."""
    if sampled.is_cuda and len(sampled):
        from stretto.ops.triton_step import launch_judge

        return launch_judge(step, sampled, ints, log, stops, width)
    if native.takes(ints, log):
        return native.launch_judge(step, sampled, ints, log, stops, width)
    return judge_reference(step, sampled, ints, log, stops, width)


def judge_reference(step: RaggedStep, sampled: torch.Tensor, ints: torch.Tensor, log: torch.Tensor,
                    stops: torch.Tensor, width: int) -> Commit:
    """`judge` in torch's operations."""
    device, slots = sampled.device, step.slots
    column = ints[:, slots]
    known, n_out = column[Int.KNOWN], step.n_out
    offsets = torch.arange(width, device=device)
    in_window = offsets < n_out[:, None]
    at = (step.cu_out[:-1, None] + offsets).clamp_(max=max(len(sampled) - 1, 0))
    ids = torch.where(in_window, sampled[at], -1) if len(sampled) else torch.full(at.shape, -1, device=device)
    run = _accepted_run(ids, known, n_out, slots, log, offsets)
    n_new = torch.where(n_out > 0, run + 1, 0).to(torch.int32)
    n_new, stopped = _cut_at_stop(ids, n_new, stops[slots], offsets)
    new_known = known + n_new
    length = torch.where(n_out > 0, new_known - 1, step.base + step.q_len)
    scored_all = (column[Int.GOAL] != Goal.GENERATE) & (length == known)
    done = torch.where(n_out > 0, stopped | (new_known >= column[Int.LIMIT]), scored_all)
    return Commit(live=step.q_len > 0, ids=ids, n_new=n_new, accepted=(n_new - 1).clamp(min=0),
                  known=new_known, length=length, ndraft=torch.where(n_out > 0, 0, column[Int.NDRAFT]), done=done)


def _accepted_run(ids: torch.Tensor, known: torch.Tensor, n_out: torch.Tensor, slots: torch.Tensor, log: torch.Tensor,
                  offsets: torch.Tensor) -> torch.Tensor:
    """Length of the leading run of drafts that equal the ids sampled at their positions, [R] int32."""
    columns = (known[:, None] + offsets).clamp_(max=log.shape[1] - 1)
    drafts = log[slots[:, None], columns]
    agree = (ids == drafts) & (offsets < n_out[:, None] - 1)
    return agree.to(torch.int32).cumprod(1).sum(1, dtype=torch.int32)


def _cut_at_stop(ids: torch.Tensor, n_new: torch.Tensor, stops: torch.Tensor,
                 offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cuts after the first stop id among the emitted ones. Returns the counts and whether a row was stopped."""
    is_stop = (ids[:, :, None] == stops[:, None, :]).any(-1) & (offsets < n_new[:, None])
    stopped = is_stop.any(1)
    first = is_stop.to(torch.int8).argmax(1).to(torch.int32)
    return torch.where(stopped, first + 1, n_new), stopped
