"""Chat templates render as transformers renders them, and cannot run away."""

from __future__ import annotations

import pytest

from stretto.text import chat_template
from stretto.text.chat_template import ChatTemplate, ChatTemplateError

CHAT = [{"role": "system", "content": "Be <b>brief</b> & 'kind'."},
        {"role": "user", "content": "  What's 2+2? 삼겹살 "}, {"role": "assistant", "content": "4"}]
TOOL = {"type": "function", "function": {"name": "f", "description": "<x> & 'y' é", "parameters": {"a": [1, None]}}}


def render(source: str, messages=(), **kwargs) -> str:
    return ChatTemplate({"default": source}, {"bos_token": "<s>", "eos_token": "</s>"}).render(messages, **kwargs)


LOOP = "{% for m in messages %}[{{ m.role }}|{{ m['content'] | trim }}]\n{% endfor %}"


@pytest.mark.parametrize("source", [
    LOOP,
    "{%- for m in messages -%}\n  {%- if loop.first -%}A{%- elif loop.last -%}Z{%- else -%}-{%- endif -%}"
    "{{ loop.length }}{{ loop.revindex0 }}{{ loop.previtem.role if loop.previtem }}\n{%- endfor -%}",
    "{{ tools | tojson }}{{ tools | tojson(indent=2) }}{{ messages | tojson }}",
    "{% set ns = namespace(n=0) %}{% for m in messages if m.role != 'user' %}{% set ns.n = ns.n + 1 %}{% endfor %}"
    "{{ ns.n }}{{ bos_token ~ eos_token ~ 1 }}",
    "{% for m in messages %}{% if m.role == 'user' %}{% continue %}{% endif %}{{ m.role }}{% break %}{% endfor %}",
    "{% macro show(m, d=1) %}{{ m.role }}{% if d %}{{ show(m, d - 1) }}{% endif %}{% endmacro %}"
    "{% for m in messages %}{{ show(m) }}{% else %}none{% endfor %}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "{{ messages[0]['content'].split('b')[-1].strip() }}{{ messages[::-1] | map(attribute='role') | join(',') }}",
    "{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}{% for c in 'abc' %}{{ c }}{% endfor %}",
    "{% for i in range(3) %}{% for j in range(i) %}{{ i * j }},{{ 'ab' * j }}{{ '%02d' % j }} {% endfor %}{% endfor %}",
    "{% for i in [[1, [2]], [3]] recursive %}{% if i is iterable %}({{ loop(i) }}){% else %}{{ i }}{% endif %}"
    "{% endfor %}",
    "{% for x in nothing %}{{ x }}{% else %}empty{% endfor %}{{ nothing }}{{ tools is none }}{{ documents is none }}",
    "{%- if flag is defined and flag -%}flag{%- endif -%}{{ strftime_now('%Y') }}",
    "{% set x %}a{{ 1 }}{% endset %}{{ x ~ x }}{{ {'a': 1 ~ 2} }}{{ [1 ~ 2, ('x' ~ 3) ~ 4] }}{{ (1 ~ 2) | length }}",
], ids=lambda s: s[:24])
def test_renders_as_transformers(source):
    from transformers.utils.chat_template_utils import render_jinja_template

    for tools in (None, [TOOL]):
        for variables in ({}, {"flag": True}):
            (expected,), _ = render_jinja_template([CHAT], tools=tools, chat_template=source, bos_token="<s>",
                                                   eos_token="</s>", add_generation_prompt=True, **variables)
            assert render(source, CHAT, tools=tools, **variables) == expected


@pytest.mark.parametrize("content", ["It is", "It is  ", "  It is"])
@pytest.mark.parametrize("source", [LOOP, LOOP.replace(" | trim", ""), "{{ messages[-1].content }}</s>"])
def test_continue_final_message_as_transformers(source, content):
    from transformers.utils.chat_template_utils import render_jinja_template

    chat = [*CHAT[:2], {"role": "assistant", "content": content}]
    (expected,), _ = render_jinja_template([chat], chat_template=source, continue_final_message=True)
    assert render(source, chat, add_generation_prompt=False, continue_final_message=True) == expected
    assert expected.endswith(content.strip()) or expected.endswith(content)


def test_continue_final_message_errors():
    with pytest.raises(ChatTemplateError, match="exclude each other"):
        render(LOOP, CHAT, continue_final_message=True)
    with pytest.raises(ChatTemplateError, match="does not print the final message"):
        render("nothing", CHAT, continue_final_message=True, add_generation_prompt=False)
    with pytest.raises(ChatTemplateError, match="needs a final message"):
        render(LOOP, [], continue_final_message=True, add_generation_prompt=False)


# ------------------------------------------------------------------------------------------------------------ messages
def test_case_15_07_content_as_parts():
    one = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    assert render(LOOP, one) == render(LOOP, [{"role": "user", "content": "a"}])
    two = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert render(LOOP, two) == "[user|a\nb]\n"


@pytest.mark.parametrize(("part", "kind"), [({"type": "image_url", "image_url": {"url": "x"}}, "image_url"),
                                            ({"text": "a"}, None), (7, "int"), ({"type": "text"}, "text")])
def test_case_15_07_unknown_part_is_named(part, kind):
    with pytest.raises(ChatTemplateError, match=f"message 0 holds a content part of type {kind!r}"):
        render(LOOP, [{"role": "user", "content": [part]}])


def test_case_15_07_no_content_with_tool_calls():
    source = ("{% for m in messages %}{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments | tojson }}"
              "{% else %}{{ m.content }}{% endif %}{% endfor %}")
    call = {"function": {"name": "f", "arguments": '{"a": "<1>"}'}}
    assert render(source, [{"role": "assistant", "content": None, "tool_calls": [call]}]) == '{"a": "<1>"}'


@pytest.mark.parametrize("message", ["text", {"content": "x"}, {"role": 3}])
def test_message_without_role(message):
    with pytest.raises(ChatTemplateError, match="message 0 is not an object with a role"):
        render(LOOP, [message])


def test_messages_are_not_changed():
    chat = [{"role": "user", "content": [{"type": "text", "text": "a"}]}, {"role": "assistant", "content": "b"}]
    copy = [dict(m) for m in chat]
    render(LOOP, chat, continue_final_message=True, add_generation_prompt=False)
    assert chat == copy


# -------------------------------------------------------------------------------------------------------------- errors
@pytest.mark.parametrize(("source", "message"), [
    ("{{ raise_exception('roles must alternate') }}", "^roles must alternate$"),
    ("{{ messages[0]['content'] + none }}", "TypeError: can only concatenate"),
    ("{{ a.b.c }}", "'a' is undefined"),
    ("{{ messages.append(1) }}", "'append' of 'list' object is unsafe"),
    ("{{ messages.__class__.__mro__ }}", "unsafe"),
    ("{{ 1 // 0 }}", "ZeroDivisionError"),
], ids=["raise", "type", "undefined", "immutable", "sandbox", "zero"])
def test_case_18_05_template_errors_keep_their_text(source, message):
    with pytest.raises(ChatTemplateError, match=message):
        render(source, CHAT)


def test_no_template():
    with pytest.raises(ChatTemplateError, match="no chat template: have it complete plain text"):
        ChatTemplate({}, {}).render(CHAT)
    with pytest.raises(ChatTemplateError, match="it has one for rag"):
        ChatTemplate({"rag": "x"}, {}).render(CHAT)


RUNAWAYS = {
    "nested_loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "large_range": "{{ range(10**6) | list }}",
    "huge_range": "{{ range(10**9) }}",
    "recursion": "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "shallow_recursion": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "doubling_join": "{% set ns = namespace(x='a') %}{% for i in range(80) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "doubling_inside": "{% set ns = namespace(x='a') %}{% for i in range(80) %}"
                       "{% set ns.x = [(ns.x ~ ns.x) | trim][0] %}{% endfor %}",
    "doubling_sum": "{% set ns = namespace(x='a') %}{% for i in range(80) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "product": "{{ 'a' * 10**9 }}", "power": "{{ 9**(9**9) }}", "power_tower": "{{ 9**9**9**9**9 }}",
    "squaring": "{% set ns = namespace(x=3) %}{% for i in range(80) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "output": "{% for a in range(9000) %}{{ 'x' * 10000 }}{% endfor %}",
    "padding": "{{ 'a'.ljust(10**9) }}",
    "recursive_loop": "{% for a in [1] recursive %}{% for b in range(99999) %}{% endfor %}{{ loop([1]) }}{% endfor %}",
    "wide_recursive_loop": "{% for a in [0] recursive %}{% if loop.depth < 3 %}{{ loop(range(99999)) }}{% endif %}"
                           "{% endfor %}",
    "shadowed_filter": "{% macro _counted(x) %}{{ x }}{% endmacro %}{% set _counted = 1 %}"
                       "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
}


@pytest.mark.parametrize("source", RUNAWAYS.values(), ids=RUNAWAYS)
def test_case_18_05_runaway_templates_end(source, monkeypatch):
    """By a count: the clock is the last resort."""
    monkeypatch.setattr(chat_template, "MAX_STEPS", chat_template.MAX_STEPS // 20)
    with pytest.raises(ChatTemplateError, match=r"more than \d+ (steps|bits|characters)|above|too deeply|too big"):
        render(source, CHAT)
    assert render(LOOP, CHAT[:1])  # the next rendering has a budget of its own


def test_case_18_05_deadline(monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 0.05)
    with pytest.raises(ChatTemplateError, match=r"more than 0.05 seconds"):
        render("{% for a in range(99999) %}{% for b in range(9) %}{% endfor %}{% endfor %}", CHAT)


def test_long_conversation_is_within_bounds():
    chat = [{"role": "user", "content": "word " * 200}] * 5000
    assert len(render(LOOP, chat)) > 5_000_000 * 0.9
