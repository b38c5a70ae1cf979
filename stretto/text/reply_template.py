"""Answers in the form that a model's own response template declares, read by transformers' parser.

    tokenizer_config.json: "response_template"    what the model's author says
    HARMONY, FUNCTION_TAGS, ARGUMENT_TAGS         the same for families whose files say nothing

What comes out is what the parser gives for the whole text, and nothing that was written is lost: where the parser finds
a call that is none, it and what follows are content. No torch in this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from stretto.text.call_forms import call_of
from stretto.text.reply import CallArguments, CallBegin, Content, Part, Reasoning, Words

_THOUGHT = {"open": "<think>", "close": "</think>"}
_FUNCTION = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
HARMONY: Mapping[str, Any] = {  # gpt-oss: https://developers.openai.com/cookbook/articles/openai-harmony
    "start_anchor": "<|start|>assistant", "fields": {
        "reasoning": {"open_pattern": r"<\|channel\|>analysis\s*<\|message\|>", "close": ["<|end|>", "<|return|>"]},
        "content": {"open_pattern": r"<\|channel\|>(?:final|commentary)\s*(?:<\|constrain\|>\w*)?<\|message\|>",
                    "close": ["<|end|>", "<|return|>"]},
        "tool_calls": {"open_pattern": r"(?:<\|channel\|>\w+\s*)?\bto=functions\.(?P<name>[^\s<]+)[^{}]*?<\|message\|>",
                       "close": ["<|call|>", "<|end|>"], "content": "json", "repeats": True, "transform": _FUNCTION}}}
FUNCTION_TAGS: Mapping[str, Any] = {  # Qwen 3 Coder, Qwen 3.5: <function=f> with <parameter=x> in it
    "start_anchor": "<|im_start|>assistant\n", "fields": {
        "thinking": _THOUGHT, "content": {},
        "tool_calls": {"open_pattern": r"<tool_call>\s*<function=(?P<name>[^>\n]+)>",
                       "close_pattern": r"</function>\s*</tool_call>", "content": "xml-inline", "content_args": {
                           "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"},
                       "repeats": True, "transform": _FUNCTION}}}
ARGUMENT_TAGS: Mapping[str, Any] = {  # GLM 4.5: f, then pairs of <arg_key> and <arg_value>
    "start_anchor": "<|assistant|>", "fields": {
        "thinking": _THOUGHT, "content": {},
        "tool_calls": {"open_pattern": r"<tool_call>\s*(?P<name>[^\s<]+)", "close": "</tool_call>",
                       "content": "xml-inline", "content_args": {
                           "tag_pattern": r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"},
                       "repeats": True, "transform": _FUNCTION}}}
_UNREADABLE = (ValueError, LookupError, TypeError)  # what the parser raises
_CONTENT, _REASONING = ("content",), ("thinking", "reasoning", "reasoning_content")


def known_template(chat_template: str) -> Mapping[str, Any] | None:
    """The response template of a family, by the marks in its chat template."""
    if "<|channel|>" in chat_template and "<|message|>" in chat_template:
        return HARMONY
    if "<tool_call>" in chat_template and "<function=" in chat_template:
        return FUNCTION_TAGS
    return ARGUMENT_TAGS if "<tool_call>" in chat_template and "<arg_key>" in chat_template else None


class TemplateReply:
    """A call comes out when it is complete. `prompt`: the text that the answer continues; `tools`: as the template
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
            if kind == "region_open":
                self._words.setdefault(name, Words(True)).mark()
            elif kind == "region_chunk" and name in (*_CONTENT, *_REASONING):
                text = event["text"]
                if words := text if name in self._verbatim else self._words[name].add(text):
                    parts.append(Content(words) if name in _CONTENT else Reasoning(words))
                    self._told[type(parts[-1])] += len(words)
            elif kind == "region_close" and name == "tool_calls":
                for call in event["value"] if isinstance(event["value"], list) else [event["value"]]:
                    parts += self._call(call)
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
