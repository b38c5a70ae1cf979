"""The forms in which models write tool calls: each is read while it grows, and written as the rules of a grammar.

    hermes    <tool_call>\n{"name": "f", "arguments": {...}}\n</tool_call> ...    Hermes 2 Pro, Qwen 2.5 and 3, SmolLM 3
    llama     {"name": "f", "parameters": {...}}; ...                             Llama 3.1 to 3.3
              at the beginning of an answer, or behind <|python_tag|>
    mistral   [TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]                Mistral 7B v0.3, Nemo, Small 2409
              [TOOL_CALLS]f[ARGS]{...}[TOOL_CALLS]g[ARGS]{...}                    Mistral Small 3.2, Magistral, Devstral

`tag_forms` has those whose arguments are no JSON. A decision is made when the text that it depends on is there, so it
does not depend on how the text is cut; what has to wait for more text gives None. No torch in this module.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

CALL, END_CALL = "<tool_call>", "</tool_call>"
TOOL_CALLS, ARGS = "[TOOL_CALLS]", "[ARGS]"
PYTHON_TAG = "<|python_tag|>"

_NAMED = (r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([^"\\<>]+)"\s*,'
          r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_OBJECT_HEAD = re.compile(r"\s*" + _NAMED)  # the usual order of a call's parts; a name holds no marker
_LIST_HEAD = re.compile(r"\s*\[?\s*" + _NAMED)
_FUNCTION_HEAD = re.compile(r"\s*([\w.:/-]+)\s*(?:\[CALL_ID\]\s*[\w-]*\s*)?(?:\[ARGS\])?\s*(?=\{)")
# the end of a call's object, plain fields behind the arguments included; decided by the first } of a text
_CLOSE = re.compile(r'(?:\s*,\s*"[^"\\}]*"\s*:\s*(?:"[^"\\}]*"|[\w.+-]+))*\s*\}\s*')
_FIRST_KEY = re.compile(r'\s*\{\s*"([^"]*)"')
_KEYS = ("name", "type", "arguments", "parameters", "function")
_decoder = json.JSONDecoder()


class NotHeld(ValueError):
    """No rule can hold calls of a form to a schema. The message names the part of it."""


class Read(NamedTuple):
    """Of a call's arguments: the text up to `end` was read, gives more of their JSON text, and `done`: all of it."""

    end: int
    json: str
    done: bool


class Arguments(Protocol):
    """The arguments of one call while they grow."""

    def read(self, text: str) -> Read:
        """`text`: what was not read yet, and what has come since."""
        ...


class Tail(NamedTuple):
    """What follows a call's arguments ends at `end`. `more`: the head of another call comes next."""

    end: int
    more: bool = False


ReadTail = Callable[[str, bool], Tail | None]


class Head(NamedTuple):
    """The call's arguments begin at `end` and can be streamed: `arguments` reads them, with the schema of the function,
    if it has one; `tail` reads what follows them."""

    end: int
    name: str
    tail: ReadTail
    arguments: Callable[[Any], Arguments]


class Calls(NamedTuple):
    """Whole calls, (name, arguments as JSON text) each, up to `end`."""

    end: int
    calls: list[tuple[str, str]]


class Words(NamedTuple):
    """What stands before `end` only looked like a call."""

    end: int


class BareHead(NamedTuple):
    """A call's head that models now and then write without the marker before it, on a line of its own. `begin`: how it
    begins; `whole`: all of it and white space, group 1 the name; `part`: what may become the whole; `goes_on`: what
    stands behind it in a call, and nothing else does."""

    begin: str
    whole: re.Pattern[str]
    part: re.Pattern[str]
    goes_on: tuple[str, ...]

    def name(self, text: str, final: bool) -> str | None:
        """Whom a text that starts with `begin` calls; "": it is no call."""
        found = self.whole.match(text)
        if found is None:
            return "" if final or self.part.fullmatch(text) is None else None
        rest = text[found.end() :]
        if rest.startswith(self.goes_on):
            return found[1]
        return "" if final or not any(mark.startswith(rest) for mark in self.goes_on) else None


class CallForm(Protocol):
    """`begin`: the marker before a call. `markers`: all of them, which may be special tokens. `opens`: an answer may
    also begin with a call's head, without the marker. `bare`: a head that any line may begin with, without the marker,
    where a declared function is called."""

    @property
    def begin(self) -> str: ...

    @property
    def markers(self) -> tuple[str, ...]: ...

    @property
    def opens(self) -> bool: ...

    @property
    def bare(self) -> BareHead | None: ...

    def head(self, text: str, first: bool, final: bool) -> Head | Calls | Words | None:
        """`text` stands behind the marker or, if not `first`, behind a tail that announced another call; `final`: no
        more of it comes."""
        ...

    def rules(self, calls: Sequence[tuple[str, str]], several: bool, sign: Callable[[str], str]) -> list[str]:
        """Lark. `calls`: an answer that calls; `free`: words in which calls may stand. Each call's name and JSON schema
        are given; `sign` writes a marker. Raises NotHeld."""
        ...


class JsonArguments:
    """An object, as it is written, whatever its schema says."""

    def __init__(self, schema: Any = None) -> None:
        self._depth, self._quoted, self._escaped = 0, False, False  # place in it

    def read(self, text: str) -> Read:
        end = self._scan(text)
        return Read(end, text[:end], end > 0 and not self._depth)

    def _scan(self, text: str) -> int:
        """Where the object ends in `text`, else its length."""
        for i, char in enumerate(text):
            if self._quoted:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._quoted = False
            elif char == '"':
                self._quoted = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return i + 1
        return len(text)


def is_text(sign: str) -> bool:
    """A marker that is written as text, not as a special token."""
    return sign.startswith('"')


def lazily(rule: str, marker: str, sign: Callable[[str], str]) -> str:
    """A Lark rule: any text up to the first such marker, and the marker."""
    if not is_text(sign(marker)):
        return f"{rule}: /(.|\\n)*/ {sign(marker)}"
    return f"{rule}[lazy]: /(.|\\n)*{re.escape(marker).replace('/', chr(92) + '/')}/"


def lark_text(text: str) -> str:
    """A text in Lark."""
    return json.dumps(text).replace("\x7f", r"\u007f")


def json_text(value: Any) -> str:
    """Readable JSON that can be sent, half characters that JSON can name included."""
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text) else json.dumps(value)


def marked_calls(several: bool, sign: Callable[[str], str]) -> list[str]:
    """Calls between CALL and END_CALL, among words or not; of `inner`, what stands behind CALL."""
    return [f"calls: call{' (SPACE call)*' if several else ''}", f"call: {sign(CALL)} inner",
            f"free: {'free_call* TEXT' if several else 'free_call | TEXT'}", "free_call: before inner",
            lazily("before", CALL, sign)]


def _objects(calls: Sequence[tuple[str, str]], arguments: str) -> list[str]:
    """`one`: any of the calls as an object."""
    heads = [json.dumps(f'{{"name": {json.dumps(name)}, "{arguments}": ') for name, _ in calls]
    return [f"one: {' | '.join(f'call_{i}' for i in range(len(calls)))}",
            *(f'call_{i}: {head} %json {schema} "}}"' for i, (head, (_, schema)) in enumerate(zip(heads, calls)))]


def call_of(value: Any) -> tuple[str, str] | None:
    """(name, arguments as JSON text) of a call as an object, or None if it is no call."""
    if not isinstance(value, dict):
        return None
    inner = value.get("function")
    value = inner if isinstance(inner, dict) else value
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters", {}))
    if not isinstance(name, str) or not name:
        return None
    return name, arguments if isinstance(arguments, str) else json_text(arguments)


def _whole(text: str) -> tuple[int, Any] | None:
    """Where the JSON value ends that `text` begins with, and the value; None if it is not complete."""
    start = len(text) - len(text.lstrip())
    try:
        value, end = _decoder.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None
    return end, value


def _tail(text: str, final: bool, follows: ReadTail) -> Tail | None:
    """Of a call that is an object: the rest of it behind the arguments, then what `follows` it."""
    close = _CLOSE.match(text)
    if close is None:
        return Tail(0) if final or "}" in text else None
    behind = follows(text[close.end():], final)
    return None if behind is None else Tail(close.end() + behind.end, behind.more)


def end_of_call(text: str, final: bool) -> Tail | None:
    """END_CALL, perhaps behind white space, where it is there."""
    end = len(text) - len(text.lstrip())
    rest = text[end:]
    if rest.startswith(END_CALL):
        return Tail(end + len(END_CALL))
    if END_CALL.startswith(rest):
        return Tail(len(text)) if final else None
    return Tail(end)


class Hermes:
    begin, markers, opens, bare = CALL, (CALL, END_CALL), False, None

    def head(self, text: str, first: bool, final: bool) -> Head | Calls | Words | None:
        if found := _OBJECT_HEAD.match(text):
            return Head(found.end(), found[1], self._tail, JsonArguments)
        end = text.find(END_CALL)
        if end < 0:
            return Words(len(text)) if final else None
        try:
            call = call_of(json.loads(text[:end]))
        except (ValueError, RecursionError):
            call = None
        end += len(END_CALL)
        return Words(end) if call is None else Calls(end, [call])

    @staticmethod
    def _tail(text: str, final: bool) -> Tail | None:
        end = re.match(r"\s*\}?", text).end()  # type: ignore[union-attr]
        behind = end_of_call(text[end:], final)
        return None if behind is None else Tail(end + behind.end)

    def rules(self, calls: Sequence[tuple[str, str]], several: bool, sign: Callable[[str], str]) -> list[str]:
        return [*marked_calls(several, sign), f'inner: "\\n" one "\\n" {sign(END_CALL)}', *_objects(calls, "arguments")]


class Llama:
    begin, markers, opens, bare = PYTHON_TAG, (PYTHON_TAG,), True, None

    def head(self, text: str, first: bool, final: bool) -> Head | Calls | Words | None:
        if found := _OBJECT_HEAD.match(text):
            return Head(found.end(), found[1], partial(_tail, follows=self._follows), JsonArguments)
        said, key = text.lstrip(), _FIRST_KEY.match(text)
        if (said and said[0] != "{") or (key and key[1] not in _KEYS):
            return Words(0)
        if (whole := _whole(text)) is not None:
            call = call_of(whole[1]) if {"parameters", "arguments", "function"} & whole[1].keys() else None
            return Words(whole[0]) if call is None else Calls(whole[0], [call])
        return Words(len(text)) if final else None

    @staticmethod
    def _follows(text: str, final: bool) -> Tail | None:
        if more := re.match(r";\s*(?=\{)", text):
            return Tail(more.end(), True)
        waits = re.fullmatch(r"(;\s*)?", text) is not None and not final
        return None if waits else Tail(0)

    def rules(self, calls: Sequence[tuple[str, str]], several: bool, sign: Callable[[str], str]) -> list[str]:
        word = r"[^{<\s]" if is_text(sign(PYTHON_TAG)) else r"[^{\s]"
        more = '("; " one)*' if several else ""
        return [f"calls: one {more}", *_objects(calls, "parameters"),
                f"free: {sign(PYTHON_TAG)}? calls | WORDS", rf"WORDS: /\s*({word}(.|\n)*)?/"]


class Mistral:
    """`named`: names stand before [ARGS], not in a list of objects. What is written decides how it is read."""

    begin, opens, bare = TOOL_CALLS, False, None

    def __init__(self, named: bool):
        self.named = named
        self.markers = (TOOL_CALLS, ARGS) if named else (TOOL_CALLS,)

    def head(self, text: str, first: bool, final: bool) -> Head | Calls | Words | None:
        said = text.lstrip()
        if not first or said[:1] in ("[", "{"):
            if found := _LIST_HEAD.match(text):
                return Head(found.end(), found[1], partial(_tail, follows=self._follows), JsonArguments)
            if (whole := _whole(text)) is not None:
                values = whole[1] if isinstance(whole[1], list) else [whole[1]]
                calls = [call for call in map(call_of, values) if call is not None]
                return Calls(whole[0], calls) if calls and len(calls) == len(values) else Words(whole[0])
        elif found := _FUNCTION_HEAD.match(text):
            return Head(found.end(), found[1], lambda text, final: Tail(0), JsonArguments)
        elif (other := text.find(TOOL_CALLS)) >= 0:
            return Words(other)
        return Words(len(text)) if final else None

    @staticmethod
    def _follows(text: str, final: bool) -> Tail | None:
        if not text and not final:
            return None
        return Tail(int(text[:1] in (",", "]")), text[:1] == ",")

    def rules(self, calls: Sequence[tuple[str, str]], several: bool, sign: Callable[[str], str]) -> list[str]:
        rules = [f"call: {sign(TOOL_CALLS)} inner", lazily("before", TOOL_CALLS, sign)]
        if not self.named:
            more = '(", " one)*' if several else ""
            return [*rules, "calls: call", f'inner: / ?/ "[" one {more} "]"',
                    "free: before inner | TEXT", *_objects(calls, "arguments")]
        each = [f"call_{i}: {json.dumps(name)} {sign(ARGS)} %json {schema}" for i, (name, schema) in enumerate(calls)]
        return [*rules, f"calls: call{'+' if several else ''}", *each,
                f"inner: {' | '.join(f'call_{i}' for i in range(len(calls)))}",
                f"free: {'free_call* TEXT' if several else 'free_call | TEXT'}", "free_call: before inner"]


HERMES = Hermes()
