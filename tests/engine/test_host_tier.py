"""The host tier on the real engine: what left the device comes back and says the same; counters prove that it did."""

from __future__ import annotations

import random
import time
from collections import deque

import numpy as np
import pytest

from stretto.device.kv import Pages
from stretto.device.streams import CpuMoves, InlineDevice
from stretto.engine.llm import LLM
from stretto.protocol import Output
from stretto.replay import Crowd, OneShot
from stretto.wire import HEADER, split_plan
from tests.engine.small import VOCAB, Oracle, Run, greedy, make_core, save_tiny
from tests.engine.test_sessions_machine import QUICK, Clock, Setting, counted, run_machine
from tests.engine.test_sessions_machine import crowd as crowd_of
from tests.text.vocabularies import byte_level

PAGES = (1, 4, 16, 64, 256)
POOL = {1: 130, 4: 136, 16: 144, 64: 192, 256: 512}  # tokens: room for one long prompt


def prompt(seed: int, n: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(n)]


def scores(outputs: list[Output]) -> list[float]:
    return [score.logprob for output in outputs for score in output.logprobs or [] if score.logprob is not None]


@pytest.fixture(scope="module")
def oracles(tmp_path_factory) -> dict[str, tuple[Oracle, OneShot]]:
    made = {}
    for window, (name, width) in {"off": ("llama", None), "16": ("qwen3", 16)}.items():
        oracle = Oracle.make(tmp_path_factory.mktemp(name), name, width)
        made[window] = oracle, OneShot(make_core(oracle.model, prefix_cache=False, chunk=256, overlap=False))
    return made


@pytest.mark.parametrize(("page", "overlap", "window"), [
    *((page, page == 16, window) for page in PAGES for window in ("off", "16"))])
def test_a_prefix_that_left_the_device_comes_back(oracles, page: int, window: str, overlap: bool):
    oracle, answer = oracles[window]
    length = min(250, POOL[page]) // page * page - 10 if page < 256 else 240
    core = make_core(oracle.model, page_size=page, pool_tokens=POOL[page], host_tokens=2048, overlap=overlap, chunk=32,
                     budget=48, poison=True)
    run = Run(core)
    prompts = [prompt(seed, length) for seed in range(3)]
    for turn in range(2):
        for i, tokens in enumerate(prompts):
            run.submit(f"{turn}.{i}", tokens, greedy(5, logprobs=0))
            run.finish()
    core.close()
    for turn in range(2):
        for i, tokens in enumerate(prompts):
            assert run.ids(f"{turn}.{i}") == answer(tokens, greedy(5))[0]
            assert scores(run.outputs[f"{turn}.{i}", 0]) == pytest.approx(
                scores(answer.outputs(tokens, greedy(5, logprobs=0))), abs=1e-3)
    restored = run.counters["host_restored_tokens"]
    assert (restored > 0) == (page < 256), "a prompt shorter than a page leaves nothing to restore"
    if page < 256:
        usage = run.outputs["1.2", 0][-1].usage
        assert usage is not None and usage.cached_tokens >= (length - 1) // page * page // 2


class LateMoves(CpuMoves):
    """Moves what a step waits for when it begins, and everything else as late as a slow bus might."""

    def __init__(self, pages: Pages, seed: int):
        super().__init__(pages)
        self.rng, self.waiting = random.Random(seed), deque()

    def before(self, packed: np.ndarray) -> None:
        self.waiting.append(packed)
        fence = split_plan(packed[:HEADER], packed).fence
        while self.waiting and (self._seq(0) <= fence or self.rng.random() < 0.2):
            super().before(self.waiting.popleft())
        self._began = time.perf_counter()

    def _seq(self, index: int) -> int:
        return int(self.waiting[index][0])


@pytest.mark.parametrize(("window", "page"), [("off", 1), ("16", 4), ("off", 16)])
def test_steps_that_do_not_wait_for_copies(oracles, window: str, page: int):
    """Copies are late; requests and sessions come, go, give way, are aborted."""
    setting = Setting(*oracles[window], "scripted", page, host=1024)
    world = setting.world(Clock(), overlap=False)
    device = world.core.device
    assert isinstance(device, InlineDevice)
    device.moves = LateMoves(device.runner.pages, page)
    crowd = Crowd(world, page, VOCAB)
    wanted = ("host_restored_tokens", "retractions", "aborts", "reclaimed", "answers")
    for n in range(600):
        crowd.act()
        world.core.host.audit()
        if n >= 80 and all(counted(world)[event] for event in wanted):
            break
    world.finish()
    seen = counted(world)
    world.core.close()
    assert all(seen[event] for event in wanted) and not seen["faults"]


@pytest.mark.parametrize(("drafter", "window", "page", "prefix_cache"), [
    ("none", "off", 16, True), ("scripted", "off", 1, False),
    pytest.param("ngram", "16", 1, True, marks=pytest.mark.full),
    pytest.param("scripted", "16", 16, False, marks=pytest.mark.full)])
def test_sessions_in_any_order(oracles, drafter: str, window: str, page: int, prefix_cache: bool):
    """Turns, branches, rewinds, aborts, evictions, flushes, expiry: every answer is that of a one-shot computation."""
    setting = Setting(*oracles[window], drafter, page, host=600, limits={"prefix_cache": prefix_cache})
    seen = run_machine(setting, QUICK) + crowd_of(setting, seed=page, least=60)
    assert seen["answers"] and seen["host_saved_tokens"] and seen["host_restored_tokens"]
    assert seen["faults"] == seen["broken_books"] == 0


def test_as_it_is_configured(tmp_path):
    """From the setting to the copies, with a drafter that has KV of its own; what was measured decides."""
    save_tiny(tmp_path, "llama")
    byte_level(VOCAB).save(str(tmp_path / "tokenizer.json"))
    options = dict(max_model_len=200, kv_tokens=224, max_num_seqs=4, dtype="float32", max_num_batched_tokens=32,
                   chunk_size=32, speculation=f"standalone:{tmp_path}", speculation_tokens=3)
    texts = []
    for more in ({}, {"kv_host_bytes": 8 << 20}):
        with LLM(str(tmp_path), **options, **more) as llm:
            texts.append([llm.generate(prompt(seed % 3, 150), greedy(8))[0].token_ids for seed in range(9)])
            stats = llm.core.stats()
            told = next(d for d in llm.core.info.server_info["features"] if d["feature"] == "kv_host_bytes")
    assert texts[0] == texts[1]
    assert told["now"] == "8.0 MiB" and "copied back" in told["why"]
    counters, gauges = stats.counters, stats.gauges
    assert counters["host_saved_tokens"] > 0 and gauges["host_bytes_used"] > 0
    assert counters["host_restored_tokens"] + counters["host_declined_tokens"] > 0
    assert min(gauges["host_save_bytes_per_second"], gauges["prefill_tokens_per_second"]) > 0
