"""--deterministic on a GPU: bit for bit the same alone, beside others, in chunks, under drafts, in graphs."""

from __future__ import annotations

import pytest
import torch

from stretto.attn.select import choose_backend
from stretto.attn.torch_ragged import TorchRagged
from stretto.device.graphs import GraphExecutor
from stretto.model.load import load_model
from stretto.spec.scripted import ScriptedDrafter
from stretto.wire import Int, Real, RowResult
from tests.device.driver import Driver, Job
from tests.engine.small import VOCAB, save_tiny

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

PROMPTS = [[3, 7, 11], list(range(20, 61)), [250, 9] * 9, [17], list(range(100, 230)), [5] * 70]
NEW = 20
KINDS = [{}, {Real.TEMPERATURE: 1.0}, {Real.TEMPERATURE: 0.8, Real.TOP_P: 0.9}]


def jobs() -> list[Job]:
    return [Job(p, NEW, ints={Int.SEED_LOW: i, Int.LOGPROBS: 2}, reals=KINDS[i % 3]) for i, p in enumerate(PROMPTS)]


def driver_of(model, drafter=None, graphs: bool = False) -> Driver:
    backend = choose_backend(model.layers, 16, model.device, model.dtype, fixed=True)
    driver = Driver(model, drafter=drafter, backend=backend)
    if graphs:
        executor = GraphExecutor(driver.runner, 4096)
        executor.capture_everything = True
        driver.runner.execute = executor
    return driver


def seen(rows: list[RowResult]) -> list:
    return [(token, score.logprob, score.top_ids, score.top_logprobs) for row in rows
            for token, score in zip(row.new, row.new_scores, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gemma3", "mixtral"])
def test_bit_for_bit(family: str, dtype: torch.dtype, tmp_path) -> None:
    save_tiny(tmp_path, family, 16 if family == "gemma3" else None, sharpness=1)
    model = load_model(tmp_path, dtype=dtype, device=torch.device("cuda"), fixed=True)
    with torch.cuda.stream(torch.cuda.Stream()):
        alone = [seen(driver_of(model).run([job])[0]) for job in jobs()]
        whole = [p + [token for token, *_ in a] for p, a in zip(PROMPTS, alone, strict=True)]
        for chunk, accuracy, graphs in ((1 << 30, None, False), (7, None, False), (33, 0.6, False), (16, 1.0, True)):
            drafter = None if accuracy is None else ScriptedDrafter(whole, 4, accuracy, vocab_size=VOCAB,
                                                                    variable=True, device=model.device)
            driver = driver_of(model, drafter, graphs)
            for _ in range(2 if graphs else 1):  # a bucket is captured when it comes again
                got = [seen(rows) for rows in driver.run(jobs(), chunk=chunk)]
                assert got == alone, (chunk, accuracy, graphs)


def test_it_is_no_other_model(tmp_path) -> None:
    """The same numbers as the CPU's, up to rounding."""
    save_tiny(tmp_path, "llama", sharpness=1)
    on_gpu = load_model(tmp_path, dtype=torch.float32, device=torch.device("cuda"), fixed=True)
    on_cpu = load_model(tmp_path, dtype=torch.float32, device=torch.device("cpu"))
    want = Driver(on_cpu, backend=TorchRagged()).run([jobs()[0]])[0]
    got = driver_of(on_gpu).run([jobs()[0]])[0]
    assert [row.new for row in got] == [row.new for row in want]
    assert all(abs(a.new_scores[0].logprob - b.new_scores[0].logprob) < 1e-3 for a, b in zip(got, want, strict=True))
