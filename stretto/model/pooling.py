"""How a checkpoint wants its hidden states pooled into an embedding, as sentence-transformers writes it down.

    modules.json             which modules follow each other: the model, its pooling, often a normalisation
    1_Pooling/config.json    how it pools

Most models that generate have neither, and are pooled by their last token. What a checkpoint asks for and this engine
does not do is a reason to give no embeddings at all: they would be other ones than those it was trained for. No torch
in this module.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

_MODES: dict[str, Literal["last", "mean"]] = {"lasttoken": "last", "mean_tokens": "mean", "mean": "mean"}
_MODULES = frozenset({"Transformer", "Pooling", "Normalize"})  # vectors are always of length 1


@dataclass(frozen=True)
class PoolingFacts:
    """`pooling`: where a request says nothing. `lack`: why the checkpoint's embeddings cannot be made; "": they can."""

    pooling: Literal["last", "mean"] = "last"
    lack: str = ""


def pooling_facts(path: Path) -> PoolingFacts:
    """Of the model at `path`, a folder or a file. A file that cannot be read is as one that is not there, but for the
    pooling: then nobody knows."""
    modules = _json(path / "modules.json") if path.is_dir() else None
    if not isinstance(modules, list):
        return PoolingFacts()
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules if isinstance(module, dict)]
    if others := [kind for kind in kinds if kind not in _MODULES]:
        return PoolingFacts(lack=f"its modules.json has {', '.join(others)}, which is not run")
    folder = next((module.get("path") for module, kind in zip(modules, kinds) if kind == "Pooling"), "1_Pooling")
    asked = _modes(_json(path / str(folder) / "config.json"))
    if len(asked) != 1 or asked[0] not in _MODES:
        return PoolingFacts(lack=f"its pooling is {' and '.join(asked) or 'not known'}; there are lasttoken and mean")
    return PoolingFacts(_MODES[asked[0]])


def _modes(config: Any) -> list[str]:
    """The modes that are on: vectors of several would stand beside each other."""
    if not isinstance(config, dict):
        return []
    if isinstance(mode := config.get("pooling_mode"), str):
        return [mode]
    return [name.removeprefix("pooling_mode_") for name, on in config.items()
            if name.startswith("pooling_mode_") and on is True]


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
