"""Models whose layers keep states: what a sequence goes on from, whatever became of its slot."""

from __future__ import annotations

from functools import cache, partial

import pytest
import torch

from stretto.compat import ConfigError
from stretto.config import Config, KVSection, ModelSection
from stretto.engine.llm import LLM
from stretto.engine.prepare import prepare
from stretto.params import SamplingParams
from stretto.protocol import CloseSession, Request, SessionTurn
from stretto.spec.context import DrafterError, Target
from stretto.spec.registry import drafter_sizes
from stretto.spec.scripted import ScriptedDrafter
from stretto.text.stream import IncrementalText
from tests.engine.small import CONTEXT, VOCAB, Oracle, Run, greedy, make_core, save_tiny
from tests.engine.test_oracle import PROMPTS
from tests.serve.fakes import ByteTokenizer
from tests.text.vocabularies import byte_level

NEW = 20
STEM = [7, 3, 250, 9, 12] * 14


@pytest.fixture(scope="module")
def oracle(tmp_path_factory) -> Oracle:
    made = Oracle.make(tmp_path_factory.mktemp("states"), "qwen3_next")
    made.answer = cache_of(made.answer)  # type: ignore[method-assign]
    return made


def cache_of(answer):
    kept = cache(lambda prompt, n: answer(list(prompt), n))
    return lambda prompt, n: kept(tuple(prompt), n)


def drafted(oracle: Oracle, whole: list[list[int]], accuracy: float = 0.6) -> ScriptedDrafter:
    return ScriptedDrafter(whole, 4, accuracy, vocab_size=oracle.model.vocab_size, variable=True)


def usage(run: Run, rid: str):
    return run.outputs[rid, 0][-1].usage


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("page", [1, 16, 64])
def test_a_turn_goes_on_where_the_last_one_ended(oracle, page: int, drafts: bool) -> None:
    """Inside a page as well: the slot's state rests beside it. Two turns beside it take the slot meanwhile."""
    first = oracle.answer(PROMPTS[0], NEW)
    second = oracle.answer([*PROMPTS[0], *first, 5, 6], NEW)
    whole = [[*PROMPTS[0], *first, 5, 6, *second], *[[*p, *oracle.answer(p, NEW)] for p in PROMPTS[3:5]]]
    core = make_core(oracle.model, page_size=page, slots=3, poison=True, state_every=3,
                     drafter=drafted(oracle, whole) if drafts else None)
    run = Run(core)
    run.submit("a", PROMPTS[0], greedy(NEW), session=SessionTurn(sid="s", mode="append"))
    run.finish_sessions()
    for i, prompt in enumerate(PROMPTS[3:5]):
        run.submit(f"beside{i}", prompt, greedy(NEW))
    run.finish_sessions()
    run.submit("b", [5, 6], greedy(NEW), session=SessionTurn(sid="s", mode="append"))
    run.finish_sessions()
    assert run.ids("a") == first and run.ids("b") == second
    assert usage(run, "b").cached_tokens == len(PROMPTS[0]) + NEW - 1
    assert (run.counters["accepted"] > 0) == drafts
    core.manage(CloseSession("s"))
    run.finish()
    core.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_turn_that_the_host_ended_goes_on(oracle, overlap: bool) -> None:
    """A stop that the device does not know: it may be a token further, and still has the state before that."""
    prompt = list(b"abc")
    answer = oracle.answer(prompt, NEW)
    tokenizer = ByteTokenizer()
    pieces = [tokenizer.decode([t]) for t in answer]
    at = next(i for i in range(4, NEW) if pieces[i] and pieces[i] not in "".join(pieces[:i]))
    core = make_core(oracle.model, overlap=overlap, text=partial(IncrementalText.for_request, tokenizer))
    run = Run(core)
    sampling = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True, stop=(pieces[at],))
    core.submit(_asked("a", prompt, sampling))
    run.finish_sessions()
    assert run.ids("a") == answer[: at + 1] and run.reason("a") == "stop"
    core.submit(_asked("b", [9], greedy(NEW, ignore_eos=True)))
    run.finish_sessions()
    assert run.ids("b") == oracle.answer([*prompt, *answer[: at + 1], 9], NEW)
    assert usage(run, "b").cached_tokens >= len(prompt) + at
    core.close()


def _asked(rid: str, tokens: list[int], sampling: SamplingParams):
    return Request(rid=rid, tokens=tokens, sampling=sampling, session=SessionTurn(sid="s", mode="append"))


@pytest.mark.parametrize("every", [1, 2])
def test_a_prefix_goes_on_from_its_last_state(oracle, every: int) -> None:
    """A hit ends where a state was kept, though pages go further."""
    core = make_core(oracle.model, page_size=8, poison=True, state_every=every)
    run = Run(core)
    run.submit("a", STEM, greedy(NEW))
    run.finish()
    run.submit("b", [*STEM[:61], 1, 2, 3], greedy(NEW))
    run.finish()
    assert usage(run, "b").cached_tokens == {1: 56, 2: 48}[every]
    assert run.ids("b") == oracle.answer([*STEM[:61], 1, 2, 3], NEW)
    core.close()


@pytest.mark.parametrize("states", [1, None])
def test_no_room_for_states_costs_time_alone(oracle, states: int | None) -> None:
    """Sequences give way to each other in a small pool, where hardly a state can be kept."""
    prompts, n = [[*STEM[:30], i, 8] for i in range(3)], 40
    answers = [oracle.answer(p, n) for p in prompts]
    core = make_core(oracle.model, page_size=4, pool_tokens=100, slots=7, poison=True, window_pages=states,
                     drafter=drafted(oracle, [p + a for p, a in zip(prompts, answers)]))
    run = Run(core)
    for i, prompt in enumerate(prompts):
        run.submit(str(i), prompt, greedy(n))
    run.finish()
    assert [run.ids(str(i)) for i in range(3)] == answers
    assert run.counters["retractions"] > 0 and run.counters["accepted"] > 0
    core.close()


def test_choices_fork_at_the_prompts_last_state(oracle) -> None:
    core = make_core(oracle.model, page_size=4, poison=True, prefix_cache=False)
    run = Run(core)
    run.submit("a", STEM[:30], SamplingParams(temperature=0.0, max_tokens=NEW, n=3))
    run.finish()
    right = oracle.answer(STEM[:30], NEW)
    assert all(run.ids("a", index) == right for index in range(3))
    assert run.counters["forks"] == 2 and run.counters["forks_without_pages"] == 0
    assert run.counters["fed_tokens"] < 2 * 30 + 3 * NEW, "the prompt was computed for each"
    core.close()


def test_every_token_has_one_state_in_memory(oracle) -> None:
    """A slot has the cells that a verify window needs, and no more."""
    core = make_core(oracle.model, slots=4, host_drafter=lambda ids, n: [], host_width=3)
    states = core.device.runner.states  # type: ignore[attr-defined]
    assert [part.slots.shape[:2] for layer in states.parts for part in layer] == [torch.Size((4, 5))] * 4
    values = sum(spec.values for spec in oracle.model.states)
    assert states.nbytes == 4 * values * (4 * 5 + core.host.limits.pages[1] + 1)
    core.close()


def test_a_draft_model_with_states_is_refused(tmp_path) -> None:
    save_tiny(tmp_path / "draft", "qwen3_next")
    target = Target("target", tmp_path, VOCAB, 64, 3, CONTEXT)
    with pytest.raises(DrafterError, match="some of its layers keep states, and a drafter's memory is made of cells"):
        drafter_sizes(f"standalone:{tmp_path / 'draft'}", target)


def test_from_a_folder_to_a_conversation(tmp_path) -> None:
    """Start-up counts the states, and says what a sequence goes on from."""
    reference = save_tiny(tmp_path, "qwen3_next")
    byte_level(VOCAB).save(str(tmp_path / "tokenizer.json"))
    with LLM(str(tmp_path), max_model_len=200, kv_tokens=2048, max_num_seqs=4, dtype="float32",
             state_interval=32) as llm:
        kv = llm.info.server_info["kv"]
        assert kv["windows"] == [None, "state"] and kv["pages"] == [129, 66]
        told = {one["feature"]: one["now"] for one in llm.info.server_info["features"]}
        assert told["state_interval"] == "32"
        first = llm.generate([STEM[:50]], greedy(8, ignore_eos=True))[0]
        assert first.token_ids == Oracle(llm, reference).answer(STEM[:50], 8)  # type: ignore[arg-type]
        again = llm.generate([STEM[:50]], greedy(8, ignore_eos=True))[0]
        assert again.token_ids == first.token_ids and again.usage is not None and again.usage.cached_tokens == 32


def test_an_interval_needs_layers_that_keep_states(tmp_path) -> None:
    save_tiny(tmp_path, "llama")
    with pytest.raises(ConfigError, match=r"--state-interval 32 does not work with model .*: none of its layers keeps"):
        prepare(Config(ModelSection(str(tmp_path)), KVSection(state_interval=32)))
