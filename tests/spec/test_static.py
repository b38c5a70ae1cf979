"""The code that runs on CUDA, on a CPU: bounds instead of exact sizes, padded rows, nothing read from the device. What
is offered is the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from stretto.testing import Lab, make_engine, run, same_offers, same_text
from tests.spec import checkpoints as made


@pytest.fixture(scope="module")
def lab_of(tmp_path_factory):
    folder = tmp_path_factory.mktemp("static")
    tiny = made.make_target(folder / "target")

    def make(kind: str) -> Lab:
        path = folder / "target" if kind == "standalone" else getattr(made, kind)(folder / kind)[0]
        return Lab(tiny.model, tiny.target, f"{kind}:{path}")
    return make


def bounded(engine, padding: int):
    """The engine's steps get sizes from the plan alone, as on CUDA; `padding` rows of slot 0 join every step."""
    runner = engine.device.runner
    drafter, seams = runner.drafter, runner.drafting.seams
    runner.exact = drafter.exact = False
    if seams is not None:
        seams.exact = False
    run_now = runner.run

    def execute(rows, shape):
        wide = replace(shape, rows=len(rows) + padding, tokens=shape.tokens + 3, logits=shape.logits + 2)
        return run_now(torch.cat([rows, torch.zeros(padding, 3, dtype=rows.dtype)]), wide), wide
    runner.execute = execute
    return engine


@pytest.mark.parametrize("kind", ["standalone", "eagle", "eagle3", "dflash", "dspark"])
def test_bounds_instead_of_sizes(lab_of, kind: str) -> None:
    lab = lab_of(kind)
    asks = lab.asks()
    want, (exact, _) = lab.plain(asks), lab.drafted(asks, page_size=4, chunk=8)
    engine = bounded(make_engine(lab.model, lab.drafter, lab.target, lab.setup(page_size=4, chunk=8)), padding=2)
    got = run(engine, asks)
    same_text(got, want, "bounded")
    assert same_offers(lab, got, exact, "bounded") > 15


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_a_step_reads_nothing_on_the_host(lab_of, kind: str, monkeypatch) -> None:
    """Every way by which a tensor's value reaches Python is closed while the drafter runs, but for the torch attention
    backend, which stands in for kernels that read lengths on the device."""
    lab = lab_of(kind)
    engine = bounded(make_engine(lab.model, lab.drafter, lab.target, lab.setup(page_size=4, chunk=8)), padding=1)
    drafter = engine.device.runner.drafter
    backend = engine.device.runner.backend
    closed = [False]

    def guarded(name):
        real = getattr(torch.Tensor, name)

        def method(self, *args, **more):
            assert not closed[0], f"{name} in a drafter's step"
            return real(self, *args, **more)
        return method

    for name in ("tolist", "item", "nonzero", "__bool__", "__int__", "__index__", "__float__"):
        monkeypatch.setattr(torch.Tensor, name, guarded(name))
    metadata, attend = type(backend).metadata, type(backend).attend

    def opened(real):
        def method(*args, **more):
            was, closed[0] = closed[0], False
            try:
                return real(*args, **more)
            finally:
                closed[0] = was
        return method

    monkeypatch.setattr(type(backend), "metadata", opened(metadata))
    monkeypatch.setattr(type(backend), "attend", opened(attend))
    for name in ("ingest", "propose"):
        real = getattr(drafter, name)

        def watched(*args, real=real):
            closed[0] = True
            try:
                return real(*args)
            finally:
                closed[0] = False
        monkeypatch.setattr(drafter, name, watched)
    asks = lab.asks()
    same_text(run(engine, asks), lab.plain(asks), "guarded")


@pytest.mark.parametrize("fold", [1, 2, 4])
def test_a_block_as_several_queries(lab_of, fold: int) -> None:
    """Kernels hold only so many query heads of one KV head in a tile: then a block is split, and says the same."""
    lab = lab_of("dflash")
    asks = lab.asks()
    first, _ = lab.drafted(asks, page_size=4)
    engine = make_engine(lab.model, lab.drafter, lab.target, lab.setup(page_size=4))
    assert engine.device.runner.drafter.backbone.fold == 8
    engine.device.runner.drafter.backbone.fold = fold
    assert same_offers(lab, run(engine, asks), first, f"fold {fold}") > 15
