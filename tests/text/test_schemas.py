"""JSON schemas by keyword (schemas.json): what each lets through and not, judged by jsonschema, and what is refused.

    accepted   keyword: [[schema, values that are valid, values that are not], ...]
    refused    keyword: [[schema, JSON pointer to the part at fault ("": none is told), a word of the reason], ...]
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for
from llguidance import LLMatcher, LLTokenizer

from stretto.params import Grammar
from stretto.text.grammar import LIMITS, GrammarError, check_grammar, definition, vocabulary
from stretto.text.json_schema import in_other_words
from tests.serve.conftest import make_api
from tests.serve.fakes import EOS, VOCAB, ByteTokenizer

CASES = json.loads((Path(__file__).parent / "schemas.json").read_text())
ACCEPTED: dict[str, list[tuple[Any, list[Any], list[Any]]]] = CASES["accepted"]
REFUSED: dict[str, list[tuple[Any, str, str]]] = CASES["refused"]
KEYWORDS = {  # of JSON Schema 2020-12 and the drafts before it, as far as they say something about a value
    "type", "enum", "const", "anyOf", "oneOf", "allOf", "not", "if", "then", "else", "$ref", "$dynamicRef",
    "$recursiveRef", "properties", "required", "additionalProperties", "patternProperties", "propertyNames",
    "minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties",
    "items", "prefixItems", "contains", "minContains", "maxContains", "minItems", "maxItems", "uniqueItems",
    "unevaluatedItems", "minLength", "maxLength", "pattern", "format", "minimum", "maximum", "exclusiveMinimum",
    "exclusiveMaximum", "multipleOf"}


def judge(schema: Any) -> Any:
    kind = validator_for(schema, default=Draft202012Validator)
    return kind(schema, format_checker=kind.FORMAT_CHECKER)


def grammar_of(schema: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(schema))


@cache
def tokens() -> LLTokenizer:
    return vocabulary(ByteTokenizer(), VOCAB, [EOS])


def lets_through(schema: Any, value: Any) -> bool:
    for separators in ((", ", ": "), (",", ":")):
        matcher = LLMatcher(tokens(), definition(grammar_of(schema)), log_level=0, limits=LIMITS)
        ids = list(json.dumps(value, ensure_ascii=False, separators=separators).encode())
        if matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting():
            return True
    return False


@pytest.mark.parametrize("keyword", ACCEPTED)
def test_a_schema_lets_the_right_values_through(keyword: str):
    for schema, good, bad in ACCEPTED[keyword]:
        check_grammar(grammar_of(schema))
        rule = judge(schema)
        for value in good:
            assert rule.is_valid(value) and lets_through(schema, value), (schema, value)
        for value in bad:
            assert not rule.is_valid(value) and not lets_through(schema, value), (schema, value)


@pytest.mark.parametrize("keyword", REFUSED)
def test_case_12_05_what_is_not_enforced_is_refused_with_its_place(keyword: str):
    for schema, place, word in REFUSED[keyword]:
        with pytest.raises(GrammarError) as told:
            check_grammar(grammar_of(schema))
        assert str(told.value).startswith(f"at {place}: " if place else ""), (schema, told.value)
        assert word in str(told.value), (schema, told.value)


async def test_case_12_05_a_refused_schema_is_a_400_that_names_its_place():
    async with make_api() as api:
        for schema, place, word in (case for cases in REFUSED.values() for case in cases):
            answer = await api.complete("x", response_format={"type": "json_schema", "json_schema": {
                "name": "n", "schema": schema}})
            error = answer.json()["error"]
            told = (answer.status_code, error["param"], error["code"])
            assert told == (400, "response_format.json_schema.schema", "invalid_grammar"), (schema, error)
            assert f"at {place}: " in error["message"] or not place, error
            assert word in error["message"], error
        await api.alive()


def test_every_keyword_has_cases():
    assert sum(map(len, ACCEPTED.values())) >= 300
    assert not KEYWORDS - {*ACCEPTED, *REFUSED}
    assert all(good for cases in ACCEPTED.values() for _, good, _ in cases)


@pytest.mark.parametrize(("schema", "same"), [
    ({"oneOf": [{"const": 1}, {"enum": [2, "1"]}]}, {"anyOf": [{"const": 1}, {"enum": [2, "1"]}]}),
    ({"oneOf": [{"const": 1}, {"const": 1.0}]}, None), ({"oneOf": [{"const": True}, {"const": 1}]},
                                                        {"anyOf": [{"const": True}, {"const": 1}]}),
    ({"oneOf": [{"enum": [{"a": 1, "b": 2}]}, {"const": {"b": 2, "a": 1.0}}]}, None),
    ({"oneOf": [{"const": 1}, {"type": "string"}]}, None), ({"oneOf": []}, None), ({"oneOf": 3}, None),
    ({"oneOf": [{"const": 1}], "anyOf": [{}]}, None), ({"enum": [{"uniqueItems": False}]}, None),
    ({"properties": {"uniqueItems": {"uniqueItems": False}}}, {"properties": {"uniqueItems": {}}}),
    ({"uniqueItems": True}, None),
])
def test_an_equal_schema_in_other_words(schema: dict, same: dict | None):
    before = json.dumps(schema)
    assert in_other_words(schema) == (schema if same is None else same) and json.dumps(schema) == before
