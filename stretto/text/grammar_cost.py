"""What a JSON schema costs before llguidance counts its own work.

A multiple of m is recognised by an automaton with a state for each remainder, m of them, all of which are visited when
the grammar is built; no fuel is counted there. Parts that hold at the same place meet in one automaton, whose size is
their least common multiple:

    {"multipleOf": 4, "allOf": [{"multipleOf": 6}]}     12 states
    {"anyOf": [{"multipleOf": 4}, {"multipleOf": 6}]}   4 + 6 states, as alternatives
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from stretto.text.json_schema import children

MAX_REMAINDERS = 100_000  # of a whole grammar; about half a second of building
_JSON_IN_LARK = re.compile(r"%json\s*")


def schemas_of(text: str) -> list[Any]:
    """Every JSON schema of a grammar in llguidance's form (its JSON, or Lark with %json)."""
    if not text.lstrip().startswith("{"):
        return _schemas_in_lark(text)
    found: list[Any] = []
    grammars = json.loads(text).get("grammars")
    for part in grammars if isinstance(grammars, list) else []:
        if isinstance(part, dict):
            found.append(part.get("json_schema"))
            found += _schemas_in_lark(str(part.get("lark_grammar") or ""))
    return found


def _schemas_in_lark(text: str) -> list[Any]:
    found, decoder = [], json.JSONDecoder()
    for match in _JSON_IN_LARK.finditer(text):
        try:
            found.append(decoder.raw_decode(text, match.end())[0])
        except ValueError:  # within a string or a comment; or broken, which the compiler says
            continue
    return found


def remainders(schema: Any) -> int:
    """The states that the schema's multiples need together. Raises RecursionError for one that is nested too deep."""
    return _Remainders(schema).total()


class _Remainders:
    def __init__(self, root: Any):
        self._root, self._known = root, {}  # type: ignore[var-annotated]

    def total(self) -> int:
        return sum(states for part in _places(self._root) if (states := self._states(part)) > 1)

    def _states(self, part: Any) -> int:
        """Of one place: the part, and the parts that hold there with it."""
        if not isinstance(part, dict):
            return 1
        if id(part) not in self._known:
            self._known[id(part)] = 1  # where a reference comes back to it
            self._known[id(part)] = self._combined(part)
        return self._known[id(part)]

    def _combined(self, part: dict[str, Any]) -> int:
        together = [_whole(part.get("multipleOf")), *(self._states(p) for p in _list(part, "allOf"))]
        if isinstance(part.get("$ref"), str):
            together.append(self._referred(part["$ref"]))
        states = math.lcm(*together)
        for name in ("anyOf", "oneOf"):
            each = [self._states(p) for p in _list(part, name)]
            if each and max(states, *each) > 1:
                states *= sum(each)
        return states

    def _referred(self, reference: str) -> int:
        found = _pointed(self._root, reference)
        if found is not None:
            return self._states(found)
        return math.lcm(*(_whole(p.get("multipleOf")) for p in _dicts(self._root)))  # by a name: it may be any of them


def _whole(multiple: Any) -> int:
    """The digits of a number, without its decimal point: 2.50 -> 25."""
    if isinstance(multiple, bool) or not isinstance(multiple, (int, float)) or not math.isfinite(multiple):
        return 1  # the compiler says what is wrong
    digits = abs(Decimal(str(multiple))).normalize()
    return max(1, int(digits.scaleb(max(0, -int(digits.as_tuple().exponent)))))


def _pointed(root: Any, reference: str) -> Any:
    """What a JSON pointer (#/a/0/b) points to; None where there is no such part."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    part = root
    for name in reference[2:].split("/") if len(reference) > 2 else ():
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(part, list) and name.isdecimal() and int(name) < len(part):
            part = part[int(name)]
        elif isinstance(part, dict) and name in part:
            part = part[name]
        else:
            return None
    return part


def _list(part: dict[str, Any], name: str) -> list[Any]:
    value = part.get(name)
    return value if isinstance(value, list) else []


def _places(part: Any) -> Iterator[Any]:
    """The parts of a schema that stand for a place of their own: not those that hold where their parent does."""
    yield part
    for path, child in children(part):
        shared = path.split("/")[1] in ("allOf", "anyOf", "oneOf")
        below = _places(child)
        if shared:
            next(below)
        yield from below


def _dicts(part: Any) -> Iterator[dict[str, Any]]:
    if isinstance(part, dict):
        yield part
    for _, child in children(part):
        yield from _dicts(child)
