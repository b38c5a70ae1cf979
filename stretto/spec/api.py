"""What a drafter is. A drafter reads a step and proposes; it cannot write a length, a page or another drafter.

Every capability defaults to the closed value: what a third party's drafter does not declare is refused at start-up.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch

from stretto.ragged import RaggedStep


@dataclass(frozen=True)
class DrafterCaps:
    shape: Literal["chain", "block", "tree"] = "chain"
    max_width: int = 0  # most drafts a row; 0: proposes nothing
    variable: bool = False  # may offer fewer, per row, decided on the device
    taps: frozenset[str] = field(default_factory=frozenset)  # hidden states it reads; empty: reads only the log
    ingest: Literal["same_step", "lazy", "none"] = "none"
    kv: Literal["none", "own", "target_readonly"] = "none"
    lookahead: int = 0  # cells past the committed length that its fixed loop writes
    q: Literal["point", "full"] = "point"  # full: every id is drawn by `Choose`, so that its distribution is known
    where: Literal["device", "host"] = "device"
    confidence: bool = False  # knows the chances of its ids: offers none below `SlotView.least` (with `variable`)
    seam: bool = False  # its cell p is made from the taps of position p-1: those of edges are kept for it (wire.Seam)


@dataclass(frozen=True)
class Offer:
    """Proposals for each row of a step. Rows that may not be offered drafts are cut by `slots.offer`, not here."""

    ids: torch.Tensor  # [R, K] int64
    width: torch.Tensor  # [R] int32, 0..K


class SlotView(Protocol):
    """Read-only view of the slot table."""

    @property
    def log(self) -> torch.Tensor: ...  # [S, context] int32
    @property
    def known(self) -> torch.Tensor: ...  # [S] int32
    @property
    def length(self) -> torch.Tensor: ...  # [S] int32
    @property
    def draft_length(self) -> torch.Tensor: ...  # [S] int32: cells of the draft stream that stand
    @property
    def least(self) -> torch.Tensor: ...  # [] float32: chance of being reached and right below which no id is wanted
    def may_offer(self, slots: torch.Tensor, n_out: torch.Tensor) -> torch.Tensor:
        """Which rows may be offered drafts at all: they sampled, are not done and want some. [R] bool."""
        ...


class Choose(Protocol):
    """What a row's request would sample from a drafter's logits: same processors, temperature and noise as the target's
    (so proposals are coupled with what the target will sample; under rejection sampling, noise of their own), greedy at
    temperature 0."""

    def __call__(self, logits: torch.Tensor, rows: torch.Tensor | None, offset: int,
                 ids: torch.Tensor | None = None) -> torch.Tensor:
        """logits [N, V] float32 over the target's ids, of the step's rows `rows` [N] int64 (None: all); for the log
        position known + offset. Ids chosen before in the same proposal count as the log. `ids` [V'] int64: the target's
        ids that the logits [N, V'] are of; others are not chosen. Returns ids of the target, [N] int64."""
        ...

    def block(self, logits: torch.Tensor, rows: torch.Tensor | None, ids: torch.Tensor | None = None) -> torch.Tensor:
        """logits [N, K, V] for the positions known .. known + K - 1. Returns [N, K] int64."""
        ...


class Drafter(Protocol):
    caps: DrafterCaps

    def ingest(self, step: RaggedStep, taps: dict[str, torch.Tensor]) -> None:
        """Called after the commit of every step, for every row, whether or not the row will be offered drafts.

        `step` says what was fed, `taps` the hidden states of those tokens, [T, E] each. Views already say what was
        committed (`length`, `known`); `draft_length` and the seams are those of before the step until this returns."""
        ...

    def propose(self, step: RaggedStep, view: SlotView, width: int) -> Offer:
        """At most `width` ids a row, continuing the log after `known`. Rows whose log is not fully fed are ignored."""
        ...
