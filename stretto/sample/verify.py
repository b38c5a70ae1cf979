"""The one verification stage: processors and sampling at every sampled position of every row, drafted or not.

A plain decoded token is a window without drafts. Which parts run is decided from what the rows' requests ask for.
"""

from __future__ import annotations

from functools import cached_property

import torch

from stretto.device.slots import SlotTable
from stretto.ops.fixed import by_rows
from stretto.ragged import RaggedStep
from stretto.sample.features import StepShape
from stretto.sample.processors import (
    Positions,
    TokenMasks,
    add_bias,
    apply_masks,
    forbid_stops,
    forbid_words,
    keep_allowed,
    penalise,
)
from stretto.sample.rejection import verify
from stretto.sample.sampler import greedy, greedy_or_sampled, sample_all, sample_filtered
from stretto.wire import Int, Real


class StepPositions(Positions):
    """The log position that each logit row samples: known, known + 1, ... of its row. Found when first asked for, which
    a greedy step never does."""

    def __init__(self, step: RaggedStep, table: SlotTable):
        self.step, self.table, self.ints, self.reals = step, table, table.ints, table.reals

    @cached_property
    def slots(self) -> torch.Tensor:  # type: ignore[override]
        return self.step.slots[self.step.out_rows]

    @cached_property
    def at(self) -> torch.Tensor:  # type: ignore[override]
        rows = self.step.out_rows
        return self.table.known[self.slots] + torch.arange(len(rows), device=rows.device) - self.step.cu_out[rows]

    @property
    def used(self) -> torch.Tensor | None:
        rows = self.step.out_rows
        return torch.arange(len(rows), device=rows.device) < self.step.cu_out[-1] if rows.is_cuda else None


def sampled_positions(step: RaggedStep, table: SlotTable) -> Positions:
    """Where each logit row samples; before the step is committed."""
    return StepPositions(step, table)


def mask(logits: torch.Tensor, step: RaggedStep, masks: TokenMasks) -> torch.Tensor:
    """logits [L, V], processed; a copy in which every position samples what its grammar allows."""
    rows = step.out_rows
    offsets = torch.arange(len(rows), device=rows.device) - step.cu_out[rows]
    logits = logits.clone()
    apply_masks(logits, rows, offsets, masks)
    return logits


def process(logits: torch.Tensor, where: Positions, table: SlotTable, shape: StepShape,
            proposing: bool = False) -> torch.Tensor:
    """logits [L, V] float32; returns them processed (a copy where anything changes). `proposing`: of a drafter."""
    if not (shape.biased or shape.restricted or shape.min_tokens or shape.penalised or shape.processors):
        return logits
    logits = logits.clone()
    if shape.biased:
        add_bias(logits, where, table.bias_ids, table.bias_values)
    if shape.restricted and table.bad_words.shape[1]:
        forbid_words(logits, where, table.log, table.bad_words)
    if shape.min_tokens:
        forbid_stops(logits, where, table.stops)
    if shape.penalised:
        penalise(logits, where, table.log)
    if shape.processors:
        logits = table.custom.apply(logits, where, table.log, shape.processors, proposing)
    if shape.restricted and table.allowed.shape[1]:
        keep_allowed(logits, where, table.allowed, table.restricted)
    return logits


def sample(logits: torch.Tensor, where: Positions, shape: StepShape) -> torch.Tensor:
    """One id a logit row. logits [L, V], processed. Returns [L] int64."""
    if not shape.sampled:
        return greedy(logits)
    if shape.fixed:
        places = torch.arange(len(logits), device=logits.device)
        return by_rows(lambda part, index: _drawn(part, where.take(index), shape), logits, places)
    return _drawn(logits, where, shape)


def _drawn(logits: torch.Tensor, where: Positions, shape: StepShape) -> torch.Tensor:
    kinds = _kinds(where)
    if logits.device.type == "cpu":
        return _sample_by_kind(logits, where, kinds)
    ids = greedy_or_sampled(logits, where)
    if shape.filtered:
        ids = torch.where(kinds == 2, sample_filtered(logits, where), ids)
    return ids


def choose(logits: torch.Tensor, where: Positions, step: RaggedStep, table: SlotTable,
           shape: StepShape) -> torch.Tensor:
    """The id of each logit row, [L] int64; a draft that equals its position's id is accepted. logits as in `sample`."""
    sampled = sample(logits, where, shape)
    if table.proposals is None or not shape.sampled or shape.width == 1:
        return sampled
    return verify(logits, sampled, where, step, table.log, table.proposals, shape.filtered)


def _kinds(where: Positions) -> torch.Tensor:
    """0 greedy, 1 sampled, 2 sampled from what top-k, top-p or min-p leave; [L]."""
    sampled = where.real(Real.TEMPERATURE) > 0
    filtered = (where.int(Int.TOP_K) > 0) | (where.real(Real.TOP_P) < 1) | (where.real(Real.MIN_P) > 0)
    return sampled.to(torch.int8) + (sampled & filtered).to(torch.int8)


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
