"""/v1/messages: Anthropic's own client, the events, counting, and errors in that API's shape."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from stretto.serve.messages import MessageBuilder
from stretto.serve.translate import as_chunks
from tests.serve.conftest import Api, make_api, make_served
from tests.serve.fakes import ByteTokenizer, CoreOptions
from tests.serve.test_responses import typed


async def send(api: Api, content: Any = "say:hello", **fields: Any) -> httpx.Response:
    return await api.http.post("/v1/messages", json={
        "messages": [{"role": "user", "content": content}], "max_tokens": 100} | fields)


async def test_anthropic_client():
    anthropic = pytest.importorskip("anthropic")
    async with make_served(CoreOptions(block=3), api_keys=("secret",)) as served:
        async with anthropic.AsyncAnthropic(base_url=served.url, api_key="secret", max_retries=0) as client:
            asked: dict[str, Any] = {"model": "fake/tiny", "max_tokens": 64, "system": "be kind",
                                     "messages": [{"role": "user", "content": "say:hello 🙂"}]}
            answer = await client.messages.create(**asked)
            assert answer.content[0].text == "hello 🙂" and answer.stop_reason == "end_turn"
            async with client.messages.stream(**asked) as stream:
                text = "".join([piece async for piece in stream.text_stream])
                final = await stream.get_final_message()
            assert text == "hello 🙂" == final.content[0].text and final.stop_reason == "end_turn"
            used = final.usage
            assert used.input_tokens + used.cache_read_input_tokens == answer.usage.input_tokens
            assert used.output_tokens == answer.usage.output_tokens == len("hello 🙂".encode()) + 1
            del asked["max_tokens"]
            assert (await client.messages.count_tokens(**asked)).input_tokens == answer.usage.input_tokens
            with pytest.raises(anthropic.NotFoundError):
                await client.messages.create(**asked | {"model": "claude", "max_tokens": 1})
        async with anthropic.AsyncAnthropic(base_url=served.url, api_key="wrong", max_retries=0) as client:
            with pytest.raises(anthropic.AuthenticationError) as refused:
                await client.messages.create(**asked, max_tokens=1)
            assert refused.value.body["error"]["type"] == "authentication_error"


@pytest.mark.parametrize("block", [1, 4])
async def test_streamed_equals_whole(block: int):
    async with make_api(CoreOptions(block=block)) as api:
        whole = (await send(api, "say:삼겹살 🙂 X tail", stop_sequences=["X"])).json()
        events = typed((await send(api, "say:삼겹살 🙂 X tail", stop_sequences=["X"], stream=True)).text)
        chat = (await api.chat("say:삼겹살 🙂 X tail", stop=["X"], max_tokens=100)).json()
    assert whole["content"] == [{"type": "text", "text": "삼겹살 🙂 "}]
    assert whole["content"][0]["text"] == chat["choices"][0]["message"]["content"]
    deltas = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(deltas) == whole["content"][0]["text"]
    assert [e["type"] for e in events if e["type"] != "content_block_delta"] == [
        "message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop"]
    assert events[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "X"}
    assert whole["stop_sequence"] == "X" and events[0]["message"]["content"] == []


async def test_system_blocks_prefill_and_extensions(api: Api):
    one = (await send(api, system="a\nb")).json()["usage"]
    two = (await send(api, system=[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])).json()["usage"]
    assert two["cache_read_input_tokens"] > 0  # the same tokens
    assert two["cache_read_input_tokens"] + two["input_tokens"] == one["input_tokens"]
    begun = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "say:goes on"}]
    answer = (await send(api, messages=begun, stop_token_ids=[ord("n")])).json()
    assert answer["content"][0]["text"] == "goes o"
    short = (await send(api, "words", max_tokens=2)).json()
    assert short["stop_reason"] == "max_tokens" and short["usage"]["output_tokens"] == 2
    count = await api.http.post("/v1/messages/count_tokens", json={"messages": begun})
    assert count.json()["input_tokens"] == answer["usage"]["input_tokens"]


BILLING = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch={};"


async def test_claude_codes_billing_line_is_no_part_of_the_prompt(api: Api):
    """Its hash differs from call to call: with it no two prompts of a session would begin alike."""
    plain = (await send(api, system="You help.")).json()["usage"]
    for n, system in enumerate((
            [{"type": "text", "text": BILLING.format("a")}, {"type": "text", "text": "You help."}],
            [{"type": "text", "text": BILLING.format("b")}, {"type": "text", "text": "You help."}],
            BILLING.format("c") + "\nYou help.")):
        usage = (await send(api, system=system)).json()["usage"]
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == plain["input_tokens"], n
        assert usage["cache_read_input_tokens"] > 0
    quoted = "Say x-anthropic-billing-header: no."
    count = (await api.http.post("/v1/messages/count_tokens", json={
        "system": quoted, "messages": [{"role": "user", "content": "x"}]})).json()["input_tokens"]
    without = (await api.http.post("/v1/messages/count_tokens", json={
        "messages": [{"role": "user", "content": "x"}]})).json()["input_tokens"]
    assert count > without + len(quoted), "elsewhere it is text as any other"


async def test_what_claude_code_always_asks_of_thinking():
    keep = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    async with make_api() as api, make_api(strict_requests=True) as strict:
        answer = await send(api, thinking={"type": "enabled", "budget_tokens": 50}, context_management=keep)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-stretto-ignored"] == "thinking.budget_tokens,context_management"
        assert "x-stretto-ignored" not in (await send(api, thinking={"type": "adaptive"})).headers
        for one, fields, param in (
                (strict, {"thinking": {"type": "enabled", "budget_tokens": 50}}, "thinking.budget_tokens"),
                (api, {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
                (api, {"context_management": {"edits": 3}}, "context_management"),
                (api, {"context_management": "all"}, "context_management")):
            refused = await send(one, **fields)
            assert refused.status_code == 400 and refused.json()["error"]["param"] == param, refused.text


class OnlyFirst(ByteTokenizer):
    """Its template wants system messages at the beginning."""

    def apply_chat_template(self, messages, tools=None, add_generation_prompt=True, **kwargs):
        if any(message["role"] == "system" for message in messages[1:]):
            raise ValueError("System message must be at the beginning.")
        return super().apply_chat_template(messages, tools, add_generation_prompt, **kwargs)


async def test_system_messages_within_a_conversation():
    said = [{"role": "user", "content": "x"}, {"role": "system", "content": "Be kind."}]
    async with make_api() as api, make_api(tokenizer=OnlyFirst()) as strict:
        for one, same in ((api, said), (strict, [said[0], {
                "role": "user", "content": "<system-reminder>\nBe kind.\n</system-reminder>"}])):
            counts = [(await one.http.post("/v1/messages/count_tokens", json={"system": "s", "messages": m})).json()
                      for m in (said, same)]
            assert counts[0] == counts[1] and "input_tokens" in counts[0], counts
        refused = await strict.http.post("/v1/chat/completions", json={"messages": said})
        assert refused.status_code == 400 and "at the beginning" in refused.json()["error"]["message"]


@pytest.mark.parametrize("fields, words", [
    ({"max_tokens": None}, "max_tokens"), ({"messages": []}, "messages"), ({"max_tokens": 10_000}, "max_tokens"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"), ({"system": 3}, "system"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "text only"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0]"), ({"mcp_servers": [{}]}, "mcp_servers"),
    ({"stop_sequences": [""]}, "stop string"), ({"tool_choice": {"type": "some"}}, "tool_choice")])
async def test_errors_have_that_apis_shape(api: Api, fields: dict, words: str):
    for stream in (False, True):
        answer = await send(api, **{"stream": stream, **fields})
        body = answer.json()
        assert answer.status_code == 400 and body["type"] == "error", body
        assert body["error"]["type"] == "invalid_request_error" and words in body["error"]["message"]
        assert body["request_id"] == answer.headers["x-request-id"]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize("fields, param", [
    *(({"output_config": value}, "output_config") for value in (3, "x", [], [1], True, {"format": 3})),
    *(({"output_format": value}, "output_format") for value in (3, "x", [1], True)),
    *(({"tools": [{"name": "f"}], "tool_choice": {"type": value}}, "tool_choice.type")
      for value in ([], ["auto"], {}, {"a": []}, 3, None, True)),
    *(({"tools": [{"name": "f"}], "tool_choice": value}, "tool_choice") for value in (3, "auto", [[]])),
    *(({"tools": [{"type": value}]}, "tools[0].type") for value in ([], {}, 3)),
    *(({"thinking": value}, "thinking") for value in (3, "x", [1])),
    *(({"messages": [{"role": value, "content": "x"}]}, "messages[0].role") for value in ([], {}, 3, None)),
], ids=str)
async def test_case_15_09_odd_types_of_inner_fields_are_named(api: Api, path: str, fields: dict, param: str):
    answer = await api.http.post(path, json={"messages": [{"role": "user", "content": "x"}], "max_tokens": 2} | fields)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


async def test_a_stream_that_breaks_ends_with_an_error_event():
    async with make_served(CoreOptions(step_seconds=0.01, max_model_len=100_000)) as api:
        parts: list[bytes] = []
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9000, "stream": True}
        async with api.http.stream("POST", "/v1/messages", json=body) as stream:
            async for part in stream.aiter_bytes():
                if not parts:
                    await api.http.post("/abort_request", json={"abort_all": True})
                parts.append(part)
    events = typed(b"".join(parts))
    assert events[-1]["type"] == "error" and "aborted" in events[-1]["error"]["message"]
    assert not any(event["type"] == "message_stop" for event in events)


def test_thoughts_and_calls_become_blocks():
    message = {"role": "assistant", "reasoning_content": "hm", "content": "so", "tool_calls": [
        {"id": "a", "function": {"name": "f", "arguments": '{"x":1}'}}, {"id": "b", "function": {"name": "g",
                                                                                                "arguments": "{}"}}]}
    usage = {"prompt_tokens": 5, "completion_tokens": 1, "speculation": {},
             "prompt_tokens_details": {"cached_tokens": 2}}
    whole, streamed = MessageBuilder("m", 5), MessageBuilder("m", 5)
    for chunk in as_chunks({"choices": [{"message": message, "finish_reason": "tool_calls"}], "usage": usage}):
        whole.take(chunk)
    whole.finish()
    events = b""
    for delta in ({"reasoning_content": "h"}, {"reasoning_content": "m"}, {"content": "s"}, {"content": "o"},
                  {"tool_calls": [{"index": 0, "id": "a", "function": {"name": "f", "arguments": ""}}]},
                  {"tool_calls": [{"index": 0, "function": {"arguments": '{"x":1}'}}]},
                  {"tool_calls": [{"index": 1, "id": "b", "function": {"name": "g", "arguments": "{}"}}]}):
        events += streamed.take({"choices": [{"delta": delta, "finish_reason": None}]})
    events += streamed.take({"choices": [{"delta": {}, "finish_reason": "tool_calls"}], "usage": usage})
    events += streamed.finish()
    assert whole.message["content"] == streamed.message["content"] == [
        {"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "so"},
        {"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}},
        {"type": "tool_use", "id": "b", "name": "g", "input": {}}]
    assert whole.message["stop_reason"] == "tool_use" and whole.message["usage"]["input_tokens"] == 3
    deltas = [event.get("delta", {}) for event in typed(events)]
    partial = [delta["partial_json"] for delta in deltas if delta.get("type") == "input_json_delta"]
    assert [json.loads(text) for text in partial] == [{"x": 1}, {}]
