"""Greedy parity with transformers over the product of what may run beside what, for native families and the fallback.

Each cell proves by counters that its features really took part: mixed steps, verified drafts, prefix hits, retractions.
The default run takes a covering subset (every pair of options occurs); the `full` marker runs the whole product.
"""

from __future__ import annotations

import pytest

from stretto.model.api import CausalModel
from stretto.spec.scripted import ScriptedDrafter
from tests.covering import Cell, cell_id, full_product, pairwise
from tests.engine.small import Oracle, Run, greedy, make_core

OPTIONS = {"chunk": (1, 7, 64, 0), "page": (1, 16, 64, 256), "overlap": (False, True), "prefix": (True, False),
           "drafts": ("none", "right", "wrong", "mixed"), "policy": ("full", "one_in_mixed", "budget")}
NATIVE = {"off": ("llama", "qwen2", "qwen3", "mistral"), "16": ("qwen2", "qwen3", "mistral")}
SHARED = {"off": ("olmo2", "phi3", "glm4", "qwen3_moe", "qwen3_next", "qwen3_5", "granite", "granite_hybrid",
                  "llama4"),
          "16": ("gemma2", "gemma3", "mixtral", "gpt_oss")}
FALLBACK = {"off": ("stablelm",), "16": ("olmo3",)}
NEW = 20
ACCURACY = {"right": 1.0, "wrong": 0.0, "mixed": 0.6}

_SHARED = [7, 3, 250, 9, 12] * 14
PROMPTS = [[3, 7, 11], _SHARED, [*_SHARED[:40], 5, 6], list(range(20, 81)), [250, 9, 31] * 9, [17]]


@pytest.fixture(scope="module")
def oracles(tmp_path_factory):
    """(family, window) -> (oracle, answers to PROMPTS), made when first asked for."""
    made: dict[tuple[str, str], tuple[Oracle, list[list[int]]]] = {}

    def get(name: str, window: str) -> tuple[Oracle, list[list[int]]]:
        if (name, window) not in made:
            width = None if window == "off" else int(window)
            oracle = Oracle.make(tmp_path_factory.mktemp(name), name, width)
            made[name, window] = oracle, [oracle.answer(p, NEW) for p in PROMPTS]
        return made[name, window]
    return get


def drafter_of(cell: Cell, model: CausalModel, answers: list[list[int]]) -> ScriptedDrafter | None:
    if cell["drafts"] == "none":
        return None
    whole = [p + a for p, a in zip(PROMPTS, answers, strict=True)]
    return ScriptedDrafter(whole, 4, ACCURACY[cell["drafts"]], vocab_size=model.vocab_size,
                           variable=cell["drafts"] == "mixed")


def check_cell(cell: Cell, model: CausalModel, answers: list[list[int]]) -> None:
    """Two waves of the same prompts, the second while the first still decodes; then one of them once more."""
    core = make_core(model, page_size=cell["page"], overlap=cell["overlap"], prefix_cache=cell["prefix"],
                     chunk=cell["chunk"] or 256, budget=max(16, cell["chunk"]) if cell["chunk"] else 1024,
                     cap_policy=cell["policy"], drafter=drafter_of(cell, model, answers), poison=True)
    run = Run(core)
    for i, prompt in enumerate(PROMPTS[:3]):
        run.submit(f"a{i}", prompt, greedy(NEW))
    while not run.outputs:
        run.step()
    for i, prompt in enumerate(PROMPTS[3:] + PROMPTS[:3]):
        run.submit(f"b{(i + 3) % 6}", prompt, greedy(NEW))
    run.finish()
    run.submit("again", PROMPTS[1], greedy(NEW))  # alone, with everything of before in the cache
    run.finish()
    core.close()
    assert run.ids("again") == answers[1]
    for i, answer in enumerate(answers):
        for wave in "ab" if i < 3 else "b":
            assert run.ids(f"{wave}{i}") == answer, (wave, i)
            assert run.reason(f"{wave}{i}") == "length"
    check_counters(cell, run)


def check_counters(cell: Cell, run: Run) -> None:
    counters = run.counters
    assert counters["mixed_steps"] > 0 and counters["tail_rows"] > 0
    again = run.outputs["again", 0][-1].usage
    assert again is not None and (again.cached_tokens > 0) == (cell["prefix"] and cell["page"] <= 64)
    assert (counters["drafted"] > 0) == (cell["drafts"] != "none")
    if cell["drafts"] == "right":
        assert counters["accepted"] > 0.8 * counters["drafted"]
    if cell["drafts"] == "wrong":
        assert counters["accepted"] == 0
    if cell["policy"] == "one_in_mixed":
        assert counters["tail_tokens"] == counters["tail_rows"]
    assert counters["faults"] == 0


def every_cell() -> list[Cell]:
    """The whole product of all options but the cap policy, which goes round from cell to cell."""
    product = full_product({name: values for name, values in OPTIONS.items() if name != "policy"})
    return [cell | {"policy": OPTIONS["policy"][i % 3]} for i, cell in enumerate(product)]


def cells(families: dict[str, tuple[str, ...]], every: bool) -> list:
    params = []
    for window, names in families.items():
        for serial, name in enumerate(names):
            chosen = every_cell() if every else pairwise(OPTIONS, seed=serial)
            params += [pytest.param(name, window, cell, id=f"{name}-window={window}-{cell_id(cell)}")
                       for cell in chosen]
    return params


@pytest.mark.parametrize(("name", "window", "cell"), cells(NATIVE, False))
def test_native_family(oracles, name: str, window: str, cell: Cell) -> None:
    oracle, answers = oracles(name, window)
    check_cell(cell, oracle.model, answers)


def a_few(families: dict[str, tuple[str, ...]]) -> list:
    """Every fifth cell, each family from another one on: these share the decoder of those above."""
    each = {(window, name): serial for serial, (window, name) in
            enumerate((window, name) for window, names in families.items() for name in names)}
    seen = dict.fromkeys(each, 0)
    chosen = []
    for param in cells(families, False):
        name, window, _ = param.values
        if (seen[window, name] + each[window, name]) % 5 == 0:
            chosen.append(param)
        seen[window, name] += 1
    return chosen


@pytest.mark.parametrize(("name", "window", "cell"), a_few(SHARED))
def test_family_of_the_shared_decoder(oracles, name: str, window: str, cell: Cell) -> None:
    oracle, answers = oracles(name, window)
    check_cell(cell, oracle.model, answers)


@pytest.mark.full
@pytest.mark.parametrize(("name", "window", "cell"), cells(SHARED, False))
def test_family_of_the_shared_decoder_full(oracles, name: str, window: str, cell: Cell) -> None:
    oracle, answers = oracles(name, window)
    check_cell(cell, oracle.model, answers)


@pytest.mark.parametrize(("name", "window", "cell"), cells(FALLBACK, False))
def test_fallback(oracles, name: str, window: str, cell: Cell) -> None:
    oracle, answers = oracles(name, window)
    check_cell(cell, oracle.model, answers)


@pytest.mark.full
@pytest.mark.parametrize(("name", "window", "cell"), cells(NATIVE, True))
def test_native_family_full(oracles, name: str, window: str, cell: Cell) -> None:
    oracle, answers = oracles(name, window)
    check_cell(cell, oracle.model, answers)


def test_the_covering_subset_covers_every_pair() -> None:
    names = list(OPTIONS)
    for a in names:
        for b in names[names.index(a) + 1:]:
            seen = {(cell[a], cell[b]) for cell in pairwise(OPTIONS)}
            assert len(seen) == len(OPTIONS[a]) * len(OPTIONS[b])
    assert len(pairwise(OPTIONS)) < 40
