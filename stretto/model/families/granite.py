"""Granite 3: a Llama that scales its embeddings, scores and logits, and what a layer adds to the residual stream."""

from __future__ import annotations

from stretto.model.config import ModelConfig
from stretto.model.decoder import Decoder, Style
from stretto.model.weights import Weights


def granite(config: ModelConfig, w: Weights, context: int) -> Decoder:
    return Decoder(config, w, context, scaled_style(config))


def scaled_style(config: ModelConfig) -> Style:
    bias, scale, embedding, logits, residual = config.attention_bias, *(float(config.value(name)) for name in (
        "attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier"))
    return Style(bias, bias, config.mlp_bias, scale=scale, embedding_scale=embedding, logit_divisor=logits,
                 residual_scale=residual)
