"""The text model of Llama 4: experts that scale their inputs beside an MLP for all tokens, in some layers or all; three
of four layers rotate neighbours and norm heads without weights, the fourth does neither and widens its scores with the
position.

Layers that rotate attend within chunks of positions (`attention_chunk_size`, 8192). Up to the end of the first chunk
that is ordinary causal attention, and so many positions are served (ModelConfig.max_position).
"""

from __future__ import annotations

from functools import partial

import torch

from stretto.attn.api import Attend
from stretto.model.config import ModelConfig
from stretto.model.decoder import MLP, Attention, Decoder, Style
from stretto.model.experts import ExpertMLP, ExpertWeights
from stretto.model.layers import GatedMLP, HeadNorm, Linear
from stretto.model.shard import cut
from stretto.model.weights import Weights
from stretto.ops.fixed import elementwise
from stretto.ops.gates import Gate
from stretto.ops.grouped import group_by_expert
from stretto.ops.layer import HeadWeights, Rope


def llama4(config: ModelConfig, w: Weights, context: int) -> Llama4:
    return Llama4(config, w, context)


class Llama4(Decoder):
    """A CausalModel."""

    def __init__(self, config: ModelConfig, w: Weights, context: int):
        bias = config.attention_bias
        super().__init__(config, w, context, Style(bias, bias, neighbours=True, mlp=_mlp))
        given, interval = config.value("no_rope_layers"), config.value("no_rope_layer_interval")
        self.rotates = [bool(given[i] if given else (i + 1) % interval) for i in range(config.n_layers)]
        for layer, rotates in zip(self.decoder, self.rotates, strict=True):
            if rotates and config.value("use_qk_norm") and isinstance(layer.attn, Attention):
                layer.attn.head_norm = UnitHeadNorm(w, config)
        half = torch.ones(context, config.head_dim // 2)
        self._still = torch.cat((half, torch.zeros_like(half)), 1).to(w.device)  # rotates by nothing
        self._widening = _widening(config, context).to(w.device)

    def each_layer(self, positions: torch.Tensor, attend: Attend) -> list[tuple[Rope, Attend]]:
        rope = self.rotary.at(positions)
        if all(self.rotates):
            return [(rope, attend)] * len(self.decoder)
        still = Rope(self._still, rope.positions)
        through = Widened(attend, self._widening[positions]) if self.config.value("attn_temperature_tuning") else attend
        return [(rope, attend) if rotates else (still, through) for rotates in self.rotates]


class UnitHeadNorm(HeadNorm):
    """Each head of q and k by its root mean square. The published order is rotation, then norm: the same, since a
    rotation keeps lengths."""

    def __init__(self, w: Weights, config: ModelConfig):
        ones = torch.ones(config.head_dim, dtype=w.dtype, device=w.device)
        self.weight, self.shape, self.eps = ones, (config.head_dim,), config.norm_eps
        self.each = HeadWeights(ones, ones, config.norm_eps)


class Widened:
    """`Attend` with queries that are scaled by token, scale [T] (https://arxiv.org/abs/2501.19399)."""

    def __init__(self, attend: Attend, scale: torch.Tensor):
        self._attend, self._scale = attend, scale[:, None, None]

    @property
    def tokens(self) -> torch.Tensor | None:
        return getattr(self._attend, "tokens", None)

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                 sinks: torch.Tensor | None = None) -> torch.Tensor:
        return self._attend(layer, (q * self._scale).to(q.dtype), k, v)


def _widening(config: ModelConfig, context: int) -> torch.Tensor:
    """[positions] float32."""
    floors = torch.floor((torch.arange(context, dtype=torch.float32) + 1) / config.value("floor_scale"))
    return torch.log1p(floors) * config.value("attn_scale") + 1


def _mlp(config: ModelConfig, w: Weights, index: int) -> MLP:
    name, hidden, inner = f"model.layers.{index}.feed_forward", config.hidden_size, config.intermediate_size
    step, given = config.value("interleave_moe_layer_step"), config.value("moe_layers")
    if index not in given if given is not None else (index + 1) % step:
        return GatedMLP(w, name, hidden, config.value("intermediate_size_mlp"), config.hidden_act)
    n, chosen = config.value("num_local_experts"), config.value("num_experts_per_tok")
    start, count = cut(w.shard, inner)
    gate_part, up_part = (w.take_part(f"{name}.experts.gate_up_proj", (n, hidden, 2 * inner), 2, first + start, count)
                          for first in (0, inner))
    gate_up = ExpertWeights(w, gate_part, settle=lambda gate_part: _rows(torch.cat((gate_part, up_part), 2)))
    down = ExpertWeights(w, w.take_part(f"{name}.experts.down_proj", (n, inner, hidden), 1, start, count),
                         settle=_rows)
    shared = GatedMLP(w, f"{name}.shared_expert", hidden, inner, config.hidden_act)
    route = partial(_sigmoid_of_chosen, fixed=w.fixed)
    return ScalingExperts(Linear(w, [(f"{name}.router", n)], hidden), gate_up, down,
                          Gate(config.hidden_act), route, n_experts=n, chosen=chosen, inner=count, shard=w.shard,
                          shared=shared)


def _rows(stored: torch.Tensor) -> torch.Tensor:
    """[E, inputs, rows] -> [E, rows, inputs]."""
    return stored.transpose(1, 2)


def _sigmoid_of_chosen(logits: torch.Tensor, k: int, fixed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    best, experts = torch.topk(logits, k, dim=-1)
    return (elementwise(torch.sigmoid, best.float()) if fixed else best.float().sigmoid()), experts


class ScalingExperts(ExpertMLP):
    """An expert's weight scales what goes in, not what comes out."""

    def _made(self, x: torch.Tensor, tokens: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        weights, experts = self._route(self._router(x), self.chosen)
        scaled = (x[:, None] * weights[..., None].to(x.dtype)).flatten(0, 1)  # by slot, [T * K, E]
        groups = group_by_expert(experts, self.n_experts, tokens)
        inner = x.new_empty(len(groups.slots), self.inner)
        self._gate_up(scaled, groups.bounds, groups.slots, groups.places, inner, 1, self._gate)
        made = self._down(inner, groups.bounds, groups.places, groups.slots, torch.empty_like(scaled))
        return made.view(*experts.shape, x.shape[1]), torch.ones_like(weights)
