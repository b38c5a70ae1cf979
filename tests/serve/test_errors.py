"""Whatever a client sends, it gets a 4xx in OpenAI's shape that names the field, and the server lives on."""

from __future__ import annotations

import asyncio
import gzip
import inspect
import itertools
import json
import resource
import threading
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from stretto.serve import schemas
from stretto.serve.bodies import LARGE, MAX_NESTING
from stretto.serve.prompts import RESERVED
from stretto.text.chat_template import ChatTemplateError, NoChatTemplate
from stretto.text.tokenizer import Tokenizer
from tests.serve.conftest import Api, make_api, make_served
from tests.serve.fakes import VOCAB, ByteTokenizer, CoreOptions

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]


def check_shape(answer, status: int, param: str | None = None, code: str | None = None) -> str:
    """The error is in OpenAI's shape and says this; returns its message."""
    assert answer.status_code == status, answer.text[:500]
    assert answer.headers["content-type"] == "application/json" and answer.headers["x-request-id"]
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"] and error["type"]
    assert (param, code) == (param and error["param"], code and error["code"]), error
    return error["message"]


# ---------------------------------------------------------------------------------------------------- broken bodies
@pytest.mark.parametrize("body", [
    b"", b"{", b"nonsense", b"[]", b"3", b'"text"', b"null", b'{"prompt": NaN}', b'{"prompt": "\xff"}',
    b'{"prompt": "\\ud800"}', b'{"prompt": 1e999}', b"[" * 100_000, b'{"a":' * 50_000, b'{"prompt": "x",}',
    b'{"prompt": "x", "metadata": ' + b"[" * 5000 + b"]" * 5000 + b"}", b"\x00", b"\xef\xbb\xbf{}",
], ids=lambda body: repr(body[:16]))
@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_case_15_09_broken_json(api: Api, path: str, body: bytes):
    answer = await api.http.post(path, content=body)
    check_shape(answer, 400)


@pytest.mark.parametrize("encoding", ["gzip", "br", "zstd", "identity, gzip", "x" * 1000])
async def test_compressed_bodies_are_refused_by_their_encoding(api: Api, encoding: str):
    for path in (CHAT, "/v1/embeddings", "/tokenize", "/start_profile"):
        answer = await api.http.post(path, content=gzip.compress(b"{}"), headers={"Content-Encoding": encoding})
        assert encoding[:100] in check_shape(answer, 415, None, "unsupported_content_encoding")
        assert answer.headers["accept-encoding"] == "identity"
    plain = await api.http.post(TEXT, json={"prompt": "say:hi"}, headers={"Content-Encoding": "Identity"})
    assert plain.json()["choices"][0]["text"] == "hi"


@pytest.mark.parametrize("path, body, param, words", [
    (TEXT, {"prompt": "x", "max_tokens": "4"}, "max_tokens", 'it is "4"'),
    (TEXT, {"prompt": "x", "user": 5}, "user", "it is 5"),
    (CHAT, {"messages": HELLO, "metadata": "m"}, "metadata", '"m"'),
    (TEXT, {"prompt": "x", "stream": "x" * 5000}, "stream", f'it is "{"x" * 64}"'),
    (CHAT, {"messages": [*HELLO, {"role": "tool", "content": "5"}]}, "messages[1].tool_call_id", "whose result"),
    (CHAT, {"messages": [{"role": "me", "content": "5"}]}, "messages[0].role", 'it is "me"'),
    (TEXT, {"prompt": "x", "best_of": 200}, "best_of", "best_of is 200; it must lie in 1..128"),
    (CHAT, {"messages": HELLO, "tool_choice": 5}, "tool_choice", "a string or an object"),
    ("/v1/score", {"text_1": 5, "text_2": "x"}, "text_1", "a string or a list of strings"),
    (CHAT, {"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0]", "valid dictionary"),
    (CHAT, {"messages": HELLO, "structured_outputs": {"choice": "ab"}}, "structured_outputs.choice",
     "must be a list of strings; it is 'ab'")], ids=str)
async def test_values_of_another_type_are_shown(api: Api, path: str, body: dict, param: str, words: str):
    assert words in check_shape(await api.http.post(path, json=body), 400, param)


MODELS = [each for each in vars(schemas).values() if isinstance(each, type) and issubclass(each, BaseModel)]


def complaints(model: type[BaseModel], body: dict[str, Any]) -> list[ErrorDetails]:
    try:
        model.model_validate(body)
    except ValidationError as e:
        return e.errors()
    return []


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_errors_name_fields_and_nothing_else(model: type[BaseModel]):
    """A path is of field names and numbers: no word of how a schema is written down (".str", ".list[str]")."""
    parts = [{"role": "user", "content": part} for part in (5, [5], [{}], [{"type": 5}], [{"type": "text", "text": 5}])]
    wrong = [5, 1.5, True, "x", {}, {"b": 5}, [], [5], ["x"], [[5]], [["x"]], [{}], [{"b": 1}], *([p] for p in parts)]
    names = {name for each in MODELS for name in each.model_fields}
    for field, value in itertools.product(model.model_fields, wrong):
        words = {part for error in complaints(model, {field: value}) for part in error["loc"] if isinstance(part, str)}
        assert words <= names | {"b"}, (field, value)


@pytest.mark.parametrize("path", ["/v1/foo", "/v1/x", "/v1/", "/bar"])
async def test_of_paths_that_are_like_none_no_other_is_named(api: Api, path: str):
    assert "mean" not in check_shape(await api.http.get(path), 404, None, "unknown_url")


@pytest.mark.parametrize("path, words", [("/api/chat", "Ollama's API"), ("/v1/audio/speech", "text only"),
                                         ("/v1/batches", "run-batch"), ("/chat/completions", "'/v1/chat/completions'")])
async def test_paths_of_other_servers_get_the_reason(api: Api, path: str, words: str):
    assert words in check_shape(await api.http.post(path, json={}), 404, None, "unknown_url")


async def test_head_is_get_without_a_body():
    async with make_served(api_keys=("secret",)) as served:
        for path in ("/health", "/", "/metrics", "/v1/models", "/none"):
            got, head = [await served.http.request(method, path) for method in ("GET", "HEAD")]
            assert (head.status_code, head.content) == (got.status_code, b""), path
            assert head.headers["content-type"] == got.headers["content-type"]


@pytest.mark.parametrize("seed", [2**64, 2**70, 1e30])
async def test_the_limit_of_seeds_is_said_exactly(api: Api, seed: float):
    message = check_shape(await api.http.post(TEXT, json={"prompt": "x", "seed": seed}), 400, "seed")
    assert "18446744073709551615" in message
    assert (await api.complete("say:hi", seed=2**64 - 1)).status_code == 200


ROUTES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO}, TEXT: {"prompt": "x"}, "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": HELLO}, "/v1/messages/count_tokens": {"messages": HELLO}, "/generate": {"text": "x"},
    "/tokenize": {"prompt": "x"}}


@pytest.mark.parametrize("size", [0, LARGE], ids=["small", "large"])  # a large body is read on another thread
@pytest.mark.parametrize("path", ROUTES)
async def test_case_15_09_nesting_has_one_limit(api: Api, path: str, size: int):
    """However deep, the answer is the same on every thread; what is let in can be written out again."""
    limits = {} if path in ("/generate", "/tokenize") else {"max_output_tokens" if "responses" in path else
                                                            "max_tokens": 1}
    for field in ("metadata", "x"):
        for depth in (MAX_NESTING - 2, MAX_NESTING - 1, 500, 960, 975, 990):
            body = json.dumps(ROUTES[path] | limits | {"pad": "x" * size})
            deep = f', "{field}": {{"deep": {"[" * depth}{"]" * depth}}}}}'
            answer = await api.http.post(path, content=body[:-1] + deep)
            if depth <= MAX_NESTING - 2:
                assert answer.status_code == 200, answer.text[:300]
                continue
            assert answer.status_code == 400, answer.text[:300]
            assert answer.json()["error"]["code"] == "invalid_json" and "200" in answer.json()["error"]["message"]


TABLE: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {}, "messages"), (CHAT, {"messages": None}, "messages"), (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "hello"}, "messages"), (CHAT, {"messages": [3]}, "messages[0]"),
    (CHAT, {"messages": [{}]}, "messages[0].role"), (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    (CHAT, {"messages": [{"role": "assistant", "content": None}]}, "messages[0].content"),
    (TEXT, {}, "prompt"), (TEXT, {"prompt": None}, "prompt"), (TEXT, {"prompt": 3}, "prompt"),
    (TEXT, {"prompt": []}, "prompt"), (TEXT, {"prompt": [[]]}, "prompt"), (TEXT, {"prompt": [1, "a"]}, "prompt"),
    (TEXT, {"prompt": [["a"]]}, "prompt"), (TEXT, {"prompt": [True]}, "prompt"), (TEXT, {"prompt": {}}, "prompt"),
    (TEXT, {"prompt": [VOCAB]}, "prompt"), (TEXT, {"prompt": [-1]}, "prompt"), (TEXT, {"prompt": [2**70]}, "prompt"),
    (TEXT, {"prompt": "", "add_special_tokens": False}, "prompt"), (TEXT, {"prompt": ["x"] * 1025}, "prompt"),
    (TEXT, {"prompt": "x", "best_of": 3, "stream": True}, "best_of"),
    (TEXT, {"prompt": "x", "best_of": 2, "n": 3}, "best_of"), (TEXT, {"prompt": "x", "best_of": 0}, "best_of"),
    (TEXT, {"prompt": "x", "best_of": 200}, "best_of"), (TEXT, {"prompt": ["x"] * 1000, "best_of": 2}, "best_of"),
    (TEXT, {"prompt": "x", "suffix": "y"}, "suffix"),
    (TEXT, {"prompt": ["x"] * 1000, "n": 2}, "n"), (TEXT, {"prompt": "x", "logprobs": True}, "logprobs"),
    (TEXT, {"prompt": "x", "logprobs": 21}, "logprobs"), (TEXT, {"prompt": "x", "logprobs": -1}, "logprobs"),
]
FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": "hot"}, "temperature"), ({"temperature": -1}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": 1e300}, "temperature"), ({"top_p": 0}, "top_p"), ({"top_p": 1.1}, "top_p"),
    ({"top_k": 1.5}, "top_k"), ({"top_k": -2}, "top_k"), ({"top_k": 2**70}, "top_k"), ({"min_p": 2}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"), ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"), ({"n": 0}, "n"), ({"n": 100_000}, "n"), ({"n": -1}, "n"),
    ({"n": "2"}, "n"), ({"seed": 2**64}, "seed"), ({"seed": 1.5}, "seed"), ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "8"}, "max_tokens"), ({"max_tokens": 2**70}, "max_tokens"), ({"max_tokens": 10**6}, "max_tokens"),
    ({"min_tokens": -1}, "min_tokens"), ({"min_tokens": 9}, "min_tokens"), ({"stop": 3}, "stop"),
    ({"stop": [3]}, "stop"), ({"stop": ""}, "stop"), ({"stop": ["x"] * 10_000}, "stop"),
    ({"stop_token_ids": [VOCAB]}, "stop_token_ids"), ({"stop_token_ids": ["a"]}, "stop_token_ids"),
    ({"stop_token_ids": list(range(100))}, "stop_token_ids"), ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": 3}, "stream_options"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"), ({"prompt_logprobs": 10**6}, "prompt_logprobs"),
    ({"speculation": 3}, "speculation"), ({"speculation": {}}, "speculation.tokens"),
    ({"speculation": {"tokens": -1}}, "speculation.tokens"), ({"speculation": {"tokens": 1, "x": 1}}, "speculation.x"),
    ({"priority": 2**40}, "priority"), ({"priority": "high"}, "priority"), ({"cache_salt": 3}, "cache_salt"),
    ({"cache_salt": "x" * 2000}, "cache_salt"), ({"request_id": ""}, "request_id"),
    ({"request_id": "a\nb"}, "request_id"), ({"request_id": "ä"}, "request_id"),
    ({"request_id": "x" * 300}, "request_id"),
    ({"bad_words": [""]}, "bad_words[0]"), ({"bad_words": "x"}, "bad_words"),
    ({"bad_words": ["x"] * 257}, "bad_words"), ({"bad_words": ["a", "x" * 1025]}, "bad_words[1]"),
    ({"bad_words": ["x" * 33]}, "bad_words"),
    ({"logit_bias": {"--5": 1}}, "logit_bias"), ({"logit_bias": {"5" * 5000: 1}}, "logit_bias"),
    ({"logit_bias": {"-": 1}}, "logit_bias"), ({"logit_bias": {"1_0": 1}}, "logit_bias"),
    ({"logit_bias": {" 1": 1}}, "logit_bias"), ({"logit_bias": {"\u0661": 1}}, "logit_bias"),
    ({"logit_bias": {"05": 1}}, "logit_bias"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [VOCAB]}, "allowed_token_ids"), ({"allowed_token_ids": ["x"]}, "allowed_token_ids"),
    ({"allowed_token_ids": [1], "regex": "a"}, "allowed_token_ids"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"), ({"ignore_eos": 1}, "ignore_eos"),
]
UNSUPPORTED: list[dict[str, Any]] = [
    {"tools": [{"type": "function", "function": {"name": "f"}}]}, {"functions": [{}]},
    {"function_call": {"name": "f"}}, {"grammar": "a"}, {"use_beam_search": True},
    {"audio": {"voice": "x"}}, {"modalities": ["text", "audio"]},
    {"store": True}, {"prediction": {"type": "content"}}, {"chat_template": "{{ 1 }}"},
    {"logits_processors": ["x"]}, {"service_tier": "priority"}, {"length_penalty": 2.0},
    {"web_search_options": {"a": 1}}, {"web_search_options": {}},
    {"input_embeds": [[0.1]]}, {"return_hidden_states": True}, {"verbosity": "low"},
]


@pytest.mark.parametrize("path, body, param", TABLE, ids=lambda value: str(value)[:40])
async def test_case_15_09_bad_prompts_name_the_field(api: Api, path: str, body: dict, param: str):
    message = check_shape(await api.http.post(path, json={"model": "fake/tiny"} | body), 400, param)
    assert param.split(".")[-1].split("[")[0] in message or "prompt" in message


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("fields, param", FIELDS, ids=lambda value: str(value)[:40])
async def test_case_15_09_bad_fields_name_the_field(api: Api, path: str, fields: dict, param: str):
    prompt = {"messages": HELLO} if path == CHAT else {"prompt": "hello"}
    message = check_shape(await api.http.post(path, json={"max_tokens": 8} | prompt | fields), 400, param)
    assert param.split(".")[0] in message


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("fields", UNSUPPORTED, ids=lambda fields: next(iter(fields)))
async def test_what_is_not_built_is_refused_by_name(api: Api, path: str, fields: dict):
    prompt = {"messages": HELLO} if path == CHAT else {"prompt": "hello"}
    name = next(iter(fields))
    assert name in check_shape(await api.http.post(path, json=prompt | fields), 400, name, "unsupported_parameter")


@pytest.mark.parametrize("fields", [
    {"response_format": {"type": "text"}}, {"tools": []}, {"tool_choice": "none"}, {"tool_choice": "auto"},
    {"modalities": ["text"]}, {"store": False}, {"service_tier": "auto"}, {"parallel_tool_calls": True}, {"suffix": ""},
    {"use_beam_search": False}, {"length_penalty": 1.0}, {"user": "u"}, {"metadata": {"a": "b"}}, {"logit_bias": {}},
], ids=str)
async def test_values_that_ask_for_nothing_are_fine(api: Api, fields: dict):
    answer = await api.chat(**fields)
    assert answer.status_code == 200 and "x-stretto-ignored" not in answer.headers


@pytest.mark.parametrize("fields, param", [
    ({"top_logprobs": 3}, "top_logprobs"), ({"logprobs": True, "top_logprobs": 10**6}, "top_logprobs"),
    ({"logprobs": 3}, "logprobs"), ({"max_completion_tokens": 4, "max_tokens": 5}, "max_tokens"),
    ({"max_tokens": None, "max_completion_tokens": 10**6}, "max_completion_tokens"),
    ({"max_tokens": None, "max_completion_tokens": -5}, "max_completion_tokens"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": 3}, "chat_template_kwargs"),
    *(({"chat_template_kwargs": {name: None}}, "chat_template_kwargs") for name in sorted(RESERVED)),
    ({"reasoning_effort": "high"}, "reasoning_effort"), ({"continue_final_message": True}, "continue_final_message"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
], ids=str)
async def test_chat_fields_name_the_field(api: Api, fields: dict, param: str):
    assert param in check_shape(await api.chat(**fields), 400, param)


def test_no_parameter_of_the_tokenizers_can_be_set_by_a_client():
    for tokenizer in (Tokenizer, ByteTokenizer):
        for method in (tokenizer.apply_chat_template, getattr(tokenizer, "render_chat_template", None)):
            names = inspect.signature(method).parameters if method is not None else {}
            assert set(names) - {"kwargs"} <= RESERVED


async def test_bad_words_are_tokenised_off_the_event_loop():
    seen: list[threading.Thread] = []

    class Watched(ByteTokenizer):
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            if "forbidden" in text:
                seen.append(threading.current_thread())
            return super().encode(text, add_special_tokens)

    async with make_api(tokenizer=Watched()) as api:
        for call in (api.chat, api.complete):
            assert (await call("say:a", bad_words=["forbidden"])).status_code == 200
        generated = await api.http.post("/generate", json={"text": "a", "sampling_params": {
            "bad_words": ["forbidden"], "max_new_tokens": 1}})
        assert generated.status_code == 200 and len(seen) == 6  # each word twice: behind a space as well
        assert threading.main_thread() not in seen
        seen.clear()
        for words in (["forbidden"] * 257, ["forbidden", "x" * 1025], ["forbidden", " "]):
            check_shape(await api.chat(bad_words=words), 400)
        assert not seen  # checked before anything is tokenised


async def test_a_request_id_in_use_is_made_unique_and_told():
    async with make_api(CoreOptions(step_seconds=0.02)) as api:  # the first still runs when the second comes
        answers = await asyncio.gather(*(api.http.post(CHAT, json={"messages": HELLO, "max_tokens": 100},
                                                       headers={"X-Request-Id": "same"}) for _ in range(2)))
    ids = {answer.headers["x-request-id"] for answer in answers}
    assert ids == {answer.json()["id"].removeprefix("chatcmpl-") for answer in answers}
    assert len(ids) == 2 and "same" in ids


# ------------------------------------------------------------------------------------------------------ section 16
@pytest.mark.parametrize("bias", [{str(VOCAB): 1}, {str(VOCAB + 1): 1}, {"-1": 1}, {"abc": 1}, {str(2**31): 1},
                                  {"1": 1e9}, {"1": None}, {"1": "x"}, [1], {str(i): 1 for i in range(2000)}],
                         ids=lambda bias: str(bias)[:24])
async def test_case_16_01_logit_bias(api: Api, bias: Any):
    answer = await api.chat(logit_bias=bias)
    assert check_shape(answer, 400) and answer.json()["error"]["param"].startswith("logit_bias")
    await api.alive()


async def test_case_16_03_huge_demands_are_refused_fast(api: Api):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for fields in ({"n": 100_000}, {"n": 2**62}, {"logprobs": True, "top_logprobs": 10**6}, {"stop": ["x"] * 10_000}):
        check_shape(await api.chat(**fields), 400)
    check_shape(await api.complete("x", best_of=100_000), 400)
    check_shape(await api.complete("x" * 10_000_000), 400, "prompt", "context_length_exceeded")
    check_shape(await api.chat("y" * 10_000_000), 400, "messages", "context_length_exceeded")
    check_shape(await api.complete([1] * 1_000_000), 400, "prompt", "context_length_exceeded")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024  # KiB
    await api.alive()


async def test_case_16_03_bodies_over_the_limit():
    async with make_api(max_body_bytes=10_000) as api:
        check_shape(await api.complete("x" * 10_001), 413, code="request_too_large")

        async def chunks():
            for _ in range(20):
                yield b"x" * 1000

        check_shape(await api.http.post(TEXT, content=chunks()), 413, code="request_too_large")
        await api.alive()


async def test_case_16_05_empty_prompts(api: Api):
    for prompt in ([], [[]]):
        check_shape(await api.complete(prompt), 400, "prompt")
    check_shape(await api.http.post(CHAT, json={"messages": []}), 400, "messages")
    assert (await api.complete("")).status_code == 200  # the tokenizer's BOS is the prompt
    assert (await api.chat("")).status_code == 200  # the template's own tokens are
    await api.alive()


async def test_case_16_07_max_tokens_over_the_room(api: Api):
    """An explicit limit is refused with both numbers; without one the answer ends at the context."""
    message = check_shape(await api.complete("abc", max_tokens=512), 400, "max_tokens", "context_length_exceeded")
    assert "512" in message and "516" in message and "508" in message
    exact = (await api.complete("abc", max_tokens=508)).json()
    assert exact["usage"]["total_tokens"] == 512
    open_end = (await api.chat(max_tokens=None)).json()
    assert open_end["usage"]["total_tokens"] == 512 and open_end["choices"][0]["finish_reason"] == "length"
    check_shape(await api.complete("x" * 600, max_tokens=1), 400, "prompt", "context_length_exceeded")
    check_shape(await api.chat("x" * 600, max_tokens=1), 400, "messages", "context_length_exceeded")


async def test_case_16_11_internal_fields_do_nothing(api: Api):
    """Fields of the engine's own request record are not request fields of the API."""
    odd = {"rid": "x", "tokens": [1], "sampling": {"n": 9}, "want_text": False, "arrival": -1.0, "slot": 3, "epoch": 3}
    plain = (await api.chat(seed=1)).json()
    answer = await api.chat(seed=1, **odd)
    assert answer.json()["choices"] == plain["choices"]
    assert set(answer.headers["x-stretto-ignored"].split(",")) == set(odd)
    await api.alive()


# ------------------------------------------------------------------------------------- models, urls, methods, fields
async def test_unknown_model(api: Api):
    message = check_shape(await api.chat(model="fake/tinny"), 404, "model", "model_not_found")
    assert "'fake/tiny'" in message
    check_shape(await api.complete("x", model="y" * 100_000), 404, "model", "model_not_found")
    check_shape(await api.http.get("/v1/models/none"), 404, "model", "model_not_found")
    assert (await api.http.get("/v1/models/fake/tiny")).json()["max_model_len"] == 512
    check_shape(await api.chat(model=3), 400, "model")


async def test_unknown_url_and_wrong_method(api: Api):
    assert "/v1/chat/completions" in check_shape(await api.http.post("/v1/chat/completion"), 404, code="unknown_url")
    check_shape(await api.http.get("/" + "x" * 3000), 404, code="unknown_url")
    answer = await api.http.get(CHAT)
    check_shape(answer, 405, code="method_not_allowed")
    assert answer.headers["allow"] == "POST"


async def test_more_drafts_than_the_server_makes_are_named_or_refused():
    """Such a bound is kept, but not reached: whoever set it is told."""
    named, few, many = "x-stretto-ignored", {"tokens": 3}, {"tokens": 4}
    async with make_api(CoreOptions(block=4)) as api:
        assert named not in (await api.chat(speculation=few)).headers
        for answer in (await api.chat(speculation=many), await api.complete("x", speculation=many),
                       await api.chat(speculation=many, stream=True)):
            assert answer.status_code == 200 and answer.headers[named] == "speculation.tokens"
    async with make_api(CoreOptions(block=4), strict_requests=True) as strict:
        message = check_shape(await strict.chat(speculation=many), 400, "speculation.tokens")
        assert "is 4" in message and "at most 3" in message
        assert (await strict.chat(speculation=few)).status_code == 200


async def test_unknown_fields_are_named_or_refused(api: Api):
    answer = await api.chat(temprature=1, **{"odd,name\r\nX-Evil: 1": 1, "ünïcode": 2})
    assert answer.status_code == 200 and "x-evil" not in answer.headers
    assert answer.headers["x-stretto-ignored"].startswith("temprature,odd?name")
    stream = await api.chat(temprature=1, stream=True)
    assert stream.headers["x-stretto-ignored"] == "temprature"
    async with make_api(strict_requests=True) as strict:
        message = check_shape(await strict.chat(temprature=1), 400, "temprature", "unknown_parameter")
        assert "'temperature'" in message
        assert (await strict.chat(temperature=1, user="u")).status_code == 200


async def test_other_routes_check_their_bodies(api: Api):
    for path, body, param in (
            ("/tokenize", {}, "prompt"), ("/tokenize", {"prompt": "x", "messages": HELLO}, "prompt"),
            ("/tokenize", {"messages": []}, "messages"), ("/tokenize", {"prompt": 3}, "prompt"),
            ("/detokenize", {}, "tokens"), ("/detokenize", {"tokens": [VOCAB]}, "tokens"),
            ("/detokenize", {"tokens": None}, "tokens"), ("/detokenize", {"tokens": "x"}, "tokens"),
            ("/abort_request", {}, "rid"), ("/abort_request", {"rid": 3}, "rid")):
        check_shape(await api.http.post(path, json=body), 400, param)
    check_shape(await api.http.post("/tokenize", json={"prompt": "x", "model": "z"}), 404, "model")
    check_shape(await api.http.delete("/v1/requests/none"), 404, "id")


async def test_failures_of_the_engine_are_told_apart(api: Api):
    check_shape(await api.chat("refuse:no"), 400, "messages", "refused_by_core")
    check_shape(await api.complete("refuse:no"), 400, "prompt", "refused_by_core")
    check_shape(await api.chat("crash:now"), 500, code="engine_error")
    check_shape(await api.chat("crash:now", stream=True), 500, code="engine_error")
    await api.alive()


async def test_api_keys():
    async with make_api(api_keys=("first", "second")) as api:
        for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "first"},
                       {"Authorization": "Basic first"}, {"Authorization": "Bearer "},
                       {"Authorization": b"Bearer \xff"}):
            answer = await api.http.get("/v1/models", headers=header)
            check_shape(answer, 401, code="invalid_api_key")
            assert answer.json()["error"]["type"] == "authentication_error"
            assert answer.headers["www-authenticate"] == "Bearer"
        for key in ("first", "second"):
            assert (await api.http.get("/v1/models", headers={"Authorization": f"Bearer {key}"})).status_code == 200
        for path in ("/health", "/livez", "/readyz", "/startupz", "/ping", "/metrics"):
            assert (await api.http.get(path)).status_code == 200
        info = await api.http.get("/server_info", headers={"Authorization": "Bearer first"})
        assert info.json()["api_key_required"] is True and "second" not in info.text


async def test_request_ids(api: Api):
    assert (await api.http.get("/health", headers={"X-Request-Id": "abc-1"})).headers["x-request-id"] == "abc-1"
    fresh = (await api.http.get("/health", headers={"X-Request-Id": "x" * 300})).headers["x-request-id"]
    assert len(fresh) == 32
    answer = await api.http.post(CHAT, json={"messages": HELLO, "max_tokens": 1}, headers={"X-Request-Id": "abc-2"})
    assert answer.headers["x-request-id"] == "abc-2" and answer.json()["id"] == "chatcmpl-abc-2"
    both = await api.http.post(CHAT, headers={"X-Request-Id": "abc-3"}, json={
        "messages": HELLO, "max_tokens": 1, "request_id": "body-3"})
    assert both.headers["x-request-id"] == "abc-3" and both.json()["id"] == "chatcmpl-body-3"
    own = await api.chat(request_id="mine")
    assert own.headers["x-request-id"] == "mine" and own.json()["id"] == "chatcmpl-mine"
    plain = await api.chat()
    assert plain.json()["id"] == "chatcmpl-" + plain.headers["x-request-id"]


async def test_the_openapi_document_describes_the_bodies(api: Api):
    document = (await api.http.get("/openapi.json")).json()
    body = document["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/ChatRequest"}
    schemas = document["components"]["schemas"]
    assert "messages" in schemas["ChatRequest"]["required"] and "Message" in schemas
    assert (await api.http.get("/docs")).status_code == 200


class WithoutTemplate(ByteTokenizer):
    def apply_chat_template(self, *arguments: Any, **variables: Any) -> Any:
        raise NoChatTemplate("this model has no chat template")


class Refusing(ByteTokenizer):
    def apply_chat_template(self, *arguments: Any, **variables: Any) -> Any:
        raise ChatTemplateError("roles must alternate")


async def test_of_a_template_is_told_what_happened():
    """Nothing that is not there refuses; and the words are the same in every API, whatever its fields are called."""
    for tokenizer, told in ((WithoutTemplate(), "this model has no chat template"),
                            (Refusing(), "the chat template refuses the conversation: roles must alternate")):
        async with make_api(tokenizer=tokenizer) as api:
            for answer, param in ((await api.chat("x"), "messages"),
                                  (await api.http.post("/v1/responses", json={"input": "x"}), "input")):
                assert answer.status_code == 400
                assert answer.json()["error"]["message"] == told and answer.json()["error"]["param"] == param


@pytest.mark.parametrize("body, word", [("null", "null"), ("[1]", "a list"), ('"x"', "a string"), ("true", "true or")])
async def test_what_is_no_object_is_called_by_its_name_in_json(api: Api, body: str, word: str):
    answer = await api.http.post("/v1/completions", content=body)
    assert answer.json()["error"]["message"].startswith(f"the request body must be a JSON object, not {word}")
