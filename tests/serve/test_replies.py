"""What the grammars of tools, reasoning and forms let through: whole answers walked byte by byte."""

from __future__ import annotations

from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from stretto.serve.errors import ApiError
from stretto.serve.replies import ReplyPlanner
from stretto.serve.schemas import ChatRequest
from stretto.text.grammar import LIMITS, definition, vocabulary
from stretto.text.reply import CallBegin, Content, Reasoning
from tests.serve.fakes import EOS, IM_END, IM_START, PAD, VOCAB, ByteTokenizer
from tests.serve.test_tools import CALL, TOOLS, ToolTokenizer

G = CALL.replace('"f"', '"g"')
STRICT = [{"type": "function", "function": {**tool["function"], "strict": True}} for tool in TOOLS]
FORM = {"regex": "[0-9]{4}"}
OPEN = list(b"<|im_start|>assistant\n<think>\n")


class SpecialMarkers(ToolTokenizer):
    """The markers of calls and of a thought's end are special tokens; some are in this vocabulary already."""

    markers = {"<tool_call>": IM_START, "</tool_call>": IM_END, "</think>": PAD}  # noqa: RUF012

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [self.markers[text]] if text in self.markers else super().encode(text, add_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        return {i: text.encode() for text, i in self.markers.items()}.get(token_id) or super().token_bytes(token_id)

    def ids(self, text: str) -> list[int]:
        for marker, i in self.markers.items():
            text = text.replace(marker, chr(0xE000 + i))
        return [j for char in text for j in ([ord(char) - 0xE000] if ord(char) >= 0xE000 else char.encode())]


def tokens_of(tokenizer: ByteTokenizer) -> LLTokenizer:
    return vocabulary(tokenizer, VOCAB, [EOS])


def accepts(fields: dict[str, Any], answer: str, tokenizer: ToolTokenizer | None = None, prompt=(1, 2)) -> bool:
    """The whole answer and then its end."""
    tokenizer = tokenizer or ToolTokenizer()
    body = ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}]} | fields)
    grammar = ReplyPlanner(tokenizer).plan(body, list(prompt)).grammar
    assert grammar is not None
    matcher = LLMatcher(tokens_of(tokenizer), definition(grammar), log_level=0, limits=LIMITS)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer.ids(answer) if isinstance(tokenizer, SpecialMarkers) else list(answer.encode())
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


CASES: list[tuple[dict[str, Any], tuple[int, ...] | list[int], list[str], list[str]]] = [
    (FORM, (), ["1234", "<think>any 12\n</think>\n\n1234"], ["12345", "", "x", "<think>x</think>", "<think>1234"]),
    (FORM, OPEN, ["why?</think>1234", "</think>\n1234"], ["1234", "why?</think>12"]),
    (FORM | {"separate_reasoning": False}, OPEN, ["1234"], ["x</think>1234"]),
    ({"tools": TOOLS, "tool_choice": "required"}, (), [CALL, f"{CALL}\n{G}", f"<think>x</think>\n{G}"],
     ["", "words", f"words {CALL}", CALL.replace("12", "1200"), CALL.replace('"f"', '"h"'), f"{CALL}words"]),
    ({"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}, (), [CALL], [f"{CALL}\n{G}"]),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}}, (), [G], [CALL, f"{G}{G}"]),
    ({"tools": STRICT}, (), ["", "words", f"words {CALL} words", f"{CALL}\n{G}", f"<think>x</think>\n{G}"],
     [CALL.replace("12", "1200"), CALL.replace('"f"', '"h"'), "words <tool_call>\n"]),
    ({"tools": STRICT, "parallel_tool_calls": False}, (), [f"a {CALL}", "words"], [f"{CALL}\n{G}", f"{CALL} b"]),
    ({"tools": TOOLS} | FORM, (), ["1234", CALL, f"<think>x</think>{CALL}"], ["words", f"1234{CALL}"]),
]


@pytest.mark.parametrize("case", range(len(CASES)))
@pytest.mark.parametrize("markers", ["text", "special"])
def test_what_a_grammar_lets_through(case: int, markers: str):
    fields, prompt, good, bad = CASES[case]
    if markers == "special":
        tokenizer: ToolTokenizer = SpecialMarkers()
        good, bad = [t for t in good if "<think>" not in t], [t for t in bad if "<think>" not in t]
    else:
        tokenizer = ToolTokenizer()
    for answer in good:
        assert accepts(fields, answer, tokenizer, prompt), answer
    for answer in bad:
        assert not accepts(fields, answer, tokenizer, prompt), answer


# ---------------------------------------------------------------------------------------------- other forms of calls
class LlamaTokenizer(ToolTokenizer):
    chat_template = "{{ tools }} <|python_tag|>"
    markers = {"<|python_tag|>": IM_START}  # noqa: RUF012


class MistralTokenizer(ToolTokenizer):
    chat_template = "{{ tools }} [TOOL_CALLS] ["
    markers = {"[TOOL_CALLS]": IM_START}  # noqa: RUF012


class NamedTokenizer(ToolTokenizer):
    chat_template = "{{ tools }} [TOOL_CALLS] [ARGS]"
    markers = {"[TOOL_CALLS]": IM_START, "[ARGS]": IM_END}  # noqa: RUF012


def special(kind: type[ToolTokenizer]) -> type[ToolTokenizer]:
    """The same, with special tokens as markers."""
    return type("Special" + kind.__name__, (SpecialMarkers,), {"chat_template": kind.chat_template,
                                                               "markers": kind.markers})  # type: ignore[attr-defined]


class FunctionTokenizer(ToolTokenizer):
    chat_template = "{{ tools }} <think></think> <tool_call> <function="
    markers = {"<tool_call>": IM_START, "</tool_call>": IM_END, "</think>": PAD}  # noqa: RUF012


class ArgumentTokenizer(ToolTokenizer):
    chat_template = "{{ tools }} <tool_call> <arg_key>"
    markers = {"<tool_call>": IM_START, "</tool_call>": IM_END, "</arg_value>": PAD}  # noqa: RUF012


class HarmonyTokenizer(ToolTokenizer):
    chat_template = "{{ tools }} <|channel|> <|message|>"
    markers = {"<|channel|>": IM_START, "<|message|>": IM_END, "<|end|>": PAD}  # noqa: RUF012


TAG_F = "<tool_call>\n<function=f>\n<parameter=n>\n12\n</parameter>\n</function>\n</tool_call>"
PAIR_F = "<tool_call>f\n<arg_key>n</arg_key>\n<arg_value>12</arg_value>\n</tool_call>"
FINAL, THOUGHT = "<|channel|>final<|message|>", "<|channel|>analysis<|message|>why?<|end|><|start|>assistant"
CHANNEL_F = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"n": 12}'
LLAMA_F, NAMED_F = '{"name": "f", "parameters": {"n": 12}}', '[TOOL_CALLS]f[ARGS]{"n": 12}'
LIST_F = '[TOOL_CALLS] [{"name": "f", "arguments": {"n": 12}}]'
REQUIRED, STRICTLY = {"tools": TOOLS, "tool_choice": "required"}, {"tools": STRICT}
ONE = {"parallel_tool_calls": False}
FORMS: list[tuple[type[ToolTokenizer], dict[str, Any], list[str], list[str]]] = [
    (LlamaTokenizer, REQUIRED, [LLAMA_F, f"{LLAMA_F}; {LLAMA_F}"], ["", "words", LLAMA_F.replace("12", "100"), "{}"]),
    (LlamaTokenizer, REQUIRED | ONE, [LLAMA_F], [f"{LLAMA_F}; {LLAMA_F}"]),
    (LlamaTokenizer, STRICTLY, ["", "words {", LLAMA_F, f"<|python_tag|>{LLAMA_F}", f"{LLAMA_F}; {LLAMA_F}"],
     [LLAMA_F.replace("12", "100"), '{"answer": 1}', f"{LLAMA_F} words"]),
    (LlamaTokenizer, {"tools": TOOLS} | ONE, [LLAMA_F.replace("12", '"any"'), "words"], [f"{LLAMA_F}; {LLAMA_F}"]),
    (LlamaTokenizer, {"tools": TOOLS} | FORM, ["1234", LLAMA_F], ["words"]),
    (MistralTokenizer, REQUIRED, [LIST_F, LIST_F.replace("] ", "]"), f"{LIST_F[:-1]}, {LIST_F[14:]}"],
     ["", "words", LIST_F.replace("12", "100"), f"{LIST_F}{LIST_F}"]),
    (MistralTokenizer, REQUIRED | ONE, [LIST_F], [f"{LIST_F[:-1]}, {LIST_F[14:]}"]),
    (MistralTokenizer, STRICTLY, ["", "words", f"words{LIST_F}"], [LIST_F.replace('"f"', '"h"'), f"{LIST_F} words"]),
    (NamedTokenizer, REQUIRED, [NAMED_F, NAMED_F + NAMED_F.replace("f[", "g[")],
     ["", "words", NAMED_F.replace("12", "100")]),
    (NamedTokenizer, REQUIRED | ONE, [NAMED_F], [NAMED_F * 2]),
    (NamedTokenizer, {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}},
     [NAMED_F.replace("f[", "g[")], [NAMED_F]),
    (NamedTokenizer, STRICTLY, ["", "words", f"a {NAMED_F}{NAMED_F} words"],
     [NAMED_F.replace("f[", "h["), "[TOOL_CALLS]"]),
    (NamedTokenizer, {"tools": TOOLS} | ONE, ["words", f"a {NAMED_F.replace('12', 'true')}"], [NAMED_F * 2]),
    *[(kind, fields, good, bad) for kind, call in ((FunctionTokenizer, TAG_F), (ArgumentTokenizer, PAIR_F))
      for fields, good, bad in (
        (REQUIRED, [call, f"{call}\n{call}"], ["", "words", call.replace("12", "100"), call.replace("12", "x"), CALL]),
        (REQUIRED | ONE, [call], [f"{call}\n{call}"]),
        (STRICTLY, ["", "words", f"words {call} words", f"{call}\n{call}"],
         [call.replace("12", "100"), "<tool_call>\n"]),
        ({"tools": TOOLS} | ONE, ["words", f"a {call.replace('12', 'any <text>')}"], [call * 2]),
        ({"tools": TOOLS} | FORM, ["1234", call], ["words", f"1234{call}"]))],
    (HarmonyTokenizer, REQUIRED, [CHANNEL_F, THOUGHT + CHANNEL_F, THOUGHT * 2 + CHANNEL_F],
     ["", "words", f"{FINAL}words", CHANNEL_F.replace("12", "100"), CHANNEL_F * 2, THOUGHT]),
    (HarmonyTokenizer, STRICTLY, [f"{FINAL}words", CHANNEL_F, THOUGHT + CHANNEL_F], [
        "words", CHANNEL_F.replace("12", "100"), CHANNEL_F.replace("s.f", "s.h"), f"{CHANNEL_F}{FINAL}words"]),
    (HarmonyTokenizer, {"tools": TOOLS} | ONE, [f"{FINAL}words", CHANNEL_F.replace("12", "true")], [CHANNEL_F * 2]),
    (HarmonyTokenizer, {"tools": TOOLS} | FORM, [f"{FINAL}1234", CHANNEL_F], [f"{FINAL}words"]),
]


@pytest.mark.parametrize("case", range(len(FORMS)))
@pytest.mark.parametrize("markers", ["text", "special"])
def test_what_a_grammar_lets_through_in_other_forms(case: int, markers: str):
    kind, fields, good, bad = FORMS[case]
    tokenizer = (special(kind) if markers == "special" else kind)()
    for answer in good:
        assert accepts(fields, answer, tokenizer), answer
    for answer in bad:
        assert not accepts(fields, answer, tokenizer), answer


@pytest.mark.parametrize("markers", ["text", "special"])
@pytest.mark.parametrize("case", range(len(FORMS)))
def test_what_a_grammar_lets_through_is_read_as_calls(case: int, markers: str):
    """Writing and reading agree."""
    kind, fields, good, _ = FORMS[case]
    tokenizer = (special(kind) if markers == "special" else kind)()
    body = ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}]} | fields)
    plan = ReplyPlanner(tokenizer).plan(body, [1])
    assert plan.keep_special == (markers == "special" or kind is HarmonyTokenizer) and plan.reader is not None
    for answer in good:
        reply = plan.reader()
        parts = reply.feed(answer) + reply.finish()
        names = [part.name for part in parts if isinstance(part, CallBegin)]
        written = sum(map(answer.count, ('": {"n"', "[ARGS]{", "</tool_call>", "functions.")))
        assert len(names) == written, (answer, parts)
        assert not any(mark in part.text for part in parts if isinstance(part, Content) for mark in "{<") or not names


@pytest.mark.parametrize("markers", ["text", "special"])
def test_a_form_in_harmonys_channels(markers: str):
    tokenizer = (special(HarmonyTokenizer) if markers == "special" else HarmonyTokenizer)()
    thought, answer = THOUGHT, f"{FINAL}1234"
    plan = ReplyPlanner(tokenizer).plan(ChatRequest.model_validate(
        {"messages": [{"role": "user", "content": "x"}]} | FORM), [1])
    assert plan.reader is not None and plan.keep_special and [check.param for check in plan.checks] == ["regex"]
    for said, reasoning in ((answer, ""), (thought + answer, "why?")):
        assert accepts(FORM, said, tokenizer)
        reply = plan.reader()
        parts = reply.feed(said) + reply.finish()
        assert "".join(part.text for part in parts if isinstance(part, Content)) == "1234"
        assert "".join(part.text for part in parts if isinstance(part, Reasoning)) == reasoning
    for said in ("1234", "", thought, answer + "5", answer.replace("final", "analysis"), answer + answer):
        assert not accepts(FORM, said, tokenizer), said
    assert accepts(FORM | {"separate_reasoning": False}, "1234", tokenizer)


DECLARED = {"fields": {"content": {}, "tool_calls": {"open": "<call>", "close": "</call>", "content": "json"}}}


@pytest.mark.parametrize("declared", [DECLARED, None], ids=["declared", "unknown"])
@pytest.mark.parametrize(("fields", "param"), [
    (STRICTLY, "tools[].function.strict"), ({"tools": TOOLS} | ONE, "parallel_tool_calls"),
    ({"tools": TOOLS, "regex": "[0-9]{4}"}, "regex")], ids=["strict", "one", "form"])
def test_what_no_grammar_can_hold_is_refused_with_auto(declared: dict | None, fields: dict, param: str):
    tokenizer = ToolTokenizer()
    tokenizer.chat_template, tokenizer.response_template = "{{ tools }} unknown", declared
    body = ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}]} | fields)
    with pytest.raises(ApiError) as told:
        ReplyPlanner(tokenizer).plan(body, [1])
    assert told.value.param == (param if declared else "tools")
    forced = ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}]} | REQUIRED)
    assert ReplyPlanner(tokenizer).plan(forced, [1]).grammar is not None


# ---------------------------------------------------------------------------------- schemas of calls between tags
def strictly(properties: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)} | more
    return [{"type": "function", "function": {"name": "f", "strict": True, "parameters": parameters}}]


def call_with(**values: str) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function=f>\n{inner}</function>\n</tool_call>"


@pytest.mark.parametrize(("tools", "good", "bad"), [
    (strictly({"s": {"type": "string"}}), [{"s": ""}, {"s": "a\n<b>\n</parameter\n\n"}], [{}, {"t": "x"}]),
    (strictly({"e": {"enum": ["a", "b c", 3]}}), [{"e": "a"}, {"e": "b c"}, {"e": "3"}], [{"e": "b"}, {"e": "33"}]),
    (strictly({"o": {"$ref": "#/$defs/o"}, "b": {"type": "boolean"}}, required=["b"], **{"$defs": {"o": {
        "type": "object", "properties": {"x": {"type": "integer"}}, "additionalProperties": False}}}),
     [{"o": '{"x": 1}', "b": "true"}, {"b": "false"}], [{"o": '{"y": 1}', "b": "true"}, {"o": "{}"}, {"b": "True"}]),
    (strictly({"m": {"anyOf": [{"type": "string"}, {"type": "null"}]}}), [{"m": "any"}, {"m": "null"}], [{}]),
    (strictly({"a b": {"type": "array", "items": {"type": "number"}}, "q": {"const": "x\n"}}),
     [{"a b": "[1, 2.5]", "q": "x\n"}], [{"a b": "[1, x]", "q": "x\n"}, {"q": "x\n", "a b": "[]"}]),
])
def test_values_between_tags_hold_their_schema(tools: list, good: list[dict[str, str]], bad: list[dict[str, str]]):
    for values in good:
        assert accepts({"tools": tools}, f"so: {call_with(**values)}", FunctionTokenizer()), values
    for values in bad:
        assert not accepts({"tools": tools}, f"so: {call_with(**values)}", FunctionTokenizer()), values


@pytest.mark.parametrize(("tools", "told"), [
    (strictly({"s": {"type": "string", "pattern": "a+"}}), "s: pattern"),
    (strictly({"s": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]}}), "s: maxLength"),
    (strictly({"s": {"enum": ["1", 1]}}), "s: '1'"), (strictly({"s": {"enum": ["</parameter>"]}}), "s: '</parameter>'"),
    (strictly({"<s>": {"type": "string"}}), "'<s>'"), (strictly({}, required=["t"]), "'t', which is required"),
    (strictly({}, patternProperties={"a": {}}), "patternProperties"),
    (strictly({"s": {"$ref": "#/properties/t"}, "t": {"type": "integer"}}), "$ref '#/properties/t'"),
])
def test_what_cannot_be_held_between_tags_is_refused_by_name(tools: list, told: str):
    """With "auto"; a call that must come then comes in another form, which holds it."""
    tokenizer = FunctionTokenizer()
    body = {"messages": [{"role": "user", "content": "x"}], "tools": tools}
    with pytest.raises(ApiError) as error:
        ReplyPlanner(tokenizer).plan(ChatRequest.model_validate(body), [1])
    assert error.value.param == "tools[].function.strict" and told in str(error.value)
    plan = ReplyPlanner(tokenizer).plan(ChatRequest.model_validate(body | {"tool_choice": "required"}), [1])
    assert plan.grammar is not None and '\\"name\\": \\"f\\"' in plan.grammar.source and plan.reader is not None
    (begin, *_), _ = (reply := plan.reader()).feed(CALL), reply.finish()
    assert isinstance(begin, CallBegin) and begin.name == "f"


def test_words_alone_need_no_grammar():
    for fields in ({}, {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"}):
        body = ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}]} | fields)
        assert ReplyPlanner(ToolTokenizer()).plan(body, [1]).grammar is None
