"""Draft checkpoints on disk: the settings that name one, and what both sides must agree on."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from stretto.model.config import ConfigError
from stretto.model.dequantize import dequantized
from stretto.model.gguf import GGUFSource
from stretto.model.hub import ModelNotFound, resolve_model
from stretto.model.quantization import parse_quantization
from stretto.model.source import WeightError, WeightSource
from stretto.spec.context import DrafterError, Target
from stretto.spec.draft_config import read_draft_config
from stretto.spec.sources import open_source

SHIPPED = Path(__file__).parent / "trained"  # heads for the default model, by kind; made by `training/`
FINAL_NORM = "model.norm.weight"
TREES = ("trees of drafts are not verified here: a slot has one chain of drafts (no parent column, no tree mask, no"
         " compaction of accepted cells): leave topk out, or set it to 1")


@dataclass(frozen=True)
class DraftRepo:
    """A folder with a draft checkpoint, and the options that stood behind its name."""

    kind: str
    path: Path
    raw: Mapping[str, Any]  # config.json
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def shipped(self) -> bool:
        return self.path.parent == SHIPPED

    @property
    def name(self) -> str:
        return f"drafter {self.kind} ({'the head that ships' if self.shipped else self.path.name})"

    def source(self) -> WeightSource:
        """Its tensors as numbers, however they are stored. Raises WeightError and model.config.ConfigError."""
        return dequantized(open_source(self.path), parse_quantization(self.raw))

    def number(self, key: str, default: float) -> float:
        value = self.options.get(key)
        try:
            return default if value is None else float(value)
        except ValueError as e:
            raise DrafterError(f"{self.name}: {key}={value} is no number") from e


def split_settings(kind: str, settings: str, known: tuple[str, ...]) -> tuple[str, dict[str, str]]:
    """"PATH,key=value,..." -> the path and the options. Raises DrafterError for an option that the kind has not."""
    path, *parts = settings.split(",")
    if "=" in path:
        path, parts = "", [path, *parts]
    options = {}
    for part in filter(None, parts):
        key, equals, value = part.partition("=")
        if key == "topk" and equals:
            if value != "1":
                raise DrafterError(f"drafter {kind}: topk {value}: {TREES}")
        elif key in known and equals:
            options[key] = value
        else:
            raise DrafterError(f"drafter {kind}: {part!r} is no setting; it takes "
                               + (", ".join(f"{k}=..." for k in known) or "the path of a checkpoint and nothing else"))
    return path, options


def open_repo(kind: str, settings: str, known: tuple[str, ...] = ()) -> DraftRepo:
    """The draft checkpoint that the settings name: a folder, or a hub id (fetched if need be). Without a name, the head
    of this kind that ships with the package. Raises DrafterError."""
    name, options = split_settings(kind, settings, known)
    if not name and (SHIPPED / kind).is_dir():
        return DraftRepo(kind, SHIPPED / kind, read_draft_config(SHIPPED / kind), options)
    if not name:
        raise DrafterError(f"drafter {kind} needs a draft checkpoint: --speculation {kind}:FOLDER-OR-HUB-ID")
    try:
        path = resolve_model(name)
        return DraftRepo(kind, path, read_draft_config(path) if path.is_dir() else {}, options)
    except (ModelNotFound, ConfigError) as e:
        raise DrafterError(f"drafter {kind}: {e}") from e


def count_parameters(source: WeightSource, wanted: Callable[[str], bool] = lambda name: True) -> int:
    return sum(math.prod(source.shape(name)) for name in source.names() if wanted(name))


def check_equal(what: str, draft: DraftRepo, mine: int, target: Target, theirs: int) -> None:
    """Raises DrafterError naming both sides."""
    if mine != theirs:
        raise DrafterError(f"{draft.name} was made for a {what} of {mine}; target {target.name} has {theirs}")


def check_vocabulary(draft: DraftRepo, mine: int, target: Target) -> None:
    check_equal("vocabulary", draft, mine, target, target.vocab_size)


def check_made_for(draft: DraftRepo, target: Target) -> None:
    """A head that ships is for one model, which its final norm tells from others: quantised files hold it unrounded.
    Raises DrafterError naming both."""
    if draft.shipped and fingerprint(target.path) != draft.raw["target_fingerprint"]:
        raise DrafterError(f"{draft.name} was trained for {draft.raw['target_model']}; target {target.name} is another"
                           f" model: name a draft checkpoint for it, --speculation {draft.kind}:FOLDER-OR-HUB-ID, or"
                           " take ngram, which needs none")


def fingerprint(model: Path) -> str | None:
    """Of the model in this folder or GGUF file; None where it has no final norm under the usual name."""
    try:
        source: WeightSource = GGUFSource(model) if model.suffix == ".gguf" else open_source(model)
        if FINAL_NORM not in set(source.names()):
            return None
        numbers = source.tensor(FINAL_NORM).to(torch.bfloat16).view(torch.int16)
    except (WeightError, ConfigError, OSError):
        return None
    return hashlib.sha256(numbers.numpy().tobytes()).hexdigest()[:16]


def tap_names(draft: DraftRepo, layers: list[int], target: Target) -> tuple[str, ...]:
    """Names of the hidden states after these layers of the target, 0-based. Raises DrafterError for one it lacks."""
    wrong = [i for i in layers if not 0 <= i < target.n_layers]
    if wrong:
        raise DrafterError(f"{draft.name} reads the target's layers {layers}; target {target.name} has layers"
                           f" 0..{target.n_layers - 1}")
    return tuple(f"hidden.{i}" for i in layers)
