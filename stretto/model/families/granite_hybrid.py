"""Granite 4: layers of Mamba-2 that keep a state, between them layers that attend, most without any rotation; an MLP
for all tokens, in some models beside experts. Scaled as Granite 3 is.

A layer with a state, x [T, E] (H heads of P features, G groups of N features of the state):

    z x B C dt = in_proj(x);  x B C = silu(conv(x B C));  dt = softplus(dt + bias)
    o = state_space(C, B, dt x, decay = -exp(A) dt) + D x
    out = out_proj(norm(o * silu(z)))                      the norm is of each group's part of the features
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F

from stretto.attn.api import Attend, StateSpec
from stretto.model.config import ConfigError, ModelConfig
from stretto.model.decoder import MLP, Decoder
from stretto.model.experts import softmax_over_chosen
from stretto.model.families.granite import scaled_style
from stretto.model.families.moe import stored_together
from stretto.model.layers import GatedMLP, Linear, RMSNorm
from stretto.model.shard import Piece, Shard, cut, rows_of
from stretto.model.weights import Weights
from stretto.ops.fixed import by_rows
from stretto.ops.layer import Rope
from stretto.ops.recurrent import causal_conv, state_space
from stretto.ops.state_step import StepStates


def granite_hybrid(config: ModelConfig, w: Weights, context: int) -> Decoder:
    style = replace(scaled_style(config), mlp=_mlp, recurrent=Mamba2, state=_state)
    return Decoder(config, w, context, style)


class _Sizes:
    """Of a layer with a state: of all of it, or of a rank's heads and groups. One group serves the heads of all
    ranks."""

    def __init__(self, config: ModelConfig, ranks: int = 1):
        self.heads, self.groups, self.state, self.conv = (
            config.size(f"mamba_{name}") for name in ("n_heads", "n_groups", "d_state", "d_conv"))
        inner = config.size("mamba_expand") * config.hidden_size
        if inner % self.heads or self.heads % self.groups:
            raise ConfigError(f"mamba_n_heads is {self.heads}; it must divide the {inner} inner features, and be a"
                              f" multiple of mamba_n_groups, {self.groups}")
        if self.conv < 2:
            raise ConfigError(f"mamba_d_conv is {self.conv}; it must be 2 or more")
        if self.heads % ranks or (self.groups > 1 and self.groups % ranks):
            raise ConfigError(f"{self.heads} heads of layers with states (mamba_n_heads) in {self.groups} groups cannot"
                              f" be shared equally by {ranks} ranks")
        self.width, self.total = inner // self.heads, inner
        self.heads, self.groups = self.heads // ranks, max(1, self.groups // ranks)
        self.values, self.keys = self.heads * self.width, self.groups * self.state
        self.channels = self.values + 2 * self.keys


def _state(config: ModelConfig, shard: Shard) -> StateSpec:
    s = _Sizes(config, shard.ranks)
    return StateSpec(((s.channels, s.conv - 1), (s.heads, s.state, s.width)))


class Mamba2:
    """A layer's `decoder.Mixer`."""

    def __init__(self, config: ModelConfig, w: Weights, layer: int, index: int):
        """`index`: which of the layers with states this one is."""
        name, s, whole = f"model.layers.{layer}.mamba", _Sizes(config, w.shard.ranks), _Sizes(config)
        self.index, self.sizes, self.eps, self._fixed, self._shard = index, s, config.norm_eps, w.fixed, w.shard
        bias, rows = bool(config.value("mamba_proj_bias")), whole.values + whole.channels + whole.heads
        into = [rows_of(w.shard, f"{name}.in_proj", rows, 0, whole.values),
                *_pieces(w.shard, f"{name}.in_proj", rows, whole.values, whole, s),
                rows_of(w.shard, f"{name}.in_proj", rows, whole.values + whole.channels)]
        self.into = Linear(w, into, config.hidden_size, bias)
        self.out = Linear(w, [(f"{name}.out_proj", config.hidden_size)], whole.values, bias, summed=True)
        self.conv = w.stack_pieces(_pieces(w.shard, f"{name}.conv1d.weight", whole.channels, 0, whole, s), 1, s.conv)
        self.conv_bias = (w.stack_pieces(_pieces(w.shard, f"{name}.conv1d.bias", whole.channels, 0, whole, s))
                          if config.value("mamba_conv_bias") else None)
        self.decay, self.bias, self.skip = (w.stack_pieces([rows_of(w.shard, f"{name}.{part}", whole.heads)])
                                            for part in ("A_log", "dt_bias", "D"))
        self.norm = w.stack_pieces([rows_of(w.shard, f"{name}.norm.weight", whole.values)])
        self.least, self.most = (_number(limit) for limit in config.value("time_step_limit") or (0.0, float("inf")))
        self._norm_over_ranks = w.shard.ranks > 1 and whole.groups == 1

    def __call__(self, x: torch.Tensor, norm: RMSNorm | None, rope: Rope, attend: Attend) -> torch.Tensor:
        s, states = self.sizes, getattr(attend, "states", None)
        assert isinstance(states, StepStates), "this model's layers keep states, and the step brings no memory for them"
        conv, space = states.parts[self.index]
        made = self.into(x) if norm is None else self.into.normed(x, norm)
        z, xbc, dt = made.split([s.values, s.channels, s.heads], dim=1)
        xbc = causal_conv(xbc, self.conv[:, 0], conv, states.where, self.conv_bias)
        values, keys, queries = xbc.split([s.values, s.keys, s.keys], dim=1)
        values = values.unflatten(1, (s.heads, s.width))
        keys, queries = (part.unflatten(1, (s.groups, s.state)).contiguous() for part in (keys, queries))
        dt = self._rows(self._step, dt)
        out = state_space(queries, keys, values * dt[..., None], dt * -self.decay.float().exp(), space, states.where,
                          x.dtype)
        out = torch.addcmul(out, values, self.skip.float()[:, None])
        return self._normed(self._rows(self._gated, out.flatten(1), z)).to(x.dtype)

    def _rows(self, fn: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
        """fn of all rows; if rounding may not depend on the batch, of a fixed number of them at a time."""
        return by_rows(fn, *tensors) if self._fixed else fn(*tensors)

    def _step(self, dt: torch.Tensor) -> torch.Tensor:
        return F.softplus(dt.float() + self.bias.float()).clamp(self.least, self.most)

    def _gated(self, out: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return out * F.silu(z.float())

    def _normed(self, out: torch.Tensor) -> torch.Tensor:
        """RMSNorm of each group's features; one group's may lie on all ranks."""
        if self._norm_over_ranks:
            return self._rows(self._scaled, out, self._shard.sum(self._rows(_squares, out))) * self.norm.float()
        parts = out.unflatten(1, (self.sizes.groups, -1))
        return self._rows(self._unit, parts).flatten(1) * self.norm.float()

    def _scaled(self, out: torch.Tensor, squares: torch.Tensor) -> torch.Tensor:
        return out * (squares / self.sizes.total + self.eps).rsqrt()

    def _unit(self, parts: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(parts, parts.shape[2:], None, self.eps)


def _squares(out: torch.Tensor) -> torch.Tensor:
    return out.square().sum(-1, keepdim=True)


def _number(limit: float | dict) -> float:
    """transformers writes infinity as an object."""
    return float(limit["__float__"] if isinstance(limit, dict) else limit)


def _pieces(shard: Shard, name: str, total: int, first: int, whole: _Sizes, mine: _Sizes) -> list[Piece]:
    """A rank's rows of x, B and C, one below the other from row `first` on; a group that all ranks share is whole."""
    start, count = cut(shard, whole.keys) if mine.keys < whole.keys else (0, whole.keys)
    keys = first + whole.values
    return [rows_of(shard, name, total, first, whole.values),
            *(Piece(name, total, at + start, count) for at in (keys, keys + whole.keys))]


def _mlp(config: ModelConfig, w: Weights, index: int) -> MLP:
    name, inner = f"model.layers.{index}", config.value("shared_intermediate_size")
    for_all = GatedMLP(w, f"{name}.shared_mlp", config.hidden_size, inner, config.hidden_act, fused=True,
                       names=("input_linear", "output_linear"))
    if not config.value("num_local_experts"):
        return for_all
    return stored_together(config, w, f"{name}.block_sparse_moe", config.intermediate_size, softmax_over_chosen,
                           for_all, names=("router.layer", "input_linear.weight", "output_linear.weight"))
