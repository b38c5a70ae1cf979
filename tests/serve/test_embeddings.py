"""/v1/embeddings, /v1/score and /v1/rerank: shapes, order, refusals, and a real engine against transformers."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch

from stretto.vectors import unit_vectors
from tests.engine.small import Oracle, make_core
from tests.serve.conftest import Api, make_api, make_served
from tests.serve.fakes import BOS, ByteTokenizer, CoreOptions


async def embed(api: Api, given: Any, **fields: Any) -> httpx.Response:
    return await api.http.post("/v1/embeddings", json={"input": given} | fields)


def expected(text: str, pooling: str = "last", size: int = 8) -> list[float]:
    ids = [BOS, *text.encode()] if pooling == "mean" else [text.encode()[-1]]
    return unit_vectors([np.bincount([i % size for i in ids], minlength=size).astype("<f4").tobytes()])[0].tolist()


async def test_a_text_a_list_and_ids(api: Api):
    one = (await embed(api, "hello", model="fake/tiny", user="u")).json()
    assert one["object"] == "list" and one["model"] == "fake/tiny" and one["usage"] == {
        "prompt_tokens": 6, "total_tokens": 6}
    assert one["data"] == [{"object": "embedding", "index": 0, "embedding": expected("hello")}]
    several = (await embed(api, ["hello", "x", "world"], pooling="mean")).json()
    assert [entry["index"] for entry in several["data"]] == [0, 1, 2]
    assert [entry["embedding"] for entry in several["data"]] == [expected(t, "mean") for t in ("hello", "x", "world")]
    assert several["usage"]["prompt_tokens"] == 14
    ids = (await embed(api, [[104, 105], [120]])).json()
    assert [entry["embedding"] for entry in ids["data"]] == [expected("hi"), expected("x")]
    assert (await embed(api, [104, 105])).json()["data"][0]["embedding"] == expected("hi")
    bare = (await embed(api, "hello", add_special_tokens=False)).json()
    assert bare["usage"]["prompt_tokens"] == 5
    assert len((await embed(api, "hello", truncate_prompt_tokens=2)).json()["data"]) == 1


async def test_encodings_and_dimensions(api: Api):
    coded = (await embed(api, "hello", encoding_format="base64", pooling="mean")).json()["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(coded), "<f4").tolist() == expected("hello", "mean")
    short = (await embed(api, "hello", dimensions=3, pooling="mean")).json()["data"][0]["embedding"]
    whole = np.asarray(expected("hello", "mean"))[:3]
    np.testing.assert_allclose(short, whole / np.linalg.norm(whole), atol=1e-6)


@pytest.mark.parametrize(("body", "param"), [
    ({"input": ""}, None), ({"input": []}, "input"), ({"input": [[]]}, None), ({"input": 3}, "input"),
    ({"input": ["a", 3]}, "input"), ({"input": [-1]}, "input"), ({"input": [10**9]}, "input"), ({}, "input"),
    ({"input": "x" * 600}, "input"), ({"input": ["x"] * 2000}, "input"),
    ({"input": "a", "dimensions": 9}, "dimensions"),
    ({"input": "a", "dimensions": 0}, "dimensions"), ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
    ({"input": "a", "pooling": "cls"}, "pooling"), ({"input": "a", "model": "other"}, "model"),
    ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens")])
async def test_case_16_05_what_cannot_be_embedded(api: Api, body: dict[str, Any], param: str | None):
    """An empty text is its BOS; everything else is a 4xx that names the field."""
    answer = await api.http.post("/v1/embeddings", json=body)
    if body.get("input") == "":
        assert answer.status_code == 200
    else:
        error = answer.json()["error"]
        assert answer.status_code in (400, 404) and (param is None or error["param"].startswith(param)), error
    await api.alive()


@pytest.mark.parametrize("path, field", [("/v1/embeddings", "input"), ("/encode", "text")])
async def test_a_text_that_is_too_long_is_told_its_own_limit(api: Api, path: str, field: str):
    longest = 512 - 1 - 1  # of the context; the first token is BOS
    assert (await api.http.post(path, json={field: "x" * longest})).status_code == 200
    error = (await api.http.post(path, json={field: "x" * (longest + 1)})).json()["error"]
    assert error["param"] == field and error["code"] == "context_length_exceeded"
    assert "has 512 tokens" in error["message"] and "511" in error["message"] and "answer" not in error["message"]
    cut = await api.http.post(path, json={field: "x" * 600, "truncate_prompt_tokens": 511})
    assert cut.status_code == 200


async def test_an_engine_without_embeddings_says_so():
    async with make_api(CoreOptions(hidden_size=0)) as api:
        for path, body in (("/v1/embeddings", {"input": "a"}), ("/v1/score", {"text_1": "a", "text_2": "b"}),
                           ("/v1/rerank", {"query": "a", "documents": ["b"]})):
            answer = await api.http.post(path, json=body)
            assert answer.status_code == 400 and "fake/tiny gives none" in answer.json()["error"]["message"]


async def test_scores_and_rankings(api: Api):
    scores = (await api.http.post("/v1/score", json={"text_1": "za", "text_2": ["xa", "xb"]})).json()["data"]
    assert [entry["score"] for entry in scores] == pytest.approx([1.0, 0.0])
    pairs = (await api.http.post("/v1/score", json={"text_1": ["a", "b"], "text_2": ["b", "b"]})).json()["data"]
    assert [entry["score"] for entry in pairs] == pytest.approx([0.0, 1.0])
    wrong = await api.http.post("/v1/score", json={"text_1": ["a", "b"], "text_2": ["b"] * 3})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "text_1"
    ranked = (await api.http.post("/v1/rerank", json={
        "query": "xyz", "documents": ["cd", "zy", "yz"], "pooling": "mean", "top_n": 2})).json()
    assert [result["index"] for result in ranked["results"]] == [1, 2]
    assert ranked["results"][0]["document"] == {"text": "zy"} and ranked["usage"]["prompt_tokens"] == 13
    bare = (await api.http.post("/rerank", json={"query": "a", "documents": ["a"], "return_documents": False})).json()
    assert bare["results"] == [{"index": 0, "relevance_score": pytest.approx(1.0)}]


async def test_the_shape_of_sglangs_clients(api: Api):
    one = (await api.http.post("/encode", json={"text": "hello", "pooling": "mean"})).json()
    assert one["embedding"] == expected("hello", "mean") and one["meta_info"]["prompt_tokens"] == 6
    several = (await api.http.post("/encode", json={"text": ["hi", "x"]})).json()
    assert [entry["embedding"] for entry in several] == [expected("hi"), expected("x")]
    ids = (await api.http.post("/encode", json={"input_ids": [104, 105]})).json()
    assert ids["embedding"] == expected("hi") and ids["meta_info"]["id"]
    for body in ({}, {"text": "a", "input_ids": [1]}, {"text": [1]}, {"input_ids": "a"}, {"text": "a", "n": [0]}):
        answer = await api.http.post("/encode", json=body)
        assert answer.status_code == (200 if "n" in body else 400), answer.text


async def test_openais_client():
    async with make_served() as served, openai.AsyncOpenAI(
            base_url=served.url + "/v1", api_key="none", max_retries=0) as client:
        made = await client.embeddings.create(model="fake/tiny", input=["hello", "x"])  # base64, unseen
        assert [len(entry.embedding) for entry in made.data] == [8, 8]
        np.testing.assert_allclose(made.data[0].embedding, expected("hello"), atol=1e-6)


async def test_a_client_that_goes_away_frees_everything():
    async with make_served(CoreOptions(step_seconds=0.3, max_num_seqs=1)) as served:
        with pytest.raises(httpx.ReadTimeout):
            await served.http.post("/v1/embeddings", json={"input": ["a"] * 50}, timeout=0.5)
        await served.until_idle()


async def test_vectors_of_a_real_engine(tmp_path: Path):
    """Beside streams of text, through the whole server."""
    oracle = Oracle.make(tmp_path, "llama")

    def core() -> Any:
        made = make_core(oracle.model, chunk=16, budget=48, poison=True)
        made.info.hidden_size = oracle.model.hidden_size
        return made

    prompts = [[1, 7, 3, 7, 3], list(range(40, 90)), [5]]
    async with make_api(core, ByteTokenizer(), served_model_names=("fake/tiny",)) as api:
        texts = [api.complete(prompt, max_tokens=30, ignore_eos=True, temperature=0, return_token_ids=True)
                 for prompt in prompts[:2]]
        *answers, vectors = await asyncio.gather(*texts, embed(api, prompts, pooling="mean"))
    for prompt, answer in zip(prompts[:2], answers, strict=True):
        assert answer.json()["choices"][0]["token_ids"] == oracle.answer(prompt, 30)
    for prompt, entry in zip(prompts, vectors.json()["data"], strict=True):
        with torch.inference_mode():
            states = oracle.reference.model(torch.tensor([prompt])).last_hidden_state[0].double().mean(0)
        np.testing.assert_allclose(entry["embedding"], (states / states.norm()).numpy(), atol=1e-4)
