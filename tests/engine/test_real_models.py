"""Greedy parity of real models with transformers over the same options as the tiny ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from stretto.bench.engines import from_gguf
from stretto.model.hub import resolve_model
from stretto.model.load import load_model
from stretto.spec.scripted import ScriptedDrafter
from tests.covering import Cell, cell_id, pairwise
from tests.engine.small import Oracle, Run, greedy, make_core
from tests.engine.test_oracle import ACCURACY, OPTIONS

STORIES = Path(__file__).resolve().parents[2] / "../shared/data/models/stories260k"
NEW = 20
CPU = torch.device("cpu")


def check(cell: Cell, oracle: Oracle, prompts: list[list[int]], answers: list[list[int]]) -> None:
    drafter = None
    if cell["drafts"] != "none":
        whole = [p + a for p, a in zip(prompts, answers, strict=True)]
        drafter = ScriptedDrafter(whole, 4, ACCURACY[cell["drafts"]], vocab_size=oracle.model.vocab_size,
                                  variable=cell["drafts"] == "mixed")
    run = Run(make_core(oracle.model, page_size=cell["page"], overlap=cell["overlap"], prefix_cache=cell["prefix"],
                        chunk=cell["chunk"] or 256, budget=max(16, cell["chunk"]) if cell["chunk"] else 1024,
                        pool_tokens=2048, cap_policy=cell["policy"], drafter=drafter))
    for wave in range(2):
        for i, prompt in enumerate(prompts):
            run.submit(f"{wave}-{i}", prompt, greedy(NEW))
        while not run.outputs:
            run.step()
    run.finish()
    run.core.close()
    for wave in range(2):
        assert [run.ids(f"{wave}-{i}") for i in range(len(prompts))] == answers
    assert run.counters["mixed_steps"] > 0 and (run.counters["drafted"] > 0) == (drafter is not None)


@pytest.fixture(scope="module")
def stories():
    if not STORIES.is_dir():
        pytest.skip("shared/data/models/stories260k is absent")
    reference = transformers.AutoModelForCausalLM.from_pretrained(STORIES, dtype=torch.float32).eval()
    oracle = Oracle(load_model(STORIES, dtype=torch.float32, device=CPU), reference)
    prompts = [[1, 403, 407, 261, 378], [1, 410, 292, 300, 371, 268, 411], [1, *range(300, 345)]]
    return oracle, prompts, [oracle.answer(p, NEW) for p in prompts]


@pytest.mark.parametrize("cell", pairwise(OPTIONS, seed=7), ids=cell_id)
def test_stories260k(stories, cell: Cell) -> None:
    check(cell, *stories)


@pytest.fixture(scope="module")
def smollm2():
    """The default model in both forms, from the same dequantised weights."""
    path = resolve_model(None, progress=False)
    reference = from_gguf(path, torch.float32).eval()
    oracle = Oracle(load_model(path, dtype=torch.float32, device=CPU, context=256), reference)
    prompts = [[504, 3575, 282, 4649, 314], [1, 9690, 198, 2683, 359, 253, 5356], list(range(2000, 2040))]
    return oracle, prompts, [oracle.answer(p, NEW) for p in prompts]


CELLS = pairwise(OPTIONS, seed=8)


@pytest.mark.parametrize("cell", CELLS[:1], ids=cell_id)
def test_smollm2(smollm2, cell: Cell) -> None:
    check(cell, *smollm2)


@pytest.mark.full
@pytest.mark.parametrize("cell", CELLS[1:], ids=cell_id)
def test_smollm2_full(smollm2, cell: Cell) -> None:
    check(cell, *smollm2)
