"""What a test proves of the support matrix (`stretto.matrix`), as a plugin of pytest.

    @pytest.mark.proves("overlap", "window")        all of these happened in the run, to the same requests
    def test_it(proof):
        ...
        proof.show("overlap", overlapped_steps)     what was seen; nothing, 0 or False fails the test
        proof.show("window", pages_given_back)

A test that declares a feature and does not show it fails; so does one that shows what it did not declare.
`pytest --collect-only --proofs FILE` writes what the collected tests declare.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path

import pytest

from stretto.matrix import FEATURES


class Unproved(AssertionError):
    """A feature that a test declares to prove did not happen in it."""


class ProofOf:
    """What one test declares and has shown so far."""

    def __init__(self, declared: frozenset[str]):
        self.declared = declared
        self.shown: dict[str, object] = {}

    def show(self, feature: str, evidence: object) -> None:
        if feature not in self.declared:
            raise Unproved(f"{feature!r} is shown, and not declared")
        if not evidence:
            raise Unproved(f"{feature!r} did not happen: {evidence!r}")
        self.shown[feature] = evidence

    @property
    def owed(self) -> list[str]:
        return sorted(self.declared - self.shown.keys())


def declared(item: pytest.Item) -> frozenset[str]:
    """By the marks of a test. Raises UsageError for what is no feature."""
    features = frozenset(name for mark in item.iter_markers("proves") for name in mark.args)
    unknown = features - {feature.name for feature in FEATURES}
    if unknown:
        raise pytest.UsageError(f"{item.nodeid} proves {sorted(unknown)}, which stretto/matrix.py does not name")
    return features


@pytest.fixture
def proof(request: pytest.FixtureRequest) -> ProofOf:
    return ProofOf(declared(request.node))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    result = yield
    if features := declared(item):
        shown = getattr(item, "funcargs", {}).get("proof")
        owed = shown.owed if isinstance(shown, ProofOf) else sorted(features)
        if owed:
            raise Unproved(f"declared, and never shown: {', '.join(owed)}")
    return result


# ---------------------------------------------------------------------------------------------------------- collection
def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--proofs", type=Path, help="write what the collected tests prove to this file, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "proves(*features): these features of the support matrix happen in the test")


def rank(item: pytest.Item) -> int:
    """0: it always runs; 1: in the whole products; 2: on a GPU."""
    return 2 if item.get_closest_marker("gpu") else 1 if item.get_closest_marker("full") else 0


def pytest_collection_finish(session: pytest.Session) -> None:
    path: Path | None = session.config.getoption("--proofs")
    if path is not None:
        found = [{"test": item.nodeid, "features": sorted(features), "rank": rank(item)}
                 for item in session.items if (features := declared(item))]
        path.write_text(json.dumps(found))
