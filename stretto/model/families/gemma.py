"""Gemma 2 and the text model of Gemma 3: four norms a layer that multiply by 1 + weight, scaled embeddings, layers with
a window between layers without one.

Gemma 2 caps attention scores and logits by a tanh. Gemma 3 norms each head of q and k instead, and rotates layers with
a window by other frequencies than those without.
"""

from __future__ import annotations

from stretto.model.config import ConfigError, ModelConfig
from stretto.model.decoder import Decoder, Norms, Style
from stretto.model.weights import Weights

NORMS = Norms("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")


def gemma2(config: ModelConfig, w: Weights, context: int) -> Decoder:
    return _gemma(config, w, context, head_norm=False)


def gemma3(config: ModelConfig, w: Weights, context: int) -> Decoder:
    if config.value("attn_logit_softcapping") is not None:
        raise ConfigError("Gemma3ForCausalLM: attn_logit_softcapping is given, but Gemma 3 does not cap its attention "
                          "scores (transformers passes over it): set it to null")
    return _gemma(config, w, context, head_norm=True)


def _gemma(config: ModelConfig, w: Weights, context: int, head_norm: bool) -> Decoder:
    get = config.value
    if get("use_bidirectional_attention"):
        raise ConfigError(f"{config.architecture}: use_bidirectional_attention lets tokens see later ones; only causal "
                          "models are served")
    bias = config.attention_bias
    return Decoder(config, w, context, Style(
        bias, bias, head_norm=head_norm, offset_norm=True, norms=NORMS, scale=get("query_pre_attn_scalar") ** -0.5,
        softcap=get("attn_logit_softcapping"), logit_cap=get("final_logit_softcapping"),
        embedding_scale=config.hidden_size**0.5))
