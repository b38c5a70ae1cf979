"""What chat learns, the Responses and the Messages API can too: reasoning, tools, tool results, sessions."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.serve.conftest import Api, make_api
from tests.serve.fakes import CoreOptions
from tests.serve.test_responses import typed
from tests.serve.test_tools import CALL, PARAMETERS, ToolTokenizer

SAID = f"<think>Two of them.\n</think>\n\nWell:\n{CALL}\n{CALL.replace('12', '7')}"
RESPONSE_TOOLS = [{"type": "function", "name": "f", "parameters": PARAMETERS}]
MESSAGE_TOOLS = [{"name": "f", "input_schema": PARAMETERS}]


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in items]


@pytest.mark.parametrize("block", [1, 3, 200])
async def test_reasoning_and_calls(block: int):
    async with make_api(CoreOptions(block=block), ToolTokenizer()) as api:
        asked: dict[str, Any] = {"input": f"say:{SAID}", "tools": RESPONSE_TOOLS, "max_output_tokens": 200}
        whole = (await api.http.post("/v1/responses", json=asked)).json()
        events = typed((await api.http.post("/v1/responses", json=asked | {"stream": True})).text)
        asked = {"messages": [{"role": "user", "content": f"say:{SAID}"}], "tools": MESSAGE_TOOLS, "max_tokens": 200}
        message = (await api.http.post("/v1/messages", json=asked)).json()
        streamed = typed((await api.http.post("/v1/messages", json=asked | {"stream": True})).text)
    assert without_ids(whole["output"]) == without_ids(events[-1]["response"]["output"])
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert whole["output"][0]["content"][0]["text"] == "Two of them." and whole["status"] == "completed"
    assert [json.loads(item["arguments"]) for item in whole["output"][2:]] == [{"n": 12}, {"n": 7}]
    assert without_ids(message["content"]) == [
        {"type": "thinking", "thinking": "Two of them.", "signature": ""}, {"type": "text", "text": "Well:"},
        {"type": "tool_use", "name": "f", "input": {"n": 12}}, {"type": "tool_use", "name": "f", "input": {"n": 7}}]
    assert message["stop_reason"] == "tool_use" == streamed[-2]["delta"]["stop_reason"]
    blocks = [event["content_block"]["type"] for event in streamed if event["type"] == "content_block_start"]
    assert blocks == ["thinking", "text", "tool_use", "tool_use"]
    pieces = ["".join(event["delta"].get("partial_json", "") for event in streamed
                      if event["type"] == "content_block_delta" and event["index"] == i) for i in (2, 3)]
    assert [json.loads(piece) for piece in pieces] == [{"n": 12}, {"n": 7}]


async def test_results_of_tools_are_the_same_conversation_in_every_api():
    """Counted by its tokens: the call and its result, as chat, as items, as blocks, and through the store."""
    async with make_api(CoreOptions(block=4), ToolTokenizer()) as api:
        first = (await api.http.post("/v1/responses", json={
            "input": f"say:{CALL}", "tools": RESPONSE_TOOLS, "max_output_tokens": 200})).json()
        (call,) = first["output"]
        id, arguments = call["call_id"], call["arguments"]
        result = {"type": "function_call_output", "call_id": id, "output": "say:done"}
        stored = (await api.http.post("/v1/responses", json={
            "input": [result], "previous_response_id": first["id"], "tools": RESPONSE_TOOLS})).json()
        stateless = (await api.http.post("/v1/responses", json={"tools": RESPONSE_TOOLS, "input": [
            {"role": "user", "content": f"say:{CALL}"}, call, result]})).json()
        blocks = (await api.http.post("/v1/messages", json={"max_tokens": 20, "tools": MESSAGE_TOOLS, "messages": [
            {"role": "user", "content": f"say:{CALL}"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": id, "name": "f",
                                               "input": json.loads(arguments)}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": id, "content": [
                {"type": "text", "text": "say:done"}]}]}]})).json()
    assert stored["output"][0]["content"][0]["text"] == "done" == stateless["output"][0]["content"][0]["text"]
    assert blocks["content"][0]["text"] == "done"
    used = blocks["usage"]["input_tokens"] + blocks["usage"]["cache_read_input_tokens"]
    assert stored["usage"]["input_tokens"] == stateless["usage"]["input_tokens"] == used


async def test_a_session_id_is_checked_here_too(api: Api):
    for path, body in (("/v1/responses", {"input": "x"}),
                       ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3})):
        answer = await api.http.post(path, json=body | {"session_id": "bad\nid"})
        assert answer.status_code == 400 and "session_id" in answer.json()["error"]["message"], answer.text


ODD: list[Any] = [
    [], {}, [1], {"a": 1}, "x", 5, True, [[]], {"type": []}, {"type": {}}, {"type": "json_schema"},
    {"type": "function"},
    {"type": "function", "name": []}, {"type": "tool", "name": 5}, {"format": {"type": "json_schema", "schema": 5}},
    {"format": 5}, {"format": {"type": []}}, {"effort": []}, {"type": "enabled", "budget_tokens": "x"},
    [{"type": "function", "name": 5}], [{"type": "function", "name": "f", "parameters": 5}], [{"name": "f"}],
    [{"name": "f", "input_schema": []}], [{"type": []}], [{"type": "text", "text": 5}], [{"type": "tool_use"}],
    [{"type": "tool_use", "id": "a", "name": "f", "input": 5}], [{"type": "message", "role": [], "content": {}}],
    [{"type": "tool_result", "tool_use_id": "a", "content": [5]}], [{"id": 5, "role": "user", "content": "x"}],
    [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "no JSON"}],
    [{"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": 5}]}]]
OWN: dict[str, tuple[dict[str, Any], list[str]]] = {
    "/v1/responses": ({"input": "x", "max_output_tokens": 1}, [
        "input", "tools", "tool_choice", "text", "reasoning", "include", "metadata", "stop", "session",
        "stream_options",
        "previous_response_id", "logit_bias", "instructions", "top_logprobs"]),
    "/v1/messages": ({"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}, [
        "messages", "system", "tools", "tool_choice", "thinking", "output_config", "output_format", "stop_sequences",
        "metadata", "session"]),
    "/generate": ({"text": "x", "sampling_params": {"max_new_tokens": 1}}, [
        "text", "input_ids", "sampling_params", "rid", "session_params", "prompt", "max_tokens", "logprob_start_len"])}


@pytest.mark.parametrize("path", OWN)
async def test_case_15_09_odd_values_of_nested_fields_are_the_clients_fault(path: str):
    base, names = OWN[path]
    async with make_api(CoreOptions(block=4), ToolTokenizer()) as api:
        bodies = [base | {name: odd} for name in names for odd in ODD]
        if path == "/v1/messages":
            bodies += [base | {"messages": [{"role": role, "content": odd}, {"role": "user", "content": "x"}]}
                       for role in ("user", "assistant") for odd in ODD]
        elif path == "/v1/responses":
            bodies += [base | {"input": [{"role": "assistant", "content": odd}]} for odd in ODD]
        else:
            bodies += [base | {"sampling_params": {name: odd}} for odd in ODD for name in (
                "max_new_tokens", "stop", "stop_token_ids", "n", "logit_bias", "regex", "json_schema", "stream")]
        for body in bodies:
            answer = await api.http.post(path, json=body)
            assert answer.status_code == 200 or 400 <= answer.status_code < 500, (body, answer.text)
            assert "internal_error" not in answer.text, (body, answer.text)
        await api.alive()


@pytest.mark.parametrize("path, fields, param", [
    *(("/v1/messages", {name: value}, name) for name, value in (
        ("response_format", {"type": "json_object"}), ("stop", ["x"]), ("n", 2), ("logprobs", True),
        ("top_logprobs", 2), ("prompt_logprobs", 0), ("return_token_ids", True), ("return_tokens_as_token_ids", True),
        ("max_completion_tokens", 2))),
    *(("/v1/responses", {name: value}, name) for name, value in (
        ("response_format", {"type": "json_object"}), ("n", 2), ("prompt_logprobs", 0), ("return_token_ids", True),
        ("return_tokens_as_token_ids", True), ("max_completion_tokens", 2), ("reasoning_effort", "low"),
        ("messages", [{"role": "user", "content": "x"}])))], ids=str)
async def test_what_an_answer_could_not_show_is_refused_by_its_name(path: str, fields: dict[str, Any], param: str):
    asked = {"input": "x"} if path == "/v1/responses" else {
        "messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
    async with make_api() as api:
        answer = await api.http.post(path, json=asked | fields)
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["param"] == param and param in error["message"], answer.text
        assert error["code"] == "unsupported_parameter"
        nothing = {"n": 1, "logprobs": False, "response_format": None, "return_token_ids": False, "stop": []}
        assert (await api.http.post(path, json=asked | nothing)).status_code == 200


async def test_two_limits_of_a_response_are_told_in_its_words():
    async with make_api() as api:
        answer = await api.http.post("/v1/responses", json={"input": "x", "max_output_tokens": 2, "max_tokens": 3})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "max_tokens"
    assert error["message"] == "max_tokens is 3 and max_output_tokens is 2; give one of them"


@pytest.mark.parametrize("session", [{"session_id": "s", "session": {"mode": "append"}},
                                     {"session_params": {"id": "s"}}], ids=str)
async def test_a_stored_response_and_an_appended_turn_exclude_each_other(session: dict[str, Any]):
    """Both would put the conversation in front of the input."""
    async with make_api() as api:
        first = (await api.http.post("/v1/responses", json={"input": "x", "max_output_tokens": 2})).json()
        answer = await api.http.post("/v1/responses", json={
            "input": "y", "max_output_tokens": 2, "previous_response_id": first["id"]} | session)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "previous_response_id"
    assert next(iter(session.keys() & {"session", "session_params"})) in error["message"]


async def test_a_block_that_is_no_text_is_named_by_its_place():
    image = {"type": "image", "source": {}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "x"}, image]}]
    async with make_api() as api:
        answer = await api.http.post("/v1/messages", json={"messages": messages, "max_tokens": 2})
    assert answer.json()["error"]["param"] == "messages[0].content[1].type"
