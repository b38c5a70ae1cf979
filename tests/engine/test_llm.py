"""The Python interface, over a tiny random model with a tokenizer of bytes."""

from __future__ import annotations

import asyncio
import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace as replace_fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import msgpack
from msgspec.structs import replace

from stretto.engine.async_llm import AsyncLLM
from stretto.engine.llm import LLM
from stretto.engine.options import make_config, tell_missing
from stretto.logit_processors import CustomLogitProcessor
from stretto.model.hub import ModelNotFound
from stretto.params import Grammar, ParameterError, ProcessorUse, SamplingParams
from stretto.protocol import CloseSession, EngineDead, GetSession, RequestError, SessionTurn
from stretto.text.tokenizer import TokenizerError
from tests.engine.small import VOCAB, save_tiny
from tests.text.vocabularies import byte_level

OPTIONS = dict(max_model_len=200, kv_tokens=2048, max_num_seqs=8, dtype="float32")
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_tiny(path, "llama")
    byte_level(VOCAB).save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}")
    return path


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(str(folder), **OPTIONS) as made:
        yield made


def test_generate_takes_text_ids_and_lists(llm: LLM) -> None:
    one = llm.generate("hello there", GREEDY)
    assert len(one) == 1 and len(one[0].token_ids) == 12 and one[0].finish_reason == "length"
    assert one[0].text == llm.tokenizer.decode(one[0].token_ids)
    ids = llm.tokenizer.encode("hello there")
    assert llm.generate(ids, GREEDY)[0].token_ids == one[0].token_ids
    both = llm.generate(["hello there", "good day"], GREEDY)
    assert [c.token_ids for c in both] == [one[0].token_ids, llm.generate("good day", GREEDY)[0].token_ids]


def test_n_choices_scores_and_usage(llm: LLM) -> None:
    sampling = SamplingParams(temperature=20.0, seed=3, n=3, max_tokens=8, logprobs=2, prompt_logprobs=0)
    choices = llm.generate("abcdef", sampling)
    assert [c.index for c in choices] == [0, 1, 2] and len({tuple(c.token_ids) for c in choices}) == 3
    for c in choices:
        assert len(c.logprobs) == 8 and c.usage is not None and c.usage.completion_tokens == 8
    assert len(choices[0].prompt_logprobs) == len(choices[0].prompt_tokens)


def test_embeddings(llm: LLM, folder) -> None:
    """Of length 1; the same alone, in a list, by ids, and from the interface for asyncio."""
    texts = ["hello there", "good day", "hello there"]
    last, mean = llm.embed(texts), llm.embed(texts, pooling="mean")
    assert last.shape == mean.shape == (3, 64) and not np.allclose(last, mean, atol=1e-3)
    for vectors in (last, mean):
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
        np.testing.assert_allclose(vectors[0], vectors[2], atol=1e-6)
    np.testing.assert_allclose(llm.embed(llm.tokenizer.encode("good day"))[0], last[1], atol=1e-6)
    short = llm.embed("good day", dimensions=5)
    np.testing.assert_allclose(short[0], last[1, :5] / np.linalg.norm(last[1, :5]), atol=1e-6)

    async def same() -> np.ndarray:
        async with await AsyncLLM.start(str(folder), **OPTIONS) as other:
            return await other.embed(texts, pooling="mean")

    np.testing.assert_allclose(asyncio.run(same()), mean, atol=1e-6)
    with pytest.raises(RequestError):
        llm.embed(["x" * 1000])


def test_a_checkpoint_says_how_it_is_pooled(llm: LLM, folder, tmp_path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    kinds = ("Transformer", "Pooling", "Normalize")
    (tmp_path / "modules.json").write_text(json.dumps([{"type": f"sentence_transformers.models.{k}", "path": k}
                                                       for k in kinds]))
    (tmp_path / "Pooling").mkdir()
    config = tmp_path / "Pooling/config.json"
    config.write_text('{"pooling_mode_mean_tokens": true}')
    with LLM(str(tmp_path), **OPTIONS) as other:
        np.testing.assert_allclose(other.embed("hello"), llm.embed("hello", pooling="mean"), atol=1e-6)
        np.testing.assert_allclose(other.embed("hello", pooling="last"), llm.embed("hello"), atol=1e-6)
    config.write_text('{"pooling_mode_cls_token": true}')
    with LLM(str(tmp_path), **OPTIONS) as other, pytest.raises(RequestError, match=r"gives no embeddings: .*cls_token"):
        other.embed("hello")


def test_chat_renders_the_template(llm: LLM) -> None:
    answer = llm.chat([{"role": "user", "content": "hi"}], GREEDY)[0]
    assert llm.tokenizer.decode(answer.prompt_tokens) == "user: hi\nassistant:"
    several = llm.chat([[{"role": "user", "content": "hi"}], [{"role": "user", "content": "yo"}]], GREEDY)
    assert several[0].token_ids == answer.token_ids and len(several) == 2
    begun = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "so"}]
    (going_on,) = llm.chat(begun, GREEDY, add_generation_prompt=False, continue_final_message=True)
    assert llm.tokenizer.decode(going_on.prompt_tokens) == "user: hi\nassistant: so"
    with pytest.raises(ValueError, match="add_generation_prompt=False"):
        llm.chat(begun, GREEDY, continue_final_message=True)
    with pytest.raises(TypeError, match="temperature"):  # was once handed to the template, which did not read it
        llm.chat(begun, temperature=0.0)


def test_what_scripts_for_other_engines_ask(llm: LLM, folder, monkeypatch, capsys) -> None:
    tokenizer = llm.get_tokenizer()
    hello = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(hello, tokenize=False, add_generation_prompt=True)
    assert text == "user: hi\nassistant:" and tokenizer.apply_chat_template(hello) == tokenizer.encode(text)
    outputs = llm.generate(prompts=[text], sampling_params=GREEDY, use_tqdm=True)
    assert outputs[0].token_ids == llm.chat(hello, sampling_params=GREEDY)[0].token_ids
    assert capsys.readouterr().err == ""  # a bar is for terminals
    assert llm.get_default_sampling_params() == SamplingParams()
    vectors = llm.embed(["one", "two", "three"])
    assert np.allclose(llm.score("one", ["two", "three"]), vectors[1:] @ vectors[0])
    assert llm.score(["one", "two"], ["one", "two"]) == pytest.approx(1)
    with pytest.raises(ValueError, match="text_1 has 2 texts and text_2 has 3"):
        llm.score(["a", "b"], ["a", "b", "c"])
    for owner, name, words in ((llm, "beam_search", "only sampling"), (llm, "shutdown", "close"), (llm, "nothing", "$"),
                               (outputs[0], "outputs", "its text is in text")):
        with pytest.raises(AttributeError, match=f"has no attribute '{name}'.*{words}"):
            getattr(owner, name)
    assert not hasattr(llm, "encode")



def test_streams_interleave_and_closing_one_frees_it(llm: LLM) -> None:
    want = [llm.generate(p, GREEDY)[0].token_ids for p in ("one", "two")]
    first, second = llm.stream("one", GREEDY), llm.stream("two", GREEDY)
    got: list[list[int]] = [[], []]
    for _ in range(12):
        for ids, stream in zip(got, (first, second), strict=True):
            ids += next(stream).token_ids
    assert got == want
    left = llm.stream("three", SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True))
    next(left)
    left.close()
    while llm.core.has_work:
        llm.core.step()
    llm.core.host.audit()
    assert llm.core.host.stats()[0]["aborts"] == 1


def test_stop_string_across_tokens(llm: LLM) -> None:
    text = llm.generate("tell me", SamplingParams(temperature=0.0, max_tokens=30))[0].text
    stop = text[5:8]
    cut = llm.generate("tell me", SamplingParams(temperature=0.0, max_tokens=30, stop=(stop,)))[0]
    assert cut.text == text[: text.index(stop)] and (cut.finish_reason, cut.stop_reason) == ("stop", stop)


def test_grammars_over_a_real_vocabulary(llm: LLM) -> None:
    words = Grammar("regex", "(good|bad) [a-z]{3}!")
    for sampling in (SamplingParams(temperature=0.0, max_tokens=40, grammar=words),
                     SamplingParams(temperature=5.0, seed=1, n=2, max_tokens=40, grammar=words)):
        for choice in llm.generate("say it", sampling):
            assert re.fullmatch(words.source, choice.text) and choice.finish_reason == "stop"
    with pytest.raises(RequestError, match="unclosed group"):
        llm.generate("x", SamplingParams(grammar=Grammar("regex", "(a")))


def test_bad_requests_and_options_are_named(folder, llm: LLM) -> None:
    with pytest.raises(RequestError, match="empty"):
        llm.generate([[]], GREEDY)
    with pytest.raises(RequestError, match="names token id 70000"):
        llm.generate("x", SamplingParams(stop_token_ids=[70000]))
    with pytest.raises(TypeError, match=r"max_modle_len.*did you mean max_model_len.*known.*max_model_len"):
        LLM(str(folder), max_modle_len=3)
    with pytest.raises(ValueError, match="2 prompts and 1"):
        llm.generate(["a", "b"], [GREEDY])
    assert llm.generate("x", GREEDY)[0].finish_reason == "length"


def test_case_18_13_two_engines_at_once_and_one_after_another(folder) -> None:
    want = None
    for _ in range(2):
        with LLM(str(folder), **OPTIONS) as a, LLM(str(folder), **OPTIONS, speculation="ngram") as b:
            texts = [e.generate("side by side", GREEDY)[0].token_ids for e in (a, b, a)]
        want = want or texts[0]
        assert texts == [want] * 3


async def test_async_llm_serves_callers_side_by_side(folder, llm: LLM) -> None:
    prompts = ["one", "two", "three"]
    want = {p: llm.generate(p, GREEDY)[0].token_ids for p in prompts}

    async with await AsyncLLM.start(str(folder), **OPTIONS) as engine:
        async def ask(prompt: str) -> list[int]:
            return [t async for output in engine.generate(prompt, GREEDY) for t in output.token_ids]

        assert dict(zip(prompts, await asyncio.gather(*map(ask, prompts)), strict=True)) == want
        long = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)
        stream = engine.generate("to be left", long, request_id="left")
        await anext(stream)
        assert await engine.abort("left")
        assert [o.finish_reason async for o in stream][-1:] == ["abort"]
        assert await ask("two") == want["two"]
        assert np.allclose(await engine.score("one", ["two", "one"]), llm.score("one", ["two", "one"]))
        assert (await engine.stats()).gauges["running"] == 0


# ------------------------------------------------------------------------------------------------------------ sessions
def test_a_conversation_computes_only_what_is_new(llm: LLM) -> None:
    with llm.open_session() as talk:
        first = talk.generate("hello", GREEDY)
        second = talk.generate(" and you", GREEDY)
        history = llm.tokenizer.encode("hello") + first.token_ids + llm.tokenizer.encode(" and you")
        assert second.token_ids == llm.generate(history, GREEDY)[0].token_ids
        assert second.usage is not None and second.usage.prompt_tokens == len(history)
        assert second.usage.cached_tokens == len(llm.tokenizer.encode("hello")) + 12 - 1
        child = talk.branch(5)
        assert child.info.tokens == 5 and talk.info.turns == 2
        stream = talk.stream(" more", GREEDY, on_disconnect="keep")
        got = next(stream).token_ids
        stream.close()
        assert talk.info.last_turn == "kept" and talk.info.tokens >= len(history) + 12 + len(got)
        child.close()
    with pytest.raises(RequestError, match="there is no session"):
        talk.generate("x", GREEDY)
    assert llm.core.host.stats()[1]["sessions"] == 0


def test_one_turn_a_prompt(llm: LLM) -> None:
    with pytest.raises(ValueError, match="one for each prompt"):
        llm.generate(["a", "b"], GREEDY, session=SessionTurn(sid="s"))
    both = llm.generate(["a", "b"], GREEDY, session=[SessionTurn(sid="s"), None])
    assert len(both) == 2 and [info.id for info in llm.manage(GetSession())] == ["s"]
    llm.manage(CloseSession("s"))


# ------------------------------------------------------------------------------------------------------ the sampler
class Force(CustomLogitProcessor):
    """Code of a request: a list of ids, one after another."""

    def __call__(self, logits, custom_param_list):
        for i, params in enumerate(custom_param_list):
            at = len(params["__req__"].output_ids)
            if at < len(params["ids"]):
                logits[i] = float("-inf")
                logits[i, params["ids"][at]] = 0.0
        return logits


def test_code_of_a_request_where_it_is_allowed(folder, llm: LLM) -> None:
    force = ProcessorUse(source=Force.to_str(), params={"ids": [5, 6, 7, 8]})
    with pytest.raises(RequestError, match="--enable-custom-logit-processor"):
        llm.generate("hello", replace(GREEDY, logit_processors=(force,)))
    with LLM(str(folder), enable_custom_logit_processor=True, speculation="ngram", **OPTIONS) as other:
        forced, plain = other.generate(["hello", "hello"], [replace(GREEDY, logit_processors=(force,)), GREEDY])
        assert forced.token_ids[:4] == [5, 6, 7, 8] and plain.token_ids == llm.generate("hello", GREEDY)[0].token_ids
        wrong = ProcessorUse(source=Force.to_str(), params={})
        with pytest.raises(RequestError, match="KeyError") as e:
            other.generate("hello", replace(GREEDY, logit_processors=(wrong,)))
        assert e.value.code == "custom_logit_processor_failed"
        decisions = {d.feature: d for d in other.prepared.resolved.decisions}
        assert "can run code" in decisions["code of requests"].why


def test_the_modes_of_the_sampler(folder, llm: LLM) -> None:
    """From the options to the device: what each does is tested where it is made."""
    sampling = SamplingParams(temperature=30.0, seed=4, max_tokens=12, logprobs=1)
    with LLM(str(folder), deterministic=True, logprobs_mode="processed_logprobs", max_logprobs=-1, **OPTIONS) as other:
        runner = other.core.device.runner
        assert runner.fixed and runner.reporting.processed and type(runner.backend).__name__ in ("NativeRagged",
                                                                                                         "TorchFixed")
        one = other.generate("hello", sampling)[0]
        beside = other.generate(["hello", "good day to you", "x"], sampling)[0]
        assert [(s.token_id, s.logprob) for s in one.logprobs] == [(s.token_id, s.logprob) for s in beside.logprobs]
        assert len(other.generate("hello", replace(sampling, logprobs=-1))[0].logprobs[0].top_ids) == VOCAB
    with LLM(str(folder), speculation=f"standalone:{folder}", acceptance_method="rejection", **OPTIONS) as other:
        assert other.core.device.runner.table.proposals is not None
        got = other.generate("hello", sampling)[0]
        assert got.usage.accepted_tokens == got.usage.drafted_tokens > 0  # the target itself proposes
        assert other.generate("hello", GREEDY)[0].token_ids == llm.generate("hello", GREEDY)[0].token_ids


def test_after_its_end_an_engine_says_so(folder) -> None:
    """It used to wait for ever for the result of a step that nobody would run."""
    with LLM(str(folder), **OPTIONS) as llm:
        begun = llm.stream("hello there", GREEDY)
        next(begun)
    llm.close()  # a second time: nothing
    for ask in (lambda: llm.generate("hello", GREEDY), lambda: next(llm.stream("hello", GREEDY)),
                lambda: list(begun), lambda: llm.embed("hello"), lambda: llm.open_session()):
        with pytest.raises(EngineDead, match="has been closed"):
            ask()


def test_several_threads_share_an_engine(llm: LLM) -> None:
    prompts = [f"number {i}" for i in range(6)]
    alone = [llm.generate(prompt, GREEDY)[0].token_ids for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        together = list(pool.map(lambda prompt: [llm.generate(prompt, GREEDY)[0].token_ids for _ in range(4)], prompts))
    assert together == [[ids] * 4 for ids in alone]
    assert llm.generate(prompts[0], GREEDY)[0].token_ids == alone[0]


def test_prompts_in_every_form(llm: LLM) -> None:
    ids = llm.tokenizer.encode("hello there")
    (wanted,) = llm.generate("hello there", GREEDY)
    for prompt in ({"prompt": "hello there"}, {"prompt_token_ids": ids}, [{"prompt_token_ids": ids}],
                   [np.array(ids)], list(np.array(ids))):
        assert [one.token_ids for one in llm.generate(prompt, GREEDY)] == [wanted.token_ids]
    assert llm.generate([]) == [] and llm.embed([]).shape[0] == 0
    for wrong, words in ((None, "NoneType"), (["a", 5], "'5' .int."), ([5, "a"], "list"), (7, "int"),
                         ([None], "NoneType"), ({"prompt": "x", "multi_modal_data": 3}, "multi_modal_data"),
                         ({}, "nothing")):
        with pytest.raises(TypeError, match=words):
            llm.generate(wrong, GREEDY)


@pytest.mark.parametrize("fields, words", [
    ({"max_tokens": "a"}, "max_tokens is 'a' .str.; it must be an integer"), ({"seed": "x"}, "seed"),
    ({"temperature": "1"}, "temperature is '1'"), ({"n": 1.5}, "n is '1.5'"), ({"top_k": None}, "top_k"),
    ({"stop": 5}, "stop is '5' .int.; it must be a tuple"), ({"stop": [5]}, "stop holds '5'"),
    ({"temperature": -1}, "temperature is -1; it must lie in 0..1e"), ({"top_p": 2}, "top_p is 2"),
    ({"n": 0}, "n is 0"), ({"max_tokens": -3}, "max_tokens is -3"),
    ({"logprobs": -2}, "logprobs is -2"), ({"ignore_eos": 1}, "ignore_eos"),
    ({"min_tokens": 5, "max_tokens": 2}, "min_tokens 5 exceeds max_tokens 2"),
    ({"temperature": float("nan")}, "temperature is nan"), ({"stop": [""]}, "a stop string is empty"),
    ({"bad_words": ["x"]}, "encode_inside"), ({"bad_words": [[]]}, "one of 0 tokens"),
    ({"logit_bias": {"5": 1.0}}, "logit_bias holds '5'"), ({"logit_bias": {5: 1e9}}, "-100..100"),
    ({"logit_bias": [5]}, "logit_bias is"), ({"stop_token_ids": ["x"]}, "stop_token_ids holds 'x'")], ids=str)
def test_parameters_that_nobody_could_honour_are_not_made(fields: dict, words: str) -> None:
    with pytest.raises(ParameterError, match=words) as e:
        SamplingParams(**fields)
    assert e.value.param in fields


def test_parameters_are_kept_in_one_form() -> None:
    given = dict(temperature=np.float32(0.5), top_k=np.int64(3), stop="END", stop_token_ids=None, bad_words=[[1, 2]])
    params = SamplingParams(**given)
    assert params == SamplingParams(temperature=0.5, top_k=3, stop=("END",), bad_words=((1, 2),))
    assert (type(params.temperature), type(params.top_k)) == (float, int)
    assert msgpack.decode(msgpack.encode(params), type=SamplingParams) == params


def test_grammars_of_python() -> None:
    schema = {"type": "object", "properties": {"ä": {"type": "integer"}}}
    assert json.loads(Grammar("json_schema", schema).source) == schema  # type: ignore[arg-type]
    assert Grammar("choice", ["a", "b"]) == Grammar("choice", '["a", "b"]')  # type: ignore[arg-type]
    for kind, source in (("regex", 5), ("regex", {"a": 1}), ("json_schema", 5), ("json_schema", {"a": object()}),
                         (3, "a")):
        with pytest.raises(ParameterError) as told:
            Grammar(kind, source)  # type: ignore[arg-type]
        assert told.value.param == "grammar"


@pytest.mark.parametrize("fields", [{"allowed_token_ids": []}, {"grammar": "x"}, {"logit_processors": ["x"]}], ids=str)
def test_parameters_that_mean_nothing_are_refused_by_name(fields: dict) -> None:
    with pytest.raises(ParameterError) as told:
        SamplingParams(**fields)
    assert told.value.param == next(iter(fields)) and told.value.param in str(told.value)


def test_calls_with_something_else_name_it(llm: LLM) -> None:
    turn: Any = "x"
    for name, call in (("sampling_params", lambda: llm.generate(["a"], turn)),
                       ("sampling_params", lambda: llm.generate(["a"], [turn])),
                       ("sampling_params", lambda: list(llm.stream("a", {"n": 1}))),  # type: ignore[arg-type]
                       ("session", lambda: llm.generate(["a"], session=turn)),
                       ("adapter", lambda: llm.generate(["a"], adapter=[5])),  # type: ignore[list-item]
                       ("text_1", lambda: llm.score(None, "a")), ("text_2", lambda: llm.score("a", [5])),  # type: ignore
                       ("conversation", lambda: llm.chat(5)), ("conversation", lambda: llm.chat("hi"))):  # type: ignore
        with pytest.raises(TypeError, match=name):
            call()
    size = llm.info.hidden_size
    for name, fields in (("pooling", {"pooling": "q"}), *(("dimensions", {"dimensions": n}) for n in
                                                          (0, -1, size + 1, 2.5, True))):
        with pytest.raises(RequestError) as told:
            llm.embed(["a"], **fields)
        assert told.value.param == name and name in str(told.value)
    assert llm.embed(["a"], dimensions=size).shape == (1, size)


def test_options_are_read_as_flags_are() -> None:
    config = make_config("m", {"max_model_len": "1K", "kv_host_bytes": "2MiB", "chunk_size": 64})
    assert config.model.max_model_len == 1024 and config.kv.kv_host_bytes == 2 << 20
    assert config.schedule.chunk_size == 64
    with pytest.raises(ValueError, match="'many' is not a number as in 8192"):
        make_config("m", {"max_model_len": "many"})
    assert make_config("m", {"speculation_tokens": "auto"}).speculation.speculation_tokens == "auto"
    with pytest.raises(ValueError, match="max_num_seqs is 'many'; it must be a whole number"):
        make_config("m", {"max_num_seqs": "many"})


@pytest.mark.parametrize("name, value, kept", [
    ("deterministic", "false", False), ("overlap", "no", False), ("prefix_caching", "Off", False),
    ("deterministic", 1, True), ("overlap", None, None), ("max_num_seqs", np.int64(4), 4), ("max_num_seqs", "12", 12),
    ("max_num_seqs", 2.0, 2), ("gpu_memory_utilization", ".5", 0.5), ("gpu_memory_utilization", 1, 1.0),
    ("speculation_tokens", "3", 3), ("lora_modules", ["a=b"], ("a=b",)), ("lora_modules", "a=b", ("a=b",)),
    ("chat_template", "x.jinja", Path("x.jinja")), ("tokenizer", Path("a"), "a"), ("model", Path("m"), "m")])
def test_options_have_the_type_of_their_setting(name: str, value: object, kept: object) -> None:
    config = make_config(None, {name: value})
    found = next(getattr(section, name) for section in vars(config).values() if hasattr(section, name))
    assert found == kept and type(found) is type(kept)


@pytest.mark.parametrize("name, value, words", [
    ("deterministic", "x", "True or False"), ("overlap", 2, "True or False"), ("max_num_seqs", 2.5, "a whole number"),
    ("max_num_seqs", True, "a whole number"), ("speculation", None, "text; leave it out for 'off'"),
    ("speculation", {"method": "ngram"}, "text"), ("speculation", True, "text"),
    ("dtype", "int8", "'auto' or 'float32'"), ("speculation_tokens", "x", "a whole number or 'auto'"),
    ("kv_memory", 2.5, "a whole number"), ("lora_modules", 5, "a list of texts"), ("seed", "null", "a whole number")])
def test_options_of_a_wrong_type_are_refused(name: str, value: object, words: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} is {re.escape(repr(value))}; it must be .*{words}"):
        make_config("m", {name: value})


def test_paths_may_be_texts_and_templates_are_checked_first(tmp_path: Path) -> None:
    template = tmp_path / "cut.jinja"
    template.write_text("{% for m in messages %}{{ m.content ")
    for path in (template, str(template)):
        with pytest.raises(TokenizerError, match=rf"--chat-template {re.escape(str(template))}: .*line 1"):
            LLM(tmp_path / "none", chat_template=path)  # type: ignore[arg-type]
    with pytest.raises(TokenizerError, match=r"gone\.jinja cannot be read"):
        LLM("none", chat_template=str(tmp_path / "gone.jinja"))
    assert make_config("m", {"session_file": str(tmp_path)}).schedule.session_file == tmp_path


@pytest.mark.filterwarnings("error")
def test_missing_native_kernels_are_told(folder) -> None:
    with LLM(str(folder), **OPTIONS) as llm:
        facts = llm.prepared.facts
    tell_missing(llm.prepared)
    (cpu,) = facts.devices
    without = replace_fields(cpu, kernels=(), missing=(("layer", "there is no compiler; install one"),))
    with pytest.raises(UserWarning, match=r"without native kernels: layer.*there is no compiler; install one"):
        tell_missing(replace_fields(llm.prepared, facts=replace_fields(facts, devices=(without,))))


def test_settings_of_a_server_are_told() -> None:
    with pytest.warns(UserWarning, match="port: a setting of `stretto serve`; there is no server here"):
        make_config("m", {"port": 5})
    with pytest.raises(ValueError, match="refused by strict"):
        make_config("m", {"port": 5, "strict": "true"})


def test_options_of_other_engines_are_read_as_their_flags_are(tmp_path: Path) -> None:
    theirs = dict(dtype="half", max_model_len=-1, enable_prefix_caching=False, trust_remote_code=False, revision=None,
                  quantization=None, max_running_requests=7, enable_chunked_prefill=True, swap_space=0,
                  speculative_config={"method": "ngram", "num_speculative_tokens": 3})
    with pytest.warns(UserWarning) as told:
        config = make_config("m", theirs)
    assert (config.model.dtype, config.model.max_model_len) == ("float16", None)
    assert config.kv.prefix_caching is False and config.schedule.max_num_seqs == 7
    assert (config.speculation.speculation, config.speculation.speculation_tokens) == ("ngram", 3)
    assert len(told) == len(theirs), "each translation is told"
    with pytest.warns(UserWarning) as told, pytest.raises(ModelNotFound):
        LLM(str(tmp_path / "none"), **theirs)
    assert {note.filename for note in told} == {__file__}, "where the options are written"
    for option, words in (({"trust_remote_code": True}, "never run"), ({"quantization": "awq"}, "read from the model"),
                          ({"mm_processor_kwargs": {"a": 1}}, "text alone"), ({"enable_sleep_mode": True}, "idle")):
        with pytest.raises(ValueError, match=f"{next(iter(option)).replace('_', '-')} is not a setting.*{words}"):
            make_config("m", option)
    with pytest.raises(ValueError, match="refused by strict"):
        make_config("m", {"strict": True, "enable_chunked_prefill": True})


def python_examples() -> list[str]:
    text = (Path(__file__).resolve().parents[2] / "docs" / "python.md").read_text()
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


@pytest.mark.parametrize("program", python_examples(), ids=["LLM", "AsyncLLM"])
def test_the_examples_of_the_documents(folder, program: str, monkeypatch, capsys) -> None:
    small = {name: value for name, value in OPTIONS.items() if name != "max_model_len"}
    monkeypatch.setattr("stretto.engine.llm.LLM", partial(LLM, str(folder), **small))
    monkeypatch.setattr(AsyncLLM, "start", partial(AsyncLLM.start, str(folder), **small))
    exec(compile(program.replace("2K", "200"), "docs/python.md", "exec"), {})
    assert len(capsys.readouterr().out) > 5
