"""What kind of drafter a checkpoint is, from its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stretto.model.config import ConfigError
from stretto.model.hub import ModelNotFound, resolve_model
from stretto.spec.draft_config import read_draft_config

_ARCHITECTURES = {
    "LlamaForCausalLMEagle": "eagle", "EagleLlamaForCausalLM": "eagle",
    "LlamaForCausalLMEagle3": "eagle3", "Eagle3LlamaForCausalLM": "eagle3", "Eagle3Speculator": "eagle3",
    "Eagle3DraftModel": "eagle3", "DFlashDraftModel": "dflash", "DFlashSpeculator": "dflash",
    "Qwen3DSparkModel": "dspark", "DSparkDraftModel": "dspark", "DSparkSpeculator": "dspark"}
_SPECULATORS = frozenset({"eagle3", "dflash", "dspark"})


def kind_of(raw: Mapping[str, Any]) -> str | None:
    """The name of the drafter whose layout this config.json describes; None where it does not say, as that of an
    ordinary language model (which can be a standalone drafter, and has to be called so)."""
    declared = raw.get("speculators_model_type")
    if declared in _SPECULATORS:
        return str(declared)
    for architecture in raw.get("architectures") or ():
        if architecture in _ARCHITECTURES:
            return _ARCHITECTURES[architecture]
    if raw.get("markov_rank") or "dspark_config" in raw:
        return "dspark"
    return "dflash" if "dflash_config" in raw else None


def identify(name: str) -> str | None:
    """The kind of the draft checkpoint in this folder or of this hub id; None where there is none that says."""
    path = name.partition(",")[0]
    if "/" not in path and not Path(path).exists():
        return None  # a misspelt drafter, no owner/model: nobody is asked for it
    try:
        folder = resolve_model(path)
        return kind_of(read_draft_config(folder)) if folder.is_dir() else None
    except (ModelNotFound, ConfigError):
        return None


def verifier_of(name: str) -> str | None:
    """The target that a checkpoint in the layout of vLLM's speculators was made for; None for any other model."""
    if "/" not in name and not Path(name).exists():
        return None
    try:
        folder = resolve_model(name)
        raw = read_draft_config(folder) if folder.is_dir() else {}
    except (ModelNotFound, ConfigError):
        return None
    verifier = (raw.get("speculators_config") or {}).get("verifier") or {}
    return verifier.get("name_or_path") if raw.get("speculators_model_type") else None
