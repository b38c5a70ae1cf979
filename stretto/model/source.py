"""Where weights come from: one small protocol, and HF folders of safetensors behind it.

A source names tensors as Hugging Face checkpoints do ("model.layers.0.self_attn.q_proj.weight") and gives each one on
demand, so that a model copies them one by one into its own parameters and never holds the checkpoint twice.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from safetensors import SafetensorError, safe_open

from stretto.model.errors import FETCH_LFS, is_pointer
from stretto.ops.packed import Layout, Packed

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


_TEXT_PREFIXES = (("language_model.model.", "model."), ("language_model.lm_head.", "lm_head."),
                  ("model.language_model.", "model."))
_OTHER_PARTS = ("vision_tower.", "vision_model.", "multi_modal_projector.", "model.vision_tower.",
                "model.multi_modal_projector.", "model.visual.")


class WeightError(ValueError):
    """Weights that cannot be served: unreadable, missing, extra or misshapen. The message names all of them."""


class WeightSource(Protocol):
    """Named tensors, read one at a time."""

    def names(self) -> Iterable[str]:
        """Every tensor of the checkpoint."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Its shape, without reading its data."""
        ...

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor on the CPU in the checkpoint's dtype; may be a view of mapped memory, so do not write to it."""
        ...


@runtime_checkable
class PackedSource(WeightSource, Protocol):
    """A source of quantised weights, which gives them packed where their layout can be written so."""

    def layout(self, name: str) -> Layout | None:
        """How a weight would come, without reading it; None: as numbers only."""
        ...

    def packed(self, name: str) -> Packed:
        """A weight that has a layout, on the CPU, scales in float32."""
        ...

    def told(self, dtype: torch.dtype) -> None:
        """Once all is loaded, says what was given as numbers and is kept in `dtype`."""
        ...


class SafetensorsSource:
    """The weights of an HF folder. Where an index exists, it alone says which file holds what: other files in the
    folder are never opened. Files are mapped, not read; a tensor's pages are touched when it is copied."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        index = self.folder / INDEX_FILE
        if index.is_file():
            self._files, listed = self._open_indexed(index)
        else:
            self._files, listed = {SINGLE_FILE: _open(self._single_file())}, None
        self._where = {name: file for file in self._files.values() for name in file.keys()}  # noqa: SIM118
        if listed is not None:
            self._where = self._choose(listed)

    def _single_file(self) -> Path:
        path = self.folder / SINGLE_FILE
        if path.is_file():
            return path
        if path.is_symlink():
            raise WeightError(f"{path} is a link to {path.readlink()}, which is not there: fetch the model again, or "
                              "copy what the link stands for")
        found = sorted(p.name for p in self.folder.glob("*.safetensors"))
        pickles = sorted(p.name for p in self.folder.glob("pytorch_model*.bin"))
        hint = (f"; it has {', '.join(found)}, which no index lists" if found else
                f"; it has {', '.join(pickles)}: convert them to safetensors first" if pickles else "")
        raise WeightError(f"{self.folder} has neither {SINGLE_FILE} nor {INDEX_FILE}{hint}")

    def _open_indexed(self, index: Path) -> tuple[dict[str, Any], dict[str, str]]:
        try:
            listed = json.loads(index.read_text())["weight_map"]
        except (ValueError, KeyError, TypeError) as e:
            raise WeightError(f"{index} is no index of safetensors ({type(e).__name__}: {e}): fetch it again") from e
        problems, files = [], {}
        for shard in sorted(set(listed.values())):
            path = self.folder / shard
            if not path.is_file():
                problems.append(f"shard {shard} is missing ({sum(s == shard for s in listed.values())} tensors)")
                continue
            try:
                files[shard] = _open(path)
            except WeightError as e:
                problems.append(str(e))
        if problems:
            raise WeightError(f"the checkpoint in {self.folder} is incomplete: {'; '.join(problems)}")
        return files, listed

    def _choose(self, listed: dict[str, str]) -> dict[str, Any]:
        held = {shard: set(file.keys()) for shard, file in self._files.items()}
        absent = sorted(name for name, shard in listed.items() if name not in held[shard])
        if absent:
            raise WeightError(f"{INDEX_FILE} of {self.folder} lists tensors that its shards do not hold: "
                              + ", ".join(f"{name} (in {listed[name]})" for name in absent))
        return {name: self._files[shard] for name, shard in listed.items()}

    def names(self) -> Iterable[str]:
        return self._where.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._where[name].get_slice(name).get_shape())

    def tensor(self, name: str) -> torch.Tensor:
        return self._where[name].get_tensor(name)

    def slices(self) -> dict[str, Any]:
        """Every tensor as an unread slice, for loaders that read by themselves."""
        return {name: file.get_slice(name) for name, file in self._where.items()}


class Renamed:
    """A source whose tensors have other names. `name_of` gives a tensor's new name, or None to leave it out."""

    def __init__(self, source: WeightSource, name_of: Callable[[str], str | None]):
        self._source = source
        self._old = {new: old for old in source.names() if (new := name_of(old)) is not None}

    def names(self) -> Iterable[str]:
        return self._old.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(self._old[name])

    def tensor(self, name: str) -> torch.Tensor:
        return self._source.tensor(self._old[name])


def text_part(source: WeightSource) -> WeightSource:
    """`source`; of a multimodal checkpoint the language model alone, by the names that it would have by itself; of a
    decoder without its head, by those that it has within the whole model."""
    names = set(source.names())
    if any(name.startswith(("language_model.", "model.language_model.")) for name in names):
        return Renamed(source, name_alone)
    return Renamed(source, _name_within) if "embed_tokens.weight" in names else source


def _name_within(stored: str) -> str:
    """Of a decoder that was saved by itself, as those of models for embeddings are."""
    return stored if stored.startswith("lm_head.") else f"model.{stored}"


def name_alone(stored: str) -> str | None:
    """The name within the text part of what a multimodal checkpoint calls so; None for what is no part of it."""
    for prefix, alone in _TEXT_PREFIXES:
        if stored.startswith(prefix):
            return alone + stored.removeprefix(prefix)
    return None if stored.startswith(_OTHER_PARTS) else stored


def _open(path: Path):
    """safe_open checks the header against the file's size, so a truncated file is found here."""
    try:
        return safe_open(str(path), framework="pt", device="cpu")
    except (SafetensorError, OSError) as e:
        if is_pointer(path):
            raise WeightError(f"{path} is the pointer of Git LFS to a file: {FETCH_LFS}") from e
        raise WeightError(f"{path.name} ({path.stat().st_size} bytes) is truncated or damaged ({e}): "
                          "fetch it again") from e
