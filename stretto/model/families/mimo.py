"""MiMo: Qwen2 with a layer that predicts a further token. That layer is a drafter's (spec/mtp.py), not the model's."""

from __future__ import annotations

from stretto.model.config import ModelConfig
from stretto.model.decoder import Decoder, Style
from stretto.model.weights import Weights


def mimo(config: ModelConfig, w: Weights, context: int) -> Decoder:
    w.ignore_under("model.mtp_layers.")
    return Decoder(config, w, context, Style(qkv_bias=True))
