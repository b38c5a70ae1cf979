"""The slot table: what the device knows of every live sequence, and the only code that changes it.

A slot is a row of persistent tensors. `apply` executes a plan's operations in stream order, so no fence is needed
between them and the step before; `commit` writes what a step proved; `offer` writes drafts behind the confirmed ids:

    log[s]:   | confirmed ids            | drafts     | not written |
              0          len    known              known + ndraft   limit        (len = known - 1 after a sampled step)

Slot 0 belongs to nobody: it is always done, and masked writes of a padded step land in its row.
"""

from __future__ import annotations

import numpy as np
import torch

from stretto.device.kv import Paged
from stretto.ops.commit import Commit
from stretto.ops.native import step as native
from stretto.sample.custom import CustomProcessors
from stretto.sample.rejection import Proposals
from stretto.spec.api import Offer
from stretto.wire import (
    MAX_STOP_IDS,
    N_INT,
    N_REAL,
    NO_TOKEN,
    NULL_PAGE,
    Int,
    PackedPlan,
    PageOp,
    Real,
    unpack_processors,
)


class SlotTable:
    """Shapes: S slots, C tokens of context. Columns are kept one after another: `ints[Int.LEN]` is [S], contiguous."""

    def __init__(self, n_slots: int, context: int, page_size: int, n_groups: int, device: torch.device,
                 lookahead: int = 0):
        self.context, self.page_size, self.device = context, page_size, device
        pages = -(-(context + lookahead) // page_size) + 1  # the drafter's lookahead may reach past the context
        self.ints = torch.zeros(N_INT, n_slots, dtype=torch.int32, device=device)
        self.reals = torch.zeros(N_REAL, n_slots, dtype=torch.float32, device=device)
        self.log = torch.full((n_slots, context), NO_TOKEN, dtype=torch.int32, device=device)
        self.stops = torch.full((n_slots, MAX_STOP_IDS), NO_TOKEN, dtype=torch.int32, device=device)
        self.bias_ids = torch.zeros(n_slots, 0, dtype=torch.int64, device=device)
        self.bias_values = torch.zeros(n_slots, 0, dtype=torch.float32, device=device)
        self.restricted = torch.zeros(n_slots, dtype=torch.bool, device=device)
        self.allowed = torch.zeros(n_slots, 0, dtype=torch.bool, device=device)  # [S, V] once it is needed
        self.bad_words = torch.zeros(n_slots, 0, 0, dtype=torch.int32, device=device)  # [S, N, length], from the end
        self.sums = torch.zeros(n_slots, 0, dtype=torch.float64, device=device)  # [S, hidden_size] once it is needed
        self.tables = torch.full((n_groups, n_slots, pages), NULL_PAGE, dtype=torch.int32, device=device)
        self.page_tables = self.tables.unbind(0)  # one a group
        self.custom = CustomProcessors(n_slots, device)
        self.proposals: Proposals | None = None  # where drafts are verified by rejection sampling
        self.least, self._least = torch.zeros((), dtype=torch.float32, device=device), 0.0
        self.ints[Int.DONE] = 1
        self.ints[Int.EPOCH] = -1

    def ask_for(self, least: float) -> None:
        """From the next step on, drafters that know their chances offer only ids of this chance or a better one."""
        if least != self._least:
            self.least.fill_(least)
            self._least = least

    # ------------------------------------------------------------------------------------------------ read access
    @property
    def length(self) -> torch.Tensor:
        return self.ints[Int.LEN]

    @property
    def known(self) -> torch.Tensor:
        return self.ints[Int.KNOWN]

    @property
    def draft_length(self) -> torch.Tensor:
        return self.ints[Int.DRAFT_LEN]

    def may_offer(self, slots: torch.Tensor, n_out: torch.Tensor) -> torch.Tensor:
        """Which rows may be offered drafts: they sampled, are not done, and want some. [R] bool."""
        slots = slots.long()
        return (n_out > 0) & (self.ints[Int.DONE][slots] == 0) & (self.ints[Int.SPECULATION][slots] > 0)

    def column(self, name: Int, slots: torch.Tensor) -> torch.Tensor:
        return self.ints[name][slots]

    def real(self, name: Real, slots: torch.Tensor) -> torch.Tensor:
        return self.reals[name][slots]

    # ------------------------------------------------------------------------------------------------- operations
    def apply(self, plan: PackedPlan[torch.Tensor], on_host: PackedPlan[np.ndarray], kv: Paged) -> None:
        """Executes releases, seats, maps, page operations and host drafts, in this order. `plan` is on this device;
        `on_host` is the same plan, from which sizes are read without waiting for the device."""
        if len(plan.releases):
            slots = plan.releases.long()
            self.ints[Int.DONE].index_fill_(0, slots, 1)
            self.ints[Int.EPOCH].index_fill_(0, slots, -1)
        self._seat_processors(on_host)
        if len(plan.seats):
            self._seat(plan)
        if len(plan.maps):
            slot, group, index = plan.maps[:, :3].long().unbind(1)
            self.tables[group, slot, index] = plan.maps[:, 3]
        if not on_host.moves:  # those of the others run beside the step
            for kind, group, source, target in on_host.page_ops.tolist():
                if kind == PageOp.COPY:
                    kv.copy_page(group, source, target)
                elif kind == PageOp.KEEP_STATE:
                    kv.keep_state(source, target)
                else:
                    kv.poison_page(group, target)
        if len(plan.draft_ids):
            self._host_drafts(plan.draft_heads, plan.draft_ids, int(on_host.draft_heads[:, 3].max()))

    def _seat(self, plan: PackedPlan[torch.Tensor]) -> None:
        seats = plan.seats
        slots = seats[:, 0].long()
        self.ints[:, slots] = seats[:, 4 : 4 + N_INT].T
        self.reals[:, slots] = seats[:, 4 + N_INT :].contiguous().view(torch.float32).T
        fresh = torch.where(seats[:, 1] != 0, slots, 0)  # the tables of slot 0 are null pages anyway
        self.tables.index_fill_(1, fresh, NULL_PAGE)
        self.log[plan.log_cells[:, 0].long(), plan.log_cells[:, 1].long()] = plan.log_cells[:, 2]
        self.stops.index_fill_(0, slots, NO_TOKEN)
        if len(plan.stops):
            self.stops[plan.stops[:, 0].long(), plan.stops[:, 1].long()] = plan.stops[:, 2]
        if self.sums.shape[1]:
            self.sums.index_fill_(0, slots, 0.0)
        if self.proposals is not None:
            self.proposals.forget(slots)
        self._seat_biases(slots, plan.biases)
        self._seat_restrictions(slots, plan)

    def _seat_processors(self, on_host: PackedPlan[np.ndarray]) -> None:
        packed = unpack_processors(on_host.processors)
        for slot in on_host.releases.tolist():
            self.custom.release(slot)
        for slot in on_host.seats[:, 0].tolist():
            self.custom.seat(slot, packed.get(slot, b""))

    def _seat_biases(self, slots: torch.Tensor, biases: torch.Tensor) -> None:
        self.bias_values.index_fill_(0, slots, 0.0)
        if not len(biases):
            return
        self.bias_ids[biases[:, 0].long(), biases[:, 1].long()] = biases[:, 2].long()
        self.bias_values[biases[:, 0].long(), biases[:, 1].long()] = biases[:, 3].contiguous().view(torch.float32)

    def _seat_restrictions(self, slots: torch.Tensor, plan: PackedPlan[torch.Tensor]) -> None:
        if self.allowed.shape[1]:
            self.restricted.index_fill_(0, slots, False)
            if len(plan.allowed):
                slot, token = plan.allowed.long().unbind(1)
                self.allowed.index_fill_(0, slots, False)
                self.restricted.index_fill_(0, slot, True)
                self.allowed[slot, token] = True
        if self.bad_words.shape[1]:
            self.bad_words.index_fill_(0, slots, NO_TOKEN)
            slot, run, place, token = plan.bad_words.long().unbind(1)
            self.bad_words[slot, run, place] = token.to(torch.int32)

    def widen_restrictions(self, vocab: int, runs: int, longest: int) -> None:
        """Room for allowed ids of a vocabulary (0: not needed), and for so many bad words of so many ids a slot."""
        if vocab and not self.allowed.shape[1]:
            self.allowed = torch.zeros(len(self.restricted), vocab, dtype=torch.bool, device=self.device)
        _, n, length = self.bad_words.shape
        if runs > n or longest > length:
            pad = (0, max(0, longest - length), 0, max(0, runs - n))
            self.bad_words = torch.nn.functional.pad(self.bad_words, pad, value=NO_TOKEN)

    def widen_sums(self, hidden_size: int) -> None:
        """Room for a sum of hidden states a slot."""
        if not self.sums.shape[1]:
            self.sums = torch.zeros(len(self.sums), hidden_size, dtype=torch.float64, device=self.device)

    def add_sums(self, slots: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
        """Adds what the rows of a step sum up to, [R, hidden_size]; returns what stands there now. Rows of slot 0 are
        padding and sum up to nothing."""
        self.sums.index_add_(0, slots.long(), sums)
        return self.sums[slots.long()]

    def widen_biases(self, width: int) -> None:
        """Room for `width` logit biases a slot; called before the plan that needs it, which is rare."""
        more = width - self.bias_ids.shape[1]
        if more > 0:
            self.bias_ids = torch.nn.functional.pad(self.bias_ids, (0, more))
            self.bias_values = torch.nn.functional.pad(self.bias_values, (0, more))

    def _host_drafts(self, heads: torch.Tensor, ids: torch.Tensor, longest: int) -> None:
        """A host proposal is late: where the ids confirmed since agree with its first ones, its rest is offered.

        heads [D, 4]: slot, epoch, at, count; ids: all proposals, one after another; `longest`: the largest count.

            proposal         | agrees with the log | offered, cut to the room |
            log          ... at                  known                      limit - 1
        """
        slots, at, count = heads[:, 0].long(), heads[:, 2], heads[:, 3]
        if self.proposals is not None:
            self.proposals.forget(slots)
        known, limit, column = self.known[slots], self.ints[Int.LIMIT][slots], self.ints[:, slots]
        behind = known - at
        offsets = torch.arange(longest, device=self.device)
        start = torch.cumsum(count, 0) - count
        proposal = ids[(start[:, None] + offsets).clamp_(max=len(ids) - 1)]
        confirmed = self.log[slots[:, None], (at[:, None] + offsets).clamp_(0, self.context - 1)]
        agrees = ((proposal == confirmed) | (offsets >= behind[:, None])).all(1)
        live = (column[Int.EPOCH] == heads[:, 1]) & (column[Int.DONE] == 0) & (known - column[Int.LEN] == 1)
        room = torch.minimum(limit - 1 - known, column[Int.SPECULATION])
        width = torch.where(live & agrees & (behind >= 0), torch.minimum(count - behind, room), 0).clamp_(min=0)
        rest = proposal.gather(1, (behind.long()[:, None] + offsets).clamp_(0, longest - 1))
        written = offsets < width[:, None]
        row = torch.where(written, slots[:, None], 0)
        self.log[row, torch.where(written, known[:, None] + offsets, 0)] = rest
        self.ints[Int.NDRAFT][torch.where(width > 0, slots, 0)] = width
        self.ints[Int.NDRAFT][:1].fill_(0)

    # ------------------------------------------------------------------------------------------------ after verify
    def commit(self, slots: torch.Tensor, outcome: Commit) -> None:
        """Writes what a step proved. `slots` [R] int64; slots of padded rows are 0. One launch on CUDA,
        one call of a native kernel on a CPU that has them."""
        if slots.is_cuda:
            from stretto.ops.triton_step import launch_commit

            launch_commit(slots, outcome, self.ints, self.log)
        elif native.takes(self.ints, self.log):
            native.launch_commit(slots, outcome, self.ints, self.log)
        else:
            self.commit_reference(slots, outcome)

    def commit_reference(self, slots: torch.Tensor, outcome: Commit) -> None:
        """In torch's operations."""
        width = outcome.ids.shape[1]
        offsets = torch.arange(width, device=self.device)
        emitted = offsets < outcome.n_new[:, None]
        row = torch.where(emitted, slots[:, None], 0)
        column = torch.where(emitted, (outcome.known - outcome.n_new)[:, None] + offsets, 0)
        self.log[row, column] = outcome.ids.to(torch.int32)
        live = torch.where(outcome.live, slots, 0)
        self.ints[Int.KNOWN][live] = outcome.known
        self.ints[Int.LEN][live] = outcome.length
        self.ints[Int.NDRAFT][live] = outcome.ndraft
        self.ints[Int.DONE][live] = outcome.done.to(torch.int32)
        self.ints[Int.DONE][:1].fill_(1)

    def offer(self, slots: torch.Tensor, offer: Offer, n_out: torch.Tensor) -> torch.Tensor:
        """Drafts of rows that sampled and are not done, cut to the room before the limit. Returns widths, [R] int32.
        One launch on CUDA."""
        if slots.is_cuda:
            from stretto.ops.triton_draft import launch_offer

            return launch_offer(slots, n_out, offer.ids, offer.width, self.ints, self.log)
        return self.offer_reference(slots, offer, n_out)

    def offer_reference(self, slots: torch.Tensor, offer: Offer, n_out: torch.Tensor) -> torch.Tensor:
        """In torch's operations."""
        known, limit = self.column(Int.KNOWN, slots), self.column(Int.LIMIT, slots)
        room = torch.minimum(limit - 1 - known, self.column(Int.SPECULATION, slots)).clamp_(min=0)
        may = (n_out > 0) & (self.column(Int.DONE, slots) == 0)
        width = torch.where(may, torch.minimum(offer.width, room), 0)
        offsets = torch.arange(offer.ids.shape[1], device=width.device)
        written = offsets < width[:, None]
        row = torch.where(written, slots[:, None], 0)
        column = torch.where(written, known[:, None] + offsets, 0)
        self.log[row, column] = offer.ids.to(torch.int32)
        self.ints[Int.NDRAFT][torch.where(may, slots, 0)] = width
        self.ints[Int.NDRAFT][:1].fill_(0)
        return width

    def ingested(self, slots: torch.Tensor, q_len: torch.Tensor) -> None:
        """The draft stream of rows that fed something stands as far as the target's: the same commit, second column."""
        fed = torch.where(q_len > 0, slots.long(), 0)
        self.ints[Int.DRAFT_LEN][fed] = self.ints[Int.LEN][fed]

    def sketch(self, slots: torch.Tensor, n_out: torch.Tensor, offset: int, ids: torch.Tensor) -> None:
        """A draft that is being made, where `offer` will put it: processors of the next one count it. NDRAFT says that
        it is none yet."""
        at = self.ints[Int.KNOWN][slots] + offset
        fits = self.may_offer(slots, n_out) & (at < self.ints[Int.LIMIT][slots] - 1)
        self.log[torch.where(fits, slots, 0), torch.where(fits, at, 0).long()] = ids.to(torch.int32)
