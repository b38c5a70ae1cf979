"""Embeddings on a GPU: the reference's vectors, beside rows that decode through graphs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from stretto.engine.llm import LLM
from stretto.params import SamplingParams
from stretto.protocol import Request
from tests.engine.small import VOCAB, save_tiny
from tests.text.vocabularies import byte_level

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

DEVICE = "cuda"
PROMPTS = [[3, 7, 11], [7, 3, 250, 9, 12] * 14, list(range(20, 81)), [17]]
OPTIONS = dict(max_model_len=200, kv_tokens=4096, max_num_seqs=16, chunk_size=32, max_num_batched_tokens=128)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_vectors_are_the_references(tmp_path: Path, pooling: str) -> None:
    reference = save_tiny(tmp_path, "qwen3")
    byte_level(VOCAB).save(str(tmp_path / "tokenizer.json"))
    expected = []
    for prompt in PROMPTS:
        with torch.inference_mode():
            states = reference.model(torch.tensor([prompt])).last_hidden_state[0].double()
        expected.append(states[-1] if pooling == "last" else states.mean(0))
    want = torch.stack([one / one.norm() for one in expected]).numpy()
    with LLM(str(tmp_path), device=DEVICE, dtype="float32", speculation="ngram", **OPTIONS) as llm:
        for i in range(8):  # they decode while the vectors are made
            llm.core.submit(Request(rid=f"text{i}", tokens=[5, 9, 2] * (i + 1), want_text=False,
                                    sampling=SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)))
        first = llm.embed(PROMPTS, pooling=pooling)
        again = [llm.embed([prompt], pooling=pooling)[0] for prompt in PROMPTS]
        counters = llm.core.stats().counters
    np.testing.assert_allclose(first, want, atol=2e-4)
    np.testing.assert_allclose(np.stack(again), want, atol=2e-4)
    assert counters["mixed_steps"] > 0 and counters["faults"] == 0
