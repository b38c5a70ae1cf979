"""What the grammars of tools, reasoning and forms let through: whole answers walked byte by byte."""

from __future__ import annotations

from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from stretto.serve.replies import ReplyPlanner
from stretto.serve.schemas import ChatRequest
from stretto.text.grammar import LIMITS, definition, vocabulary
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


def test_words_alone_need_no_grammar():
    for fields in ({}, {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"}):
        body = ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}]} | fields)
        assert ReplyPlanner(ToolTokenizer()).plan(body, [1]).grammar is None
