"""The container: the same header as the gguf package reads, and damaged files found before they are used."""

from __future__ import annotations

import random
import struct

import gguf
import numpy as np
import pytest

from stretto.model.gguf import GGUFSource
from stretto.model.gguf_config import gguf_config
from stretto.model.source import WeightError
from stretto.text.gguf_file import GGUFError, GGUFFile
from stretto.text.tokenizer import TokenizerError, load_tokenizer
from tests.gguf.files import Writer, tiny_model, vocabulary_metadata, write_model
from tests.text.vocabularies import byte_level


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("gguf") / "m.gguf", tiny_model(num_hidden_layers=1),
                       gguf.GGMLQuantizationType.Q8_0, metadata=vocabulary_metadata(byte_level(), "gpt-2"))


def test_header_equals_the_library(small, tmp_path):
    metadata = {"a.bool": True, "a.int": 7, "a.float": 0.5, "a.text": "é", "a.texts": ["x", "", "世"],
                "a.ints": [1, -2], "a.floats": [0.5]}
    writer = Writer(tmp_path / "kinds.gguf", "llama", metadata)
    writer.align(64)
    writer.tensor("t", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.tensor("u", np.ones(5, np.float32))
    for path in (small, writer.close()):
        mine, theirs = GGUFFile(path), gguf.GGUFReader(path)
        assert {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")} == mine.metadata
        assert list(mine.tensors) == [t.name for t in theirs.tensors]
        for t in theirs.tensors:
            info = mine.tensors[t.name]
            assert (info.shape, info.offset, info.nbytes) == (tuple(t.shape.tolist()[::-1]), t.data_offset, t.n_bytes)
            assert np.array_equal(mine.data(t.name).reshape(-1), t.data.view(np.uint8).reshape(-1))


def test_cut_files_are_refused_at_any_length(small, tmp_path):
    raw, path = small.read_bytes(), tmp_path / "cut.gguf"
    rng = random.Random(1)
    lengths = [0, 3, 4, 8, 23, 24, len(raw) - 1, len(raw) - 40, *(rng.randrange(len(raw)) for _ in range(60))]
    for length in lengths:
        path.write_bytes(raw[:length])
        with pytest.raises(WeightError, match=r"cut off|damaged|empty|not a GGUF"):
            GGUFSource(path)
        with pytest.raises(WeightError):
            gguf_config(path)
        with pytest.raises(TokenizerError):
            load_tokenizer(path)


def test_flipped_header_bytes_never_crash(small, tmp_path):
    """Damage in the header is found, or leaves a file that can be read; no other exception, no endless reading."""
    raw, path = small.read_bytes(), tmp_path / "flipped.gguf"
    rng, end, found = random.Random(2), len(raw) - sum(t.nbytes for t in GGUFFile(small).tensors.values()), 0
    for _ in range(200):
        damaged = bytearray(raw)
        damaged[rng.randrange(min(end, 400) if rng.random() < 0.7 else end)] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            GGUFFile(path)
        except GGUFError:
            found += 1
    assert found > 20


@pytest.mark.parametrize(("change", "message"), [
    (lambda raw: b"GGML" + raw[4:], "not a GGUF file"),
    (lambda raw: raw[:4] + struct.pack("<I", 9) + raw[8:], "GGUF version 9; supported are 2, 3"),
    (lambda raw: raw[:4] + struct.pack(">I", 3) + raw[8:], "big-endian"),
], ids=["magic", "version", "byte_order"])
def test_other_files_are_refused(small, tmp_path, change, message):
    (tmp_path / "x.gguf").write_bytes(change(small.read_bytes()))
    with pytest.raises(GGUFError, match=message):
        GGUFFile(tmp_path / "x.gguf")


def test_missing_file():
    with pytest.raises(WeightError, match=r"No such file.*nowhere\.gguf"):
        gguf_config("nowhere.gguf")
    with pytest.raises(TokenizerError, match=r"nowhere\.gguf"):
        load_tokenizer("nowhere.gguf")
