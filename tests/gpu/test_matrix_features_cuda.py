"""The support matrix on a GPU: every feature beside the Triton backend, as `tests/engine/test_matrix.py` on the CPU."""

from __future__ import annotations

import pytest
import torch

from tests.covering import pairwise
from tests.engine.matrix_run import EVIDENCE, MatrixRun, lab_keeper
from tests.engine.test_matrix import OPTIONS, allowed, params
from tests.proofs import ProofOf
from tests.spec.suffix_trees import install

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture(scope="module")
def labs(tmp_path_factory):
    return lab_keeper(tmp_path_factory.mktemp, "cuda")


@pytest.mark.parametrize("features", params("pairs", pairwise(OPTIONS | {"attention": ("attention triton",)},
                                                              allowed=allowed)))
def test_all_at_once(labs, monkeypatch, proof: ProofOf, features: frozenset[str]) -> None:
    install(monkeypatch)
    run = MatrixRun(labs(features), features)
    run.run()
    for feature in sorted(features):
        proof.show(feature, EVIDENCE[feature](run))
