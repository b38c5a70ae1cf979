"""langchain-openai. Arguments: the server's address, its key."""

import asyncio
import sys

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

url, key = sys.argv[1:]
model = ChatOpenAI(model="fake/tiny", base_url=f"{url}/v1", api_key=key, max_tokens=200, max_retries=0)
asked = [SystemMessage("be kind"), HumanMessage("say:hello 🙂")]

answer = model.invoke(asked)
assert answer.content == "hello 🙂" and answer.usage_metadata["output_tokens"] > 0
pieces = [chunk.content for chunk in model.stream(asked)]
assert "".join(pieces) == "hello 🙂" and len(pieces) > 2
assert [each.content for each in model.batch(["say:a", "say:b"])] == ["a", "b"]
assert asyncio.run(model.ainvoke("say:later")).content == "later"


@tool
def add(a: int) -> int:
    """Adds."""
    return a


said = 'say:<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
called = model.bind_tools([add], tool_choice="required").invoke(said)
assert called.tool_calls[0]["name"] == "add" and called.tool_calls[0]["args"] == {"a": 1}

responses = ChatOpenAI(model="fake/tiny", base_url=f"{url}/v1", api_key=key, use_responses_api=True, max_tokens=50)
assert responses.invoke("say:via responses").content[0]["text"] == "via responses"
print("ok")
