"""Calls whose arguments stand between tags: what the tags are, and what the text of a value means.

A value is what the function's schema says of its type: a string as it is written, anything else as JSON. No torch in
this module.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NamedTuple

from stretto.text.call_forms import END_CALL, BareHead

Types = tuple[str, ...]  # as JSON schema names them; (): not known
_TYPE_OF = {bool: "boolean", int: "integer", float: "number", dict: "object", list: "array", type(None): "null"}
_WORDS = {"True": True, "False": False, "None": None}  # as some models write them
_DEPTH = 8  # references that are followed


class Tags(NamedTuple):
    """`head`: a call's name. `bare`: one without CALL before it. `key`: what stands before a value; `begin`: how that
    begins. `ends`: any of what may stand behind one. `stop`: what stands behind all of them, or else `END_CALL`.
    `breaks`: a line break at a value's beginning is none of it.

    As they are written, {} for a name: `function` before the values, `before` and `after` a value, `close` behind all
    of them. `markers`: what of it a vocabulary may have as one token."""

    head: re.Pattern[str]
    bare: BareHead | None
    key: re.Pattern[str]
    begin: str
    ends: tuple[str, ...]
    stop: str
    breaks: bool
    function: str
    before: tuple[str, ...]
    after: str
    close: str
    markers: tuple[str, ...] = ()


FUNCTION = Tags(  # Qwen 3 Coder, Qwen 3.5
    re.compile(r"\s*<function=([^<>\n]+)>"),
    BareHead("<function=", re.compile(r"<function=([^<>\n]+)>\s*"), re.compile(r"<function=[^<>\n]*"),
             ("<parameter=", "</function>")),
    re.compile(r"<parameter=([^<>\n]+)>"), "<parameter=",
    ("\n</parameter>", "</parameter>", "\n</function>\n</tool_call>", "</function>\n</tool_call>"), "</function>", True,
    "\n<function={}>\n", ("<parameter=", "{}", ">\n"), "\n</parameter>", "</function>\n")
ARGUMENT = Tags(  # GLM 4.5 and later
    re.compile(r"\s*([\w.:/-]+)\s*(?=<arg_key>|</tool_call>)"), None,
    re.compile(r"<arg_key>([^<>]+)</arg_key>\s*<arg_value>"), "<arg_key>", ("</arg_value>",), END_CALL, False,
    "{}\n", ("<arg_key>", "{}", "</arg_key>", "\n", "<arg_value>"), "</arg_value>", "",
    ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"))


def types_of(schema: Any, root: Any, depth: int = 0) -> Types:
    """The types that a schema allows at its place. `root`: of its references."""
    if not isinstance(schema, dict) or depth > _DEPTH:
        return ()
    if isinstance(place := schema.get("$ref"), str):
        return types_of(_at(root, place), root, depth + 1)
    declared = schema.get("type")
    declared = declared if isinstance(declared, list) else [declared]
    found = [name for name in declared if isinstance(name, str)]
    for name in ("anyOf", "oneOf", "allOf"):
        for part in schema[name] if isinstance(schema.get(name), list) else ():
            found += types_of(part, root, depth + 1)
    named = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    if not found:
        found = [_TYPE_OF.get(type(value), "string") for value in named]
    return tuple(dict.fromkeys(found + ["null"] * bool(schema.get("nullable"))))


def _at(root: Any, place: str) -> Any:
    """What a local reference, `#/$defs/x`, refers to."""
    start, *names = place.split("/")
    for name in names if start == "#" else ("",):
        root = root.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(root, dict) else None
    return root


def value_of(text: str, types: Types) -> Any:
    """A value as its function wants it; the text itself where it is of none of the types."""
    word = text.strip()
    try:
        value = _WORDS[word] if word in _WORDS else json.loads(word, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return text
    kind = _TYPE_OF.get(type(value), "string")
    if isinstance(value, float):
        if not math.isfinite(value):
            return text
        if value.is_integer() and "number" not in types:
            kind, value = "integer", int(value)
    fits = kind != "string" and (kind in types or (kind == "integer" and "number" in types))
    return value if fits else text


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


