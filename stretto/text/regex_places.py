"""Where in a regular expression a text stands, so that masks made at a place once are good wherever it comes again.

llguidance's automata do not tell their states. For plain regular expressions the place is worked out here, beside them,
by derivatives (J. Brzozowski, "Derivatives of Regular Expressions", 1964): what may follow a text is an expression
again, and equal expressions let the same texts through.

    [a-z]{1,9},      "a" ->  [a-z]{0,8},      "b" ->  [a-z]{0,7},      "," ->  (nothing; the answer may end)

A place is that expression and the first bytes of a character that a token has cut. Masks are llguidance's own, and so
is what a class holds: it is taken as it is written, and llguidance is asked of each character once. Two places of equal
`key` have equal masks, since no token can tell them apart: counts beyond the longest token that the expression could
take are alike, and so is what lies behind as many characters. That holds for places of two expressions as well.

Expressions with anchors, flags or lazy repetitions have no places here, nor have those that grow too large; their masks
are made each time. What is remembered is bounded, and so is work that brings no mask (`RegexPlaces`). No torch in this
module.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import count
from typing import Any, NamedTuple

MAX_SOURCE = 1000  # characters of an expression
MAX_DEPTH = 40  # groups within groups
MAX_SIZE = 96  # parts of an expression: a step takes as many times a microsecond
MAX_ENTRIES = 60_000  # of all tables of one expression together; then they are begun anew
ENTRY_BYTES = 100  # of each, at most
CREDIT = 4000  # steps from state to state that may be worked out before they bring masks
WORTH = 8  # such steps that one mask pays for
SHORT = 16  # bytes; tokens up to here are not looked at one by one

# Expressions are tuples, so that equal ones are found in tables.
#   ("one", text)              one character: of a class, or itself
#   ("seq", (x, y, ...))       one after another; ("seq", ()) is the empty text
#   ("alt", frozenset)         one of them
#   ("rep", x, least, most)    x so often; most None: without end
Expression = tuple[Any, ...]
EMPTY: Expression = ("seq", ())
NOWHERE = -1  # no text goes on so, or it leads too far


class State:
    """What may follow. `steps`: by character, as far as they were asked for, to which known state: its place in a list,
    since states that held each other would be cycles, which only Python's collector frees. States of equal `number`
    cannot be told apart by any token."""

    __slots__ = ("expression", "number", "steps")

    def __init__(self, expression: Expression, number: int):
        self.expression, self.number = expression, number
        self.steps: dict[str, int] = {}


class Place(NamedTuple):
    state: State
    begun: bytes  # of a character


class NoPlaces(ValueError):
    """The expression is of a kind that is not followed here."""


class TokenTexts:
    """The texts of a vocabulary's tokens, one that is no text as bytes that are no UTF-8, and those of more than SHORT
    bytes by length: they are what a counted repetition could tell apart."""

    def __init__(self, texts: Sequence[bytes]):
        self.texts = texts
        kinds = {(len(token), "".join(sorted(set(token.decode("utf-8", "ignore"))))) for token in texts
                 if len(token) > SHORT}
        self._kinds = sorted(kinds, key=lambda kind: (-kind[0], kind[1]))

    def longest(self, holds: Callable[[str], bool]) -> int:
        """Bytes of the longest token all of whose characters hold; SHORT where it is not longer."""
        return next((length for length, characters in self._kinds if all(map(holds, characters))), SHORT)


class Numbers:
    """Of expressions as `_nearby` makes them, for all grammars of one vocabulary: a mask is good wherever the same may
    follow. No number is given to two expressions; one that was forgotten gets another number."""

    def __init__(self, most: int = 4 * MAX_ENTRIES):
        self._most, self._size = most, 0
        self._known: dict[Expression, int] = {}
        self._next = count()

    def of(self, expression: Expression) -> int:
        """Any thread may ask."""
        number = self._known.get(expression)
        if number is None:
            if self._size > self._most:
                self._known, self._size = {}, 0
            number = self._known[expression] = next(self._next)
            self._size += _size(expression)
        return number


class RegexPlaces:
    """The places of one expression. Not thread-safe.

    `is_in(written, character)`: whether a class, as it is written, holds a character; ValueError where it is no class.
    Raises NoPlaces.

    Steps that are worked out cost time, and are worth it if masks come again. They are paid from a credit, to which
    each mask that came again adds (`reused`); where it is used up, nothing new has a place any more."""

    def __init__(self, source: str, is_in: Callable[[str, str], bool], tokens: TokenTexts, numbers: Numbers):
        self._is_in, self._texts, self._numbers = is_in, tokens.texts, numbers
        self._classes: dict[tuple[str, str], bool] = {}
        self._known: list[State] = []
        self._found: dict[Expression, int] = {}  # where in the list
        self._left: list[State] = []  # that have steps, known and forgotten ones
        self._entries, self._credit = 0, CREDIT
        whole = parsed(source)
        if _size(whole) > MAX_SIZE:
            raise NoPlaces("it is too large")
        written = sorted(_written(whole))
        try:
            for one in written:
                self._holds(one, "a")
        except ValueError as e:
            raise NoPlaces(str(e)) from None
        self._reach = tokens.longest(lambda character: any(self._holds(one, character) for one in written))
        self.start = Place(self._known[self._state(whole)], b"")

    def after(self, place: Place, token: int) -> Place | None:
        """None where the token leads nowhere, or where it leads is not known."""
        if not 0 <= token < len(self._texts):
            return None
        text, begun = _cut(place.begun + self._texts[token])
        if text is None:
            return None
        state = place.state
        for character in text:
            after = state.steps.get(character)
            if after is None:
                after = self._step(state, character)
            if after == NOWHERE:
                return None
            state = self._known[after]
        return Place(state, begun)

    @property
    def size(self) -> int:
        """Bytes, estimated; a little more where turns hold places that were forgotten. Any thread may ask."""
        return self._entries * ENTRY_BYTES

    @staticmethod
    def key(place: Place) -> tuple[int, bytes]:
        """Equal keys, equal masks, of whatever expressions."""
        return place.state.number, place.begun

    def reused(self, masks: int) -> None:
        self._credit = min(self._credit + masks * WORTH, CREDIT)

    def _step(self, state: State, character: str) -> int:
        if self._credit <= 0:
            return NOWHERE
        self._credit -= 1
        if self._entries > MAX_ENTRIES:
            self._forget()
        found = self._derivative(state.expression, character)
        if not state.steps:
            self._left.append(state)
        after = NOWHERE if found is None or _size(found) > MAX_SIZE else self._state(found)
        state.steps[character] = after
        self._entries += 1
        return after

    def _forget(self) -> None:
        """Begins the tables anew. Places that turns hold stay good, and find their way again."""
        for state in self._left:
            state.steps = {}
        start = self.start.state
        self._classes, self._left, self._known, self._found = {}, [], [start], {start.expression: 0}
        self._entries = _size(start.expression)

    def _state(self, expression: Expression) -> int:
        known = self._found.get(expression)
        if known is None:
            number = self._numbers.of(_nearby(expression, self._reach))
            self._found[expression] = known = len(self._known)
            self._known.append(State(expression, number))
            self._entries += _size(expression)
        return known

    def _holds(self, written: str, character: str) -> bool:
        if len(written) == 1 and written != ".":
            return written == character
        known = self._classes.get((written, character))
        if known is None:
            self._classes[written, character] = known = self._is_in(written, character)
            self._entries += 1
        return known

    def _derivative(self, x: Expression, character: str) -> Expression | None:
        """What may follow the character, as far as `x` goes; None: the character may not come."""
        if x[0] == "one":
            return EMPTY if self._holds(x[1], character) else None
        if x[0] == "alt":
            return _either(self._derivative(one, character) for one in x[1])
        if x[0] == "rep":
            _, one, least, most = x
            first = self._derivative(one, character)
            if first is None:
                return None
            return _joined([first, _repeated(one, max(least - 1, 0), None if most is None else most - 1)])
        ways = []
        for i, part in enumerate(x[1]):
            if (first := self._derivative(part, character)) is not None:
                ways.append(_joined([first, *x[1][i + 1 :]]))
            if not _may_be_empty(part):
                break
        return _either(ways)


# --------------------------------------------------------------------------------------------------------- expressions
def _joined(parts: Iterable[Expression]) -> Expression:
    flat: list[Expression] = []
    for part in parts:
        flat += part[1] if part[0] == "seq" else [part]
    return flat[0] if len(flat) == 1 else ("seq", tuple(flat))


def _either(ways: Iterable[Expression | None]) -> Expression | None:
    """None among them is a way that leads nowhere."""
    found: set[Expression] = set()
    for way in ways:
        if way is not None:
            found |= way[1] if way[0] == "alt" else {way}
    if len(found) < 2:
        return next(iter(found), None)
    return ("alt", frozenset(found))


def _repeated(x: Expression, least: int, most: int | None) -> Expression:
    if most == 0 or x == EMPTY:
        return EMPTY
    if least == most == 1:
        return x
    return ("rep", x, 0 if _may_be_empty(x) else least, most)


def _may_be_empty(x: Expression) -> bool:
    if x[0] == "seq":
        return all(map(_may_be_empty, x[1]))
    if x[0] == "alt":
        return any(map(_may_be_empty, x[1]))
    return x[0] == "rep" and x[2] == 0


def _size(x: Expression) -> int:
    if x[0] == "rep":
        return 1 + _size(x[1])
    return 1 if x[0] == "one" else 1 + sum(map(_size, x[1]))


def _written(x: Expression) -> set[str]:
    if x[0] == "one":
        return {x[1]}
    return _written(x[1]) if x[0] == "rep" else set[str]().union(*map(_written, x[1]))


def _shortest(x: Expression) -> int:
    """Characters of the shortest text."""
    if x[0] == "one":
        return 1
    if x[0] == "rep":
        return x[2] * _shortest(x[1])
    return (sum if x[0] == "seq" else min)(map(_shortest, x[1]))


def _nearby(x: Expression, reach: int) -> Expression:
    """One that lets the same texts of up to `reach` characters through, whole or as beginnings, and is the same for
    more of the expressions that do so."""
    if x[0] == "one":
        return x
    if x[0] == "alt":
        found = _either(_nearby(one, reach) for one in x[1])
        assert found is not None
        return found
    if x[0] == "rep":
        _, one, least, most = x
        each = max(_shortest(one), 1)
        enough = reach // each + 1  # as many are longer than `reach`
        return ("rep", _nearby(one, reach), min(least, enough), None if most is None or most >= enough else most)
    parts: list[Expression] = []
    for part in x[1]:
        parts.append(_nearby(part, reach))
        reach -= _shortest(part)
        if reach < 0:
            break  # nothing comes as far as what follows
    return _joined(parts)


# ------------------------------------------------------------------------------------------------------------- reading
_COUNT = re.compile(r"\{([0-9]{1,9})(,?)([0-9]{0,9})\}")
_ESCAPE = re.compile(r"\\(?:[dDwWsSnrtfv\\.+*?()|\[\]{}^$#&\-~/\"']|x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}"
                     r"|[xuU]\{[0-9A-Fa-f]{1,8}\}|[pP]\{[A-Za-z0-9_=:]+\}|[pP][A-Z])")
_SIGNS = frozenset("\\.+*?()|[]{}^$")
_BOUNDS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}


def parsed(source: str) -> Expression:
    """Raises NoPlaces. What llguidance refuses may be read here; it never comes to a mask."""
    if len(source) > MAX_SOURCE:
        raise NoPlaces("it is too long")
    reader = _Reader(source)
    found = reader.alternatives(0)
    if reader.at < len(source):
        raise NoPlaces("a bracket too many")
    return found


class _Reader:
    def __init__(self, source: str):
        self.source, self.at = source, 0

    def _next(self, text: str) -> bool:
        if self.source.startswith(text, self.at):
            self.at += len(text)
            return True
        return False

    def alternatives(self, depth: int) -> Expression:
        if depth > MAX_DEPTH:
            raise NoPlaces("groups within groups")
        ways = [self._sequence(depth)]
        while self._next("|"):
            ways.append(self._sequence(depth))
        found = _either(ways)
        assert found is not None
        return found

    def _sequence(self, depth: int) -> Expression:
        parts = []
        while self.at < len(self.source) and self.source[self.at] not in "|)":
            parts.append(self._counted(self._part(depth)))
        return _joined(parts)

    def _part(self, depth: int) -> Expression:
        if self._next("("):
            if not self._next("?:") and self._next("?"):
                raise NoPlaces("flags, or a group with a name")
            inner = self.alternatives(depth + 1)
            if not self._next(")"):
                raise NoPlaces("a group without an end")
            return inner
        return ("one", self._one())

    def _one(self) -> str:
        begin, sign = self.at, self.source[self.at]
        if sign == "\\":
            escape = _ESCAPE.match(self.source, begin)
            if escape is None:
                raise NoPlaces("an escape that may be more than a character")
            self.at = escape.end()
        elif sign == "[":
            self.at = self._end_of_class(begin)
        elif sign in _SIGNS and sign != ".":
            raise NoPlaces(f"{sign} here")
        else:
            self.at += 1
        return self.source[begin : self.at]

    def _end_of_class(self, begin: int) -> int:
        """Classes may stand within classes; a ] that comes first is a character."""
        depth, at = 0, begin
        while at < len(self.source):
            if self.source[at] == "\\":
                at += 2
            elif self.source[at] == "[":
                depth += 1
                at += 2 if self.source.startswith("^", at + 1) else 1
                at += self.source.startswith("]", at)
            else:
                depth -= self.source[at] == "]"
                at += 1
                if depth == 0:
                    return at
        raise NoPlaces("a class without an end")

    def _counted(self, x: Expression) -> Expression:
        again = False
        while self.at < len(self.source) and self.source[self.at] in "*+?{":
            if again and self.source[self.at] == "?":
                raise NoPlaces("a lazy repetition")
            again = True
            least, most = self._count()
            if most is not None and least > most:
                raise NoPlaces("a count")
            x = _repeated(x, least, most)
        return x

    def _count(self) -> tuple[int, int | None]:
        for sign, bounds in _BOUNDS.items():
            if self._next(sign):
                return bounds
        counted = _COUNT.match(self.source, self.at)
        if counted is None:
            raise NoPlaces("a count")
        self.at = counted.end()
        least, comma, most = counted.groups()
        return int(least), (int(most) if most else None) if comma else int(least)


@lru_cache(100_000)
def _cut(data: bytes) -> tuple[str | None, bytes]:
    """Its whole characters, and the beginning of the next; None where it is no UTF-8."""
    try:
        return data.decode(), b""
    except UnicodeDecodeError as e:
        if e.reason != "unexpected end of data":
            return None, b""
        return data[: e.start].decode(), data[e.start :]
