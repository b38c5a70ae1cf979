"""The conformance kit, for every drafter and for a plug-in: greedy and sampled text, distribution, caps, skips, mixed
steps, retraction, prefix hits, choices, sessions, widths by request."""

from __future__ import annotations

import pytest

from stretto.testing import CHECKS, NEW, SAMPLED, Lab
from tests.engine.matrix_run import make_lab
from tests.spec import checkpoints as made

KINDS = {"eagle": made.eagle, "eagle3": made.eagle3, "dflash": made.dflash, "dspark": made.dspark}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("conformance")


@pytest.fixture(scope="module")
def targets(folder):
    """window (or None) -> target; made when first asked for."""
    kept: dict[int | None, made.TinyTarget] = {}

    def get(window: int | None = None) -> made.TinyTarget:
        if window not in kept:
            kept[window] = made.make_target(folder / f"target{window}", window=window)
        return kept[window]
    return get


def lab_of(kind: str, targets, folder, window: int | None = None) -> Lab:
    tiny = targets(window)
    if kind == "standalone":  # the target itself: accepts everything
        return Lab(tiny.model, tiny.target, f"standalone:{tiny.target.path}")
    if kind in KINDS:
        path, _ = KINDS[kind](folder / kind)
        return Lab(tiny.model, tiny.target, f"{kind}:{path}")
    return Lab(tiny.model, tiny.target, kind)


@pytest.fixture(scope="module")
def labs(targets, folder):
    """(kind, window) -> its lab, which keeps the answers without a drafter."""
    kept: dict[tuple[str, int | None], Lab] = {}

    def get(kind: str, window: int | None = None) -> Lab:
        if (kind, window) not in kept:
            kept[kind, window] = lab_of(kind, targets, folder, window)
        return kept[kind, window]
    return get


@pytest.fixture(scope="module")
def hybrid(folder):
    """kind -> its lab with a target half of whose layers keep a state."""
    made_for, kept = make_lab(folder / "hybrid", False, "float32", states=True), {}

    def get(kind: str) -> Lab:
        return kept.setdefault(kind, Lab(made_for.model, made_for.target, made_for.drafters[kind]))
    return get


def name_of(check) -> str:
    return check.__name__.removeprefix("check_")


CASES = {"greedy_text": "case_1_01-case_1_03-case_4_01", "sampled_text": "case_1_09-case_2_01-case_2_03",
         "distribution": "case_1_05", "mixed_steps": "case_4_05", "soak": "case_1_03"}


def id_of(kind: str, check) -> str:
    """With the field's cases that the check carries."""
    return "-".join(filter(None, (kind, name_of(check), CASES.get(name_of(check)))))


# eagle3 (taps, seams, a cell made of two positions) and dflash (blocks) stand for their relatives in the default run
ALWAYS = {"eagle3": {name_of(c) for c in CHECKS}, "dflash": {"greedy_text", "prefix_hits", "choices", "mixed_steps"},
          "standalone": {"greedy_text", "sampled_text"}, "ngram": {"greedy_text"}, "eagle": {"choices"},
          "dspark": {"sampled_text"}}


@pytest.mark.parametrize(("kind", "check"), [
    pytest.param(kind, check, id=id_of(kind, check), marks=() if name_of(check) in chosen else pytest.mark.full)
    for kind, chosen in ALWAYS.items() for check in CHECKS])
def test_drafter(kind: str, check, labs) -> None:
    check(labs(kind))


@pytest.mark.parametrize(("kind", "check"), [
    pytest.param(kind, check, id=id_of(kind, check),
                 marks=() if (kind, name_of(check)) in (("eagle3", "prefix_hits"), ("dflash", "greedy_text"))
                 else pytest.mark.full)
    for kind in ("standalone", "eagle3", "dflash") for check in CHECKS])
def test_window_of_16(kind: str, check, labs) -> None:
    """Every layer of the target has a window; the drafter's layers see everything, in a KV group of their own."""
    check(labs(kind, 16))


@pytest.mark.parametrize(("kind", "check"), [
    pytest.param(kind, check, id=id_of(kind, check),
                 marks=() if (kind, name_of(check)) == ("eagle3", "sessions") else pytest.mark.full)
    for kind in ("eagle3", "dflash") for check in CHECKS])
def test_target_whose_layers_keep_states(kind: str, check, hybrid) -> None:
    """Taps rest, fork and rewind with the states: offers are the same wherever a sequence goes on from."""
    check(hybrid(kind))


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9}, SAMPLED], ids=["greedy", "sampled", "everything"])
def test_identical_drafter_accepts_everything(labs, sampling) -> None:
    """case_1_07: proposals are drawn with the row's own noise, after its own processors, so the target's copy proposes
    exactly what the target samples, at any temperature and with penalties that count the drafts before."""
    got, _ = labs("standalone").drafted(labs("standalone").asks(**sampling), chunk=8)
    assert all(a.drafted == a.accepted > 0 for a in got.values())
    assert all(a.steps == 1 + -(-(NEW - 1) // 5) for a in got.values())


def test_random_drafter_is_hardly_ever_right(labs) -> None:
    got, _ = labs("eagle3").drafted(labs("eagle3").asks())
    drafted, accepted = (sum(getattr(a, name) for a in got.values()) for name in ("drafted", "accepted"))
    assert drafted > 200 and accepted < 0.1 * drafted
