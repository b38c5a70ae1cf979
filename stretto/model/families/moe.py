"""Mixtral, Qwen3-MoE and gpt-oss: experts in place of the MLP.

gpt-oss has more of its own: sinks in attention, windows in every other layer, biases everywhere, and a gate that is
clamped; its checkpoints hold all experts of a layer in one tensor, transposed, gate and up interleaved.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from stretto.model.config import ConfigError, ModelConfig
from stretto.model.decoder import MLP, Decoder, Style, gated_mlp
from stretto.model.experts import (
    ExpertMLP,
    Experts,
    ExpertWeights,
    PackedExperts,
    Route,
    expert_weights,
    softmax_over_all,
    softmax_over_chosen,
)
from stretto.model.layers import ACTIVATIONS, Linear
from stretto.model.shard import cut, rows_of, whole
from stretto.model.weights import Weights
from stretto.ops.gates import Gate


def mixtral(config: ModelConfig, w: Weights, context: int) -> Decoder:
    return Decoder(config, w, context, Style(mlp=_mixtral_mlp))


def qwen3_moe(config: ModelConfig, w: Weights, context: int) -> Decoder:
    bias = config.attention_bias
    return Decoder(config, w, context, Style(bias, bias, head_norm=True, mlp=_qwen3_mlp))


def gpt_oss(config: ModelConfig, w: Weights, context: int) -> Decoder:
    bias = config.attention_bias
    return Decoder(config, w, context, Style(bias, bias, sinks=True, mlp=_gpt_oss_mlp))


def _experts_of(config: ModelConfig) -> int:
    count = config.raw.get("num_experts") or config.value("num_local_experts")
    if not isinstance(count, int) or count < 1:
        raise ConfigError(f"{config.architecture}: num_experts is {count!r}; the config must give a positive number")
    return count


def _mixtral_mlp(config: ModelConfig, w: Weights, index: int) -> ExpertMLP:
    name = f"model.layers.{index}.block_sparse_moe"
    names = {"gate": "w1", "up": "w3", "down": "w2"}
    return separate_experts(config, w, name, config.intermediate_size, names, softmax_over_chosen)


def _qwen3_mlp(config: ModelConfig, w: Weights, index: int) -> MLP:
    dense = index in (config.value("mlp_only_layers") or ()) or (index + 1) % config.value("decoder_sparse_step")
    if dense:
        return gated_mlp(config, w, index, Style())
    route = softmax_over_chosen if config.value("norm_topk_prob") else softmax_over_all
    names = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    return separate_experts(config, w, f"model.layers.{index}.mlp", config.value("moe_intermediate_size"), names, route)


def separate_experts(config: ModelConfig, w: Weights, name: str, inner: int, names: dict[str, str], route: Route,
                     shared: Callable[[torch.Tensor], torch.Tensor] | None = None) -> ExpertMLP:
    """Experts of which the checkpoint holds each by itself, "NAME.experts.0.w1.weight"."""
    n, hidden, shard = _experts_of(config), config.hidden_size, w.shard
    each = [f"{name}.experts.{e}" for e in range(n)]
    gate_up = w.matrices([rows_of(shard, f"{expert}.{names[part]}.weight", inner)
                          for expert in each for part in ("gate", "up")], hidden, single=True)
    down = w.matrices([whole(f"{expert}.{names['down']}.weight", hidden) for expert in each], inner, cut_columns=True,
                      single=True)
    return gated_experts(config, w, f"{name}.gate", inner, expert_weights(w, n, gate_up), expert_weights(w, n, down),
                         route, shared)


TOGETHER = ("gate", "experts.gate_up_proj", "experts.down_proj")


def stored_together(config: ModelConfig, w: Weights, name: str, inner: int, route: Route,
                    shared: Callable[[torch.Tensor], torch.Tensor] | None = None,
                    names: tuple[str, str, str] = TOGETHER) -> ExpertMLP:
    """Experts of which the checkpoint holds all in two tensors, [E, 2 F, hidden] and [E, hidden, F]. `names`, under
    NAME: of the router, and of the two."""
    n, hidden = _experts_of(config), config.hidden_size
    start, count = cut(w.shard, inner)
    router, into, out = (f"{name}.{part}" for part in names)
    first, second = (w.take_part(into, (n, 2 * inner, hidden), 1, at + start, count)
                     for at in (0, inner))
    gate_up = ExpertWeights(w, first, settle=lambda gate: torch.cat((gate, second), 1))
    down = w.take_part(out, (n, hidden, inner), 2, start, count)
    return gated_experts(config, w, router, inner, gate_up, ExpertWeights(w, down), route, shared)


def gated_experts(config: ModelConfig, w: Weights, router: str, inner: int, gate_up: Experts, down: Experts,
                  route: Route, shared: Callable[[torch.Tensor], torch.Tensor] | None) -> ExpertMLP:
    """A layer of experts with `inner` features each, of all ranks together."""
    if config.hidden_act not in ACTIVATIONS:
        raise ConfigError(f"hidden_act {config.hidden_act!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
    n, ranks = _experts_of(config), w.shard.ranks
    if inner % ranks:
        raise ConfigError(f"{inner} inner features of an expert cannot be shared equally by {ranks} ranks")
    return ExpertMLP(Linear(w, [(router, n)], config.hidden_size), gate_up, down, Gate(config.hidden_act), route,
                     n_experts=n, chosen=config.value("num_experts_per_tok"), inner=inner // ranks, shard=w.shard,
                     shared=shared)


def _gpt_oss_mlp(config: ModelConfig, w: Weights, index: int) -> ExpertMLP:
    name, n, shard = f"model.layers.{index}.mlp.experts", _experts_of(config), w.shard
    hidden, inner = config.hidden_size, config.intermediate_size
    start, count = cut(shard, inner)  # of gate and up, interleaved: twice as many
    shape_in, shape_out = (n, hidden, 2 * inner), (n, inner, hidden)
    bias_in = w.take_part(f"{name}.gate_up_proj_bias", shape_in[::2], 1, 2 * start, 2 * count)
    bias_out = w.take(f"{name}.down_proj_bias", n, hidden)
    if shard.rank > 0:  # it counts once
        w.then(partial(_clear, bias_out))
    gate_up: Experts
    down: Experts
    if (packed := w.transposed_experts(f"{name}.gate_up_proj", shape_in)) is not None:
        apart = torch.arange(2 * inner).view(-1, 2).t().flatten()
        gate_up = PackedExperts(w, n, packed, bias_in, apart)
    else:
        part = w.take_part(f"{name}.gate_up_proj", shape_in, 2, 2 * start, 2 * count)
        gate_up = ExpertWeights(w, part, bias_in, _halves)
    if (packed := w.transposed_experts(f"{name}.down_proj", shape_out)) is not None:
        down = PackedExperts(w, n, packed, bias_out)
    else:
        down = ExpertWeights(w, w.take_part(f"{name}.down_proj", shape_out, 1, start, count), bias_out, _rows)
    clamped = Gate("clamped", config.value("swiglu_alpha"), config.value("swiglu_limit"))
    router = Linear(w, [(f"model.layers.{index}.mlp.router", n)], hidden, bias=True)
    return ExpertMLP(router, gate_up, down, clamped, softmax_over_chosen, n_experts=n,
                     chosen=config.value("num_experts_per_tok"), inner=count, shard=shard)


def _clear(tensor: torch.Tensor) -> None:
    tensor.zero_()


def _rows(stored: torch.Tensor) -> torch.Tensor:
    """[E, inputs, rows] -> [E, rows, inputs]; biases come as [E, rows, 1] and stay."""
    return stored if stored.shape[-1] == 1 else stored.transpose(1, 2)


def _halves(stored: torch.Tensor) -> torch.Tensor:
    """As `_rows`, then the interleaved rows of gate and up apart."""
    rows = _rows(stored)
    return torch.cat((rows[:, ::2], rows[:, 1::2]), dim=1)
