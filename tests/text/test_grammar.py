"""Grammars by themselves: what is accepted lets the right texts through; what is refused is refused with its place."""

from __future__ import annotations

import json
import random
import time

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from stretto.params import Grammar
from stretto.text.grammar import (
    LIMITS,
    MAX_CHOICES,
    MAX_SOURCE,
    GrammarError,
    check_grammar,
    compiled,
    definition,
    is_dead,
    vocabulary,
)
from stretto.text.grammar_cost import MAX_REMAINDERS, remainders
from stretto.text.tokenizer import Tokenizer, TokenizerParts
from tests.serve.fakes import EOS, VOCAB, ByteTokenizer
from tests.text.vocabularies import ALL


@pytest.fixture(scope="module")
def tokens() -> LLTokenizer:
    return vocabulary(ByteTokenizer(), VOCAB, [EOS])


def accepts(tokens: LLTokenizer, grammar: Grammar, text: str) -> bool:
    matcher = LLMatcher(tokens, definition(grammar), log_level=0, limits=LIMITS)
    ids = list(text.encode())
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(("grammar", "good", "bad"), [
    (Grammar("json_schema", '{"const": {"a": 1, "b": 2}}', whitespace=False), ['{"a":1,"b":2}'], ['{"a": 1,"b":2}']),
    (Grammar("regex", "a/b|[0-9]{2}"), ["a/b", "42"], ["a", "421"]),
    (Grammar("choice", '["yes", "no", "y\\"s"]'), ["yes", 'y"s'], ["yesno", ""]),
    (Grammar("lark", 'start: "a" %json {"type": "integer"} X\nX: /b+/'), ["a1b", "a-3bbb"], ["ab"]),
    (Grammar("ebnf", 'root ::= "a" b+\nb ::= "b" | "c"'), ["abc"], ["a"]),
    (Grammar("ebnf", 'start: "a"'), ["a"], ["b"]),
    (Grammar("structural_tag", json.dumps({"structures": [{"begin": "<f>", "schema": {"const": 1}, "end": "</f>"}],
                                           "triggers": ["<f"]})), ["", "x", "x<f>1</f>y"], ["<f>2</f>"]),
    (Grammar("llguidance", '{"grammars": [{"json_schema": {"const": 1}}]}'), ["1"], ["2"]),
    (Grammar("regex", "b", around='start: "a" @answer "c"'), ["abc"], ["b"]),
], ids=lambda value: value.kind if isinstance(value, Grammar) else "")
def test_kinds_of_grammars(tokens: LLTokenizer, grammar: Grammar, good: list[str], bad: list[str]):
    check_grammar(grammar, tokens)
    for text in good:
        assert accepts(tokens, grammar, text), text
    for text in bad:
        assert not accepts(tokens, grammar, text), text


class WordTokenizer(ByteTokenizer):
    """Bytes, and words of letters alone, and of anything."""

    def __init__(self) -> None:
        super().__init__()
        rng = random.Random(5)
        self.words = [bytes(rng.choices(b"abcXYZ019 _-\"{}:.\n\xc3\xa9", k=rng.randrange(2, 13))) for _ in range(3000)]
        self.words += [bytes(rng.choices(b"abcXYZ019", k=1 + n % 12)) for n in range(2000)]

    def token_bytes(self, token_id: int) -> bytes:
        return self.words[token_id - VOCAB] if token_id >= VOCAB else super().token_bytes(token_id)


@pytest.mark.parametrize("grammar", [
    Grammar("regex", r"[\w.+-]{1,64}@[\w-]{1,9}(\.[\w-]{1,63})+"), Grammar("regex", r"([a-z]{1,9}[ .,])*!{20}"),
    Grammar("regex", r"(\w{1,12} ){5}"), Grammar("regex", "[a-zA-Z0-9]{6}-[0-9a-f]*"),
    Grammar("json_schema", '{"type": "array", "items": {"type": "string", "maxLength": 7}}'),
    Grammar("lark", 'start: a "b" /[a-zA-Z0-9]{3,11}/\na[lazy]: /(.|\\n)*Xa/')], ids=lambda g: g.source[:20])
def test_tokens_that_are_allowed_together_change_no_mask(grammar: Grammar) -> None:
    """Along random answers, against a vocabulary that is always walked whole."""
    tokenizer, rng = WordTokenizer(), random.Random(1)
    ours = vocabulary(tokenizer, VOCAB + len(tokenizer.words), [EOS])
    first, walked = compiled(grammar, ours), compiled(grammar, ours.with_slices([]))
    seen = 0
    for _ in range(6):
        a, b = first.deep_copy(), walked.deep_copy()
        for _ in range(25):
            mask = a.compute_bitmask()
            assert mask == b.compute_bitmask()
            allowed = np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little"))
            seen = max(seen, len(allowed))
            if a.is_stopped() or not len(allowed):
                break
            token = int(rng.choice(allowed))
            assert a.try_consume_tokens([token]) == b.try_consume_tokens([token]) == 1
    assert seen > 100


def test_choices_may_hold_any_text(tokens: LLTokenizer):
    choices = ["a", "ab", 'q"u', "back\\slash", "new\nline", "\x00\x1f\x7f", "é\u2028😀", "/re/", "%json {}", "<|x|>",
               "a|b", "{1}", "//", " ", "\\n", "\\u0041"]
    grammar = Grammar("choice", json.dumps(choices))
    assert all(accepts(tokens, grammar, choice) for choice in choices)
    assert not any(accepts(tokens, grammar, text) for text in ("", "A", "\n", "ba", "b", "a|", "abab"))


@pytest.mark.parametrize(("grammar", "word"), [
    (Grammar("json_schema", "[1]"), "an object"), (Grammar("json_schema", "{"), "not JSON"),
    (Grammar("json_schema", "[" * 100_000), "not JSON"), (Grammar("choice", '[""]'), "strings"),
    (Grammar("choice", "3"), "a list"), (Grammar("prose", "x"), "known"),
    (Grammar("lark", 'start: "a" b'), "unknown name"),
    (Grammar("ebnf", "root ::= c"), "c"), (Grammar("structural_tag", '{"structures": [1], "triggers": []}'), "begin"),
    (Grammar("regex", "x" * (MAX_SOURCE + 1)), "limit"),
    (Grammar("choice", json.dumps(["x"] * (MAX_CHOICES + 1))), f"1 to {MAX_CHOICES}"),
    (Grammar("json_schema", "false"), "nothing"),
    (Grammar("lark", "start: <|no_such_token|>"), "no_such_token"),
], ids=lambda value: value.kind if isinstance(value, Grammar) else "")
def test_what_is_wrong_is_said(tokens: LLTokenizer, grammar: Grammar, word: str):
    with pytest.raises(GrammarError, match=word):
        check_grammar(grammar, tokens)


def test_a_model_without_an_end_has_no_grammars():
    with pytest.raises(GrammarError, match="end-of-sequence"):
        vocabulary(ByteTokenizer(), VOCAB, [])


BOMB = Grammar("regex", "(c{1000}){1000}{1000}")


@pytest.mark.parametrize("grammar", [
    BOMB, Grammar("lark", "start: /(c{1000}){1000}{1000}/"), Grammar("ebnf", 'start: /(c{1000}){1000}{1000}/'),
    Grammar("json_schema", '{"type": "string", "pattern": "^(c{1000}){1000}{1000}$"}'),
], ids=lambda grammar: grammar.kind)
@pytest.mark.parametrize("bytes_only", [True, False])
def test_what_one_mask_costs_is_bounded(tokens: LLTokenizer, grammar: Grammar, bytes_only: bool):
    start = time.thread_time()
    with pytest.raises(GrammarError, match="exceeds the limits of its lexer"):
        check_grammar(grammar, None if bytes_only else tokens)
    assert time.thread_time() - start < 0.6  # of this thread; about 0.2 s, with llguidance's own limits 1 to 3 s


@pytest.mark.parametrize("grammar", [
    Grammar("choice", json.dumps([f"choice number {i}" for i in range(MAX_CHOICES)])),
    Grammar("json_schema", json.dumps({"enum": [f"choice number {i}" for i in range(MAX_CHOICES)]})),
    Grammar("json_schema", json.dumps({"type": "object", "properties": {f"name_{i}": {
        "type": "string", "pattern": r"^\\w{1,64}@[a-z]{2,20}$", "format": None} if i % 2 else {
        "type": "string", "format": "date-time", "maxLength": 1000} for i in range(100)}}).replace(
            ', "format": null', "")),
    Grammar("regex", r"(\w{1,2000} ){5}"), Grammar("json_schema", '{"type": "string", "maxLength": 100000}'),
    Grammar("json_schema", '{"type": "integer", "multipleOf": 86400}'),
], ids=["choices", "enum", "schema", "words", "string", "days"])
def test_what_is_large_and_honest_passes(tokens: LLTokenizer, grammar: Grammar):
    check_grammar(grammar)
    compiled(grammar, tokens)


class DigitTokenizer(ByteTokenizer):
    """Numbers of up to three digits are tokens, too, as in the vocabularies of Llama 3 and GPT-4."""

    numbers = [str(i) for i in range(10)] + [f"{i:0{n}}" for n in (2, 3) for i in range(10**n)]

    def token_bytes(self, token_id: int) -> bytes:
        return self.numbers[token_id - VOCAB].encode() if token_id >= VOCAB else super().token_bytes(token_id)


@pytest.mark.parametrize("multiple", [12, 60, 1000, 3600, 86400])
def test_multiples_among_many_digit_tokens(multiple: int):
    tokenizer = DigitTokenizer()
    digits = vocabulary(tokenizer, VOCAB + len(tokenizer.numbers), [EOS])
    matcher = compiled(Grammar("json_schema", json.dumps({"type": "integer", "multipleOf": multiple})), digits)
    for _ in range(8):
        matcher.try_consume_tokens([VOCAB + tokenizer.numbers.index("864")])
        matcher.compute_bitmask()
    assert not matcher.is_error(), matcher.get_error()


PRIMES = [{"type": "integer", "multipleOf": 331}, {"multipleOf": 307}]


@pytest.mark.parametrize(("schema", "states"), [
    ({"type": "integer", "multipleOf": 1000003}, 1000003), ({"multipleOf": 1000.003}, 1000003),
    ({"multipleOf": 1e300}, "more than"), ({"multipleOf": 4, "allOf": [{"multipleOf": 6}]}, 12),
    ({"allOf": PRIMES}, 331 * 307), ({"anyOf": PRIMES}, 331 + 307), ({**PRIMES[0], "$ref": "#/$defs/x", "$defs": {
        "x": PRIMES[1]}}, 331 * 307 + 307), ({**PRIMES[0], "oneOf": [PRIMES[1], {"multipleOf": 3}]}, 331 * 310),
    ({"$ref": "x", "$defs": {"y": {"$id": "x", "multipleOf": 10}, "z": {"multipleOf": 4}}}, 20 + 10 + 4),
    ({"properties": {"a": {"items": PRIMES[0]}, "b": PRIMES[1]}}, 331 + 307), ({"multipleOf": 0.01}, 0),
    ({"properties": {"multipleOf": {"const": 3}}, "enum": [{"multipleOf": 9}]}, 0), ({"multipleOf": True}, 0),
    ({"$ref": "#/$defs/r", "$defs": {"r": {"anyOf": [{"$ref": "#/$defs/r"}, {"multipleOf": 5}]}}}, 6 + 6),
])
def test_multiples_are_counted_before_they_are_built(schema: dict, states: int | str):
    if isinstance(states, int):
        assert remainders(schema) == states
    if isinstance(states, str) or states > MAX_REMAINDERS:
        text = json.dumps(schema)
        start = time.thread_time()
        for grammar in (Grammar("json_schema", text), Grammar("lark", f"start: %json {text}"),
                        Grammar("llguidance", json.dumps({"grammars": [{"json_schema": schema}]}))):
            with pytest.raises(GrammarError, match=f"multipleOf together cost {states}"):
                check_grammar(grammar)
        assert time.thread_time() - start < 0.4


@pytest.mark.parametrize("kind", ["regex", "ebnf", "lark", "choice", "json_schema", "structural_tag"])
def test_an_empty_grammar_is_refused(kind: str):
    with pytest.raises(GrammarError):
        check_grammar(Grammar(kind, ""))


def _fits(grammar: Grammar, text: bytes) -> bool:
    matcher = LLMatcher(LLTokenizer("byte"), definition(grammar), log_level=0, limits=LIMITS)
    return matcher.try_consume_tokens(list(text)) == len(text) and matcher.is_accepting()


@pytest.mark.parametrize("name", sorted(ALL))
@pytest.mark.parametrize("grammar", [
    Grammar("choice", '["yes", "no"]'), Grammar("regex", "(yes|no)"), Grammar("regex", "y[a-z]*"),
    Grammar("json_schema", '{"const": {"the": "end"}}', whitespace=False), Grammar("lark", 'start: " the" " end"')],
    ids=lambda grammar: grammar.source[:20])
def test_forced_texts_get_no_space_in_front(name: str, grammar: Grammar) -> None:
    """What is masked is what the matcher takes, and the answer is a text of the grammar to its first character."""
    tokenizer = Tokenizer(TokenizerParts(ALL[name]()))
    end = tokenizer.backend.token_to_id("</s>")
    tokens, answer = vocabulary(tokenizer, tokenizer.vocab_size, [end]), b""
    matcher = compiled(grammar, tokens)
    if name == "metaspace" and grammar.kind == "json_schema":  # no token has a brace, and no bytes stand for it
        assert is_dead(matcher)
        return
    for _ in range(30):
        mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        allowed = [int(i) for i in np.flatnonzero(mask)]
        assert allowed and not matcher.get_error()
        if end in allowed:
            break
        assert all(matcher.deep_copy().try_consume_tokens([i]) == 1 for i in allowed[:40])
        assert all(matcher.deep_copy().try_consume_tokens([i]) == 1 for i in matcher.compute_ff_tokens()[:1])
        matcher.try_consume_tokens(allowed[:1])
        answer += tokenizer.token_bytes(allowed[0])
    assert matcher.is_accepting() and _fits(grammar, answer)
