"""Tools, reasoning and forms of a chat answer: what the model may write, and how it is read.

    tool_choice   what may be written                               enforced by
    none          words; the prompt does not mention the tools      -
    auto          words and calls; calls of strict tools hold       the grammar of strict tools, inside calls alone
                  their schema
    required      one or more calls, of any of the tools            a grammar
    {function}    one call of that tool                             a grammar

Calls are written in the model's own form where it is known (text/families), and in Hermes' where they must come and it
is not, or cannot hold what their schema says. `parallel_tool_calls: false` is a grammar, too.

An answer may begin with reasoning where the model's template knows of it; a grammar holds for what follows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from stretto.params import Grammar
from stretto.serve.errors import bad_request, unsupported
from stretto.serve.grammars import Asked, asked_grammar
from stretto.serve.interfaces import ServeTokenizer
from stretto.serve.schemas import ChatBody, ChatRequest, GenerationBody
from stretto.text.call_forms import HERMES, CallForm, Mistral, NotHeld, lazily
from stretto.text.families import form_of, response_template_of
from stretto.text.reply import END_THINK, THINK, MarkedReply, Reply
from stretto.text.reply_template import TemplateReply

CHANNELS = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>")  # harmony's marks
TAIL = 16  # tokens at the end of a prompt in which an opened thought is looked for
MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


@dataclass(frozen=True)
class ReplyPlan:
    """`checks`: what of the request must be valid, with the field that it came in."""

    grammar: Grammar | None = None
    checks: tuple[Asked, ...] = ()
    reader: Callable[[], Reply] | None = None  # None: the text is the content
    keep_special: bool = False  # markers are special tokens: their text is needed
    hide_reasoning: bool = False
    short_call_ids: bool = False  # nine letters and digits: Mistral's templates refuse a history with others


@dataclass(frozen=True)
class Tools:
    """The tools of a request. `force`: a call must come."""

    functions: tuple[dict[str, Any], ...]
    force: bool
    several: bool
    chosen: str | None = None

    @property
    def strict(self) -> bool:
        return any(f.get("strict") for f in self.functions)

    @property
    def bound(self) -> str | None:
        """What asks for a grammar of the calls."""
        return ("tool_choice" if self.force else "tools[].function.strict" if self.strict
                else None if self.several else "parallel_tool_calls")


def asked_tools(body: ChatBody) -> Tools | None:
    """None where the answer may hold no call. Raises ApiError."""
    choice = body.tool_choice
    if not body.tools:
        if choice not in (None, "none", "auto"):
            raise bad_request("tool_choice asks for a call, and there are no tools", "tool_choice")
        return None
    functions = _functions(body.tools)
    if choice == "none":
        return None
    several = body.parallel_tool_calls is not False
    if choice in (None, "auto", "required"):
        return Tools(functions, choice == "required", several)
    name = choice.get("function", {}).get("name") if isinstance(choice, dict) and isinstance(
        choice.get("function"), dict) and choice.get("type") == "function" else None
    if name is None:
        raise bad_request('tool_choice must be "none", "auto", "required" or'
                          ' {"type": "function", "function": {"name"}}', "tool_choice")
    chosen = tuple(f for f in functions if f["name"] == name)
    if not chosen:
        raise bad_request(f"tool_choice names {str(name)[:64]!r}; the tools are "
                          + ", ".join(f["name"] for f in functions[:8]), "tool_choice")
    return Tools(chosen, True, False, name)


def _functions(tools: list[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    if len(tools) > MAX_TOOLS:
        raise bad_request(f"{len(tools)} tools; the limit is {MAX_TOOLS}", "tools")
    names: set[str] = set()
    found = []
    for i, tool in enumerate(tools):
        function, place = tool.get("function"), f"tools[{i}].function.parameters"
        if tool.get("type") != "function" or not isinstance(function, dict):
            raise bad_request(f'tools[{i}] must be {{"type": "function", "function": {{...}}}}', f"tools[{i}]")
        name, parameters = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name in names:
            raise bad_request(f"tools[{i}].function.name is {str(name)[:64]!r}; it must have 1 to 128 letters, digits"
                              " and _.:/- and be no other tool's", f"tools[{i}].function.name")
        if parameters is not None and not (isinstance(parameters, dict) and _may_be_object(parameters)):
            raise bad_request(f"{place} must be a JSON schema of an object", place)
        names.add(name)
        found.append({**function, "place": place})
    return tuple(found)


def _may_be_object(schema: dict[str, Any]) -> bool:
    kind = schema.get("type", "object")
    return kind == "object" or (isinstance(kind, list) and "object" in kind)


class ReplyPlanner:
    """For one model. Used from several threads."""

    def __init__(self, tokenizer: ServeTokenizer):
        self._tokenizer, self._template = tokenizer, tokenizer.chat_template or ""
        self._own = response_template_of(self._template, tokenizer.response_template)
        self._form = form_of(self._template)
        self._channelled = all(mark in self._template for mark in CHANNELS[:2])
        markers = (THINK, END_THINK, *CHANNELS, *(self._form or HERMES).markers)
        one = {marker: tokenizer.encode(marker, False) for marker in markers}
        self._special = {m: ids[0] for m, ids in one.items() if len(ids) == 1 and ids[0] in tokenizer.special_ids}

    def plan(self, body: GenerationBody, prompt: list[int]) -> ReplyPlan:
        """Raises ApiError."""
        asked = asked_grammar(body)
        if not isinstance(body, ChatRequest):
            return ReplyPlan(asked.grammar if asked else None, (asked,) if asked else ())
        tools = asked_tools(body)
        told = tools is not None or body.separate_reasoning is not False
        if self._own is None or not told or (
                (asked is not None or (tools is not None and tools.bound)) and not self._channelled):
            return self._marked(body, asked, tools, prompt)
        bound = tools if tools is not None and (tools.bound or asked) else None
        grammar = self._in_channels(asked, bound) if asked or bound else None
        text = self._tokenizer.decode(prompt, skip_special_tokens=False)
        return ReplyPlan(grammar, _checks(asked, bound), partial(TemplateReply, self._own, text, body.tools), True,
                         body.include_reasoning is False)

    def _in_channels(self, asked: Asked | None, tools: Tools | None) -> Grammar:
        """A call, or the form in the channel of answers; before it thoughts and remarks in channels of their own."""
        channel, message, _, start, constrain = map(self._sign, CHANNELS)
        forced = tools is not None and tools.force
        kept = None if forced else asked
        ends = ([] if forced else ["final"]) + ([] if tools is None else ["call"])
        rules = [f"start: said* ({' | '.join(ends)})", lazily("any_text", CHANNELS[2], self._sign),
                 f'said: {channel} ("analysis" | "commentary") {message} any_text {start} "assistant"']
        if not forced:
            rules += [f'final: {channel} "final" {message} {"@answer" if kept else "TEXT"}', r"TEXT: /(.|\n)*/"]
        if tools is not None:
            each = [f"{json.dumps(name + ' ')} {constrain} \"json\" {message} %json {schema}"
                    for name, schema in _call_schemas(tools)]
            rules.append(f'call: {channel} "commentary to=functions." ({" | ".join(each)})')
        return _around(kept, rules)

    def _marked(self, body: ChatRequest, asked: Asked | None, tools: Tools | None, prompt: list[int]) -> ReplyPlan:
        """A plan for an answer whose marks are known here."""
        reasoning = END_THINK in self._template and body.separate_reasoning is not False
        opened = reasoning and self._is_open(prompt)
        form = None if tools is None else self._call_form(tools, asked)
        bound = tools if tools is not None and (tools.bound or asked) else None
        form, rules = self._rules(form, bound) if form and bound else (form, [])
        schemas = {f["name"]: f.get("parameters") for f in (tools.functions if tools else ())}
        reader = partial(MarkedReply, thinking=opened, reasoning=reasoning, form=form, schemas=schemas,
                         held=bound is not None) if reasoning or form else None
        grammar = _grammar(asked, bound, rules, reasoning, opened, self._sign)
        return ReplyPlan(grammar, _checks(asked, bound), reader, bool(self._special) and reader is not None,
                         reasoning and body.include_reasoning is False, isinstance(form, Mistral))

    def _call_form(self, tools: Tools, asked: Asked | None) -> CallForm:
        if self._form is not None or tools.force:
            return self._form or HERMES
        if self._own is None:
            raise unsupported("tools", "this model writes calls in a form that the server cannot read; use tool_choice"
                              " required or a named function, for which the server says the form")
        raise unsupported(tools.bound or asked.param, "this model writes calls in a form that no grammar can hold to"  # type: ignore[union-attr]
                          " it; use tool_choice required or a named function, for which the server says the form")

    def _rules(self, form: CallForm, tools: Tools) -> tuple[CallForm, list[str]]:
        """The form that calls of these tools are held to, and how."""
        schemas = _call_schemas(tools)
        try:
            return form, form.rules(schemas, tools.several, self._sign)
        except NotHeld as e:
            if tools.force:  # the request says the form, so it may be another one
                return HERMES, HERMES.rules(schemas, tools.several, self._sign)
            raise unsupported(str(tools.bound), "the form in which this model writes calls cannot be held to"
                              f" {e}; leave it out, or use tool_choice required or a named function") from None

    def _is_open(self, prompt: list[int]) -> bool:
        return self._tokenizer.decode(prompt[-TAIL:], skip_special_tokens=False).rstrip().endswith(THINK)

    def _sign(self, marker: str) -> str:
        """A marker in Lark."""
        return f"<[{self._special[marker]}]>" if marker in self._special else json.dumps(marker)


def _checks(asked: Asked | None, tools: Tools | None) -> tuple[Asked, ...]:
    bound = [] if tools is None else [f for f in tools.functions if tools.force or f.get("strict")]
    schemas = [Asked(Grammar("json_schema", json.dumps(f["parameters"])), f["place"]) for f in bound
               if f.get("parameters")]
    return (*([asked] if asked else []), *schemas)


def _call_schemas(tools: Tools) -> list[tuple[str, str]]:
    """(name, JSON schema of the arguments) of each function; of one that need not be strict, any object."""
    return [(f["name"], json.dumps({**(f.get("parameters") or {}), "type": "object"}
                                   if tools.force or f.get("strict") else {"type": "object"})) for f in tools.functions]


def _grammar(asked: Asked | None, tools: Tools | None, calls: list[str], reasoning: bool, opened: bool,
             sign: Callable[[str], str]) -> Grammar | None:
    """The grammar of the whole answer. `calls`: the rules of its form of calls."""
    if tools is None and asked is None:
        return None
    body = ("@answer" if tools is None else "calls" if tools.force else "free" if asked is None else "calls | @answer")
    rules = [*calls, r"TEXT: /(.|\n)*/"]
    forced = tools is not None and tools.force
    kept = None if forced else asked
    if not reasoning and kept is not None and tools is None:
        return kept.grammar
    thought = "" if not reasoning else "end_of_thought SPACE " if opened else f"({sign(THINK)} end_of_thought SPACE)? "
    rules = [f"start: {thought}body", f"body: {body}", r"SPACE: /[ \t\r\n]*/", *rules]
    if reasoning:
        rules.append(lazily("end_of_thought", END_THINK, sign))
    return _around(kept, rules)


def _around(kept: Asked | None, rules: list[str]) -> Grammar:
    text = "\n".join(rules)
    if kept is None:
        return Grammar("lark", text)
    return Grammar(kept.grammar.kind, kept.grammar.source, kept.grammar.whitespace, around=text)
