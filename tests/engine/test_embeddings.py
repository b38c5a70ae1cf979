"""Embeddings in ordinary steps: equal to transformers', whatever runs beside them, and nothing beside them changes.

The oracle is the reference model's last hidden states (after the final norm): the last token's, or their mean.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stretto.device.record import pack_body
from stretto.model.api import CausalModel
from stretto.params import SamplingParams
from stretto.protocol import Request, RequestError, SessionTurn
from stretto.spec.scripted import ScriptedDrafter
from stretto.wire import ResultLayout, unpack_result
from tests.covering import Cell, cell_id, pairwise
from tests.engine.small import Oracle, Run, greedy, make_core

OPTIONS = {"chunk": (7, 0), "page": (1, 16), "overlap": (False, True), "prefix": (True, False),
           "drafts": (False, True), "family": ("llama", "gemma2")}
MORE = OPTIONS | {"chunk": (1, 3, 64), "page": (1, 16, 64), "family": ("llama", "qwen3", "gemma2")}
CELLS = [*(pytest.param(cell, id=cell_id(cell)) for cell in pairwise(OPTIONS)),
         *(pytest.param(cell, id=cell_id(cell), marks=pytest.mark.full) for cell in pairwise(MORE))]
SHARED = [7, 3, 250, 9, 12] * 14
PROMPTS = [[3, 7, 11], SHARED, [*SHARED[:40], 5, 6], list(range(20, 81)), [17]]
DECODED, NEW = [[250, 9, 31] * 5, [*SHARED[:33], 8]], 24
SCORE = SamplingParams(max_tokens=0)


@pytest.fixture(scope="module")
def oracles(tmp_path_factory):
    made: dict[str, tuple[Oracle, list[list[int]]]] = {}

    def get(name: str) -> tuple[Oracle, list[list[int]]]:
        if name not in made:
            oracle = Oracle.make(tmp_path_factory.mktemp(name), name, 16 if name == "gemma2" else None)
            made[name] = oracle, [oracle.answer(prompt, NEW) for prompt in DECODED]
        return made[name]
    return get


def reference(oracle: Oracle, prompt: list[int], pooling: str) -> np.ndarray:
    with torch.inference_mode():
        states = oracle.reference.model(torch.tensor([prompt])).last_hidden_state[0].double()
    return (states[-1] if pooling == "last" else states.mean(0)).float().numpy()


def drafter(model: CausalModel, answers: list[list[int]]) -> ScriptedDrafter:
    whole = [prompt + answer for prompt, answer in zip(DECODED, answers, strict=True)]
    return ScriptedDrafter(whole, 4, 0.6, vocab_size=model.vocab_size, variable=True)


def vector(run: Run, rid: str) -> np.ndarray:
    (output,) = run.outputs[rid, 0]
    assert output.finish_reason == "length" and output.token_ids == [] and output.usage is not None
    assert output.usage.completion_tokens == 0
    return np.frombuffer(output.embedding, np.float32)


def make_run(oracle: Oracle, **limits) -> Run:
    run = Run(make_core(oracle.model, poison=True, **limits))
    run.core.info.hidden_size = oracle.model.hidden_size
    return run


@pytest.mark.parametrize("cell", CELLS)
def test_vectors_are_the_references_beside_decoding_rows(oracles, cell: Cell) -> None:
    """Every prompt with both poolings, twice: the second wave finds the first one's pages."""
    oracle, answers = oracles(cell["family"])
    run = make_run(oracle, page_size=cell["page"], overlap=cell["overlap"], prefix_cache=cell["prefix"],
                   chunk=cell["chunk"] or 256, budget=max(16, cell["chunk"]) if cell["chunk"] else 1024,
                   drafter=drafter(oracle.model, answers) if cell["drafts"] else None)
    for i, prompt in enumerate(DECODED):
        run.submit(f"text{i}", prompt, greedy(NEW))
    while not run.outputs:
        run.step()
    for wave in range(2):
        for i, prompt in enumerate(PROMPTS):
            for pooling in ("last", "mean"):
                run.submit(f"{wave}-{i}-{pooling}", prompt, SCORE, pooling=pooling)
        if wave:
            run.finish()
        else:
            while len(run.outputs) < 2 * len(PROMPTS) + len(DECODED):
                run.step()
    run.core.close()
    assert [run.ids(f"text{i}") for i in range(len(DECODED))] == answers
    cached = {"last": 0, "mean": 0}
    for i, prompt in enumerate(PROMPTS):
        for pooling in ("last", "mean"):
            expected = reference(oracle, prompt, pooling)
            for wave in range(2):
                found = vector(run, f"{wave}-{i}-{pooling}")
                np.testing.assert_allclose(found, expected, rtol=0, atol=2e-4 * float(np.abs(expected).max()))
                usage = run.outputs[f"{wave}-{i}-{pooling}", 0][-1].usage
                cached[pooling] += usage.cached_tokens if usage is not None else 0
    assert run.counters["mixed_steps"] > 0 and run.counters["faults"] == 0
    assert cached["mean"] == 0 and (cached["last"] > 0) == cell["prefix"]


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_a_retracted_prompt_is_pooled_whole(oracles, pooling: str) -> None:
    """A small pool: rows give way in the middle of their prompts, and begin again with an empty sum."""
    oracle, _ = oracles("llama")
    run = make_run(oracle, page_size=4, pool_tokens=256, chunk=1, budget=16)
    for i in range(4):
        run.submit(f"text{i}", list(range(20 + i, 32 + i)), greedy(60, ignore_eos=True))
    run.submit("vector", SHARED, SCORE, pooling=pooling, priority=1)
    run.finish()
    run.core.close()
    usage = run.outputs["vector", 0][-1].usage
    assert usage is not None and usage.retractions > 0 and usage.cached_tokens == 0
    expected = reference(oracle, SHARED, pooling)
    np.testing.assert_allclose(vector(run, "vector"), expected, rtol=0, atol=2e-4 * float(np.abs(expected).max()))


def test_what_cannot_be_pooled_is_refused(oracles) -> None:
    oracle, _ = oracles("llama")
    run = make_run(oracle)
    for sampling, more in ((greedy(1), {}), (SamplingParams(max_tokens=0, n=2), {}),
                           (SCORE, {"session": SessionTurn(sid="s")})):
        with pytest.raises(RequestError, match="pooling"):
            run.core.submit(Request(rid="x", tokens=[1, 2], sampling=sampling, pooling="last", **more))
    run.core.info.hidden_size = 0
    with pytest.raises(RequestError, match="tiny gives no embeddings"):
        run.core.submit(Request(rid="x", tokens=[1, 2], sampling=SCORE, pooling="mean"))
    run.core.close()


def test_vectors_travel_beside_scores() -> None:
    """The last part of a packed result, behind log-probabilities of new and of given tokens."""
    layout = ResultLayout(rows=2, width=1, offers=0, alternatives=1, prompt_scores=1, pooled=3)
    table = torch.tensor([[4, 0, 1, 0, 1, 2, 2 << 1, 1, 0, 77], [5, 0, 3, 0, 3, 3, 1, 0, 0, -1]], dtype=torch.int32)
    scores = torch.zeros(2, 1, 3, dtype=torch.int32)
    prompt_scores = torch.tensor([[0, 1, 0, 9, 0]], dtype=torch.int32)
    pooled = torch.tensor([[0.0, 0, 0], [1.5, -2, 0.25]])
    body = pack_body(table, scores, prompt_scores, pooled).numpy()
    result = unpack_result(np.concatenate([np.asarray(layout.header(7), dtype=np.int32), body]))
    assert result.rows[0].new == [77] and len(result.rows[0].new_scores) == 1 and 1 in result.rows[0].prompt_scores
    assert result.rows[1].done and result.rows[1].pooled is not None
    assert result.rows[1].pooled.tolist() == [1.5, -2, 0.25]
