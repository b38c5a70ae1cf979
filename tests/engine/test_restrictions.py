"""Bad words and allowed ids: kept at every position, the same with and without drafts."""

from __future__ import annotations

import pytest

from stretto.params import Grammar, ParameterError, SamplingParams
from stretto.spec.ngram import NgramDrafter
from stretto.spec.scripted import ScriptedDrafter
from tests.engine.small import VOCAB, Oracle, Run, make_core

PROMPT, NEW = [3, 7, 11, 3, 7], 40


@pytest.fixture(scope="module")
def oracle(tmp_path_factory) -> Oracle:
    return Oracle.make(tmp_path_factory.mktemp("model"), "llama", sharpness=0.7)


def answer(oracle: Oracle, drafter=None, overlap: bool = True, **params) -> list[list[int]]:
    """Of four seeds, beside four plain requests."""
    run = Run(make_core(oracle.model, drafter=drafter, overlap=overlap))
    for seed in range(4):
        run.submit(f"r{seed}", PROMPT, SamplingParams(seed=seed, max_tokens=NEW, **params))
        run.submit(f"p{seed}", PROMPT, SamplingParams(seed=seed, max_tokens=NEW, top_k=4))
    run.finish()
    run.core.close()
    return [run.ids(f"r{seed}") for seed in range(4)]


def holds(ids: list[int], word: tuple[int, ...]) -> bool:
    whole = PROMPT + ids
    return any(tuple(whole[i : i + len(word)]) == word for i in range(len(PROMPT) - len(word) + 1, len(whole)))


@pytest.mark.parametrize("length", [1, 2, 3])
def test_bad_words_never_come_and_drafts_change_nothing(oracle, length: int) -> None:
    """The words are what the same seeds write without them, also across the end of the prompt."""
    free = answer(oracle, top_k=4)
    words = tuple({tuple((PROMPT + ids)[at : at + length]) for ids in free for at in (len(PROMPT) - length + 1, 9, 20)})
    params = dict(top_k=4, bad_words=words)
    got = answer(oracle, overlap=False, **params)
    assert got != free and not any(holds(ids, word) for ids in got for word in words)
    told = [PROMPT + ids for ids in free]
    for drafter in (NgramDrafter(4), ScriptedDrafter([PROMPT + got[0]], 4, 1.0, vocab_size=VOCAB),
                    ScriptedDrafter(told, 4, 1.0, vocab_size=VOCAB)):
        assert answer(oracle, drafter, **params) == got


def test_only_allowed_ids_come(oracle) -> None:
    allowed = (4, 9, 17, 200, 299)
    got = answer(oracle, overlap=False, allowed_token_ids=allowed)
    assert all(set(ids) <= set(allowed) and len(ids) == NEW for ids in got) and len({tuple(ids) for ids in got}) > 1
    for drafter in (NgramDrafter(4), ScriptedDrafter([PROMPT + got[1]], 4, 1.0, vocab_size=VOCAB)):
        assert answer(oracle, drafter, allowed_token_ids=allowed) == got


def test_a_slot_forgets_the_restrictions_of_its_last_occupant(oracle) -> None:
    run = Run(make_core(oracle.model, slots=2))
    run.submit("a", PROMPT, SamplingParams(seed=1, max_tokens=8, allowed_token_ids=(4, 9), bad_words=((5,), (6, 7))))
    run.submit("b", PROMPT, SamplingParams(seed=1, max_tokens=8))
    run.finish()
    fresh = Run(make_core(oracle.model))
    fresh.submit("b", PROMPT, SamplingParams(seed=1, max_tokens=8))
    fresh.finish()
    assert run.ids("b") == fresh.ids("b") and set(run.ids("a")) <= {4, 9}


@pytest.mark.parametrize(("params", "word"), [
    (dict(allowed_token_ids=(VOCAB,)), "allowed_token_ids"), (dict(bad_words=((),)), "bad_words"),
    (dict(bad_words=((1,) * 99,)), "bad_words"), (dict(bad_words=((1,),) * 999), "bad_words"),
    (dict(bad_words=((VOCAB,),)), "bad_words"),
    (dict(allowed_token_ids=(1,), grammar=Grammar("regex", "a")), "a grammar exclude each other"),
])
def test_what_cannot_be_kept_is_refused(params: dict, word: str) -> None:
    with pytest.raises(ParameterError, match=word):
        SamplingParams(**params).check(VOCAB)
