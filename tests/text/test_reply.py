"""Answers taken apart: the parts follow from the text alone, however it was cut."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_parsing import parse_response

from stretto.text.call_forms import HERMES, CallForm, Hermes, Llama, Mistral
from stretto.text.families import form_of
from stretto.text.reply import CallArguments, CallBegin, Content, MarkedReply, Part, Reasoning
from stretto.text.reply_template import HARMONY, TemplateReply
from stretto.text.tag_forms import TagForm
from stretto.text.tags import ARGUMENT, FUNCTION, types_of, value_of

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
    got = read([text], reasoning=True, form=HERMES)
    assert got["reasoning"] == "Let me\nsee." and got["content"] == "I will ask."
    assert [name for name, _ in got["calls"]] == ["f", "f"]
    assert json.loads(got["calls"][0][1]) == {"x": 'a}b"<', "y": [1, {}]}


@pytest.mark.parametrize(("text", "options", "content"), [
    ("  plain text \n", dict(reasoning=True, form=HERMES), "  plain text \n"),
    ("a <tool_call> b", dict(form=None), "a <tool_call> b"),
    ("<think>", dict(), "<think>"),
    ("x <tool_call>no json</tool_call> y", dict(form=HERMES), "x <tool_call>no json</tool_call> y"),
    ("x <tool_call>[1]", dict(form=HERMES), "x <tool_call>[1]"),
    ("</think> x", dict(reasoning=True), "</think> x"),
    ("why</think>\n x", dict(thinking=True), "x"),
])
def test_what_is_no_call_is_content(text: str, options: dict, content: str):
    got = read([text], **options)
    assert got["content"] == content and not got["calls"]


def test_arguments_stream_while_they_are_written():
    reply, seen = MarkedReply(form=HERMES), []
    for char in CALLED:
        seen += reply.feed(char)
    arguments = [part for part in seen if isinstance(part, CallArguments)]
    assert len(arguments) > 20 and reply.calls == 1


@pytest.mark.parametrize("cut", range(len(CALLED)))
def test_case_15_01_a_call_that_is_cut_anywhere(cut: int):
    got = read([CALLED[:cut]], form=HERMES)
    for _, arguments in got["calls"]:
        assert '{"x": "a}b\\"<", "y": [1, {}]}'.startswith(arguments)


@pytest.mark.parametrize("text", [
    '<tool_call>{"arguments": {"a": 1}, "name": "g"}</tool_call>', '<tool_call>{"name": "g", "arguments": "{}"}'
    '</tool_call>', '<tool_call> {"name": "g"} </tool_call>', '<tool_call>{"name": "g", "parameters": {}}</tool_call>'])
def test_other_orders_and_forms_of_a_call(text: str):
    (name, arguments), = read([text], form=HERMES)["calls"]
    assert name == "g" and isinstance(json.loads(arguments), dict)


LIST, NAMED, LLAMA = Mistral(False), Mistral(True), Llama()
F = '"name": "f", "arguments": {"x": "a}b\\"<"}'


@pytest.mark.parametrize(("form", "text", "content", "calls"), [
    (LLAMA, '{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
    (LLAMA, ' {"type": "function", "name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}', "",
     [("f", '{"a": 1}'), ("g", "{}")]),
    (LLAMA, 'Look: <|python_tag|>{"name": "f", "parameters": {"a": {"b": [1]}}}', "Look:",
     [("f", '{"a": {"b": [1]}}')]),
    (LLAMA, '{"parameters": {"a": 1}, "name": "f"}', "", [("f", '{"a": 1}')]),
    (LLAMA, '{"answer": {"name": "f"}} and more', '{"answer": {"name": "f"}} and more', []),
    (LLAMA, '{"name": "Ada", "age": 36} is she', '{"name": "Ada", "age": 36} is she', []),
    (LLAMA, 'a {"name": "f", "parameters": {}}', 'a {"name": "f", "parameters": {}}', []),
    (LLAMA, '<|python_tag|>search.call(query="x")', '<|python_tag|>search.call(query="x")', []),
    (LLAMA, '{"name": "f", "parameters": {}}; words', "; words", [("f", "{}")]), (LLAMA, "{", "{", []),
    (LIST, f'I ask. [TOOL_CALLS] [{{{F}}}, {{"name": "g", "arguments": {{}}, "id": "abcDEF123"}}]', "I ask.",
     [("f", '{"x": "a}b\\"<"}'), ("g", "{}")]),
    (LIST, '[TOOL_CALLS][{"arguments": {"a": 1}, "name": "f"}, {"name": "g"}] so', "so",
     [("f", '{"a": 1}'), ("g", "{}")]),
    (LIST, '[TOOL_CALLS][1, 2] so', "[TOOL_CALLS][1, 2] so", []), (LIST, "[TOOL_CALLS]", "", []),
    (LIST, '[TOOL_CALLS]{"name": "f", "arguments": {}}', "", [("f", "{}")]),
    (NAMED, '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]abc123XYZ[ARGS]{}', "", [("f", '{"a": 1}'), ("g", "{}")]),
    (NAMED, 'a [TOOL_CALLS]f{"a": 1} b', "a b", [("f", '{"a": 1}')]),
    (NAMED, '[TOOL_CALLS] no call [TOOL_CALLS]f[ARGS]{}', "[TOOL_CALLS] no call", [("f", "{}")]),
])
def test_forms_of_calls(form: CallForm, text: str, content: str, calls: list[tuple[str, str]]):
    for pieces in ([text], list(text)):
        got = read(pieces, form=form)
        assert (got["content"], [tuple(call) for call in got["calls"]]) == (content, calls)


@pytest.mark.parametrize(("form", "text"), [
    (LLAMA, '{"name": "f", "parameters": {"some": "value"}}'), (NAMED, '[TOOL_CALLS]f[ARGS]{"some": "value"}'),
    (LIST, '[TOOL_CALLS] [{"name": "f", "arguments": {"some": "value"}}]')])
def test_arguments_of_every_form_stream(form: CallForm, text: str):
    reply = MarkedReply(form=form)
    parts = [part for char in text for part in reply.feed(char)]
    assert sum(isinstance(part, CallArguments) for part in parts) == len('{"some": "value"}')


@pytest.mark.parametrize(("template", "form"), [
    ("{{ tools }}<tool_call>{{ call }}</tool_call>", Hermes), ("[INST] [AVAILABLE_TOOLS] [TOOL_CALLS] [", Mistral),
    ("[TOOL_CALLS]' + name + '[ARGS]'", Mistral), ("<|start_header_id|> <|python_tag|>", Llama),
    ("""'{"name": "' + tool_call.name + '", ' }}{{- '"parameters": '""", Llama), ("<start_of_turn>", type(None)),
    ("<tool_call> <function=", TagForm), ("<tool_call> <arg_key>", TagForm),
])
def test_the_form_is_told_by_the_chat_template(template: str, form: type):
    found = form_of(template)
    assert isinstance(found, form)
    if isinstance(found, Mistral):
        assert found.named == ("[ARGS]" in template)
    if isinstance(found, TagForm):
        assert found.tags is (FUNCTION if "<function=" in template else ARGUMENT)


OTHERS = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "f", "[", "]", ", ", "; ", "{", "}", '"name": "g"',
          '{"name": "f", "parameters": {"a": "}"}}', '{"name": "f", "arguments": {}}', ', "id": "a1"', '{"a": 1}',
          "word", " ", "\n", '"', "<think>", "</think>")


@settings(max_examples=400, deadline=None)
@given(st.lists(st.one_of(st.sampled_from(PIECES), st.sampled_from(OTHERS)), max_size=14), st.sampled_from(
    [dict(form=form) | more for form in (HERMES, LIST, NAMED, LLAMA) for more in (
        {}, dict(reasoning=True), dict(thinking=True))] + [dict(reasoning=True)]), st.integers(0, 2**32))
def test_every_partition_gives_the_same_message(pieces: list[str], options: dict, seed: int):
    text, rng = "".join(pieces), random.Random(seed)
    whole = read([text], **options)
    assert read(list(text), **options) == whole
    cuts = sorted(rng.sample(range(len(text) + 1), min(len(text) + 1, 4)))
    assert read([text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])], **options) == whole


# --------------------------------------------------------------------------------------------- arguments between tags
SCHEMA = {"type": "object", "required": ["n"], "$defs": {"o": {"type": "object"}}, "properties": {
    "n": {"type": "integer"}, "s": {"type": "string"}, "o": {"$ref": "#/$defs/o"},
    "m": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "e": {"enum": [1, "one"]}}}
LINES = 'two\n"li\\nes"\n\n é '
TAGGED = {"form": TagForm(FUNCTION), "schemas": {"f": SCHEMA}}
PAIRED = {"form": TagForm(ARGUMENT), "schemas": {"f": SCHEMA}}


def tagged(name: str, **values: str) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def paired(name: str, **values: str) -> str:
    inner = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in values.items())
    return f"<tool_call>{name}\n{inner}</tool_call>"


@pytest.mark.parametrize(("options", "write"), [(TAGGED, tagged), (PAIRED, paired)], ids=["function", "argument"])
@pytest.mark.parametrize(("values", "arguments"), [
    ({}, {}), ({"n": "3", "s": "4"}, {"n": 3, "s": "4"}), ({"s": LINES}, {"s": LINES}),
    ({"o": '{"a": [1, {}], "b": "</x>"}', "m": "null"}, {"o": {"a": [1, {}], "b": "</x>"}, "m": None}),
    ({"m": "words", "e": "1"}, {"m": "words", "e": 1}), ({"e": "one", "unknown": "3"}, {"e": "one", "unknown": "3"}),
    ({"n": "three", "o": "{"}, {"n": "three", "o": "{"}), ({"n": "2.0", "s": ""}, {"n": 2, "s": ""}),
    ({"n": "1e999", "s": "</para</arg_value"}, {"n": "1e999", "s": "</para</arg_value"}),
    ({"o": '{"a": "\\ud800"}', "n": " True "}, {"o": {"a": "\ud800"}, "n": " True "}), ({"s": " \t"}, {"s": " \t"}),
])
def test_values_between_tags(options: dict, write: Callable[..., str], values: dict, arguments: dict):
    text = f"So: {write('f', **values)}\n{write('g', **values)} done"
    whole = read([text], **options)
    assert whole == read(list(text), **options)
    assert whole["content"] == "So: done" and [name for name, _ in whole["calls"]] == ["f", "g"]
    assert json.loads(whole["calls"][0][1]) == arguments
    assert json.loads(whole["calls"][1][1]) == values  # of a function that nobody described
    assert all(call[1].encode() for call in whole["calls"])  # what cannot be sent would raise


@pytest.mark.parametrize(("options", "text"), [
    (TAGGED, tagged("f", s="some text")), (PAIRED, paired("f", s="some text"))], ids=["function", "argument"])
def test_strings_between_tags_stream(options: dict, text: str):
    reply = MarkedReply(**options)
    parts = [part.text for char in text for part in reply.feed(char) if isinstance(part, CallArguments)]
    assert parts[-10:] == [*"some text", '"}'] or parts[-11:] == [*"some text", '"', "}"]


@pytest.mark.parametrize(("options", "text"), [
    (TAGGED, tagged("f", n="3", s="abc")), (PAIRED, paired("f", n="3", s="abc"))], ids=["function", "argument"])
def test_case_15_01_a_call_between_tags_that_is_cut_anywhere(options: dict, text: str):
    """What came is the beginning of what would have come: nothing is closed that was not closed."""
    (_, complete), = read([text], **options)["calls"]
    for cut in range(len(text)):
        got = read([text[:cut]], **options)
        assert got == read(list(text[:cut]), **options)
        assert len(got["calls"]) < 2 and not (got["calls"] and got["content"])
        assert all(complete.startswith(arguments) for _, arguments in got["calls"])


@pytest.mark.parametrize(("options", "text", "content", "calls"), [
    (TAGGED, "<tool_call>\n<function=f>\n<parameter=s>\nab\n</function>\n</tool_call>", "", [["f", '{"s": "ab"}']]),
    (TAGGED, "<tool_call><function=f><parameter=s>ab</parameter><parameter=n>1</parameter></function></tool_call>", "",
     [["f", '{"s": "ab", "n": 1}']]),
    (TAGGED, "<tool_call>\n<function=f>\n</tool_call> so", "so", [["f", "{}"]]),
    (TAGGED, "<tool_call>\n<function=f>\n</function> so", "so", [["f", "{}"]]),
    (TAGGED, '<tool_call>{"name": "f"}</tool_call>', '<tool_call>{"name": "f"}</tool_call>', []),
    (TAGGED, "<tool_call>\n<function=f", "<tool_call>\n<function=f", []),
    (TAGGED, tagged("f", s="</function> </tool_call>"), "", [["f", '{"s": "</function> </tool_call>"}']]),
    (PAIRED, "<tool_call>f<arg_key>s</arg_key><arg_value>\nab</arg_value></tool_call>", "", [["f", '{"s": "\\nab"}']]),
    (PAIRED, "<tool_call>f(x) </tool_call>", "<tool_call>f(x) </tool_call>", []),
    (PAIRED, "<tool_call>f\n<arg_key>s</arg_key></tool_call>", "", [["f", "{}"]]),
    (PAIRED, "<tool_call>f", "<tool_call>f", []),
])
def test_calls_between_tags_that_are_not_as_they_should_be(options: dict, text: str, content: str, calls: list):
    for pieces in ([text], list(text)):
        got = read(pieces, **options)
        assert (got["content"], got["calls"]) == (content, calls)


BARE = tagged("f", n="3").removeprefix("<tool_call>\n")
FENCED = f"Look:\n~~~ xml\n```\n{BARE}\n~~~\n"


@pytest.mark.parametrize(("text", "content", "calls"), [
    (BARE, "", ["f"]), (f"So:\n  {BARE} done", "So:\n  done", ["f"]),
    (tagged("g") + "<function=f></function>", "", ["g", "f"]), (f"```\nx\n```\n{BARE}", "```\nx\n```", ["f"]),
    ("<function=f>\n<parameter=", "", ["f"]), (f"<think>\n{BARE}</think>{BARE}", "", ["f"]),
    (f"~~~{'x' * 300}\n~~~\n{BARE}", f"~~~{'x' * 300}\n~~~", ["f"]),
    (f"`` ```x``` ``\n```a`\n{BARE}", "`` ```x``` ``\n```a`", ["f"]), (FENCED + BARE, FENCED.rstrip(), ["f"]),
])
def test_calls_whose_marker_was_left_out(text: str, content: str, calls: list[str]):
    for pieces in ([text], list(text)):
        got = read(pieces, **TAGGED, reasoning=True)
        assert (got["content"], [name for name, _ in got["calls"]]) == (content, calls)


@pytest.mark.parametrize("text", [
    "In XML you write `<function=main>` and then go on. More text.", "You write\n<function=f>\nand go on. More.\n",
    f"So: {BARE}", BARE.replace("=f>", "=main>"), FENCED, f"````\n```\n{BARE}\n", "A\n<function=f", "A\n<function=f> ",
    "A\n<function=f>\n<parameter", "<function=f></tool_call>", "A <function= or\n<function=\n, <function=f <b> <",
    "<function=f\n><parameter=n>", "<function=<function=f></function>"])
def test_prose_that_names_a_tag_stays_prose(text: str):
    for pieces in ([text], list(text)):
        assert read(pieces, **TAGGED) == {"reasoning": "", "content": text, "calls": []}
    assert read([text], **TAGGED, held=True)["content"] == text


def test_under_a_grammar_no_call_begins_without_its_marker():
    assert read([BARE], **TAGGED, held=True) == {"reasoning": "", "content": BARE, "calls": []}


@pytest.mark.parametrize(("schema", "types"), [
    ({}, ()), ({"type": "string"}, ("string",)), ({"type": ["integer", "null"]}, ("integer", "null")),
    ({"anyOf": [{"type": "object"}, {"$ref": "#/$defs/o"}, {"const": True}]}, ("object", "boolean")),
    ({"enum": ["a", 1, None]}, ("string", "integer", "null")), ({"$ref": "#/nowhere"}, ()), ({"type": 3}, ()),
    ({"$ref": "#"}, ("object",)), ({"allOf": [{"type": "number"}]}, ("number",)), (True, ()),
    ({"type": "array", "nullable": True}, ("array", "null")), ({"$ref": "#/properties/loop"}, ()),
    ({"anyOf": 3, "enum": "x"}, ())])
def test_types_of_a_place_in_a_schema(schema: Any, types: tuple[str, ...]):
    root = SCHEMA | {"properties": {"loop": {"$ref": "#/properties/loop"}}}
    assert types_of(schema, root) == types


def test_values_of_types():
    for text, types, value in (("3", ("number",), 3), ("3.5", ("integer",), "3.5"), ("NaN", ("number",), "NaN"),
                               ('"a"', ("string", "integer"), '"a"'), ("False", ("boolean",), False), ("9" * 5000, (
                                   "integer",), "9" * 5000), ("[" * 10000, ("array",), "[" * 10000)):
        assert value_of(text, types) == value


TAG_PIECES = ("<tool_call>", "</tool_call>", "<function=f>", "<function=", "<parameter=s>", "<parameter=n>", "\n", "3",
              "</parameter>", "ab", '"', "</function>", "f", "<arg_key>", "s", "</arg_key>", "<arg_value>", "<", "{}",
              "</arg_value>", "</para", "n", " ", "<think>", "</think>", "\n```\n", "\n<function=f>\n<parameter=")


@settings(max_examples=400, deadline=None)
@given(st.lists(st.sampled_from(TAG_PIECES), max_size=24), st.sampled_from(
    [form | more for form in (TAGGED, PAIRED) for more in (
        {}, dict(reasoning=True), dict(thinking=True), dict(held=True))]),
    st.integers(0, 2**32))
def test_every_partition_of_calls_between_tags_gives_the_same_message(pieces: list[str], options: dict, seed: int):
    text, rng = "".join(pieces), random.Random(seed)
    whole = read([text], **options)
    assert read(list(text), **options) == whole
    cuts = sorted(rng.sample(range(len(text) + 1), min(len(text) + 1, 4)))
    assert read([text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])], **options) == whole


# -------------------------------------------------------------------------------------------------- response templates
TEMPLATE = {
    "start_anchor": "<|assistant|>", "defaults": {"role": "assistant"}, "fields": {
        "thinking": {"open": "<|think|>", "close": "<|/think|>", "content": "text"},
        "content": {"content": "text"},
        "tool_calls": {"open": "<|call|>", "close": "<|/call|>", "content": "json", "repeats": True}}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {
    "n": {"type": "integer"}, "s": {"type": "string"}}}}}]


def read_template(template: Mapping, pieces: list[str], prompt: str = "") -> dict:
    reply = TemplateReply(template, prompt, TOOLS)
    return message([part for piece in pieces for part in reply.feed(piece)] + reply.finish())


@pytest.mark.parametrize(("template", "text", "reasoning", "content", "calls"), [
    (TEMPLATE, 'hm <|think|> why <|/think|>\nwords\n<|call|>{"name": "f", "arguments": {"a": 1}}<|/call|>', "why",
     "hm words", [["f", '{"a": 1}']]),
    (HARMONY, "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>final<|message|>Hello.",
     "Think.", "Hello.", []),
    (HARMONY, '<|channel|>analysis<|message|>T<|end|><|start|>assistant<|channel|>commentary to=functions.f '
     '<|constrain|>json<|message|>{"n": 3}<|call|>', "T", "", [["f", '{"n": 3}']]),
    (HARMONY, '<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.f<|channel|>commentary '
     'json<|message|>{"n": 3}', "", "I look.", [["f", '{"n": 3}']]),
])
def test_response_templates(template: Mapping, text: str, reasoning: str, content: str, calls: list):
    prompt = str(template["start_anchor"])
    for pieces in ([text], list(text), [text[: len(text) // 2], text[len(text) // 2 :]]):
        assert read_template(template, pieces, prompt) == {"reasoning": reasoning, "content": content, "calls": calls}
    ours = read_template(template, [text], prompt)
    theirs = parse_response(text, dict(template), prefix=prompt, tools=TOOLS)
    assert len(theirs.get("tool_calls", theirs.get("growing_calls", []))) == len(ours["calls"])
    if template is not TEMPLATE:  # a region that opens twice: theirs keeps the last one
        assert theirs.get("content", "") == ours["content"]


HARMONY_CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>'


def test_arguments_in_a_channel_stream():
    reply = TemplateReply(HARMONY, "<|start|>assistant")
    parts = [part.text for char in HARMONY_CALL + '{"some": "value"}<|call|>' for part in reply.feed(char)
             if isinstance(part, CallArguments)]
    assert parts == [*'{"some": "value"}']


@pytest.mark.parametrize(("said", "content", "calls"), [
    ("<|call|>", "", [["f", "{}"]]), (' {"a": {}} and<|call|>', "and", [["f", '{"a": {}}']]), ("", "", [["f", ""]]),
    ('{"a": "<', "", [["f", '{"a": "<']]), ("no<|call|>", "f <|constrain|>json<|message|>no", []),
    ('{"a": 1}<|call|><|start|>assistant' + HARMONY_CALL + '{"b": 2}<|call|>', "",
     [["f", '{"a": 1}'], ["f", '{"b": 2}']]),
    ('{"a": 1}<|call|><|start|>assistant<|channel|>final<|message|>so', "so", [["f", '{"a": 1}']]),
    (" " * 600 + '{"a": 1}<|call|>', "f <|constrain|>json<|message|>" + " " * 600 + '{"a": 1}', []),
])
def test_calls_in_channels_that_are_cut_or_no_calls(said: str, content: str, calls: list):
    for pieces in ([HARMONY_CALL + said], [*HARMONY_CALL, *said]):
        got = read_template(HARMONY, pieces, "<|start|>assistant")
        assert (got["content"], got["calls"]) == (content, calls)


def test_a_prompt_without_the_anchor_is_not_read_as_the_answer():
    said = "<|channel|>final<|message|>Yes."
    assert read_template(HARMONY, [said], "say <|channel|>analysis<|message|>")["content"] == "Yes."


@pytest.mark.parametrize(("text", "content", "calls"), [
    ("a<|call|>no json<|/call|>b", "ano json<|/call|>b", []), ("a<|call|>{}<|/call|>b", "a{}<|/call|>b", []),
    ('<|call|>{"name": "f"}<|/call|>a<|call|>{"name"', 'a{"name"', [["f", "{}"]]), ("a<|call|>", "a", []),
])
def test_what_a_template_cannot_read_is_content(text: str, content: str, calls: list):
    for pieces in ([text], list(text), [text[:5], text[5:]]):
        got = read_template(TEMPLATE, pieces)
        assert (got["content"], got["calls"]) == (content, calls)


MARKS = ("<|think|>", "<|/think|>", "<|call|>", "<|/call|>", '{"name": "f", "arguments": {"a": 1}}', "{", "words",
         " ", "\n", "<", "|", "<|channel|>", "analysis", "final", "commentary", "<|message|>", "<|end|>", "f",
         "<|start|>assistant", " to=functions.f ", "<|constrain|>json", "<|call|>", '{"n": ', "3}", "to=functions.")
TEMPLATES = [TEMPLATE, HARMONY]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(MARKS), max_size=14), st.sampled_from(TEMPLATES),
       st.integers(0, 2**32))
def test_every_partition_of_a_templates_answer_gives_the_same_message(pieces: list[str], template: Mapping, seed: int):
    text, rng = "".join(pieces), random.Random(seed)
    whole = read_template(template, [text])
    assert read_template(template, list(text)) == whole
    cuts = sorted(rng.sample(range(len(text) + 1), min(len(text) + 1, 4)))
    assert read_template(template, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]) == whole
