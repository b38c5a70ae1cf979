"""Prompts arrive, in chunks, while others decode with drafts: SGLang's cells of mixed chunk, for every drafter.

    chunk 128 and 32    overlap off and on    tails whole ("full"), or one token each ("one_in_mixed", SGLang's rule)

The ids are those of an engine without drafter and without mixed steps, all of them; there were mixed steps with tails;
after the same ids the same drafts are offered as without mixed steps, so as many are accepted: where tails are whole,
in every request exactly. SUFFIX is asked to keep requests apart, so that its proposals follow from a request's own ids,
too. Only how many are accepted under overlap is not compared for it: a proposal of the host is made of ids that are a
step old unless the row sat out a step, and without mixed steps rows sit out every chunk of others.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers

from stretto.engine.core import EngineCore
from stretto.model.hub import resolve_model
from stretto.model.load import load_model
from stretto.protocol import Request
from stretto.spec.context import Target
from stretto.testing import (
    Answer,
    Ask,
    Lab,
    Setup,
    counters,
    greedy,
    make_engine,
    same_offers,
    target_of,
    watch_offers,
)
from stretto.text.tokenizer import load_tokenizer
from tests.spec import checkpoints as made
from tests.spec.suffix_trees import install

SHARED = Path(__file__).resolve().parents[2] / "../shared/data"
STORIES, GSM8K = SHARED / "models/stories260k", SHARED / "eval/gsm8k/test.jsonl"
FIRST, EVERY = 3, 4  # requests at the start; then one more after so many steps
LEAST_ACCEPTED = {"ngram": 0.02, "eagle3": 0.15, "dflash": 0.1, "dspark": 0.1}  # share of drafts that are accepted
CELLS = list(itertools.product((128, 32), (False, True), ("full", "one_in_mixed")))


@dataclass
class Bench:
    """A target with its drafters, and prompts of GSM8K in its ids. `plain`: answers without drafter and mixing."""

    lab: Lab
    prompts: list[list[int]]
    context: int
    new: int
    plain: dict[str, Answer] | None = None
    unmixed: dict[bool, dict[str, Answer]] | None = None

    def run(self, drafter: str | None, **setup) -> tuple[dict[str, Answer], EngineCore]:
        setup = {"budget": 192, "context": self.context, "pool_tokens": 8192, "slots": 17} | setup
        engine = make_engine(self.lab.model, drafter, self.lab.target, Setup(width=4, **setup))
        return arriving(engine, [Ask(str(i), p, greedy(self.new)) for i, p in enumerate(self.prompts)]), engine


def arriving(engine: EngineCore, asks: Sequence[Ask]) -> dict[str, Answer]:
    """The first of them at once, then one more every few steps."""
    answers: dict[str, Answer] = {}
    watch_offers(engine, answers)
    waiting = list(asks)
    for step in itertools.count():
        if waiting and (step % EVERY == 0 or len(waiting) > len(asks) - FIRST):
            ask = waiting.pop(0)
            engine.submit(Request(rid=ask.rid, tokens=list(ask.tokens), sampling=ask.sampling, want_text=False))
        elif not waiting and not engine.has_work:
            break
        for output in engine.step():
            answers.setdefault(output.rid, Answer()).add(output)
    engine.host.audit()
    return answers


def drafts_of(answers: dict[str, Answer]) -> dict[str, tuple[int, int, int]]:
    return {rid: (answer.drafted, answer.accepted, answer.steps) for rid, answer in answers.items()}


def check(bench: Bench, chunk: int, overlap: bool, policy: str, least: float) -> None:
    drafter = bench.lab.drafter
    late = drafter.startswith("suffix") and overlap
    if bench.plain is None:
        bench.plain, bench.unmixed = bench.run(None, mixed=False, chunk=chunk)[0], {}
    assert bench.unmixed is not None
    if overlap not in bench.unmixed:
        bench.unmixed[overlap], engine = bench.run(drafter, mixed=False, chunk=chunk, overlap=overlap)
        assert counters(engine)["mixed_steps"] == 0
    mixed, engine = bench.run(drafter, chunk=chunk, overlap=overlap, cap_policy=policy)
    counted, unmixed = counters(engine), bench.unmixed[overlap]
    for rid, answer in bench.plain.items():
        assert mixed[rid].token_ids == unmixed[rid].token_ids == answer.token_ids, f"request {rid}"
    assert counted["mixed_steps"] > 3 and counted["tail_rows"] > 5
    assert counted["drafted"] > 20
    assert (counted["tail_tokens"] == counted["tail_rows"]) == (policy == "one_in_mixed")
    assert same_offers(bench.lab, mixed, unmixed, "mixed steps") > 5
    if policy == "full" and not late:
        assert drafts_of(mixed) == drafts_of(unmixed), "acceptance depends on mixing"
    assert counted["accepted"] >= least * counted["drafted"]


def questions(n: int, length: int) -> list[str]:
    """Of GSM8K where it is there, else of our own making."""
    if GSM8K.is_file():
        with open(GSM8K) as lines:
            return [json.loads(line)["question"][:length] for line in itertools.islice(lines, n)]
    return [f"Tom has {i} apples and {7 * i} pears. He eats two of them each day. How many days"[:length]
            for i in range(n)]


# -------------------------------------------------------------------------------------------- random tiny target
@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """kind -> bench; made when first asked for."""
    folder, kept = tmp_path_factory.mktemp("mixed"), dict[str, Bench]()
    target = made.make_target(folder / "target", mtp=made.mtp("deepseek"))
    same = made.make_target(folder / "same").target.path  # without the layer that predicts
    prompts = [[ord(char) % made.VOCAB for char in text] for text in questions(6, 150)]

    def get(kind: str) -> Bench:
        if kind not in kept:
            own = {"eagle": made.eagle, "eagle3": made.eagle3, "dflash": made.dflash, "dspark": made.dspark}
            path = same if kind == "standalone" else own[kind](folder / kind)[0] if kind in own else None
            asked = "suffix:requests=0" if kind == "suffix" else f"{kind}:{path}" if path else kind
            lab = Lab(target.model, target.target, asked)
            kept[kind] = Bench(lab, prompts, 256, 60 if kind == "suffix" else 20)  # it begins to find when ids repeat
        return kept[kind]
    return get


@pytest.mark.parametrize(("kind", "least"), [("standalone", 1.0), ("ngram", 0.0), ("eagle", 0.0), ("eagle3", 0.0),
                                             ("dflash", 0.0), ("dspark", 0.0), ("mtp", 0.0), ("suffix", 0.0)])
@pytest.mark.parametrize(("chunk", "overlap", "policy"), [
    pytest.param(*cell, marks=() if cell == (32, True, "one_in_mixed") else pytest.mark.full) for cell in CELLS])
def test_every_drafter(tiny, monkeypatch, kind: str, least: float, chunk: int, overlap: bool, policy: str) -> None:
    install(monkeypatch)
    check(tiny(kind), chunk, overlap, policy, least)


# ------------------------------------------------------------------------------------------------- trained models
def perturbed(source: Path, folder: Path) -> Path:
    """A copy of a model that agrees with it now and then."""
    shutil.copytree(source, folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * p.std() * 0.15)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def stories(tmp_path_factory):
    """drafter -> bench of a model of 260,000 weights, trained on stories."""
    if not STORIES.is_dir():
        pytest.skip("shared/data/models/stories260k is absent")
    model, tokenizer = load_model(STORIES, dtype=torch.float32, device=torch.device("cpu")), load_tokenizer(STORIES)
    target = target_of(model, STORIES, "stories260k")
    prompts = [tokenizer.encode(text)[:160] for text in questions(8, 300)]
    near = perturbed(STORIES, tmp_path_factory.mktemp("near") / "model")
    named = {"ngram": "ngram", "near": f"standalone:{near}"}
    kept = {name: Bench(Lab(model, target, drafter), prompts, 512, 32) for name, drafter in named.items()}
    return kept.__getitem__


@pytest.mark.parametrize(("drafter", "least"), [("near", 0.1), ("ngram", 0.02)])
@pytest.mark.parametrize(("chunk", "overlap", "policy"), [
    pytest.param(*cell, marks=() if cell == (32, True, "full") else pytest.mark.full) for cell in CELLS])
def test_a_trained_tiny_model(stories, drafter: str, least: float, chunk: int, overlap: bool, policy: str) -> None:
    check(stories(drafter), chunk, overlap, policy, least)


@pytest.fixture(scope="module")
def default_model():
    """drafter -> bench of the default model, with the heads that ship for it."""
    path = resolve_model(None, progress=False)
    model = load_model(path, dtype=torch.float32, device=torch.device("cpu"), context=512)
    tokenizer = load_tokenizer(path)
    target: Target = target_of(model, path, "default")
    prompts = [tokenizer.encode(text)[:100] for text in questions(5, 400)]
    kept = {drafter: Bench(Lab(model, target, drafter), prompts, 512, 24) for drafter in LEAST_ACCEPTED}
    plain = kept["ngram"]
    plain.plain = plain.run(None, mixed=False)[0]
    for bench in kept.values():
        bench.plain, bench.unmixed = plain.plain, {}
    return kept.__getitem__


@pytest.mark.full
@pytest.mark.parametrize(("drafter", "least"), LEAST_ACCEPTED.items())
@pytest.mark.parametrize(("chunk", "overlap", "policy"), CELLS)
def test_the_default_model(default_model, drafter: str, least: float, chunk: int, overlap: bool, policy: str) -> None:
    check(default_model(drafter), chunk, overlap, policy, least)
