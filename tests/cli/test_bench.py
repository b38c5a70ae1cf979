"""The measuring itself, on engines whose speed is written down."""

from __future__ import annotations

import importlib.machinery
import json
import math
import subprocess
import sys
import time
import types
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from stretto.bench.engines import EngineMissing, open_rival
from stretto.bench.measure import Series, agreement, measure_latency, measure_throughput, ratio, spread
from stretto.bench.memory import peak_resident
from stretto.bench.results import summary, table
from stretto.bench.workload import Workload, WorkloadError, from_file, synthetic
from stretto.config import DeviceFacts
from tests.gguf.files import tiny_model, write_model

WORK = Workload("three prompts", ((1, 2), (3, 4), (5, 6)), output_tokens=4)
DEVICE = DeviceFacts("cpu", "a CPU", 1, 1)


class FakeEngine:
    """Takes `seconds` for each token; writes down when it ran."""

    dtype = "float32"

    def __init__(self, name: str, seconds: float, log: list[str], short: bool = False):
        self.name, self.seconds, self.log, self.short = name, seconds, log, short

    def stream(self, prompt: Sequence[int], output_tokens: int, on_tokens) -> list[int]:
        self.log.append(self.name)
        for _ in range(output_tokens - self.short):
            time.sleep(self.seconds)
            on_tokens(1)
        return list(range(output_tokens - self.short))

    def batch(self, prompts: Sequence[Sequence[int]], output_tokens: int) -> list[list[int]]:
        self.log.append(self.name)
        time.sleep(self.seconds)
        return [list(range(output_tokens)) for _ in prompts]

    def counters(self) -> dict[str, float]:
        return {"drafted": float(len(self.log)), "accepted": len(self.log) / 2}

    def forget(self) -> None:
        self.log.append(f"{self.name} forgets")

    def close(self) -> None: ...


def test_engines_run_in_turns_and_forget_between_rounds():
    log: list[str] = []
    measure_throughput([FakeEngine("a", 0, log), FakeEngine("b", 0, log)], WORK, rounds=3)
    warmup, rounds = log[:2], log[2:]
    assert warmup == ["a", "b"]
    assert [entry for entry in rounds if "forgets" not in entry] == ["a", "b", "b", "a", "a", "b"]
    assert rounds[::2] == [f"{name} forgets" for name in rounds[1::2]]


def test_latency_separates_the_first_token_from_the_others():
    slow, fast = measure_latency([FakeEngine("slow", 0.004, []), FakeEngine("fast", 0.002, [])], WORK, rounds=2)
    assert 0.004 <= slow.first_token[0] < 0.02 and 50 < slow.rates[0] <= 250 and 100 < fast.rates[0] <= 500
    assert 0.2 < ratio(slow, fast).median < 0.9
    assert slow.counters["drafted"] == 8, "six answers, two emptied caches; the warm-up does not count"


def test_a_short_answer_is_no_result():
    with pytest.raises(RuntimeError, match="answered with 3 instead of 4 tokens"):
        measure_latency([FakeEngine("short", 0, [], short=True)], WORK, rounds=1)


def test_ratios_are_taken_within_a_round():
    ours, theirs = Series("a", ""), Series("b", "")
    ours.rates, theirs.rates = [10, 20, 90], [5, 20, 30]
    assert (ratio(ours, theirs).median, ratio(ours, theirs).low, ratio(ours, theirs).high) == (2, 1, 3)
    assert spread([3, 1, 2]).median == 2


def test_agreement_counts_tokens_before_the_first_difference():
    ours, theirs = Series("a", ""), Series("b", "")
    ours.answers, theirs.answers = [[1, 2, 3, 4], [1, 2]], [[1, 2, 9, 4], [1, 2]]
    assert agreement(ours, theirs) == pytest.approx(4 / 6)


def test_figures_are_json_and_a_table():
    series = measure_latency([FakeEngine("stretto", 0, []), FakeEngine("other", 0, [])], WORK, rounds=2)
    series[0].peak_memory, series[1].peak_memory = 100, 200
    series[1].rates[0] = math.nan
    found = summary("latency", "m", WORK, DEVICE, series)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["ratios"][0]["peak_memory"] == 0.5 and found["ratios"][0]["same_answer_share"] == 1.0
    assert found["engines"][0]["drafts_accepted"] == 0.5
    assert table(found).row_count == 2


class Letters:
    """A tokenizer of one token for each letter."""

    def encode(self, text: str) -> list[int]:
        return [ord(c) for c in text]


def test_synthetic_prompts_have_their_length_and_are_the_same_every_time():
    work = synthetic(Letters(), 3, 50, 7)
    assert [len(prompt) for prompt in work.prompts] == [50] * 3 and work.prompt_tokens == 150
    assert len(set(work.prompts)) == 3 and work == synthetic(Letters(), 3, 50, 7)
    assert work.prompts != synthetic(Letters(), 3, 50, 7, seed=1).prompts


def test_prompts_of_a_file(tmp_path: Path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "abc"}\n\n{"question": "de"}\n{"turns": ["fgh", "x"]}\n')
    assert from_file(Letters(), path, 9, 2, 4).prompts == ((97, 98), (100, 101), (102, 103))
    assert len(from_file(Letters(), path, 2, 9, 4).prompts) == 2


@pytest.mark.parametrize(("text", "message"), [
    ("", "has no prompts"), ('{"prompt": ""}', "has an empty prompt"), ("{", "line 1 is not JSON"),
    ('{"turns": []}', "has neither")])
def test_files_without_prompts(tmp_path: Path, text: str, message: str):
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises(WorkloadError, match=message):
        from_file(Letters(), path, 9, 9, 4)
    with pytest.raises(WorkloadError, match="cannot be read"):
        from_file(Letters(), tmp_path / "none", 9, 9, 4)


# --------------------------------------------------------------------------------------------------------- transformers
@pytest.mark.parametrize("tied", [False, True])
def test_transformers_gets_the_weights_of_a_gguf_file(tmp_path: Path, tied: bool):
    """It must answer as the model from which the file was written: q and k in their order, the head tied or not."""
    model = tiny_model(tie_word_embeddings=tied)
    engine = open_rival("transformers", write_model(tmp_path / "m.gguf", model), "float32", "cpu", 64, batch_size=2)
    prompts = [(1, 5, 90, 33, 7), (2, 44, 18), (61, 3, 80, 12)]  # the last one is a batch of its own
    expected = [model.generate(torch.tensor([p]), max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0)
                [0, len(p):].tolist() for p in prompts]
    assert engine.batch(prompts, 6) == expected
    seen: list[int] = []
    assert engine.stream(prompts[0], 6, seen.append) == expected[0] and seen == [1] * 6
    engine.close()


# ------------------------------------------------------------------------------------------------------------ llama.cpp
class FakeLlama:
    """The part of llama_cpp.Llama that is called; goes on for ever, as the real one does."""

    def __init__(self, model_path: str, **options: object):
        self.model_path, self.options, self.resets = model_path, options, 0

    def generate(self, tokens: list[int], temp: float, repeat_penalty: float):
        assert temp == 0.0 and repeat_penalty == 1.0
        token = tokens[-1]
        while True:
            token += 1
            yield token

    def reset(self) -> None:
        self.resets += 1

    def close(self) -> None: ...


def test_llama_cpp_answers_with_exactly_the_tokens_asked_for(monkeypatch: pytest.MonkeyPatch):
    module = types.ModuleType("llama_cpp")
    module.Llama = FakeLlama  # type: ignore[attr-defined]
    module.__spec__ = importlib.machinery.ModuleSpec("llama_cpp", None)
    monkeypatch.setitem(sys.modules, "llama_cpp", module)
    engine = open_rival("llama-cpp", Path("m.gguf"), "float32", "cpu", context=64, batch_size=1)
    seen: list[int] = []
    assert engine.stream((5, 6), 3, seen.append) == [7, 8, 9] and seen == [1, 1, 1]
    assert engine.batch([(1,), (4,)], 2) == [[2, 3], [5, 6]]
    engine.forget()
    assert engine.llama.resets == 1 and engine.llama.options["n_ctx"] == 64  # type: ignore[attr-defined]


def test_engines_that_cannot_run_are_named(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(EngineMissing, match="reads GGUF files"):
        open_rival("llama-cpp", Path("folder"), "float32", "cpu", 64, 1)
    with pytest.raises(EngineMissing, match="there is no engine 'x'"):
        open_rival("x", Path("folder"), "float32", "cpu", 64, 1)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EngineMissing, match="pip install llama-cpp-python"):
        open_rival("llama-cpp", Path("m.gguf"), "float32", "cpu", 64, 1)


def test_peak_memory_is_the_childs_own(tmp_path):
    """A parent that holds much must not show in the figure of a child that holds little."""
    code = "from stretto.bench.memory import peak_resident; print(peak_resident())"
    held = bytearray(600 << 20)
    held[::4096] = b"x" * len(held[::4096])
    child = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert child < peak_resident() - (100 << 20)
