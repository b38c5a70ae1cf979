"""The device half against transformers: greedy text over pages, chunks, drafts and windows; seeded text; scores."""

from __future__ import annotations

import pytest
import torch
import transformers

from stretto.model.config import ModelConfig
from stretto.model.families.llama import Llama
from stretto.model.families.mistral import mistral
from stretto.model.source import SafetensorsSource
from stretto.model.weights import Weights
from stretto.spec.scripted import ScriptedDrafter
from stretto.wire import Goal, Int, Real
from tests.device.driver import Driver, Job, text

VOCAB, WINDOW = 300, 16


def tiny(folder, window: int | None):
    """A tiny random model as (ours, transformers'), its head scaled so that no two logits are close."""
    torch.manual_seed(5)
    shape = dict(vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
                 num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=False)
    config = transformers.MistralConfig(**shape, sliding_window=window) if window else transformers.LlamaConfig(**shape)
    cls = transformers.MistralForCausalLM if window else transformers.LlamaForCausalLM
    oracle = cls(config).eval()
    with torch.no_grad():
        for p in oracle.parameters():
            p.mul_(4 if p.ndim > 1 else 1)
        oracle.lm_head.weight.mul_(20)
    oracle.save_pretrained(folder)
    raw = config.to_dict() | {"architectures": [cls.__name__]}
    weights = Weights(SafetensorsSource(folder), torch.float32, torch.device("cpu"))
    parsed = ModelConfig.from_hf(raw)
    ours = mistral(parsed, weights, 512) if window else Llama(parsed, weights, 512)
    weights.fill()
    return ours, oracle


@pytest.fixture(scope="module", params=[None, WINDOW], ids=["full", "window16"])
def pair(request, tmp_path_factory):
    return tiny(tmp_path_factory.mktemp("model"), request.param)


PROMPTS = [[3, 7, 11], list(range(20, 61)), [250, 9] * 9, [17]]
NEW = 28


@pytest.fixture(scope="module")
def answers(pair):
    """Whole greedy sequences of the oracle, with the margin rule checked: the best logit leads by 1e-3 at least."""
    out = []
    for prompt in PROMPTS:
        made = pair[1].generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, eos_token_id=None,
                                pad_token_id=0, output_logits=True, return_dict_in_generate=True)
        best = torch.stack(made.logits)[:, 0].topk(2, -1).values
        assert float((best[:, 0] - best[:, 1]).min()) > 1e-3
        out.append(made.sequences[0].tolist())
    return out


@pytest.mark.parametrize("page", [1, 16, 64, 256])
@pytest.mark.parametrize("chunk", [1, 7, 1 << 30], ids=["chunk1", "chunk7", "whole"])
@pytest.mark.parametrize("accuracy", [None, 1.0, 0.0, 0.5], ids=["plain", "right", "wrong", "half"])
def test_greedy_text_is_the_oracles(pair, answers, page: int, chunk: int, accuracy: float | None) -> None:
    drafter = None if accuracy is None else ScriptedDrafter(answers, 4, accuracy, vocab_size=VOCAB, variable=page == 16)
    driver = Driver(pair[0], page_size=page, drafter=drafter)
    got = driver.run([Job(p, NEW) for p in PROMPTS], chunk=chunk)
    assert [text(rows) for rows in got] == [a[len(p):] for a, p in zip(answers, PROMPTS, strict=True)]
    assert (driver.mixed > 0) == (chunk < 1 << 30)
    if accuracy is not None:
        assert driver.verified > 0
        assert accuracy != 1.0 or driver.accepted == driver.verified
        assert accuracy != 0.0 or driver.accepted == 0


@pytest.mark.parametrize("seed", [0, 1])
def test_random_caps_change_nothing(pair, answers, seed: int) -> None:
    drafter = ScriptedDrafter(answers, 4, 0.7, vocab_size=VOCAB, variable=True)
    generator = torch.Generator().manual_seed(seed)
    driver = Driver(pair[0], drafter=drafter)
    got = driver.run([Job(p, NEW) for p in PROMPTS], chunk=9,
                     caps=lambda step, row: int(torch.randint(1, 6, (1,), generator=generator)))
    assert [text(rows) for rows in got] == [a[len(p):] for a, p in zip(answers, PROMPTS, strict=True)]
    assert driver.accepted > 0


SAMPLED = {Real.TEMPERATURE: 20.0, Real.TOP_P: 0.9, Real.FREQUENCY: 0.4, Real.REPETITION: 1.2}


def test_seeded_text_is_the_same_alone_batched_chunked_and_drafted(pair) -> None:
    jobs = [Job(p, NEW, ints={Int.SEED_LOW: 11 + i, Int.TOP_K: 40}, reals=SAMPLED) for i, p in enumerate(PROMPTS)]
    alone = [text(Driver(pair[0]).run([job])[0]) for job in jobs]
    whole = [job.tokens + t for job, t in zip(jobs, alone, strict=True)]
    assert len({tuple(t) for t in alone}) == len(jobs)
    right, half = (ScriptedDrafter(whole, k, accuracy, vocab_size=VOCAB) for k, accuracy in ((3, 1.0), (5, 0.6)))
    for drafter in (None, right, half):
        for chunk in (5, 1 << 30):
            driver = Driver(pair[0], drafter=drafter)
            assert [text(rows) for rows in driver.run(jobs, chunk=chunk)] == alone
            assert drafter is None or driver.accepted > 0


def test_stop_inside_an_accepted_run_ends_the_row_there(pair, answers) -> None:
    """case_3_01: the earlier of stop and limit wins, for every limit, with every draft right."""
    prompt, answer = PROMPTS[1], answers[1][len(PROMPTS[1]):]
    at = next(i for i in range(4, NEW) if answer[i] not in answer[:i])
    for limit in range(1, at + 4):
        driver = Driver(pair[0], drafter=ScriptedDrafter(answers, 8, 1.0, vocab_size=VOCAB))
        rows = driver.run([Job(prompt, limit, stop_ids=(answer[at],))])[0]
        assert text(rows) == answer[: min(limit, at + 1)]
        assert rows[-1].known == len(prompt) + len(text(rows)) and rows[-1].length == rows[-1].known - 1


def test_scores_equal_teacher_forcing(pair) -> None:
    model, oracle = pair
    for prompt in PROMPTS[1:3]:
        ints = {Int.SCORE_FROM: 0, Int.LOGPROBS: 3, Int.GOAL: Goal.SCORE, Int.LIMIT: len(prompt) + 1}
        with torch.no_grad():
            want = oracle(torch.tensor([prompt])).logits[0].log_softmax(-1)
        for chunk in (4, 8, 1 << 30):
            rows = Driver(model).run([Job(prompt, ints=ints)], chunk=chunk)[0]
            scores = {p: s for row in rows for p, s in row.prompt_scores.items()}
            assert sorted(scores) == list(range(1, len(prompt))) and text(rows) == []
            for p, score in scores.items():
                assert score.logprob == pytest.approx(float(want[p - 1, prompt[p]]), abs=1e-4)
                assert score.top_ids == want[p - 1].topk(3).indices.tolist()


def test_logprobs_of_drafted_text_equal_teacher_forcing(pair, answers) -> None:
    model, oracle = pair
    driver = Driver(model, drafter=ScriptedDrafter(answers, 4, 0.7, vocab_size=VOCAB))
    rows = driver.run([Job(p, NEW, ints={Int.LOGPROBS: 2}) for p in PROMPTS], chunk=6)
    assert driver.accepted > 0
    for prompt, answer, of_row in zip(PROMPTS, answers, rows, strict=True):
        with torch.no_grad():
            want = oracle(torch.tensor([answer])).logits[0].log_softmax(-1)
        scores = [s for row in of_row for s in row.new_scores]
        assert len(scores) == NEW
        for i, score in enumerate(scores):
            at = len(prompt) + i - 1
            assert score.logprob == pytest.approx(float(want[at, answer[at + 1]]), abs=1e-4)
            assert score.top_ids[0] == answer[at + 1]
