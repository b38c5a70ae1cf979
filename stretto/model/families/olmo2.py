"""OLMo 2: norms after attention and MLP instead of before them, and a norm over all of q and all of k."""

from __future__ import annotations

from stretto.model.config import ModelConfig
from stretto.model.decoder import Decoder, Norms, Style
from stretto.model.weights import Weights

NORMS = Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")


def olmo2(config: ModelConfig, w: Weights, context: int) -> Decoder:
    bias = config.attention_bias
    return Decoder(config, w, context, Style(bias, bias, whole_norm=True, norms=NORMS))
