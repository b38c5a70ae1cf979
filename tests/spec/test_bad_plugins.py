"""Third parties' drafters that raise, lie or return nonsense: a refusal with their name at start; drafts that are
missing later, never a wrong text and never an engine that ends. Slow ones cost time alone."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

import pytest
import torch

from stretto.attn.api import LayerSpec
from stretto.compat import ConfigError
from stretto.config import Config, ModelSection, SpeculationSection
from stretto.engine.build import make_runner
from stretto.engine.prepare import prepare
from stretto.spec import registry
from stretto.spec.api import DrafterCaps, Offer
from stretto.spec.context import DrafterError, DrafterSizes
from stretto.testing import Ask, Lab, Setup, greedy, make_engine, run, same_text
from tests.spec import checkpoints as made

CAPS = DrafterCaps(shape="chain", max_width=4, ingest="same_step")


class Good:
    """Proposes the id 5, again and again. Others below change one thing of it."""

    declared = CAPS

    def __init__(self, context=None):
        self.context, self.caps = context, self.declared

    def make(self, settings, context):
        return type(self)(context)

    def ingest(self, step, taps):
        pass

    def propose(self, step, view, width):
        rows = len(step.slots)
        return Offer(torch.full((rows, width), 5), torch.full((rows,), width, dtype=torch.int32))


class Kind:
    """What an entry point names; `drafter` is the class of what it makes."""

    def __init__(self, drafter: type, **more):
        self.drafter = drafter
        for name, method in more.items():
            setattr(self, name, method)

    def caps(self, settings):
        return self.drafter.declared

    def make(self, settings, context):
        return self.drafter(context)


class FakeEntryPoint:
    name, value = "bad", "somebody:Bad"

    def __init__(self, load):
        self.load = load


@pytest.fixture
def install(monkeypatch):
    """Puts an object in the place of an installed entry point, as the drafter "bad"."""
    def put(kind) -> None:
        monkeypatch.setattr(registry, "entry_points", lambda group: [FakeEntryPoint(
            kind if getattr(kind, "is_loader", False) else lambda: kind)])
    return put


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> made.TinyTarget:
    return made.make_target(tmp_path_factory.mktemp("target"))


def raising(error: BaseException):
    def call(*arguments, **named):
        raise error
    return call


def prepared(tiny, **more):
    return prepare(Config(model=ModelSection(str(tiny.target.path), device="cpu"),
                          speculation=SpeculationSection("bad", **more)))


# ---------------------------------------------------------------------------------------------------- refused at start
class OtherCaps(Good):
    def __init__(self, context=None):
        super().__init__(context)
        self.caps = replace(CAPS, max_width=9)


class NoPropose:
    declared = caps = CAPS

    def __init__(self, context):
        pass

    def ingest(self, step, taps):
        pass


class TakesMemory(Good):
    """And has declared that it has none."""

    def __init__(self, context=None):
        super().__init__(context)
        context.own_kv([LayerSpec(4, 2, 16, 0.25)])


class TakesMore(TakesMemory):
    declared = replace(CAPS, kv="own")


class Nothing(Good):
    declared = replace(CAPS, max_width=0)


def load_fails():
    raise SyntaxError("invalid syntax (bad.py, line 3)")


load_fails.is_loader = True


class Unmakable:
    def __init__(self):
        raise RuntimeError("no licence")


REFUSED = {
    "package": (load_fails, ("somebody:Bad", "SyntaxError", "line 3")),
    "class": (Unmakable, ("RuntimeError", "no licence")),
    "no_kind": (object(), ("no method caps",)),
    "caps_raise": (Kind(Good, caps=raising(KeyError("heads"))), ("caps raised KeyError", "heads")),
    "caps_of_a_wrong_kind": (Kind(Good, caps=lambda settings: {"max_width": 4}), ("caps gave a dict", "DrafterCaps")),
    "no_drafts": (Kind(Nothing), ("max_width 0",)),
    "sizes_raise": (Kind(Good, sizes=raising(ZeroDivisionError("division by zero"))), ("sizes raised ZeroDivision",)),
    "sizes_of_a_wrong_kind": (Kind(Good, sizes=lambda settings, target: CAPS), ("sizes gave a DrafterCaps",)),
    "make_raises": (Kind(Good, make=raising(FileNotFoundError("heads.pt"))), ("make raised FileNotFound", "heads.pt")),
    "make_gives_nothing": (Kind(Good, make=lambda settings, context: None), ("NoneType", "no method ingest")),
    "no_propose": (Kind(NoPropose), ("no method propose",)),
    "other_caps": (Kind(OtherCaps), ("another max_width (4, then 9)",)),
    "undeclared_memory": (Kind(TakesMemory), ("KV memory", "kv 'none'")),
    "more_memory": (Kind(TakesMore, sizes=lambda settings, target: DrafterSizes(
        TakesMore.declared, 0, ((None, 8, 2),))),
                    ("KV memory", "{None: 64}", "{None: 8}")),
    "no_host": (Kind(type("OnHost", (Good,), {"declared": replace(CAPS, where="host", ingest="none")})),
                ("no method host",)),
    "host_raises": (Kind(type("OnHost", (Good,), {"declared": replace(CAPS, where="host", ingest="none")}),
                         host=raising(OSError("no trees"))), ("host raised OSError", "no trees")),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(install, tiny, case: str) -> None:
    kind, named = REFUSED[case]
    install(kind)
    with pytest.raises(ConfigError) as refused:
        make_runner(tiny.model, prepared(tiny))
    text = str(refused.value)
    assert all(word in text for word in ("--speculation bad", "drafter bad", "does not work with", *named)), text


# ------------------------------------------------------------------------------------------ wrong while the engine runs
def proposing(make, name: str = "propose"):
    """A drafter whose method is this one, of (self, the right answer)."""
    right = getattr(Good, name)

    def method(self, *arguments):
        return make(self, right(self, *arguments))
    return type("Wrong", (Good,), {name: method})


class FailsAtTimes(Good):
    """In every third step."""

    calls = 0

    def propose(self, step, view, width):
        type(self).calls += 1
        if self.calls % 3 == 0:
            raise ValueError("a third step")
        return super().propose(step, view, width)


class WantsTaps(Good):
    """That it has not declared."""

    def ingest(self, step, taps):
        self.hidden = taps["hidden.last"]


WRONG = {
    "raises": (proposing(raising(RuntimeError("oh"))), True),
    "raises_at_times": (FailsAtTimes, True),
    "ingest_raises": (proposing(raising(RuntimeError("oh")), "ingest"), True),
    "undeclared_taps": (WantsTaps, True),
    "nothing": (proposing(lambda self, right: None), True),
    "too_wide": (proposing(lambda self, right: Offer(right.ids.repeat(1, 3), right.width * 3)), True),
    "too_few_rows": (proposing(lambda self, right: Offer(right.ids[1:], right.width[1:])), True),
    "flat": (proposing(lambda self, right: Offer(right.ids.flatten(), right.width)), True),
    "floats": (proposing(lambda self, right: Offer(right.ids.float(), right.width)), True),
    "lists": (proposing(lambda self, right: Offer(right.ids.tolist(), right.width.tolist())), True),
    "foreign_ids": (proposing(lambda self, right: Offer(right.ids + 10**6, right.width)), False),
    "negative_ids": (proposing(lambda self, right: Offer(right.ids - 10**6, right.width)), False),
    "wide_counts": (proposing(lambda self, right: Offer(right.ids, right.width + 100)), False),
    "negative_counts": (proposing(lambda self, right: Offer(right.ids, right.width - 100)), False),
}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("case", WRONG)
def test_text_and_engine_stand(install, tiny, caplog, case: str, overlap: bool) -> None:
    drafter, counts = WRONG[case]
    install(Kind(drafter))
    lab = Lab(tiny.model, tiny.target, "bad")
    engine = make_engine(lab.model, lab.drafter, lab.target, lab.setup(overlap=overlap, chunk=8))
    with caplog.at_level(logging.ERROR):
        same_text(run(engine, lab.asks()), lab.plain(lab.asks()), case)
    faults = engine.stats().counters.get("drafter_faults", 0)
    assert (faults > 0) == counts == any("drafter bad" in record.message for record in caplog.records)


@pytest.mark.parametrize("host", [raising(RuntimeError("oh")), lambda tokens, width: None, lambda tokens, width: ["a"],
                                  lambda tokens, width: [5] * 1000, lambda tokens, width: [5, 10**9],
                                  lambda tokens, width: [-1]], ids=["raises", "nothing", "words", "many", "foreign",
                                                                    "negative"])
def test_proposals_of_the_host(install, tiny, host) -> None:
    on_host = type("OnHost", (Good,), {"declared": replace(CAPS, where="host", ingest="none")})
    install(Kind(on_host, host=lambda settings: host))
    lab = Lab(tiny.model, tiny.target, "bad", steady=False)
    for overlap in (False, True):
        same_text(lab.drafted(lab.asks(), overlap=overlap)[0], lab.plain(lab.asks()), "host")


def test_a_slow_one_costs_time_alone(install, tiny) -> None:
    slow = proposing(lambda self, right: (time.sleep(0.02), right)[1])
    install(Kind(slow))
    lab = Lab(tiny.model, tiny.target, "bad")
    engine = make_engine(lab.model, lab.drafter, lab.target, Setup(width=4, overlap=True))
    asks = [Ask("a", [3, 7, 11], greedy(10))]
    same_text(run(engine, asks), lab.plain(asks), "slow")
    assert not engine.stats().counters.get("drafter_faults")


def test_a_good_one_is_left_alone(install, tiny) -> None:
    install(Kind(Good))
    lab = Lab(tiny.model, tiny.target, "bad")
    got, engine = lab.drafted(lab.asks())
    assert all(offer == (5,) * len(offer) for answer in got.values() for offer in answer.offers.values())
    assert sum(len(answer.offers) for answer in got.values()) > 20
    assert not engine.stats().counters.get("drafter_faults")
    with pytest.raises(DrafterError, match="somebody:Bad"):
        install(load_fails)
        registry.find_drafter("bad")
