"""Chat completions: the answer's shape, its fields, and that a stream says the same."""

from __future__ import annotations

import pytest

from tests.serve.conftest import Api, events, make_api
from tests.serve.fakes import IM_START, CoreOptions


def joined(chunks: list) -> dict[int, str]:
    """Text by choice index of a stream's chunks."""
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"] if isinstance(chunk, dict) else ():
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["delta"].get("content", "")
    return texts


async def test_answer_has_openais_shape(api: Api):
    answer = (await api.chat("say:hello there", max_tokens=None)).json()
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")
    assert answer["model"] == "fake/tiny" and answer["created"] > 1.7e9
    assert answer["choices"] == [{"index": 0, "message": {"role": "assistant", "content": "hello there",
                                                          "refusal": None},
                                  "logprobs": None, "finish_reason": "stop", "stop_reason": None}]
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["completion_tokens"] == len("hello there") + 1  # the end-of-sequence id is counted


async def test_stream_rules(api: Api):
    response = await api.chat("say:hi", stream=True, stream_options={"include_usage": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache" and response.headers["x-accel-buffering"] == "no"
    first, *middle, usage, done = events(response.text)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert first["choices"][0]["finish_reason"] is None and first["object"] == "chat.completion.chunk"
    assert [c["choices"][0]["finish_reason"] for c in middle if c["choices"][0]["finish_reason"]] == ["stop"]
    assert middle[-1]["choices"][0]["finish_reason"] == "stop"
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 3 and done == "[DONE]"
    assert len({chunk["id"] for chunk in (first, *middle, usage)}) == 1


@pytest.mark.parametrize("block", [1, 3, 7])
@pytest.mark.parametrize("text", ["plain words", "삼겹살 🙂🙂 ďábelské 👩‍👩‍👧", " lead  and trail "])
async def test_case_14_05_stream_equals_whole_answer(text: str, block: int):
    async with make_api(CoreOptions(block=block)) as api:
        whole = (await api.chat(f"say:{text}", max_tokens=100)).json()
        streamed = events((await api.chat(f"say:{text}", max_tokens=100, stream=True)).text)
    assert whole["choices"][0]["message"]["content"] == text == joined(streamed)[0]
    assert not any("\ufffd" in str(chunk) for chunk in streamed)


@pytest.mark.parametrize("block", [1, 4])
async def test_case_14_03_a_lone_lead_byte_is_flushed_once(block: int):
    async with make_api(CoreOptions(block=block)) as api:
        for limit, finish in ((50, "stop"), (2, "length")):
            whole = (await api.chat("odd:61f0", max_tokens=limit)).json()
            streamed = events((await api.chat("odd:61f0", max_tokens=limit, stream=True)).text)
            assert whole["choices"][0]["message"]["content"] == "a\ufffd" == joined(streamed)[0]
            assert whole["choices"][0]["finish_reason"] == finish
            assert whole["usage"]["completion_tokens"] == (3 if finish == "stop" else 2)


@pytest.mark.parametrize("options, wanted", [(None, 0), ({}, 0), ({"include_usage": False}, 0),
                                             ({"include_usage": True}, 1)])
@pytest.mark.parametrize("n", [1, 3])
async def test_case_15_03_usage_in_streams(api: Api, options: dict | None, wanted: int, n: int):
    whole = (await api.chat(n=n)).json()["usage"]
    chunks = events((await api.chat(n=n, stream=True, stream_options=options)).text)[:-1]
    reports = [chunk for chunk in chunks if chunk.get("usage")]
    assert len(reports) == wanted and all(report["choices"] == [] for report in reports)
    if reports:
        assert reports[0] is chunks[-1]
        assert {k: reports[0]["usage"][k] for k in ("prompt_tokens", "completion_tokens", "total_tokens")} == \
               {k: whole[k] for k in ("prompt_tokens", "completion_tokens", "total_tokens")}
        assert all(chunk["usage"] is None for chunk in chunks[:-1])
    else:
        assert all("usage" not in chunk for chunk in chunks)


async def test_continuous_usage(api: Api):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events((await api.chat(stream=True, stream_options=options)).text)[:-1]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[0] == 0 and counts[-1] == 8


async def test_case_15_05_choices_of_a_stream_keep_their_index(api: Api):
    whole = (await api.chat(n=3, seed=7)).json()
    chunks = events((await api.chat(n=3, seed=7, stream=True)).text)[:-1]
    texts = [choice["message"]["content"] for choice in whole["choices"]]
    assert len(set(texts)) == 3 and joined(chunks) == dict(enumerate(texts))
    assert whole["usage"]["prompt_tokens"] == len(await tokens_of(api))
    roles = [c["choices"][0]["index"] for c in chunks if "role" in c["choices"][0]["delta"]]
    assert roles == [0, 1, 2]


async def tokens_of(api: Api, **fields) -> list[int]:
    body = {"messages": [{"role": "user", "content": "hello"}]} | fields
    return (await api.http.post("/tokenize", json=body)).json()["tokens"]


async def test_case_15_07_content_parts(api: Api):
    one = [{"type": "text", "text": "hello"}]
    two = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert await tokens_of(api) == await tokens_of(api, messages=[{"role": "user", "content": one}])
    assert await tokens_of(api, messages=[{"role": "user", "content": two}]) == \
        await tokens_of(api, messages=[{"role": "user", "content": "a\nb"}])
    picture = await api.chat([{"type": "image_url", "image_url": {"url": "data:,"}}])
    assert picture.status_code == 400 and picture.json()["error"]["code"] == "unsupported_content"
    assert picture.json()["error"]["param"] == "messages[0].content[0].type"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    history = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]},
               {"role": "tool", "tool_call_id": "1", "content": "42"}]
    assert (await api.http.post("/v1/chat/completions", json={"messages": history, "max_tokens": 1})).status_code == 200


async def test_case_15_11_cached_tokens_never_exceed_the_prompt(api: Api):
    first, second = [(await api.chat(n=4)).json()["usage"] for _ in range(2)]
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert 0 < second["prompt_tokens_details"]["cached_tokens"] <= second["prompt_tokens"]


async def test_speculation_is_reported(api: Api):
    async with make_api(CoreOptions(block=4)) as api:
        usage = (await api.chat("hello", max_tokens=8)).json()["usage"]
    assert usage["speculation"] == {
        "drafted_tokens": 6, "accepted_tokens": 6, "steps": 2, "tokens_per_step": 4.0, "accepted_runs": [0, 0, 0, 2],
        "drafted_at": [2, 2, 2], "accepted_at": [2, 2, 2]}
    assert usage["completion_tokens"] == usage["speculation"]["steps"] + usage["speculation"]["accepted_tokens"]


@pytest.mark.parametrize("block", [1, 3, 8])
async def test_case_3_03_text_ids_logprobs_and_usage_agree(block: int):
    async with make_api(CoreOptions(block=block)) as api:
        body = dict(stop="5|6", logprobs=True, return_token_ids=True, max_tokens=50)
        whole = (await api.chat("say:4 t5|6t7", **body)).json()
        chunks = events((await api.chat("say:4 t5|6t7", **body, stream=True)).text)[:-1]
    choice = whole["choices"][0]
    assert choice["message"]["content"] == "4 t" and choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == "5|6"
    ids = choice["token_ids"]
    assert ids == list(b"4 t5|6")  # the ids of the stop string are listed and counted; their text is left out
    assert len(choice["logprobs"]["content"]) == len(ids) == whole["usage"]["completion_tokens"]
    parts = [c["choices"][0] for c in chunks]
    assert [i for part in parts for i in part.get("token_ids", [])] == ids
    assert [e for part in parts for e in (part["logprobs"] or {"content": []})["content"]] == \
        choice["logprobs"]["content"]


@pytest.mark.parametrize("block", [1, 4])
@pytest.mark.parametrize("limit", range(1, 9))
async def test_case_3_05_exactly_max_tokens(limit: int, block: int):
    async with make_api(CoreOptions(block=block)) as api:
        answer = (await api.chat(max_tokens=limit)).json()
        stop = (await api.chat("say:abcde", max_tokens=limit, stop="e")).json()
    assert answer["usage"]["completion_tokens"] == limit and answer["choices"][0]["finish_reason"] == "length"
    assert stop["choices"][0]["message"]["content"] == "abcde"[: min(limit, 4)]
    assert stop["choices"][0]["finish_reason"] == ("stop" if limit >= 5 else "length")


@pytest.mark.parametrize("stop, shown", [("###", "ab"), ("##x", "ab###cd"), ("b##", "a"), ("zz", "ab###cd")])
async def test_case_3_07_no_part_of_a_stop_string_is_streamed(api: Api, stop: str, shown: str):
    chunks = events((await api.chat("say:ab###cd", max_tokens=50, stop=[stop], stream=True)).text)
    assert joined(chunks)[0] == shown
    kept = (await api.chat("say:ab###cd", max_tokens=50, stop=[stop], include_stop_str_in_output=True)).json()
    assert kept["choices"][0]["message"]["content"] == (shown if stop not in "ab###cd" else shown + stop)


async def test_logprobs_and_case_11_07_no_infinity_in_json(api: Api):
    answer = await api.chat(logprobs=True, top_logprobs=20, max_tokens=2)
    assert answer.status_code == 200 and "Infinity" not in answer.text and "NaN" not in answer.text
    entry = answer.json()["choices"][0]["logprobs"]["content"][0]
    assert len(entry["top_logprobs"]) == 20 and entry["top_logprobs"][2]["logprob"] == -9999.0
    assert bytes(entry["bytes"]).decode() == entry["token"]
    named = (await api.chat(logprobs=True, return_tokens_as_token_ids=True)).json()
    token = named["choices"][0]["logprobs"]["content"][0]["token"]
    assert token.startswith("token_id:")


async def test_prompt_logprobs_and_token_ids(api: Api):
    body = dict(prompt_logprobs=2, return_token_ids=True, max_tokens=1)
    whole = (await api.chat(**body)).json()
    ids = whole["prompt_token_ids"]
    assert ids == await tokens_of(api) and ids[0] == IM_START
    assert len(whole["prompt_logprobs"]) == len(ids) and whole["prompt_logprobs"][0] is None
    assert str(ids[1]) in whole["prompt_logprobs"][1]
    chunks = events((await api.chat(**body, stream=True)).text)[:-1]
    assert chunks[0]["prompt_token_ids"] == ids
    assert [c["prompt_logprobs"] for c in chunks if "prompt_logprobs" in c] == [whole["prompt_logprobs"]]


async def test_template_options(api: Api):
    plain = await tokens_of(api)
    assert await tokens_of(api, chat_template_kwargs={"mark": 1}) == plain[:-len(b"assistant\n") - 1] + \
        list(b"mark=1") + plain[-len(b"assistant\n") - 1:]
    assert len(await tokens_of(api, add_generation_prompt=False)) == len(plain) - len(b"assistant\n") - 1
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "The ans"}]
    assert bytes((await tokens_of(api, messages=messages, continue_final_message=True))[-7:]) == b"The ans"
    developer = await tokens_of(api, messages=[{"role": "developer", "content": "x"}])
    assert developer == await tokens_of(api, messages=[{"role": "system", "content": "x"}])


async def test_case_18_05_template_errors_are_400_with_their_text(api: Api):
    answer = await api.chat("template-error")
    assert answer.status_code == 400 and "this template does not like you" in answer.json()["error"]["message"]
    await api.alive()


async def test_case_18_01_defaults_of_the_model_and_explicit_values():
    defaults = {"temperature": 0.1, "top_k": 1, "max_tokens": 3}
    async with make_api(CoreOptions(sampling_defaults=defaults)) as api:
        seen = capture_sampling(api)
        answer = (await api.http.post("/v1/chat/completions",
                                      json={"messages": [{"role": "user", "content": "x"}]})).json()
        assert answer["usage"]["completion_tokens"] == 3
        await api.chat(temperature=1.0, top_k=0, max_tokens=5)
        assert (await api.http.get("/server_info")).json()["default_sampling"] == defaults
    assert (seen[0].temperature, seen[0].top_k) == (0.1, 1)
    assert (seen[1].temperature, seen[1].top_k, seen[1].max_tokens) == (1.0, 0, 5)


def capture_sampling(api: Api) -> list:
    """SamplingParams of every request from now on."""
    seen, generate = [], api.engine.generate
    api.service.engine.generate = lambda request: (seen.append(request.sampling), generate(request))[1]  # type: ignore
    return seen


@pytest.mark.parametrize("field, value, attribute, expected", [
    ("temperature", 0.5, "temperature", 0.5), ("top_p", 0.5, "top_p", 0.5), ("top_k", 3, "top_k", 3),
    ("min_p", 0.1, "min_p", 0.1), ("repetition_penalty", 1.5, "repetition_penalty", 1.5),
    ("presence_penalty", 1, "presence_penalty", 1.0), ("frequency_penalty", -1, "frequency_penalty", -1.0),
    ("logit_bias", {"7": -100}, "logit_bias", {7: -100.0}), ("min_tokens", 2, "min_tokens", 2),
    ("max_completion_tokens", 8, "max_tokens", 8), ("seed", 2**64 - 1, "seed", 2**64 - 1), ("n", 2, "n", 2),
    ("stop", "x", "stop", ("x",)), ("stop", ["x", "y"], "stop", ("x", "y")),
    ("stop_token_ids", [1, 2], "stop_token_ids", (1, 2)), ("ignore_eos", True, "ignore_eos", True),
    ("include_stop_str_in_output", True, "include_stop", True),
    ("skip_special_tokens", False, "skip_special_tokens", False), ("prompt_logprobs", 2, "prompt_logprobs", 2),
    ("speculation", {"tokens": 0}, "speculation", 0), ("max_tokens", 5.0, "max_tokens", 5),
])
async def test_every_field_reaches_the_engine(api: Api, field: str, value, attribute: str, expected):
    seen = capture_sampling(api)
    assert (await api.chat(**{field: value})).status_code == 200
    assert getattr(seen[0], attribute) == expected


async def test_null_fields_are_defaults(api: Api):
    seen = capture_sampling(api)
    nulls = dict.fromkeys(("temperature", "top_p", "n", "stop", "logit_bias", "seed", "tools", "response_format",
                           "user", "stream", "stream_options", "logprobs", "top_logprobs", "speculation", "cache_salt"))
    assert (await api.chat(**nulls)).status_code == 200
    await api.chat()
    assert seen[0] == seen[1]


async def test_priority_and_salt_reach_the_engine(api: Api):
    seen, generate = [], api.engine.generate
    api.service.engine.generate = lambda request: (seen.append(request), generate(request))[1]  # type: ignore
    await api.chat(priority=-3, cache_salt="tenant", request_id="mine")
    assert (seen[0].priority, seen[0].cache_salt, seen[0].rid) == (-3, "tenant", "mine")
