"""Poolings that checkpoints ask for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stretto.model.pooling import PoolingFacts, pooling_facts

LAST = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}


def modules(*kinds: str) -> list[dict[str, Any]]:
    return [{"idx": i, "name": str(i), "path": "" if kind == "Transformer" else f"{i}_{kind}",
             "type": f"sentence_transformers.models.{kind}"} for i, kind in enumerate(kinds)]


def folder(path: Path, kinds: tuple[str, ...], pooling: dict[str, Any] | None) -> Path:
    (path / "modules.json").write_text(json.dumps(modules(*kinds)))
    if pooling is not None:
        (path / "1_Pooling").mkdir()
        (path / "1_Pooling/config.json").write_text(json.dumps(pooling))
    return path


def test_an_ordinary_model_is_pooled_by_its_last_token(tmp_path: Path):
    assert pooling_facts(tmp_path) == pooling_facts(tmp_path / "model.gguf") == PoolingFacts("last", "")


@pytest.mark.parametrize(("pooling", "expected"), [
    (LAST, "last"), ({"pooling_mode_mean_tokens": True, "word_embedding_dimension": 8}, "mean"),
    ({"pooling_mode": "lasttoken"}, "last")])
def test_the_checkpoint_decides(tmp_path: Path, pooling: dict[str, Any], expected: str):
    assert pooling_facts(folder(tmp_path, ("Transformer", "Pooling", "Normalize"), pooling)).pooling == expected


@pytest.mark.parametrize(("kinds", "pooling", "why"), [
    (("Transformer", "Pooling", "Dense", "Normalize"), LAST, "Dense"),
    (("Transformer", "Pooling"), {"pooling_mode_cls_token": True}, "cls_token"),
    (("Transformer", "Pooling"), LAST | {"pooling_mode_mean_tokens": True}, "mean_tokens and lasttoken"),
    (("Transformer", "Pooling"), None, "not known")])
def test_what_is_not_done_is_a_reason_to_give_none(tmp_path: Path, kinds: tuple[str, ...], pooling: Any, why: str):
    assert why in pooling_facts(folder(tmp_path, kinds, pooling)).lack
