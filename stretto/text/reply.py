"""An answer taken apart as it grows: reasoning, content and tool calls.

The form that most open models write, first by Hermes 2 Pro:

    <think>why</think> words <tool_call>{"name": "f", "arguments": {...}}</tool_call> <tool_call>...

What comes out depends on the text alone, not on how it is cut into pieces: a decision is made when the text that it
depends on is there, and never by the length of a piece. Nothing that was written is lost: what only looks like a call
is content. White space beside a marker belongs to the marker. No torch in this module.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"
# the usual order of a call's parts; anything else is read when the call is complete. A name holds no marker.
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\<>]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_TAIL = re.compile(r"\s*\}?\s*")


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


class MarkedReply:
    """`thinking`: the prompt has opened the reasoning. `reasoning`: an answer may begin with reasoning. `tools`: it may
    hold calls."""

    def __init__(self, *, thinking: bool = False, reasoning: bool = False, tools: bool = False):
        self.calls = 0
        self._tools = tools
        self._buffer = ""  # not looked at, or not decided
        self._space = ""  # white space that is content only if words follow it
        self._parts: list[Part] = []
        self._depth, self._quoted, self._escaped = 0, False, False  # place in the arguments' JSON
        self._trimming = thinking  # nothing was said since a marker
        self._step: Callable[[bool], bool] = (self._reasoning if thinking else self._opening if reasoning
                                              else self._content)

    def feed(self, text: str) -> list[Part]:
        self._buffer += text
        return self._run(final=False)

    def finish(self) -> list[Part]:
        parts = self._run(final=True)
        if self._step == self._content and self._space and not self.calls and not self._trimming:
            parts.append(Content(self._space))
        self._space = ""
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
            self._buffer, self._trimming, self._step = said[len(THINK):], True, self._reasoning
        elif THINK.startswith(said) and not final:
            return False
        else:
            self._step = self._content
        return True

    def _reasoning(self, final: bool) -> bool:
        found = self._until(END_THINK, final)
        self._say(Reasoning, found.before)
        if found.whole:
            self._mark(self._content)
        return found.whole

    def _content(self, final: bool) -> bool:
        if not self._tools:
            self._say(Content, self._buffer)
            self._buffer = ""
            return False
        found = self._until(CALL, final)
        self._say(Content, found.before)
        if found.whole:
            self._mark(self._call_head)
        return found.whole

    def _call_head(self, final: bool) -> bool:
        if head := _HEAD.match(self._buffer):
            self._begin(head[1])
            self._buffer, self._step = self._buffer[head.end():], self._arguments
            return True
        inner, marker, rest = self._buffer.partition(END_CALL)
        if marker:
            self._buffer = rest
            self._whole_call(inner)
            return True
        if final and self._buffer:
            self._say(Content, CALL + self._buffer)
            self._buffer = ""
        return False

    def _arguments(self, final: bool) -> bool:
        end = self._scan(self._buffer)
        if text := self._buffer[:end]:
            self._parts.append(CallArguments(self.calls - 1, text))
        self._buffer = self._buffer[end:]
        if self._depth:
            return False
        self._step = self._call_tail
        return True

    def _call_tail(self, final: bool) -> bool:
        rest = self._buffer[_TAIL.match(self._buffer).end():]  # type: ignore[union-attr]
        if END_CALL.startswith(rest) and rest != END_CALL:
            if final:
                self._buffer = ""
            return False
        self._buffer = rest.removeprefix(END_CALL)
        self._mark(self._content)
        return True

    # ----------------------------------------------------------------------------------------------------- inside
    class _Found(NamedTuple):
        before: str
        whole: bool  # the marker was there, and is gone from the buffer

    def _until(self, marker: str, final: bool) -> _Found:
        """What stands before the marker, or before what may become one."""
        before, found, rest = self._buffer.partition(marker)
        if found:
            self._buffer = rest
            return self._Found(before, True)
        held = 0 if final else next(n for n in range(min(len(marker) - 1, len(before)), -1, -1)
                                    if before.endswith(marker[:n]))
        cut = len(before) - held
        self._buffer = before[cut:]
        return self._Found(before[:cut], False)

    def _say(self, kind: type[Reasoning] | type[Content], text: str) -> None:
        text = self._space + text
        if self._trimming:
            text = text.lstrip()
        words = text.rstrip()
        self._space = text[len(words):]
        if words:
            self._parts.append(kind(words))
            self._trimming = False

    def _mark(self, step: Callable[[bool], bool]) -> None:
        """A marker has been read."""
        self._space, self._trimming, self._step = "", True, step

    def _begin(self, name: str) -> None:
        self._parts.append(CallBegin(self.calls, name))
        self.calls += 1

    def _scan(self, text: str) -> int:
        """Where the arguments' object ends in `text`, else its length."""
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

    def _whole_call(self, inner: str) -> None:
        try:
            call = json.loads(inner)
        except (ValueError, RecursionError):
            call = None
        name = call.get("name") if isinstance(call, dict) else None
        self._step = self._content
        if not isinstance(call, dict) or not isinstance(name, str) or not name:
            self._space, self._trimming = "", False
            self._say(Content, CALL + inner + END_CALL)
            return
        arguments = call.get("arguments", call.get("parameters", {}))
        self._begin(name)
        self._parts.append(CallArguments(self.calls - 1, arguments if isinstance(arguments, str) else _dump(arguments)))
        self._mark(self._content)


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


class TemplateReply:
    """An answer in the form that a model's own response template declares, read by transformers' parser. A call comes
    out when it is complete.

    `prompt`: the text that the answer continues."""

    def __init__(self, template: Mapping[str, Any], prompt: str, tools: list[dict[str, Any]] | None = None):
        from transformers.utils.chat_parsing import ResponseParser

        self.calls = 0
        self._parser = ResponseParser(dict(template), prefix=prompt, tools=tools)  # type: ignore[arg-type]

    def feed(self, text: str) -> list[Part]:
        return self._parts(self._parser.feed(text))

    def finish(self) -> list[Part]:
        try:
            _, events = self._parser.finalize()
        except ValueError:  # an answer that was cut lacks fields that the template requires
            return []
        return self._parts(events)

    def _parts(self, events: list[dict[str, Any]]) -> list[Part]:
        parts: list[Part] = []
        for event in events:
            kind, name = event["type"], event["field"]
            if name == "tool_calls" and kind == "region_close":
                calls = event["value"] if isinstance(event["value"], list) else [event["value"]]
                for call in calls:
                    parts += self._call(call)
            elif kind == "region_chunk" and name == "content":
                parts.append(Content(event["text"]))
            elif kind == "region_chunk" and name in ("thinking", "reasoning", "reasoning_content"):
                parts.append(Reasoning(event["text"]))
        return parts

    def _call(self, call: Any) -> list[Part]:
        function = call.get("function", call) if isinstance(call, dict) else {}
        name, arguments = function.get("name"), function.get("arguments", {})
        if not isinstance(name, str):
            return [Content(_dump(call))]
        self.calls += 1
        text = arguments if isinstance(arguments, str) else _dump(arguments)
        return [CallBegin(self.calls - 1, name), CallArguments(self.calls - 1, text)]
