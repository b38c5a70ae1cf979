"""Host memory for KV on a GPU: copies on a stream of their own, fenced by events; the text is that without it."""

from __future__ import annotations

import mmap
import random

import numpy as np
import pytest
import torch

from stretto.device.host_pages import HostPages
from stretto.device.streams import CudaDevice
from stretto.model.load import load_model
from stretto.testing import Ask, Lab, Setup, check_host_tier, counters, greedy, make_engine, run, target_of
from tests.engine.small import VOCAB, save_tiny
from tests.spec import checkpoints as made

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def test_pages_travel_whole_and_in_order() -> None:
    """Runs of neighbours, single pages, more than the staging memory holds at once; several types side by side."""
    device = torch.device("cuda")
    tensors = [torch.randn(40, 16, 3, 64, device=device, dtype=torch.bfloat16), torch.randn(40, 5, device=device)]
    before = [t.clone() for t in tensors]
    host = HostPages([tensors], [64], device)
    assert host.memory[0].is_pinned() and host.page_bytes == (16 * 3 * 64 * 2 + 24,)
    host._staging = host._staging[: 7 * host.page_bytes[0]]
    pages, host_pages = list(range(1, 39)), random.Random(1).sample(range(1, 65), 30) + list(range(1, 9))
    host_pages = list(dict.fromkeys(host_pages))[: len(pages)]
    pages = pages[: len(host_pages)]
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        host.save(0, pages, host_pages)
    stream.synchronize()
    for tensor in tensors:
        tensor.zero_()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        host.restore(0, host_pages[::-1], pages[::-1])
    stream.synchronize()
    for tensor, whole in zip(tensors, before):
        assert torch.equal(tensor[pages], whole[pages])
    host.close()


def test_memory_that_nobody_closes_is_pinned_no_longer() -> None:
    """The system gives its addresses to whoever maps next: a checkpoint's file was once read from there, wrongly."""
    device = torch.device("cuda")
    host = HostPages([[torch.zeros(3, 4096, device=device)]], [64], device)
    size = host.memory[0].nbytes
    assert host.memory[0].is_pinned()
    del host
    assert not torch.from_numpy(np.frombuffer(mmap.mmap(-1, size), dtype=np.uint8)).is_pinned()


@pytest.mark.parametrize("window", [None, 16], ids=["full", "window"])
def test_text_with_and_without_host_memory(tmp_path, window: int | None) -> None:
    """Long prompts in turns on a pool that holds one of them, short ones that decode beside; overlap and graphs on."""
    save_tiny(tmp_path, "qwen3", window)
    model = load_model(tmp_path, dtype=torch.float32, device=torch.device("cuda"))
    rng = random.Random(3)
    longs = [[rng.randrange(VOCAB) for _ in range(180)] for _ in range(3)]
    answers = []
    for host_tokens in (0, 4096):
        engine = make_engine(model, None, target_of(model, tmp_path), Setup(
            page_size=16, pool_tokens=336, chunk=32, budget=64, overlap=True, host_tokens=host_tokens))
        assert isinstance(engine.device, CudaDevice)
        got = {}
        for wave in range(4):
            asks = [Ask(f"{wave}.{i}", tokens, greedy(12)) for i, tokens in enumerate(longs)]
            shorts = [Ask(f"{wave}.s{i}", [7 + i, 3, 9], greedy(40)) for i in range(2)]
            got |= run(engine, [*shorts, asks[0]], later=asks[1:])
        answers.append({rid: (answer.token_ids, answer.finish_reason) for rid, answer in got.items()})
        seen = counters(engine)
        if host_tokens:
            assert seen["host_saved_tokens"] > 0 and seen["host_restored_tokens"] > 0 and not seen["faults"]
            gauges = engine.host.stats()[1]
            assert gauges["host_save_bytes_per_second"] > 0 and gauges["host_restore_bytes_per_second"] > 0
            assert gauges["prefill_tokens_per_second"] > 0
        engine.close()
    assert answers[0] == answers[1]


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_what_a_drafter_keeps_travels_too(tmp_path, kind: str) -> None:
    path, _ = {"eagle3": made.eagle3, "dflash": made.dflash}[kind](tmp_path / kind)
    tiny = made.make_target(tmp_path / "target")
    model = load_model(tiny.target.path, dtype=torch.float32, device=torch.device("cuda"))
    check_host_tier(Lab(model, target_of(model, tiny.target.path), f"{kind}:{path}"))
