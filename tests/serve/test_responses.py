"""/v1/responses: OpenAI's own client, the typed events, the store, and refusals in this API's words."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from stretto.serve.response_events import ResponseBuilder
from stretto.serve.response_store import ResponseStore, Stored
from stretto.serve.schemas import ResponsesRequest
from stretto.serve.translate import as_chunks
from tests.serve.conftest import Api, make_api, make_served
from tests.serve.fakes import CallingTokenizer, CoreOptions


async def respond(api: Api, input: Any = "say:hello", **fields: Any) -> httpx.Response:
    return await api.http.post("/v1/responses", json={"input": input} | fields)


def typed(text: str | bytes) -> list[dict[str, Any]]:
    """The events of a typed stream; the name of each is its payload's type."""
    text = text if isinstance(text, str) else text.decode()
    found = []
    for block in filter(None, text.split("\n\n")):
        if block.startswith(":"):
            continue
        name, data = block.split("\n")
        payload = json.loads(data.removeprefix("data: "))
        assert name == f"event: {payload['type']}"
        found.append(payload)
    return found


async def test_openai_client():
    async with make_served(CoreOptions(block=3)) as served, \
            openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client:
        answer = await client.responses.create(model="fake/tiny", input="say:hello 🙂", instructions="be kind")
        assert answer.output_text == "hello 🙂" and answer.status == "completed" and answer.instructions == "be kind"
        assert answer.usage is not None and answer.usage.output_tokens == len("hello 🙂".encode()) + 1
        async with client.responses.stream(model="fake/tiny", input="say:hello 🙂") as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        assert final.output_text == "hello 🙂" and final.usage == answer.usage.model_copy(
            update={"input_tokens": final.usage.input_tokens, "total_tokens": final.usage.total_tokens,
                    "speculation": final.usage.speculation})
        assert kinds[:4] == ["response.created", "response.in_progress", "response.output_item.added",
                             "response.content_part.added"]
        assert kinds[-4:] == ["response.output_text.done", "response.content_part.done", "response.output_item.done",
                              "response.completed"]
        assert (await client.responses.retrieve(answer.id)).output_text == "hello 🙂"
        with pytest.raises(openai.NotFoundError):
            await client.responses.create(model="fake/tiny", input="x", previous_response_id="resp_0")


@pytest.mark.parametrize("block", [1, 4])
async def test_streamed_equals_whole(block: int):
    async with make_api(CoreOptions(block=block)) as api:
        whole = (await respond(api, "say:삼겹살 🙂", include=["message.output_text.logprobs"], top_logprobs=2)).json()
        events = typed((await respond(api, "say:삼겹살 🙂", stream=True, top_logprobs=2)).text)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    final = events[-1]["response"]
    part, same = final["output"][0]["content"][0], whole["output"][0]["content"][0]
    assert part == same and part["text"] == "삼겹살 🙂" and part["logprobs"]
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(event["delta"] for event in deltas) == part["text"]
    assert [entry for event in deltas for entry in event["logprobs"]] == part["logprobs"]
    assert final["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


async def test_conversations_go_on_from_a_stored_response(api: Api):
    first = (await respond(api, "say:one", instructions="only now")).json()
    second = (await respond(api, "say:two", previous_response_id=first["id"])).json()
    chat = await api.http.post("/tokenize", json={"messages": [
        {"role": "user", "content": "say:one"}, {"role": "assistant", "content": "one"},
        {"role": "user", "content": "say:two"}]})
    assert second["usage"]["input_tokens"] == chat.json()["count"]  # the first one's instructions are not repeated
    assert second["previous_response_id"] == first["id"] and second["output"][0]["content"][0]["text"] == "two"
    items = (await api.http.get(f"/v1/responses/{second['id']}/input_items")).json()["data"]
    assert [item["content"][0]["text"] for item in items] == ["say:two"]
    cancelled = await api.http.post(f"/v1/responses/{first['id']}/cancel")
    assert cancelled.status_code == 400 and "complete" in cancelled.json()["error"]["message"]
    assert (await api.http.delete(f"/v1/responses/{first['id']}")).json()["deleted"]
    for answer in (await api.http.get(f"/v1/responses/{first['id']}"),
                   await respond(api, "x", previous_response_id=first["id"])):
        assert answer.status_code == 404
    unkept = (await respond(api, store=False)).json()
    assert (await api.http.get(f"/v1/responses/{unkept['id']}")).status_code == 404


async def test_a_streamed_response_is_stored_before_its_client_knows_it(api: Api):
    events = typed((await respond(api, "say:one", stream=True)).text)
    id = events[-1]["response"]["id"]
    assert (await respond(api, "say:two", previous_response_id=id)).status_code == 200


async def test_length_and_extensions(api: Api):
    short = (await respond(api, "words", max_output_tokens=3, seed=1, top_k=4)).json()
    assert short["status"] == "incomplete" and short["incomplete_details"] == {"reason": "max_output_tokens"}
    assert short["output"][0]["status"] == "incomplete" and short["usage"]["output_tokens"] == 3
    stopped = (await respond(api, "say:a-b", stop=["-"])).json()
    assert stopped["output"][0]["content"][0]["text"] == "a"
    odd = await respond(api, nonsense=1)
    assert odd.status_code == 200 and odd.headers["x-stretto-ignored"] == "nonsense"


@pytest.mark.parametrize("store", [True, False])
async def test_one_can_go_on_from_a_call_that_was_cut(store: bool):
    call = '<tool_call>{"name": "f", "arguments": {"x": 12345678}}</tool_call>'
    tools = [{"type": "function", "name": "f", "parameters": {}}]
    async with make_api(tokenizer=CallingTokenizer()) as api:
        first = (await respond(api, f"say:{call}", tools=tools, max_output_tokens=len(call) - 20)).json()
        (cut,) = first["output"]
        assert (cut["type"], cut["status"], first["status"]) == ("function_call", "incomplete", "incomplete")
        with pytest.raises(ValueError):
            json.loads(cut["arguments"])
        result = {"type": "function_call_output", "call_id": cut["call_id"], "output": "say:more"}
        history = {"previous_response_id": first["id"], "input": [result]} if store else {
            "store": False, "input": [{"role": "user", "content": "hello"}, cut, result]}
        second = await respond(api, **history, tools=tools, max_output_tokens=20)
        assert second.status_code == 200, second.text
        wrong = await respond(api, [{"role": "user", "content": "hello"}, {**cut, "status": "completed"}], tools=tools)
        assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "input[1].arguments"


@pytest.mark.parametrize("fields, param", [
    ({"input": []}, "input"), ({"input": 5}, "input"), ({"background": True}, "background"),
    ({"truncation": "auto"}, "truncation"), ({"conversation": "c"}, "conversation"), ({"include": ["x"]}, "include"),
    ({"input": [{"type": "item_reference", "id": "m"}]}, "input[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0].type"),
    ({"input": [{"type": "function_call", "name": "f"}]}, "input[0]"),
    ({"input": [{"role": "nobody", "content": "x"}]}, "input[0].role"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"), ({"temperature": -1}, "temperature"),
    ({"max_output_tokens": 100_000}, "max_output_tokens")])
async def test_refusals_name_this_apis_fields(api: Api, fields: dict, param: str):
    for stream in (False, True):
        answer = await respond(api, **{"input": "x", "stream": stream, **fields})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param


async def test_a_failure_before_the_first_word_is_an_http_error(api: Api):
    answer = await respond(api, "fault:boom", stream=True)
    assert answer.status_code == 503 and "boom" in answer.json()["error"]["message"]


async def test_a_stream_that_breaks_says_failed():
    async with make_served(CoreOptions(step_seconds=0.01, max_model_len=100_000)) as api:
        parts = []
        async with api.http.stream("POST", "/v1/responses", json={"input": "x", "stream": True}) as stream:
            async for part in stream.aiter_bytes():
                if not parts:
                    await api.http.post("/abort_request", json={"abort_all": True})
                parts.append(part)
        last = typed(b"".join(parts))[-1]
    assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == "request_aborted"


def builder() -> ResponseBuilder:
    return ResponseBuilder("resp_1", ResponsesRequest(input="x"), "m")


def test_reasoning_and_calls_become_items_of_their_own():
    """What chat says of thoughts and tools, in pieces and at once: the same items, each closed before the next."""
    message = {"role": "assistant", "reasoning_content": "hm", "content": "so", "tool_calls": [
        {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}},
        {"id": "b", "type": "function", "function": {"name": "g", "arguments": "{}"}}]}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2, "speculation": {},
             "prompt_tokens_details": {"cached_tokens": 0}}
    whole = builder()
    for chunk in as_chunks({"choices": [{"message": message, "finish_reason": "tool_calls"}], "usage": usage}):
        whole.take(chunk)
    whole.finish()
    pieces: list[dict[str, Any]] = [
        {"reasoning_content": "h"}, {"reasoning_content": "m"}, {"content": "s"}, {"content": "o"},
        {"tool_calls": [{"index": 0, "id": "a", "function": {"name": "f", "arguments": '{"x'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '":1}'}}]},
        {"tool_calls": [{"index": 1, "id": "b", "function": {"name": "g", "arguments": "{}"}}]}]
    streamed, events = builder(), b""
    for piece in pieces:
        events += streamed.take({"choices": [{"delta": piece}]})
    events += streamed.finish()

    def content(made: ResponseBuilder) -> list[dict[str, Any]]:
        return [{k: v for k, v in item.items() if k != "id"} for item in made.response["output"]]

    assert content(whole) == content(streamed)
    assert [item["type"] for item in content(whole)] == ["reasoning", "message", "function_call", "function_call"]
    kinds = [event["type"] for event in typed(events)]
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 4
    assert whole.message() == {"role": "assistant", "content": "so", "tool_calls": message["tool_calls"]}


def test_the_store_is_bounded_in_number_and_size():
    def one(size: int) -> Stored:
        return Stored({"x": "y" * size}, [], [])

    store = ResponseStore(2, 1000)
    for id in ("a", "b", "c"):
        store.put(id, one(10))
    assert store.get("a") is None and store.get("b") is not None
    store.put("d", one(10))  # b was used last, so c goes
    assert store.ids() == ["b", "d"]
    store.put("e", one(900))
    assert store.ids() == ["d", "e"]
    store.put("f", one(500))
    assert store.ids() == ["f"]
    store.put("g", one(2000))  # larger than the whole store
    assert store.ids() == []


FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}


async def test_tools_of_openais_servers_beside_ones_own_are_left_out_by_name():
    """Codex and others always send them."""
    mixed = [{"type": "web_search"}, FUNCTION, {"type": "namespace", "name": "mcp", "tools": []}]
    tokenizer = CallingTokenizer()
    async with make_api(tokenizer=tokenizer) as api, make_api(tokenizer=tokenizer, strict_requests=True) as strict:
        answer = await respond(api, "say:x", tools=mixed, client_metadata={"a": "b"})
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-stretto-ignored"] == "client_metadata,tools[0],tools[2]"
        for one, fields in ((api, {"tool_choice": "required"}), (api, {"tools": mixed[:1]}), (strict, {})):
            refused = await respond(one, "say:x", **{"tools": mixed, **fields})
            assert refused.status_code == 400 and refused.json()["error"]["param"].startswith("tools[0]"), refused.text
