"""The HTTP API over a real engine: a tiny random model with n-gram drafts, transformers as the oracle."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest
import torch

from stretto.engine.build import text_streams
from stretto.engine.core import EngineCore
from stretto.serve.metric_names import COUNTERS, GAUGES
from stretto.spec.ngram import NgramDrafter
from tests.engine.small import VOCAB, Oracle, make_core
from tests.engine.test_logit_processors import ForceCode, as_code, engine
from tests.serve.conftest import events, make_api, make_served
from tests.serve.fakes import ByteTokenizer
from tests.serve.test_metrics import samples

PROMPTS = [[1, 7, 3, 7, 3, 7, 3], [5, 9, 2, 4, 4, 8], list(range(40, 90)), [11, 12, 13] * 12]
NEW = 40
NAME = {"served_model_names": ("fake/tiny",)}


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return Oracle.make(Path(tmp_path_factory.mktemp("model")), "llama")


@pytest.fixture(scope="module")
def answers(oracle: Oracle) -> list[list[int]]:
    return [oracle.answer(prompt, NEW) for prompt in PROMPTS]


def core_of(oracle: Oracle) -> EngineCore:
    return make_core(oracle.model, drafter=NgramDrafter(3), text=text_streams(ByteTokenizer()), chunk=16, budget=48,
                     poison=True)


def ids_of(text: str) -> list[int]:
    return [i for chunk in events(text)[:-1] for i in chunk["choices"][0].get("token_ids", [])]


async def test_answers_are_the_oracles_streamed_and_not(oracle: Oracle, answers: list[list[int]]):
    body = {"temperature": 0, "max_tokens": NEW, "return_token_ids": True, "ignore_eos": True}
    async with make_api(lambda: core_of(oracle), **NAME) as api:
        both = await asyncio.gather(*(api.complete(prompt, **body, stream=stream)
                                      for prompt in PROMPTS for stream in (False, True)))
        off = await api.complete(PROMPTS[0], **body, speculation={"tokens": 0})
        usage = off.json()["usage"]
    for i, answer in enumerate(answers):
        whole, streamed = both[2 * i].json(), both[2 * i + 1]
        assert whole["choices"][0]["token_ids"] == answer == ids_of(streamed.text)
        text = "".join(chunk["choices"][0]["text"] for chunk in events(streamed.text)[:-1])
        assert whole["choices"][0]["text"] == text
    assert off.json()["choices"][0]["token_ids"] == answers[0] and usage["speculation"]["drafted_tokens"] == 0
    report = [answer.json()["usage"]["speculation"] for answer in both[::2]]
    assert sum(r["drafted_tokens"] for r in report) > 0  # drafts did fire
    assert all(r["steps"] + r["accepted_tokens"] == NEW for r in report)
    for r in report:  # by length and by place, the same drafts
        by_length = sum(n * count for n, count in enumerate(r["accepted_runs"]))
        assert by_length == sum(r["accepted_at"]) == r["accepted_tokens"]
        assert sum(r["drafted_at"]) == r["drafted_tokens"] and (
            not r["drafted_at"] or r["drafted_at"][0] == sum(r["accepted_runs"]))
        assert r["tokens_per_step"] == round(NEW / r["steps"], 4)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "status"), [
    ({"logit_processors": [{"name": "breaks", "params": {"how": "raise"}}]}, 500),
    ({"custom_logit_processor": as_code(ForceCode), "custom_params": {}}, 400)])
async def test_a_logit_processor_that_fails(oracle: Oracle, answers: list[list[int]], fields: dict, status: int,
                                            stream: bool):
    """Its request gets an error that names the field; the one beside it, with the same processor, its answer."""
    good = {"logit_processors": [{"name": "breaks"}]} if status == 500 else {**fields, "custom_params": {"ids": []}}
    body = {"temperature": 0, "max_tokens": NEW, "return_token_ids": True, "ignore_eos": True}

    def core() -> EngineCore:
        return engine(oracle.model, drafter=NgramDrafter(3), text=text_streams(ByteTokenizer())).core
    async with make_api(core, **NAME) as api:
        bad, other = await asyncio.gather(api.complete(PROMPTS[0], **body, **fields, stream=stream),
                                          api.complete(PROMPTS[0], **body, **good))
        error = bad.json()["error"]  # of a stream too, while nothing was sent
        assert bad.status_code == status
        assert error["param"] in fields and error["code"].endswith("logit_processor_failed")
        assert other.json()["choices"][0]["token_ids"] == answers[0]


@pytest.mark.parametrize("stream", [False, True])
async def test_case_6_03_clients_that_leave_free_their_pages(oracle: Oracle, answers: list[list[int]], stream: bool):
    core = core_of(oracle)
    async with make_served(lambda: core, **NAME) as api:
        for after in (0.0, 0.01, 0.05, 0.1):
            calls = [asyncio.create_task(api.complete(prompt, n=2, max_tokens=150, ignore_eos=True, stream=stream))
                     for prompt in PROMPTS * 3]
            await asyncio.sleep(after)
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
        await api.until_idle(10.0)
        assert api.service.metrics.aborts["client_disconnected"] > 0 and core.host.counters.aborts > 0
        gauges = (await api.engine.stats()).gauges
        assert gauges["running"] == gauges["waiting"] == gauges["pages_used_0"] == 0
        again = await api.complete(PROMPTS[1], max_tokens=NEW, temperature=0, ignore_eos=True, return_token_ids=True)
        assert again.json()["choices"][0]["token_ids"] == answers[1]
    core.host.audit()


def test_metrics_say_what_every_number_of_an_engine_is(oracle: Oracle):
    core = core_of(oracle)
    stats = core.stats()
    core.close()
    assert {name for name in stats.counters if "." not in name} <= set(COUNTERS)
    assert {name for name in stats.gauges if not name.startswith("pages_")} <= set(GAUGES)


async def test_case_17_03_metrics_equal_the_usages(oracle: Oracle):
    async with make_api(lambda: core_of(oracle), **NAME) as api:
        calls = [api.complete(prompt, n=n, max_tokens=20, seed=n) for prompt in PROMPTS for n in (1, 3)]
        usages = [answer.json()["usage"] for answer in await asyncio.gather(*calls)]
        found = samples((await api.http.get("/metrics")).text)
    assert found["vllm:generation_tokens_total"] == sum(u["completion_tokens"] for u in usages)
    for name, field in (("draft", "drafted_tokens"), ("accepted", "accepted_tokens")):
        assert found[f"vllm:spec_decode_num_{name}_tokens_total"] == sum(u["speculation"][field] for u in usages)
    assert all(0 <= u["prompt_tokens_details"]["cached_tokens"] <= u["prompt_tokens"] for u in usages)
    runs = [sum(counts) for counts in itertools.zip_longest(*(u["speculation"]["accepted_runs"] for u in usages),
                                                            fillvalue=0)]
    assert found["stretto_accepted_run_tokens_count"] == sum(runs) > 0
    assert found["stretto_accepted_run_tokens_sum"] == sum(n * count for n, count in enumerate(runs))
    assert found["stretto_accepted_run_tokens_bucket|le=0"] == runs[0]


async def test_case_16_01_bad_ids_never_reach_the_device(oracle: Oracle):
    async with make_api(lambda: core_of(oracle), **NAME) as api:
        for fields in ({"logit_bias": {str(VOCAB): 1}}, {"stop_token_ids": [VOCAB]}, {"prompt": [VOCAB]},
                       {"prompt": [-1]}):
            assert (await api.complete(**{"prompt": "x"} | fields)).status_code == 400
        forced = await api.complete("x", logit_bias={"7": 100}, max_tokens=5, return_token_ids=True)
        assert forced.json()["choices"][0]["token_ids"] == [7] * 5


async def test_scored_prompts_and_logprobs(oracle: Oracle):
    prompt = PROMPTS[2]
    async with make_api(lambda: core_of(oracle), **NAME) as api:
        answer = await api.complete([prompt], echo=True, logprobs=1, max_tokens=1, temperature=0)
        score = await api.complete([prompt], echo=True, logprobs=1, max_tokens=0)
    values = answer.json()["choices"][0]["logprobs"]["token_logprobs"]
    reference = oracle.reference(torch.tensor([prompt])).logits[0].detach().log_softmax(-1)
    expected = [float(reference[i, token]) for i, token in enumerate(prompt[1:])]
    assert values[0] is None and values[1:-1] == pytest.approx(expected, abs=1e-3)
    assert score.json()["choices"][0]["logprobs"]["token_logprobs"][1:] == pytest.approx(expected, abs=1e-3)
    assert score.json()["usage"]["completion_tokens"] == 0
