"""What is reported of tokens, in every mode, against a recomputation by hand from the reference's logits."""

from __future__ import annotations

import math

import pytest
import torch

from stretto.params import ParameterError, SamplingParams
from stretto.protocol import RequestError, TokenLogprob
from stretto.sample.logprobs import Reporting
from stretto.spec.ngram import NgramDrafter
from stretto.spec.scripted import ScriptedDrafter
from tests.device.test_sampling import reference
from tests.engine.small import VOCAB, Oracle, Run, make_core

MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")
PROMPT, NEW, STEM = [5, 4] * 6, 16, [7, 3, 250, 9, 12] * 8
BIAS = {5: 2.0, 9: -3.0}
KINDS = {
    "greedy": dict(temperature=0.0, frequency_penalty=0.7),
    "warm": dict(temperature=1.4, logit_bias=BIAS),
    "filtered": dict(temperature=0.9, top_k=30, top_p=0.9, min_p=0.01, repetition_penalty=1.2),
}


@pytest.fixture(scope="module")
def oracle(tmp_path_factory) -> Oracle:
    return Oracle.make(tmp_path_factory.mktemp("model"), "llama", sharpness=1)


def logits_of(oracle: Oracle, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return oracle.reference(torch.tensor([ids])).logits[0].double()


def processed(raw: torch.Tensor, before: list[int], prompt: int, p: dict) -> torch.Tensor:
    """Logits at one position by the definitions, [V]; `before`: every id before it."""
    out = raw.clone()
    for token, bias in p.get("logit_bias", {}).items():
        out[token] += bias
    for token in set(before):
        factor = p.get("repetition_penalty", 1.0)
        out[token] = out[token] / factor if out[token] > 0 else out[token] * factor
    for token in before[prompt:]:
        out[token] -= p.get("frequency_penalty", 0.0)
    temperature = p["temperature"]
    if temperature == 0:
        return out
    kept = reference(out, temperature, p.get("top_k", 0), p.get("top_p", 1.0), p.get("min_p", 0.0)) > 0
    return torch.where(kept, out / temperature, -math.inf)


def expected(oracle: Oracle, mode: str, prompt: list[int], ids: list[int], p: dict) -> torch.Tensor:
    """[len(ids), V]: what the mode reports at each generated id."""
    whole, rows = prompt + ids, []
    raw = logits_of(oracle, whole)
    for i in range(len(ids)):
        at = len(prompt) + i
        row = raw[at - 1]
        if mode.startswith("processed"):
            row = processed(row, whole[:at], len(prompt), p)
        rows.append(row.log_softmax(-1) if mode.endswith("logprobs") else row)
    return torch.stack(rows)


def check(entries: list[TokenLogprob], want: torch.Tensor, ids: list[int], alternatives: int) -> None:
    assert [e.token_id for e in entries] == ids
    for entry, row in zip(entries, want, strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=2e-3)
        best = row.topk(alternatives)
        finite = int(best.values.isfinite().sum())
        assert entry.top_logprobs[:finite] == pytest.approx(best.values[:finite].tolist(), abs=2e-3)
        assert all(value == -math.inf for value in entry.top_logprobs[finite:])
        assert all(value == pytest.approx(float(row[token]), abs=2e-3)
                   for token, value in zip(entry.top_ids[:finite], entry.top_logprobs))


def entries_of(run: Run, rid: str) -> list[TokenLogprob]:
    return [e for output in run.outputs[rid, 0] for e in output.logprobs or []]


def play(oracle: Oracle, mode: str, drafter, **more) -> Run:
    """Each kind three times, the second one with the prompt's, the third after a prefix hit; beside others."""
    run = Run(make_core(oracle.model, drafter=drafter, chunk=5, page_size=4, **more))
    run.core.device.runner.reporting = Reporting.of(mode)
    for wave in range(3):
        for i, (name, p) in enumerate(KINDS.items()):
            of_prompt = 3 if wave == 1 else None
            run.submit(f"{name}{wave}", [*STEM, i, *PROMPT],
                       SamplingParams(seed=3, max_tokens=NEW, logprobs=4, prompt_logprobs=of_prompt, **p))
            run.step(14)
    run.finish()
    return run


@pytest.mark.parametrize(("mode", "drafting"), [
    pytest.param(mode, drafting, marks=() if drafting == "mixed" or mode == "raw_logprobs" else pytest.mark.full)
    for mode in MODES for drafting in ("none", "ngram", "mixed")])
def test_case_11_01_equal_to_a_recomputation(oracle, mode: str, drafting: str) -> None:
    plain = play(oracle, mode, None)
    told = [[*STEM, i, *PROMPT, *plain.ids(f"{name}0")] for i, name in enumerate(KINDS)]
    drafter = {"none": None, "ngram": NgramDrafter(4),
               "mixed": ScriptedDrafter(told, 4, 0.7, vocab_size=VOCAB, variable=True)}[drafting]
    run = play(oracle, mode, drafter)
    counters = run.counters
    assert counters["mixed_steps"] > 0 and counters["cached_tokens"] > 0
    assert drafting != "mixed" or counters["accepted"] > 10
    for i, (name, p) in enumerate(KINDS.items()):
        prompt = [*STEM, i, *PROMPT]
        for wave in range(3):
            ids = run.ids(f"{name}{wave}")
            assert ids == plain.ids(f"{name}0")
            check(entries_of(run, f"{name}{wave}"), expected(oracle, mode, prompt, ids, p), ids, 4)
        scores = next(o.prompt_logprobs for o in run.outputs[f"{name}1", 0] if o.prompt_logprobs)
        raw = logits_of(oracle, prompt)
        want = raw.log_softmax(-1) if mode.endswith("logprobs") else raw
        assert scores[0].logprob is None
        check(scores[1:], want[:-1], prompt[1:], 3)


@pytest.mark.parametrize("drafter", [None, NgramDrafter(4)], ids=["none", "ngram"])
def test_the_whole_vocabulary(oracle, drafter) -> None:
    run = Run(make_core(oracle.model, drafter=drafter))
    run.core.info.max_logprobs = -1
    run.submit("all", PROMPT, SamplingParams(seed=1, max_tokens=6, logprobs=-1, prompt_logprobs=-1))
    run.submit("few", PROMPT, SamplingParams(seed=1, max_tokens=6, logprobs=2))
    run.finish()
    prompt = next(o.prompt_logprobs for o in run.outputs["all", 0] if o.prompt_logprobs)
    for entry in [*entries_of(run, "all"), *prompt[1:]]:
        assert sorted(entry.top_ids) == list(range(VOCAB))
        assert sum(math.exp(p) for p in entry.top_logprobs) == pytest.approx(1, abs=1e-4)
        assert entry.top_logprobs == sorted(entry.top_logprobs, reverse=True)
    assert [(e.logprob, e.top_ids) for e in entries_of(run, "few")] == [
        (e.logprob, e.top_ids[:2]) for e in entries_of(run, "all")]


@pytest.mark.parametrize("count", [0, 1, 20])
def test_numbers_of_alternatives(oracle, count: int) -> None:
    run = Run(make_core(oracle.model))
    run.submit("r", PROMPT, SamplingParams(seed=1, max_tokens=3, logprobs=count))
    run.finish()
    assert [len(e.top_ids) for e in entries_of(run, "r")] == [count] * 3


def test_limits(oracle) -> None:
    for value, limit in ((21, 20), (-2, 20), (-1, 20), (-2, -1), (VOCAB + 1, -1), (6, 5)):
        with pytest.raises(ParameterError, match="logprobs is"):
            SamplingParams(logprobs=value).check(VOCAB, limit)
    for value, limit in ((20, 20), (-1, -1), (-1, VOCAB), (VOCAB, -1), (30, 30)):
        SamplingParams(prompt_logprobs=value).check(VOCAB, limit)
    run = Run(make_core(oracle.model))
    with pytest.raises(RequestError, match="all 300 tokens; this server's limit is 20"):
        run.submit("r", PROMPT, SamplingParams(logprobs=-1))
    run.core.close()
