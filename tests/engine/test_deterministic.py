"""--deterministic: ids and log-probabilities of a request are the same bit for bit, whatever runs beside it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.attn.torch_ragged import TorchRagged
from stretto.compat import ConfigError
from stretto.config import Config, ModelSection, SpeculationSection
from stretto.engine.core import EngineCore
from stretto.engine.prepare import prepare
from stretto.model.families.granite_hybrid import Mamba2
from stretto.model.load import load_model
from stretto.model.shard import Shard
from stretto.params import SamplingParams
from stretto.protocol import Request
from stretto.spec.scripted import ScriptedDrafter
from stretto.testing import Ask, Setup, counters, make_engine, target_of
from tests.engine.small import VOCAB, save_tiny
from tests.spec import checkpoints as made

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class Got:
    """All that a client sees of one answer."""

    ids: list = field(default_factory=list)
    scores: list = field(default_factory=list)
    prompt: list = field(default_factory=list)


def play(engine: EngineCore, asks: list[Ask], later: list[Ask]) -> dict[str, Got]:
    got = {ask.rid: Got() for ask in [*asks, *later]}

    def submit(some: list[Ask]) -> None:
        for ask in some:
            engine.submit(Request(rid=ask.rid, tokens=list(ask.tokens), sampling=ask.sampling, want_text=False))
    submit(asks)
    for step in range(10_000):
        if step == 4:
            submit(later)
        if not engine.has_work and step > 4:
            engine.close()
            return got
        for output in engine.step():
            mine = got[output.rid]
            mine.ids += output.token_ids
            mine.scores += [(s.logprob, s.top_ids, s.top_logprobs) for s in output.logprobs or []]
            mine.prompt += [(s.logprob, s.top_ids, s.top_logprobs) for s in output.prompt_logprobs or []]
    raise AssertionError("not idle")


class Subject:
    """A tiny model, requests, and what each gets alone."""

    def __init__(self, folder, family: str, window: int | None, dtype: str, fixed: bool = True,
                 kv_dtype: str | None = None):
        self.kv_dtype = kv_dtype
        save_tiny(folder, family, window, sharpness=1)
        self.model = load_model(folder, dtype=DTYPES[dtype], device=torch.device("cpu"), fixed=fixed)
        self.target, rng = target_of(self.model, folder), random.Random(1)
        kinds = [dict(temperature=0.0), dict(temperature=0.8, top_p=0.9), dict(temperature=1.1, frequency_penalty=0.5),
                 dict(top_k=7, min_p=0.02), dict(temperature=1.0)]
        self.asks = [Ask(str(i), [rng.randrange(VOCAB) for _ in range(rng.randint(1, 60))],
                         SamplingParams(seed=i, max_tokens=36, logprobs=3, prompt_logprobs=2, **kinds[i % 5]))
                     for i in range(7)]
        self.alone: dict[str, Got] = {}
        for ask in self.asks:
            self.alone |= play(self.engine(Setup(prefix_cache=False)), [ask], [])

    def engine(self, setup: Setup, accuracy: float | None = None) -> EngineCore:
        drafter = None
        if accuracy is not None:
            told = [[*ask.tokens, *self.alone[ask.rid].ids] for ask in self.asks]
            drafter = ScriptedDrafter(told, 4, accuracy, vocab_size=VOCAB, variable=True)
        return make_engine(self.model, drafter, self.target, replace(setup, kv_dtype=self.kv_dtype))

    def differing(self, setup: Setup, accuracy: float | None, late: int = 3) -> tuple[list[str], dict[str, float]]:
        """Requests that got something else than alone, and the counters."""
        engine = self.engine(setup, accuracy)
        got = play(engine, self.asks[late:], self.asks[:late])
        return [rid for rid, want in self.alone.items() if got[rid] != want], counters(engine)


@pytest.fixture(scope="module")
def subjects(tmp_path_factory):
    kept: dict[tuple, Subject] = {}

    def get(family: str, window: int | None, dtype: str, fixed: bool = True, kv_dtype: str | None = None) -> Subject:
        key = family, window, dtype, fixed, kv_dtype
        if key not in kept:
            kept[key] = Subject(tmp_path_factory.mktemp(family), *key)
        return kept[key]
    return get


CROWDED = Setup(page_size=4, pool_tokens=160, chunk=13, budget=40, overlap=True)
FAMILIES = [("llama", None, "float32"), ("gemma3", 16, "bfloat16"), ("gpt_oss", 16, "float32"),
            ("mixtral", None, "bfloat16"), ("qwen3", 16, "float32"), ("gemma2", 16, "float32"),
            ("phi3", None, "bfloat16"), ("glm4", None, "float32"), ("olmo2", None, "bfloat16"),
            ("qwen3_next", None, "float32"), ("llama4", None, "float32"), ("granite_hybrid", None, "float32")]


@pytest.mark.parametrize("family", [pytest.param(f, id=f"{f[0]}-{f[1]}-{f[2]}", marks=() if i < 3 else pytest.mark.full)
                                    for i, f in enumerate(FAMILIES)])
def test_everything_that_may_run_beside_a_request(subjects, family) -> None:
    subject = subjects(*family)
    for setup, accuracy in ((CROWDED, 0.6), (Setup(page_size=1, chunk=1, cap_policy="one_in_mixed"), None),
                            (Setup(page_size=64, chunk=64, budget=80), 1.0)):
        differing, seen = subject.differing(setup, accuracy)
        assert not differing
        assert seen["mixed_steps"] > 0 and (accuracy is None or seen["accepted"] > 10)
        assert setup is not CROWDED or seen["retractions"] > 0


@pytest.mark.parametrize("family", [("gpt_oss", 16, "float32"), *(
    pytest.param(family, marks=pytest.mark.full) for family in (("llama", None, "float32"), ("gemma3", 16, "bfloat16"))
)], ids=lambda family: family[0])
def test_cells_of_8_bits_do_not_know_their_batch(subjects, family) -> None:
    """A token is rounded by itself when it is written: what a chunk, a verify window or a decoded token leaves is the
    same."""
    subject = subjects(*family, kv_dtype="fp8_e4m3")
    differing, seen = subject.differing(CROWDED, 0.6)
    assert not differing and seen["retractions"] > 0 and seen["accepted"] > 10
    assert subject.alone != subjects(*family).alone, "8 bits change log-probabilities"


def test_the_test_above_would_see_it(subjects, monkeypatch) -> None:
    """One part that rounds by the batch is enough: attention in sizes of its own."""
    subject = subjects("llama", None, "float32")
    monkeypatch.setattr("stretto.testing._backend", lambda model, setup: TorchRagged())
    assert subject.differing(CROWDED, 0.6)[0]


@pytest.mark.parametrize("kind", [pytest.param("eagle3"), pytest.param("dflash", marks=pytest.mark.full),
                                  pytest.param("standalone", marks=pytest.mark.full)])
def test_drafters_with_weights(kind: str, tmp_path) -> None:
    """What they compute may round as it likes: it decides how many steps an answer takes, and nothing else."""
    made.make_target(tmp_path / "target")
    model = load_model(tmp_path / "target", dtype=torch.float32, device=torch.device("cpu"), fixed=True)
    path = tmp_path / "target" if kind == "standalone" else getattr(made, kind)(tmp_path / kind)[0]
    target, rng = target_of(model, tmp_path / "target"), random.Random(2)
    asks = [Ask(str(i), [rng.randrange(model.vocab_size) for _ in range(5 + 9 * i)],
                SamplingParams(seed=i, temperature=25.0, max_tokens=24, logprobs=2)) for i in range(5)]
    alone: dict[str, Got] = {}
    for ask in asks:
        alone |= play(make_engine(model, None, target, Setup(prefix_cache=False)), [ask], [])
    engine = make_engine(model, f"{kind}:{path}", target, Setup(page_size=4, chunk=7, budget=40, overlap=True))
    assert play(engine, asks[2:], asks[:2]) == alone
    assert counters(engine)["drafted"] > 50


@settings(max_examples=6, deadline=None)
@given(st.data())
def test_random_schedules(subjects, data) -> None:
    subject = subjects("llama", None, "float32")
    setup = Setup(page_size=data.draw(st.sampled_from((1, 4, 16, 64))), chunk=data.draw(st.integers(1, 70)),
                  budget=data.draw(st.integers(72, 120)), overlap=data.draw(st.booleans()),
                  prefix_cache=data.draw(st.booleans()), mixed=data.draw(st.booleans()),
                  pool_tokens=data.draw(st.sampled_from((192, 4096))))
    accuracy = data.draw(st.sampled_from((None, 0.0, 0.5, 1.0)))
    differing, _ = subject.differing(setup, accuracy, data.draw(st.integers(0, 6)))
    assert not differing


@pytest.mark.full
@pytest.mark.parametrize("threads", [2, 3])
def test_with_several_threads(subjects, threads: int) -> None:
    """Of one number of threads: another number may round otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for family in (("qwen3", 16, "float32"), ("llama", None, "bfloat16")):
            assert not subjects(*family).differing(CROWDED, 0.6)[0]
    finally:
        torch.set_num_threads(before)


def test_the_norm_of_all_ranks_does_not_know_its_batch(tmp_path) -> None:
    """Granite 4 whose heads share one group: features enough that threads would share a row that is alone."""
    save_tiny(tmp_path, "granite_hybrid", mamba_n_groups=1)
    model = load_model(tmp_path, dtype=torch.float32, device=torch.device("cpu"), fixed=True, shard=Shard(0, 2))
    mixer = next(module for layer in model.decoder if isinstance(module := layer.attn, Mamba2))
    assert mixer._norm_over_ranks
    mixer.norm = torch.ones(40_000)
    rows = torch.randn(7, 40_000, generator=torch.Generator().manual_seed(1))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert torch.equal(mixer._normed(rows), torch.cat([mixer._normed(row) for row in rows.split(1)]))
    finally:
        torch.set_num_threads(before)


def config(path, **speculation) -> Config:
    return Config(model=ModelSection(str(path), deterministic=True), speculation=SpeculationSection(**speculation))


def test_what_cannot_be_deterministic_is_refused(subjects, tmp_path) -> None:
    save_tiny(tmp_path, "stablelm")
    with pytest.raises(ConfigError, match=r"--deterministic does not work with model .*transformers"):
        prepare(config(tmp_path))
    path = subjects("llama", None, "float32").target.path
    with pytest.raises(ConfigError, match="--deterministic does not work with --acceptance-method rejection"):
        prepare(config(path, speculation=f"standalone:{path}", acceptance_method="rejection"))
    assert prepare(config(path)).resolved.config.model.deterministic
