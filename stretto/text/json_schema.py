"""JSON schemas as data: their parts, and the same schema in words that llguidance knows.

    {"oneOf": [{"const": "a"}, {"enum": ["b", "c"]}]}    no value is in two branches: anyOf
    {"uniqueItems": false}                               says nothing
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any


def children(schema: Any) -> Iterator[tuple[str, Any]]:
    """The parts of a schema that are schemas, each with its JSON pointer from there."""
    if not isinstance(schema, dict):
        return
    for name, value in schema.items():
        where = f"/{_escaped(name)}"
        if name in ("properties", "$defs", "definitions", "patternProperties") and isinstance(value, dict):
            yield from ((f"{where}/{_escaped(k)}", v) for k, v in value.items() if isinstance(v, (dict, bool)))
        elif name in ("anyOf", "oneOf", "allOf", "prefixItems", "items") and isinstance(value, list):
            yield from ((f"{where}/{i}", v) for i, v in enumerate(value) if isinstance(v, (dict, bool)))
        elif name in ("items", "additionalItems", "additionalProperties") and isinstance(value, (dict, bool)):
            yield where, value


def _escaped(name: str) -> str:
    return str(name).replace("~", "~0").replace("/", "~1")


def in_other_words(schema: Any) -> Any:
    """An equal schema that llguidance can read, if there is an easy one; `schema` stays as it is."""
    if not isinstance(schema, dict):
        return schema
    own = {name: _part(name, value) for name, value in schema.items()}
    if own.get("uniqueItems") is False:
        del own["uniqueItems"]
    if "anyOf" not in own and _apart(own.get("oneOf")):
        own = {"anyOf" if name == "oneOf" else name: value for name, value in own.items()}
    return own


def _part(name: str, value: Any) -> Any:
    if name in ("properties", "$defs", "definitions", "patternProperties") and isinstance(value, dict):
        return {k: in_other_words(v) for k, v in value.items()}
    if name in ("anyOf", "oneOf", "allOf", "prefixItems", "items") and isinstance(value, list):
        return [in_other_words(v) for v in value]
    if name in ("items", "additionalItems", "additionalProperties"):
        return in_other_words(value)
    return value


def _apart(branches: Any) -> bool:
    """Each branch lists its values, and no value stands in two of them."""
    if not isinstance(branches, list) or not branches:
        return False
    seen: set[str] = set()
    for branch in branches:
        values = _values(branch)
        if values is None or seen & values:
            return False
        seen |= values
    return True


def _values(branch: Any) -> set[str] | None:
    """The values that a branch lists, as texts that are equal where JSON's values are."""
    if not isinstance(branch, dict) or ("const" not in branch) == ("enum" not in branch):
        return None
    listed = [branch["const"]] if "const" in branch else branch["enum"]
    return {_canonical(value) for value in listed} if isinstance(listed, list) else None


def _canonical(value: Any) -> str:
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: Any) -> Any:
    """1.0 is 1 in JSON."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list) else value
