"""The device half on a GPU: the CPU's text, with and without graphs, and graph replay equal to eager bit for bit."""

from __future__ import annotations

import gc

import pytest
import torch

from stretto.model.load import load_model
from stretto.spec.ngram import NgramDrafter
from stretto.spec.scripted import ScriptedDrafter
from stretto.wire import Int, Real
from tests.covering import Cell, cell_id, full_product, pairwise
from tests.device.driver import Driver, Job, text
from tests.engine.small import VOCAB, save_tiny

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

PROMPTS = [[3, 7, 11], list(range(20, 61)), [250, 9] * 9, [17], list(range(100, 230))]
NEW = 24
SAMPLED = {Real.TEMPERATURE: 20.0, Real.TOP_P: 0.9}


@pytest.fixture(scope="module", params=[None, 16], ids=["full", "window16"])
def models(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_tiny(folder, "qwen3", request.param)
    return {kind: load_model(folder, dtype=torch.float32, device=torch.device(kind)) for kind in ("cpu", "cuda")}


def cuda_driver(model, drafter=None, *, graphs: bool, page: int = 16) -> Driver:
    from stretto.attn.triton_ragged import TritonRagged
    from stretto.device.graphs import GraphExecutor

    driver = Driver(model, page_size=page, drafter=drafter, backend=TritonRagged(model.device, model.dtype))
    if graphs:
        driver.runner.execute = GraphExecutor(driver.runner, 4096)
    torch.cuda.synchronize()  # steps run on streams that do not wait for the one which filled the tables
    return driver


def jobs(sampled: bool) -> list[Job]:
    return [Job(p, NEW, ints={Int.SEED_LOW: i}, reals=SAMPLED if sampled else {}) for i, p in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def wanted(models):
    return {sampled: [text(rows) for rows in Driver(models["cpu"]).run(jobs(sampled))] for sampled in (False, True)}


OPTIONS = {"graphs": (False, True), "page": (1, 16, 256), "drafts": ("none", "ngram", "right", "half"),
           "sampled": (False, True)}


def check_text(models, wanted, cell: Cell) -> None:
    model, want = models["cuda"], wanted[cell["sampled"]]
    graphs, page, drafts, sampled = (cell[name] for name in OPTIONS)
    whole = [p + w for p, w in zip(PROMPTS, want, strict=True)]
    drafter = {"none": None, "ngram": NgramDrafter(4)}[drafts] if drafts in ("none", "ngram") else ScriptedDrafter(
        whole, 4, 1.0 if drafts == "right" else 0.5, vocab_size=VOCAB, variable=drafts == "half", device=model.device)
    driver = cuda_driver(model, drafter, graphs=graphs, page=page)
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(2):  # graphs are captured when a shape comes again
            assert [text(rows) for rows in driver.run(jobs(sampled), chunk=24)] == want
    assert driver.mixed > 0 and (drafts in ("none", "ngram") or driver.accepted > 0)
    if graphs:
        assert driver.runner.execute.replays > 10


@pytest.mark.parametrize("cell", pairwise(OPTIONS), ids=cell_id)
def test_text_is_the_cpus(models, wanted, cell: Cell) -> None:
    check_text(models, wanted, cell)


@pytest.mark.full
@pytest.mark.parametrize("cell", full_product(OPTIONS), ids=cell_id)
def test_text_is_the_cpus_whole_product(models, wanted, cell: Cell) -> None:
    check_text(models, wanted, cell)


def test_replay_equals_eager_bit_for_bit(models) -> None:
    """Scores are the bits of log-probabilities, so equal results mean equal logits. Both run in the same buckets, as
    the attention kernel cuts long rows by the bucket's size."""
    model = models["cuda"]
    results = []
    for graphs in (False, True):
        driver = cuda_driver(model, NgramDrafter(4), graphs=True)
        driver.runner.execute.capture_everything = graphs
        driver.runner.execute.largest_tokens = 4096 if graphs else 0
        with torch.cuda.stream(torch.cuda.Stream()):
            driver.run(jobs(False), chunk=24)
            results.append(driver.run([Job(p, NEW, ints={Int.LOGPROBS: 3}) for p in PROMPTS], chunk=24))
        assert (driver.runner.execute.replays > 10) == graphs
    assert results[0] == results[1]


def test_graphs_that_die_during_a_capture_do_not_end_it(models) -> None:
    """An engine that is in a cycle, and a collector that runs at every allocation."""
    old = cuda_driver(models["cuda"], graphs=True)
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(2):
            old.run(jobs(False), chunk=24)
        assert len(old.runner.execute.graphs) > 0
        old.itself = old
        del old
        new, threshold = cuda_driver(models["cuda"], graphs=True), gc.get_threshold()
        new.run(jobs(False), chunk=24)
        gc.set_threshold(1, 1, 1)
        try:
            new.run(jobs(False), chunk=24)
        finally:
            gc.set_threshold(*threshold)
    assert new.runner.execute.replays > 10


def test_steps_do_not_synchronise(models) -> None:
    """No copy to the host, no allocation that waits: torch raises at any synchronising call."""
    driver = cuda_driver(models["cuda"], NgramDrafter(4), graphs=True)
    with torch.cuda.stream(torch.cuda.Stream()):
        driver.run(jobs(True), chunk=24)
        step = driver.runner.step

        def watched(packed):
            pinned = torch.from_numpy(packed).pin_memory().numpy()
            torch.cuda.set_sync_debug_mode("error")
            try:
                return step(pinned)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        driver.runner.step = watched
        driver.run(jobs(True), chunk=24)
