"""Qwen3-Next: three of four layers keep a state by the gated delta rule, the fourth attends, its heads gated; experts,
one of them shared by all tokens.

A layer with a state, x [T, E] (H heads of keys, each with its share of the Hv heads of values):

    q k v z b a = projections of x                         checkpoints hold the rows of one key head after another
    q k v = silu(conv(q k v));  q, k of length 1;  q / sqrt(K)
    o = gated_delta_rule(q, k, v, decay = -exp(A) softplus(a + dt), beta = sigmoid(b))
    out = out_proj(norm(o) * silu(z))                      the norm is of each value head
"""

from __future__ import annotations

from itertools import pairwise

import torch

from stretto.attn.api import Attend, StateSpec
from stretto.model.config import ConfigError, ModelConfig
from stretto.model.decoder import MLP, Decoder, MakeMixer, MakeMLP, Style, gated_mlp
from stretto.model.experts import softmax_over_all, softmax_over_chosen
from stretto.model.families.moe import separate_experts, stored_together
from stretto.model.layers import GatedMLP, Linear, RMSNorm
from stretto.model.shard import Shard, rows_of
from stretto.model.weights import Weights
from stretto.ops.delta_net import delta_inputs, gated_norm
from stretto.ops.fixed import by_rows
from stretto.ops.layer import Rope
from stretto.ops.recurrent import causal_conv, gated_delta_rule
from stretto.ops.state_step import StepStates


def qwen3_next(config: ModelConfig, w: Weights, context: int) -> Decoder:
    return with_states(config, w, context, GatedDeltaNet, some_experts)


def with_states(config: ModelConfig, w: Weights, context: int, recurrent: MakeMixer, mlp: MakeMLP | None) -> Decoder:
    w.ignore_under("mtp.")
    bias = config.attention_bias
    return Decoder(config, w, context, Style(bias, bias, head_norm=True, offset_norm=True, gated=True, mlp=mlp,
                                             recurrent=recurrent, state=_state))


class Sizes:
    """Of a layer with a state: of all of it, or of a rank's key heads and what belongs to them."""

    def __init__(self, config: ModelConfig, ranks: int = 1):
        self.k_heads, self.v_heads, self.k_dim, self.v_dim, self.conv = (
            config.size(f"linear_{name}") for name in (
                "num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim"))
        if self.v_heads % self.k_heads:
            raise ConfigError(f"linear_num_value_heads {self.v_heads} is not a multiple of linear_num_key_heads "
                              f"{self.k_heads}")
        if self.conv < 2:
            raise ConfigError(f"linear_conv_kernel_dim is {self.conv}; it must be 2 or more")
        if self.k_heads % ranks:
            raise ConfigError(f"{self.k_heads} heads of the keys of layers with states (linear_num_key_heads) cannot be"
                              f" shared equally by {ranks} ranks")
        self.k_heads, self.v_heads = self.k_heads // ranks, self.v_heads // ranks
        self.keys, self.values = self.k_heads * self.k_dim, self.v_heads * self.v_dim
        self.channels = 2 * self.keys + self.values


def _state(config: ModelConfig, shard: Shard) -> StateSpec:
    s = Sizes(config, shard.ranks)
    return StateSpec(((s.channels, s.conv - 1), (s.v_heads, s.k_dim, s.v_dim)))


class GatedDeltaNet:
    """A layer's `decoder.Mixer`."""

    def __init__(self, config: ModelConfig, w: Weights, layer: int, index: int):
        """`index`: which of the layers with states this one is."""
        name, s, whole = f"model.layers.{layer}.linear_attn", Sizes(config, w.shard.ranks), Sizes(config)
        self.index, self.sizes, self.eps, self._fixed = index, s, config.norm_eps, w.fixed
        self.into = self.projections(w, name, whole, config.hidden_size)
        self.out = Linear(w, [(f"{name}.out_proj", config.hidden_size)], whole.values, summed=True)
        edges = (0, whole.keys, 2 * whole.keys, whole.channels)
        self.conv = w.stack_pieces([rows_of(w.shard, f"{name}.conv1d.weight", whole.channels, first, last - first)
                                    for first, last in pairwise(edges)], 1, s.conv)
        self.decay, self.bias = (w.stack_pieces([rows_of(w.shard, f"{name}.{part}", whole.v_heads)])
                                 for part in ("A_log", "dt_bias"))
        self.norm = w.take(f"{name}.norm.weight", s.v_dim)

    def projections(self, w: Weights, name: str, whole: Sizes, hidden: int) -> Linear:
        """To q, k, v, z, b and a, one below the other; `whole`: sizes of all ranks together."""
        parts = [rows_of(w.shard, f"{name}.in_proj_qkvz", whole.channels + whole.values),
                 rows_of(w.shard, f"{name}.in_proj_ba", 2 * whole.v_heads)]
        return Linear(w, parts, hidden, order=_row_order(self.sizes))

    def __call__(self, x: torch.Tensor, norm: RMSNorm | None, rope: Rope, attend: Attend) -> torch.Tensor:
        s, states = self.sizes, getattr(attend, "states", None)
        assert isinstance(states, StepStates), "this model's layers keep states, and the step brings no memory for them"
        conv, delta = states.parts[self.index]
        made = self.into(x) if norm is None else self.into.normed(x, norm)
        qkv, z, b, a = made.split([s.channels, s.values, s.v_heads, s.v_heads], dim=1)
        q, k, v = causal_conv(qkv, self.conv[:, 0], conv, states.where).split([s.keys, s.keys, s.values], dim=1)
        q, k = (part.unflatten(1, (s.k_heads, s.k_dim)) for part in (q, k))
        inputs = delta_inputs(q, k, a, b, self.decay, self.bias, self._fixed)
        out = gated_delta_rule(inputs.q, inputs.k, v.unflatten(1, (s.v_heads, s.v_dim)), inputs.decay, inputs.beta,
                               delta, states.where, x.dtype)
        return gated_norm(out, z, self.norm, self.eps, x.dtype, self._fixed)


def _row_order(s: Sizes) -> torch.Tensor:
    """Of the two projections' rows one below the other: all of q, then k, v, z, b, a. The checkpoint holds the rows
    q k v z of one key head after another, and then b a of one key head after another."""
    each = s.v_heads // s.k_heads
    widths = (s.k_dim, s.k_dim, each * s.v_dim, each * s.v_dim)
    qkvz = torch.arange(s.channels + s.values).view(s.k_heads, sum(widths)).split(widths, dim=1)
    ba = (s.channels + s.values + torch.arange(2 * s.v_heads)).view(s.k_heads, 2 * each).split(each, dim=1)
    return torch.cat([part.flatten() for part in (*qkvz, *ba)])


def some_experts(config: ModelConfig, w: Weights, index: int) -> MLP:
    sparse = config.value("num_experts") and (index + 1) % config.value("decoder_sparse_step") == 0
    if not sparse or index in (config.value("mlp_only_layers") or ()):
        return gated_mlp(config, w, index, Style())
    name, hidden = f"model.layers.{index}.mlp", config.hidden_size
    expert = GatedMLP(w, f"{name}.shared_expert", hidden, config.value("shared_expert_intermediate_size"),
                      config.hidden_act)
    share = Linear(w, [(f"{name}.shared_expert_gate", 1)], hidden)

    def shared(x: torch.Tensor) -> torch.Tensor:
        shares = by_rows(torch.sigmoid, share(x)) if w.fixed else share(x).sigmoid()
        return expert(x) * shares

    route = softmax_over_chosen if config.value("norm_topk_prob") else softmax_over_all
    inner = config.value("moe_intermediate_size")
    if w.holds(f"{name}.experts.gate_up_proj"):
        return stored_together(config, w, name, inner, route, shared)
    names = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    return separate_experts(config, w, name, inner, names, route, shared)
