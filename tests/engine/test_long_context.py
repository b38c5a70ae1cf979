"""Sequences that cross the edge of a window, and the border of the context that a rotation was scaled from: every
position's log-probability through the whole engine, pages and chunks included, is that of transformers.

    window 16        | 14  15 16 17 ... 31 32 33 ...     pages of 4: edges inside pages and at their ends
    original 64      |                         ... 62 63 64 65 ...  250
"""

from __future__ import annotations

import pytest
import torch
import transformers

from stretto.model.load import load_model
from stretto.params import SamplingParams
from stretto.spec.scripted import ScriptedDrafter
from stretto.testing import Ask, Setup, counters, make_engine, target_of
from tests.engine.small import CONTEXT, DEVICE, MARGIN, SHAPE, VOCAB, family
from tests.engine.test_deterministic import play

WINDOW, ORIGINAL, LENGTH = 16, 64, 250
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": ORIGINAL}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
LONGROPE = {"rope_type": "longrope", "rope_theta": 500.0, "short_factor": [1.0] * 8,
            "long_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5, 3.0, 4.0], "original_max_position_embeddings": ORIGINAL}


def scaled(config: transformers.PretrainedConfig, rope: dict) -> transformers.PretrainedConfig:
    return type(config).from_dict(config.to_dict() | {"rope_parameters": rope})


SCALED = {"llama-llama3": ("llama", None, LLAMA3), "llama-yarn": ("llama", None, YARN),
          "llama-linear": ("llama", None, LINEAR), "qwen3-yarn-window": ("qwen3", WINDOW, YARN),
          "qwen2-yarn": ("qwen2", None, YARN), "mistral-yarn-window": ("mistral", WINDOW, YARN),
          "olmo2-llama3": ("olmo2", None, LLAMA3), "glm4-linear": ("glm4", None, LINEAR),
          "qwen3-moe-yarn": ("qwen3_moe", None, YARN)}
WINDOWED = {name: (name, WINDOW, None) for name in ("mistral", "qwen2", "gemma2", "gemma3", "phi3", "mixtral",
                                                    "gpt_oss")}  # gpt-oss is scaled by yarn from 64 besides
QUICK = ("llama-llama3", "qwen3-yarn-window", "gpt_oss")


def longrope() -> tuple[type, transformers.PretrainedConfig]:
    ids = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)
    config = transformers.Phi3Config(**SHAPE, **ids, sliding_window=WINDOW, rope_parameters=LONGROPE,
                                     original_max_position_embeddings=ORIGINAL)
    return transformers.Phi3ForCausalLM, config


CASES = [*WINDOWED, *SCALED, "phi3-longrope-window"]


@pytest.fixture(scope="module", params=[pytest.param(name, marks=() if name in QUICK else pytest.mark.full)
                                        for name in CASES])
def pair(request, tmp_path_factory):
    """(our model, its folder, transformers')."""
    name, rope = request.param, None
    if name == "phi3-longrope-window":
        cls, config = longrope()
    else:
        base, window, rope = (WINDOWED | SCALED)[name]
        cls, config = family(base, window)
    folder = tmp_path_factory.mktemp(name)
    torch.manual_seed(5)
    oracle = cls(config if rope is None else scaled(config, rope)).eval()
    with torch.no_grad():
        for p in oracle.parameters():
            p.mul_(4 if p.ndim > 1 else 1)
    oracle.save_pretrained(folder)
    return load_model(folder, dtype=torch.float32, device=DEVICE), folder, oracle


@torch.no_grad()
def scores(oracle, ids: list[int]) -> torch.Tensor:
    """[T, V] float32."""
    return oracle(torch.tensor([ids])).logits[0].float().log_softmax(-1)


def test_every_position_of_a_long_prompt(pair):
    """In chunks of 7, of 64, and in one; every length is then a cut somewhere."""
    model, folder, oracle = pair
    ids = torch.randint(VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(3)).tolist()
    own = scores(oracle, ids)
    want = [float(own[i - 1, token]) for i, token in enumerate(ids)][1:]
    for chunk in (7, ORIGINAL, CONTEXT):
        engine = make_engine(model, None, target_of(model, folder),
                             Setup(page_size=4, chunk=chunk, budget=max(chunk, 16), context=CONTEXT))
        got = play(engine, [Ask("a", ids, SamplingParams(max_tokens=0, prompt_logprobs=0))], [])["a"].prompt
        off = [abs(score - value) for (score, *_), value in zip(got[-len(want):], want, strict=True)]
        assert max(off) < 5e-4, (chunk, off.index(max(off)) + 1, max(off))


@pytest.mark.parametrize("start", [WINDOW - 4, 2 * WINDOW - 3, ORIGINAL - 5])
def test_answers_across_the_edges(pair, start):
    """Decoded one by one and verified five at a time, each id is transformers' best at its place."""
    model, folder, oracle = pair
    if model.config.rope.kind == "longrope" and start + 14 <= ORIGINAL:
        pytest.skip("a served context above the original one has the long factors, transformers here the short ones")
    prompt = torch.randint(VOCAB, (start,), generator=torch.Generator().manual_seed(start)).tolist()
    asks = [Ask("a", prompt, SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True))]
    plain = play(make_engine(model, None, target_of(model, folder), Setup(page_size=4)), asks, [])["a"].ids
    own = scores(oracle, prompt + plain)
    for i, token in enumerate(plain):
        assert float(own[start + i - 1].max() - own[start + i - 1, token]) <= MARGIN, (start, i)
    drafter = ScriptedDrafter([prompt + plain], 4, 0.7, vocab_size=VOCAB)
    engine = make_engine(model, drafter, target_of(model, folder), Setup(page_size=4, overlap=True))
    assert play(engine, asks, [])["a"].ids == plain and counters(engine)["accepted"] > 3
