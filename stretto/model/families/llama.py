"""Llama: the plain decoder, with biases where the config asks for them."""

from __future__ import annotations

from stretto.model.config import ModelConfig
from stretto.model.decoder import Decoder, Style
from stretto.model.weights import Weights

__all__ = ["Llama", "Style"]


class Llama(Decoder):
    """A CausalModel: Llama and its nearest relatives."""

    def __init__(self, config: ModelConfig, w: Weights, context: int, style: Style | None = None):
        super().__init__(config, w, context,
                         style or Style(config.attention_bias, config.attention_bias, config.mlp_bias))
