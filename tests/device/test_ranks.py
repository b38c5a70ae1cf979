"""Tensor parallelism on CPUs: two ranks in two processes give what one gives."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from stretto.device.ranks import RankFailed, RanksDevice
from stretto.device.states import kv_groups
from stretto.engine.core import EngineCore
from stretto.engine.llm import LLM
from stretto.engine.ranks import Ranks
from stretto.host.half import HostHalf
from stretto.host.limits import HostLimits
from stretto.model.config import ConfigError
from stretto.model.load import load_model
from stretto.model.shard import Shard, cut_heads, heads_of, rows_of
from stretto.params import SamplingParams
from stretto.protocol import EngineInfo
from stretto.testing import AlwaysCopy
from tests.device.ranks_of_tiny import CONTEXT, PAGE, PAGES, SLOTS, Tiny, half_of, rank_half
from tests.engine.small import VOCAB, Oracle, Run, greedy, save_tiny

PROMPTS = [[5, 9, 2, 7, 1, 30], [8, 8, 1, 8, 8, 1, 8, 8], [60 + i for i in range(40)]]
TOKENS = 24
ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def engine(tiny: Tiny) -> Iterator[EngineCore]:
    """Two ranks."""
    threads = torch.get_num_threads()
    ranks = Ranks(2, "cpu", tiny, half_of)
    try:
        own, model = rank_half(tiny, ranks.join())
        device = ranks.lead(own)
        windows = tuple(group.window for group in kv_groups(model))
        groups = len(windows)
        limits = HostLimits(page_size=PAGE, pages=(PAGES,) * groups, rates=AlwaysCopy(),
                            host_pages=(tiny.host_pages,) * groups if tiny.host_pages else (),
                            windows=windows, max_slots=SLOTS, max_model_len=CONTEXT, chunk=7, budget=40,
                            width=tiny.drafts, depth=int(tiny.overlap), seeds=random.Random(0))
        info = EngineInfo(model_name="tiny", vocab_size=VOCAB, max_model_len=CONTEXT, max_num_seqs=SLOTS - 1,
                          kv_tokens=limits.kv_tokens, eos_token_ids=[])
        core = EngineCore(HostHalf(limits), device, info, int(tiny.overlap))
        yield core
        with suppress(RankFailed):  # of an engine that has failed before
            core.close()
    finally:
        ranks.close()
        torch.set_num_threads(threads)


def rank_1_of(core: EngineCore) -> psutil.Process:
    assert isinstance(core.device, RanksDevice)
    return psutil.Process(core.device._close_all.__self__._processes[0].pid)  # type: ignore[attr-defined]


OTHERS = [("qwen2", 0, False), ("qwen3", 3, True), ("mistral", 0, True), ("phi3", 3, True), ("glm4", 0, True),
          ("gemma2", 0, True), ("gemma3", 3, True), ("mixtral", 3, True), ("qwen3_moe", 0, True), ("olmo2", 3, True),
          ("gpt_oss", 3, True), ("llama4", 3, True), ("qwen3_next", 0, True),
          ("qwen3_5", 0, True), ("granite_hybrid", 0, True)]
WINDOW = {"mistral": 16, "gemma2": 16, "gemma3": 16, "gpt_oss": 16}


@pytest.mark.parametrize(("family", "drafts", "overlap"), [
    ("llama", 3, True), *(pytest.param(*other, marks=pytest.mark.full) for other in OTHERS)])
def test_two_ranks_give_the_text_of_one(tmp_path: Path, family: str, drafts: int, overlap: bool):
    oracle = Oracle(None, save_tiny(tmp_path, family, WINDOW.get(family)))  # type: ignore[arg-type]
    sampled = SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=TOKENS, logprobs=2)
    with engine(Tiny(tmp_path, overlap, drafts)) as core:
        run = Run(core)
        for i, prompt in enumerate(PROMPTS):
            run.submit(f"greedy {i}", prompt, greedy(TOKENS))
            run.submit(f"sampled {i}", prompt, sampled)
            run.step(2)
        run.finish()
        for i, prompt in enumerate(PROMPTS):
            assert run.ids(f"greedy {i}") == oracle.answer(prompt, TOKENS)
            assert len(run.ids(f"sampled {i}")) == TOKENS
        assert run.counters["mixed_steps"] > 0 and (run.counters["drafted"] > 0) == bool(drafts)


@pytest.mark.parametrize("faulty", [(1,), (0, 1)], ids=["rank-1", "both"])
def test_a_third_partys_drafter_that_fails_on_a_rank_costs_drafts_alone(tmp_path: Path, faulty: tuple[int, ...]):
    oracle = Oracle(None, save_tiny(tmp_path, "llama"))  # type: ignore[arg-type]
    with engine(Tiny(tmp_path, drafts=3, faulty=faulty)) as core:
        run = Run(core)
        for i, prompt in enumerate(PROMPTS):
            run.submit(f"{i}", prompt, greedy(TOKENS))
        run.finish()
        assert [run.ids(f"{i}") for i in range(len(PROMPTS))] == [oracle.answer(p, TOKENS) for p in PROMPTS]
        assert run.counters["drafted"] > 0 and ("drafter_faults" in core.device.counts()) == (0 in faulty)


@pytest.mark.full
def test_ranks_copy_their_part_of_a_page_to_host_memory_and_back(tmp_path: Path):
    """How long that takes is each rank's own affair, and no part of what they must agree on."""
    oracle = Oracle(None, save_tiny(tmp_path, "llama"))  # type: ignore[arg-type]
    prompts = [[(7 * seed + i * (seed + 3)) % VOCAB for i in range(180)] for seed in range(3)]
    with engine(Tiny(tmp_path, drafts=3, host_pages=400)) as core:
        run = Run(core)
        for wave in range(2):
            for i, prompt in enumerate(prompts):
                run.submit(f"{wave}.{i}", prompt, greedy(8))
                run.finish()
        for wave in range(2):
            for i, prompt in enumerate(prompts):
                assert run.ids(f"{wave}.{i}") == oracle.answer(prompt, 8)
        assert run.counters["host_saved_tokens"] > 0 and run.counters["host_restored_tokens"] > 0


@pytest.mark.full
@pytest.mark.parametrize(("family", "changes"), [("qwen3", {}), ("granite_hybrid", {"mamba_n_groups": 1})])
def test_deterministic_answers_over_ranks_do_not_depend_on_the_batch(tmp_path: Path, family: str, changes: dict):
    """Bit for bit, log-probabilities included, in bfloat16."""
    save_tiny(tmp_path, family, sharpness=1, **changes)
    Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0")).save(str(tmp_path / "tokenizer.json"))
    sampling = SamplingParams(temperature=0.8, seed=5, max_tokens=TOKENS, logprobs=3, ignore_eos=True)
    with LLM(str(tmp_path), tensor_parallel_size=2, deterministic=True, dtype="bfloat16", kv_tokens=2048,
             max_model_len=200, chunk_size=16) as llm:
        alone = [llm.generate([prompt], sampling)[0] for prompt in PROMPTS]
        together = llm.generate(PROMPTS, sampling)
    for one, other in zip(alone, together, strict=True):
        assert one.token_ids == other.token_ids and one.logprobs == other.logprobs


def test_case_6_11_a_rank_that_computes_something_else_ends_the_engine(tmp_path: Path):
    save_tiny(tmp_path, "llama")
    with engine(Tiny(tmp_path, broken=1)) as core:
        run = Run(core)
        run.submit("x", PROMPTS[0], greedy(TOKENS))
        with pytest.raises(RankFailed, match="rank 1 computed another result"):
            run.finish()


def test_a_rank_that_fails_ends_the_engine_with_its_reason(tmp_path: Path):
    save_tiny(tmp_path, "llama")
    with engine(Tiny(tmp_path, dies=1)) as core:
        run = Run(core)
        run.submit("x", PROMPTS[0], greedy(TOKENS))
        with pytest.raises(RankFailed, match="rank 1 failed: RuntimeError: out of luck"):
            run.finish()


def test_a_rank_that_cannot_load_ends_the_start_with_its_reason(tmp_path: Path):
    save_tiny(tmp_path, "llama")
    with pytest.raises(RankFailed, match="rank 1 failed: MemoryError: no room"), engine(Tiny(tmp_path, unloaded=1)):
        pass


# ------------------------------------------------------------------------------------------------------------- cutting
def test_pieces_cover_everything_once():
    for ranks in (1, 2, 4):
        pieces = [rows_of(Shard(r, ranks), "x", 24, 8, 16) for r in range(ranks)]
        assert [row for p in pieces for row in range(p.start, p.start + p.rows)] == list(range(8, 24))
    assert [cut_heads(Shard(r, 8), 2) for r in range(8)] == [(0, 1)] * 4 + [(1, 1)] * 4
    assert heads_of(Shard(3, 4), "k", 2, 16, 100, 200).start == 116


@pytest.mark.parametrize(("family", "ranks", "message"), [
    ("llama", 3, "cannot be shared equally by 3 ranks"), ("stablelm", 2, "not cut into ranks")])
def test_models_that_cannot_be_cut_are_refused(tmp_path: Path, family: str, ranks: int, message: str):
    save_tiny(tmp_path, family)
    with pytest.raises(ConfigError, match=message):
        load_model(tmp_path, dtype=torch.float32, device=torch.device("cpu"), shard=Shard(0, ranks))


KILLED = """
    import sys, time
    from pathlib import Path
    from stretto.engine.ranks import Ranks
    from tests.device.ranks_of_tiny import Tiny, half_of

    if __name__ == "__main__":
        ranks = Ranks(2, "cpu", Tiny(Path(sys.argv[1])), half_of)
        print(ranks._processes[0].pid, flush=True)
        time.sleep(60)  # never joins: the other rank waits for this one
"""


@pytest.mark.full
def test_case_17_07_a_killed_engine_leaves_no_rank(tmp_path: Path):
    script = tmp_path / "killed.py"
    script.write_text(textwrap.dedent(KILLED))
    parent = subprocess.Popen([sys.executable, str(script), str(tmp_path)], stdout=subprocess.PIPE, text=True,
                              cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert parent.stdout is not None
    rank = psutil.Process(int(parent.stdout.readline()))
    time.sleep(1)
    parent.kill()
    parent.wait()
    assert not psutil.wait_procs([rank], timeout=15)[1]


def test_a_killed_rank_ends_the_engine_also_when_it_is_idle(tmp_path: Path):
    save_tiny(tmp_path, "llama")
    with engine(Tiny(tmp_path)) as core:
        run = Run(core)
        run.submit("x", PROMPTS[0], greedy(4))
        run.finish()
        core.tick()
        rank_1_of(core).kill()
        deadline = time.monotonic() + 20
        with pytest.raises(RankFailed, match="rank 1 has died"):
            while time.monotonic() < deadline:
                core.tick()
                time.sleep(0.02)


def test_a_rank_killed_in_the_middle_of_a_step_ends_the_engine(tmp_path: Path):
    save_tiny(tmp_path, "llama")
    with engine(Tiny(tmp_path)) as core:
        run = Run(core)
        run.submit("x", PROMPTS[2], greedy(200))
        run.step(5)
        rank_1_of(core).kill()
        with pytest.raises(RankFailed, match="rank 1 has died"):
            run.finish()
