"""Steps with less room than their rows could fill, in random worlds: whoever decides it, and however badly."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from stretto.host.cost import CostModel, StepWork
from stretto.host.elastic import Choice, Demand, Elastic
from stretto.host.planner import Planner
from tests.host.harness import Harness, World, make_world

COSTS = CostModel([(StepWork(1, n, 0), 0.004 + 0.0001 * n) for n in (1, 16, 256)], 256)


class Dice(Elastic):
    """Caps, widths, prompt tokens and room by chance, within the bounds of a choice."""

    def __init__(self, rng: random.Random, slots: int, width: int, on_host: bool):
        super().__init__(COSTS, slots, (0, width), exact=False, on_host=on_host)
        self.rng = rng

    def choose(self, demand: Demand) -> Choice:
        choice, rng = super().choose(demand), self.rng
        drafts = [k if named else rng.randint(0, k) for k, named in zip(demand.widths.tolist(), demand.fixed.tolist())]
        absent = rng.choice([0, sum(drafts), rng.randint(0, sum(drafts))])
        return replace(choice, drafts=drafts, draft_width=rng.choice(self.widths), absent=absent,
                       least=rng.choice([0.0, 0.5]), chunk_tokens=rng.randint(0, demand.chunk_tokens))


def world_of(seed: int, drafter: str, **force) -> World:
    rng = random.Random(seed)
    force = {"width": rng.choice([3, 7]), "budget": rng.choice([40, 128]), "accept": 0.7} | force
    dice = Dice(random.Random(seed), 20, force["width"], on_host=drafter == "host")
    return make_world(rng, drafter=drafter, elastic=dice, random_caps=False, **force)


@pytest.mark.parametrize("drafter", ["ngram", "eagle", "host"])
def test_answers_are_those_of_the_oracle_and_drafts_wait(drafter: str):
    waited = accepted = mixed = 0
    for seed in range(4):
        found = Harness(world_of(seed, drafter), seed).run(40)
        waited, accepted = waited + found["waiting_drafts"], accepted + found["accepted"]
        mixed += found["mixed_steps"]
    assert waited > 20 and accepted > 20 and mixed > 0


def test_room_that_was_left_out_is_counted_and_no_more(monkeypatch: pytest.MonkeyPatch):
    """A choice may leave out more drafts than its plan's rows have."""
    left_out, bound = [], Planner._bound

    def noted(self, plan, planned, drafts):
        bound(self, plan, planned, drafts)
        left_out.append(planned - plan.tokens if plan.tokens else 0)

    monkeypatch.setattr(Planner, "_bound", noted)
    harness = Harness(world_of(1, "ngram"), 1)
    harness.run(40)
    assert harness.half.stats()[0]["elastic_absent_drafts"] == sum(left_out) > 0


def test_a_step_without_room_for_what_is_pending_is_seen(monkeypatch: pytest.MonkeyPatch):
    bound = Planner._bound
    monkeypatch.setattr(Planner, "_bound", lambda self, plan, planned, drafts: bound(self, plan, planned, drafts + 1))
    with pytest.raises(AssertionError, match="no room for what is pending"):
        for seed in range(20):
            Harness(world_of(seed, "ngram"), seed).run(40)
