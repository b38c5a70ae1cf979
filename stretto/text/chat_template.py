"""Chat templates: from messages to the prompt's text, as Hugging Face renders them, within bounds.

Templates are code that comes with a model. They run in Jinja's immutable sandbox, with the filters and globals that
Hugging Face gives them, so that the same messages become the same tokens. A sandbox does not stop a template from
running for ever; therefore every turn of a loop and every call is counted, and every text and number that is put
together is measured. A rendering ends with an error when it takes too many steps, too much time, or makes too much.

No torch in this module.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_STEPS = 1_000_000  # loop turns and calls of one rendering
MAX_SECONDS = 10.0  # of processor time
MAX_CHARACTERS = 32_000_000  # of one rendering, and of any text made on the way
MAX_BITS = 10_000  # of a whole number
_DEADLINE_EVERY = 256  # steps between two looks at the clock


class ChatTemplateError(ValueError):
    """A template that refuses the messages, fails on them, or exceeds a bound. The message is the template's own."""


class NoChatTemplate(ChatTemplateError):
    """There is none to refuse anything."""


class TemplateTooLong(jinja2.TemplateRuntimeError):
    """A rendering that exceeds a bound."""


class _Budget(threading.local):
    """What the rendering of this thread may still use."""

    steps = 0
    deadline = 0.0

    def reset(self) -> None:
        self.steps, self.deadline = MAX_STEPS, time.thread_time() + MAX_SECONDS

    def step(self) -> None:
        self.steps -= 1
        if self.steps < 0:
            raise TemplateTooLong(f"the chat template takes more than {MAX_STEPS} steps")
        if self.steps % _DEADLINE_EVERY == 0 and time.thread_time() > self.deadline:
            raise TemplateTooLong(f"the chat template takes more than {MAX_SECONDS:g} seconds of processor time")


class _Generation(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}` marks the assistant's words for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own form)

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """Hugging Face's environment, with a count on everything that can be repeated.

    The syntax tree is changed before it is compiled: the iterable of each loop and the result of each `~` pass through
    a filter. Filters belong to the environment, so a template cannot put its own in their place."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
        self.budget = _Budget()
        self.filters |= {"tojson": _to_json, "_counted": self._counted, "_measured": self._measured}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        for loop in list(source.find_all(nodes.For)):
            loop.iter = _filtered(loop.iter, "_counted")
        _wrap_joins(source)
        return super()._generate(source, *args, **kwargs)

    def _counted(self, values: Iterable) -> Iterable:
        if isinstance(values, jinja2.Undefined):
            return values  # iterates as Jinja's settings say
        return _Counted(values, self.budget)

    def _measured(self, value: Any) -> Any:
        if isinstance(value, (str, list, tuple)) and len(value) > MAX_CHARACTERS:
            raise TemplateTooLong(f"the chat template makes a text of more than {MAX_CHARACTERS} characters")
        if isinstance(value, int) and value.bit_length() > MAX_BITS:
            raise TemplateTooLong(f"the chat template makes a number of more than {MAX_BITS} bits")
        return value

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __self.budget.step()
        if any(isinstance(a, int) and a > MAX_CHARACTERS for a in (*args, *kwargs.values())):
            raise TemplateTooLong(f"the chat template calls {getattr(__obj, '__name__', 'a function')}"
                                  f" with a number above {MAX_CHARACTERS}")
        if isinstance(__obj, LoopContext) and args:  # a recursive loop goes on with values of its own
            args = (__self._counted(args[0]), *args[1:])
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*" and _is_text(left) + _is_text(right) == 1 and _size(left) * _size(right) > MAX_CHARACTERS:
            raise TemplateTooLong(f"the chat template makes a text of more than {MAX_CHARACTERS} characters")
        whole = isinstance(left, int) and isinstance(right, int)
        if operator == "**" and whole and left.bit_length() * right > MAX_BITS:
            raise TemplateTooLong(f"the chat template makes a number of more than {MAX_BITS} bits")
        return self._measured(super().call_binop(context, operator, left, right))


class _Counted:
    """An iterable whose turns cost a step each; as long as the original, which `loop.length` asks for."""

    def __init__(self, values: Iterable, budget: _Budget):
        self._values = values if hasattr(values, "__len__") else list(values)
        self._budget = budget

    def __len__(self) -> int:
        return len(self._values)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator:
        for value in self._values:
            self._budget.step()
            yield value


def _is_text(value: Any) -> bool:
    return isinstance(value, (str, list, tuple))


def _size(value: Any) -> int:
    """How often a factor of a product repeats the other one; the length of a text."""
    return len(value) if _is_text(value) else value if isinstance(value, int) else 1


def _filtered(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _wrap_joins(node: nodes.Node) -> None:
    """Every `a ~ b` below `node` becomes `(a ~ b)|_measured`."""
    for field, value in node.iter_fields():
        if isinstance(value, nodes.Node):
            _wrap_joins(value)
            if isinstance(value, nodes.Concat):
                setattr(node, field, _filtered(value, "_measured"))
        elif isinstance(value, list):
            for child in value:
                if isinstance(child, nodes.Node):
                    _wrap_joins(child)
            value[:] = [_filtered(v, "_measured") if isinstance(v, nodes.Concat) else v for v in value]


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None,
             separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
    """Plain JSON. Jinja's own filter escapes <, >, & and ', which makes other tokens."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


class ChatTemplate:
    """The templates of one model, by name ("default", "tool_use", ...). Used from several threads at once."""

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]):
        """`special_tokens`: variables that every rendering gets, such as bos_token. Raises ChatTemplateError for a
        template that is not valid Jinja."""
        self._environment = _Environment()
        self._special_tokens = dict(special_tokens)
        self.sources = dict(templates)
        self._compiled = {name: self._compile(name, source) for name, source in templates.items()}

    def _compile(self, name: str, source: str) -> jinja2.Template:
        try:
            return self._environment.from_string(source)
        except jinja2.TemplateSyntaxError as e:
            raise ChatTemplateError(f"chat template {name!r} is not valid, line {e.lineno}: {e.message}") from e

    def render(self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None,
               add_generation_prompt: bool = True, continue_final_message: bool = False,
               **variables: Any) -> str:
        """The prompt's text. With tools the template "tool_use" is taken, where there is one.

        `continue_final_message`: the text ends inside the last message, so that the model goes on with it.
        Raises ChatTemplateError."""
        name = "tool_use" if tools and "tool_use" in self._compiled else "default"
        template = self._compiled.get(name)
        if template is None:
            others = f"; it has one for {', '.join(self._compiled)}" if self._compiled else ""
            raise NoChatTemplate("this model has no chat template: have it complete plain text (/v1/completions,"
                                 " `stretto run --raw`, LLM.generate), or give it a template (--chat-template,"
                                 f" LLM(chat_template=...)){others}")
        chat = [_plain_message(i, m) for i, m in enumerate(messages)]
        if continue_final_message and add_generation_prompt:
            raise ChatTemplateError("continue_final_message and add_generation_prompt exclude each other")
        final = _mark_final(chat) if continue_final_message else None
        # Hugging Face passes these two even where there are none: templates test them with `is not none`
        values = {"documents": None, **self._special_tokens, **variables, "messages": chat, "tools": tools or None,
                  "add_generation_prompt": add_generation_prompt}
        text = self._run(template, values)
        return text if final is None else _cut_at_mark(text, final)

    def _run(self, template: jinja2.Template, values: Mapping[str, Any]) -> str:
        self._environment.budget.reset()
        parts, size = [], 0
        try:
            for part in template.generate(**values):
                parts.append(part)
                size += len(part)
                if size > MAX_CHARACTERS:
                    raise TemplateTooLong(f"the chat template writes more than {MAX_CHARACTERS} characters")
        except jinja2.TemplateError as e:
            raise ChatTemplateError(e.message or type(e).__name__) from e
        except RecursionError as e:
            raise ChatTemplateError("the chat template calls itself too deeply") from e
        except Exception as e:  # a template is code: it can fail in any way, and that is the messages' or its own fault
            raise ChatTemplateError(f"{type(e).__name__}: {e}") from e
        return "".join(parts)


# ---------------------------------------------------------------------------------------------------------- messages
_MARK = "CONTINUE-THIS-MESSAGE "  # ends with a space, which shows whether the template trims


def _plain_message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates expect it: text parts joined with newlines, tool arguments as objects, reasoning under
    the name that templates read."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ChatTemplateError(f"message {index} is not an object with a role")
    plain = dict(message)
    if isinstance(plain.get("content"), (list, tuple)):
        plain["content"] = "\n".join(_part_text(index, part) for part in plain["content"])
    if isinstance(plain.get("tool_calls"), (list, tuple)):
        plain["tool_calls"] = [_with_object_arguments(call) for call in plain["tool_calls"]]
    if plain.get("reasoning") is not None:
        plain.setdefault("reasoning_content", plain["reasoning"])
    return plain


def _part_text(index: int, part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind != "text" or not isinstance(part.get("text"), str):
        raise ChatTemplateError(f"message {index} holds a content part of type {kind!r}; only text parts are supported")
    return part["text"]


def _with_object_arguments(call: Any) -> Any:
    """The API carries arguments as JSON text, templates print them as an object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        return {**call, "function": {**function, "arguments": json.loads(function["arguments"] or "{}")}}
    except ValueError:
        return call  # no JSON: the template prints the text


def _mark_final(chat: list[dict[str, Any]]) -> str:
    """Appends the mark to the last message, whose text is returned."""
    content = chat[-1].get("content") if chat else None
    if not isinstance(content, str):
        raise ChatTemplateError("continue_final_message needs a final message with content")
    chat[-1]["content"] = content + _MARK
    return content


def _cut_at_mark(text: str, final: str) -> str:
    at = text.rfind(_MARK.strip())
    if at < 0 or final.strip() not in text:
        raise ChatTemplateError("the chat template does not print the final message, so it cannot be continued")
    # a template that trims took the mark's space, and would have taken the message's own
    return text[:at] if text.startswith(_MARK, at) else text[:at].rstrip()
