"""A layer of experts: a router gives each token a few of many MLPs (Shazeer et al. 2017, https://arxiv.org/abs/1701.06538).

    logits = router(x) -> K experts and their weights a token -> sum over j of weight[j] * expert[j](x)

Padding tokens ask for no expert. The sum over a token's experts is made in the order of its choices, in float32. On
CPUs each expert is a packed matrix, as in `matrix.py`; on CUDA all are one launch, `ops.grouped`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from stretto.model.config import ConfigError
from stretto.model.layers import Linear
from stretto.model.matrix import Matrix, best_matrix, fixed_matrix
from stretto.model.packed_matrix import packed_matrix
from stretto.model.shard import Shard
from stretto.model.weights import Weights
from stretto.ops.fixed import by_rows
from stretto.ops.gates import Gate
from stretto.ops.grouped import Groups, choose, combine, group_by_expert, grouped_linear
from stretto.ops.packed import Packed

Route = Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]  # logits [T, E], K -> weights, experts [T, K]


def softmax_over_all(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k likeliest of all experts, with their probabilities as weights."""
    return choose(logits, k, of_all=True)


def softmax_over_chosen(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k likeliest experts, weights summing to 1."""
    return choose(logits, k, of_all=False)


def expert_weights(w: Weights, n_experts: int, parts: Sequence[torch.Tensor | Packed]) -> Experts:
    """Of what `Weights.matrices` gives as a single matrix: all experts' rows one below the other."""
    (weight,) = parts
    if isinstance(weight, Packed):
        return PackedExperts(w, n_experts, weight)
    return ExpertWeights(w, weight.view(n_experts, -1, weight.shape[1]))


class ExpertWeights:
    """The matrices of all experts, [E, rows, inputs], and biases [E, rows] where there are some."""

    def __init__(self, w: Weights, weight: torch.Tensor, bias: torch.Tensor | None = None,
                 settle: Callable[[torch.Tensor], torch.Tensor] | None = None):
        """`settle` turns what the checkpoint holds, once filled, into [E, rows, ...]."""
        self._weight, self._bias, self._settle, self.fixed = weight, bias, settle, w.fixed
        self._matrices: list[Matrix] | None = None
        w.then(self._prepare)

    def _prepare(self) -> None:
        if self._settle is not None:
            self._weight = self._settle(self._weight).contiguous()
            self._bias = None if self._bias is None else self._settle(self._bias[..., None])[..., 0].contiguous()
            self._settle = None  # with what it holds
        if self._weight.device.type == "cpu":
            matrix = fixed_matrix if self.fixed else best_matrix
            self._matrices = [matrix(weight, None if self._bias is None else self._bias[e])
                              for e, weight in enumerate(self._weight)]
            del self._weight

    def __call__(self, x: torch.Tensor, bounds: torch.Tensor, rows_in: torch.Tensor, rows_out: torch.Tensor,
                 out: torch.Tensor, each: int = 1, gate: Gate | None = None) -> torch.Tensor:
        """As `ops.grouped.grouped_linear`."""
        if self._matrices is None:
            return grouped_linear(x, self._weight, self._bias, bounds, rows_in, rows_out, out, each, gate, self.fixed)
        return by_matrices(self._matrices, x, bounds, rows_in // each, rows_out, out, gate, self.fixed)


class PackedExperts:
    """The same of weights that stay packed: all experts' rows one below the other."""

    def __init__(self, w: Weights, n_experts: int, weight: Packed, bias: torch.Tensor | None = None,
                 order: torch.Tensor | None = None):
        """`order`: which row of an expert comes at each place, of its biases as well; None: as they are."""
        self._n_experts, self._weight, self._bias, self._order, self.fixed = n_experts, weight, bias, order, w.fixed
        self._matrices: list[Matrix] | None = None
        w.multiplied([weight], experts=True)
        w.then(self._prepare)

    def _prepare(self) -> None:
        rows, device = self._weight.outputs // self._n_experts, self._weight.codes.device
        if self._order is not None:
            order = self._order.to(device)
            self._weight = self._weight.take(
                (torch.arange(self._n_experts, device=device)[:, None] * rows + order).flatten())
            self._bias = None if self._bias is None else self._bias[:, order].contiguous()
        if device.type == "cpu":
            self._matrices = [packed_matrix(self._weight.rows(e * rows, rows),
                                            None if self._bias is None else self._bias[e])
                              for e in range(self._n_experts)]
        else:
            self._by_groups = self._weight.by_groups()
        del self._weight

    def __call__(self, x: torch.Tensor, bounds: torch.Tensor, rows_in: torch.Tensor, rows_out: torch.Tensor,
                 out: torch.Tensor, each: int = 1, gate: Gate | None = None) -> torch.Tensor:
        """As `ops.grouped.grouped_linear`."""
        if self._matrices is not None:
            return by_matrices(self._matrices, x, bounds, rows_in // each, rows_out, out, gate, self.fixed)
        from stretto.ops.triton_packed import launch_grouped

        return launch_grouped(x, self._by_groups, self._bias, bounds, rows_in, rows_out, out, each, gate)


Experts = ExpertWeights | PackedExperts


def by_matrices(matrices: Sequence[Matrix], x: torch.Tensor, bounds: torch.Tensor, rows_in: torch.Tensor,
                rows_out: torch.Tensor, out: torch.Tensor, gate: Gate | None, fixed: bool) -> torch.Tensor:
    """On CPUs: one expert after the other."""
    for matrix, (start, end) in zip(matrices, pairwise(bounds.tolist()), strict=True):
        if start < end:
            made = matrix(x[rows_in[start:end]])
            if gate is not None:
                made = by_rows(gate, made) if fixed else gate(made)
            out[rows_out[start:end]] = made
    return out


class ExpertMLP:
    """Router and experts of one layer."""

    def __init__(self, router: Linear, gate_up: Experts, down: Experts, gate: Gate, route: Route, *, n_experts: int,
                 chosen: int, inner: int, shard: Shard,
                 shared: Callable[[torch.Tensor], torch.Tensor] | None = None):
        """`inner`: features of an expert that this rank has. `shared`: what every token gets besides,
        [T, E] -> [T, E]."""
        if not 1 <= chosen <= n_experts:
            raise ConfigError(f"num_experts_per_tok is {chosen}; it must be 1 to the number of experts, {n_experts}")
        self._router, self._gate_up, self._down, self._gate, self._route = router, gate_up, down, gate, route
        self.n_experts, self.chosen, self.inner, self._shard, self._shared = n_experts, chosen, inner, shard, shared

    def __call__(self, x: torch.Tensor, tokens: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, E] -> [T, E]. tokens: how many of the T are no padding, a scalar on the device; None: all."""
        mixed = self._shard.sum(combine(*self._made(x, tokens), tokens))
        return mixed if self._shared is None else mixed.add_(self._shared(x))

    def add_to(self, hidden: torch.Tensor, x: torch.Tensor, tokens: torch.Tensor | None = None) -> torch.Tensor:
        """hidden [T, E] += self(x), in place; returns it."""
        if self._shared is not None:
            return hidden.add_(self(x, tokens))
        if self._shard.ranks > 1:
            return self._shard.add(hidden, combine(*self._made(x, tokens), tokens))
        return combine(*self._made(x, tokens), tokens, hidden)

    def _made(self, x: torch.Tensor, tokens: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts' answers [T, K, E], unspecified for padding, and their weights [T, K]."""
        weights, experts = self._route(self._router(x), self.chosen)
        made = self._run(x, group_by_expert(experts, self.n_experts, tokens))
        return made.view(*experts.shape, x.shape[1]), weights

    def _run(self, x: torch.Tensor, groups: Groups) -> torch.Tensor:
        """The experts' answers by slot, [N, E]. x: by token."""
        each, n = self.chosen, len(groups.slots)
        inner = x.new_empty(n, self.inner)
        self._gate_up(x, groups.bounds, groups.slots, groups.places, inner, each, self._gate)
        return self._down(inner, groups.bounds, groups.places, groups.slots, x.new_empty(n, x.shape[1]))
