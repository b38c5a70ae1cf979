"""Mistral: Llama without biases; where the config gives a window, every layer has it (read by ModelConfig)."""

from __future__ import annotations

from stretto.model.config import ModelConfig
from stretto.model.families.llama import Llama, Style
from stretto.model.weights import Weights


def mistral(config: ModelConfig, w: Weights, context: int) -> Llama:
    return Llama(config, w, context, Style())
