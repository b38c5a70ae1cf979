"""LoRA adapters over HTTP: loaded adapters are models to clients."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from stretto.engine.core import EngineCore
from stretto.text.stream import IncrementalText
from tests.engine.test_lora import PROMPTS, TOKENS, Adapted
from tests.serve.conftest import make_api
from tests.serve.fakes import ByteTokenizer

NAME = {"served_model_names": ("fake/tiny",)}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return Adapted(tmp_path_factory.mktemp("lora"), "llama")


def core_of(tiny: Adapted) -> EngineCore:
    tokenizer = ByteTokenizer()
    return tiny.core(names=(), text=lambda sampling: IncrementalText.for_request(tokenizer, sampling))


async def test_adapters_are_models(tiny: Adapted):
    async with make_api(lambda: core_of(tiny), **NAME) as api:
        for name, path in tiny.folders.items():
            loaded = await api.http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path)})
            assert loaded.status_code == 200 and name in loaded.json()["loaded_adapters"]
        cards = {card["id"]: card for card in (await api.http.get("/v1/models")).json()["data"]}
        assert cards.keys() == {"fake/tiny", "a", "b"} and cards["a"]["parent"] == "fake/tiny"
        assert (await api.http.get("/v1/models/b")).json()["root"] == str(tiny.folders["b"])
        body = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        names = ["fake/tiny", "a", "b"]
        answers = await asyncio.gather(*(api.complete(PROMPTS[0], **body, model=name) for name in names))
        for name, answer in zip(names, answers):
            assert answer.json()["model"] == name
            expected = tiny.answer(None if name == "fake/tiny" else name, PROMPTS[0])
            assert answer.json()["choices"][0]["token_ids"] == expected
        gone = await api.http.post("/unload_lora_adapter", json={"lora_name": "a"})
        assert gone.status_code == 200 and gone.json()["loaded_adapters"].keys() == {"b"}
        late = await api.complete(PROMPTS[0], **body, model="a")
        assert late.status_code == 404 and late.json()["error"]["code"] == "model_not_found"
        assert "fake/tiny, b" in late.json()["error"]["message"]


async def test_chats_messages_responses_and_sessions_name_adapters(tiny: Adapted):
    async with make_api(lambda: core_of(tiny), **NAME) as api:
        await api.http.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": str(tiny.folders["a"])})
        messages = [{"role": "user", "content": "hi"}]
        chat = await api.http.post("/v1/chat/completions", json={"model": "a", "messages": messages, "max_tokens": 3})
        message = await api.http.post("/v1/messages", json={"model": "a", "messages": messages, "max_tokens": 3})
        response = await api.http.post("/v1/responses", json={"model": "a", "input": "hi", "max_output_tokens": 16})
        assert [answer.json()["model"] for answer in (chat, message, response)] == ["a", "a", "a"]
        opened = await api.http.post("/v1/sessions", json={"session_id": "s", "model": "a"})
        assert opened.status_code == 200
        turn = {"max_tokens": 3, "session_params": {"id": "s"}}
        assert (await api.complete([1, 2], model="a", **turn)).status_code == 200
        assert (await api.complete([1, 2, 3], model="fake/tiny", **turn)).json()["error"]["code"] == "session_salt"


async def test_what_cannot_be_loaded_is_a_4xx(tiny: Adapted, tmp_path: Path):
    async with make_api(lambda: core_of(tiny), **NAME) as api:
        async def load(**body) -> tuple[int, str]:
            answer = await api.http.post("/v1/load_lora_adapter", json=body)
            return answer.status_code, answer.json().get("error", {}).get("message", "")

        assert (await load(lora_name="x"))[0] == 400
        status, message = await load(lora_name="x", lora_path=str(tmp_path))
        assert status == 400 and "no adapter folder" in message
        assert (await load(lora_name="fake/tiny", lora_path=str(tiny.folders["a"])))[0] == 400
        assert (await load(lora_name="a", lora_path=str(tiny.folders["a"])))[0] == 200
        status, message = await load(lora_name="a", lora_path=str(tiny.folders["a"]))
        assert status == 400 and "loaded already" in message
        answer = await api.http.post("/v1/unload_lora_adapter", json={"lora_name": "nobody"})
        assert answer.status_code == 404
        assert (await api.complete(PROMPTS[0], max_tokens=2, model="a")).status_code == 200


async def test_only_operators_load_adapters(tiny: Adapted):
    async with make_api(lambda: core_of(tiny), **NAME, api_keys=("user",), admin_keys=("chief",)) as api:
        body = {"lora_name": "a", "lora_path": str(tiny.folders["a"])}
        for path in ("/v1/load_lora_adapter", "/load_lora_adapter"):
            refused = await api.http.post(path, json=body, headers={"x-api-key": "user"})
            assert refused.status_code in (401, 403)
        allowed = await api.http.post("/v1/load_lora_adapter", json=body, headers={"x-api-key": "chief"})
        assert allowed.status_code == 200
