"""The one verification stage: processors and sampling at every sampled position of every row, drafted or not.

A plain decoded token is a window without drafts. Which parts run is decided from what the rows' requests ask for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stretto.device.slots import SlotTable
from stretto.ragged import RaggedStep
from stretto.sample.features import Features
from stretto.sample.processors import Positions, add_bias, forbid_stops, penalise
from stretto.sample.sampler import greedy, sample_all, sample_filtered
from stretto.wire import Int


def sampled_positions(step: RaggedStep, table: SlotTable) -> Positions:
    """The log position that each logit row samples: known, known + 1, ... of its row."""
    slots = step.slots[step.out_rows]
    offset = torch.arange(len(step.out_rows), device=slots.device) - step.cu_out[step.out_rows]
    return Positions(slots, table.known[slots] + offset, table.ints, table.reals)


def process(logits: torch.Tensor, where: Positions, table: SlotTable, rows: Sequence[Features]) -> torch.Tensor:
    """logits [L, V] float32; returns them processed (a copy where anything changes)."""
    biased, forbidding = any(f.biased for f in rows), any(f.min_tokens for f in rows)
    penalised = any(f.penalised for f in rows)
    if not (biased or forbidding or penalised):
        return logits
    logits = logits.clone()
    if biased:
        add_bias(logits, where, table.bias_ids, table.bias_values)
    if forbidding:
        forbid_stops(logits, where, table.stops)
    if penalised:
        penalise(logits, where, table.log)
    return logits


def sample(logits: torch.Tensor, where: Positions, rows: Sequence[Features], out_rows: torch.Tensor) -> torch.Tensor:
    """One id a logit row. logits [L, V], processed; out_rows [L], the row of each. Returns [L] int64."""
    if not any(f.sampled for f in rows):
        return greedy(logits)
    kinds = torch.tensor([f.sampled + f.filtered for f in rows], device=logits.device)[out_rows]
    if logits.device.type == "cpu":
        return _sample_by_kind(logits, where, kinds)
    ids = torch.where(kinds == 0, greedy(logits), sample_all(logits, where))
    if any(f.filtered for f in rows):
        ids = torch.where(kinds == 2, sample_filtered(logits, where), ids)
    return ids


def _sample_by_kind(logits: torch.Tensor, where: Positions, kinds: torch.Tensor) -> torch.Tensor:
    """Where the host can read `kinds` for nothing, each row pays only for its own kind of sampling."""
    ids = torch.empty(len(logits), dtype=torch.int64)
    for kind, draw in enumerate((lambda x, w: greedy(x), sample_all, sample_filtered)):
        index = (kinds == kind).nonzero().flatten()
        if len(index) == len(kinds):
            return draw(logits, where)
        if len(index):
            ids[index] = draw(logits[index], where.take(index))
    return ids


def prompt_targets(step: RaggedStep, table: SlotTable) -> tuple[torch.Tensor, torch.Tensor]:
    """For each packed token at position p: the id that follows it in the row's prompt, [T] int64, and whether its
    logits are wanted for a prompt log-probability (p at or after SCORE_FROM, p + 1 still in the prompt), [T] bool."""
    slots = step.slots[step.rows]
    following = step.positions + 1
    real = torch.arange(len(step.positions), device=slots.device) < step.cu_q[-1]
    wanted = real & (step.positions >= table.ints[Int.SCORE_FROM][slots]) & (following < table.ints[Int.PROMPT][slots])
    ids = table.log[slots, following.clamp(max=table.context - 1)].long()
    return ids.clamp_(min=0), wanted
