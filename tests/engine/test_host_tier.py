"""The host tier on the real engine: what left the device comes back and says the same; counters prove that it did."""

from __future__ import annotations

import random

import pytest

from stretto.params import SamplingParams
from stretto.protocol import FlushCache, Request, SessionTurn
from stretto.replay import OneShot
from stretto.spec.ngram import NgramDrafter
from tests.engine.small import VOCAB, Oracle, Run, greedy, make_core

PAGES = (1, 4, 16, 64, 256)
POOL = {1: 130, 4: 136, 16: 144, 64: 192, 256: 512}  # tokens: room for one long prompt


def prompt(seed: int, n: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(n)]


@pytest.fixture(scope="module")
def oracles(tmp_path_factory) -> dict[str, tuple[Oracle, OneShot]]:
    made = {}
    for window, (name, width) in {"off": ("llama", None), "16": ("qwen3", 16)}.items():
        oracle = Oracle.make(tmp_path_factory.mktemp(name), name, width)
        made[window] = oracle, OneShot(make_core(oracle.model, prefix_cache=False, chunk=256, overlap=False))
    return made


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("window", ["off", "16"])
@pytest.mark.parametrize("overlap", [False, True], ids=["inline", "overlap"])
def test_a_prefix_that_left_the_device_comes_back(oracles, page: int, window: str, overlap: bool):
    oracle, answer = oracles[window]
    length = min(250, POOL[page]) // page * page - 10 if page < 256 else 240
    core = make_core(oracle.model, page_size=page, pool_tokens=POOL[page], host_tokens=2048, overlap=overlap, chunk=32,
                     budget=48, poison=True)
    run = Run(core)
    prompts = [prompt(seed, length) for seed in range(3)]
    for turn in range(2):
        for i, tokens in enumerate(prompts):
            run.submit(f"{turn}.{i}", tokens, greedy(5))
            run.finish()
    core.close()
    for turn in range(2):
        for i, tokens in enumerate(prompts):
            assert run.ids(f"{turn}.{i}") == answer(tokens, greedy(5))
    restored = run.counters["host_restored_tokens"]
    assert (restored > 0) == (page < 256), "a prompt shorter than a page leaves nothing to restore"
    if page < 256:
        usage = run.outputs["1.2", 0][-1].usage
        assert usage is not None and usage.cached_tokens >= (length - 1) // page * page // 2
