"""The config.json of a draft checkpoint, in one layout for those that say the same in two.

vLLM's speculators writes DFLASH heads since its Open Spec Config with the layer's fields at the top and the rest in
`speculative_config`; read here, that is the layout which speculators wrote before:

    speculative_config.target_layer_ids       counted from target_layer_start_idx: 0 is "after layer i", 1 "before"
    speculative_config.speculative_tokens     the block without its first place, where that is the last known id's
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stretto.model.config import read_config

_SAME = ("mask_token_id", "draft_vocab_size", "sample_from_anchor", "sliding_window_non_causal")


def read_draft_config(folder: Path) -> Mapping[str, Any]:
    """Raises model.config.ConfigError."""
    return in_speculators_layout(read_config(folder)[0])


def in_speculators_layout(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    said = raw.get("speculative_config")
    if "open_spec_config_version" not in raw or not isinstance(said, Mapping):
        return raw
    first, layers = int(said.get("target_layer_start_idx", 0)), said.get("target_layer_ids") or ()
    return {
        **raw, **{key: said[key] for key in _SAME if key in said}, "speculators_model_type": said.get("method"),
        "speculators_config": {"verifier": {"name_or_path": said.get("verifier")}}, "transformer_layer_config": raw,
        "aux_hidden_state_layer_ids": [i + 1 - first for i in layers],
        "block_size": int(said.get("speculative_tokens", 0)) + (not said.get("sample_from_anchor", False))}
