"""Digests tell checkpoints apart by what is loaded of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stretto.model.digest import BEGINNING, SAMPLES, digest

FILES = {"config.json": b"{}", "model.safetensors": b"numbers", "adapter_config.json": b"{}",
         "adapter_model.safetensors": b"more"}


def folder_of(path: Path, files: dict[str, bytes]) -> Path:
    path.mkdir()
    for name, content in files.items():
        (path / name).write_bytes(content)
    return path


def test_the_same_files_anywhere_and_others_beside_them(tmp_path: Path):
    mine = digest(folder_of(tmp_path / "a", FILES))
    assert digest(folder_of(tmp_path / "b", FILES | {"README.md": b"x", "consolidated.safetensors": b"x"})) == mine


@pytest.mark.parametrize("name", FILES)
def test_each_file_that_is_loaded_counts(tmp_path: Path, name: str):
    mine = digest(folder_of(tmp_path / "a", FILES))
    assert digest(folder_of(tmp_path / "b", FILES | {name: FILES[name][:-1] + b"!"})) != mine
    assert digest(folder_of(tmp_path / "c", {n: content for n, content in FILES.items() if n != name})) != mine


def test_an_index_says_which_shards_are_loaded(tmp_path: Path):
    listed = {"model.safetensors.index.json": json.dumps({"weight_map": {"w": "one.safetensors"}}).encode(),
              "one.safetensors": b"1", "two.safetensors": b"2"}
    mine = digest(folder_of(tmp_path / "a", listed))
    assert digest(folder_of(tmp_path / "b", listed | {"two.safetensors": b"3"})) == mine
    assert digest(folder_of(tmp_path / "c", listed | {"one.safetensors": b"3"})) != mine


def test_pickles_count_where_there_is_nothing_else(tmp_path: Path):
    mine = digest(folder_of(tmp_path / "a", {"pytorch_model.bin": b"1"}))
    assert digest(folder_of(tmp_path / "b", {"pytorch_model.bin": b"2"})) != mine


@pytest.mark.parametrize("size", [BEGINNING - 1, BEGINNING, BEGINNING + 1, 5 * BEGINNING + 77])
def test_a_change_as_long_as_the_gaps_between_samples_is_seen_wherever_it_is(tmp_path: Path, size: int):
    file = tmp_path / "model.gguf"
    file.write_bytes(bytes(size))
    mine, length = digest(file), 1 if size <= BEGINNING else size // SAMPLES
    for at in (0, 1, BEGINNING - 3, size // 2, size - length):
        changed = bytearray(size)
        changed[at : at + length] = b"!" * len(changed[at : at + length])
        file.write_bytes(changed)
        assert digest(file) != mine, at
