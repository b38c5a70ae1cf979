"""Llama, and the plan that its many relatives share.

A relative is a `Style`: which projections have biases, and whether q and k are normed. See qwen2.py, qwen3.py and
mistral.py. One layer, hidden states [T, E]:

    x = norm(h);  q, k, v = qkv(x);  [q, k = head norm];  q, k = rotate;  h += out(attend(q, k, v))
    x = norm(h);  h += down(act(gate(x)) * up(x))
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stretto.attn.api import Attend, LayerSpec
from stretto.model.config import ModelConfig
from stretto.model.layers import Embedding, GatedMLP, Head, HeadNorm, Linear, RMSNorm, Rotary, rotate
from stretto.model.weights import Weights


@dataclass(frozen=True)
class Style:
    """What sets the relatives of Llama apart."""

    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_norm: bool = False  # RMSNorm of each q and k head before the rotation


class DecoderLayer:
    """Attention and MLP, each after a norm, each added to the residual stream in place."""

    def __init__(self, config: ModelConfig, w: Weights, index: int, style: Style):
        name, c = f"model.layers.{index}", config
        attn, q_size, kv_size = f"{name}.self_attn", c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
        self.index, self.n_heads, self.n_kv_heads, self.head_dim = index, c.n_heads, c.n_kv_heads, c.head_dim
        self.attn_norm = RMSNorm(w, f"{name}.input_layernorm", c.hidden_size, c.norm_eps)
        self.qkv = Linear(w, [(f"{attn}.q_proj", q_size), (f"{attn}.k_proj", kv_size), (f"{attn}.v_proj", kv_size)],
                          c.hidden_size, style.qkv_bias)
        self.head_norm = (HeadNorm(w, attn, c.n_heads, c.n_kv_heads, c.head_dim, c.norm_eps)
                          if style.head_norm else None)
        self.out = Linear(w, [(f"{attn}.o_proj", c.hidden_size)], q_size, style.out_bias)
        self.mlp_norm = RMSNorm(w, f"{name}.post_attention_layernorm", c.hidden_size, c.norm_eps)
        self.mlp = GatedMLP(w, f"{name}.mlp", c.hidden_size, c.intermediate_size, c.hidden_act, style.mlp_bias)

    def __call__(self, hidden: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], attend: Attend) -> torch.Tensor:
        """hidden [T, E], updated in place and returned."""
        tokens, rotated = hidden.shape[0], self.n_heads + self.n_kv_heads
        qkv = self.qkv(self.attn_norm(hidden)).view(tokens, rotated + self.n_kv_heads, self.head_dim)
        qk, v = qkv[:, :rotated], qkv[:, rotated:]
        if self.head_norm is not None:
            qk = self.head_norm(qk)
        qk = rotate(qk, rope)
        attended = attend(self.index, qk[:, : self.n_heads], qk[:, self.n_heads :], v)
        self.out.add_to(hidden, attended.reshape(tokens, -1))
        return self.mlp.add_to(hidden, self.mlp_norm(hidden))


class Llama:
    """A CausalModel: Llama and its relatives."""

    graphs = True  # forward may be captured in a CUDA graph

    def __init__(self, config: ModelConfig, w: Weights, context: int, style: Style | None = None):
        style = style or Style(config.attention_bias, config.attention_bias, config.mlp_bias)
        self.config, self.dtype, self.device = config, w.dtype, w.device
        self.vocab_size, self.hidden_size, self.max_position = config.vocab_size, config.hidden_size, context
        self.layers = tuple(LayerSpec(config.n_heads, config.n_kv_heads, config.head_dim, config.head_dim**-0.5, window)
                            for window in config.windows)
        self.embedding = Embedding(w, "model.embed_tokens", config.vocab_size, config.hidden_size)
        self.decoder = [DecoderLayer(config, w, i, style) for i in range(config.n_layers)]
        self.norm = RMSNorm(w, "model.norm", config.hidden_size, config.norm_eps)
        self.head = Head(w, "lm_head", self.embedding, config.tie_embeddings)
        self.rotary = Rotary(config.rope, config.head_dim, context, w.device)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, attend: Attend,
                taps: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
        """See CausalModel."""
        hidden, rope = self.embedding(ids), self.rotary.at(positions)
        for layer in self.decoder:
            hidden = layer(hidden, rope, attend)
            if taps is not None and (name := f"hidden.{layer.index}") in taps:
                taps[name] = hidden.clone()  # later layers write into `hidden`
        hidden = self.norm(hidden)
        if taps is not None and "hidden.last" in taps:
            taps["hidden.last"] = hidden
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[L, E] -> [L, V] float32."""
        return self.head(hidden)
