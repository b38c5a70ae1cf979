"""Grammars under every drafter: always valid, the text of an engine without drafter, drafts checked
against the grammar, forced text jumped, and no mask that the device had to wait for."""

from __future__ import annotations

import re
from functools import partial

import pytest

from stretto.engine.core import EngineCore
from stretto.host.grammar import Grammars
from stretto.params import Grammar, SamplingParams
from stretto.protocol import Request
from stretto.testing import Answer, Ask, Setup, make_engine, run
from stretto.text.grammar import vocabulary
from tests.serve.fakes import EOS, ByteTokenizer
from tests.spec import checkpoints as made
from tests.spec.suffix_trees import install

FORMS = ["([a-f]{5}-){4}", "[ab]the only way to say it[ab] goes on as it must[ab]", "(yes|no)(, (yes|no)){3}"]
KINDS = {"eagle": made.eagle, "eagle3": made.eagle3, "dflash": made.dflash, "dspark": made.dspark}
SETUPS = {"overlap": Setup(overlap=True, chunk=8), "mixed": Setup(overlap=True, chunk=4, budget=24, page_size=4,
                                                               cap_policy="one_in_mixed"),
          "retracted": Setup(overlap=True, pool_tokens=128, page_size=4, chunk=16)}
PROMPT = list(b"Write: ")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> made.TinyTarget:
    return made.make_target(tmp_path_factory.mktemp("target"), mtp=made.mtp("deepseek"))


@pytest.fixture(scope="module")
def drafters(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("drafters")
    same = made.make_target(tmp_path_factory.mktemp("same")).target.path  # without the layer that predicts
    kept = {"ngram": "ngram", "suffix": "suffix", "mtp": "mtp", "standalone": f"standalone:{same}"}

    def get(kind: str) -> str:
        if kind not in kept:
            kept[kind] = f"{kind}:{KINDS[kind](folder / kind)[0]}"
        return kept[kind]
    return get


def engine(tiny: made.TinyTarget, drafter: str | None, setup: Setup) -> EngineCore:
    assert tiny.model.vocab_size == made.VOCAB
    return make_engine(tiny.model, drafter, tiny.target, setup, eos=frozenset({EOS}), grammars=Grammars(
        partial(vocabulary, ByteTokenizer(), made.VOCAB, [EOS]), made.VOCAB))


def asks() -> list[Ask]:
    """Two of each form, greedy and hot; one with three choices; two without a grammar."""
    listed = [Ask(f"{i}{t}", [*PROMPT, i], SamplingParams(temperature=t, seed=i, max_tokens=60,
                                                         grammar=Grammar("regex", form)))
              for i, form in enumerate(FORMS) for t in (0.0, 30.0)]
    listed.append(Ask("n", PROMPT, SamplingParams(temperature=30.0, seed=9, max_tokens=60, n=3,
                                                  grammar=Grammar("regex", FORMS[0]))))
    return [*listed, *(Ask(f"free{i}", [7, 8, i], SamplingParams(temperature=0.0, max_tokens=30)) for i in range(2))]


def valid(answers: dict[str, Answer]) -> bool:
    def text(answer: Answer) -> str:
        return bytes(i for i in answer.token_ids if i < 256).decode()

    bound = {rid: FORMS[0 if rid[0] == "n" else int(rid[0])] for rid in answers if not rid.startswith("free")}
    return all(re.fullmatch(form, text(answers[rid])) and answers[rid].finish_reason == "stop"
               for rid, form in bound.items())


@pytest.fixture(scope="module")
def plain(tiny) -> dict[str, Answer]:
    made_alone = run(engine(tiny, None, Setup()), asks())
    assert valid(made_alone) and len(made_alone) == 11
    return made_alone


@pytest.mark.parametrize(("kind", "setup"), [
    pytest.param(kind, setup, marks=() if (kind, setup) in {
        ("eagle3", "mixed"), ("dflash", "overlap"), ("standalone", "retracted"), ("mtp", "mixed"),
        ("suffix", "overlap")} else pytest.mark.full)
    for kind in ("ngram", "suffix", "standalone", "mtp", *KINDS) for setup in SETUPS])
def test_every_drafter(tiny, drafters, plain, monkeypatch, kind: str, setup: str) -> None:
    install(monkeypatch)
    core = engine(tiny, drafters(kind), SETUPS[setup])
    listed = asks()
    answers = run(core, listed[:5], listed[5:])
    counters = core.stats().counters
    core.close()
    assert valid(answers)
    assert {rid: a.token_ids for rid, a in answers.items()} == {rid: a.token_ids for rid, a in plain.items()}
    assert counters["drafted"] > 30
    assert counters["masked_positions"] > counters["masked_steps"] > 0  # drafts were checked
    assert counters["forced_drafts"] > 3 and counters["accepted"] > 40  # the long form's text, at least
    assert counters["late_masks"] == counters["masked_steps"] >= counters["late_masks_overlapped"] >= (
        counters["late_masks"] - 2), "a step waited for its mask with nothing else in flight"
    assert counters["faults"] == counters["grammar_errors"] == 0
    assert setup != "mixed" or counters["mixed_steps"] > 0
    assert setup != "retracted" or counters["retractions"] > 0


@pytest.mark.parametrize("kind", ["eagle3", pytest.param("dspark", marks=pytest.mark.full)])
def test_sessions(tiny, drafters, kind: str) -> None:
    """Each turn has a grammar of its own; the second takes over the first one's slot and cells."""
    said = []
    for drafter in (None, drafters(kind)):
        core = engine(tiny, drafter, Setup(overlap=True, page_size=4, chunk=8))
        core.host.sessions.open("s")
        for turn, form in enumerate(FORMS):
            core.host.sessions.append("s", Request(
                rid=str(turn), tokens=PROMPT if turn == 0 else [9, turn], want_text=False, sampling=SamplingParams(
                    temperature=30.0, seed=turn, max_tokens=60, grammar=Grammar("regex", form))))
            answers: dict[str, Answer] = {}
            while core.has_work:
                for output in core.step():
                    answers.setdefault(output.rid, Answer()).add(output)
            assert valid(answers)
            said.append(answers[str(turn)].token_ids)
        core.close()
    assert said[:3] == said[3:]
