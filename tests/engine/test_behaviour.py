"""What the whole engine does with stops, limits, aborts, small pools, choices and repeated prompts.

Each test proves by a counter that what it is about really happened.
"""

from __future__ import annotations

import pytest
import torch

from stretto.params import SamplingParams
from stretto.protocol import RequestError
from stretto.spec.ngram import NgramDrafter
from stretto.spec.scripted import ScriptedDrafter
from tests.engine.small import CONTEXT, VOCAB, Oracle, Run, greedy, make_core

NEW, LONG = 24, 70
PROMPTS = [[3, 7, 11], list(range(20, 81)), [250, 9, 31] * 9, [17], [7, 3, 250, 9, 12] * 10, [5, 4] * 6]


@pytest.fixture(scope="module")
def oracle(tmp_path_factory) -> Oracle:
    return Oracle.make(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def soft(tmp_path_factory) -> Oracle:
    return Oracle.make(tmp_path_factory.mktemp("model"), "llama", sharpness=0.7)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory) -> Oracle:
    return Oracle.make(tmp_path_factory.mktemp("model"), "qwen3", 16)


@pytest.fixture(scope="module")
def answers(oracle: Oracle) -> list[list[int]]:
    return [oracle.answer(p, NEW) for p in PROMPTS]


def drafter(answers: list[list[int]], accuracy: float, width: int = 4) -> ScriptedDrafter:
    whole = [p + a for p, a in zip(PROMPTS, answers, strict=True)]
    return ScriptedDrafter(whole, width, accuracy, vocab_size=VOCAB, variable=0 < accuracy < 1)


# --------------------------------------------------------------------------------------------- stops and limits
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("accuracy", [None, 1.0])
def test_case_3_05_exactly_max_tokens(oracle, answers, overlap: bool, accuracy: float | None) -> None:
    run = Run(make_core(oracle.model, overlap=overlap, drafter=accuracy and drafter(answers, accuracy, 8)))
    for n in range(1, 13):
        run.submit(f"r{n}", PROMPTS[1], greedy(n))
    run.finish()
    for n in range(1, 13):
        assert run.ids(f"r{n}") == answers[1][:n] and run.reason(f"r{n}") == "length"
        assert run.outputs[f"r{n}", 0][-1].usage.completion_tokens == n


@pytest.mark.parametrize("accuracy", [None, 1.0, 0.6])
def test_case_3_01_the_earlier_of_stop_and_limit_wins(oracle, answers, accuracy: float | None) -> None:
    answer = answers[2]
    at = next(i for i in range(4, NEW) if answer[i] not in answer[:i])
    run = Run(make_core(oracle.model, drafter=drafter(answers, accuracy, 8) if accuracy else None))
    for n in range(1, at + 4):
        run.submit(f"r{n}", PROMPTS[2], greedy(n, stop_token_ids=(answer[at],)))
    run.finish()
    for n in range(1, at + 4):
        assert run.ids(f"r{n}") == answer[: min(n, at + 1)]
        assert run.reason(f"r{n}") == ("stop" if n > at else "length")
        assert n <= at or run.outputs[f"r{n}", 0][-1].stop_reason == answer[at]


def test_case_2_05_ignore_eos_stops_nothing_and_masks_nothing(oracle, answers) -> None:
    answer = answers[0]
    core = make_core(oracle.model, eos_token_ids=frozenset({answer[5]}))
    run = Run(core)
    run.submit("stops", PROMPTS[0], greedy(NEW))
    run.submit("ignores", PROMPTS[0], greedy(NEW, ignore_eos=True))
    run.finish()
    assert run.ids("stops") == answer[: answer.index(answer[5]) + 1] and run.reason("stops") == "stop"
    assert run.outputs["stops", 0][-1].stop_reason is None
    assert run.ids("ignores") == answer


def test_min_tokens_puts_the_stop_off(oracle, answers) -> None:
    answer = answers[0]
    run = Run(make_core(oracle.model, drafter=NgramDrafter(3), eos_token_ids=frozenset({answer[2]})))
    run.submit("r", PROMPTS[0], greedy(NEW, min_tokens=9))
    run.finish()
    assert answer[2] not in run.ids("r")[:9] and len(run.ids("r")) >= 9


# ------------------------------------------------------------------------------------------ retraction, small pools
@pytest.mark.parametrize("which", ["oracle", "windowed"])
@pytest.mark.parametrize(("page", "overlap", "accuracy"), [(1, True, None), (16, True, 0.6), (16, False, 1.0),
                                                           (4, True, 1.0)])
def test_case_7_03_retraction_changes_no_text(request, which: str, page: int, overlap: bool,
                                              accuracy: float | None) -> None:
    o: Oracle = request.getfixturevalue(which)
    texts = [o.answer(p, LONG) for p in PROMPTS]
    core = make_core(o.model, page_size=page, pool_tokens=224, overlap=overlap, chunk=16, budget=48, poison=True,
                     drafter=drafter(texts, accuracy, 7) if accuracy else None)
    run = Run(core)
    for wave in range(2):
        for i, prompt in enumerate(PROMPTS):
            run.submit(f"{wave}-{i}", prompt, greedy(LONG))
    run.finish()
    assert run.counters["retractions"] > 0, "the pool was too large for this test"
    for wave in range(2):
        for i, text in enumerate(texts):
            assert run.ids(f"{wave}-{i}") == text


def test_case_7_01_a_lone_request_that_fills_the_pool_ends_and_the_engine_lives(oracle, answers) -> None:
    run = Run(make_core(oracle.model, pool_tokens=64))
    run.submit("big", PROMPTS[1][:40], greedy(100))
    run.finish()
    assert run.reason("big") == "length" and 20 <= len(run.ids("big")) <= 25
    run.submit("next", PROMPTS[0], greedy(NEW))
    run.finish()
    assert run.ids("next") == answers[0]


def test_case_7_07_choices_under_pressure_equal_those_of_a_large_pool(oracle) -> None:
    sampling = SamplingParams(temperature=25.0, seed=9, n=3, max_tokens=NEW)
    texts = []
    for pool in (4096, 160):
        run = Run(make_core(oracle.model, pool_tokens=pool, chunk=16))
        run.submit("n", PROMPTS[1], sampling)
        run.submit("other", PROMPTS[2], greedy(NEW))
        run.finish()
        assert (run.counters["retractions"] > 0) == (pool == 160)
        assert run.counters["forks"] + run.counters["forks_without_pages"] > 0
        texts.append([run.ids("n", i) for i in range(3)])
    assert texts[0] == texts[1] and len({tuple(t) for t in texts[0]}) == 3


def test_case_7_11_two_requests_that_need_most_of_the_pool_both_end(oracle) -> None:
    core = make_core(oracle.model, pool_tokens=128, chunk=16)
    run = Run(core)
    prompts = [list(range(1, 41)), list(range(100, 140))]
    for i, prompt in enumerate(prompts):
        run.submit(f"r{i}", prompt, greedy(75, ignore_eos=True))
    run.finish()
    for i in range(2):
        assert len(run.ids(f"r{i}")) == 75
    assert 1 <= run.counters["retractions"] < 5
    assert run.counters["fed_tokens"] < 6 * 2 * 115


# ----------------------------------------------------------------------------------------------------------- aborts
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 6, 9])
def test_case_6_07_an_abort_wins_at_any_moment(oracle, answers, overlap: bool, steps: int) -> None:
    """While queued, between chunks, after the last chunk's launch, while drafts are verified."""
    run = Run(make_core(oracle.model, overlap=overlap, chunk=16, drafter=drafter(answers, 0.6)))
    run.submit("neighbour", PROMPTS[2], greedy(NEW))
    run.submit("gone", PROMPTS[1], greedy(100))
    run.step(steps)
    before = run.ids("gone") if ("gone", 0) in run.outputs else []
    last = run.core.abort("gone")
    assert [o.finish_reason for o in last] == ["abort"]
    assert run.core.abort("gone") == []
    run.finish()
    assert (run.ids("gone") if ("gone", 0) in run.outputs else []) == before, "ids were delivered after the abort"
    assert run.ids("neighbour") == answers[2]
    run.submit("gone", PROMPTS[0], greedy(NEW))  # case_6_09: the id is free at once
    run.finish()
    assert run.ids("gone")[len(before):] == answers[0]


def test_case_16_09_a_live_id_is_refused_and_the_first_goes_on(oracle, answers) -> None:
    run = Run(make_core(oracle.model))
    run.submit("same", PROMPTS[0], greedy(NEW))
    run.step(3)
    with pytest.raises(RequestError, match="same"):
        run.submit("same", PROMPTS[1], greedy(NEW))
    run.finish()
    assert run.ids("same") == answers[0]


# ----------------------------------------------------------------------------------------------- prompts and prefixes
@pytest.mark.parametrize("extra", [-1, 0, 1])
@pytest.mark.parametrize("drafting", [False, True])
def test_case_8_09_a_repeated_prompt_of_whole_pages(oracle, extra: int, drafting: bool) -> None:
    prompt = [(7 * i) % 200 + 3 for i in range(32 + extra)]
    answer = oracle.answer(prompt, NEW)
    core = make_core(oracle.model, drafter=NgramDrafter(4) if drafting else None, poison=True)
    run = Run(core)
    for i in range(3):
        run.submit(f"r{i}", prompt, greedy(NEW))
        run.finish()
        assert run.ids(f"r{i}") == answer
        cached = run.outputs[f"r{i}", 0][-1].usage.cached_tokens
        assert cached <= len(prompt) - 1 and (cached >= 16) == (i > 0)


def test_case_8_11_two_equal_prompts_in_one_step(oracle, answers) -> None:
    run = Run(make_core(oracle.model, page_size=4, pool_tokens=512, poison=True))
    for i in range(2):
        run.submit(f"twin{i}", PROMPTS[1], greedy(NEW))
    run.step(2)
    for i in range(12):  # churn of new pages while both decode
        run.submit(f"churn{i}", [i + 1, *PROMPTS[3]] * 3, greedy(4))
    run.finish()
    assert run.ids("twin0") == run.ids("twin1") == answers[1]


def test_case_4_07_case_4_09_prompts_at_the_chunks_edges_without_a_cache(oracle) -> None:
    chunk, prompts = 8, {n: [(5 * i + n) % 250 + 1 for i in range(n)] for n in (8, 9, 16, 25)}
    core = make_core(oracle.model, chunk=chunk, budget=16, prefix_cache=False)
    run = Run(core)
    texts = {n: oracle.answer(p, 6) for n, p in prompts.items()}
    for wave in range(4):
        for n, prompt in prompts.items():
            run.submit(f"{wave}-{n}", prompt, greedy(6))
    run.finish()
    assert run.counters["chunk_tokens"] == 4 * sum(prompts), "a chunk was computed twice"
    for wave in range(4):
        for n in prompts:
            assert run.ids(f"{wave}-{n}") == texts[n]


def test_case_4_11_the_budget_holds_in_every_step(oracle) -> None:
    core = make_core(oracle.model, chunk=32, budget=32, drafter=NgramDrafter(4))
    launched: list[int] = []
    launch = core.device.launch

    def spy(packed):
        from stretto.wire import HEADER, split_plan
        launched.append(int(split_plan(packed[:HEADER], packed).rows[:, 2].sum()))
        launch(packed)
    core.device.launch = spy
    run = Run(core)
    generator = torch.Generator().manual_seed(2)
    for i in range(40):
        length = int(torch.randint(1, 100, (1,), generator=generator))
        run.submit(f"r{i}", [*([9, 8, 7] * 33)[:length], i], greedy(8))
    run.finish()
    assert max(launched) <= 32 and run.counters["mixed_steps"] > 0


@pytest.mark.parametrize("mixed", [True, False])
def test_mixed_off_is_planner_policy_alone(oracle, answers, mixed: bool) -> None:
    run = Run(make_core(oracle.model, mixed=mixed, chunk=8, drafter=drafter(answers, 0.6)))
    for wave in range(2):
        for i, prompt in enumerate(PROMPTS):
            run.submit(f"{wave}-{i}", prompt, greedy(NEW))
        run.step(4)
    run.finish()
    assert (run.counters["mixed_steps"] > 0) == mixed
    assert all(run.ids(f"{w}-{i}") == answers[i] for w in range(2) for i in range(len(PROMPTS)))


def test_prompts_too_long_or_empty_or_foreign_are_refused(oracle) -> None:
    core = make_core(oracle.model)
    for tokens, pattern in (([], "empty"), ([1] * CONTEXT, str(CONTEXT)), ([VOCAB], str(VOCAB)), ([-1], "-1")):
        with pytest.raises(RequestError, match=pattern):
            Run(core).submit("r", tokens, greedy(1))
    assert not core.has_work


# ---------------------------------------------------------------------------------------- scores and sampled requests
@pytest.mark.parametrize("pool", [4096, 192])
def test_case_7_05_logprobs_stay_aligned_under_pressure(oracle, answers, pool: int) -> None:
    run = Run(make_core(oracle.model, pool_tokens=pool, chunk=8, drafter=drafter(answers, 0.6)))
    for i, prompt in enumerate(PROMPTS):
        run.submit(f"r{i}", prompt, greedy(NEW, logprobs=3, prompt_logprobs=2))
    run.finish()
    assert (run.counters["retractions"] > 0) == (pool == 192)
    for i, (prompt, answer) in enumerate(zip(PROMPTS, answers, strict=True)):
        with torch.no_grad():
            want = oracle.reference(torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
        entries = [e for o in run.outputs[f"r{i}", 0] for e in o.logprobs or []]
        assert [e.token_id for e in entries] == answer
        for j, entry in enumerate(entries):
            at = len(prompt) + j - 1
            assert entry.logprob == pytest.approx(float(want[at, answer[j]]), abs=1e-3)
            assert entry.top_ids == want[at].topk(3).indices.tolist()
        scores = [e for o in run.outputs[f"r{i}", 0] for e in o.prompt_logprobs or []]
        assert [e.token_id for e in scores] == prompt and scores[0].logprob is None
        for p in range(1, len(prompt)):
            assert scores[p].logprob == pytest.approx(float(want[p - 1, prompt[p]]), abs=1e-3)
            assert scores[p].top_ids == want[p - 1].topk(2).indices.tolist()


def test_case_11_09_scoring_a_prompt_generates_nothing(oracle) -> None:
    run = Run(make_core(oracle.model, chunk=7, drafter=NgramDrafter(3)))
    run.submit("s", PROMPTS[1], SamplingParams(max_tokens=0, prompt_logprobs=0))
    run.finish()
    assert run.ids("s") == [] and run.reason("s") == "length"
    last = run.outputs["s", 0][-1]
    assert last.usage.completion_tokens == 0 and len(last.prompt_logprobs) == len(PROMPTS[1])


def test_case_1_09_seeded_and_unseeded_neighbours_do_not_touch_a_greedy_row(oracle, answers) -> None:
    run = Run(make_core(oracle.model, drafter=NgramDrafter(4)))
    run.submit("greedy", PROMPTS[1], greedy(NEW))
    for i in range(3):
        run.submit(f"seeded{i}", PROMPTS[2], SamplingParams(temperature=20, seed=i, max_tokens=NEW))
        run.submit(f"free{i}", PROMPTS[2], SamplingParams(temperature=20, max_tokens=NEW))
    run.finish()
    assert run.ids("greedy") == answers[1]
    assert len({tuple(run.ids(f"{kind}{i}")) for kind in ("seeded", "free") for i in range(3)}) > 3


PARAMETERS = {
    "temperature": {}, "top_k": {"top_k": 20}, "top_p": {"top_p": 0.8}, "min_p": {"min_p": 0.3},
    "repetition": {"repetition_penalty": 2.0}, "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 1.5}, "bias": {"logit_bias": {7: 50.0, 9: -100.0}}, "n": {"n": 2},
    "all": {"top_k": 50, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.2, "frequency_penalty": 0.5,
            "logit_bias": {3: 20.0}, "min_tokens": 5},
}


@pytest.mark.parametrize("parameters", PARAMETERS.values(), ids=PARAMETERS.keys())
def test_seeded_text_is_the_same_alone_batched_chunked_and_drafted(soft, parameters: dict) -> None:
    """case_2_01, case_2_03: every parameter at every position of a window. Right drafts are the text itself."""
    sampling = SamplingParams(temperature=0.8, seed=1234, max_tokens=NEW, **parameters)
    alone = Run(make_core(soft.model, overlap=False, prefix_cache=False))
    for i, prompt in enumerate(PROMPTS[:3]):
        alone.submit(f"r{i}", prompt, sampling)
        alone.finish()
    keys = [(f"r{i}", c) for i in range(3) for c in range(sampling.n)]
    want = {key: alone.ids(*key) for key in keys}
    whole = [PROMPTS[int(rid[1])] + ids for (rid, _), ids in want.items()]
    for made in (NgramDrafter(4), ScriptedDrafter(whole, 5, 1.0, vocab_size=VOCAB),
                 ScriptedDrafter(whole, 5, 0.5, vocab_size=VOCAB, variable=True)):
        run = Run(make_core(soft.model, chunk=9, drafter=made))
        for i, prompt in enumerate(PROMPTS[:3]):
            run.submit(f"r{i}", prompt, sampling)
        run.finish()
        assert {key: run.ids(*key) for key in keys} == want
        assert run.counters["accepted"] > 0 or isinstance(made, NgramDrafter)
    plain = Run(make_core(soft.model))
    for i, prompt in enumerate(PROMPTS[:3]):
        plain.submit(f"r{i}", prompt, SamplingParams(temperature=0.8, seed=1234, max_tokens=NEW))
    plain.finish()
    changed = any(plain.ids(f"r{i}") != want[f"r{i}", 0] for i in range(3))
    assert changed or parameters in ({}, {"n": 2}), "the parameter had no effect"
