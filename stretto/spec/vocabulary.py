"""The head of a drafter: over the target's ids, or over a part of them that is mapped before anything is sampled.

Logits stay over the part: `Choose` is told the target's ids of their columns.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from stretto.model.layers import matrix_of
from stretto.model.shard import whole
from stretto.model.source import WeightSource
from stretto.model.weights import Weights
from stretto.spec.context import DrafterContext, DrafterError
from stretto.spec.repos import DraftRepo, count_parameters


class DraftHead:
    """`lm_head` of the checkpoint, else the target's head: its rows of the draft vocabulary, where that is reduced.
    `d2t` [draft vocabulary]: target id minus draft id."""

    def __init__(self, repo: DraftRepo, source: WeightSource, w: Weights, context: DrafterContext,
                 draft_vocab: int | None, hidden_size: int):
        names = set(source.names())
        self.ids: torch.Tensor | None = None  # target id of each draft id
        w.ignore("d2t", "t2d")
        if "d2t" in names:
            self.ids = _target_ids(repo, source.tensor("d2t"), context)
        rows = draft_vocab or (len(self.ids) if self.ids is not None else context.vocab_size)
        if self.ids is None and rows != context.vocab_size:
            raise DrafterError(f"{repo.name} has a vocabulary of {rows} ids and no d2t that maps them to the target's"
                               f" {context.vocab_size}: the checkpoint is incomplete")
        if self.ids is not None and len(self.ids) != rows:
            raise DrafterError(f"{repo.name}: d2t maps {len(self.ids)} ids; draft_vocab_size is {rows}")
        self._lent = None
        if "lm_head.weight" in names:
            self._weights = w.matrices([whole("lm_head.weight", rows)], hidden_size)
            w.then(self._settle)
        elif self.ids is not None:
            self._weights = [_lent_rows(repo, context, self.ids, hidden_size)]
            w.then(self._settle)
        else:
            assert context.model is not None
            self._lent = context.model.logits

    def _settle(self) -> None:
        self._matrix = matrix_of(self._weights, None, fixed=False)
        del self._weights

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, E] -> [N, D] float32 over `ids`; without, over all of the target's."""
        return self._matrix.logits(hidden) if self._lent is None else self._lent(hidden)


def count_head_drafter(source: WeightSource, tensor_name: Callable[[str], str | None], hidden_size: int) -> int:
    """Parameters of a checkpoint whose tensors are renamed so, and of the rows of the target's head that it borrows."""
    names = {tensor_name(name): name for name in source.names()}
    lent = source.shape(names["d2t"])[0] if "d2t" in names and "lm_head.weight" not in names else 0
    return lent * hidden_size + count_parameters(source, lambda name: tensor_name(name) not in (None, "d2t", "t2d"))


def _lent_rows(repo: DraftRepo, context: DrafterContext, ids: torch.Tensor, hidden_size: int) -> torch.Tensor:
    """The target's head of these ids, [D, E]. A target keeps its head in whatever form is fastest, or spread over
    ranks; all that it promises is logits, and those of the unit vectors are the head's columns. Raises DrafterError
    where logits are no product."""
    assert context.model is not None
    logits, unit = context.model.logits, torch.eye(hidden_size, dtype=context.dtype, device=context.device)
    weight = torch.empty(len(ids), hidden_size, dtype=context.dtype, device=context.device)
    for some in torch.arange(hidden_size, device=context.device).split(64):
        weight[:, some] = logits(unit[some])[:, ids].t().to(context.dtype)
    if not torch.equal(logits(2 * unit[:2]), 2 * logits(unit[:2])):
        name = context.target.name if context.target else "without a name"
        raise DrafterError(f"{repo.name} drafts {len(ids)} ids by the target's head, and the logits of target {name}"
                           " are no plain product of its head: the draft checkpoint needs an lm_head.weight of its own")
    return weight


def _target_ids(repo: DraftRepo, d2t: torch.Tensor, context: DrafterContext) -> torch.Tensor:
    ids = torch.arange(len(d2t)) + d2t.long()
    if len(ids.unique()) != len(ids) or int(ids.min()) < 0 or int(ids.max()) >= context.vocab_size:
        raise DrafterError(f"{repo.name}: d2t maps {len(ids)} draft ids to {len(ids.unique())} ids in"
                           f" {int(ids.min())}..{int(ids.max())}; they must be different ids of the target's"
                           f" 0..{context.vocab_size - 1}")
    return ids.to(context.device)
