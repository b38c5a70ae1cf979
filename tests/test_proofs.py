"""What a test declares to prove of the support matrix has to happen in it; the record stands for that."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from stretto.matrix import FEATURES, Feature, Matrix, Proof, Refusal, dump, fewest, load, pairs
from tests.proofs import ProofOf, Unproved

ROOT = Path(__file__).resolve().parents[1]
TESTS = '''
import pytest

@pytest.mark.proves("overlap", "window")
def test_shows_all(proof):
    proof.show("overlap", 3)
    proof.show("window", 1)

@pytest.mark.proves("overlap", "window")
def test_shows_one(proof):
    proof.show("overlap", 3)

@pytest.mark.proves("overlap")
def test_shows_nothing():
    pass

@pytest.mark.proves("overlap")
def test_shows_a_count_of_0(proof):
    proof.show("overlap", 0)

def test_shows_what_it_does_not_declare(proof):
    proof.show("overlap", 1)
'''


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_some.py").write_text(TESTS)
    return subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "tests.proofs", "-p", "no:cacheprovider",
                           "--rootdir", str(folder), *options, str(folder)], cwd=ROOT, capture_output=True, text=True)


def test_a_declared_feature_that_does_not_happen_fails(tmp_path: Path) -> None:
    told = run(tmp_path).stdout
    assert "1 passed" in told and "4 failed" in told
    assert "declared, and never shown: window" in told and "declared, and never shown: overlap" in told
    assert "'overlap' did not happen: 0" in told and "is shown, and not declared" in told


def test_what_is_no_feature_cannot_be_declared(tmp_path: Path) -> None:
    (tmp_path / "test_other.py").write_text('import pytest\n@pytest.mark.proves("nonsense")\ndef test_it(): pass\n')
    told = run(tmp_path)
    assert "stretto/matrix.py does not name" in told.stdout + told.stderr and told.returncode != 0


def test_collection_writes_what_is_declared(tmp_path: Path) -> None:
    out = tmp_path / "proofs.json"
    run(tmp_path, "--collect-only", "--proofs", str(out))
    found = {one["test"].rpartition("::")[2]: (one["features"], one["rank"]) for one in json.loads(out.read_text())}
    assert found["test_shows_all"] == (["overlap", "window"], 0) and "test_shows_what_it_does_not_declare" not in found


def test_evidence() -> None:
    proof = ProofOf(frozenset({"overlap", "window"}))
    proof.show("overlap", 1)
    assert proof.owed == ["window"]
    for evidence in (0, False, None, []):
        with pytest.raises(Unproved):
            proof.show("window", evidence)


# ----------------------------------------------------------------------------------------------------------- the matrix
def test_cells() -> None:
    features = (Feature("a", ""), Feature("b", ""), Feature("c1", "", "c"), Feature("c2", "", "c"))
    matrix = Matrix((Proof("t::1", ("a", "c1")),), features, (Refusal("a", "b", "they exclude each other"),))
    assert matrix.cell("c1", "a").says == matrix.cell("a", "c1").says == "t::1"
    assert matrix.cell("b", "a").state == "refused" and matrix.cell("c1", "c2").state == "one at a time"
    assert ("b", "b") in matrix.untested() and ("a", "a") not in matrix.untested()
    with pytest.raises(KeyError):
        matrix.cell("a", "nothing")


def test_the_fewest_proofs_show_every_pair_and_prefer_early_ranks() -> None:
    first = [Proof("1", ("a", "b")), Proof("2", ("a", "b", "c")), Proof("3", ("c",))]
    later = [Proof("4", ("a", "b", "c", "d"))]
    assert [proof.test for proof in fewest(first)] == ["2"]
    assert [proof.test for proof in fewest(first, later)] == ["2", "4"]
    assert set().union(*(pairs(p.features) for p in fewest(first, later))) == pairs("abcd")


def test_the_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "matrix.json"
    path.write_text(dump(load()))
    assert load(path) == load() and {n for p in load().proofs for n in p.features} <= {f.name for f in FEATURES}
