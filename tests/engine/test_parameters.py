"""Every sampling parameter under every kind of draft: the same seeded text with and without, and not the text without
the parameter."""

from __future__ import annotations

import pytest
import torch

from stretto.model.load import load_model
from stretto.params import SamplingParams
from stretto.spec.ngram import NgramDrafter
from stretto.spec.scripted import ScriptedDrafter
from stretto.testing import Ask, Lab
from tests.engine.small import VOCAB, Oracle, Run, make_core
from tests.spec import checkpoints as made

PROMPT, NEW = [3, 7, 11, 3, 7] * 4, 30
STOP_AT = 6  # token after which the tests of stops end an answer
PARAMETERS: dict[str, dict] = {
    "temperature": dict(temperature=2.0),
    "greedy": dict(temperature=0.0),
    "top_k": dict(top_k=3),
    "top_p": dict(top_p=0.5),
    "min_p": dict(min_p=0.3),
    "top_k, top_p and min_p": dict(top_k=20, top_p=0.9, min_p=0.02),
    "repetition_penalty": dict(top_k=3, repetition_penalty=3.0),
    "presence_penalty": dict(top_k=3, presence_penalty=2.0),
    "frequency_penalty": dict(top_k=3, frequency_penalty=2.0),
    "logit_bias": dict(logit_bias={5: 6.0, 9: 6.0}),
    "allowed_token_ids": dict(allowed_token_ids=tuple(range(40))),
    "bad_words": dict(bad_words=tuple((i,) for i in range(0, VOCAB, 2))),
    "seed": dict(seed=99),
    "max_tokens": dict(max_tokens=7),
    "stop_token_ids": dict(stop_token_ids=()),  # filled in: an id of the free answer
    "min_tokens": dict(min_tokens=20, stop_token_ids=()),
    "everything": dict(temperature=1.3, top_p=0.95, top_k=60, min_p=0.005, frequency_penalty=0.4, presence_penalty=0.2,
                       repetition_penalty=1.2, logit_bias={5: 1.5, 9: -2.0}, bad_words=((7, 3), (8,)), min_tokens=5),
}


@pytest.fixture(scope="module")
def soft(tmp_path_factory) -> Oracle:
    return Oracle.make(tmp_path_factory.mktemp("soft"), "llama", sharpness=0.7)


def params(name: str, free: list[int]) -> SamplingParams:
    given = PARAMETERS[name] | ({"stop_token_ids": (free[STOP_AT],)} if "stop_token_ids" in PARAMETERS[name] else {})
    return SamplingParams(**{"seed": 3, "max_tokens": NEW} | given)


def play(soft: Oracle, drafter, names: list[str], free: list[int]) -> dict[str, list[int]]:
    """All of them in one batch, so that rows with a parameter run beside rows without it."""
    one = Run(make_core(soft.model, drafter=drafter, slots=len(names) + 2, chunk=16))
    for name in names:
        one.submit(name, PROMPT, params(name, free))
    one.submit("free", PROMPT, SamplingParams(seed=3, max_tokens=NEW))
    one.finish()
    assert drafter is None or one.counters["drafted"] > 20
    one.core.close()
    return {name: one.ids(name) for name in (*names, "free")}


@pytest.fixture(scope="module")
def plain(soft) -> dict[str, list[int]]:
    free = play(soft, None, [], [0] * NEW)["free"]
    return play(soft, None, list(PARAMETERS), free)


def test_every_parameter_does_something(plain) -> None:
    free = plain["free"]
    assert [name for name in PARAMETERS if plain[name] == free] == []
    assert [name for name in PARAMETERS if name.endswith("penalty") and plain[name] == plain["top_k"]] == []
    assert free.index(free[STOP_AT]) == STOP_AT, "choose another token to stop at"
    assert plain["stop_token_ids"] == free[: STOP_AT + 1] and plain["max_tokens"] == free[:7]
    assert set(plain["logit_bias"]) & {5, 9} and set(plain["allowed_token_ids"]) <= set(range(40))
    assert all(i % 2 for i in plain["bad_words"])
    assert len(plain["min_tokens"]) >= 20 and free[STOP_AT] not in plain["min_tokens"][:20]


def told(plain, accuracy: float) -> ScriptedDrafter:
    return ScriptedDrafter([PROMPT + ids for ids in plain.values()], 4, accuracy, vocab_size=VOCAB, variable=True)


@pytest.mark.parametrize("kind", ["ngram", "right", "half", "wrong"])
def test_case_2_01_case_2_03_drafts_change_no_text(soft, plain, kind: str) -> None:
    drafter = NgramDrafter(4) if kind == "ngram" else told(plain, {"right": 1.0, "half": 0.6, "wrong": 0.0}[kind])
    got = play(soft, drafter, list(PARAMETERS), plain["free"])
    assert [name for name in got if got[name] != plain[name]] == []


KINDS = {"eagle3": made.eagle3, "eagle": made.eagle, "dflash": made.dflash, "dspark": made.dspark, "standalone": None}


@pytest.mark.parametrize("kind", [pytest.param(k, marks=() if k == "eagle3" else pytest.mark.full) for k in KINDS])
def test_case_2_01_drafters_with_weights(kind: str, tmp_path_factory) -> None:
    """The same list for drafters that read the request's parameters themselves."""
    folder = tmp_path_factory.mktemp(kind)
    tiny = made.make_target(folder / "target")
    make = KINDS[kind]
    lab = Lab(tiny.model, tiny.target, f"{kind}:{make(folder / kind)[0] if make else tiny.target.path}")
    vocab = tiny.model.vocab_size
    asks = []
    for name, given in PARAMETERS.items():
        given = {key: value for key, value in given.items() if key not in ("allowed_token_ids", "bad_words")}
        given["temperature"] = 25 * given.get("temperature", 1.0)  # at which this sharp model has a choice
        for ask in lab.asks()[:2]:
            sampling = SamplingParams(**{"seed": 3, "max_tokens": 24} | given)
            asks.append(Ask(f"{name} {ask.rid}", [t % vocab for t in ask.tokens], sampling))
    want = lab.plain(asks)
    got, _ = lab.drafted(asks, chunk=8, overlap=True)
    assert [rid for rid in want if got[rid].token_ids != want[rid].token_ids] == []
    assert sum(answer.drafted for answer in got.values()) > 100


@pytest.mark.parametrize("kind", ["none", "repeats", "right"])
def test_a_penalty_that_forbids_a_repeat_holds_inside_accepted_runs(soft, kind: str) -> None:
    """With so large a penalty an id comes once; ids accepted earlier in the same window count."""
    hard = SamplingParams(temperature=0.0, max_tokens=40, repetition_penalty=1e6)
    first = Run(make_core(soft.model))
    first.submit("r", PROMPT, hard)
    first.finish()
    ids = first.ids("r")
    doubled = [token for token in ids for _ in range(2)]
    drafter = {"none": None, "repeats": ScriptedDrafter([PROMPT + doubled], 4, 1.0, vocab_size=VOCAB),
               "right": ScriptedDrafter([PROMPT + ids], 4, 1.0, vocab_size=VOCAB)}[kind]
    got = Run(make_core(soft.model, drafter=drafter))
    got.submit("r", PROMPT, hard)
    got.finish()
    assert got.ids("r") == ids and len({*PROMPT, *ids}) == len(set(PROMPT)) + len(ids)
    assert kind != "right" or got.counters["accepted"] > 20


def test_equal_maxima_give_the_lowest_id_at_every_position(soft, tmp_path) -> None:
    """Two ids whose rows of the head are equal: the lower one comes, drafted or not, greedy or nearly so."""
    low, high = 17, 230
    model = _twins(soft, tmp_path, low, high)
    for drafter in (None, NgramDrafter(4), ScriptedDrafter([PROMPT + [high] * 12], 4, 1.0, vocab_size=VOCAB)):
        got = Run(make_core(model, drafter=drafter))
        got.submit("r", PROMPT, SamplingParams(temperature=0.0, max_tokens=12, logit_bias={low: 50.0, high: 50.0}))
        got.finish()
        assert got.ids("r") == [low] * 12


def _twins(soft: Oracle, folder, low: int, high: int):
    with torch.no_grad():
        kept = soft.reference.lm_head.weight[high].clone()
        soft.reference.lm_head.weight[high] = soft.reference.lm_head.weight[low]
        soft.reference.save_pretrained(folder)
        soft.reference.lm_head.weight[high] = kept
    return load_model(folder, dtype=torch.float32, device=torch.device("cpu"))
