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
    assert plan.keep_special == (markers == "special") and plan.reader is not None
    for answer in good:
        reply = plan.reader()
        parts = reply.feed(answer) + reply.finish()
        names = [part.name for part in parts if isinstance(part, CallBegin)]
        assert len(names) == answer.count('": {"n"') + answer.count('[ARGS]{'), (answer, parts)
        assert not any("{" in part.text for part in parts if isinstance(part, Content)) or not names


class HarmonyTokenizer(ToolTokenizer):
    chat_template = "{{ tools }} <|channel|> <|message|>"
    markers = {"<|channel|>": IM_START, "<|message|>": IM_END, "<|end|>": PAD}  # noqa: RUF012


@pytest.mark.parametrize("markers", ["text", "special"])
def test_a_form_in_harmonys_channels(markers: str):
    tokenizer = (special(HarmonyTokenizer) if markers == "special" else HarmonyTokenizer)()
    thought, answer = "<|channel|>analysis<|message|>why?<|end|><|start|>assistant", "<|channel|>final<|message|>1234"
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


@pytest.mark.parametrize("template", ["<tool_call> <function=", "<|channel|> <|message|>", "{{ tools }} unknown"])
@pytest.mark.parametrize(("fields", "param"), [
    (STRICTLY, "tools[].function.strict"), ({"tools": TOOLS} | ONE, "parallel_tool_calls"),
    ({"tools": TOOLS, "regex": "[0-9]{4}"}, "regex")], ids=["strict", "one", "form"])
def test_what_no_grammar_can_hold_is_refused_with_auto(template: str, fields: dict, param: str):
    tokenizer = ToolTokenizer()
    tokenizer.chat_template = template
    body = ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}]} | fields)
    with pytest.raises(ApiError) as told:
        ReplyPlanner(tokenizer).plan(body, [1])
    assert told.value.param == ("tools" if "unknown" in template else param)
    forced = ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}]} | REQUIRED)
    assert ReplyPlanner(tokenizer).plan(forced, [1]).grammar is not None


def test_words_alone_need_no_grammar():
    for fields in ({}, {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"}):
        body = ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}]} | fields)
        assert ReplyPlanner(ToolTokenizer()).plan(body, [1]).grammar is None
