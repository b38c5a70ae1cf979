"""Tensor parallelism on two GPUs: the text of one, through CUDA graphs and NCCL."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from stretto.engine.llm import LLM
from tests.engine.small import VOCAB, greedy, save_tiny

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
PROMPTS = [[5, 9, 2, 7, 1, 30], [8, 8, 1, 8, 8, 1, 8, 8], [60 + i for i in range(40)]]


def answers(folder: Path, ranks: int, **options) -> tuple[list[list[int]], int]:
    with LLM(str(folder), tensor_parallel_size=ranks, dtype="float32", kv_tokens=4096, max_model_len=200, chunk_size=16,
             **options) as llm:
        made = llm.generate(PROMPTS, greedy(24, ignore_eos=True))
        return [c.token_ids for c in made], sum(c.usage.drafted_tokens for c in made)


@pytest.mark.parametrize("options", [{}, {"speculation": "ngram", "speculation_tokens": 3}, {"overlap": False},
                                     {"enforce_eager": True}], ids=["graphs", "drafts", "no overlap", "eager"])
def test_two_gpus_give_the_text_of_one(tmp_path: Path, options: dict):
    save_tiny(tmp_path, "llama")
    Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0")).save(str(tmp_path / "tokenizer.json"))
    one, two = answers(tmp_path, 1, **options), answers(tmp_path, 2, **options)
    assert one[0] == two[0] and (two[1] > 0) == ("speculation" in options)
