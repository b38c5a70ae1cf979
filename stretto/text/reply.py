"""An answer taken apart as it grows: reasoning, content and tool calls.

    <think>why</think> words <tool_call>{"name": "f", "arguments": {...}}</tool_call> <tool_call>...

or with calls of another form (`call_forms`). What comes out depends on the text alone, not on how it is cut into
pieces: a decision is made when the text that it depends on is there, and never by the length of a piece. Nothing that
was written is lost: what only looks like a call is content. White space beside a marker belongs to the marker. No torch
in this module.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from stretto.text.call_forms import Arguments, CallForm, Calls, Head, ReadTail

THINK, END_THINK = "<think>", "</think>"


class Reasoning(NamedTuple):
    text: str


class Content(NamedTuple):
    text: str


class CallBegin(NamedTuple):
    call: int  # the how-manieth of the answer, from 0
    name: str


class CallArguments(NamedTuple):
    """More of the call's arguments, as the model wrote them: JSON text."""

    call: int
    text: str


Part = Reasoning | Content | CallBegin | CallArguments


class Reply(Protocol):
    """One answer. `calls`: how many tool calls have begun."""

    calls: int

    def feed(self, text: str) -> list[Part]: ...

    def finish(self) -> list[Part]:
        """No text follows; what was held back comes out."""
        ...


class Words:
    """Words between markers. White space beside a marker is dropped, or stays where words stand on both sides.
    `begins`: a marker stands before the first of them."""

    def __init__(self, begins: bool):
        self._begins, self._said = begins, False
        self._space = ""  # white space that comes only if words follow it
        self._gap = ""  # before the marker

    def add(self, text: str) -> str:
        """What of the text, and of what was held back, can be told."""
        text = self._space + text
        if self._begins:
            bare = text.lstrip()
            if not bare:
                self._space = text
                return ""
            before = self._gap or text[: len(text) - len(bare)]
            text = (before if self._said else "") + bare
        words = text.rstrip()
        self._space = text[len(words):]
        if words:
            self._begins, self._said, self._gap = False, True, ""
        return words

    def mark(self) -> None:
        """A marker has been read."""
        if not self._begins and self._said:
            self._gap = self._space
        self._space, self._begins = "", True

    def rest(self) -> str:
        """The white space at the very end."""
        return "" if self._begins else self._space


_FENCE = re.compile(r" {0,3}(`{3,}(?=[^`]*$)|~{3,})")  # before and behind a block of code, as CommonMark has it
_LOOKED_AT = 200  # characters of a line, which may be as long as an answer


class Lines:
    """Where words stand: at the beginning of a line, or within a block of code."""

    def __init__(self) -> None:
        self._line, self._fence = "", ""  # its beginning; of the block that is open

    def add(self, text: str) -> None:
        *whole, last = text.split("\n")
        for line in whole:
            self._end((self._line + line)[:_LOOKED_AT])
            self._line = ""
        self._line = (self._line + last)[:_LOOKED_AT]

    def begin(self) -> None:
        """Another line begins, whatever stood before it."""
        self._line = ""

    def may_call(self) -> bool:
        """A line of prose begins here."""
        return not self._fence and not self._line.strip()

    def _end(self, line: str) -> None:
        if self._fence:
            rest = line.strip()
            if rest.startswith(self._fence) and not rest.strip(self._fence[0]):
                self._fence = ""
        elif found := _FENCE.match(line):
            self._fence = found[1]


class MarkedReply:
    """`thinking`: the prompt has opened the reasoning. `reasoning`: an answer may begin with reasoning. `form`: how its
    calls are written; None: it has none. `schemas`: of the functions' arguments, by name: those that may be called
    without a marker. `held`: a grammar holds the calls to their form, so that none begins without its marker."""

    def __init__(self, *, thinking: bool = False, reasoning: bool = False, form: CallForm | None = None,
                 schemas: Mapping[str, Any] | None = None, held: bool = False):
        self.calls = 0
        self._form, self._schemas = form, schemas or {}
        self._bare = None if form is None or held else form.bare
        self._begins = () if form is None else (form.begin,) if self._bare is None else (form.begin, self._bare.begin)
        self._buffer = ""  # not looked at, or not decided
        self._thought, self._words, self._lines = Words(True), Words(thinking), Lines()
        self._parts: list[Part] = []
        self._marker, self._first = "", True  # before the head that is being read
        self._reader: Arguments | None = None  # of the call that is being read
        self._tail: ReadTail | None = None
        self._answer = self._first_call if form is not None and form.opens else self._content
        self._step: Callable[[bool], bool] = (self._reasoning if thinking else self._opening if reasoning
                                              else self._answer)

    def feed(self, text: str) -> list[Part]:
        self._buffer += text
        return self._run(final=False)

    def finish(self) -> list[Part]:
        parts = self._run(final=True)
        if self._step == self._content and not self.calls and (space := self._words.rest()):
            parts.append(Content(space))
        return parts

    def _run(self, final: bool) -> list[Part]:
        while self._step(final):
            pass
        parts, self._parts = self._parts, []
        return parts

    # ------------------------------------------- steps: True where another one may go on, False where text is wanted
    def _opening(self, final: bool) -> bool:
        said = self._buffer.lstrip()
        if said.startswith(THINK):
            self._buffer, self._step = said[len(THINK):], self._reasoning
        elif THINK.startswith(said) and not final:
            return False
        else:
            self._step = self._answer
        return True

    def _reasoning(self, final: bool) -> bool:
        before, mark = self._until((END_THINK,), final)
        self._say(Reasoning, before)
        if mark:
            self._mark(self._answer)
        return bool(mark)

    def _first_call(self, final: bool) -> bool:
        said = self._buffer.lstrip()
        if not said and not final:
            return False
        self._step = self._call_head if said.startswith("{") else self._content
        return True

    def _content(self, final: bool) -> bool:
        if self._form is None:
            self._say(Content, self._buffer)
            self._buffer = ""
            return False
        before, mark = self._until(self._begins, final)
        self._say(Content, before)
        if mark == self._form.begin:
            self._marker, self._first = mark, True
            self._mark(self._call_head)
        elif mark:
            self._buffer, self._step = mark + self._buffer, self._bare_head
        return bool(mark)

    def _bare_head(self, final: bool) -> bool:
        """Prose may name a tag: only what nothing but a call can be is one."""
        assert self._bare is not None
        name = self._bare.name(self._buffer, final) if self._lines.may_call() else ""
        if name is None:
            return False
        if name in self._schemas:
            self._marker, self._first = "", True
            self._mark(self._call_head)
        else:
            said = len(self._bare.begin)
            self._say(Content, self._buffer[:said])
            self._buffer, self._step = self._buffer[said:], self._content
        return True

    def _call_head(self, final: bool) -> bool:
        assert self._form is not None
        found = self._form.head(self._buffer, self._first, final) if self._buffer else None
        if found is None:
            return False
        before, self._buffer = self._buffer[: found.end], self._buffer[found.end :]
        if isinstance(found, Head):
            self._begin(found.name)
            self._reader, self._tail = found.arguments(self._schemas.get(found.name)), found.tail
            self._step = self._arguments
        elif isinstance(found, Calls):
            for name, arguments in found.calls:
                self._begin(name)
                self._parts.append(CallArguments(self.calls - 1, arguments))
            self._mark(self._content)
        else:
            self._step = self._content
            self._say(Content, self._marker + before)
        return True

    def _arguments(self, final: bool) -> bool:
        assert self._reader is not None
        found = self._reader.read(self._buffer)
        if found.json:
            self._parts.append(CallArguments(self.calls - 1, found.json))
        self._buffer = self._buffer[found.end :]
        if found.done:
            self._step = self._call_tail
        return found.done

    def _call_tail(self, final: bool) -> bool:
        assert self._tail is not None
        found = self._tail(self._buffer, final)
        if found is None:
            return False
        self._buffer = self._buffer[found.end :]
        self._marker, self._first = "", False
        self._mark(self._call_head if found.more else self._content)
        return True

    # ----------------------------------------------------------------------------------------------------- inside
    def _until(self, marks: Sequence[str], final: bool) -> tuple[str, str]:
        """What stands before the first of the marks, and that mark, both gone from the buffer; or what stands before
        the beginning of one, and no mark."""
        found = [(place, mark) for mark in marks if (place := self._buffer.find(mark)) >= 0]
        if found:
            place, mark = min(found)
            before, self._buffer = self._buffer[:place], self._buffer[place + len(mark) :]
            return before, mark
        held = 0 if final else max(n for mark in marks for n in range(len(mark)) if self._buffer.endswith(mark[:n]))
        cut = len(self._buffer) - held
        before, self._buffer = self._buffer[:cut], self._buffer[cut:]
        return before, ""

    def _say(self, kind: type[Reasoning] | type[Content], text: str) -> None:
        words = self._words if kind is Content else self._thought
        if kind is Content:
            self._lines.add(text)
        if told := words.add(text):
            self._parts.append(kind(told))

    def _mark(self, step: Callable[[bool], bool]) -> None:
        """A marker has been read."""
        self._words.mark()
        self._lines.begin()
        self._step = step

    def _begin(self, name: str) -> None:
        self._parts.append(CallBegin(self.calls, name))
        self.calls += 1
