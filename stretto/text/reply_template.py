"""Answers in the form that a model's own response template declares, read by transformers' parser.

    tokenizer_config.json: "response_template"    what the model's author says
    HARMONY                                       the same for gpt-oss, whose files may say nothing

What comes out is what the parser gives for the whole text, and nothing that was written is lost: where the parser finds
a call that is none, it and what follows are content. Calls of gpt-oss are read while they grow; a template that a model
declares gives a call when it is complete. No torch in this module.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from stretto.text.call_forms import JsonArguments, call_of
from stretto.text.reply import CallArguments, CallBegin, Content, Part, Reasoning, Words

HARMONY: Mapping[str, Any] = {  # gpt-oss: https://developers.openai.com/cookbook/articles/openai-harmony
    "start_anchor": "<|start|>assistant", "fields": {
        "reasoning": {"open_pattern": r"<\|channel\|>analysis\s*<\|message\|>", "close": ["<|end|>", "<|return|>"]},
        "content": {"open_pattern": r"<\|channel\|>(?:final|commentary)\s*(?:<\|constrain\|>\w*)?<\|message\|>",
                    "close": ["<|end|>", "<|return|>"]},
        "growing_calls": {"open_pattern": r"(?:<\|channel\|>\w+\s*)?\bto=functions\.(?=[^\s<])",
                          "close": ["<|call|>", "<|end|>"], "content_args": {"strip": False}, "repeats": True}}}
_GROWING = "growing_calls"
_GROWING_HEAD = re.compile(r"([^\s<]+)[^{}]*?<\|message\|>\s*")
_HEAD_LENGTH = 512  # at most; where it is longer it is none, and is not looked for again with every token
_UNREADABLE = (ValueError, LookupError, TypeError)  # what the parser raises
_CONTENT, REASONING = ("content",), ("thinking", "reasoning", "reasoning_content")


class GrowingCall:
    """`f <|constrain|>json<|message|>{"x": ...`: a name, and an object behind a mark. What is no such call is words.
    `number`: of the call in its answer."""

    def __init__(self, number: int = 0):
        self._number, self._text = number, ""  # not read yet
        self._arguments: JsonArguments | None = None
        self._done = False

    def add(self, text: str) -> list[Part]:
        self._text += text
        parts: list[Part] = []
        if self._arguments is None:
            head = _GROWING_HEAD.match(self._text, 0, _HEAD_LENGTH)
            if head is None or not self._text.startswith("{", head.end()):
                return []
            self._text, self._arguments = self._text[head.end() :], JsonArguments()
            parts.append(CallBegin(self._number, head[1]))
        if not self._done:
            read = self._arguments.read(self._text)
            self._text, self._done = self._text[read.end :], read.done
            parts += [CallArguments(self._number, read.json)] if read.json else []
        return parts

    def rest(self, final: bool) -> tuple[list[Part], str]:
        """At its end: what of it did not come out, and words. A call may have no arguments. `final`: it may be cut."""
        head = _GROWING_HEAD.fullmatch(self._text)
        if head is None or self._arguments or len(self._text) > _HEAD_LENGTH:
            return [], self._text
        return [CallBegin(self._number, head[1]), *([] if final else [CallArguments(self._number, "{}")])], ""


class TemplateReply:
    """`prompt`: the text that the answer continues; `tools`: as the template
    gets them, for the types of arguments. Raises ValueError where the template itself is wrong."""

    def __init__(self, template: Mapping[str, Any], prompt: str, tools: list[dict[str, Any]] | None = None):
        self.calls = 0
        fields = {name: {**field, "optional": True} for name, field in template.get("fields", {}).items()}
        self._template, self._prompt, self._tools = {**template, "fields": fields}, prompt, tools
        self._verbatim = {name for name, field in fields.items()
                          if field.get("content_args", {}).get("strip") is False}
        self._parser = self._new_parser()
        self._text = ""  # all of it
        self._plain = False  # the parser has failed: the rest is content
        self._words = {name: Words(begins) for name, begins in self._prompted()}  # of each field
        self._told: dict[type, int] = {Content: 0, Reasoning: 0}  # characters that came out
        self._growing, self._ends = GrowingCall(), False

    def _new_parser(self) -> Any:
        from transformers.utils.chat_parsing import ResponseParser
        from transformers.utils.chat_parsing.response_templates import load_response_template

        spec = load_response_template(self._template)
        begun = spec.start_anchor_re.search(self._prompt) is not None  # else what users wrote would be read as answer
        return ResponseParser(spec, prefix=self._prompt if begun else "", tools=self._tools)  # type: ignore[arg-type]

    def _prompted(self) -> Iterator[tuple[str, bool]]:
        """The regions that the prompt has opened, and whether nothing was said in them."""
        for event in self._parser.initial_events:
            if event["type"] != "region_close":
                yield event["field"], not event.get("text", "").strip()

    def feed(self, text: str) -> list[Part]:
        if self._plain:
            return [Content(text)] if text else []
        self._text += text
        return self._read(lambda: self._parser.feed(text))

    def finish(self) -> list[Part]:
        self._ends = True
        return [] if self._plain else self._read(lambda: self._parser.finalize()[1])

    def _read(self, events: Callable[[], list[dict[str, Any]]]) -> list[Part]:
        told, calls = dict(self._told), self.calls
        try:
            return self._parts(events())
        except _UNREADABLE:
            self._told, self.calls = told, calls
            return self._give_up()

    def _parts(self, events: list[dict[str, Any]]) -> list[Part]:
        parts: list[Part] = []
        for event in events:
            kind, name = event["type"], event["field"]
            if name == _GROWING:
                parts += self._grow(kind, event.get("text", ""))
            elif kind == "region_open":
                self._words.setdefault(name, Words(True)).mark()
            elif kind == "region_chunk" and name in (*_CONTENT, *REASONING):
                parts += self._said(name, event["text"])
            elif kind == "region_close" and name == "tool_calls":
                for call in event["value"] if isinstance(event["value"], list) else [event["value"]]:
                    parts += self._call(call)
        return parts

    def _said(self, name: str, text: str) -> list[Part]:
        words = text if name in self._verbatim else self._words[name].add(text)
        if not words:
            return []
        part = Content(words) if name in _CONTENT else Reasoning(words)
        self._told[type(part)] += len(words)
        return [part]

    def _grow(self, kind: str, text: str) -> list[Part]:
        """Of a call that comes out while it is written."""
        if kind == "region_open":
            self._growing = GrowingCall(self.calls)
            return []
        if kind == "region_chunk":
            parts = self._growing.add(text)
        else:
            parts, words = self._growing.rest(self._ends)
            self._words.setdefault(_CONTENT[0], Words(True)).mark()
            parts = [*parts, *self._said(_CONTENT[0], words)]
        self.calls += sum(isinstance(part, CallBegin) for part in parts)
        return parts

    def _call(self, value: Any) -> list[Part]:
        call = call_of(value)
        if call is None:
            raise ValueError("a call without a name")
        self.calls += 1
        return [CallBegin(self.calls - 1, call[0]), CallArguments(self.calls - 1, call[1])]

    def _give_up(self) -> list[Part]:
        """The parser has met a region that it cannot read, and has kept to itself what it read before that. It is led
        to the same place again, one character after the other, so that the cut of the text decides nothing."""
        again, at = TemplateReply(self._template, self._prompt, self._tools), 0
        parts: list[Part] = []
        for i, char in enumerate(self._text):
            try:
                events = again._parser.feed(char)
                parts += again._parts(events)
            except _UNREADABLE:
                break
            if any(e["type"] != "region_chunk" or e["field"] != "tool_calls" for e in events):
                at = i + 1  # what stands before it has come out
        self._plain = True
        return self._untold([*parts, Content(self._text[at:])])

    def _untold(self, parts: list[Part]) -> list[Part]:
        """Those that did not come out yet."""
        told = dict(self._told)
        out: list[Part] = []
        for part in parts:
            if isinstance(part, CallBegin | CallArguments):
                if part.call >= self.calls:
                    out.append(part)
                continue
            known = min(told[type(part)], len(part.text))
            told[type(part)] -= known
            if rest := part.text[known:]:
                out.append(type(part)(rest))
        self.calls = 1 + max((part.call for part in out if isinstance(part, CallBegin)), default=self.calls - 1)
        return out
