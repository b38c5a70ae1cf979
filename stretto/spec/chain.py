"""Drafters that propose one token after another: a small language model, or a head on the target's hidden states.

    ingest    the rows' new cells, and the one at their length, in one pass       -> hidden at the length
    propose   head -> choose -> [one more cell -> head -> choose] K - 1 times

The cell at the length and those after it are scratch: the next step's ingest writes them again, from what was
committed. So a draft's cell never outlives its draft, whatever is accepted.
"""

from __future__ import annotations

from typing import Protocol

import torch

from stretto.attn.api import Attend, LayerSpec
from stretto.ops.attend import StepAttention
from stretto.ragged import RaggedStep
from stretto.spec.api import DrafterCaps, Offer, SlotView
from stretto.spec.context import DrafterContext
from stretto.spec.steps import StreamKV, extension, one_by_one, stream_of


class ChainModel(Protocol):
    """What `ChainDrafter` runs. `features` are None where shift is 0. A model whose logits are over a part of the
    target's ids also has `ids` [D] int64, which those are."""

    layers: tuple[LayerSpec, ...]
    shift: int  # 1: a cell is made from its token and the features of the position before it; 0: from its token alone
    max_position: int

    def features(self, taps: dict[str, torch.Tensor]) -> torch.Tensor:
        """Of the target's hidden states, [T, E] each -> [T, F]."""
        ...

    def forward(self, ids: torch.Tensor, features: torch.Tensor | None, positions: torch.Tensor,
                attend: Attend) -> tuple[torch.Tensor, torch.Tensor | None]:
        """ids, positions [T] int64 -> hidden states for `logits` [T, E], and the features of these positions [T, F]."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, E] -> [N, V] float32 over the target's ids, or [N, D] over `ids`."""
        ...


def last_hidden(taps: dict[str, torch.Tensor]) -> torch.Tensor:
    """`ChainModel.features` of one that reads what the target's head reads, as it is."""
    return taps["hidden.last"]


class ChainDrafter:
    """`spec.api.Drafter` around a `ChainModel`."""

    def __init__(self, model: ChainModel, caps: DrafterCaps, context: DrafterContext):
        assert context.slots is not None and context.choose is not None and context.attention is not None
        assert context.own_kv is not None
        self.model, self.caps, self.context = model, caps, context
        self.slots, self.choose, self.backend = context.slots, context.choose, context.attention
        self.kv, self.ids = context.own_kv(model.layers), getattr(model, "ids", None)
        self.exact = context.device.type == "cpu"
        served = context.positions + context.width if context.positions else model.max_position
        self.most = min(model.max_position, served)  # items of the stream that can have a cell
        self.fits = 0 < context.positions <= model.max_position - context.width  # every draft that can be asked for
        self._views: dict[int, StreamKV] = {}

    def ingest(self, step: RaggedStep, taps: dict[str, torch.Tensor]) -> None:
        """Extends the draft stream of every row that fed something."""
        slots, model = step.slots.long(), self.model
        length = self.slots.length[slots]
        items = self.most
        if self.exact:
            items = int(length.max()) + self.context.width + 1 if len(length) else 1
        self.stream = stream_of(step, model.shift, items)
        made = extension(step, self.stream, length, self.slots.draft_length[slots], self.most, self.exact,
                         self.slots.log)
        self.last, self.hidden, self.following = made.last, None, None
        if not len(made.cell):
            return
        features = self._features(step, taps, made.sources) if model.shift else None
        self.hidden, self.following = self._forward(made.step, made.ids, features)

    def _features(self, step: RaggedStep, taps: dict[str, torch.Tensor], sources: torch.Tensor) -> torch.Tensor:
        """Those of each item's position p-1: of this step, or of the seam where p is the step's base."""
        assert self.context.seam is not None
        seam = self.context.seam
        slots = step.slots.long()
        own = self.model.features(taps)
        edge = self.model.features({name: seam(name)[slots] for name in taps})
        return torch.cat([own, edge])[sources]

    def propose(self, step: RaggedStep, view: SlotView, width: int) -> Offer:
        """`width` ids for every row that may be offered some and whose drafts the model's context holds."""
        n, width = len(step.slots), min(width, self.caps.max_width)
        length = view.length[step.slots.long()]
        counts = torch.full((n,), width, dtype=torch.int32, device=self.context.device)
        if not self.fits:
            counts.masked_fill_(length + width - self.model.shift > self.model.max_position, 0)
        rows = None  # on a device all: those that may not be offered any are cut by `SlotTable.offer`
        if self.exact:
            counts *= view.may_offer(step.slots, step.n_out)
            rows = counts.nonzero().flatten()
        out = torch.zeros(n, width, dtype=torch.int64, device=self.context.device)
        if self.hidden is not None and (rows is None or len(rows)):
            self._chain(out, length, rows)
        return Offer(out, counts)

    def _chain(self, out: torch.Tensor, length: torch.Tensor, rows: torch.Tensor | None) -> None:
        """Fills out [R, K] at `rows`."""
        assert self.hidden is not None
        where = slice(None) if rows is None else rows
        at, stream, length = self.last[where], self.stream.take(rows), length[where]
        hidden = self.hidden[at]
        features = None if self.following is None else self.following[at]
        steps = one_by_one(stream, length, out.shape[1] - 1, self.most)
        for ahead in range(out.shape[1]):
            if ahead:
                hidden, features = self._forward(steps[ahead - 1], out[where, ahead - 1], features)
            out[where, ahead] = self.choose(self.model.logits(hidden), rows, ahead, self.ids)

    def _forward(self, step: RaggedStep, ids: torch.Tensor,
                 features: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        if step.page_size not in self._views:
            self._views[step.page_size] = StreamKV(self.kv, step.page_size)
        attend = StepAttention(step, self.model.layers, self._views[step.page_size], self.backend)
        return self.model.forward(ids, features, step.positions, attend)
