"""Text completions: four forms of prompt, echo, log-probabilities, several prompts at once."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serve.conftest import Api, events, make_api
from tests.serve.fakes import BOS, IM_START, CoreOptions


@pytest.mark.parametrize("prompt, choices", [("ab", 1), (["ab", "cd"], 2), ([97, 98], 1), ([[97, 98], [99]], 2)])
@pytest.mark.parametrize("n", [1, 3])
async def test_prompt_forms_and_choice_order(api: Api, prompt: Any, choices: int, n: int):
    whole = (await api.complete(prompt, n=n, echo=True, seed=1)).json()
    assert whole["object"] == "text_completion" and whole["id"].startswith("cmpl-")
    assert [c["index"] for c in whole["choices"]] == list(range(choices * n))
    heads = ["ab"] * n + (["cd" if prompt == ["ab", "cd"] else "c"] * n if choices == 2 else [])
    assert [c["text"].startswith(head) for c, head in zip(whole["choices"], heads, strict=True)] == [True] * len(heads)
    chunks = events((await api.complete(prompt, n=n, echo=True, seed=1, stream=True)).text)[:-1]
    texts: dict[int, str] = {}
    for chunk in chunks:
        choice = chunk["choices"][0]
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert texts == {c["index"]: c["text"] for c in whole["choices"]}


@pytest.mark.parametrize("block", [1, 4])
@pytest.mark.parametrize("echo", [False, True])
async def test_logprobs_in_both_modes(echo: bool, block: int):
    async with make_api(CoreOptions(block=block)) as api:
        body = dict(n=2, echo=echo, logprobs=2, max_tokens=5)
        whole = (await api.complete(["xyz", "q"], **body)).json()
        chunks = events((await api.complete(["xyz", "q"], **body, stream=True)).text)[:-1]
    for choice in whole["choices"]:
        lists = choice["logprobs"]
        assert {len(values) for values in lists.values()} == {5 + echo * (4 if choice["index"] < 2 else 2)}
        assert (lists["token_logprobs"][0] is None) == echo
        assert all(token in top for token, top in zip(lists["tokens"], lists["top_logprobs"], strict=True) if top)
        streamed = [c["choices"][0]["logprobs"] for c in chunks
                    if c["choices"][0]["index"] == choice["index"] and c["choices"][0]["logprobs"]]
        for name, values in lists.items():
            assert [value for part in streamed for value in part[name]] == values


async def test_case_11_09_echo_with_max_tokens_0_scores_the_prompt(api: Api):
    answer = (await api.complete("abc", echo=True, logprobs=1, max_tokens=0)).json()
    choice = answer["choices"][0]
    assert choice["text"] == "abc" and choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    assert choice["logprobs"]["tokens"] == ["<s>", "a", "b", "c"] and choice["logprobs"]["token_logprobs"][0] is None
    chunks = events((await api.complete("abc", echo=True, logprobs=1, max_tokens=0, stream=True)).text)[:-1]
    assert chunks[0]["choices"][0]["logprobs"] == choice["logprobs"]
    await api.alive()


async def test_the_call_that_lm_eval_makes(api: Api):
    prompt = [[BOS, *b"The sky is blue"]]
    answer = (await api.complete(prompt, echo=True, logprobs=1, max_tokens=1, temperature=0, seed=1234)).json()
    lists = answer["choices"][0]["logprobs"]
    assert lists["token_logprobs"][0] is None and len(lists["token_logprobs"]) == len(prompt[0]) + 1
    assert all(value <= 0 for value in lists["token_logprobs"][1:])
    assert lists["tokens"][1:-1] == list("The sky is blue")


async def test_tokens_that_are_part_of_a_character(api: Api):
    answer = (await api.complete("say:🙂", logprobs=0, max_tokens=9)).json()
    lists = answer["choices"][0]["logprobs"]
    assert lists["tokens"] == ["bytes:\\xf0", "bytes:\\x9f", "bytes:\\x99", "bytes:\\x82", "</s>"]
    assert lists["text_offset"] == [0, 0, 0, 0, 1] and answer["choices"][0]["text"] == "🙂"


@pytest.mark.parametrize("skip", [True, False])
async def test_offsets_point_into_the_text(api: Api, skip: bool):
    """Also behind tokens that the text leaves out: those that the tokenizer adds, and special ones of ids."""
    for prompt in ("ab", [BOS, 97, 98], [97, IM_START, 98]):
        choice = (await api.complete(prompt, echo=True, logprobs=0, skip_special_tokens=skip)).json()["choices"][0]
        lists, text = choice["logprobs"], choice["text"]
        ends = [*lists["text_offset"][1:], len(text)]
        for name, at, end in zip(lists["tokens"], lists["text_offset"], ends, strict=True):
            left_out = name.startswith("<") and (skip or prompt == "ab")
            assert text[at:end] == ("" if left_out else name)


async def test_default_max_tokens_is_openais(api: Api):
    answer = await api.http.post("/v1/completions", json={"prompt": "x"})
    assert answer.json()["usage"]["completion_tokens"] == 16


async def test_case_18_03_bos_once(api: Api):
    async def ids(prompt: Any, **fields: Any) -> list[int]:
        answer = await api.complete(prompt, return_token_ids=True, max_tokens=1, **fields)
        return answer.json()["choices"][0]["prompt_token_ids"]

    assert await ids("ab") == [BOS, 97, 98]
    assert await ids("ab", add_special_tokens=False) == [97, 98]
    assert await ids([97, 98]) == [97, 98]
    chat = (await api.chat(return_token_ids=True, max_tokens=1)).json()["prompt_token_ids"]
    assert chat.count(BOS) <= 1


async def test_truncation_keeps_the_end(api: Api):
    answer = (await api.complete("abcdef", truncate_prompt_tokens=2, echo=True, max_tokens=1)).json()
    assert answer["usage"]["prompt_tokens"] == 2 and answer["choices"][0]["text"].startswith("ef")


@pytest.mark.parametrize("stream", [False, True])
async def test_one_bad_prompt_of_several_fails_the_call_and_frees_the_rest(api: Api, stream: bool):
    answer = await api.complete(["fine", "x" * 600], max_tokens=400, stream=stream)
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"
    refused = await api.complete(["fine", "refuse:this"], max_tokens=400)
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "refused_by_core"
    await api.until_idle()


async def test_tokens_there_and_back(api: Api):
    text = "two words 🙂"
    there = (await api.http.post("/tokenize", json={"prompt": text, "return_token_strs": True})).json()
    assert there["count"] == len(there["tokens"]) == len(there["token_strs"]) and there["max_model_len"] == 512
    assert there["tokens"][0] == BOS
    bare = (await api.http.post("/tokenize", json={"prompt": text, "add_special_tokens": False})).json()["tokens"]
    assert bare == there["tokens"][1:]
    back = (await api.http.post("/detokenize", json={"tokens": bare})).json()
    assert back == {"prompt": text}
    info = (await api.http.get("/tokenizer_info")).json()
    assert (info["bos_token"], info["eos_token"], info["pad_token"]) == ("<s>", "</s>", "<pad>")
    assert "im_start" in info["chat_template"]
