"""Grammars on a GPU: valid, the same text through pairs of graphs as without graphs, and with drafts as without."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch

from stretto.device.streams import CudaDevice
from stretto.engine.core import EngineCore
from stretto.host.grammar import Grammars
from stretto.model.load import load_model
from stretto.params import Grammar, SamplingParams
from stretto.spec.ngram import NgramDrafter
from stretto.testing import Setup, make_engine, target_of
from stretto.text.grammar import vocabulary
from tests.engine.small import VOCAB, Run, save_tiny
from tests.serve.fakes import EOS, ByteTokenizer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

COUNTS = Grammar("regex", "([a-f]{5}-){6}")
PROMPT = list(b"Write it down: ")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_tiny(folder, "qwen3", sharpness=0.7)
    return load_model(folder, dtype=torch.float32, device=torch.device("cuda")), folder


def engine(model, drafter, graphs: bool) -> EngineCore:
    """`make_engine`, with a vocabulary of bytes."""
    loaded, folder = model
    core = make_engine(loaded, drafter, target_of(loaded, folder), Setup(chunk=8, slots=9), grammars=Grammars(
        partial(vocabulary, ByteTokenizer(), VOCAB, [EOS]), VOCAB), eos=frozenset({EOS}))
    assert isinstance(core.device, CudaDevice)
    if not graphs:
        runner = core.device.runner
        runner.execute, runner.halve = runner.run_now, runner.halve_now
    return core


@pytest.mark.parametrize("drafts", [False, True])
def test_masks_through_graphs_and_without(model, drafts: bool) -> None:
    found = []
    for graphs in (False, True, True):
        core = engine(model, NgramDrafter(4) if drafts else None, graphs)
        run = Run(core)
        for wave in range(3):  # a graph is captured when its shape comes again
            for i in range(6):
                run.submit(f"r{wave}{i}", [*PROMPT, i], SamplingParams(seed=i, max_tokens=80, grammar=COUNTS))
                run.submit(f"p{wave}{i}", [*PROMPT, i], SamplingParams(seed=i, max_tokens=30))
            run.finish()
        ids = {key: run.ids(*key) for key in run.outputs}
        assert all(re.fullmatch(COUNTS.source, bytes(t for t in ids[f"r{w}{i}", 0] if t < 256).decode())
                   for w in range(3) for i in range(6))
        if graphs:
            assert len(core.device.graphs.halves) > 0 and core.device.graphs.replays > 50
        found.append(ids)
    assert found[0] == found[1] == found[2]
