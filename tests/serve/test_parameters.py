"""Every request field of OpenAI, vLLM and SGLang is honoured, refused by name, or known to ask for nothing; and
docs/sampling.md says which."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from openai.types import completion_create_params as text_params
from openai.types.chat import completion_create_params as chat_params
from pydantic import BaseModel

from stretto.serve.native import SAMPLING
from stretto.serve.request_fields import ASKS_NOTHING, REFUSED
from stretto.serve.sampling import to_sampling
from stretto.serve.schemas import ChatRequest, CompletionRequest, GenerateRequest
from tests.serve.conftest import Api, make_api
from tests.serve.fakes import CoreOptions

DOCS = Path(__file__).resolve().parents[2] / "docs" / "sampling.md"
VLLM = """
use_beam_search top_k min_p repetition_penalty length_penalty stop_token_ids include_stop_str_in_output ignore_eos
min_tokens skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens prompt_logprobs allowed_token_ids
bad_words echo add_generation_prompt continue_final_message add_special_tokens documents chat_template
chat_template_kwargs mm_processor_kwargs structured_outputs guided_json guided_regex guided_choice guided_grammar
guided_decoding_backend guided_whitespace_pattern priority request_id return_tokens_as_token_ids return_token_ids
cache_salt kv_transfer_params vllm_xargs logits_processors include_reasoning thinking_token_budget response_format
best_of prompt_embeds repetition_detection logprob_token_ids return_prompt_text truncation_side media_io_kwargs
return_assistant_tokens_mask ec_transfer_params"""
SGLANG_SAMPLING = """
max_new_tokens stop stop_token_ids stop_regex temperature top_p top_k min_p frequency_penalty presence_penalty
repetition_penalty min_new_tokens n json_schema regex ebnf structural_tag ignore_eos skip_special_tokens
spaces_between_special_tokens no_stop_trim custom_params stream_interval logit_bias sampling_seed"""
SGLANG = """
rid text input_ids input_embeds image_data video_data audio_data sampling_params return_logprob logprob_start_len
top_logprobs_num token_ids_logprob return_text_in_logprobs stream return_hidden_states return_routed_experts modalities
session_params lora_path lora_id custom_logit_processor bootstrap_host bootstrap_port bootstrap_room data_parallel_rank
background priority extra_key return_bytes return_entropy"""
HINTS = {"prompt_cache_options", "prompt_cache_retention", "log_metrics", "conversation_id", "no_logs", "custom_labels"}


def unknown(names: Iterable[str], *models: type[BaseModel]) -> list[str]:
    """Those that would be ignored without anybody having thought of it."""
    return [name for name in names if not any(name in model.model_fields for model in models)
            and name not in REFUSED and name not in ASKS_NOTHING and name not in HINTS]


def test_every_field_of_openai() -> None:
    assert unknown([*chat_params.CompletionCreateParamsBase.__annotations__, "stream"], ChatRequest) == []
    assert unknown([*text_params.CompletionCreateParamsBase.__annotations__, "stream"], CompletionRequest) == []


def test_every_field_of_vllm() -> None:
    assert unknown(VLLM.split(), ChatRequest, CompletionRequest) == []


def test_every_field_of_sglang() -> None:
    assert unknown([SAMPLING.get(name, name) for name in SGLANG_SAMPLING.split()], CompletionRequest) == []
    assert unknown(SGLANG.split(), GenerateRequest, CompletionRequest) == []


def rows() -> dict[str, str]:
    """Field -> what the page says of it."""
    found: dict[str, str] = {}
    for line in DOCS.read_text().split("## Every field")[1].split("\n## ")[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `"):
            found |= dict.fromkeys(re.findall(r"`([a-z_]+)`", cells[0]), cells[1])
    return found


def test_the_page_says_of_each_field_what_the_code_does() -> None:
    said = rows()
    theirs = {*VLLM.split(), *SGLANG_SAMPLING.split(), *text_params.CompletionCreateParamsBase.__annotations__}
    left_out = {"text", "prompt", "model", "stream", "stream_options", "messages", "user", "documents", "echo"}
    assert theirs - left_out - said.keys() == set(), "fields without a row"
    for name, verdict in said.items():
        ours = SAMPLING.get(name, name)
        honoured = any(ours in model.model_fields for model in (ChatRequest, CompletionRequest, GenerateRequest))
        refused = ours in REFUSED or (ours in ASKS_NOTHING and not honoured)
        assert verdict.startswith("refused" if refused else "yes"), (name, verdict)


# ------------------------------------------------------------------------------------------------ what some of them do
async def test_best_of_returns_the_likeliest(api: Api) -> None:
    """Of the same seed's choices, the n with the highest log-probability a token, best first."""
    every = (await api.complete("ab", n=6, seed=4, logprobs=0, max_tokens=8)).json()

    def mean(choice: dict) -> float:
        scores = choice["logprobs"]["token_logprobs"]
        return sum(scores) / len(scores)
    want = sorted(every["choices"], key=mean, reverse=True)[:2]
    got = (await api.complete("ab", n=2, best_of=6, seed=4, max_tokens=8)).json()
    assert [c["index"] for c in got["choices"]] == [0, 1] and all(c["logprobs"] is None for c in got["choices"])
    assert [c["text"] for c in got["choices"]] == [c["text"] for c in want]
    assert got["usage"]["completion_tokens"] == every["usage"]["completion_tokens"]
    several = (await api.complete(["ab", "cd"], best_of=3, max_tokens=4)).json()
    assert [c["index"] for c in several["choices"]] == [0, 1]


async def test_truncation_to_what_fits() -> None:
    async with make_api(CoreOptions(max_model_len=32)) as api:
        answer = await api.complete("x" * 100, truncate_prompt_tokens=-1, max_tokens=8)
        assert answer.status_code == 200 and answer.json()["usage"]["prompt_tokens"] == 24
        assert (await api.complete("x" * 100, truncate_prompt_tokens=0)).status_code == 400
        assert (await api.complete("x" * 100, truncate_prompt_tokens=-2)).status_code == 400


@pytest.mark.parametrize(("body", "param", "word"), [
    ({"logit_processors": [{"name": "ban"}]}, "logit_processors", "this server has none"),
    ({"logit_processors": [{"name": "ban", "parms": {}}]}, "logit_processors[0].parms", ""),
    ({"logit_processors": [{}]}, "logit_processors[0].name", ""),
    ({"custom_logit_processor": "{}"}, "custom_logit_processor", "--enable-custom-logit-processor"),
    ({"custom_params": {"a": 1}}, "custom_params", "custom_logit_processor"),
    ({"logits_processors": ["a.b"]}, "logits_processors", "logit_processors"),
    ({"vllm_xargs": {"a": 1}}, "vllm_xargs", "logit_processors"),
])
async def test_logit_processors_that_are_not_there(api: Api, body: dict, param: str, word: str) -> None:
    error = (await api.complete("ab", **body)).json()["error"]
    assert error["param"] == param and word in error["message"]


async def test_logprobs_beyond_the_limit(api: Api) -> None:
    error = (await api.complete("ab", logprobs=-1)).json()["error"]
    assert error["param"] == "logprobs" and "--max-logprobs" in error["message"]


@pytest.mark.parametrize("path, fields", [
    *(("/v1/chat/completions", {name: value}) for name, value in (
        ("best_of", 2), ("echo", True), ("prompt", "x"), ("max_new_tokens", 6))),
    *(("/v1/completions", {name: value}) for name, value in (
        ("top_logprobs", 3), ("continue_final_message", True), ("reasoning_effort", "low"), ("max_new_tokens", 6),
        ("messages", [{"role": "user", "content": "x"}])))], ids=str)
async def test_a_field_of_another_route_is_refused_by_its_name(api: Api, path: str, fields: dict):
    ask = api.chat if path == "/v1/chat/completions" else api.complete
    answer = await ask("x", **fields)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["code"] == "unsupported_parameter", answer.text
    assert error["param"] == next(iter(fields)) and error["message"].startswith(error["param"])
    nothing = {"best_of": 1, "echo": False, "top_logprobs": None, "continue_final_message": False}
    answer = await ask("x", **nothing)
    assert answer.status_code == 200 and "x-stretto-ignored" not in answer.headers


async def test_a_completion_knows_the_newer_name_of_its_limit(api: Api):
    answer = await api.complete("words", max_tokens=None, max_completion_tokens=6)
    assert answer.json()["usage"]["completion_tokens"] == 6 and "x-stretto-ignored" not in answer.headers


def test_a_seed_of_minus_one_is_a_random_one():
    body = {"prompt": "x", "seed": -1}
    assert to_sampling(CompletionRequest.model_validate(body), {}).seed is None
    assert to_sampling(CompletionRequest.model_validate(body | {"seed": -2}), {}).seed == -2


@pytest.mark.parametrize("name", ["/sleep", "/is_sleeping", "/reset_prefix_cache"])
async def test_what_is_not_alike_is_not_suggested(api: Api, name: str):
    assert "Did you mean" not in (await api.http.post(name)).json()["error"]["message"]
    assert "'/v1/chat/completions'" in (await api.http.post("/v1/chat/completion")).json()["error"]["message"]


async def test_an_empty_salt_is_refused(api: Api):
    """Whoever sends one believes that the cache is theirs."""
    answer = await api.chat("x", cache_salt="")
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "cache_salt"
    answer = await api.http.post("/v1/messages", json={
        "max_tokens": 0, "messages": [{"role": "user", "content": "x"}]})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "max_tokens"
