"""litellm, as OpenAI's server and as one of vLLM's. Arguments: the server's address, its key."""

import asyncio
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the network at import
import litellm

url, key = sys.argv[1:]
asked = [{"role": "user", "content": "say:hello 🙂"}]
for provider in ("openai", "hosted_vllm"):
    fields = dict(model=f"{provider}/fake/tiny", api_base=f"{url}/v1", api_key=key, messages=asked, max_tokens=50)
    answer = litellm.completion(**fields)
    assert answer.choices[0].message.content == "hello 🙂" and answer.usage.completion_tokens > 0
    chunks = list(litellm.completion(**fields, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "hello 🙂"
    answer = asyncio.run(litellm.acompletion(**fields, logprobs=True, top_logprobs=2))
    assert answer.choices[0].logprobs.content[0].top_logprobs
    try:
        litellm.completion(**fields | {"temperature": -1})
    except litellm.BadRequestError as e:
        assert "temperature" in str(e)
    else:
        raise AssertionError("temperature -1 was taken")
text = litellm.text_completion(model="openai/fake/tiny", api_base=f"{url}/v1", api_key=key, prompt="say:ab",
                               max_tokens=9)
assert text.choices[0].text == "ab"
print("ok")
