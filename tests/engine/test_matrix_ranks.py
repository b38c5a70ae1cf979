"""Tensor parallelism beside every other feature of the support matrix, on the same requests: two ranks, two processes.

Every feature occurs in one of few cells; the default run takes some that are quick, the `full` marker the others, and
random ones besides. What a run proves is in `matrix_run`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.covering import Cell, each_value
from tests.engine.matrix_ranks import SecondRank, second_rank
from tests.engine.matrix_run import EVIDENCE, MatrixRun, lab_keeper
from tests.engine.test_matrix import OPTIONS, allowed, params, random_cell
from tests.proofs import ProofOf
from tests.spec.suffix_trees import install

QUICK, RANDOM = 3, 60
VALUES = each_value(OPTIONS, allowed=allowed)
SHORT = [cell for cell in VALUES if cell["page"] not in ("page size 64", "page size 256")][:QUICK]  # few steps
LONG = [cell for cell in VALUES if cell not in SHORT]


def over_ranks(cells: list[Cell]) -> list[Cell]:
    return [cell | {"tensor parallelism": "tensor parallelism"} for cell in cells]


@pytest.fixture(scope="module")
def second(tmp_path_factory) -> Iterator[SecondRank]:
    with second_rank(tmp_path_factory.mktemp("ranks")) as rank:
        yield rank


@pytest.fixture(scope="module")
def labs(tmp_path_factory, second: SecondRank):
    return lab_keeper(tmp_path_factory.mktemp, shard=second.shard)


@pytest.mark.parametrize("features", params("short", over_ranks(SHORT)) + params(
    "long", over_ranks(LONG), pytest.mark.full) + params(
    "random", over_ranks([random_cell(seed) for seed in range(1000, 1000 + RANDOM)]), pytest.mark.full))
def test_all_at_once_over_two_ranks(labs, second: SecondRank, monkeypatch, proof: ProofOf,
                                    features: frozenset[str]) -> None:
    install(monkeypatch)
    lab = labs(features)
    second.prepare(lab, features)
    try:
        run = MatrixRun(lab, features, second.lead)
        run.run()
    finally:
        second.finish()
    for feature in sorted(features):
        proof.show(feature, EVIDENCE[feature](run))
    assert not run.counter("faults") and not run.counter("broken_books")
