"""Random bodies: whatever comes, the answer is a 200 or a 4xx in OpenAI's shape, and the server lives on. And random
partitions of an answer into engine steps: a stream says what the whole answer says."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from stretto.serve.schemas import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    GenerateRequest,
    MessagesRequest,
    RerankRequest,
    ResponsesRequest,
    ScoreRequest,
)
from tests.serve.conftest import events, make_api
from tests.serve.fakes import CoreOptions

SETTINGS = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-3, 40), st.sampled_from([2**31, 2**63, 2**70, -2**64]),
                    st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=8))
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4) |
                      st.dictionaries(st.text(max_size=6), inner, max_size=3), max_leaves=6)
PARTS = st.lists(st.fixed_dictionaries({"type": st.sampled_from(["text", "image_url"])}, optional={"text": VALUES}),
                 max_size=2)
MESSAGES = st.lists(st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool", "x"]), "content": PARTS | SCALARS},
    optional={"tool_calls": VALUES, "name": VALUES}), max_size=3)
PROMPTS = st.one_of(VALUES, st.text(max_size=20), st.lists(st.integers(-1, 300), max_size=5))


KEYED: dict[str, st.SearchStrategy] = {  # fields whose keys mean something
    "logit_bias": st.dictionaries(st.from_regex(r"[-+ 0-9_]{0,6}", fullmatch=True) | st.text(max_size=3), SCALARS,
                                  max_size=3),
    "chat_template_kwargs": st.dictionaries(
        st.sampled_from(["self", "messages", "tools", "args", "kwargs", "bos_token", "variables"])
        | st.text(max_size=5),
        VALUES, max_size=2),
    "bad_words": st.lists(st.text(max_size=40) | st.just("x" * 2000), max_size=3)}


def bodies(model: Any, prompt: dict[str, st.SearchStrategy]) -> st.SearchStrategy[dict]:
    """Bodies with a plausible prompt and a few known fields of wild values."""
    names = sorted(set(model.model_fields) - set(prompt) - {"model"})
    fields = st.dictionaries(st.sampled_from(names) | st.text(max_size=5), VALUES, max_size=4)
    keyed = st.fixed_dictionaries({}, optional={name: KEYED[name] for name in KEYED})
    return st.tuples(fields, st.fixed_dictionaries(prompt), st.integers(1, 5), keyed | st.just({})).map(
        lambda parts: {"max_tokens": parts[2]} | parts[0] | parts[1] | parts[3])


CALLS = st.lists(st.one_of(
    st.tuples(st.just("/v1/chat/completions"), bodies(ChatRequest, {"messages": MESSAGES})),
    st.tuples(st.just("/v1/completions"), bodies(CompletionRequest, {"prompt": PROMPTS})),
    st.tuples(st.sampled_from(["/tokenize", "/detokenize", "/abort_request"]),
              st.dictionaries(st.sampled_from(["prompt", "messages", "tokens", "rid", "abort_all"]), VALUES))),
    min_size=1, max_size=12)


ITEMS = st.lists(st.one_of(
    st.dictionaries(st.text(max_size=4), VALUES, max_size=2),
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "tool"]), "content": PARTS | VALUES}),
    st.fixed_dictionaries(
        {"type": st.sampled_from(["message", "function_call", "function_call_output", "reasoning"])},
        optional=dict.fromkeys(("role", "content", "call_id", "name", "arguments", "output"), VALUES | st.text()))),
    max_size=3)
BLOCKS = st.lists(st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "tool_use", "tool_result", "thinking", "image"])},
    optional=dict.fromkeys(("text", "id", "name", "input", "tool_use_id", "content"), VALUES)), max_size=3)
TURNS = st.lists(st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "x"]),
                                        "content": BLOCKS | VALUES | st.text()})
                 | st.dictionaries(st.text(max_size=4), VALUES, max_size=2), max_size=3)
OBJECTS = st.lists(st.dictionaries(st.sampled_from(["type", "name", "parameters", "input_schema", "x"]), VALUES),
                   max_size=2)
INNER = st.dictionaries(st.sampled_from(["type", "format", "effort", "name", "budget_tokens", "verbosity"]),
                        VALUES | st.sampled_from(["json_schema", "function", "tool", "enabled", "high"]), max_size=3)
TRANSLATED = st.lists(st.one_of(
    st.tuples(st.just("/v1/responses"), st.tuples(
        bodies(ResponsesRequest, {"input": ITEMS | VALUES | st.text()}),
        st.fixed_dictionaries({}, optional={"tools": OBJECTS, "text": INNER, "reasoning": INNER, "tool_choice": INNER}),
    ).map(lambda parts: parts[0] | parts[1] | {"max_output_tokens": 3})),
    st.tuples(st.sampled_from(["/v1/messages", "/v1/messages/count_tokens"]), st.tuples(
        bodies(MessagesRequest, {"messages": TURNS}),
        st.fixed_dictionaries({}, optional={"tools": OBJECTS, "thinking": INNER, "tool_choice": INNER,
                                            "output_config": INNER | VALUES, "system": BLOCKS | VALUES}),
    ).map(lambda parts: parts[0] | parts[1] | {"max_tokens": 3})),
    st.tuples(st.just("/generate"), st.tuples(
        bodies(GenerateRequest, {}), st.fixed_dictionaries({}, optional={
            "text": PROMPTS, "input_ids": PROMPTS, "sampling_params": st.dictionaries(
                st.sampled_from(["max_new_tokens", "stop", "stop_token_ids", "n", "top_k", "logprobs", "prompt",
                                 "model", "stream", "regex"]) | st.sampled_from(sorted(CompletionRequest.model_fields)),
                VALUES), **KEYED})).map(lambda parts: parts[0] | parts[1])),
    st.tuples(st.just("/v1/embeddings"), bodies(EmbeddingRequest, {"input": PROMPTS})),
    st.tuples(st.just("/v1/score"), bodies(ScoreRequest, {"text_1": PROMPTS, "text_2": PROMPTS})),
    st.tuples(st.just("/v1/rerank"), bodies(RerankRequest, {"query": PROMPTS, "documents": PROMPTS})),
    st.tuples(st.just("/start_profile"), st.dictionaries(st.just("num_steps"), VALUES))), min_size=1, max_size=12)


@settings(SETTINGS, max_examples=40)
@given(TRANSLATED)
def test_case_15_09_nor_in_another_api(calls: list[tuple[str, dict]]):
    asyncio.run(_send_all(calls))


@SETTINGS
@given(CALLS)
def test_case_15_09_no_body_is_the_servers_fault(calls: list[tuple[str, dict]]):
    asyncio.run(_send_all(calls))


async def _send_all(calls: list[tuple[str, dict]]) -> None:
    async with make_api(CoreOptions(block=4)) as api:
        for path, body in calls:
            answer = await api.http.post(path, content=json.dumps(body).encode())
            assert answer.status_code == 200 or 400 <= answer.status_code < 500, (path, body, answer.text)
            if answer.status_code != 200:
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
                assert path.startswith("/v1/messages") == ("request_id" in answer.json())
        await api.alive()


@settings(SETTINGS, max_examples=15)
@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=24), st.integers(1, 9),
       st.integers(1, 60), st.lists(st.text(min_size=1, max_size=3), max_size=2))
@example(text="a\x85b\u2028c\u2029d", block=1, limit=60, stop=[])  # what some clients take for ends of lines
def test_case_14_01_any_partition_streams_the_same(text: str, block: int, limit: int, stop: list[str]):
    asyncio.run(_compare(text, block, limit, stop))


async def _compare(text: str, block: int, limit: int, stop: list[str]) -> None:
    body = {"max_tokens": limit, "stop": stop, "logprobs": True, "top_logprobs": 1, "return_token_ids": True}
    async with make_api(CoreOptions(block=1)) as one, make_api(CoreOptions(block=block)) as many:
        whole = (await one.chat(f"say:{text}", **body)).json()["choices"][0]
        again = (await many.chat(f"say:{text}", **body)).json()["choices"][0]
        chunks = [c["choices"][0] for c in events((await many.chat(f"say:{text}", **body, stream=True)).text)[:-1]]
    streamed = {
        "content": "".join(c["delta"].get("content", "") for c in chunks),
        "ids": [i for c in chunks for i in c.get("token_ids", [])],
        "logprobs": [e for c in chunks for e in (c["logprobs"] or {"content": []})["content"]],
        "finish": chunks[-1]["finish_reason"], "stop": chunks[-1].get("stop_reason")}
    for choice in (whole, again):
        assert streamed == {"content": choice["message"]["content"], "ids": choice["token_ids"],
                            "logprobs": choice["logprobs"]["content"], "finish": choice["finish_reason"],
                            "stop": choice["stop_reason"]}
