"""Phi-3, 3.5 and Phi-4: Llama with fused matrices in the checkpoint; some rotate a part of each head."""

from __future__ import annotations

from stretto.model.config import ModelConfig
from stretto.model.decoder import Decoder, Style
from stretto.model.weights import Weights


def phi3(config: ModelConfig, w: Weights, context: int) -> Decoder:
    return Decoder(config, w, context, Style(fused_qkv=True, fused_mlp=True))
