"""One decoder layer of a drafter: that of Llama's relatives, with the liberties that draft heads take.

    x = what the drafter made of embedding, features or hidden states, normed as it likes     [T, inputs]
    residual += out(attend(rotate(q, k, v of x)));  residual += mlp(norm(residual))
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stretto.attn.api import Attend, LayerSpec
from stretto.model.config import ModelConfig
from stretto.model.layers import GatedMLP, HeadNorm, Linear, RMSNorm, Rotary, attend_heads
from stretto.model.weights import Weights
from stretto.ops.layer import Rope
from stretto.spec.context import DrafterContext


@dataclass(frozen=True)
class LayerStyle:
    """What sets the families of draft layers apart."""

    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_norm: bool = False  # RMSNorm of each q and k head before the rotation


def layer_specs(config: ModelConfig) -> tuple[LayerSpec, ...]:
    """Attention of each layer of a drafter's config."""
    return tuple(LayerSpec(config.n_heads, config.n_kv_heads, config.head_dim, config.head_dim**-0.5, window)
                 for window in config.windows)


def rotary_of(config: ModelConfig, context: DrafterContext, ahead: int, ordered: bool = False) -> Rotary:
    """For the positions that are served and those that a proposal reaches past them, or as many as the drafter has.
    `ordered`: as `Rotary` takes it."""
    positions = min(config.max_position, context.positions + ahead) if context.positions else config.max_position
    return Rotary(config.rope, config.head_dim, positions, context.device, ordered)


def kv_groups(config: ModelConfig) -> tuple[tuple[int | None, int, int], ...]:
    """(window, numbers that a token stores, heads that these make up) of a drafter's layers."""
    heads = {window: 2 * config.n_kv_heads * config.windows.count(window) for window in dict.fromkeys(config.windows)}
    return tuple((window, count * config.head_dim, count) for window, count in heads.items())


def style_of(config: ModelConfig) -> LayerStyle:
    """What the layers of the family that the config names look like."""
    if config.architecture == "Qwen3ForCausalLM":
        return LayerStyle(config.attention_bias, config.attention_bias, head_norm=True)
    if config.architecture == "Qwen2ForCausalLM":
        return LayerStyle(qkv_bias=True)
    return LayerStyle(config.attention_bias, config.attention_bias, config.mlp_bias)


class DraftLayer:
    """`name` is its prefix in the checkpoint; `inputs` the width of x (None: the hidden size)."""

    def __init__(self, config: ModelConfig, w: Weights, name: str, index: int, style: LayerStyle,
                 inputs: int | None = None):
        c, attn = config, f"{name}.self_attn"
        q_size, kv_size = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
        self.index, self.n_heads, self.n_kv_heads, self.head_dim = index, c.n_heads, c.n_kv_heads, c.head_dim
        self.qkv = Linear(w, [(f"{attn}.q_proj", q_size), (f"{attn}.k_proj", kv_size), (f"{attn}.v_proj", kv_size)],
                          inputs or c.hidden_size, style.qkv_bias)
        self.head_norm = (HeadNorm(w, attn, c.n_heads, c.n_kv_heads, c.head_dim, c.norm_eps)
                          if style.head_norm else None)
        self.out = Linear(w, [(f"{attn}.o_proj", c.hidden_size)], q_size, style.out_bias)
        self.mlp_norm = RMSNorm(w, f"{name}.post_attention_layernorm", c.hidden_size, c.norm_eps)
        self.mlp = GatedMLP(w, f"{name}.mlp", c.hidden_size, c.intermediate_size, c.hidden_act, style.mlp_bias)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, rope: Rope,
                 attend: Attend) -> torch.Tensor:
        """x [T, inputs]; residual [T, E], updated in place and returned."""
        tokens = x.shape[0]
        qkv = self.qkv(x).view(tokens, -1, self.head_dim)
        attended = attend_heads(attend, self.index, qkv, self.n_heads, rope, self.head_norm)
        self.out.add_to(residual, attended.reshape(tokens, -1))
        return self.mlp.add_normed(residual, self.mlp_norm)
