"""LoRA adapters: several in one batch, loaded and unloaded while it runs, under drafts, chunks, retraction, sessions.
The oracle is transformers with the adapter merged into the weights."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from stretto.compat import ConfigError
from stretto.config import Config, KVSection, LoraSection, ModelSection
from stretto.engine.adapters import AdapterLoader, PutAdapter
from stretto.engine.build import build_core
from stretto.engine.core import EngineCore
from stretto.engine.llm import LLM
from stretto.engine.prepare import prepare
from stretto.host.adapters import Adapters
from stretto.model.digest import digest
from stretto.model.load import load_model
from stretto.model.lora import AdapterBank, AdapterError
from stretto.params import SamplingParams
from stretto.protocol import GetSession, LoadAdapter, RequestError, SessionTurn, UnloadAdapter
from stretto.spec.ngram import NgramDrafter
from stretto.spec.scripted import ScriptedDrafter
from tests.engine.small import VOCAB, Oracle, Run, greedy, make_core, save_tiny
from tests.model.lora import ATTENTION, MLP, merged, save_adapter

PROMPTS = [[5, 9, 2, 7, 1, 30], [8, 8, 1, 44], [60 + i for i in range(21)]]
TOKENS, COUNT, RANK = 28, 3, 8
FAMILIES = ["llama", "qwen2", "phi3", "glm4", "gemma3", "mixtral"]


class Adapted:
    """A tiny model with room for adapters, two adapters, and the oracle of each."""

    def __init__(self, folder: Path, family: str):
        window = 16 if family == "gemma3" else None
        reference = save_tiny(folder / "model", family, window)
        self.path, self.bank = folder / "model", AdapterBank(COUNT, RANK)
        words = {f"w{i}": i for i in range(VOCAB)}
        Tokenizer(WordLevel(words, unk_token="w0")).save(str(self.path / "tokenizer.json"))
        self.model = load_model(self.path, dtype=torch.float32, device=torch.device("cpu"), adapters=self.bank)
        own = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj") if family == "phi3" else (
            *ATTENTION, "gate_up_proj", "down_proj") if family == "glm4" else ATTENTION if family == "mixtral" else (
            *ATTENTION, *MLP)
        self.folders = {"a": save_adapter(folder / "a", reference, own, 4, seed=1),
                        "b": save_adapter(folder / "b", reference, own[:1] + own[-1:], 8, seed=2)}
        self.oracles = {None: Oracle(self.model, reference)} | {
            name: Oracle(self.model, merged(reference, path)) for name, path in self.folders.items()}

    def core(self, names: tuple[str, ...] = ("a", "b"), **options) -> EngineCore:
        core = make_core(self.model, adapters=Adapters(COUNT), **options)
        runner = core.device.runner  # type: ignore[attr-defined]
        runner.adapters = self.bank
        core.adapters = AdapterLoader(core.host, core.device)
        for name in names:
            core.manage(LoadAdapter(name, str(self.folders[name])))
        return core

    def answer(self, name: str | None, prompt: list[int]) -> list[int]:
        return self.oracles[name].answer(prompt, TOKENS)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Adapted]]:
    made: dict[str, Adapted] = {}

    class Families(dict):
        def __missing__(self, family: str) -> Adapted:
            made[family] = self[family] = Adapted(tmp_path_factory.mktemp(family), family)
            return made[family]

    yield Families()


def check_all(adapted: Adapted, core: EngineCore) -> Run:
    """Every prompt under every adapter and without one, side by side."""
    run = Run(core)
    for i, prompt in enumerate(PROMPTS):
        for name in (None, "a", "b"):
            run.submit(f"{i} {name}", prompt, greedy(TOKENS), adapter=name)
            run.step(1)
    run.finish()
    for i, prompt in enumerate(PROMPTS):
        for name in (None, "a", "b"):
            assert run.ids(f"{i} {name}") == adapted.answer(name, prompt), (name, prompt)
    return run


def test_a_rank_with_other_files_of_an_adapter_refuses_it(adapted, tmp_path):
    """Found when the adapter is loaded, at the start or later: sums would hide it."""
    tiny = adapted["llama"]
    core, folder = tiny.core(()), tmp_path / "adapter"
    runner = core.device.runner  # type: ignore[attr-defined]
    shutil.copytree(tiny.folders["a"], folder)
    there = PutAdapter(1, folder, digest(tiny.folders["a"]))  # as rank 0 sends it
    there(runner)
    weights = load_file(folder / "adapter_model.safetensors")
    save_file({name: 2 * tensor for name, tensor in weights.items()}, folder / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match=r"adapter .* on .* has other files than at rank 0"):
        there(runner)


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_of_every_kind_of_layer(adapted, family: str):
    tiny = adapted[family]
    answers = {name: tiny.answer(name, PROMPTS[0]) for name in (None, "a", "b")}
    assert len({tuple(a) for a in answers.values()}) == 3, "the adapters change nothing: a useless test"
    check_all(tiny, tiny.core(chunk=7, budget=40, page_size=4, overlap=True))


@pytest.mark.parametrize("options", [
    dict(overlap=False, page_size=1), dict(page_size=16, prefix_cache=False),
    dict(pool_tokens=80, page_size=4, slots=8), dict(page_size=64, mixed=False),
], ids=["page 1", "no prefix cache", "small pool", "not mixed"])
def test_adapters_under_other_conditions(adapted, options: dict):
    run = check_all(adapted["llama"], adapted["llama"].core(chunk=7, budget=40, **options))
    if "pool_tokens" in options:
        assert run.counters["retractions"] > 0


@pytest.mark.parametrize("kind", ["scripted", "ngram"])
def test_adapters_under_drafters(adapted, kind: str):
    """Drafts come from the base model's answers; the adapter verifies."""
    tiny = adapted["llama"]
    answers = [prompt + tiny.answer(None, prompt) for prompt in PROMPTS]
    drafter = ScriptedDrafter(answers, 3, vocab_size=VOCAB) if kind == "scripted" else NgramDrafter(3)
    run = check_all(tiny, tiny.core(drafter=drafter, chunk=7, budget=60, page_size=4, overlap=True))
    assert run.counters["drafted"] > run.counters["accepted"] > 0


def test_case_13_01_a_prefix_is_shared_only_within_an_adapter(adapted):
    tiny = adapted["llama"]
    core = tiny.core(page_size=4)
    prompt = PROMPTS[2]
    for name, cached in [("a", 0), ("a", 20), ("b", 0), (None, 0), (None, 20), ("b", 20)]:
        run = Run(core)
        run.submit("x", prompt, greedy(TOKENS), adapter=name)
        run.finish()
        assert run.ids("x") == tiny.answer(name, prompt)
        assert run.outputs["x", 0][-1].usage.cached_tokens == cached, (name, cached)


def test_unloading_waits_for_nobody_and_hurts_nobody(adapted):
    tiny = adapted["llama"]
    core = tiny.core(overlap=True)
    run = Run(core)
    run.submit("long", PROMPTS[0], greedy(TOKENS), adapter="a")
    run.step(4)
    core.manage(UnloadAdapter("a"))
    with pytest.raises(RequestError, match="'a' is not loaded") as refused:
        run.submit("late", PROMPTS[0], greedy(4), adapter="a")
    assert refused.value.code == "model_not_found"
    core.manage(LoadAdapter("a", str(tiny.folders["b"])))  # another adapter of the same name, beside the old one
    with pytest.raises(RequestError, match="room for 3"):
        core.manage(LoadAdapter("c", str(tiny.folders["a"])))  # two are loaded, and one is still in use
    run.submit("new", PROMPTS[0], greedy(TOKENS), adapter="a")
    run.finish()
    assert run.ids("long") == tiny.answer("a", PROMPTS[0]) and run.ids("new") == tiny.answer("b", PROMPTS[0])
    core.manage(LoadAdapter("c", str(tiny.folders["a"])))
    assert core.info.adapters.keys() == {"a", "b", "c"}


def test_a_session_stays_with_its_adapter(adapted):
    tiny = adapted["llama"]
    core = tiny.core(overlap=True, page_size=4)
    run = Run(core)
    run.submit("1", PROMPTS[0], greedy(TOKENS), adapter="a", session=SessionTurn(sid="s", mode="append"))
    run.finish_sessions()
    history = PROMPTS[0] + tiny.answer("a", PROMPTS[0])
    run.submit("2", [7, 7], greedy(TOKENS), adapter="a", session=SessionTurn(sid="s", mode="append"))
    run.finish_sessions()
    assert run.ids("2") == tiny.oracles["a"].answer([*history, 7, 7], TOKENS)
    assert run.outputs["2", 0][-1].usage.cached_tokens == len(history) - 1
    with pytest.raises(RequestError, match="another cache_salt or adapter"):
        run.submit("3", [7], greedy(1), session=SessionTurn(sid="s", mode="append"))
    assert core.manage(GetSession("s"))[0][0].turns == 2


def test_choices_of_one_request_have_its_adapter(adapted):
    tiny = adapted["llama"]
    run = Run(tiny.core())
    run.submit("n", PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=TOKENS, n=3), adapter="b")
    run.finish()
    assert [run.ids("n", i) for i in range(3)] == [tiny.answer("b", PROMPTS[0])] * 3


# ------------------------------------------------------------------------------------------------------ start, refusals
def test_adapters_of_a_start(adapted):
    tiny = adapted["llama"]
    modules = tuple(f"{name}={path}" for name, path in tiny.folders.items())
    with LLM(str(tiny.path), device="cpu", kv_tokens=1024, lora_modules=modules, max_loras=2, max_lora_rank=8) as llm:
        assert llm.info.adapters.keys() == {"a", "b"} and llm.info.server_info["memory"]["adapters"] > 0
        for name in (None, "a", "b"):
            made = llm.generate([PROMPTS[0]], greedy(TOKENS, ignore_eos=True), adapter=name)[0]
            assert made.token_ids == tiny.answer(name, PROMPTS[0])


def refused(path: Path, **lora) -> str:
    config = Config(model=ModelSection(str(path), device="cpu"), kv=KVSection(kv_tokens=512), lora=LoraSection(**lora))
    with pytest.raises(ConfigError) as error:
        build_core(prepare(config)).close()
    return str(error.value)


def test_what_cannot_work_is_refused_at_the_start(adapted, tmp_path: Path):
    tiny = adapted["llama"]
    assert "max-lora-rank 8" in refused(tiny.path, lora_modules=(f"b={tiny.folders['b']}",), max_lora_rank=4)
    assert "no adapter folder" in refused(tiny.path, lora_modules=(f"x={tmp_path}",))
    assert "NAME=FOLDER" in refused(tiny.path, lora_modules=("x",))
    assert "must be 1 or more" in refused(tiny.path, enable_lora=True, max_loras=0)
    save_tiny(tmp_path / "stablelm", "stablelm")
    assert "no room for LoRA" in refused(tmp_path / "stablelm", enable_lora=True)


def test_an_engine_without_room_says_so(adapted):
    core = make_core(adapted["llama"].model)
    with pytest.raises(RequestError, match="--enable-lora"):
        core.manage(LoadAdapter("a", "x"))
    with pytest.raises(RequestError, match="not loaded"):
        Run(core).submit("x", [1, 2], greedy(1), adapter="a")


@pytest.mark.parametrize("change, message", [
    (dict(use_dora=True), "use_dora"), (dict(bias="all"), "bias 'all'"), (dict(peft_type="IA3"), "type IA3"),
    (dict(modules_to_save=["lm_head"]), "modules_to_save")], ids=["dora", "bias", "ia3", "modules_to_save"])
def test_adapters_that_are_more_than_low_rank_are_refused(adapted, tmp_path: Path, change: dict, message: str):
    tiny = adapted["llama"]
    path = save_adapter(tmp_path / "odd", tiny.oracles[None].reference, ATTENTION, **change)
    with pytest.raises(RequestError, match=message):
        tiny.core(names=()).manage(LoadAdapter("odd", str(path)))


def test_a_damaged_adapter_is_refused_and_the_engine_goes_on(adapted, tmp_path: Path):
    tiny = adapted["llama"]
    path = save_adapter(tmp_path / "cut", tiny.oracles[None].reference, ATTENTION)
    file = path / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-50])
    core = tiny.core()
    with pytest.raises(RequestError, match="is truncated or damaged"):
        core.manage(LoadAdapter("cut", str(path)))
    run = Run(core)
    run.submit("x", PROMPTS[0], greedy(TOKENS), adapter="a")
    run.finish()
    assert run.ids("x") == tiny.oracles["a"].answer(PROMPTS[0], TOKENS)


def test_an_adapter_of_another_model_is_refused(adapted, tmp_path: Path):
    tiny = adapted["llama"]
    head = save_adapter(tmp_path / "head", tiny.oracles[None].reference, ("lm_head",))
    with pytest.raises(RequestError, match="lm_head"):
        tiny.core(names=()).manage(LoadAdapter("odd", str(head)))
    with pytest.raises(RequestError, match=r"qkv_proj|gate_up_proj"):
        tiny.core(names=()).manage(LoadAdapter("odd", str(adapted["phi3"].folders["a"])))


def test_rslora_and_alpha_patterns(adapted, tmp_path: Path):
    tiny = adapted["llama"]
    reference = tiny.oracles[None].reference
    path = save_adapter(tmp_path / "rs", reference, ("q_proj",), 4, seed=5, use_rslora=True)  # 8 / sqrt(4)
    oracle = Oracle(tiny.model, merged(reference, path, scale=4.0))
    core = tiny.core(names=())
    core.manage(LoadAdapter("rs", str(path)))
    run = Run(core)
    run.submit("x", PROMPTS[0], greedy(TOKENS), adapter="rs")
    run.finish()
    assert run.ids("x") == oracle.answer(PROMPTS[0], TOKENS)
