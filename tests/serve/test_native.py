"""/generate, in the shape of SGLang's clients, against the same completion."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from stretto.serve.native import SAMPLING
from stretto.serve.schemas import GenerationBody
from tests.serve.conftest import Api, events, make_api
from tests.serve.fakes import CoreOptions

RENAMED = {theirs: ours for ours, theirs in SAMPLING.items()}
ANY_VALUE = {"user", "metadata", "safety_identifier", "prompt_cache_key"}

async def generate(api: Api, **fields: Any):
    return await api.http.post("/generate", json=fields)


async def test_text_and_ids_are_the_same(api: Api):
    one = (await generate(api, text="say:hello", sampling_params={"temperature": 0})).json()
    assert one["text"] == "hello" and one["meta_info"]["finish_reason"] == {"type": "stop", "matched": 257}
    assert one["meta_info"]["prompt_tokens"] == 10 and one["meta_info"]["completion_tokens"] == 6
    two = (await generate(api, input_ids=[256, *b"say:hello"])).json()
    assert two["text"] == "hello" and two["output_ids"] == one["output_ids"] and two["meta_info"]["cached_tokens"] == 9


async def test_batches_choices_and_defaults(api: Api):
    many = (await generate(api, text=["say:a", "words"], sampling_params={"max_new_tokens": 3})).json()
    assert many[0]["text"] == "a" and many[1]["meta_info"]["finish_reason"] == {"type": "length", "length": 3}
    single = (await generate(api, text=["say:a"])).json()
    assert [one["text"] for one in single] == ["a"]
    choices = (await generate(api, text="words", sampling_params={"n": 3, "max_new_tokens": 2})).json()
    assert len(choices) == 3
    long = (await generate(api, text="words")).json()
    assert long["meta_info"]["completion_tokens"] == 128


async def test_a_gateways_word_for_no_model_is_none(api: Api):
    assert (await generate(api, text="say:a", model="unknown")).json()["text"] == "a"
    assert (await generate(api, text="say:a", model="fake/tiny")).json()["text"] == "a"
    assert (await generate(api, text="say:a", model="other")).status_code == 404


@pytest.mark.parametrize("block", [1, 4])
@pytest.mark.parametrize("incremental", [False, True])
async def test_streams(block: int, incremental: bool):
    asked: dict[str, Any] = {"text": "say:삼겹살 🙂", "return_logprob": True, "top_logprobs_num": 2,
                             "logprob_start_len": 0}
    async with make_api(CoreOptions(block=block)) as api:
        whole = (await generate(api, **asked)).json()
        found = events((await generate(api, **asked, stream=True, incremental=incremental)).text)
    assert found.pop() == "[DONE]"
    assert found[-1]["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]
    texts, ids = [one["text"] for one in found], [one["output_ids"] for one in found]
    assert ("".join(texts) if incremental else texts[-1]) == whole["text"]
    assert (sum(map(len, ids)) if incremental else len(ids[-1])) == len(whole["output_ids"])
    if not incremental:
        assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
        for name in ("output_token_logprobs", "input_token_logprobs", "output_top_logprobs"):
            assert found[-1]["meta_info"][name] == whole["meta_info"][name]


async def test_logprobs_in_triples(api: Api):
    meta = (await generate(api, text="say:ab", return_logprob=True, top_logprobs_num=2, logprob_start_len=3,
                           return_text_in_logprobs=True)).json()["meta_info"]
    logprob, token, text = meta["output_token_logprobs"][0]
    assert (token, text) == (ord("a"), "a") and logprob < 0
    assert [entry[1] for entry in meta["output_top_logprobs"][0]] == [ord("a"), ord("b")]
    assert [entry[2] for entry in meta["input_token_logprobs"]] == list("y:ab")
    plain = (await generate(api, text="say:ab", return_logprob=True)).json()["meta_info"]
    assert plain["input_token_logprobs"] == [] and plain["output_token_logprobs"][0][2] is None
    full = (await generate(api, text="say:ab", return_logprob=True, logprob_start_len=0)).json()["meta_info"]
    assert full["input_token_logprobs"][0] == [None, 256, None]
    last = (await generate(api, text="say:ab", return_logprob=True, logprob_start_len=6)).json()["meta_info"]
    assert [entry[1] for entry in last["input_token_logprobs"]] == [ord("b")]  # <s>, six letters: 6 is the last place


@pytest.mark.parametrize("fields, param", [
    ({}, "text"), ({"text": "a", "input_ids": [1]}, "text"), ({"text": [1]}, "text"),
    ({"input_ids": ["a"]}, "input_ids"), ({"text": []}, "text"),
    ({"text": "a", "sampling_params": {"temperature": -1}}, "temperature"),
    ({"text": "a", "sampling_params": {"max_new_tokens": 9999}}, "max_new_tokens"),
    ({"text": "a", "sampling_params": {"max_new_tokens": "x"}}, "max_new_tokens"),
    ({"text": "a", "return_logprob": True, "top_logprobs_num": 99}, "top_logprobs_num"),
    ({"text": "a", "sampling_params": {"use_beam_search": True}}, "use_beam_search"),
    ({"text": "a", "return_logprob": True, "logprob_start_len": 2}, "logprob_start_len"),
    ({"text": "a", "return_logprob": True, "logprob_start_len": 10**6}, "logprob_start_len"),
    ({"text": ["abc", "a"], "return_logprob": True, "logprob_start_len": 3}, "logprob_start_len"),
    ({"text": "a", "logprob_start_len": -5}, "logprob_start_len"),
    ({"input_ids": [99999]}, "prompt")])
async def test_refusals(api: Api, fields: dict, param: str):
    for stream in (False, True):
        answer = await generate(api, **fields, stream=stream)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


@pytest.mark.parametrize("name", sorted(set(GenerationBody.model_fields) - ANY_VALUE))
async def test_case_15_09_a_sampling_parameter_of_a_wrong_type_is_named(api: Api, name: str):
    """Of no field is a list of objects a value; and these are none of ids and strings."""
    values: list[Any] = [[{"a": 1}], *([5, True, 1.5, "x", {}, [True], [1.5], [None]] if "token_ids" in name and
                                      not name.startswith("return") else [])]
    for value in values:
        answer = await generate(api, text="a", sampling_params={name: value})
        if name in ("model", "stream", "priority", "request_id"):  # they have their place beside sampling_params
            assert answer.status_code == 200
            continue
        assert answer.status_code == 400 and answer.json()["error"]["param"].startswith(RENAMED.get(name, name)), (
            value, answer.text)


async def test_the_id_is_the_clients(api: Api):
    answer = await generate(api, text="say:a", rid="mine")
    assert answer.json()["meta_info"]["id"] == "mine" == answer.headers["x-request-id"]
