"""Calls between tags as rules of a grammar: what holds the text of each value to its place in a schema.

    value of a place            rule
    an enum, a const            one of its texts
    any string                  text up to the tag behind it
    number, object, list ...    %json of its schema
    a string with a pattern ... NotHeld: its text is no JSON string, so llguidance's rules for those do not fit it

Values stand in the schema's order, those that it does not require may be left out. No torch in this module.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from stretto.text.call_forms import END_CALL, NotHeld, lark_text, lazily
from stretto.text.tags import Tags, types_of, value_of

_WHOLE = {"type", "properties", "required", "additionalProperties", "title", "description", "$defs", "definitions",
          "$schema", "$id", "examples", "default"}  # of a function's schema
_PLAIN = {"type", "title", "description", "default", "examples", "deprecated", "nullable"}  # that bind no string
_NESTS = ("anyOf", "oneOf", "allOf")


def properties(schema: Any) -> Mapping[str, Any]:
    found = schema.get("properties") if isinstance(schema, dict) else None
    return found if isinstance(found, dict) else {}


class TagRules:
    """Lark. `sign` writes a marker."""

    def __init__(self, tags: Tags, sign: Callable[[str], str]):
        self._tags, self._sign = tags, sign

    def calls(self, calls: Sequence[tuple[str, str]]) -> list[str]:
        """`inner` and what it needs. Raises NotHeld."""
        one = " | ".join(f"call_{i}" for i in range(len(calls)))
        rules = [f"inner: ({one}) {self._sign(END_CALL)}", self._text(), r"KEY: /[^<>\n]+/",
                 f"any: ({self._before('KEY')} text)*"]
        for i, (name, schema) in enumerate(calls):
            begin, close = lark_text(self._tags.function.format(name)), lark_text(self._tags.close)
            rules.append(f"call_{i}: {begin} {self._values(json.loads(schema), name)} {close}")
        return rules

    def _before(self, key: str) -> str:
        """What stands before a value. `key`: as Lark."""
        return " ".join(key if piece == "{}" else self._mark(piece) for piece in self._tags.before)

    def _mark(self, piece: str) -> str:
        return self._sign(piece) if piece in self._tags.markers else lark_text(piece)

    def _text(self) -> str:
        """`text`: any text up to the tag behind it, and that."""
        tag = self._tags.after.lstrip()
        return f'text: any_text "\\n"\n{lazily("any_text", tag, self._mark)}'

    def _values(self, schema: Any, name: str) -> str:
        if schema == {"type": "object"}:
            return "any"
        if other := [key for key in schema if key not in _WHOLE]:
            raise NotHeld(f"{name}: {other[0]} of all its arguments together")
        required, known = schema.get("required", []), properties(schema)
        if unknown := [key for key in required if key not in known]:
            raise NotHeld(f"{name}: {unknown[0]!r}, which is required and no property")
        return " ".join(self._one(key, part, schema, key in required) for key, part in known.items())

    def _one(self, key: str, part: Any, root: Any, required: bool) -> str:
        if key != key.strip() or not re.fullmatch(r"[^<>\n]+", key):
            raise NotHeld(f"{key!r}, a name with < or > or with space around it")
        whole = f"{self._before(lark_text(key))} {self._value(key, part, root)}"
        return whole if required else f"({whole})?"

    def _value(self, key: str, part: Any, root: Any) -> str:
        """A value and the tag behind it."""
        types, after = types_of(part, root), f'{self._mark(self._tags.after)} "\\n"'
        named = _named(part)
        if named is not None:
            return f"({' | '.join(lark_text(self._written(key, value, types)) for value in named)}) {after}"
        if types and "string" not in types:
            return f"%json {json.dumps(_with_definitions(key, part, root))} {after}"
        if bound := next((name for name in _names(part, root) if name not in _PLAIN), None):
            raise NotHeld(f"{key}: {bound} of a string")
        return "text"

    def _written(self, key: str, value: Any, types: tuple[str, ...]) -> str:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        read = text if types in ((), ("string",)) else value_of(text, types)
        same = read == value and isinstance(read, bool) == isinstance(value, bool)
        if not same or any(end in text for end in self._tags.ends):
            raise NotHeld(f"{key}: {text!r}, which is not read as it is written")
        return text


def _named(part: Any) -> list[Any] | None:
    """The values that a schema names one by one."""
    if not isinstance(part, dict):
        return None
    return [part["const"]] if "const" in part else part["enum"] if isinstance(part.get("enum"), list) else None


def _names(part: Any, root: Any) -> Iterator[str]:
    """Keywords of a schema that may be a string's."""
    if not isinstance(part, dict):
        return
    yield from (name for name in part if name not in _NESTS)
    for name in _NESTS:
        for inner in part.get(name, ()):
            yield from _names(inner, root)


def _with_definitions(key: str, part: Any, root: Any) -> Any:
    """A part of a schema as one by itself."""
    for place in _references(part):
        if not place.startswith(("#/$defs/", "#/definitions/")):
            raise NotHeld(f"{key}: $ref {place!r}; only those to $defs or definitions")
    kept = {name: root[name] for name in ("$defs", "definitions") if name in root}
    return {**part, **kept} if isinstance(part, dict) else part


def _references(part: Any) -> Iterator[str]:
    if isinstance(part, dict):
        yield from (value for name, value in part.items() if name == "$ref" and isinstance(value, str))
    for inner in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        yield from _references(inner)
