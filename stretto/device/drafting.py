"""What the device half keeps for a drafter with weights: KV at the target's pages, seams, and the choice of tokens.

    after commit     ingest (every row)  ->  DRAFT_LEN = LEN, seams recorded  ->  propose (rows that may be offered)

A drafter gets read-only views and functions (`spec.context.DrafterContext`); what is written stays in this package.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stretto.attn.api import AttentionBackend, GroupSpec, LayerSpec
from stretto.device.kv import KVCache
from stretto.device.seams import Seams
from stretto.device.slots import SlotTable
from stretto.model.api import CausalModel
from stretto.ragged import RaggedStep
from stretto.sample.features import StepShape
from stretto.sample.processors import Positions
from stretto.sample.sampler import greedy
from stretto.sample.verify import process, sample
from stretto.spec.api import Drafter
from stretto.spec.context import DrafterContext, DrafterError, Target
from stretto.wire import STATE


class Chooser:
    """`spec.api.Choose`, bound to the step that runs."""

    def __init__(self, table: SlotTable, vocab_size: int):
        self.table, self.vocab_size = table, vocab_size
        self.step: RaggedStep | None = None
        self.shape: StepShape | None = None

    def begin(self, step: RaggedStep, shape: StepShape) -> None:
        self.step, self.shape = step, shape

    def _slots(self, rows: torch.Tensor | None) -> torch.Tensor:
        assert self.step is not None
        slots = self.step.slots.long()
        return slots if rows is None else slots[rows]

    @property
    def _reads_the_log(self) -> bool:
        """Some processor of this step counts or reads the ids before a position."""
        assert self.shape is not None
        return self.shape.penalised or self.shape.restricted or bool(self.shape.processors)

    @property
    def _best_is_chosen(self) -> bool:
        """Of every row, the likeliest id by the drafter's own logits."""
        assert self.shape is not None
        return not (self.shape.sampled or self.shape.biased or self.shape.min_tokens or self._reads_the_log)

    def __call__(self, logits: torch.Tensor, rows: torch.Tensor | None, offset: int,
                 ids: torch.Tensor | None = None) -> torch.Tensor:
        assert self.shape is not None and self.step is not None
        if self._best_is_chosen:
            return _best(logits, ids)
        slots, table = self._slots(rows), self.table
        where = Positions(slots, table.known[slots] + offset, table.ints, table.reals)
        chosen = self._drawn(self._spread(logits, ids), where, torch.full_like(slots, offset))
        if self._reads_the_log:
            n_out = self.step.n_out if rows is None else self.step.n_out[rows]
            table.sketch(slots, n_out, offset, chosen)
        return chosen

    def block(self, logits: torch.Tensor, rows: torch.Tensor | None, ids: torch.Tensor | None = None) -> torch.Tensor:
        assert self.shape is not None
        n, width, vocab = logits.shape
        if self._best_is_chosen:
            return _best(logits.reshape(n * width, vocab), ids).view(n, width)
        if self._reads_the_log:  # each id depends on those before it
            return torch.stack([self(logits[:, i], rows, i, ids) for i in range(width)], 1)
        slots = self._slots(rows).repeat_interleave(width)
        offset = torch.arange(width, device=slots.device).repeat(n)
        where = Positions(slots, self.table.known[slots] + offset, self.table.ints, self.table.reals)
        return self._drawn(self._spread(logits.reshape(n * width, vocab), ids), where, offset).view(n, width)

    def _spread(self, logits: torch.Tensor, ids: torch.Tensor | None) -> torch.Tensor:
        """[N, V'] -> [N, V], -inf elsewhere: noise, biases and penalties are keyed by the target's ids."""
        if ids is None:
            return logits
        out = torch.full((len(logits), self.vocab_size), float("-inf"), device=logits.device)
        return out.index_copy_(1, ids, logits)

    def _drawn(self, logits: torch.Tensor, where: Positions, offset: torch.Tensor) -> torch.Tensor:
        """With the target's noise; or with noise of its own, what it is drawn from being kept for the verification."""
        assert self.shape is not None
        proposals = self.table.proposals
        processed = process(logits, where, self.table, self.shape, proposing=True)
        if proposals is None or not self.shape.sampled:
            return sample(processed, where, self.shape)
        return proposals.draw(processed, where, offset, self.shape.filtered)


def _best(logits: torch.Tensor, ids: torch.Tensor | None) -> torch.Tensor:
    best = greedy(logits)
    return best if ids is None else ids[best]


class Drafting:
    """One drafter's memory on the device; page copies and poison reach it beside the target's KV."""

    def __init__(self, model: CausalModel, backend: AttentionBackend, kv: KVCache, table: SlotTable,
                 state_cells: int = 0):
        """`state_cells`: of a slot, where the model keeps states."""
        self.model, self.backend, self.kv, self.table, self.state_cells = model, backend, kv, table, state_cells
        self.choose = Chooser(table, model.vocab_size)
        self.own: KVCache | None = None
        self.layers: tuple[LayerSpec, ...] = ()  # whose KV is there
        self.seams: Seams | None = None
        self.ingests = False  # the drafter has a stream of its own

    def context(self, width: int, positions: int, target: Target | None = None) -> DrafterContext:
        return DrafterContext(
            width=width, vocab_size=self.model.vocab_size, device=self.model.device, dtype=self.model.dtype,
            positions=positions, target=target, model=self.model, slots=self.table, choose=self.choose,
            attention=self.backend, own_kv=self.own_kv, seam=self.seam)

    def own_kv(self, layers: Sequence[LayerSpec]) -> KVCache:
        """KV memory for a drafter's layers, at the target's page numbers. Raises DrafterError where a layer's window
        has no page tables."""
        windows = [group.window for group in self.kv.groups]
        missing = sorted({str(spec.window) for spec in layers if spec.window not in windows})
        if missing:
            raise DrafterError(f"the drafter has layers of window {', '.join(missing)}, and the KV cache was planned"
                               f" for windows {windows}: its sizes must name every layer")
        groups = [GroupSpec(w, tuple(i for i, spec in enumerate(layers) if spec.window == w)) for w in windows]
        self.layers = tuple(layers)
        self.own = KVCache(layers, groups, self.kv.pages, self.kv.page_size, self.kv.dtype, self.model.device)
        return self.own

    def seam(self, name: str) -> torch.Tensor:
        if self.seams is None:
            raise DrafterError("this drafter reads a seam and has not declared it: set seam in its caps")
        return self.seams.of_slot[name]

    def adopt(self, drafter: Drafter) -> None:
        """Makes room for what the drafter's caps ask for."""
        self.ingests = drafter.caps.ingest != "none"
        if drafter.caps.seam:
            windows = [group.window for group in self.kv.groups]
            group = windows.index(STATE) if STATE in windows else 0
            self.seams = Seams(sorted(drafter.caps.taps), self.table.log.shape[0], self.kv.pages[group],
                               self.kv.page_size, self.model.hidden_size, self.model.dtype, self.model.device, group,
                               self.state_cells)

    # ------------------------------------------------------------------------------------------- page operations
    def page_tensors(self, group: int) -> list[torch.Tensor]:
        stores = [store for store in (self.own, self.seams) if store is not None]
        return [tensor for store in stores for tensor in store.page_tensors(group)]

    def copy_page(self, group: int, source: int, target: int) -> None:
        for store in (self.own, self.seams):
            if store is not None:
                store.copy_page(group, source, target)

    def keep_state(self, source: int, page: int) -> None:
        if self.seams is not None:
            self.seams.keep_state(source, page)

    def poison_page(self, group: int, page: int) -> None:
        for store in (self.own, self.seams):
            if store is not None:
                store.poison_page(group, page)

    # ------------------------------------------------------------------------------------------------- of a step
    def seat(self, seats: torch.Tensor) -> None:
        """After a plan's operations: `seats` are the packed plan's."""
        if self.seams is not None and len(seats):
            self.seams.seat(seats[:, 0].long(), self.table.ints)

    def ingested(self, step: RaggedStep, taps: dict[str, torch.Tensor]) -> None:
        """After the drafter's ingest: its stream, if it has one, stands as far as the target's."""
        if self.ingests:
            self.table.ingested(step.slots, step.q_len)
        if self.seams is not None:
            self.seams.record(step, taps, self.table.length[step.slots.long()])
