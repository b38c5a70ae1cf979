"""Further cases that users reported of other engines, on the whole engine with tiny random models."""

from __future__ import annotations

import random

import pytest
import torch

from stretto.model.scripted import ScriptedModel
from stretto.params import SamplingParams
from stretto.spec.ngram import NgramDrafter
from stretto.spec.scripted import ScriptedDrafter
from tests.engine.small import VOCAB, Oracle, Run, greedy, make_core


@pytest.fixture(scope="module")
def oracle(tmp_path_factory) -> Oracle:
    return Oracle.make(tmp_path_factory.mktemp("model"), "llama")


def repeating_prompts() -> list[list[int]]:
    """Half of them contain passages that occur again, so that n-grams are found."""
    rng = random.Random(4)
    plain = [[rng.randrange(VOCAB) for _ in range(rng.randint(3, 40))] for _ in range(10)]
    return plain + [(p[:9] * 4)[:40] + p[:3] for p in plain]


def test_case_1_01_ngram_changes_no_greedy_answer(oracle) -> None:
    texts = []
    for drafter in (None, NgramDrafter(5)):
        run = Run(make_core(oracle.model, drafter=drafter, chunk=16))
        for i, prompt in enumerate(repeating_prompts()):
            run.submit(f"r{i}", prompt, greedy(64))
        run.finish()
        texts.append([run.ids(f"r{i}") for i in range(20)])
    assert texts[0] == texts[1] and run.counters["accepted"] > 0


def test_case_1_03_every_emitted_id_is_the_argmax_of_a_plain_prefill(oracle) -> None:
    """60 short requests at concurrency 8, half-right drafts: replay each answer through transformers."""
    prompts = [[(7 * i + j) % VOCAB for j in range(3 + i % 9)] for i in range(60)]
    first = Run(make_core(oracle.model))
    for i, prompt in enumerate(prompts):
        first.submit(f"r{i}", prompt, greedy(16))
    first.finish()
    whole = [p + first.ids(f"r{i}") for i, p in enumerate(prompts)]
    run = Run(make_core(oracle.model, drafter=ScriptedDrafter(whole, 5, 0.5, vocab_size=VOCAB, variable=True), chunk=4))
    for i, prompt in enumerate(prompts):
        run.submit(f"r{i}", prompt, greedy(16))
    run.finish()
    assert run.counters["accepted"] > 0 and run.counters["drafted"] > run.counters["accepted"]
    for i, prompt in enumerate(prompts):
        answer = run.ids(f"r{i}")
        with torch.no_grad():
            best = oracle.reference(torch.tensor([prompt + answer])).logits[0].argmax(-1)
        assert best[len(prompt) - 1 : -1].tolist() == answer


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_case_1_05_drafts_do_not_bend_the_distribution(temperature: float) -> None:
    """A scripted model over 8 ids whose favourite has half of the probability; wrong, right and mixed drafts."""
    vocab, draws = 8, 1500
    certainty = float(torch.tensor(float(vocab - 1)).log())  # p = 1/2 for the scripted id at temperature 1
    model = ScriptedModel(vocab, {}, end_id=7, certainty=certainty)
    logits = torch.zeros(vocab)
    logits[0] = certainty
    p = (logits / temperature).softmax(0)  # of the distance to id + 1
    answers = [[3, 4, 5, 6, 7, 0, 1]]
    run = Run(make_core(model, drafter=ScriptedDrafter(answers, 3, 0.6, vocab_size=vocab), slots=33, pool_tokens=8192))
    for seed in range(draws):
        run.submit(f"r{seed}", [3], SamplingParams(temperature=temperature, seed=seed, max_tokens=4))
    run.finish()
    assert run.counters["accepted"] > 200
    texts = torch.tensor([[3, *run.ids(f"r{seed}")] for seed in range(draws)])
    steps = (texts[:, 1:] - texts[:, :-1] - 1) % vocab  # each is an independent draw from p
    for at in range(4):
        counts = torch.bincount(steps[:, at], minlength=vocab).double()
        assert float(((counts - draws * p) ** 2 / (draws * p)).sum()) < 27  # p < 1e-3 at 7 degrees of freedom: 24.3
    joint = torch.bincount(steps[:, 0] * vocab + steps[:, 1], minlength=vocab * vocab).double()
    expected = draws * torch.outer(p, p).flatten()
    cells = expected > 2
    assert float(((joint - expected)[cells] ** 2 / expected[cells]).sum()) / int(cells.sum()) < 1.8


def test_case_10_07_table_entries_beyond_a_row_are_never_followed(oracle) -> None:
    """Unmapped entries of every page table point far outside the pool: whoever follows one fails loudly."""
    prompts = repeating_prompts()[:12]
    core = make_core(oracle.model, drafter=NgramDrafter(4), page_size=4, chunk=8, poison=True)
    table = core.device.runner.table

    def poison_then(step):
        def watched(packed):
            table.tables[:, 1:][table.tables[:, 1:] == 0] = 1 << 29
            return step(packed)
        return watched
    core.device.runner.step = poison_then(core.device.runner.step)
    run = Run(core)
    for i, prompt in enumerate(prompts):
        run.submit(f"r{i}", prompt, greedy(20))
    run.finish()
    for i, prompt in enumerate(prompts):
        assert run.ids(f"r{i}") == oracle.answer(prompt, 20)


@pytest.mark.parametrize("drafting", [False, True])
def test_case_11_01_case_11_03_sampled_logprobs_are_the_models_own(oracle, drafting: bool) -> None:
    """Raw log-probabilities, whatever temperature chose the token; as many entries as ids, however a turn ends."""
    prompt = [5, 4] * 6
    sampling = SamplingParams(temperature=20.0, seed=2, max_tokens=20, logprobs=1, stop_token_ids=(7, 11, 13))
    run = Run(make_core(oracle.model, drafter=NgramDrafter(4) if drafting else None))
    for i in range(4):
        run.submit(f"r{i}", [*prompt, i], sampling)
    run.submit("gone", prompt, sampling)
    run.step(6)
    run.core.abort("gone")
    run.finish()
    for rid in ("r0", "r1", "r2", "r3", "gone"):
        ids = run.ids(rid) if (rid, 0) in run.outputs else []
        entries = [e for o in run.outputs.get((rid, 0), []) for e in o.logprobs or []]
        assert [e.token_id for e in entries] == ids
        if not ids:
            continue
        start = [*prompt, int(rid[1])] if rid != "gone" else prompt
        with torch.no_grad():
            want = oracle.reference(torch.tensor([start + ids])).logits[0].log_softmax(-1)
        for i, entry in enumerate(entries):
            assert entry.logprob == pytest.approx(float(want[len(start) + i - 1, ids[i]]), abs=1e-3)
            assert entry.logprob < 0


def test_case_13_03_salts_do_not_share_prefixes(oracle) -> None:
    prompt = [(3 * i) % VOCAB for i in range(64)]
    run = Run(make_core(oracle.model))
    for i, salt in enumerate(["", "s1", "s2", "ab", "a", "b", "s1"]):
        run.submit(f"r{i}", prompt, greedy(4), cache_salt=salt)
        run.finish()
        cached = run.outputs[f"r{i}", 0][-1].usage.cached_tokens
        assert (cached > 0) == (i == 6), (i, salt)
        assert run.ids(f"r{i}") == run.ids("r0")
