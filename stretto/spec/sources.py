"""Checkpoints of drafters: their tensors under the names that our layers ask for, and their configurations."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from stretto.model.config import ModelConfig
from stretto.model.source import Renamed, SafetensorsSource, WeightError, WeightSource

__all__ = ["PickledSource", "Renamed", "open_source", "parse_config"]

_ARCHITECTURE = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
                 "mistral": "MistralForCausalLM"}


class PickledSource:
    """`pytorch_model.bin`, as older draft checkpoints come. Read with weights_only: no code of the file runs."""

    def __init__(self, path: Path):
        try:
            self._tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except (RuntimeError, OSError, pickle.UnpicklingError) as e:
            raise WeightError(f"{path.name} cannot be read as tensors alone ({e}): convert it to safetensors") from e

    def names(self) -> Iterable[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def tensor(self, name: str) -> torch.Tensor:
        return self._tensors[name]


def open_source(folder: Path) -> WeightSource:
    """Raises WeightError."""
    pickled = folder / "pytorch_model.bin"
    if pickled.is_file() and not any(folder.glob("*.safetensors*")):
        return PickledSource(pickled)
    return SafetensorsSource(folder)


def parse_config(raw: Mapping[str, Any], **more: Any) -> ModelConfig:
    """A drafter's config.json, read as that of the family whose layers it has (`model_type`; Llama where it names no
    other). Windows are those of the family; drafters that differ say so in `more`."""
    family = _ARCHITECTURE.get(str(raw.get("model_type")), "LlamaForCausalLM")
    return ModelConfig.from_hf({**raw, "architectures": [family], **more})
