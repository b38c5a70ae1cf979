"""Tensor parallelism on two GPUs: the text of one, through CUDA graphs, symmetric memory and NCCL."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from stretto.attn.triton_ragged import TritonRagged
from stretto.device.ranks import RankFailed, RanksDevice
from stretto.engine.llm import LLM
from tests.device.test_ranks import rank_1_of
from tests.engine.small import VOCAB, greedy, save_tiny
from tests.proofs import ProofOf

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
PROMPTS = [[5, 9, 2, 7, 1, 30], [8, 8, 1, 8, 8, 1, 8, 8], [60 + i for i in range(40)]]
LONG = [(7 * i + i // 9) % 250 for i in range(180)]


def make(folder: Path, ranks: int, **options) -> LLM:
    return LLM(str(folder), tensor_parallel_size=ranks, dtype="float32", kv_tokens=2048, max_model_len=256,
               chunk_size=64, max_num_seqs=4, **options)


def answers(folder: Path, ranks: int, **options) -> tuple[list[list[int]], int, int]:
    """Ids, drafts, and steps that several ranks ran with Triton's kernels."""
    with make(folder, ranks, **options) as llm:
        made = llm.generate([*PROMPTS, LONG], greedy(24, ignore_eos=True))
        device, steps = llm.core.device, int(llm.core.stats().counters["steps"])
        shared = isinstance(device, RanksDevice) and type(device.own.runner.backend) is TritonRagged  # type: ignore
        return [c.token_ids for c in made], sum(c.usage.drafted_tokens for c in made), steps if shared else 0


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_tiny(folder, "llama")
    Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0")).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def one(llama: Path) -> list[list[int]]:
    return answers(llama, 1, enforce_eager=True)[0]


BOTH = ("tensor parallelism", "attention triton")


@pytest.mark.parametrize("options", [{"enforce_eager": True}, pytest.param({}, marks=pytest.mark.proves(*BOTH)),
                                     {"speculation": "ngram", "speculation_tokens": 3}, {"overlap": False},
                                     {"deterministic": True}, {"kv_host_bytes": 1 << 26}],
                         ids=["eager", "graphs", "drafts", "no overlap", "deterministic", "host memory"])
def test_two_gpus_give_the_text_of_one(llama: Path, one: list[list[int]], proof: ProofOf, options: dict):
    two, drafted, steps = answers(llama, 2, **options)
    assert two == one and (drafted > 0) == ("speculation" in options)
    for feature in proof.declared:
        proof.show(feature, steps)


def test_a_killed_rank_ends_the_engine_at_once(llama: Path):
    """In the middle of a sum, if need be: this rank's GPU is let go."""
    llm = make(llama, 2)
    try:
        llm.generate(PROMPTS, greedy(8, ignore_eos=True))
        rank_1_of(llm.core).kill()
        started = time.monotonic()
        with pytest.raises(RankFailed, match="rank 1 has died"):
            llm.generate(PROMPTS, greedy(100, ignore_eos=True))
        assert time.monotonic() - started < 10
    finally:
        started = time.monotonic()
        with suppress(RankFailed):
            llm.close()
        assert time.monotonic() - started < 30
    assert torch.ones(4, device="cuda").sum().item() == 4, "the GPU is free again"
