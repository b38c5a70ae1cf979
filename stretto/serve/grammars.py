"""The fields of a request that ask for an answer of a given form, in all their spellings, and their check.

    OpenAI    response_format: json_schema, json_object, text, structural_tag
    vLLM      structured_outputs: {json, json_object, regex, choice, grammar, structural_tag}, and the older guided_*
    SGLang    json_schema, regex, ebnf, structural_tag

One of them at a time. What is wrong with one is a 400 that names the field and the place in it, before anything runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from stretto.params import Grammar
from stretto.serve.errors import ApiError, bad_request, unsupported
from stretto.serve.schemas import GenerationBody

ANY_OBJECT = '{"type": "object"}'
INVALID = "invalid_grammar"


class Asked(NamedTuple):
    grammar: Grammar
    param: str  # the field that asked for it


def asked_grammar(body: GenerationBody) -> Asked | None:
    """None where any text will do. Raises ApiError."""
    found = [asked for name, read in _FIELDS.items()
             if (value := getattr(body, name, None)) is not None  # an empty one is asked for, too
             and (asked := read(name, value)) is not None]
    if len(found) > 1:
        raise bad_request(f"{found[0].param} and {found[1].param} both say what the answer must look like; give one",
                          found[1].param, INVALID)
    return found[0] if found else None


def _json_text(param: str, value: Any) -> str:
    """A schema, or any other JSON value, that may also be given as its text."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except (ValueError, RecursionError) as e:
        raise bad_request(f"{param} cannot be read: {e}", param, INVALID) from None


def _schema(param: str, value: Any, whitespace: bool = True) -> Asked:
    return Asked(Grammar("json_schema", _json_text(param, value), whitespace), param)


def _text(kind: str) -> Callable[[str, Any], Asked]:
    def read(param: str, value: Any) -> Asked:
        if not isinstance(value, str):
            raise bad_request(f"{param} must be a string", param, INVALID)
        return Asked(Grammar(kind, value), param)
    return read


def _listed(kind: str) -> Callable[[str, Any], Asked]:
    def read(param: str, value: Any) -> Asked:
        return Asked(Grammar(kind, _json_text(param, value)), param)
    return read


def _choice(param: str, value: Any) -> Asked:
    if not isinstance(value, list):
        raise bad_request(f"{param} must be a list of strings; it is {_json_text(param, value)[:64]!r}", param, INVALID)
    return Asked(Grammar("choice", _json_text(param, value)), param)


def _response_format(param: str, value: Any) -> Asked | None:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return Asked(Grammar("json_schema", ANY_OBJECT), param)
    if kind == "json_schema":
        inner = value.get("json_schema", value)
        schema = inner.get("schema") if isinstance(inner, dict) else None
        if schema is None:
            raise bad_request(f"{param}.json_schema.schema is missing", f"{param}.json_schema.schema", INVALID)
        return _schema(f"{param}.json_schema.schema" if inner is not value else f"{param}.schema", schema)
    if kind == "structural_tag":
        return Asked(Grammar("structural_tag", _json_text(param, value)), param)
    raise bad_request(f"{param}.type is {str(kind)[:64]!r}; it must be text, json_object, json_schema or"
                      " structural_tag", f"{param}.type", INVALID)


def _structured_outputs(param: str, value: Any) -> Asked | None:
    if not isinstance(value, dict):
        raise bad_request(f"{param} must be an object", param, INVALID)
    kinds = {k: v for k, v in value.items() if k in _STRUCTURED and v not in (None, False)}
    for name, setting in value.items():
        if name not in _STRUCTURED and name != "disable_any_whitespace" and setting not in (None, False):
            raise unsupported(f"{param}.{name}", "nothing here would honour it; leave it out")
    if len(kinds) != 1:
        raise bad_request(f"{param} needs exactly one of {', '.join(_STRUCTURED)}; it has {len(kinds)}", param, INVALID)
    (name, wanted), = kinds.items()
    asked = _STRUCTURED[name](f"{param}.{name}", wanted)
    if value.get("disable_any_whitespace"):
        asked = Asked(Grammar(asked.grammar.kind, asked.grammar.source, False), asked.param)
    return asked


_STRUCTURED: Mapping[str, Callable[[str, Any], Asked]] = {
    "json": _schema, "json_object": lambda param, _: Asked(Grammar("json_schema", ANY_OBJECT), param),
    "regex": _text("regex"), "choice": _choice, "grammar": _text("ebnf"),
    "structural_tag": _listed("structural_tag"),
}
_FIELDS: Mapping[str, Callable[[str, Any], Asked | None]] = {
    "response_format": _response_format, "structured_outputs": _structured_outputs,
    "guided_json": _schema, "guided_regex": _text("regex"), "guided_choice": _choice,
    "guided_grammar": _text("ebnf"), "json_schema": _schema, "regex": _text("regex"), "ebnf": _text("ebnf"),
    "structural_tag": _listed("structural_tag"),
}


def refused(asked_param: str, error: Exception) -> ApiError:
    """The answer to a grammar that does not hold."""
    return bad_request(f"{asked_param}: {error}", asked_param, INVALID)
