"""SUFFIX: host proposals, late under overlap, change no text. The trees are arctic-inference's."""

from __future__ import annotations

import importlib.util

import pytest

from stretto.spec.registry import DrafterError, make_host_drafter
from stretto.spec.suffix import SuffixProposals
from stretto.testing import CHECKS, Lab, counters
from tests.spec import checkpoints as made

installed = pytest.mark.skipif(importlib.util.find_spec("arctic_inference") is None,
                               reason="the optional package arctic-inference is not installed")


class Notebook:
    """Stands for the trees: writes down what it is told."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        def call(*args, **more):
            self.calls.append((name, *args))
            return type("Draft", (), {"token_ids": [1, 2]})
        return call


def test_sequences_are_told_apart() -> None:
    notebook = Notebook()
    propose = SuffixProposals(notebook)
    a, b = [5, 6, 7], [5, 6, 7]
    propose(a, 3)
    propose(b, 3)
    a += [8, 9]
    propose(a, 3)
    del a[2:]  # cut: what follows is another sequence
    propose(a, 3)
    told = [call for call in notebook.calls if call[0] != "speculate"]
    assert told == [("start_request", 1, [5, 6, 7]), ("start_request", 2, [5, 6, 7]),
                    ("add_active_response", 1, [8, 9]), ("stop_request", 1), ("start_request", 3, [5, 6])]


def test_settings_and_the_missing_package_are_named(monkeypatch) -> None:
    with pytest.raises(DrafterError, match="depth=3"):
        make_host_drafter("suffix:depth=3")
    monkeypatch.setitem(__import__("sys").modules, "arctic_inference.suffix_decoding", None)
    with pytest.raises(DrafterError, match=r"pip install 'stretto\[suffix\]'"):
        make_host_drafter("suffix")


@installed
@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__.removeprefix("check_"))
def test_conformance(check, tmp_path_factory) -> None:
    tiny = made.make_target(tmp_path_factory.mktemp("target"))
    check(Lab(tiny.model, tiny.target, "suffix", steady=False))


@installed
@pytest.mark.parametrize("overlap", [False, True])
def test_its_proposals_are_accepted(tmp_path, overlap: bool) -> None:
    tiny = made.make_target(tmp_path / "target")
    lab = Lab(tiny.model, tiny.target, "suffix", steady=False)
    got, engine = lab.drafted(lab.asks(40), overlap=overlap)
    assert counters(engine)["host_drafts"] > 0
    assert sum(a.accepted for a in got.values()) > 20
