"""OpenAI's own Python client against the server: what it can ask and how it sees errors."""

from __future__ import annotations

from collections.abc import AsyncIterator

import openai
import pytest

from tests.serve.conftest import Api, make_served
from tests.serve.fakes import CoreOptions


@pytest.fixture
async def client(served: Api) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


MESSAGES = [{"role": "user", "content": "say:hello 🙂"}]


async def test_chat(client: openai.AsyncOpenAI):
    answer = await client.chat.completions.create(model="fake/tiny", messages=MESSAGES, logprobs=True, top_logprobs=2)
    assert answer.choices[0].message.content == "hello 🙂" and answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.content
    assert answer._request_id


async def test_chat_stream(client: openai.AsyncOpenAI):
    stream = await client.chat.completions.create(model="fake/tiny", messages=MESSAGES, stream=True,
                                                  stream_options={"include_usage": True})
    text, usage = "", None
    async for chunk in stream:
        text += chunk.choices[0].delta.content or "" if chunk.choices else ""
        usage = chunk.usage or usage
    assert text == "hello 🙂" and usage is not None and usage.completion_tokens == len("hello 🙂".encode()) + 1


async def test_the_clients_own_stream_helper(client: openai.AsyncOpenAI):
    async with client.chat.completions.stream(model="fake/tiny", messages=MESSAGES) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == "hello 🙂"


async def test_completions_and_models(client: openai.AsyncOpenAI):
    answer = await client.completions.create(model="fake/tiny", prompt=["say:a", "say:b"], logprobs=1)
    assert [choice.text for choice in answer.choices] == ["a", "b"]
    extra = await client.completions.create(model="fake/tiny", prompt="say:abc", extra_body={"stop_token_ids": [98]})
    assert extra.choices[0].text == "a"
    assert [model.id async for model in client.models.list()] == ["fake/tiny"]
    assert (await client.models.retrieve("fake/tiny")).id == "fake/tiny"


async def test_errors_have_the_clients_types(client: openai.AsyncOpenAI):
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(model="fake/tiny", messages=MESSAGES, temperature=-1)
    assert bad.value.param == "temperature" and bad.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="gpt-4", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.InternalServerError):
        await client.chat.completions.create(model="fake/tiny", messages=[{"role": "user", "content": "crash:x"}])


async def test_a_stream_that_breaks_raises_in_the_client():
    async with (make_served(CoreOptions(step_seconds=0.01)) as served,
                openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client):
        stream = await client.completions.create(model="fake/tiny", prompt="x", max_tokens=400, stream=True)
        with pytest.raises(openai.APIError, match="aborted"):
            async for _ in stream:
                await served.http.post("/abort_request", json={"abort_all": True})


async def test_keys():
    async with make_served(api_keys=("secret",)) as served:
        for key, fine in (("secret", True), ("wrong", False)):
            async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key=key, max_retries=0) as client:
                if fine:
                    await client.models.list()
                else:
                    with pytest.raises(openai.AuthenticationError):
                        await client.models.list()
