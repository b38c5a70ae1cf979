"""The device half of one step: apply, bind, forward, verify, commit, draft, record (DESIGN section 5, lines 4-11).

    plan N (packed)  ->  apply ops -> bind -> model -> verify -> commit -> ingest, propose -> pack  ->  result N
                         `------------------- one stream, in order; no host wait -------------------'
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from stretto.attn.api import AttentionBackend
from stretto.device.kv import KVCache
from stretto.device.record import pack_result, pack_rows
from stretto.device.slots import SlotTable
from stretto.model.api import CausalModel
from stretto.ops.attend import StepAttention
from stretto.ops.bind import bind
from stretto.ops.commit import Commit, judge
from stretto.ragged import RaggedStep
from stretto.sample.features import FeatureMirror, Features
from stretto.sample.logprobs import token_scores
from stretto.sample.verify import process, prompt_targets, sample, sampled_positions
from stretto.spec.api import Drafter, Offer
from stretto.wire import HEADER, PackedPlan, ResultLayout, split_plan

SCORE_SLICE = 128  # prompt positions whose logits exist at one time


@dataclass(frozen=True)
class Sizes:
    """Bounds of one step, from the plan and the rows' settings alone."""

    width: int  # most ids that a row can emit
    tokens: int | None  # packed tokens; None: exact, read on the host
    logits: int | None
    alternatives: int  # -1: no row wants log-probabilities


class Runner:
    """Runs packed plans in order. Owns slot table, KV memory, model and drafter of one device."""

    def __init__(self, model: CausalModel, backend: AttentionBackend, kv: KVCache, table: SlotTable,
                 drafter: Drafter | None = None):
        self.model, self.backend, self.kv, self.table, self.drafter = model, backend, kv, table, drafter
        self.features = FeatureMirror()
        self.exact = model.device.type == "cpu"
        self.tap_names = sorted(drafter.caps.taps) if drafter else []

    @torch.inference_mode()
    def step(self, packed: np.ndarray) -> torch.Tensor:
        """One step. Returns the packed result, int32, on the device; nothing waits for it here."""
        on_host = split_plan(packed[:HEADER], packed)
        self._before(on_host)
        on_device = torch.from_numpy(packed).to(self.model.device, non_blocking=True)
        plan: PackedPlan[torch.Tensor] = split_plan(packed[:HEADER], on_device)
        self.table.apply(plan, self.kv)
        if not len(plan.rows):
            return torch.tensor(ResultLayout(0, 1, 0).header(plan.seq), dtype=torch.int32, device=self.model.device)
        rows = self.features.of_rows(on_host.rows[:, 0].tolist())
        sizes = self._sizes(on_host, rows)
        step = bind(plan.rows, self.table.ints, self.table.log, self.table.page_tables, self.table.page_size,
                    sizes.tokens, sizes.logits)
        return self._forward(plan, step, rows, sizes)

    def _before(self, on_host: PackedPlan[np.ndarray]) -> None:
        self.features.update(on_host)
        if len(on_host.biases):
            self.table.widen_biases(int(on_host.biases[:, 1].max()) + 1)

    def _sizes(self, on_host: PackedPlan[np.ndarray], rows: list[Features]) -> Sizes:
        caps = on_host.rows[:, 2].tolist()
        windows = [min(cap, 1 + f.speculation) for cap, f in zip(caps, rows, strict=True)]
        tokens, logits = (None, None) if self.exact else (sum(caps), sum(windows))
        return Sizes(max(windows), tokens, logits, max(f.alternatives for f in rows))

    def _forward(self, plan: PackedPlan[torch.Tensor], step: RaggedStep, rows: list[Features],
                 sizes: Sizes) -> torch.Tensor:
        hidden, taps = self._model(step)
        logits = self.model.logits(hidden[step.out_tokens])
        where = sampled_positions(step, self.table)
        sampled = sample(process(logits, where, self.table, rows), where, rows, step.out_rows)
        outcome = judge(step, sampled, self.table.ints, self.table.log, self.table.stops, sizes.width)
        new_scores = self._new_scores(logits, sampled, step, sizes)
        prompt_scores = self._prompt_scores(hidden, step, rows, max(sizes.alternatives, 0))
        self.table.commit(step.slots, outcome)
        offered, offer_width = self._draft(step, taps, plan.draft_width)
        return self._record(plan, step, rows, outcome, (offered, offer_width), (new_scores, prompt_scores), sizes)

    def _model(self, step: RaggedStep) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Hidden states [T, hidden_size] and the drafter's taps. A step whose rows had all ended feeds nothing."""
        taps = dict.fromkeys(self.tap_names, step.q_len)  # names wanted; the model puts its hidden states there
        if len(step.ids) == 0:
            nothing = torch.zeros(0, self.model.hidden_size, dtype=self.model.dtype, device=step.ids.device)
            return nothing, dict.fromkeys(taps, nothing)
        attend = StepAttention(step, self.model.layers, self.kv, self.backend)
        return self.model.forward(step.ids, step.positions, attend, taps or None), taps

    def _draft(self, step: RaggedStep, taps: dict[str, torch.Tensor], width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The drafter sees every row of every step, and proposes when asked."""
        n = len(step.slots)
        nothing = torch.zeros(n, 0, dtype=torch.int64, device=step.slots.device)
        if self.drafter is None:
            return nothing, torch.zeros(n, dtype=torch.int32, device=step.slots.device)
        self.drafter.ingest(step, taps)
        offer = self.drafter.propose(step, self.table, width) if width else \
            Offer(nothing, torch.zeros(n, dtype=torch.int32, device=nothing.device))
        return offer.ids, self.table.offer(step.slots, offer, step.n_out)

    def _new_scores(self, logits: torch.Tensor, sampled: torch.Tensor, step: RaggedStep,
                    sizes: Sizes) -> torch.Tensor | None:
        """Scores of the sampled ids, laid out by (row, offset in the window): [R, W, words]."""
        if sizes.alternatives < 0:
            return None
        scores = token_scores(logits, sampled, sizes.alternatives)
        out = torch.zeros(len(step.slots), sizes.width, scores.shape[1], dtype=torch.int32, device=scores.device)
        if len(scores):
            offsets = torch.arange(sizes.width, device=out.device)
            at = (step.cu_out[:-1, None] + offsets).clamp_(max=len(scores) - 1)
            out = torch.where((offsets < step.n_out[:, None])[:, :, None], scores[at], out)
        return out

    def _prompt_scores(self, hidden: torch.Tensor, step: RaggedStep, rows: list[Features],
                       alternatives: int) -> torch.Tensor | None:
        """Scores of prompt tokens, [N, 2 + words]: row (-1: padding), position of the scored token, score. The logits
        exist for a slice of positions at a time, so that a long chunk does not pay for a long head."""
        if not any(f.scores_prompt for f in rows):
            return None
        ids, wanted = prompt_targets(step, self.table)
        tokens = wanted.nonzero().flatten() if self.exact else torch.arange(len(ids), device=ids.device)
        parts = []
        for part in tokens.split(SCORE_SLICE):
            scores = token_scores(self.model.logits(hidden[part]), ids[part], alternatives)
            row = torch.where(wanted[part], step.rows[part], -1)
            head = torch.stack([row, step.positions[part] + 1], 1).to(torch.int32)
            parts.append(torch.cat([head, scores], 1))
        return torch.cat(parts) if parts else None

    def _record(self, plan: PackedPlan[torch.Tensor], step: RaggedStep, rows: list[Features], outcome: Commit,
                drafts: tuple[torch.Tensor, torch.Tensor], scores: tuple[torch.Tensor | None, torch.Tensor | None],
                sizes: Sizes) -> torch.Tensor:
        wants = torch.tensor([f.alternatives + 1 for f in rows], dtype=torch.int32, device=step.slots.device)
        table = pack_rows(step, plan.rows, outcome, *drafts, wants)
        new_scores, prompt_scores = scores
        layout = ResultLayout(len(step.slots), outcome.ids.shape[1], drafts[0].shape[1], sizes.alternatives,
                              0 if prompt_scores is None else len(prompt_scores))
        return pack_result(layout, plan.seq, table, new_scores, prompt_scores)
