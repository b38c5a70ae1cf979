"""Rejection sampling of drafts: what comes out is distributed as without drafts, whatever was drafted."""

from __future__ import annotations

import math
import re
import shutil
from collections import Counter
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from stretto.compat import ConfigError
from stretto.config import Config, ModelSection, SpeculationSection
from stretto.engine.prepare import prepare
from stretto.host.grammar import Grammars
from stretto.params import Grammar, ProcessorUse, SamplingParams
from stretto.protocol import Request
from stretto.sample import rejection
from stretto.sample.custom import CustomProcessors, Registry
from stretto.sample.processors import Positions
from stretto.sample.rejection import Proposals, verify
from stretto.sample.sampler import log_probabilities, sample_all
from stretto.testing import Ask, Lab, Setup, check_distribution, counters, make_engine, run, same_text, target_of
from stretto.text.grammar import vocabulary
from stretto.wire import N_INT, N_REAL, Int, Real
from tests.device.test_sampling import chi_square, reference
from tests.engine.small import Oracle
from tests.engine.test_logit_processors import NoRepeat
from tests.serve.fakes import EOS, ByteTokenizer
from tests.spec import checkpoints as made

ROWS, VOCAB = 30_000, 7
WARM = 25.0  # at which the tiny models have a choice


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> made.TinyTarget:
    return made.make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def heads(tiny, tmp_path_factory) -> str:
    path, _ = made.eagle3(tmp_path_factory.mktemp("eagle3"))
    return f"eagle3:{path}"


@pytest.fixture(scope="module")
def likeness(tiny, tmp_path_factory) -> str:
    """A small model that is mostly right: the target's own weights with noise."""
    folder = tmp_path_factory.mktemp("likeness")
    shutil.copytree(tiny.target.path, folder, dirs_exist_ok=True)
    g, file = torch.Generator().manual_seed(7), folder / "model.safetensors"
    save_file({name: w + 0.04 * w.std().nan_to_num() * torch.randn(w.shape, generator=g)
               for name, w in load_file(file).items()}, file, metadata={"format": "pt"})
    return f"standalone:{folder}"


def lab_of(tiny: made.TinyTarget, drafter: str) -> Lab:
    lab = Lab(tiny.model, tiny.target, drafter)
    usual = lab.setup
    lab.setup = lambda **more: usual(rejection=True, **more)  # type: ignore[method-assign]
    return lab


# ----------------------------------------------------------------------------------------------- positions by hand
def table(temperature: float, **settings: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns of one slot for each row, each with a seed of its own."""
    ints, reals = torch.zeros(N_INT, ROWS, dtype=torch.int32), torch.zeros(N_REAL, ROWS)
    reals[Real.TEMPERATURE], reals[Real.TOP_P] = temperature, settings.get("top_p", 1.0)
    reals[Real.MIN_P], ints[Int.TOP_K] = settings.get("min_p", 0.0), int(settings.get("top_k", 0))
    ints[Int.SEED_LOW] = torch.arange(ROWS)
    return ints, reals


def windows(p: torch.Tensor, q: torch.Tensor, temperature: float, **settings: float):
    """Each of ROWS rows verifies two drafts. p, q [V + 1, V] are logits after each id (V: after the prompt). Returns
    the drafts [ROWS, 2] and what the three positions gave [ROWS, 3]."""
    ints, reals = table(temperature, **settings)
    slots, proposals = torch.arange(ROWS), Proposals(ROWS, 2, VOCAB, torch.device("cpu"))
    log, filtered = torch.zeros(ROWS, 8, dtype=torch.int32), bool(settings)
    before = torch.full((ROWS,), VOCAB)
    seen = [before]
    for k in range(2):
        where = Positions(slots, torch.full((ROWS,), 4 + k), ints, reals)
        before = proposals.draw(q[before], where, torch.full((ROWS,), k), filtered)
        log[:, 4 + k] = before.to(torch.int32)
        seen.append(before)
    rows = slots.repeat_interleave(3)
    step = SimpleNamespace(out_rows=rows, cu_out=3 * torch.arange(ROWS + 1), n_out=torch.full((ROWS,), 3))
    where = Positions(rows, torch.tensor([4, 5, 6]).repeat(ROWS), ints, reals)
    logits = p[torch.stack(seen, 1)].view(-1, VOCAB)
    sampled = sample_all(logits, where)
    got = verify(logits, sampled, where, step, log, proposals, filtered)  # type: ignore[arg-type]
    return torch.stack(seen[1:], 1), got.view(ROWS, 3)


def pair(seed: int, likeness: float = 0.5) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    p = torch.randn(VOCAB + 1, VOCAB, generator=g) * 1.5
    return p, p * likeness + torch.randn(VOCAB + 1, VOCAB, generator=g)


FILTERS = [{}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.15}, {"top_k": 5, "top_p": 0.8, "min_p": 0.05}]


def check_windows(temperature: float, settings: dict, likeness: float = 0.5) -> float:
    """The worst chi-square per degree of freedom, of the first and of the second id."""
    p, q = pair(3, likeness)
    drafts, got = windows(p, q, temperature, **settings)
    filters = (settings.get("top_k", 0), settings.get("top_p", 1.0), settings.get("min_p", 0.0))

    def of(row: torch.Tensor) -> torch.Tensor:
        return reference(row, temperature, *filters)

    worst = chi_square(torch.bincount(got[:, 0], minlength=VOCAB).double(), of(p[VOCAB]))
    accepted = got[:, 0] == drafts[:, 0]
    expected = float(torch.minimum(of(p[VOCAB]), of(q[VOCAB])).sum())
    assert abs(float(accepted.float().mean()) - expected) < 4 / math.sqrt(ROWS), "accepted as often as is possible"
    for first in range(VOCAB):
        after = got[accepted & (got[:, 0] == first), 1]
        if len(after) > 500:
            worst = max(worst, chi_square(torch.bincount(after, minlength=VOCAB).double(), of(p[first])))
    return worst


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.4])
@pytest.mark.parametrize("settings", FILTERS, ids=str)
def test_ids_are_distributed_as_the_target(temperature: float, settings: dict) -> None:
    assert check_windows(temperature, settings) < 4.5


@pytest.mark.parametrize("stream", ["COIN_STREAM", "RESIDUAL_STREAM"])
def test_the_drafts_noise_may_not_be_used_again(monkeypatch, stream: str) -> None:
    """The test above sees it."""
    monkeypatch.setattr(rejection, stream, rejection.DRAFT_STREAM)
    try:
        worst = check_windows(1.0, {}, -0.5)
    except AssertionError:
        return
    assert worst > 8


def test_drafts_that_are_nearly_always_wrong() -> None:
    assert check_windows(1.0, {}, -0.5) < 4.5


def test_drafts_of_unknown_origin_count_as_certain() -> None:
    """A draft that was not drawn here is accepted with its own probability, and never comes out when it is not."""
    p, _ = pair(5)
    ints, reals = table(1.0)
    slots, proposals = torch.arange(ROWS), Proposals(ROWS, 1, VOCAB, torch.device("cpu"))
    log = torch.full((ROWS, 8), 2, dtype=torch.int32)
    rows = slots.repeat_interleave(2)
    step = SimpleNamespace(out_rows=rows, cu_out=2 * torch.arange(ROWS + 1), n_out=torch.full((ROWS,), 2))
    where = Positions(rows, torch.tensor([4, 5]).repeat(ROWS), ints, reals)
    logits = p[VOCAB].expand(2 * ROWS, -1).contiguous()
    got = verify(logits, sample_all(logits, where), where, step, log, proposals, False)  # type: ignore[arg-type]
    counts = torch.bincount(got.view(ROWS, 2)[:, 0], minlength=VOCAB).double()
    assert chi_square(counts, p[VOCAB].double().softmax(-1)) < 4


def test_log_probabilities_over_a_large_vocabulary() -> None:
    g = torch.Generator().manual_seed(1)
    logits = torch.cat([torch.randn(2, 1200, generator=g) * 0.1, torch.randn(2, 1200, generator=g) * 4])
    ints, reals = table(0.8, top_p=0.9, min_p=0.01)
    where = Positions(torch.arange(4), torch.arange(4), ints, reals)
    got = log_probabilities(logits, where, True).double().exp()
    want = torch.stack([reference(row, 0.8, 0, 0.9, 0.01) for row in logits])
    assert torch.allclose(got, want, atol=1e-6) and torch.equal(got > 0, want > 0)


# ------------------------------------------------------------------------------------------------ whole engines
def test_case_1_05_first_ids_of_many_seeds(tiny, likeness) -> None:
    check_distribution(lab_of(tiny, likeness))


@pytest.mark.full
@pytest.mark.parametrize("kind", ["standalone", "eagle", "dflash", "dspark"])
def test_case_1_05_of_every_kind(tiny, kind: str, tmp_path) -> None:
    make = {"eagle": made.eagle, "dflash": made.dflash, "dspark": made.dspark}
    path = tiny.target.path if kind == "standalone" else make[kind](tmp_path)[0]
    check_distribution(lab_of(tiny, f"{kind}:{path}"))


def joint(lab: Lab, prompt: list[int], n: int) -> dict[tuple[int, ...], float]:
    """Probabilities of the first n ids under top-k 2."""
    if n == 0:
        return {(): 1.0}
    answers = run_logprobs(make_engine(lab.model, None, lab.target), prompt)
    weights = [math.exp(p / WARM) for p in answers[1]]
    return {(i, *rest): w / sum(weights) * p for i, w in zip(answers[0], weights, strict=True)
            for rest, p in joint(lab, [*prompt, i], n - 1).items()}


def run_logprobs(engine, prompt: list[int]) -> tuple[list[int], list[float]]:
    engine.submit(Request(rid="p", tokens=prompt, want_text=False,
                          sampling=SamplingParams(temperature=0.0, max_tokens=1, logprobs=2)))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    score = next(o.logprobs for o in outputs if o.logprobs)[0]
    return score.top_ids, score.top_logprobs


@pytest.mark.parametrize("n", [32, pytest.param(200, marks=pytest.mark.full)])
def test_later_ids_under_retraction_overlap_and_mixed_steps(tiny, likeness, n: int) -> None:
    """Four ids of many seeds, in a pool so small that rows come and go and are drafted anew."""
    lab = lab_of(tiny, likeness)
    prompt = [3, 7, 11]
    asks = [Ask(str(i), prompt, SamplingParams(seed=i, temperature=WARM, top_k=2, max_tokens=28)) for i in range(n)]
    engine = make_engine(lab.model, lab.drafter, lab.target,
                         lab.setup(page_size=4, pool_tokens=64, chunk=2, budget=40, overlap=True, slots=6))
    got = run(engine, asks)
    assert counters(engine)["retractions"] > 0 and counters(engine)["mixed_steps"] > 20
    assert 0.2 < counters(engine)["accepted"] / counters(engine)["drafted"] < 0.95
    seen = Counter(tuple(a.token_ids[:4]) for a in got.values())
    expected = joint(lab, prompt, 4)
    assert set(seen) <= set(expected) and max(expected.values()) < 0.5, "the model has no choice: check nothing"
    cells = list(expected)
    counts = torch.tensor([seen[c] for c in cells], dtype=torch.float64)
    assert chi_square(counts, torch.tensor([expected[c] for c in cells], dtype=torch.float64)) < 2.2


def test_what_a_seed_gives(tiny, likeness) -> None:
    """The same text again under the same schedule; greedy text and text without drafts are those without a drafter."""
    lab = lab_of(tiny, likeness)
    asks = lab.asks(temperature=WARM)
    (first, _), (second, _) = lab.drafted(asks), lab.drafted(asks)
    same_text(second, first, "the same run again")
    plain = run(make_engine(lab.model, None, lab.target), asks)
    assert any(first[rid].token_ids != plain[rid].token_ids for rid in plain), "drafts never showed: check nothing"
    asks = [*lab.asks(), *lab.asks(wave="t", temperature=WARM, speculation=0)]
    got, engine = lab.drafted(asks, overlap=True)
    same_text(got, run(make_engine(lab.model, None, lab.target), asks), "greedy, and without drafts")
    assert counters(engine)["drafted"] > 0


def test_processors_hold_inside_accepted_runs(tiny) -> None:
    registry = Registry({"no_repeat": NoRepeat})
    use = (ProcessorUse("no_repeat"),)
    lab = lab_of(tiny, f"standalone:{tiny.target.path}")  # the target itself: nearly everything is accepted
    engine = make_engine(lab.model, lab.drafter, lab.target, lab.setup(), check_processor=registry.check)
    runner = engine.device.runner
    runner.table.custom = CustomProcessors(len(runner.table.log), runner.table.device, registry, lab.model.vocab_size)
    engine.info.logit_processors = ["no_repeat"]
    got = run(engine, lab.asks(40, temperature=WARM, logit_processors=use))
    for ask in lab.asks():
        whole = [*ask.tokens, *got[ask.rid].token_ids]
        assert all(whole[i] not in whole[i - 2 : i] for i in range(len(ask.tokens), len(whole)))
    assert counters(engine)["accepted"] == counters(engine)["drafted"] > 50, "the same distribution is never rejected"


def test_grammars_hold_and_what_they_force_is_accepted(tmp_path) -> None:
    """Drafts know nothing of the grammar, the target's distribution does; forced ids have probability 1 on both sides.
    What the grammar leaves open is distributed as the target has it."""
    oracle, tokenizer = Oracle.make(tmp_path, "llama", sharpness=0.7), ByteTokenizer()
    grammars = Grammars(partial(vocabulary, tokenizer, 300, [EOS]), 300)
    engine = make_engine(oracle.model, f"standalone:{tmp_path}", target_of(oracle.model, tmp_path),
                         Setup(rejection=True, overlap=True, slots=17), grammars, frozenset({EOS}))
    pattern, prompt, n = "ab[abc][abc]hello", list(b"Write: "), 160
    asks = [Ask(str(i), prompt, SamplingParams(seed=i, max_tokens=20, grammar=Grammar("regex", pattern)))
            for i in range(n)]
    got = run(engine, asks)
    texts = [bytes(t for t in a.token_ids if t < 256).decode() for a in got.values()]
    assert all(re.fullmatch(pattern, written) for written in texts)
    seen = counters(engine)
    assert seen["forced_drafts"] > n and seen["accepted"] > 3 * n
    with torch.no_grad():
        logits = oracle.reference(torch.tensor([prompt + list(b"ab")])).logits[0, -1, list(b"abc")]
    counts = torch.tensor([sum(t[2] == c for t in texts) for c in "abc"], dtype=torch.float64)
    assert chi_square(counts, logits.double().softmax(-1)) < 4.6  # p = 0.01


# --------------------------------------------------------------------------------------------------------- start-up
def test_refused_with_the_names_of_both_sides(tiny) -> None:
    def config(drafter: str) -> Config:
        return Config(model=ModelSection(str(tiny.target.path)),
                      speculation=SpeculationSection(drafter, acceptance_method="rejection"))
    with pytest.raises(ConfigError, match="--acceptance-method rejection does not work with drafter ngram"):
        prepare(config("ngram"))
    with pytest.raises(ConfigError, match="--acceptance-method rejection does not work with --speculation off"):
        prepare(config("off"))
    assert prepare(config(f"standalone:{tiny.target.path}")).resolved.config.speculation.acceptance_method
