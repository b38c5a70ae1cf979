"""The OpenAPI document is whole, and answers are what it says."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import jsonschema
import pytest

from stretto.protocol import SessionInfo
from stretto.serve.openapi import ANSWERS
from stretto.serve.sessions import shown
from tests.serve.conftest import Api, make_api
from tests.serve.fakes import CoreOptions

CHAT = {"messages": [{"role": "user", "content": "say:hello"}], "max_tokens": 8}
SCORED = {"logprobs": True, "top_logprobs": 2, "return_token_ids": True, "prompt_logprobs": 1, "n": 2}
CALLS: list[tuple[str, dict[str, Any] | None]] = [
    ("POST /v1/chat/completions", CHAT), ("POST /v1/chat/completions", CHAT | SCORED),
    ("POST /v1/completions", {"prompt": ["a", "b"], "logprobs": 2, "echo": True, "max_tokens": 3}),
    ("POST /v1/responses", {"input": "say:hi"}), ("GET /v1/responses/{id}", None),
    ("GET /v1/responses/{id}/input_items", None), ("DELETE /v1/responses/{id}", None),
    ("POST /v1/messages", CHAT), ("POST /v1/messages/count_tokens", {"messages": CHAT["messages"]}),
    ("POST /generate", {"text": "a"}), ("POST /generate", {"text": ["a", "b"], "return_logprob": True}),
    ("POST /v1/embeddings", {"input": ["a", "b"]}),
    ("POST /v1/embeddings", {"input": "a", "encoding_format": "base64"}),
    ("POST /encode", {"text": "a"}), ("POST /encode", {"input_ids": [[97], [98]]}),
    ("POST /v1/score", {"text_1": "a", "text_2": "b"}), ("POST /score", {"text_1": "a", "text_2": "b"}),
    ("POST /v1/rerank", {"query": "a", "documents": ["b"]}),
    ("POST /rerank", {"query": "a", "documents": ["b"], "return_documents": False}),
    *((f"GET {path}", None) for path in (
        "/ping", "/readyz", "/health", "/livez", "/startupz", "/health_generate", "/v1/models", "/v1/models/fake/tiny",
        "/version", "/server_info", "/get_server_info", "/model_info", "/get_model_info", "/tokenizer_info",
        "/v1/loads", "/get_load", "/metrics")),
    ("POST /tokenize", {"prompt": "a", "return_token_strs": True}), ("POST /detokenize", {"tokens": [97]}),
    ("POST /apply-template", {"messages": CHAT["messages"]}), ("POST /abort_request", {"rid": "none"}),
    ("POST /flush_cache", None), ("POST /start_profile", {"num_steps": 3}), ("POST /stop_profile", None)]
STREAMS = [("POST /v1/chat/completions", CHAT | {"stream_options": {"include_usage": True}}),
           ("POST /v1/completions", {"prompt": "say:a"}), ("POST /v1/responses", {"input": "say:hi"}),
           ("POST /v1/messages", CHAT), ("POST /generate", {"text": "say:a"})]
ELSEWHERE = {"POST /v1/responses/{id}/cancel", "DELETE /v1/requests/{id}", "GET /v1/models/{model}",
             *(name for name in ANSWERS if "lora" in name)}


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    async def fetched() -> dict[str, Any]:
        async with make_api(CoreOptions()) as api:
            return (await api.http.get("/openapi.json")).json()
    return asyncio.run(fetched())


def check(document: dict[str, Any], schema: dict[str, Any], value: Any) -> None:
    jsonschema.validate(value, schema | {"components": document["components"]}, jsonschema.Draft202012Validator)


def schema_of(document: dict[str, Any], name: str, status: str = "200", media: str = "application/json") -> Any:
    method, _, path = name.partition(" ")
    return document["paths"][path][method.lower()]["responses"][status]["content"][media]["schema"]


def route_of(name: str) -> str:
    return "GET /v1/models/{model}" if name.endswith("fake/tiny") else name


def test_every_route_is_described_whole(document: dict[str, Any]):
    described = {f"{method.upper()} {path}": operation for path, operations in document["paths"].items()
                 for method, operation in operations.items()}
    assert set(described) == set(ANSWERS)
    for name, operation in described.items():
        answer = operation["responses"]
        assert set(answer) == {"200", "4XX", "5XX"}, name
        assert all("$ref" in answer[status]["content"]["application/json"]["schema"] for status in ("4XX", "5XX"))
        if name != "POST /close_session":
            assert all(content["schema"] for content in answer["200"]["content"].values()), name
    text = json.dumps(document)
    for reference in set(re.findall(r'"#/components/schemas/([^"]+)"', text)):
        assert reference in document["components"]["schemas"], reference
    ids = [operation["operationId"] for operation in described.values()]
    assert len(set(ids)) == len(ids)
    assert described["GET /livez"].get("security") is None and {} in described["POST /tokenize"]["security"]
    assert {} not in described["POST /flush_cache"]["security"]


async def test_answers_are_what_the_document_says(document: dict[str, Any]):
    async with make_api(CoreOptions()) as api:
        seen, made = set(), ""
        for name, body in CALLS:
            method, _, path = name.partition(" ")
            answer = await api.http.request(method, path.replace("{id}", made), json=body)
            assert answer.status_code == 200, (name, answer.text)
            seen.add(route_of(name))
            if answer.headers["content-type"].startswith("application/json"):
                check(document, schema_of(document, route_of(name)), answer.json())
            if name == "POST /v1/responses":
                made = answer.json()["id"]
        sessions = {name for name in ANSWERS if "session" in name}  # of an engine that has some: test_sessions.py
        assert set(ANSWERS) - seen <= ELSEWHERE | sessions


@pytest.mark.parametrize("ttl", [60.0, float("inf")])
def test_sessions_are_what_the_document_says(document: dict[str, Any], ttl: float):
    """Routes of sessions: test_sessions.py. All show a session in this shape."""
    info = SessionInfo(id="s", state="idle", tokens=3, cached_tokens=2, turns=1, waiting=0, last_turn="finished",
                       idle_seconds=1.5, ttl=ttl, capacity=None)
    check(document, schema_of(document, "GET /v1/sessions/{id}"), shown(info))
    check(document, schema_of(document, "GET /v1/sessions"), {"object": "list", "data": [shown(info)]})


@pytest.mark.parametrize(("name", "body"), STREAMS, ids=lambda value: value if isinstance(value, str) else "")
async def test_events_are_what_the_document_says(api: Api, document: dict[str, Any], name: str, body: dict[str, Any]):
    answer = await api.http.post(name.split()[1], json=body | {"stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    events = [json.loads(data) for data in found if data != "[DONE]"]
    assert events
    for event in events:
        check(document, schema_of(document, name, media="text/event-stream"), event)


@pytest.mark.parametrize("name", ["POST /v1/chat/completions", "POST /v1/messages", "POST /tokenize"])
async def test_errors_are_what_the_document_says(api: Api, document: dict[str, Any], name: str):
    answer = await api.http.post(name.split()[1], json={"messages": 3})
    assert answer.status_code == 400
    check(document, schema_of(document, name, "4XX"), answer.json())


async def test_templates_are_applied(api: Api):
    applied = await api.http.post("/apply-template", json={"messages": [{"role": "user", "content": "hé"}]})
    assert applied.json() == {"prompt": "<|im_start|>user\nhé<|im_end|>\n<|im_start|>assistant\n"}
    for body in ({"prompt": "x"}, {}, {"messages": CHAT["messages"], "prompt": "x"}):
        refused = await api.http.post("/apply-template", json=body)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "messages"
