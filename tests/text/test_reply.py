"""Answers taken apart: the parts follow from the text alone, however it was cut."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.text.reply import CallArguments, CallBegin, Content, MarkedReply, Part, Reasoning, TemplateReply

PIECES = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_", "</think", "{", "}", '"', "\\", '"name"',
          '{"name": "f", "arguments": ', '{"name": "f", "arguments": {"x": "}</tool_call>"}}', "[1, {}]", "word", " ",
          "\n", "é", '{"arguments": {"a": 1}, "name": "g"}', '{"name": "h"}', "\\\"", "<", ">")
CALLED = '<tool_call>\n{"name": "f", "arguments": {"x": "a}b\\"<", "y": [1, {}]}}\n</tool_call>'


def message(parts: list[Part]) -> dict:
    """What a client puts together."""
    calls: list[list[str]] = []
    for part in parts:
        if isinstance(part, CallBegin):
            assert part.call == len(calls)
            calls.append([part.name, ""])
        elif isinstance(part, CallArguments):
            assert part.call == len(calls) - 1
            calls[-1][1] += part.text
    return {"reasoning": "".join(p.text for p in parts if isinstance(p, Reasoning)),
            "content": "".join(p.text for p in parts if isinstance(p, Content)), "calls": calls}


def read(pieces: list[str], **options) -> dict:
    reply = MarkedReply(**options)
    return message([part for piece in pieces for part in reply.feed(piece)] + reply.finish())


def test_reasoning_words_and_calls():
    text = "<think>\nLet me\nsee. \n</think>\n\nI will ask. \n" + CALLED + "\n" + CALLED
    got = read([text], reasoning=True, tools=True)
    assert got["reasoning"] == "Let me\nsee." and got["content"] == "I will ask."
    assert [name for name, _ in got["calls"]] == ["f", "f"]
    assert json.loads(got["calls"][0][1]) == {"x": 'a}b"<', "y": [1, {}]}


@pytest.mark.parametrize(("text", "options", "content"), [
    ("  plain text \n", dict(reasoning=True, tools=True), "  plain text \n"),
    ("a <tool_call> b", dict(tools=False), "a <tool_call> b"),
    ("<think>", dict(), "<think>"),
    ("x <tool_call>no json</tool_call> y", dict(tools=True), "x<tool_call>no json</tool_call> y"),
    ("x <tool_call>[1]", dict(tools=True), "x<tool_call>[1]"),
    ("</think> x", dict(reasoning=True), "</think> x"),
    ("why</think>\n x", dict(thinking=True), "x"),
])
def test_what_is_no_call_is_content(text: str, options: dict, content: str):
    got = read([text], **options)
    assert got["content"] == content and not got["calls"]


def test_arguments_stream_while_they_are_written():
    reply, seen = MarkedReply(tools=True), []
    for char in CALLED:
        seen += reply.feed(char)
    arguments = [part for part in seen if isinstance(part, CallArguments)]
    assert len(arguments) > 20 and reply.calls == 1


@pytest.mark.parametrize("cut", range(len(CALLED)))
def test_case_15_01_a_call_that_is_cut_anywhere(cut: int):
    got = read([CALLED[:cut]], tools=True)
    for _, arguments in got["calls"]:
        assert '{"x": "a}b\\"<", "y": [1, {}]}'.startswith(arguments)


@pytest.mark.parametrize("text", [
    '<tool_call>{"arguments": {"a": 1}, "name": "g"}</tool_call>', '<tool_call>{"name": "g", "arguments": "{}"}'
    '</tool_call>', '<tool_call> {"name": "g"} </tool_call>', '<tool_call>{"name": "g", "parameters": {}}</tool_call>'])
def test_other_orders_and_forms_of_a_call(text: str):
    (name, arguments), = read([text], tools=True)["calls"]
    assert name == "g" and isinstance(json.loads(arguments), dict)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=14), st.sampled_from(
    [dict(tools=True), dict(tools=True, reasoning=True), dict(tools=True, thinking=True), dict(reasoning=True)]),
    st.integers(0, 2**32))
def test_every_partition_gives_the_same_message(pieces: list[str], options: dict, seed: int):
    text, rng = "".join(pieces), random.Random(seed)
    whole = read([text], **options)
    assert read(list(text), **options) == whole
    cuts = sorted(rng.sample(range(len(text) + 1), min(len(text) + 1, 4)))
    assert read([text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])], **options) == whole


TEMPLATE = {
    "start_anchor": "<|assistant|>", "defaults": {"role": "assistant"}, "fields": {
        "thinking": {"open": "<|think|>", "close": "<|/think|>", "content": "text"},
        "content": {"content": "text"},
        "tool_calls": {"open": "<|call|>", "close": "<|/call|>", "content": "json", "repeats": True}}}


def test_a_response_template_of_the_model():
    pytest.importorskip("transformers.utils.chat_parsing")
    text = 'hm<|think|>why<|/think|>words<|call|>{"name": "f", "arguments": {"a": 1}}<|/call|>'
    found = []
    for pieces in ([text], list(text)):
        reply = TemplateReply(TEMPLATE, "")
        found.append(message([part for piece in pieces for part in reply.feed(piece)] + reply.finish()))
    assert found[0] == found[1] and found[0]["reasoning"] == "why" and found[0]["calls"] == [["f", '{"a": 1}']]
