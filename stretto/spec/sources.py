"""Checkpoints of drafters: their tensors under the names that our layers ask for, and their configurations.

    CPU     matrices of 4 and 8 bits stay so, whatever the target computes in: a drafter's pass takes as long as
            reading its weights, and inputs that are rounded to bfloat16 cost no text, only now and then a draft
    CUDA    they become numbers: a drafter is small, launches count, and those of 16-bit matrices are fused with norms
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from stretto.model.config import ModelConfig
from stretto.model.source import PackedSource, Renamed, SafetensorsSource, WeightError, WeightSource
from stretto.model.weights import Weights
from stretto.ops.packed import Layout, Packed
from stretto.spec.context import DrafterContext

__all__ = ["PickledSource", "draft_weights", "open_source", "parse_config", "renamed"]

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


class RenamedPacked(Renamed):
    """`Renamed`, of a `source.PackedSource`, and one as well."""

    def __init__(self, source: PackedSource, name_of: Callable[[str], str | None]):
        super().__init__(source, name_of)
        self._packed = source

    def layout(self, name: str) -> Layout | None:
        return self._packed.layout(self._old[name])

    def packed(self, name: str) -> Packed:
        return self._packed.packed(self._old[name])

    def told(self, dtype: torch.dtype) -> None:
        """Nothing: a drafter's weights are small."""


def renamed(source: WeightSource, name_of: Callable[[str], str | None], device: torch.device) -> WeightSource:
    """A drafter's tensors under the names that `name_of` gives them (None: not the drafter's), packed where this device
    shall keep them so."""
    if device.type == "cpu" and isinstance(source, PackedSource):
        return RenamedPacked(source, name_of)
    return Renamed(source, name_of)


def draft_weights(source: WeightSource, context: DrafterContext) -> Weights:
    """What a drafter's parts take their tensors from. `source`: as `renamed` gives it."""
    return Weights(source, context.dtype, context.device, multiplied_in=torch.bfloat16)


def parse_config(raw: Mapping[str, Any], **more: Any) -> ModelConfig:
    """A drafter's config.json, read as that of the family whose layers it has (`model_type`; Llama where it names no
    other). Windows are those of the family; drafters that differ say so in `more`."""
    family = _ARCHITECTURE.get(str(raw.get("model_type")), "LlamaForCausalLM")
    return ModelConfig.from_hf({**raw, "architectures": [family], **more})
