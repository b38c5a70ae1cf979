"""The device half of one step: apply, bind, forward, verify, commit, draft, record (DESIGN section 5, lines 4-11).

    plan N (packed)  ->  apply ops -> bind -> model -> verify -> commit -> ingest, propose -> pack  ->  result N
                                      `------------- `Runner.run`: one graph on CUDA -------------'
                                      `-- first --'    `---------------- second -----------------'
                         `------------------- one stream, in order; no host wait -------------------'

A plan with a late mask is run in two parts, `begin` and `end`: the mask is made while the first one runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from stretto.attn.api import AttentionBackend
from stretto.device.drafting import Drafting
from stretto.device.host_pages import HostPages
from stretto.device.kv import KVCache, Pages
from stretto.device.record import StepOutput, pack_body, pack_rows
from stretto.device.slots import SlotTable
from stretto.device.states import make_states
from stretto.model.api import CausalModel
from stretto.model.lora import AdapterBank
from stretto.ops.attend import StepAttention
from stretto.ops.bind import bind
from stretto.ops.commit import judge
from stretto.ops.pool import last_states, row_sums
from stretto.ragged import RaggedStep
from stretto.sample.features import SHORT, FeatureMirror, StepShape, step_shape
from stretto.sample.logprobs import Reporting, token_scores, values_to_report
from stretto.sample.processors import Positions, TokenMasks
from stretto.sample.verify import choose, mask, process, prompt_targets, sampled_positions
from stretto.spec.api import Drafter
from stretto.spec.plugin import faults_of
from stretto.wire import (
    HEADER,
    MASK_HEADER,
    NOTHING_LEFT,
    Goal,
    Int,
    PackedPlan,
    ResultLayout,
    split_mask,
    split_plan,
    state_cells,
)

SCORE_SLICE = 128  # prompt positions whose logits exist at one time


class Executor(Protocol):
    """Runs `Runner.run` for a shape, in whatever way: at once, or as a captured graph."""

    def __call__(self, rows: torch.Tensor, shape: StepShape) -> tuple[torch.Tensor, StepShape]:
        """rows [R, 3] int32 on the device. Returns the body and the shape that it was run with (a bucket may be larger
        than what was asked for)."""
        ...


@dataclass(frozen=True)
class Forward:
    """What the first part of a step leaves to the second."""

    step: RaggedStep
    hidden: torch.Tensor  # [T, hidden_size]
    taps: dict[str, torch.Tensor]
    logits: torch.Tensor  # [L, V]


Finish = Callable[[TokenMasks | None], torch.Tensor]
"""The second part of a step, with its masks; returns the body."""


@dataclass(frozen=True)
class HalfStep:
    """A step whose forward pass is launched and which waits for its mask."""

    seq: int
    shape: StepShape
    finish: Finish
    slots: list[int]  # of its rows


class Halver(Protocol):
    """Launches the first part of a step, in whatever way."""

    def __call__(self, rows: torch.Tensor, shape: StepShape) -> tuple[StepShape, Finish]:
        """As `Executor`; the second part runs when `Finish` is called, before any other step."""
        ...


class Runner:
    """Runs packed plans in order. Owns slot table, KV memory, model and drafter of one device."""

    def __init__(self, model: CausalModel, backend: AttentionBackend, kv: KVCache, table: SlotTable,
                 drafter: Drafter | None = None, width: int = 0):
        """`width`: most drafts of a row in a step; at least the drafter's."""
        self.model, self.backend, self.kv, self.table = model, backend, kv, table
        cells = state_cells(width)
        self.states = make_states(model, kv, len(table.log), cells)
        self.drafting = Drafting(model, backend, kv, table, cells if self.states else 0)
        self.pages = Pages(kv, self.drafting, *([self.states] if self.states else []))
        self.adopt(drafter)
        self.features = FeatureMirror()
        self.adapters: AdapterBank | None = None  # the model's, where it has room for some
        self.exact, self.fixed = model.device.type == "cpu", getattr(model, "fixed", False)
        self.reporting = Reporting()
        self.execute: Executor = self.run_now
        self.halve: Halver = self.halve_now

    def adopt(self, drafter: Drafter | None) -> None:
        """From now on this drafter proposes. Before the first step: one with memory of its own must see every row."""
        self.drafter, self.tap_names = drafter, sorted(drafter.caps.taps) if drafter else []
        if drafter is not None:
            self.drafting.adopt(drafter)

    def counts(self) -> dict[str, float]:
        """What goes wrong without a step going wrong."""
        faults = faults_of(self.drafter)
        return {"drafter_faults": float(faults)} if faults else {}

    def keep_on_host(self, counts: Sequence[int]) -> HostPages:
        """Host memory for so many pages of each group. After `adopt`: what a drafter keeps beside pages travels too."""
        tensors = [self.pages.page_tensors(group) for group in range(len(counts))]
        self.pages.host = HostPages(tensors, counts, self.model.device)
        return self.pages.host

    def step(self, packed: np.ndarray) -> StepOutput:
        """One step without a late mask. Its body is on the device; nothing waits for it here."""
        output = self.begin(packed)
        assert isinstance(output, StepOutput), "a step with a late mask needs `begin` and `end`"
        return output

    @torch.inference_mode()
    def begin(self, packed: np.ndarray) -> StepOutput | HalfStep:
        """Starts a step: the whole of it, or all that comes before sampling where the plan waits for a mask."""
        on_host = split_plan(packed[:HEADER], packed)
        self._before(on_host)
        on_device = torch.from_numpy(packed).to(self.model.device, non_blocking=True)
        plan: PackedPlan[torch.Tensor] = split_plan(packed[:HEADER], on_device)
        self.table.apply(plan, on_host, self.pages)
        if self.states is not None and len(plan.seats):
            self.states.seat(plan.seats[:, 0].long(), self.table.ints)
        self.drafting.seat(plan.seats)
        if not len(plan.rows):
            return StepOutput(ResultLayout(0, 1, 0).header(plan.seq), on_device[:0])
        slots = on_host.rows[:, 0].tolist()
        rows = self.features.of_rows(slots)
        asked = step_shape(on_host.rows[:, 2].tolist(), rows, plan.draft_width if self.drafter else 0, self.exact,
                           plan.late_mask, plan.tokens)
        if self.fixed:
            asked = replace(asked, fixed=True)
        if plan.late_mask:
            return HalfStep(plan.seq, *self.halve(plan.rows, asked), slots)
        body, shape = self.execute(plan.rows, asked)
        return self._output(plan.seq, shape, body, slots)

    @torch.inference_mode()
    def end(self, half: HalfStep, packed: np.ndarray) -> StepOutput:
        """The rest of a step, with its packed mask (on the host, pinned where that matters)."""
        on_device = torch.from_numpy(packed).to(self.model.device, non_blocking=True)
        index, bits = split_mask(packed[:MASK_HEADER], on_device)
        body = half.finish(TokenMasks(index, bits) if len(bits) else None)
        return self._output(half.seq, half.shape, body, half.slots)

    def _output(self, seq: int, shape: StepShape, body: torch.Tensor, slots: list[int]) -> StepOutput:
        faults = self.table.custom.take_faults(slots)
        return StepOutput(_layout(shape, len(body), self.model.hidden_size).header(seq), body, tuple(faults))

    def _before(self, on_host: PackedPlan[np.ndarray]) -> None:
        self.features.update(on_host)
        self.table.ask_for(on_host.least)
        if (on_host.seats[:, 4 + Int.GOAL] >= Goal.EMBED).any():
            self.table.widen_sums(self.model.hidden_size)
        if len(on_host.biases):
            self.table.widen_biases(int(on_host.biases[:, 1].max()) + 1)
        if len(on_host.allowed) or len(on_host.bad_words):
            runs, longest = (on_host.bad_words[:, 1:3].max(0) + 1).tolist() if len(on_host.bad_words) else (0, 0)
            self.table.widen_restrictions(self.model.vocab_size if len(on_host.allowed) else 0, runs, longest)

    def halve_now(self, rows: torch.Tensor, shape: StepShape) -> tuple[StepShape, Finish]:
        forward = self.first(rows, shape)
        return shape, lambda masks: self.second(forward, rows, shape, masks)

    def run_now(self, rows: torch.Tensor, shape: StepShape) -> tuple[torch.Tensor, StepShape]:
        return self.run(rows, shape), shape

    def run(self, rows: torch.Tensor, shape: StepShape) -> torch.Tensor:
        """Everything after the operations, tensors in, one tensor out. Decides by `shape` alone, so that equal shapes
        launch the same kernels. rows [R, 3] int32; returns the body of the packed result."""
        return self.second(self.first(rows, shape), rows, shape)

    def first(self, rows: torch.Tensor, shape: StepShape) -> Forward:
        """Binds the step and computes the logits of its sampled positions."""
        table = self.table
        step = bind(rows, table.ints, table.log, table.page_tables, table.page_size, shape.tokens, shape.logits)
        if shape.short:
            step = replace(step, most_tokens=1 if shape.single else SHORT)
        if self.adapters is not None:
            self.adapters.select(table.column(Int.ADAPTER, step.slots)[step.rows] if shape.adapted else None)
        hidden, taps = self._model(step)
        return Forward(step, hidden, taps, self.model.logits(hidden[step.out_tokens]))

    def second(self, forward: Forward, rows: torch.Tensor, shape: StepShape,
               masks: TokenMasks | None = None) -> torch.Tensor:
        """Samples, commits, drafts. Returns the body of the packed result."""
        table, step, hidden, taps, logits = self.table, forward.step, forward.hidden, forward.taps, forward.logits
        where = sampled_positions(step, table)
        processed = process(logits, where, table, shape)
        if masks is not None:
            processed = mask(processed, step, masks)
        sampled = choose(processed, where, step, table, shape)
        outcome = judge(step, sampled, table.ints, table.log, table.stops, shape.width)
        new_scores = self._new_scores(logits, processed, sampled, where, step, shape)
        prompt_scores = self._prompt_scores(hidden, step, shape)
        table.commit(step.slots, outcome)
        offered, offer_width = self._draft(step, taps, shape)
        wants = table.column(Int.LOGPROBS, step.slots) + 1
        if shape.processors:
            wants = wants + (table.custom.dead[step.slots.long()] > 0) * NOTHING_LEFT
        return pack_body(pack_rows(step, rows, outcome, offered, offer_width, wants), new_scores, prompt_scores,
                         self._pooled(hidden, step, shape))

    def _model(self, step: RaggedStep) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Hidden states [T, hidden_size] and the drafter's taps. A step whose rows had all ended feeds nothing."""
        taps = dict.fromkeys(self.tap_names, step.q_len)  # names wanted; the model puts its hidden states there
        if len(step.ids) == 0:
            nothing = torch.zeros(0, self.model.hidden_size, dtype=self.model.dtype, device=step.ids.device)
            return nothing, dict.fromkeys(taps, nothing)
        attend = StepAttention(step, self.model.layers, self.kv, self.backend,
                               self.states.of(step) if self.states is not None else None)
        return self.model.forward(step.ids, step.positions, attend, taps or None), taps

    def _draft(self, step: RaggedStep, taps: dict[str, torch.Tensor],
               shape: StepShape) -> tuple[torch.Tensor, torch.Tensor]:
        """The drafter sees every row of every step, and proposes when asked. Offers [R, width] and their widths [R]."""
        n, width = len(step.slots), shape.draft_width
        nothing = torch.zeros(n, width, dtype=torch.int64, device=step.slots.device)
        if self.drafter is not None:
            self.drafting.choose.begin(step, shape)
            self.drafter.ingest(step, taps)
            self.drafting.ingested(step, taps)
        if self.drafter is None or not width:  # `commit` has left no drafts to rows that sampled
            return nothing, torch.zeros(n, dtype=torch.int32, device=step.slots.device)
        offer = self.drafter.propose(step, self.table, width)
        nothing[:, : offer.ids.shape[1]] = offer.ids
        return nothing, self.table.offer(step.slots, offer, step.n_out)

    def _new_scores(self, logits: torch.Tensor, processed: torch.Tensor, sampled: torch.Tensor, where: Positions,
                    step: RaggedStep, shape: StepShape) -> torch.Tensor | None:
        """Scores of the sampled ids, laid out by (row, offset in the window): [R, W, words]."""
        if shape.alternatives < 0:
            return None
        values = values_to_report(logits, processed, where, shape.filtered, shape.fixed, self.reporting)
        scores = token_scores(values, sampled, shape.alternatives, self.reporting.normalised, shape.fixed)
        out = torch.zeros(len(step.slots), shape.width, scores.shape[1], dtype=torch.int32, device=scores.device)
        if len(scores):
            offsets = torch.arange(shape.width, device=out.device)
            at = (step.cu_out[:-1, None] + offsets).clamp_(max=len(scores) - 1)
            out = torch.where((offsets < step.n_out[:, None])[:, :, None], scores[at], out)
        return out

    def _pooled(self, hidden: torch.Tensor, step: RaggedStep, shape: StepShape) -> torch.Tensor | None:
        """A vector for each row where some row embeds, [R, hidden_size] float32: its own where it embeds and this step
        fed its last token, anything elsewhere."""
        if not shape.pools:
            return None
        sums = self.table.add_sums(step.slots, row_sums(hidden, step))
        means = (sums / step.kv_len.clamp(min=1)[:, None]).float()
        is_mean = self.table.column(Int.GOAL, step.slots) == Goal.EMBED_MEAN
        return torch.where(is_mean[:, None], means, last_states(hidden, step))

    def _prompt_scores(self, hidden: torch.Tensor, step: RaggedStep, shape: StepShape) -> torch.Tensor | None:
        """Scores of prompt tokens, [N, 2 + words]: row (-1: padding), position of the scored token, score. The logits
        exist for a slice of positions at a time, so that a long chunk does not pay for a long head."""
        if not shape.scores_prompt:
            return None
        ids, wanted = prompt_targets(step, self.table)
        tokens = wanted.nonzero().flatten() if self.exact else torch.arange(len(ids), device=ids.device)
        parts = []
        for part in tokens.split(SCORE_SLICE):
            scores = token_scores(self.model.logits(hidden[part]), ids[part], max(shape.alternatives, 0),
                                  self.reporting.normalised, shape.fixed)
            row = torch.where(wanted[part], step.rows[part], -1)
            head = torch.stack([row, step.positions[part] + 1], 1).to(torch.int32)
            parts.append(torch.cat([head, scores], 1))
        return torch.cat(parts) if parts else None


def _layout(shape: StepShape, words: int, hidden_size: int) -> ResultLayout:
    """The layout of a body of so many words. How many prompt scores it holds follows from its length."""
    pooled = hidden_size if shape.pools else 0
    bare = ResultLayout(shape.rows, shape.width, shape.draft_width, shape.alternatives, pooled=pooled)
    left = words - (bare.words - len(bare.header(0)))
    return ResultLayout(shape.rows, shape.width, shape.draft_width, shape.alternatives, left // (2 + bare.score_words),
                        pooled)
