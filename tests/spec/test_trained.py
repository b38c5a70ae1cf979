"""The heads that ship for the default model: they load, they fit it and no other model, and they draft well."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from stretto.compat import ConfigError
from stretto.config import Config, ModelSection, SpeculationSection
from stretto.engine.llm import LLM
from stretto.engine.prepare import prepare
from stretto.model.hub import resolve_model
from stretto.params import SamplingParams
from stretto.spec.registry import find_drafter
from stretto.spec.repos import SHIPPED, fingerprint, open_repo
from tests.spec import checkpoints as made

KINDS = ("eagle3", "dflash", "dspark")
QUESTIONS = ("Tom has 3 boxes with 12 pencils each. He gives 9 pencils away. How many are left?",
             "Summarize: The sun warms the sea, water rises into the air, cools, and falls as rain.",
             "Write a Python function that returns the larger of two numbers.")
NEW = 24
LEAST = {"eagle3": 1.7, "dflash": 1.8, "dspark": 1.8}  # ids a step at temperature 0; answers this short have few


def asked(model: Path | str, kind: str) -> Config:
    return Config(model=ModelSection(str(model)), speculation=SpeculationSection(kind))


def answers(kind: str, **more) -> list[tuple[list[int], int]]:
    """(ids, steps) of each question, greedily and sampled."""
    with LLM(speculation=kind, device="cpu", dtype="float32", max_model_len=512, kv_tokens=4096, max_num_seqs=8,
             **({} if kind == "off" else {"speculation_tokens": 5}), **more) as llm:
        prompts = [llm.tokenizer.apply_chat_template([{"role": "user", "content": q}]) for q in QUESTIONS]
        sampling = [SamplingParams(temperature=t, max_tokens=NEW, seed=7) for t in (0.0, 1.0) for _ in prompts]
        return [(a.token_ids, a.usage.steps) for a in llm.generate([*prompts, *prompts], sampling)]


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return [ids for ids, _ in answers("off")]


@pytest.mark.parametrize("kind", KINDS)
def test_same_text_in_fewer_steps(kind: str, plain: list[list[int]]):
    found = answers(kind)
    assert [ids for ids, _ in found] == plain
    greedy = found[: len(QUESTIONS)]
    length = sum(len(ids) - 1 for ids, _ in greedy) / sum(steps - 1 for _, steps in greedy)
    assert length >= LEAST[kind], f"{kind}: {length:.2f} ids a step"


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_over_three_ranks(kind: str, plain: list[list[int]]):
    """The rows of the target's head that a drafter borrows come from all ranks."""
    found = answers(kind, tensor_parallel_size=3)
    assert [ids for ids, _ in found] == plain
    steps = [steps for _, steps in found[: len(QUESTIONS)]]
    assert sum(steps) < 0.75 * NEW * len(QUESTIONS), f"{kind}: {steps} steps: its drafts are not accepted"


@pytest.mark.parametrize("kind", KINDS)
def test_heads_are_read_as_any_checkpoint_of_their_layout(kind: str, tmp_path: Path):
    """By their path, and without their name."""
    shutil.copytree(SHIPPED / kind, tmp_path / "copy")
    drafter, settings = find_drafter(str(tmp_path / "copy"))
    assert type(drafter) is type(find_drafter(kind)[0]) and settings == str(tmp_path / "copy")
    assert not open_repo(kind, settings).shipped and open_repo(kind, "").shipped
    assert prepare(asked(resolve_model(None), f"{kind}:{tmp_path / 'copy'}")).resolved.drafter


def test_what_ships_is_small():
    sizes = {kind: sum(f.stat().st_size for f in (SHIPPED / kind).iterdir()) for kind in KINDS}
    assert sum(sizes.values()) < 16.6e6, sizes


@pytest.mark.parametrize("kind", KINDS)
def test_another_target_is_refused_by_both_names(kind: str, tmp_path: Path):
    made.make_target(tmp_path / "little")
    with pytest.raises(ConfigError, match=r"little(.|\n)*SmolLM2-135M-Instruct"):
        prepare(asked(tmp_path / "little", kind))


def test_a_target_is_told_by_its_weights(tmp_path: Path):
    made.make_target(tmp_path / "little")
    mark = fingerprint(tmp_path / "little")
    weights = load_file(tmp_path / "little/model.safetensors")
    weights["model.norm.weight"] *= 1.5
    save_file(weights, tmp_path / "little/model.safetensors")
    assert mark is not None and fingerprint(tmp_path / "little") not in (mark, None)
    assert fingerprint(tmp_path / "nothing") is None
    assert fingerprint(resolve_model(None)) == open_repo("dflash", "").raw["target_fingerprint"]


@pytest.mark.parametrize("kind", ["eagle", "standalone"])
def test_kinds_without_a_head_need_a_checkpoint(kind: str):
    with pytest.raises(ConfigError, match="needs a draft checkpoint"):
        prepare(asked(resolve_model(None), kind))
