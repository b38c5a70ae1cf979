"""Logit processors, rejection sampling and log-probabilities on a GPU: as on the CPU, in graphs where they may be."""

from __future__ import annotations

import pytest
import torch

from stretto.model.load import load_model
from stretto.params import SamplingParams
from stretto.protocol import Request
from stretto.sample.custom import CustomProcessors
from stretto.sample.logprobs import Reporting
from stretto.sample.rejection import Proposals, verify
from stretto.sample.sampler import log_probabilities, sample_all
from stretto.testing import Ask, Lab, Setup, check_distribution, counters, greedy, make_engine, run, target_of
from tests.engine import test_rejection as by_hand
from tests.engine.small import save_tiny
from tests.engine.test_logit_processors import FORCED, PROMPT, REGISTRY, USES
from tests.engine.test_logprobs import MODES

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
NEW = 40


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_tiny(folder, "llama")
    return folder, {kind: load_model(folder, dtype=torch.float32, device=torch.device(kind))
                    for kind in ("cpu", "cuda")}


def engine_of(models, kind: str, drafter: str | None, setup: Setup | None = None):
    folder, loaded = models
    model = loaded[kind]
    engine = make_engine(model, drafter, target_of(model, folder), setup, check_processor=REGISTRY.check)
    table = engine.device.runner.table
    table.custom = CustomProcessors(len(table.log), table.device, REGISTRY, model.vocab_size)
    engine.info.logit_processors, engine.info.custom_logit_processor = sorted(REGISTRY.named), True
    return engine


@pytest.mark.parametrize("drafter", [None, "ngram"])
@pytest.mark.parametrize("kind", USES)
def test_case_5_01_processors(models, kind: str, drafter: str | None) -> None:
    asks = [Ask("forced", PROMPT, greedy(NEW, logit_processors=(USES[kind],))), Ask("free", PROMPT, greedy(NEW))]
    want = run(engine_of(models, "cpu", None), asks)
    engine = engine_of(models, "cuda", drafter)
    got = run(engine, asks)
    assert got["forced"].token_ids[:4] == FORCED
    assert {rid: a.token_ids for rid, a in got.items()} == {rid: a.token_ids for rid, a in want.items()}
    counts = engine.device.counts()
    if kind == "device":  # it is part of the graphs
        assert counts["graph_replays"] > counts["eager_steps"]
    else:
        assert counts["eager_steps"] > 10


@pytest.mark.parametrize("settings", by_hand.FILTERS, ids=str)
def test_verification_gives_the_cpus_ids(settings: dict) -> None:
    """The same noise and the same distributions: only where two numbers are equal up to rounding may ids differ."""
    ints, reals = by_hand.table(1.0, **settings)
    p, q = by_hand.pair(3)
    slots = torch.arange(by_hand.ROWS)
    answers = []
    for device in ("cpu", "cuda"):
        where = by_hand.Positions(slots.to(device), torch.full((by_hand.ROWS,), 4, device=device), ints.to(device),
                                  reals.to(device))
        proposals = Proposals(by_hand.ROWS, 1, by_hand.VOCAB, torch.device(device))
        logits = q[-1].expand(by_hand.ROWS, -1).contiguous().to(device)
        drafts = proposals.draw(logits, where, torch.zeros_like(where.slots), bool(settings))
        log = torch.zeros(by_hand.ROWS, 8, dtype=torch.int32, device=device)
        log[:, 4] = drafts.to(torch.int32)
        step = by_hand.SimpleNamespace(
            out_rows=slots.repeat_interleave(2).to(device), cu_out=2 * torch.arange(by_hand.ROWS + 1, device=device),
            n_out=torch.full((by_hand.ROWS,), 2, device=device))
        both = by_hand.Positions(step.out_rows, torch.tensor([4, 5], device=device).repeat(by_hand.ROWS),
                                 ints.to(device), reals.to(device))
        logits = p[-1].expand(2 * by_hand.ROWS, -1).contiguous().to(device)
        got = verify(logits, sample_all(logits, both), both, step, log, proposals, bool(settings))  # type: ignore[arg-type]
        answers.append((got.cpu(), log_probabilities(logits[:64], both.take(torch.arange(64, device=device)),
                                                     bool(settings)).cpu()))
    (on_cpu, p_cpu), (on_gpu, p_gpu) = answers
    assert float((on_cpu != on_gpu).float().mean()) < 1e-3
    assert torch.allclose(p_cpu.exp(), p_gpu.exp(), atol=1e-5)


def test_rejection_in_whole_engines(models) -> None:
    folder, loaded = models
    lab = Lab(loaded["cuda"], target_of(loaded["cuda"], folder), f"standalone:{folder}")
    usual = lab.setup
    lab.setup = lambda **more: usual(rejection=True, **more)  # type: ignore[method-assign]
    check_distribution(lab)
    got, engine = lab.drafted(lab.asks(temperature=25.0))
    assert counters(engine)["accepted"] == counters(engine)["drafted"] > 50  # the target itself proposes
    assert {rid: a.token_ids for rid, a in lab.drafted(lab.asks())[0].items()} == {
        rid: a.token_ids for rid, a in lab.plain(lab.asks()).items()}
    assert len(got) == len(lab.asks())


@pytest.mark.parametrize("mode", MODES)
def test_logprobs_in_every_mode(models, mode: str) -> None:
    sampling = SamplingParams(seed=2, temperature=20.0, top_k=30, max_tokens=12, logprobs=3)
    scores = []
    for kind in ("cpu", "cuda"):
        engine = engine_of(models, kind, None)
        engine.device.runner.reporting = Reporting.of(mode)
        got: list[float] = []
        outputs = []
        engine.submit(Request(rid="r", tokens=list(PROMPT), sampling=sampling, want_text=False))
        while engine.has_work:
            outputs += engine.step()
        for output in outputs:
            got += [entry.logprob for entry in output.logprobs or []]
        scores.append(got)
    assert len(scores[0]) == 12 and scores[1] == pytest.approx(scores[0], abs=1e-2)
