"""Grammars in the whole engine: valid and the same text with and without overlap, drafts, neighbours and retraction.

The tokens are bytes, so what is valid is plain to see. Counters prove that what a test is about really happened, and
that the mask of every step was made while the device ran its forward pass.
"""

from __future__ import annotations

import json
import re
import time
from functools import partial
from itertools import pairwise

import pytest
from msgspec.structs import replace

from stretto.engine.core import EngineCore
from stretto.host import grammar as grammar_module
from stretto.host.faults import HostFault
from stretto.host.grammar import Grammars, GrammarState
from stretto.params import Grammar, SamplingParams
from stretto.protocol import Request
from stretto.spec.ngram import NgramDrafter
from stretto.spec.scripted import ScriptedDrafter
from stretto.text import masks as masks_module
from stretto.text.grammar import vocabulary
from stretto.text.stream import IncrementalText
from stretto.wire import pack_mask
from tests.engine.small import VOCAB, Oracle, Run, make_core
from tests.serve.fakes import EOS, ByteTokenizer

SCHEMA = {"type": "object", "additionalProperties": False, "required": ["a", "b", "c"],
          "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["xy", "z"]},
                         "c": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}}}
JSON = Grammar("json_schema", json.dumps(SCHEMA), whitespace=False)
WORD = Grammar("regex", "[a-f]{3,9}")
PROMPT = list(b"Write it down: ")
DRAFTS = ("none", "right", "wrong", "ngram", "host")


@pytest.fixture(scope="module")
def oracle(tmp_path_factory) -> Oracle:
    return Oracle.make(tmp_path_factory.mktemp("model"), "llama", sharpness=0.7)


def engine(oracle: Oracle, eos: tuple[int, ...] = (EOS,), **options) -> EngineCore:
    tokenizer = ByteTokenizer()
    return make_core(oracle.model, eos_token_ids=frozenset(eos), text=partial(IncrementalText.for_request, tokenizer),
                     grammars=Grammars(partial(vocabulary, tokenizer, VOCAB, list(eos)), VOCAB), **options)


def sampled(seed: int, grammar: Grammar | None = None, most: int = 60, **more) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "seed": seed, "max_tokens": most, "grammar": grammar} | more)


def text(run: Run, rid: str, index: int = 0) -> str:
    return bytes(i for i in run.ids(rid, index) if i < 256).decode("utf-8", "replace")


def valid(written: str) -> bool:
    value = json.loads(written)
    return (list(value) == ["a", "b", "c"] and 0 <= value["a"] <= 99 and value["b"] in ("xy", "z")
            and len(value["c"]) <= 3 and all(type(c) is bool for c in value["c"]))


def ask_all(run: Run) -> None:
    """Grammars of two kinds, one with several choices, beside plain requests, in two waves."""
    for i in range(3):
        run.submit(f"json{i}", PROMPT, sampled(i, JSON))
    run.submit("words", [*PROMPT, 5], sampled(7, WORD, n=3))
    run.submit("plain", [9, 8, 7], sampled(3))
    while not run.outputs:
        run.step()
    run.submit("late", list(range(30, 90)), sampled(4, JSON))
    run.submit("long", list(range(30, 80)), sampled(5))


class Recall:
    """A drafter of the host that knows whole sequences, and now and then gets an id wrong."""

    def __init__(self, whole: list[list[int]]):
        self.whole = whole

    def __call__(self, ids, n: int) -> list[int]:
        known = list(ids)
        for one in self.whole:
            if one[: len(known)] == known:
                return [t if (len(known) + i) % 5 else 33 for i, t in enumerate(one[len(known) : len(known) + n])]
        return [34] * n


def drafting(kind: str, whole: list[list[int]]) -> dict:
    if kind in ("right", "wrong"):
        return {"drafter": ScriptedDrafter(whole, 4, 1.0 if kind == "right" else 0.0, vocab_size=VOCAB)}
    if kind == "ngram":
        return {"drafter": NgramDrafter(4)}
    return {"host_drafter": Recall(whole)} if kind == "host" else {}


def run_all(oracle: Oracle, **options) -> Run:
    run = Run(engine(oracle, **options))
    ask_all(run)
    run.finish()
    run.core.close()
    return run


def prompts() -> dict[str, list[int]]:
    return {**{f"json{i}": PROMPT for i in range(3)}, "words": [*PROMPT, 5], "plain": [9, 8, 7],
            "late": list(range(30, 90)), "long": list(range(30, 80))}


@pytest.fixture(scope="module")
def alone(oracle) -> dict[tuple[str, int], list[int]]:
    """One after the other in everything: no overlap, no drafts, chunks of any size, room for all."""
    run = run_all(oracle, overlap=False)
    return {key: run.ids(*key) for key in run.outputs}


def test_answers_are_valid_and_end_with_their_grammar(oracle, alone) -> None:
    run = run_all(oracle, overlap=False)
    for rid in ("json0", "json1", "json2", "late"):
        assert valid(text(run, rid)) and run.reason(rid) == "stop"
    for index in range(3):
        assert re.fullmatch("[a-f]{3,9}", text(run, "words", index)) and run.reason("words", index) == "stop"
    assert run.reason("plain") == "length" and not text(run, "plain").isascii()
    assert len({text(run, f"json{i}") for i in range(3)}) > 1 and run.counters["grammar_ends"] >= 4


@pytest.mark.parametrize("kind", DRAFTS)
@pytest.mark.parametrize("options", [
    dict(overlap=True), dict(overlap=True, chunk=7, budget=16, cap_policy="one_in_mixed", page_size=1),
    dict(overlap=False, chunk=5, mixed=False),
], ids=["overlap", "mixed", "inline"])
def test_case_12_01_the_same_text_whatever_runs_beside(oracle, alone, kind: str, options: dict) -> None:
    whole = [prompts()[rid] + ids for (rid, _), ids in alone.items()]
    run = run_all(oracle, **options, **drafting(kind, whole))
    assert {key: run.ids(*key) for key in run.outputs} == alone
    counters = run.core.stats().counters
    assert counters["faults"] == 0 and counters["grammar_errors"] == 0
    assert (counters["drafted"] > 0) == (kind != "none")
    if kind in ("right", "host"):
        assert counters["accepted"] > 20
    if options.get("chunk") == 7:
        assert counters["mixed_steps"] > 0
    first = counters["late_masks"] - counters["late_masks_overlapped"]
    assert first <= 2 if options["overlap"] else counters["late_masks_overlapped"] == 0
    assert counters["late_masks"] == counters["masked_steps"] > 5


@pytest.mark.parametrize("kind", DRAFTS)
def test_a_retracted_turn_stands_where_it_stood_in_its_grammar(oracle, kind: str) -> None:
    """Grammars that count: a place lost, or taken twice, would show."""
    counts = Grammar("regex", "([a-f]{5}-){9}")

    def answers(**options) -> tuple[list[list[int]], dict[str, float]]:
        run = Run(engine(oracle, **options))
        for i in range(5):
            run.submit(f"r{i}", [*PROMPT, i], sampled(i, counts))
        run.finish()
        run.core.close()
        assert all(re.fullmatch(counts.source, text(run, f"r{i}")) for i in range(5))
        return [run.ids(f"r{i}") for i in range(5)], run.counters

    alone, _ = answers(overlap=False)
    whole = [[*PROMPT, i, *ids] for i, ids in enumerate(alone)]
    again, counters = answers(pool_tokens=160, page_size=4, chunk=16, **drafting(kind, whole))
    assert again == alone and counters["retractions"] > 1


def test_case_5_05_the_mask_knows_every_earlier_token(oracle) -> None:
    """A grammar in which each token decides the next: a mask that lacks the newest one would allow a wrong one."""
    chain = Grammar("regex", "(ab|cd|ef|gh){12}")
    for overlap in (False, True):
        run = Run(engine(oracle, overlap=overlap, drafter=NgramDrafter(4)))
        for seed in range(4):
            run.submit(f"r{seed}", PROMPT, sampled(seed, chain))
        run.finish()
        assert all(re.fullmatch(chain.source, text(run, f"r{seed}")) for seed in range(4))
        counters = run.core.stats().counters
        assert counters["drafted"] > 0 and (counters["late_masks_overlapped"] > 10) == overlap
        run.core.close()


def test_case_12_03_a_short_grammar_in_a_wide_window(oracle) -> None:
    """Drafts go on behind the grammar's end; nothing of them is delivered, whether or not the model would go on."""
    for width in (1, 8):
        drafter = ScriptedDrafter([[*PROMPT, *b"yes", EOS, *b"yesyesyes"]], width, 1.0, vocab_size=VOCAB)
        run = Run(engine(oracle, drafter=drafter))
        run.submit("r", PROMPT, sampled(1, Grammar("choice", '["yes"]')))
        run.submit("more", PROMPT, sampled(1, Grammar("regex", "(yes)+"), most=40))
        run.finish()
        assert text(run, "r") == "yes" and run.reason("r") == "stop" and EOS not in run.ids("r")
        assert re.fullmatch("(yes)+(ye?)?", text(run, "more"))
        run.core.close()


def test_case_2_07_penalties_schema_and_drafts_in_one_batch(oracle) -> None:
    params = dict(frequency_penalty=1.5, presence_penalty=0.5, repetition_penalty=1.3, top_k=40, top_p=0.9, min_p=0.01,
                  logit_bias={ord("{"): -5.0, 4: 3.0})
    found = []
    for drafter in (None, NgramDrafter(4), ScriptedDrafter([[0] * 90], 4, 0.0, vocab_size=VOCAB)):
        run = Run(engine(oracle, drafter=drafter))
        for seed in range(3):
            run.submit(f"r{seed}", PROMPT, sampled(seed, JSON, **params))
            run.submit(f"p{seed}", PROMPT, sampled(seed, **params))
        run.finish()
        assert all(valid(text(run, f"r{seed}")) for seed in range(3))
        found.append({key: run.ids(*key) for key in run.outputs})
        run.core.close()
    assert found[0] == found[1] == found[2]


def test_limits_stops_and_min_tokens(oracle) -> None:
    run = Run(engine(oracle))
    run.submit("cut", PROMPT, sampled(1, JSON, 5))
    run.submit("least", PROMPT, sampled(1, Grammar("regex", "[ab]{2,30}"), min_tokens=12))
    run.submit("short", PROMPT, sampled(1, Grammar("choice", '["ab"]'), min_tokens=12))
    run.submit("exact", PROMPT, sampled(1, Grammar("choice", '["abc"]'), 3))
    run.submit("stop", PROMPT, sampled(1, JSON, stop=('"b"',)))
    run.submit("endless", PROMPT, sampled(1, Grammar("regex", "a+"), most=30, ignore_eos=True))
    run.submit("scored", PROMPT, sampled(1, JSON, logprobs=2))
    run.finish()
    assert run.reason("cut") == "length" and len(run.ids("cut")) == 5
    assert len([i for i in run.ids("least") if i != EOS]) >= 12 and run.reason("least") == "stop"
    assert text(run, "short") == "ab" and run.reason("short") == "stop"
    assert text(run, "exact") == "abc" and run.reason("exact") == "stop"
    assert run.reason("stop") == "stop" and run.outputs["stop", 0][-1].stop_reason == '"b"'
    assert set(text(run, "endless")) == {"a"}
    assert valid(text(run, "scored"))
    assert all(o.logprobs and len(o.logprobs) == len(o.token_ids) for o in run.outputs["scored", 0] if o.token_ids)


@pytest.mark.parametrize("overlap", [False, True])
def test_forced_text_is_drafted(oracle, overlap: bool) -> None:
    """A drafter that is always wrong, and a grammar that forces most of its text."""
    phrase = Grammar("regex", "[ab]the only way this can be said[ab] and it goes on as it must[ab]")
    plain, wrong = Run(engine(oracle, overlap=overlap)), ScriptedDrafter([[0] * 90], 4, 0.0, vocab_size=VOCAB)
    drafted = Run(engine(oracle, overlap=overlap, drafter=wrong))
    for run in (plain, drafted):
        for seed in range(3):
            run.submit(f"r{seed}", PROMPT, sampled(seed, phrase, 90))
        run.finish()
        run.core.close()
    assert {key: plain.ids(*key) for key in plain.outputs} == {key: drafted.ids(*key) for key in drafted.outputs}
    assert plain.counters["forced_drafts"] == 0 < drafted.counters["forced_drafts"]
    usage = drafted.outputs["r0", 0][-1].usage
    assert usage.accepted_tokens > 30 and usage.steps < 40


def test_sessions_in_place_and_after_a_pause(oracle) -> None:
    """Each turn has a grammar of its own, at its beginning; the one that waits starts when the other has ended."""
    run = Run(engine(oracle, drafter=NgramDrafter(4), page_size=4))
    for sid in ("a", "b"):
        run.core.host.sessions.open(sid)

    def append(sid: str, number: int, grammar: Grammar) -> None:
        run.core.host.sessions.append(sid, Request(rid=f"{sid}{number}", tokens=list(PROMPT) if number == 0 else [9, 8],
                                                   sampling=sampled(number, grammar), want_text=False))
    append("a", 0, JSON)
    append("a", 1, WORD)
    append("b", 0, WORD)
    run.finish_sessions()
    append("b", 1, JSON)
    run.finish_sessions()
    assert valid(text(run, "a0")) and re.fullmatch(WORD.source, text(run, "a1"))
    assert re.fullmatch(WORD.source, text(run, "b0")) and valid(text(run, "b1"))
    alone = Run(engine(oracle))
    alone.submit("a1", [*PROMPT, *run.ids("a0"), 9, 8], sampled(1, WORD))
    alone.finish()
    assert run.ids("a1") == alone.ids("a1")


def test_an_abort_while_the_mask_is_on_its_way(oracle) -> None:
    run = Run(engine(oracle))
    run.submit("a", PROMPT, sampled(1, JSON))
    run.submit("b", PROMPT, sampled(2, JSON))
    while ("a", 0) not in run.outputs:
        run.step()
    run.note(run.core.abort("a"))
    run.finish()
    assert run.reason("a") == "abort" and valid(text(run, "b"))


def test_others_run_while_a_grammar_is_compiled(oracle, monkeypatch) -> None:
    compile_ = Grammars._compile
    monkeypatch.setattr(Grammars, "_compile", lambda *a: (time.sleep(0.3), compile_(*a))[1])
    run = Run(engine(oracle))
    run.submit("slow", PROMPT, sampled(1, JSON))
    run.submit("quick", PROMPT, sampled(1, most=4))
    run.submit("gone", PROMPT, sampled(1, WORD))
    run.note(run.core.abort("gone"))
    run.finish()
    assert list(run.outputs) == [("gone", 0), ("quick", 0), ("slow", 0)] and valid(text(run, "slow"))
    assert run.reason("gone") == "abort"


def test_a_grammar_that_cannot_be_compiled_ends_its_request_alone(oracle) -> None:
    run = Run(engine(oracle))
    run.submit("bad", PROMPT, sampled(1, Grammar("json_schema", '{"properties": {"x": {"type": "foo"}}}')))
    run.submit("good", PROMPT, sampled(1, JSON))
    run.finish()
    assert run.reason("bad") == "error" and "#/properties/x" in run.outputs["bad", 0][-1].error
    assert run.outputs["bad", 0][-1].error_code == "invalid_grammar"
    assert valid(text(run, "good"))


@pytest.mark.parametrize("grammar", [Grammar("regex", "(c{1000}){1000}{1000}"),
                                     Grammar("json_schema", '{"type": "integer", "multipleOf": 1000003}')],
                         ids=lambda grammar: grammar.kind)
def test_costly_grammars_hold_up_no_step(oracle, grammar: Grammar) -> None:
    """They are given to the engine unchecked, and are refused by its threads, before a mask is asked of them."""
    run = Run(engine(oracle))
    run.submit("good", PROMPT, sampled(1, most=60, ignore_eos=True))
    while not run.outputs:
        run.step()
    for i in range(8):
        run.submit(f"bad{i}", PROMPT, sampled(1, replace(grammar, source=grammar.source.replace("1000", f"10{i}0"))
                                              if i and grammar.kind == "regex" else grammar))
    longest, before = 0.0, time.perf_counter()
    while run.core.host.has_work:
        run.step()
        now = time.perf_counter()
        longest, before = max(longest, now - before), now
    run.finish()
    assert run.reason("good") == "length" and longest < 0.5, longest
    for i in range(8):
        assert run.reason(f"bad{i}") == "error" and run.outputs[f"bad{i}", 0][-1].error_code == "invalid_grammar"


def test_a_grammar_with_a_dead_end_ends_its_request_alone(oracle) -> None:
    """No text has both five and seven letters: the grammar is accepted, and the place is found when it is reached."""
    nowhere = Grammar("lark", 'start: "a" X\nX: /b{5}/ & /b{7}/')
    for drafter in (None, NgramDrafter(4)):
        run = Run(engine(oracle, drafter=drafter))
        run.submit("bad", PROMPT, sampled(1, nowhere))
        run.submit("good", PROMPT, sampled(1, JSON))
        run.finish()
        assert run.reason("bad") == "error" and "no token" in run.outputs["bad", 0][-1].error
        assert valid(text(run, "good"))
        run.core.close()


def test_the_device_waits_for_masks_and_not_for_automata(oracle, monkeypatch) -> None:
    """Turns move to other automata when the mask has gone out."""
    monkeypatch.setattr(masks_module, "PATIENCE", -1.0)  # every mask takes too long
    monkeypatch.setattr(grammar_module, "SLOW_STEPS", 1)
    run, order = Run(engine(oracle)), []

    def noted(owner, name: str) -> None:
        known = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: (order.append(name), known(*args))[1])

    noted(run.core.device, "mask")
    noted(Grammars, "spread")
    noted(run.core.host._masks, "make")
    for seed in range(4):
        run.submit(f"r{seed}", PROMPT, sampled(seed, JSON))
    run.finish()
    assert order.count("spread") > 2
    assert all(before != "make" for before, name in pairwise(order) if name == "spread")
    run.core.close()


def test_a_stale_state_would_be_noticed(oracle, monkeypatch) -> None:
    """The mutant that does not advance the matcher: every mask is that of the grammar's first token."""
    take = GrammarState.take
    monkeypatch.setattr(GrammarState, "take", lambda self, ids: take(self, ids) if len(ids) > 1 else None)
    run = Run(engine(oracle))
    run.submit("r", PROMPT, sampled(1, JSON))
    run.finish()
    assert not text(run, "r").startswith('{"a":')


def test_a_mask_made_before_the_last_result_would_be_noticed(oracle, monkeypatch) -> None:
    """The mutant that does not wait for the step in flight."""
    def early(self, plan):
        self.device.mask(pack_mask(self.host.mask(plan)))
        outputs = []
        while self.in_flight > 1:
            outputs += self._collect()
        return outputs

    monkeypatch.setattr(EngineCore, "_send_mask", early)
    run = Run(engine(oracle, overlap=True))
    run.submit("r", PROMPT, sampled(1, Grammar("regex", "(ab|cd|ef|gh){12}")))
    with pytest.raises(HostFault, match="does not allow"):
        run.finish()
