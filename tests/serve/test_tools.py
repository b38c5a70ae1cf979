"""Tools, reasoning and forms of answers through the HTTP API: over scripted answers, and over a real engine."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from stretto.engine.build import grammars, text_streams
from stretto.engine.core import EngineCore
from stretto.host import grammar as grammar_module
from stretto.params import Grammar, SamplingParams
from stretto.protocol import Request
from stretto.serve import service as service_module
from stretto.spec.ngram import NgramDrafter
from stretto.text.grammar import check_grammar
from tests.engine.small import Oracle, make_core
from tests.serve.conftest import Api, events, make_api
from tests.serve.fakes import EOS, ByteTokenizer, CoreOptions

PARAMETERS = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
              "required": ["n"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("f", "g")]
CALL = '<tool_call>\n{"name": "f", "arguments": {"n": 12}}\n</tool_call>'
NAME = {"served_model_names": ("fake/tiny",)}


class ToolTokenizer(ByteTokenizer):
    """A template that knows of tools and of reasoning; the prompt opens a thought where it is asked to."""

    chat_template = "{{ tools }} <tool_call> <think></think>"

    def apply_chat_template(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None,
                            **kwargs: Any) -> list[int]:
        opened = kwargs.pop("open", False)
        ids = super().apply_chat_template(messages, tools, **kwargs)
        return ids + (list(b"<think>\n") if opened else [])


def joined(text: str) -> dict[str, Any]:
    """The message that a stream adds up to, and how it ended."""
    out: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": [], "finish_reason": None}
    for chunk in events(text)[:-1]:
        choice = chunk["choices"][0]
        delta = choice["delta"]
        for name in ("content", "reasoning_content"):
            out[name] += delta.get(name) or ""
        for call in delta.get("tool_calls", []):
            if call["index"] == len(out["tool_calls"]):
                assert re.fullmatch("call_[0-9a-f]{24}|[0-9a-f]{9}", call["id"]) and call["type"] == "function"
                out["tool_calls"].append({"name": call["function"]["name"], "arguments": ""})
            out["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
        out["finish_reason"] = choice["finish_reason"] or out["finish_reason"]
    return out


def whole(answer: Any) -> dict[str, Any]:
    choice = answer.json()["choices"][0]
    message = choice["message"]
    return {"content": message["content"] or "", "reasoning_content": message.get("reasoning_content", ""),
            "tool_calls": [call["function"] for call in message.get("tool_calls", [])],
            "finish_reason": choice["finish_reason"]}


# ---------------------------------------------------------------------------------------------------- reading answers
@pytest.mark.parametrize("block", [1, 3, 7, 200])
async def test_an_answer_is_the_same_streamed_in_any_pieces(block: int):
    said = f"<think>Two of them.\n</think>\n\nWell:\n{CALL}\n{CALL.replace('12', '7')}"
    async with make_api(CoreOptions(block=block), ToolTokenizer()) as api:
        answer = whole(await api.chat(f"say:{said}", tools=TOOLS, max_tokens=200))
        streamed = await api.chat(f"say:{said}", tools=TOOLS, max_tokens=200, stream=True)
    assert answer == joined(streamed.text) == {
        "content": "Well:", "reasoning_content": "Two of them.", "finish_reason": "tool_calls",
        "tool_calls": [{"name": "f", "arguments": '{"n": 12}'}, {"name": "f", "arguments": '{"n": 7}'}]}


async def test_case_15_01_a_call_cut_by_the_limit_ends_with_length():
    async with make_api(CoreOptions(block=4), ToolTokenizer()) as api:
        for limit in range(1, len(CALL), 5):
            answer = whole(await api.chat(f"say:{CALL}", tools=TOOLS, max_tokens=limit))
            streamed = joined((await api.chat(f"say:{CALL}", tools=TOOLS, max_tokens=limit, stream=True)).text)
            assert answer == streamed and answer["finish_reason"] == "length"


async def test_tokenize_counts_the_prompt_with_its_tools():
    class Told(ToolTokenizer):
        def apply_chat_template(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None,
                                **kwargs: Any) -> list[int]:
            return [*json.dumps(tools or []).encode(), *super().apply_chat_template(messages, tools, **kwargs)]

    body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
    async with make_api(CoreOptions(max_model_len=4096), Told()) as api:
        bare, told = [(await api.http.post("/tokenize", json=body | more)).json()["count"]
                      for more in ({}, {"tools": TOOLS})]
        used = (await api.chat("x", tools=TOOLS)).json()["usage"]["prompt_tokens"]
        none = (await api.chat("x", tools=TOOLS, tool_choice="none")).json()["usage"]["prompt_tokens"]
    assert told == used > bare == none


class Family(ToolTokenizer):
    """A tokenizer whose chat template is of another family."""

    def __init__(self, template: str):
        self.chat_template = "{{ tools }} " + template


class Harmony(Family):
    """The prompt ends as gpt-oss' does."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return super().decode(ids, skip_special_tokens).replace("<|im_start|>assistant\n", "<|start|>assistant")


LLAMA, MISTRAL, NAMED = Family("<|python_tag|>"), Family("[TOOL_CALLS] ["), Family("[TOOL_CALLS] [ARGS]")
HARMONY, TAGS = Harmony("<|channel|> <|message|>"), Family("<think></think> <tool_call> <function=")
PAIRS, BARE_TAGS = Family("<tool_call> <arg_key>"), Family("<tool_call> <function=")
N12, N7 = {"name": "f", "arguments": '{"n": 12}'}, {"name": "f", "arguments": '{"n": 7}'}
SAID: list[tuple[Family, str, dict[str, Any]]] = [
    (LLAMA, '{"name": "f", "parameters": {"n": 12}}; {"name": "f", "parameters": {"n": 7}}', {"tool_calls": [N12, N7]}),
    (LLAMA, "No call {", {"content": "No call {"}),
    (MISTRAL, 'Well: [TOOL_CALLS] [{"name": "f", "arguments": {"n": 12}}, {"name": "f", "arguments": {"n": 7}}]',
     {"content": "Well:", "tool_calls": [N12, N7]}),
    (NAMED, 'Well: [TOOL_CALLS]f[ARGS]{"n": 12}[TOOL_CALLS]f[ARGS]{"n": 7}',
     {"content": "Well:", "tool_calls": [N12, N7]}),
    (HARMONY, '<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.f '
     '<|constrain|>json<|message|>{"n": 12}', {"reasoning_content": "Hm.", "tool_calls": [N12]}),
    (HARMONY, "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
     {"reasoning_content": "Hm.", "content": "Yes."}),
    (TAGS, "<think>Hm.</think>Well:\n<tool_call>\n<function=f>\n<parameter=n>\n12\n</parameter>\n</function>\n"
     "</tool_call>", {"reasoning_content": "Hm.", "content": "Well:", "tool_calls": [N12]}),
    (PAIRS, "Well:\n<tool_call>f\n<arg_key>n</arg_key>\n<arg_value>12</arg_value>\n</tool_call>\n<tool_call>f\n"
     "<arg_key>n</arg_key>\n<arg_value>7</arg_value>\n</tool_call>", {"content": "Well:", "tool_calls": [N12, N7]}),
]


@pytest.mark.parametrize(("tokenizer", "said"), [
    (TAGS, "<tool_call>\n<function=f>\n<parameter=s>\n{}\n</parameter>\n</function>\n</tool_call>"),
    (PAIRS, "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>"),
    (HARMONY, '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{{"s": "{}"}}')],
    ids=["function", "argument", "harmony"])
async def test_a_long_argument_arrives_while_it_is_written(tokenizer: Family, said: str):
    """However the form of calls wraps it; a busy machine may join some pieces."""
    text = "a long text " * 10
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {
        "s": {"type": "string"}}}}}]
    async with make_api(CoreOptions(block=4, step_seconds=0.004, max_model_len=1024), tokenizer) as api:
        answer = await api.chat(f"say:{said.format(text)}", tools=tools, max_tokens=400, stream=True)
        got = joined(answer.text)
        assert [json.loads(call["arguments"]) for call in got["tool_calls"]] == [{"s": text}]
        pieces = [call["function"]["arguments"] for chunk in events(answer.text)[:-1]
                  for call in chunk["choices"][0]["delta"].get("tool_calls", [])]
        assert len(pieces) > 5


@pytest.mark.parametrize("case", range(len(SAID)))
async def test_the_form_of_each_family_is_read(case: int):
    tokenizer, said, want = SAID[case]
    for block in (1, 5, 300):
        async with make_api(CoreOptions(block=block, max_model_len=1024), tokenizer) as api:
            answer = whole(await api.chat(f"say:{said}", tools=TOOLS, max_tokens=300))
            text = (await api.chat(f"say:{said}", tools=TOOLS, max_tokens=300, stream=True)).text
            streamed = joined(text)
        ids = re.findall('"id":"(call_\\w*|\\w{9})"', text)  # Mistral's templates take no others back
        assert all((len(i) == 9) == (tokenizer in (MISTRAL, NAMED)) for i in ids)
        assert len(ids) == len(want.get("tool_calls", []))
        empty: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
        reason = "tool_calls" if "tool_calls" in want else "stop"
        assert answer == streamed == empty | want | {"finish_reason": reason}


async def test_without_tools_an_answer_that_looks_like_a_call_is_text():
    async with make_api(CoreOptions(), ToolTokenizer()) as api:
        answer = whole(await api.chat(f"say:{CALL}", max_tokens=200))
        none = whole(await api.chat(f"say:{CALL}", tools=TOOLS, tool_choice="none", max_tokens=200))
    assert answer["content"] == none["content"] == CALL and answer["finish_reason"] == "stop"


async def test_reasoning_apart_within_or_left_out():
    async with make_api(CoreOptions(), ToolTokenizer()) as api:
        said = "say:<think>why</think>so"
        assert whole(await api.chat(said, max_tokens=40))["reasoning_content"] == "why"
        assert whole(await api.chat(said, max_tokens=40, separate_reasoning=False))["content"] == said[4:]
        hidden = whole(await api.chat(said, max_tokens=40, include_reasoning=False))
        assert (hidden["content"], hidden["reasoning_content"]) == ("so", "")
    async with make_api(CoreOptions()) as api:  # a template that knows nothing of reasoning
        assert whole(await api.chat(said, max_tokens=40))["content"] == said[4:]


# ------------------------------------------------------------------------------------------------------------ refusals
@pytest.mark.parametrize(("fields", "param"), [
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {
        "properties": {"a": {"items": {"type": "foo"}}}}}}}, "response_format.json_schema.schema"),
    ({"structured_outputs": {"json": {"type": 3}}}, "structured_outputs.json"),
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"structural_tag": {"triggers": []}}}, "structured_outputs.structural_tag"),
    ({"regex": "a", "ebnf": "root ::= b"}, "ebnf"), ({"ebnf": "root ::= b"}, "ebnf"),
    ({"json_schema": "{"}, "json_schema"), ({"guided_json": {"not": {}}}, "guided_json"),
    ({"regex": "x" * 600_000}, "regex"), ({"guided_regex": ""}, "guided_regex"), ({"ebnf": ""}, "ebnf"),
    ({"guided_choice": []}, "guided_choice"), ({"guided_json": ""}, "guided_json"),
    ({"structural_tag": {}}, "structural_tag"), ({"structured_outputs": {}}, "structured_outputs"),
    ({"guided_regex": "(c{1000}){1000}{1000}"}, "guided_regex"),
    ({"guided_json": {"type": "integer", "multipleOf": 1000003}}, "guided_json"),
])
@pytest.mark.parametrize("path", ["chat", "complete"])
async def test_case_12_05_a_broken_grammar_is_a_400_that_names_the_place(path: str, fields: dict, param: str):
    async with make_api() as api:
        answer = await getattr(api, path)(**fields)
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["param"] == param, error
        assert param in error["message"]
        await api.alive()


async def test_the_place_within_a_schema_is_named():
    schema = {"properties": {"a": {"items": {"type": "foo"}}}}
    async with make_api() as api:
        error = (await api.chat(structured_outputs={"json": schema})).json()["error"]
    assert "#/properties/a/items" in error["message"] and "foo" in error["message"]


@pytest.mark.parametrize(("fields", "param"), [
    ({"tools": [{"type": "web"}]}, "tools[0]"), ({"tools": [*TOOLS, TOOLS[0]]}, "tools[2].function.name"),
    ({"tools": TOOLS, "tool_choice": "some"}, "tool_choice"), ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "h"}}}, "tool_choice"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"s": {"type": "foo"}}}}}],
      "tool_choice": "required"}, "tools[0].function.parameters"),
    *[({"tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}]},
       "tools[0].function.parameters") for parameters in ("x", [], True, {"type": "string"}, {"type": ["null"]})],
])
async def test_bad_tools_are_named(fields: dict, param: str):
    async with make_api(CoreOptions(), ToolTokenizer()) as api:
        answer = await api.chat("say:x", **fields)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


# -------------------------------------------------------------------------------------------------- over a real engine
@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return Oracle.make(Path(tmp_path_factory.mktemp("model")), "llama", sharpness=0.7)


def real(oracle: Oracle, tokenizer: ToolTokenizer | None = None, drafts: bool = True, cores: list | None = None):
    """`cores` gets the engine, for its counters."""
    tokenizer = tokenizer or ToolTokenizer()

    def core() -> EngineCore:
        made = make_core(
            oracle.model, drafter=NgramDrafter(3) if drafts else None, chunk=16, budget=48,
            text=text_streams(tokenizer), eos_token_ids=frozenset({EOS}),
            grammars=grammars(tokenizer, oracle.model.vocab_size, [EOS]))
        if cores is not None:
            cores.append(made)
        return made
    return make_api(core, tokenizer, **NAME)


async def ask(api: Api, content: str = "go", **fields: Any) -> dict[str, Any]:
    """Streamed and not: the same."""
    body = {"max_tokens": 120, "temperature": 1.0, "seed": 5, "structured_outputs": None} | fields
    answer, streamed = await api.chat(content, **body), await api.chat(content, **body, stream=True)
    assert answer.status_code == 200, answer.text
    assert whole(answer) == joined(streamed.text)
    return whole(answer)


async def test_forms_hold_in_a_real_engine(oracle: Oracle):
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    async with real(oracle) as api:
        strict = {"structured_outputs": {"json": schema, "disable_any_whitespace": True}}
        assert json.loads((await ask(api, **strict, separate_reasoning=False))["content"])["a"] in (1, 2)
        chosen = await ask(api, structured_outputs={"choice": ["yes", "no"]}, separate_reasoning=False)
        assert chosen["content"] in ("yes", "no") and chosen["finish_reason"] == "stop"
        assert re.fullmatch("[0-9]{4}", (await ask(api, regex="[0-9]{4}", separate_reasoning=False))["content"])
        ebnf = await ask(api, ebnf='root ::= "a" ("b" | "c") "d"', separate_reasoning=False)
        assert ebnf["content"] in ("abd", "acd")
        text = (await api.complete("x", structured_outputs={"regex": "[xyz]{3}"}, max_tokens=20)).json()
        assert re.fullmatch("[xyz]{3}", text["choices"][0]["text"])


@pytest.mark.parametrize("fields", [{"guided_json": {}}, {"json_schema": {}}, {"structured_outputs": {"json": {}}}],
                         ids=lambda fields: next(iter(fields)))
async def test_an_empty_schema_asks_for_json(oracle: Oracle, fields: dict):
    async with real(oracle) as api:
        text = (await api.complete("x", **fields, max_tokens=3, seed=1)).json()["choices"][0]["text"]
        assert text.lstrip()[:1] in ("", *'{["-0123456789tfn')  # how JSON begins; without a grammar any byte may


async def test_a_grammar_that_waits_too_long_for_others_is_a_429(oracle: Oracle, monkeypatch: pytest.MonkeyPatch):
    go, cores, begun = threading.Event(), [], []
    compile_ = grammar_module.compiled
    monkeypatch.setattr(grammar_module, "is_quick", lambda grammar: False)
    monkeypatch.setattr(grammar_module, "compiled", lambda *these: (begun.append(1), go.wait(60), compile_(*these))[2])
    async with real(oracle, cores=cores) as api:
        def send(n: int) -> asyncio.Task:
            return asyncio.create_task(api.complete("x", regex=f"[a-z]{{{n}}}", max_tokens=20))
        try:
            waiting = [send(2), send(3)]
            async with asyncio.timeout(30):
                while len(begun) < 2:
                    await asyncio.sleep(0.01)
            cores[0].host.bound_patience(0.1)
            refused = await asyncio.wait_for(asyncio.gather(send(4), send(5)), 30)
            for answer in refused:
                assert answer.status_code == 429
                error = answer.json()["error"]
                assert error["code"] == "queue_full" and "try again" in error["message"]
                assert answer.headers["retry-after"] == "1"
        finally:
            go.set()
        assert all([(await each).status_code == 200 for each in waiting])


async def test_the_engines_refusal_of_a_grammar_names_its_field(oracle: Oracle):
    """Only the engine's vocabulary tells that a special token does not exist."""
    async with real(oracle) as api:
        lark = "start: <|nowhere|>"
        for fields, param in (({"guided_grammar": lark}, "guided_grammar"),
                              ({"structured_outputs": {"grammar": lark}}, "structured_outputs.grammar")):
            answer = await api.complete("x", **fields, max_tokens=3)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"], error["code"]) == (400, param, "invalid_grammar"), error


async def test_costly_grammars_do_not_hold_up_a_neighbour(oracle: Oracle, monkeypatch: pytest.MonkeyPatch):
    """They are looked at on threads: the neighbour gets tokens in the midst of it, and all of its tokens while each
    thread that looks at grammars is held."""
    bombs = [{"guided_regex": "(c{1000}){1000}{1000}"}] * 8 + [
        {"guided_json": {"type": "integer", "multipleOf": 1000003}}] * 2
    tokens, midst, ended = 0, list[int](), threading.Event()

    def held(grammar: Grammar) -> None:
        before = tokens
        try:
            check_grammar(grammar)
        finally:
            midst.append(tokens - before)
            assert ended.wait(60), "the neighbour waits for a grammar"

    monkeypatch.setattr(service_module, "check_grammar", held)
    monkeypatch.setattr(service_module, "GRAMMAR_SECONDS", 300.0)
    async with real(oracle) as api:
        costly: list[asyncio.Task[Any]] = []
        async for _ in api.engine.generate(Request(rid="neighbour", tokens=[5, 9, 2], sampling=SamplingParams(
                max_tokens=150, ignore_eos=True, seed=1))):
            tokens += 1
            costly = costly or [asyncio.create_task(api.complete("hi", max_tokens=3, **bomb)) for bomb in bombs]
        quick = await api.complete("hi", max_tokens=9, regex="[0-9]{4}")  # does not wait for them, either
        assert quick.status_code == 200 and re.fullmatch("[0-9]{4}", quick.json()["choices"][0]["text"])
        assert tokens > 100 and costly and not any(task.done() for task in costly)
        ended.set()
        assert all(answer.status_code == 400 for answer in await asyncio.gather(*costly))
    assert len(midst) == len(bombs) and sum(midst) > 0, "no token came while llguidance looked at a grammar"


async def test_a_grammar_that_waits_for_others_is_not_to_blame(oracle: Oracle, monkeypatch: pytest.MonkeyPatch):
    """Two are looked at for too long; a third one, which holds, had no turn. What nobody waits for is not looked at."""
    ended, seen = threading.Event(), list[Grammar]()

    def held(grammar: Grammar) -> None:
        seen.append(grammar)
        assert ended.wait(60)

    monkeypatch.setattr(service_module, "check_grammar", held)
    monkeypatch.setattr(service_module, "GRAMMAR_SECONDS", 0.5)
    async with real(oracle) as api:
        answers = await asyncio.gather(*(api.complete("hi", max_tokens=3, guided_choice=["a" * n, "b" * 20_000])
                                         for n in (1, 2, 3)))
        errors = [(answer.status_code, answer.json()["error"]["code"]) for answer in answers]
        assert sorted(errors) == [(400, "invalid_grammar")] * 2 + [(429, "queue_full")]
        assert answers[errors.index((429, "queue_full"))].headers["Retry-After"] == "1"
        ended.set()
        assert len(seen) == 2


async def test_bad_words_and_allowed_ids_hold_in_a_real_engine(oracle: Oracle):
    async with real(oracle) as api:
        free = await ask(api, separate_reasoning=False, max_tokens=30, skip_special_tokens=False)
        word = free["content"][4:6]
        got = await ask(api, separate_reasoning=False, max_tokens=30, bad_words=[word])
        assert word not in got["content"] and got["content"] != free["content"]
        only = await ask(api, separate_reasoning=False, max_tokens=30, allowed_token_ids=list(b"xyz"))
        assert re.fullmatch("[xyz]{30}", only["content"])


async def test_a_call_that_must_come_comes_and_holds_its_schema(oracle: Oracle):
    async with real(oracle) as api:
        for several in (True, False):
            got = await ask(api, tools=TOOLS, tool_choice="required", parallel_tool_calls=several,
                            separate_reasoning=False)
            whole_calls = got["tool_calls"] if got["finish_reason"] == "tool_calls" else got["tool_calls"][:-1]
            assert got["tool_calls"] and got["content"] == "" and (several or len(got["tool_calls"]) == 1)
            assert all(0 <= json.loads(call["arguments"])["n"] <= 99 for call in whole_calls)
        named = {"type": "function", "function": {"name": "g"}}
        got = await ask(api, tools=TOOLS, tool_choice=named, separate_reasoning=False)
        assert [call["name"] for call in got["tool_calls"]] == ["g"] and got["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("tokenizer", [LLAMA, MISTRAL, NAMED, HARMONY, BARE_TAGS, PAIRS],
                         ids=["llama", "mistral", "named", "harmony", "function", "argument"])
async def test_a_call_that_must_come_comes_in_the_models_form(oracle: Oracle, tokenizer: Family):
    """No thought before it, which would have no end: "a" for analysis, or "<" behind commentary, is not written."""
    async with real(oracle, tokenizer) as api:
        for choice in ("required", {"type": "function", "function": {"name": "g"}}):
            got = await ask(api, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, bad_words=["a", "y<"],
                            max_tokens=150)
            (call,) = got["tool_calls"]
            assert got["finish_reason"] == "tool_calls" and got["content"] == ""
            assert call["name"] in ("f", "g") and (choice == "required" or call["name"] == "g")
            assert 0 <= json.loads(call["arguments"])["n"] <= 99


async def test_case_12_07_copied_drafts_do_not_damage_a_call(oracle: Oracle):
    """The prompt is full of calls that look like the one that must come."""
    alike = " ".join('{"name": "%s", "arguments": {"n": %d}}' % (name, n) for n, name in ((4, "f"), (41, "g")))  # noqa: UP031
    found, cores = [], []
    for drafts in (False, True):
        async with real(oracle, None, drafts, cores) as api:
            found.append([(await ask(api, f"{alike} {i}", tools=TOOLS, tool_choice="required", temperature=0.0,
                                     max_tokens=90, parallel_tool_calls=False))["tool_calls"] for i in range(4)])
            counters = cores[-1].stats().counters
            assert (counters["drafted"] > 40 and counters["accepted"] > 20) if drafts else counters["drafted"] == 0
    assert found[0] == found[1]
    assert all(0 <= json.loads(call["arguments"])["n"] <= 99 for (call,) in found[0])


async def test_a_form_holds_behind_an_opened_thought(oracle: Oracle):
    """The thought is cut by a bias towards its end marker's bytes only by chance; a grammar that allows nothing else
    would be seen in the first token."""
    async with real(oracle) as api:
        got = await ask(api, regex="[0-9]{4}", chat_template_kwargs={"open": True}, max_tokens=24)
        assert got["reasoning_content"] and not re.fullmatch("[0-9]*", got["reasoning_content"])


async def test_strict_tools_leave_words_free(oracle: Oracle):
    tools = [{"type": "function", "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    async with real(oracle) as api:
        got = await ask(api, tools=tools, max_tokens=24, separate_reasoning=False)
        assert got["content"] and not got["tool_calls"] and got["finish_reason"] == "length"
