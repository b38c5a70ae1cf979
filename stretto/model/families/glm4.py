"""GLM-4: half of each head's features are rotated, neighbours as pairs. The models of April 2025 (`Glm4ForCausalLM`)
have norms after attention and MLP besides those before; the first GLM-4 (`GlmForCausalLM`) has not."""

from __future__ import annotations

from stretto.model.config import ModelConfig
from stretto.model.decoder import Decoder, Norms, Style
from stretto.model.weights import Weights

NORMS = Norms("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")


def glm(config: ModelConfig, w: Weights, context: int) -> Decoder:
    return Decoder(config, w, context, Style(config.attention_bias, fused_mlp=True, neighbours=True))


def glm4(config: ModelConfig, w: Weights, context: int) -> Decoder:
    return Decoder(config, w, context, Style(config.attention_bias, fused_mlp=True, neighbours=True, norms=NORMS))
