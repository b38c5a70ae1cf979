"""Anthropic's own client. Arguments: the server's address, its key."""

import sys

import anthropic

url, key = sys.argv[1:]
client = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)
asked = [{"role": "user", "content": "say:hello 🙂"}]

answer = client.messages.create(model="fake/tiny", max_tokens=50, system="be kind", messages=asked)
assert answer.content[0].text == "hello 🙂" and answer.stop_reason == "end_turn" and answer.role == "assistant"
assert answer.usage.input_tokens > 0 and answer.usage.output_tokens == len("hello 🙂".encode()) + 1

with client.messages.stream(model="fake/tiny", max_tokens=50, messages=asked) as stream:
    pieces = list(stream.text_stream)
    final = stream.get_final_message()
assert "".join(pieces) == "hello 🙂" == final.content[0].text and len(pieces) > 1 and final.usage.output_tokens > 0

cut = client.messages.create(model="fake/tiny", max_tokens=3, messages=[{"role": "user", "content": "say:abcdef"}])
assert cut.stop_reason == "max_tokens" and cut.content[0].text == "abc"
counted = client.messages.count_tokens(model="fake/tiny", messages=asked)
assert counted.input_tokens > 0

tool = {"name": "add", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
said = 'say:<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
called = client.messages.create(model="fake/tiny", max_tokens=200, tools=[tool], tool_choice={"type": "any"},
                                messages=[{"role": "user", "content": said}])
assert called.stop_reason == "tool_use" and called.content[-1].name == "add" and called.content[-1].input == {"a": 1}

for wrong, error in ((dict(model="gpt-4"), anthropic.NotFoundError),
                     (dict(extra_body={"temperature": -1}), anthropic.BadRequestError)):
    fields = dict(model="fake/tiny", max_tokens=5, messages=asked) | wrong
    try:
        client.messages.create(**fields)
    except error as e:
        assert e.body["type"] == "error" and e.body["error"]["message"], e.body
    else:
        raise AssertionError(f"{wrong} was taken")
try:
    anthropic.Anthropic(base_url=url, api_key="wrong", max_retries=0).messages.create(
        model="fake/tiny", max_tokens=5, messages=asked)
except anthropic.AuthenticationError:
    print("ok")
