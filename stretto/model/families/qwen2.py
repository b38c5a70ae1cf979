"""Qwen2 and Qwen2.5: Llama with biases on q, k and v; windows from some layer on, if the config switches them on."""

from __future__ import annotations

from stretto.model.config import ModelConfig
from stretto.model.families.llama import Llama, Style
from stretto.model.weights import Weights


def qwen2(config: ModelConfig, w: Weights, context: int) -> Llama:
    return Llama(config, w, context, Style(qkv_bias=True))
