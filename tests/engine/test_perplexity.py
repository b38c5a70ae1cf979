"""Perplexity through the engine is transformers'; what 8-bit cells add to it is small, and not nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stretto.bench.perplexity import (
    Perplexity,
    engine_perplexity,
    reference_model,
    reference_perplexity,
    windows_of,
)
from stretto.config import Config, ModelSection
from stretto.engine.llm import LLM
from stretto.engine.locate import locate
from stretto.text.tokenizer import load_tokenizer
from tests.engine.small import VOCAB, save_tiny
from tests.text.vocabularies import byte_level

SHARED = Path(__file__).resolve().parents[2] / "../shared/data"
STORIES, WIKITEXT = SHARED / "models/stories260k", SHARED / "corpora/wikitext-2/test.txt"
OPTIONS = {"float32": ({"dtype": "float32"}, 1e-4), "bfloat16": ({"dtype": "bfloat16"}, 2e-2),
           "8-bit cells": ({"dtype": "float32", "kv_cache_dtype": "fp8_e4m3"}, 2e-2)}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    made = save_tiny(folder, "llama", None, sharpness=1)
    byte_level(VOCAB).save(str(folder / "tokenizer.json"))
    return folder, made


@pytest.mark.parametrize("options, limit", OPTIONS.values(), ids=OPTIONS)
def test_it_is_that_of_transformers(tiny, options, limit):
    folder, reference = tiny
    ids = torch.randint(VOCAB, (260,), generator=torch.Generator().manual_seed(0)).tolist()
    windows, told = windows_of(ids, 64), []
    want = reference_perplexity(reference, windows, told.append)
    assert want.tokens == 4 * 63 == sum(told)
    with LLM(str(folder), max_model_len=65, **options) as llm:
        found = engine_perplexity(llm, windows)
    assert abs(found.off(want)) < limit
    if options.get("kv_cache_dtype"):
        assert found.value != want.value


@pytest.mark.skipif(not (STORIES.exists() and WIKITEXT.exists()), reason="shared/data has no stories260k or WikiText-2")
@pytest.mark.parametrize("options, limit", [
    ({"dtype": "float32"}, 1e-3), ({"dtype": "bfloat16"}, 1e-2),
    ({"dtype": "float32", "kv_cache_dtype": "fp8_e4m3"}, 2e-2)], ids=["float32", "bfloat16", "8-bit cells"])
def test_a_trained_model_on_wikitext(options, limit):
    """It knows children's stories and has heads of 8 numbers: 8 bits cost it more than larger models (1.4 % here)."""
    ids = load_tokenizer(STORIES).encode(WIKITEXT.read_text()[:20_000])
    windows = windows_of(ids, 256, 4096)
    want = reference_perplexity(reference_model(STORIES, getattr(torch, options["dtype"])), windows)
    with LLM(str(STORIES), max_model_len=257, **options) as llm:
        assert abs(engine_perplexity(llm, windows).off(want)) < limit


@pytest.mark.full
@pytest.mark.skipif(not WIKITEXT.exists(), reason="shared/data has no WikiText-2")
@pytest.mark.parametrize("dtype, limit", [("float32", 1e-3), ("bfloat16", 1e-2)])
def test_the_default_model_on_wikitext(dtype, limit):
    """2048 tokens, whose difference is the same as that of a longer text; docs/benchmarks.md has more."""
    located = locate(Config(model=ModelSection(None)))
    windows = windows_of(load_tokenizer(located.tokenizer_path).encode(WIKITEXT.read_text()[:20_000]), 512, 2048)
    want = reference_perplexity(reference_model(located.path, getattr(torch, dtype)), windows)
    with LLM(max_model_len=513, dtype=dtype) as llm:
        assert abs(engine_perplexity(llm, windows).off(want)) < limit


@given(st.integers(0, 50), st.integers(2, 9), st.none() | st.integers(0, 60))
def test_windows(count, size, most):
    ids = list(range(count))
    used = ids if most is None else ids[:most]
    if len(used) < size:
        with pytest.raises(ValueError, match="take a longer text"):
            windows_of(ids, size, most)
        return
    made = windows_of(ids, size, most)
    assert [i for window in made for i in window] == used[: len(used) // size * size]
    assert {len(window) for window in made} == {size}


def test_only_the_same_windows_are_compared():
    assert Perplexity(2, 2.0).value == pytest.approx(2.718281828)
    with pytest.raises(ValueError, match="2 and 3 tokens"):
        Perplexity(2, 2.0).off(Perplexity(3, 2.0))
