r"""Tool calls whose arguments stand between tags, a value each, as text (`tags` says how it is read):

    function    <tool_call>\n<function=f>\n<parameter=x>\nvalue\n</parameter>\n</function>\n</tool_call>
                Qwen 3 Coder, Qwen 3.5
    argument    <tool_call>f\n<arg_key>x</arg_key>\n<arg_value>value</arg_value>\n</tool_call>
                GLM 4.5 and later

Strings come out while they grow, other values when they are complete: until then nobody knows whether they are what
they should be.

    "<parameter=s>\nab"  ->  {"s": "ab          and then  "c\n</parameter>"  ->  c"

No torch in this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from stretto.text.call_forms import CALL, END_CALL, Calls, Head, Read, Tail, Words, end_of_call, json_text, marked_calls
from stretto.text.tag_rules import TagRules, properties
from stretto.text.tags import Tags, Types, types_of, value_of


class TagArguments:
    """The arguments of one call, read into JSON text."""

    def __init__(self, tags: Tags, schema: Any):
        self._tags = tags
        self._types = {key: types_of(part, schema) for key, part in properties(schema).items()}
        self._text, self._at = "", 0  # what is read, and how far
        self._json, self._done = "{", False
        self._several = False  # a value was read
        self._kind: Types = ()  # of the value that is read
        self._raw = ""  # of it, where it comes out whole
        self._step = self._between

    def read(self, text: str) -> Read:
        self._text, self._at = text, 0
        while not self._done and self._step():
            pass
        out, self._json = self._json, ""
        return Read(self._at, out, self._done)

    # ------------------------------------------- steps: True where another one may go on, False where text is wanted
    def _between(self) -> bool:
        key = self._tags.key.search(self._text, self._at)
        stop = _first(self._text, self._at, (self._tags.stop, END_CALL))
        if key is not None and (stop is None or key.start() < stop[0]):
            self._json += f"{', ' if self._several else ''}{json_text(key[1].strip())}: "
            self._kind, self._several, self._at = self._types.get(key[1].strip(), ()), True, key.end()
            self._step = self._line_break if self._tags.breaks else self._value
            return True
        if stop is not None:
            self._json, self._at, self._done = self._json + "}", stop[0], True
            return True
        begun = self._text.rfind(self._tags.begin, self._at)  # of a key; what stands before it has no meaning
        self._at = begun if begun >= 0 else self._kept((self._tags.begin, self._tags.stop, END_CALL))
        return False

    def _line_break(self) -> bool:
        if self._at == len(self._text):
            return False
        self._at += self._text[self._at] == "\n"
        self._step = self._value
        return True

    def _value(self) -> bool:
        is_string = self._kind in ((), ("string",))
        self._json += '"' if is_string else ""
        self._raw, self._step = "", self._string if is_string else self._other
        return True

    def _string(self) -> bool:
        piece, ends = self._more()
        self._json += json_text(piece)[1:-1] + ('"' if ends else "")
        return ends

    def _other(self) -> bool:
        piece, ends = self._more()
        self._raw += piece
        if ends:
            self._json += json_text(value_of(self._raw, self._kind))
        return ends

    def _more(self) -> tuple[str, bool]:
        """More of a value, and whether it ends there."""
        end, begin = _first(self._text, self._at, self._tags.ends), self._at
        self._at = upto = self._kept(self._tags.ends) if end is None else end[0]
        if end is not None:
            stop = end[1].find(self._tags.stop)  # which is read again
            self._at += len(end[1]) if stop < 0 else stop
            self._step = self._between
        return self._text[begin:upto], end is not None

    def _kept(self, marks: Sequence[str]) -> int:
        """Where the end of the text begins that may become one of the marks."""
        held = max(n for mark in marks for n in range(len(mark)) if self._text.endswith(mark[:n]))
        return max(self._at, len(self._text) - held)


def _first(text: str, at: int, marks: Sequence[str]) -> tuple[int, str] | None:
    """The mark that begins first, and where."""
    found = [(place, mark) for mark in marks if (place := text.find(mark, at)) >= 0]
    return min(found, default=None)


# ------------------------------------------------------------------------------------------------------------- forms
class TagForm:
    begin, opens = CALL, False

    def __init__(self, tags: Tags):
        self.tags, self.markers, self.bare = tags, (CALL, END_CALL, *tags.markers), tags.bare

    def head(self, text: str, first: bool, final: bool) -> Head | Calls | Words | None:
        if found := self.tags.head.match(text):
            return Head(found.end(), found[1], self._tail, partial(TagArguments, self.tags))
        end = text.find(END_CALL)
        if end >= 0:
            return Words(end + len(END_CALL))
        return Words(len(text)) if final else None

    def _tail(self, text: str, final: bool) -> Tail | None:
        stop = self.tags.stop
        begun = len(stop) if stop != END_CALL and text.startswith(stop) else 0
        behind = end_of_call(text[begun:], final)
        return None if behind is None else Tail(begun + behind.end)

    def rules(self, calls: Sequence[tuple[str, str]], several: bool, sign: Callable[[str], str]) -> list[str]:
        return [*marked_calls(several, sign), *TagRules(self.tags, sign).calls(calls)]
