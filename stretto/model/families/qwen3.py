"""Qwen3: Llama with a norm on each head of q and k, and a head size of its own."""

from __future__ import annotations

from stretto.model.config import ModelConfig
from stretto.model.families.llama import Llama, Style
from stretto.model.weights import Weights


def qwen3(config: ModelConfig, w: Weights, context: int) -> Llama:
    return Llama(config, w, context, Style(config.attention_bias, config.attention_bias, head_norm=True))
