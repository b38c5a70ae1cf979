"""The support matrix, proved: every feature beside every other, on the same requests, by as few runs as cover all.

The default run takes a covering subset (every pair of values of two options, off included); the `full` marker takes
random cells besides. What a run proves is in `matrix_run`; docs/matrix.md is written from the marks of these tests.
"""

from __future__ import annotations

import random

import pytest
import torch

from stretto.attn.select import choose_backend
from stretto.compat import ConfigError
from stretto.config import Config, LoraSection, ModelSection, SpeculationSection
from stretto.engine.prepare import prepare
from stretto.matrix import FEATURES, REFUSALS
from stretto.params import SamplingParams
from stretto.protocol import RequestError, TokenLogprob
from tests.covering import Cell, pairwise
from tests.engine.matrix_run import DRAFTERS, EVIDENCE, MatrixRun, lab_keeper
from tests.engine.replay_oracle import EIGHT_BITS, Replay
from tests.proofs import ProofOf
from tests.spec.suffix_trees import install

OPTIONS: dict[str, tuple[str, ...]] = {
    "page": tuple(f"page size {size}" for size in (1, 16, 64, 256)),
    "attention": ("attention torch", "attention native"),
    "dtype": ("float32", "bfloat16", "float16"), "drafter": ("", *(f"drafter {name}" for name in DRAFTERS)),
    "session": ("", "session: tag", "session: append"), "layers": ("", "window", "recurrent state"),
    **{name: ("", name) for name in ("mixed chunk", "overlap", "retraction", "abort", "prefix cache", "host memory",
                                     "FP8 KV cache", "logprobs", "prompt logprobs", "penalties", "seed",
                                     "grammar", "n > 1", "streaming", "logit processor", "LoRA adapter",
                                     "elastic speculation", "rejection sampling", "deterministic",
                                     "embeddings")}}
RANDOM = 120  # further cells of the whole product


def allowed(cell: Cell) -> bool:
    """Of what is refused there is no cell, nor of drafts that nobody makes."""
    on = set(cell.values())
    if cell.get("drafter") == "" and (cell.get("elastic speculation") or cell.get("rejection sampling")):
        return False
    return not any({refusal.first, refusal.second} <= on for refusal in REFUSALS)


def random_cell(seed: int) -> Cell:
    rng = random.Random(seed)
    while True:
        cell = {name: rng.choice(values) for name, values in OPTIONS.items()}
        if allowed(cell):
            return cell


def params(kind: str, cells: list[Cell], *marks: pytest.MarkDecorator) -> list:
    made = []
    for number, cell in enumerate(cells):
        on = [value for value in cell.values() if value]
        made.append(pytest.param(frozenset(on), id=f"{kind}-{number}", marks=[pytest.mark.proves(*on), *marks]))
    return made


@pytest.fixture(scope="module")
def labs(tmp_path_factory):
    return lab_keeper(tmp_path_factory.mktemp)


@pytest.mark.parametrize("features", params("pairs", pairwise(OPTIONS, allowed=allowed)) + params(
    "random", [random_cell(seed) for seed in range(RANDOM)], pytest.mark.full))
def test_all_at_once(labs, monkeypatch, proof: ProofOf, features: frozenset[str]) -> None:
    install(monkeypatch)
    run = MatrixRun(labs(features), features)
    run.run()
    for feature in sorted(features):
        proof.show(feature, EVIDENCE[feature](run))
    if "mixed chunk" not in features:
        assert not run.counter("mixed_steps")
    assert not run.counter("faults") and not run.counter("broken_books")


def refused(first: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("refusal", [r for r in REFUSALS if r.first == first],
                                   ids=lambda refusal: f"{refusal.first} with {refusal.second}")


@refused("n > 1")
def test_what_is_refused_says_so(labs, refusal) -> None:
    features = frozenset({refusal.first, refusal.second, "page size 16", "float32"})
    run = MatrixRun(labs(features), features)
    with pytest.raises(RequestError) as told:
        run.submit("f0", [1, 2, 3], run.sampling(), "s0")
    assert refusal.sentence in str(told.value)
    run.core.close()


@pytest.mark.parametrize("refusal", [r for r in REFUSALS if r.first in ("rejection sampling", "deterministic")],
                         ids=lambda refusal: f"{refusal.first} with {refusal.second}")
def test_what_is_refused_by_configuration_says_so(labs, monkeypatch, refusal) -> None:
    install(monkeypatch)
    lab, both = labs(frozenset({"float32"})), {refusal.first, refusal.second}
    name = next((n.removeprefix("drafter ") for n in both if n.startswith("drafter ")), "standalone")
    rejection = "rejection sampling" in both
    asked = Config(ModelSection(str(lab.target.path), deterministic="deterministic" in both),
                   lora=LoraSection(enable_lora="LoRA adapter" in both),
                   speculation=SpeculationSection(lab.drafters[name] if rejection else "off",
                                                  acceptance_method="rejection" if rejection else "coupled"))
    with pytest.raises(ConfigError) as told:
        prepare(asked)
    assert refusal.sentence in str(told.value)


@refused("attention native")
def test_what_kernels_do_not_serve_says_so(refusal) -> None:
    """At the start: torch attends instead."""
    lack = choose_backend([], 16, torch.device("cpu"), getattr(torch, refusal.second)).caps.lack
    assert refusal.sentence in lack


def test_a_shift_that_no_log_probability_shows_by_itself_is_noticed(labs) -> None:
    replay, ids = Replay(labs(frozenset({"float32"})).reference, EIGHT_BITS["bfloat16"]), [7, 3, 250, 9, 12, 40, 41]
    own = replay.logits(ids).log_softmax(-1)
    scores = [TokenLogprob(token, float(own[at, token]), [], []) for at, token in enumerate(ids[1:])]
    replay.check([ids[0]], ids[1:], SamplingParams(temperature=1.0), scores=scores, rejection=True)
    replay.check_spread()
    for score in scores:
        score.logprob -= 1.5  # type: ignore[operator]
    replay.check([ids[0]], ids[1:], SamplingParams(temperature=1.0), scores=scores, rejection=True)
    replay.check([ids[0]], ids[1:], SamplingParams(temperature=1.0), scores=scores, rejection=True)
    with pytest.raises(AssertionError, match="root mean square of 18 differences"):
        replay.check_spread()


def test_no_refusal_is_left_out() -> None:
    tested = {"n > 1", "rejection sampling", "deterministic", "attention native"}
    assert {refusal.first for refusal in REFUSALS} == tested


def test_every_feature_has_its_evidence() -> None:
    assert set(EVIDENCE) == {feature.name for feature in FEATURES}
