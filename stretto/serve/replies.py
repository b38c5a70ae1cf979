"""Tools, reasoning and forms of a chat answer: what the model may write, and how it is read.

    tool_choice   what may be written                               enforced by
    none          words; the prompt does not mention the tools      -
    auto          words and calls; calls of strict tools hold       the grammar of strict tools, inside calls alone
                  their schema
    required      one or more calls, of any of the tools            a grammar
    {function}    one call of that tool                             a grammar

An answer may begin with reasoning where the model's template knows of it; a grammar holds for what follows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from stretto.params import Grammar
from stretto.serve.errors import bad_request, unsupported
from stretto.serve.grammars import Asked, asked_grammar
from stretto.serve.interfaces import ServeTokenizer
from stretto.serve.schemas import ChatBody, ChatRequest, GenerationBody
from stretto.text.reply import CALL, END_CALL, END_THINK, THINK, MarkedReply, Reply, TemplateReply

TAIL = 16  # tokens at the end of a prompt in which an opened thought is looked for
MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_MARKERS = (THINK, END_THINK, CALL, END_CALL)


@dataclass(frozen=True)
class ReplyPlan:
    """`checks`: what of the request must be valid, with the field that it came in."""

    grammar: Grammar | None = None
    checks: tuple[Asked, ...] = ()
    reader: Callable[[], Reply] | None = None  # None: the text is the content
    keep_special: bool = False  # markers are special tokens: their text is needed
    hide_reasoning: bool = False


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
        if parameters is not None and not isinstance(parameters, dict):
            raise bad_request(f"{place} must be a JSON schema", place)
        names.add(name)
        found.append({**function, "place": place})
    return tuple(found)


class ReplyPlanner:
    """For one model. Used from several threads."""

    def __init__(self, tokenizer: ServeTokenizer):
        self._tokenizer, self._template = tokenizer, tokenizer.chat_template or ""
        self._own: Mapping[str, Any] | None = getattr(tokenizer, "response_template", None)
        special: frozenset[int] = getattr(tokenizer, "special_ids", frozenset())
        one = {marker: tokenizer.encode(marker, False) for marker in _MARKERS}
        self._special = frozenset(m for m, ids in one.items() if len(ids) == 1 and ids[0] in special)

    def plan(self, body: GenerationBody, prompt: list[int]) -> ReplyPlan:
        """Raises ApiError."""
        asked = asked_grammar(body)
        if not isinstance(body, ChatRequest):
            return ReplyPlan(asked.grammar if asked else None, (asked,) if asked else ())
        tools = asked_tools(body)
        reasoning = END_THINK in self._template and body.separate_reasoning is not False
        opened = reasoning and self._is_open(prompt)
        calls = _call_rules(tools, self._sign) if tools and (tools.force or tools.strict or asked) else ""
        checks = [asked] if asked else []
        checks += _parameter_checks(tools) if tools and calls else []
        grammar = _grammar(asked, tools if calls else None, calls, reasoning, opened, self._sign)
        return ReplyPlan(grammar, tuple(checks), self._reader(body, tools, reasoning, opened, prompt),
                         bool(self._special) and (reasoning or tools is not None),
                         reasoning and body.include_reasoning is False)

    def _is_open(self, prompt: list[int]) -> bool:
        return self._tokenizer.decode(prompt[-TAIL:], skip_special_tokens=False).rstrip().endswith(THINK)

    def _sign(self, marker: str) -> str:
        """A marker in Lark."""
        return marker if marker in self._special else json.dumps(marker)

    def _reader(self, body: ChatRequest, tools: Tools | None, reasoning: bool, opened: bool,
                prompt: list[int]) -> Callable[[], Reply] | None:
        forced = tools is not None and tools.force
        if self._own is not None and not forced and (tools or body.separate_reasoning is not False):
            return partial(TemplateReply, self._own, self._tokenizer.decode(prompt, skip_special_tokens=False),
                           body.tools)
        if tools is not None and not forced and CALL not in self._template:
            raise unsupported("tools", "this model writes calls in a form that the server cannot read; use tool_choice"
                              " required or a named function, for which the server says the form")
        if not reasoning and tools is None:
            return None
        return partial(MarkedReply, thinking=opened, reasoning=reasoning, tools=tools is not None)


def _parameter_checks(tools: Tools) -> list[Asked]:
    return [Asked(Grammar("json_schema", json.dumps(f["parameters"])), f["place"]) for f in tools.functions
            if f.get("parameters") and (tools.force or f.get("strict"))]


def _call_rules(tools: Tools, sign: Callable[[str], str]) -> str:
    """Lark: `calls` are one or more calls; `inner` is a call behind its first marker."""
    rules = [f"calls: call{' (SPACE call)*' if tools.several else ''}", f"call: {sign(CALL)} inner",
             f'inner: "\\n" ({" | ".join(f"call_{i}" for i in range(len(tools.functions)))}) "\\n" {sign(END_CALL)}']
    for i, function in enumerate(tools.functions):
        head = f'{{"name": {json.dumps(function["name"])}, "arguments": '
        bound = tools.force or function.get("strict")
        schema = {"type": "object", **(function.get("parameters") or {})} if bound else {"type": "object"}
        rules.append(f'call_{i}: {json.dumps(head)} %json {json.dumps(schema)} "}}"')
    return "\n".join(rules)


def _grammar(asked: Asked | None, tools: Tools | None, calls: str, reasoning: bool, opened: bool,
             sign: Callable[[str], str]) -> Grammar | None:
    """The grammar of the whole answer."""
    if tools is None and asked is None:
        return None
    rules = [calls] if calls else []
    if tools is None:
        body = "@answer"
    elif tools.force:
        body = "calls"
    elif asked is not None:
        body = "calls | @answer"
    else:  # free text, in which a marker begins a call
        body = "free_call* TEXT" if tools.several else "free_call | TEXT"
        rules += ["free_call: before inner", _lazy("before", CALL, sign), r"TEXT: /(.|\n)*/"]
    forced = tools is not None and tools.force
    kept = None if forced else asked
    if not reasoning and kept is not None and tools is None:
        return kept.grammar
    thought = "" if not reasoning else "end_of_thought SPACE " if opened else f"({sign(THINK)} end_of_thought SPACE)? "
    rules = [f"start: {thought}body", f"body: {body}", r"SPACE: /[ \t\r\n]*/", *rules]
    if reasoning:
        rules.append(_lazy("end_of_thought", END_THINK, sign))
    text = "\n".join(rules)
    if kept is None:
        return Grammar("lark", text)
    return Grammar(kept.grammar.kind, kept.grammar.source, kept.grammar.whitespace, around=text)


def _lazy(rule: str, marker: str, sign: Callable[[str], str]) -> str:
    """Any text up to the first such marker, and the marker."""
    if sign(marker) == marker:
        return f"{rule}: /(.|\\n)*/ {marker}"
    return f"{rule}[lazy]: /(.|\\n)*{marker.replace('/', chr(92) + '/')}/"
