"""A tokenizer that puts a space in front of every text (SentencePiece's kind), through the server: answers continue
their prompts, and what a request says in texts means these texts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from stretto.engine.build import build_core
from stretto.engine.llm import LLM
from stretto.engine.options import make_config
from stretto.engine.prepare import prepare
from stretto.params import SamplingParams
from stretto.text.tokenizer import load_tokenizer
from tests.serve.conftest import Api, events, make_api

STORIES = Path(__file__).resolve().parents[2] / "../shared/data/models/stories260k"
pytestmark = pytest.mark.skipif(not STORIES.is_dir(), reason="shared/data/models/stories260k is absent")


@pytest.fixture
async def stories() -> AsyncIterator[Api]:
    config = make_config(str(STORIES), {"device": "cpu", "max_model_len": 256})
    async with make_api(lambda: build_core(prepare(config)), load_tokenizer(STORIES)) as api:
        yield api


async def choice(api: Api, prompt: str, **fields) -> dict:
    answer = await api.complete(prompt, model=None, temperature=0, **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


async def test_prompt_text_and_log_probabilities_agree(stories: Api):
    plain = await choice(stories, "Once upon", max_tokens=3)
    assert plain["text"] == " a time,"
    echoed = await choice(stories, "Once upon", max_tokens=3, echo=True, logprobs=0)
    assert echoed["text"] == "Once upon a time,"
    logprobs = echoed["logprobs"]
    assert logprobs["tokens"][-3:] == [" a", " time", ","]
    assert logprobs["text_offset"] == [0, 0, 4, 9, 11, 16]
    alone = await choice(stories, "Once upon", max_tokens=3, logprobs=0)
    assert alone["logprobs"]["text_offset"] == [0, 2, 7]
    streamed = await stories.complete("Once upon", model=None, temperature=0, max_tokens=3, stream=True)
    assert "".join(e["choices"][0]["text"] for e in events(streamed.text)[:-1]) == " a time,"
    native = await stories.http.post("/generate", json={
        "text": "Once upon", "sampling_params": {"temperature": 0, "max_new_tokens": 3}})
    assert native.json()["text"] == " a time,"


async def test_an_answer_to_nothing_begins_a_text(stories: Api):
    alone = await choice(stories, "", max_tokens=3, logprobs=0)
    first = alone["logprobs"]["tokens"][0]
    assert first.startswith(" ") and alone["text"].startswith(first[1:])
    assert alone["logprobs"]["text_offset"][1] == len(first) - 1


async def test_stop_strings_and_bad_words_with_a_space(stories: Api):
    stopped = await choice(stories, "Once upon", max_tokens=8, stop=" time")
    assert (stopped["text"], stopped["finish_reason"]) == (" a", "stop")
    assert (await choice(stories, "Once", max_tokens=4))["text"].startswith(" upon a")
    for word in (" upon", "upon"):
        assert "upon" not in (await choice(stories, "Once", max_tokens=4, bad_words=[word]))["text"]


@pytest.mark.parametrize("fields", [{"regex": "(yes|no)"}, {"guided_choice": ["yes", "no"]}], ids=str)
async def test_grammars_hold_from_the_first_character(stories: Api, fields: dict):
    found = await choice(stories, "Once upon a time", max_tokens=8, **fields)
    assert found["text"] in ("yes", "no") and found["finish_reason"] == "stop"


async def test_texts_are_appended_to_sessions_as_they_are(stories: Api):
    asked = {"model": None, "temperature": 0, "max_tokens": 3}
    whole = (await stories.complete("Once upon a time, there was", **asked)).json()
    turn = {"session_id": "s", "session": {"mode": "append"}}
    await choice(stories, "Once upon", max_tokens=3, **turn)
    appended = (await stories.complete(" there was", **asked, **turn, echo=True, logprobs=0)).json()
    assert appended["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
    found = appended["choices"][0]
    assert found["text"] == " there was" + whole["choices"][0]["text"]
    assert found["logprobs"]["text_offset"][:3] == [0, 6, 10] and found["logprobs"]["tokens"][0] == " there"
    order = {"sampling_params": {"temperature": 0, "max_new_tokens": 3}, **turn, "session_id": "t"}
    await stories.http.post("/generate", json={"text": "Once upon", **order})
    native = (await stories.http.post("/generate", json={"text": " there was", **order})).json()
    assert native["text"] == whole["choices"][0]["text"]
    assert native["meta_info"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]


def test_texts_are_appended_to_conversations_as_they_are():
    greedy = SamplingParams(temperature=0, max_tokens=3)
    with LLM(str(STORIES), device="cpu", max_model_len=256) as llm, llm.open_session() as talk:
        (whole,) = llm.generate("Once upon a time, there was", greedy)
        assert talk.generate("Once upon", greedy).text == " a time,"
        assert talk.generate(" there was", greedy).text == whole.text
        assert talk.info.tokens == len(whole.prompt_tokens) + 3
