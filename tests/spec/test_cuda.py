"""Drafters on CUDA, where a whole step is captured as a graph: text, and for the target's own copy, acceptance."""

from __future__ import annotations

import pytest
import torch

from stretto.model.load import load_model
from stretto.testing import NEW, SAMPLED, Lab, target_of
from tests.spec import checkpoints as made

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture(scope="module")
def lab_of(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cuda")
    made.make_target(folder / "target")
    model = load_model(folder / "target", dtype=torch.float32, device=torch.device("cuda"))

    def make(kind: str) -> Lab:
        path = folder / "target" if kind == "standalone" else getattr(made, kind)(folder / kind)[0]
        return Lab(model, target_of(model, folder / "target"), f"{kind}:{path}")
    return make


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9}, SAMPLED], ids=["greedy", "sampled", "everything"])
@pytest.mark.parametrize("kind", ["standalone", "eagle", "eagle3", "dflash", "dspark"])
def test_text(lab_of, kind: str, sampling, overlap: bool) -> None:
    lab = lab_of(kind)
    asks = lab.asks(**sampling)
    want = lab.plain(asks)
    got, engine = lab.drafted(asks, page_size=4, chunk=8, overlap=overlap)
    again, _ = lab.drafted(asks, page_size=16, chunk=64, overlap=overlap)
    for answers in (got, again):
        assert {r: a.token_ids for r, a in answers.items()} == {r: a.token_ids for r, a in want.items()}
        assert sum(a.drafted for a in answers.values()) > NEW
        if kind == "standalone":
            assert all(a.accepted == a.drafted for a in answers.values())
    assert engine.device.graphs.replays > 0 or sampling == SAMPLED, "no step was replayed from a graph"
