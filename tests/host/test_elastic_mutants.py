"""The policy of elastic speculation is broken in one way at a time; the simulated machines must notice.

Each mutant names the test that fails with it, and passes without (tests/host/test_elastic.py)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from stretto.host import elastic as elastic_module
from stretto.host.acceptance import Acceptance
from stretto.host.cost import CostModel
from stretto.host.elastic import Elastic
from tests.host import test_elastic as checks

Patch = pytest.MonkeyPatch
POINTS = {point.name: point for point in checks.POINTS}


def at(name: str) -> Callable[[], None]:
    return partial(checks.test_never_far_below_the_best_fixed_width, POINTS[name])


def believes_every_draft(patch: Patch) -> None:
    patch.setattr(Acceptance, "accepted", lambda self, slots: np.ones((len(slots), self.width)))


def judges_all_rows_alike(patch: Patch) -> None:
    patch.setattr(Acceptance, "accepted", lambda self, slots: np.tile(np.cumprod(self.usual()), (len(slots), 1)))


def never_forgets(patch: Patch) -> None:
    patch.setattr("stretto.host.acceptance.ALL_MEMORY", 1.0)
    patch.setattr("stretto.host.acceptance.ROW_MEMORY", 1.0)


def never_probes(patch: Patch) -> None:
    patch.setattr(Elastic, "_is_probe_due", lambda self, demand, width: False)


def probes_always(patch: Patch) -> None:
    patch.setattr(elastic_module, "PROBE_LEAST", 0)
    patch.setattr(elastic_module, "PROBE_SHARE", 1.0)


def proposes_for_ever(patch: Patch) -> None:
    patch.setattr(elastic_module, "WORTH", 0.0)
    patch.setattr(Elastic, "_best_rate", always_the_widest(Elastic._best_rate))


def always_the_widest(best_rate: Callable) -> Callable:
    return lambda self, *args: (best_rate(self, *args)[0], self.widths[-1])


def pays_for_no_draft(patch: Patch) -> None:
    patch.setattr(Elastic, "_best_rate", lambda self, demand, gains, offered: (1e9, self.widths[-1]))


def a_second_costs_nothing(patch: Patch) -> None:
    patch.setattr(Elastic, "_best_rate", lambda self, demand, gains, offered: (1e-3, self.widths[-1]))


def makes_room_for_every_draft(patch: Patch) -> None:
    patch.setattr(Acceptance, "offered", lambda self, slots: np.ones((len(slots), self.width)))


def learns_no_cost(patch: Patch) -> None:
    patch.setattr(CostModel, "observe", lambda self, work, seconds: self.seconds(work))


def never_explores(patch: Patch) -> None:
    patch.setattr(Elastic, "_explored", lambda self, work, sizes, *others: others[-1])


def forgets_confidence(patch: Patch) -> None:
    patch.setattr(Elastic, "_least", staticmethod(lambda demand, price: 0.0))


def changes_its_mind(patch: Patch) -> None:
    patch.setattr(elastic_module, "STAY", 0.9)
    patch.setattr(elastic_module, "WORTH", 0.9)


MUTANTS: list[tuple[Callable[[Patch], None], Callable[[], None]]] = [
    (believes_every_draft, at("64 rows, context 300, 0.3")),
    (judges_all_rows_alike, checks.test_rows_that_accept_get_the_drafts),
    (never_forgets, at("128 rows, context 1000, drifting")),
    (never_probes, partial(checks.test_a_drafter_that_found_nothing_for_long_is_heard_when_it_does, False)),
    (probes_always, at("256 rows, context 300, 0.3")),
    (proposes_for_ever, partial(checks.test_a_drafter_that_finds_nothing_costs_nothing_to_speak_of, 64, 50, True)),
    (pays_for_no_draft, at("1 rows, context 1000, 0.85, prompts")),
    (a_second_costs_nothing, at("256 rows, context 300, 0.3")),
    (makes_room_for_every_draft, checks.test_steps_have_room_for_what_is_likely_to_be_offered),
    (learns_no_cost, partial(checks.test_times_measured_in_a_bad_moment_are_found_out, 1, 0.9, 1)),
    (never_explores, partial(checks.test_times_measured_in_a_bad_moment_are_found_out, 1, 0.9, 1)),
    (forgets_confidence, partial(checks.test_a_drafter_that_knows_its_chances_brings_more, 64, 1.12)),
    (changes_its_mind, checks.test_it_does_not_oscillate),
]


@pytest.mark.full
@pytest.mark.parametrize("mutant, check", MUTANTS, ids=[mutant.__name__ for mutant, _ in MUTANTS])
def test_a_broken_policy_is_noticed(mutant: Callable[[Patch], None], check: Callable[[], None], monkeypatch: Patch):
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        check()
