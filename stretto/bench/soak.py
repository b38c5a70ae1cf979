"""`stretto soak`: random clients on a small pool for as long as one likes, every answer checked by replay.

    each round     a seed -> the next model and drafter, a setting (page, chunk, budget, policy, overlap, prefix cache,
                   pool, slots)
                   -> a crowd
    each step      the books are checked; after each action every page is audited
    at its end     every session is closed; no page may be held

A round is a function of its seed: a failure names it, and the same seed does it again.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from stretto.bench.rounding import TOLERANCE
from stretto.host.faults import HostFault
from stretto.host.limits import CAP_POLICIES
from stretto.model.api import CausalModel
from stretto.replay import Crowd, OneShot, World, Wrong, as_good
from stretto.spec.context import Target
from stretto.testing import Setup, make_engine

ACTIONS = 150  # of a round
POOLS = (3, 5, 6, 6, 8, 8, 16)  # eighths of the context that a pool holds
LEAST_PAGES = 12  # of a pool: with a few there is seldom anybody who could give way
MOST_ROWS = 32


@dataclass
class SoakResult:
    """What happened in all rounds; `wrong` is the first failure and `seed` that of its round."""

    rounds: int = 0
    with_drafter: Counter[str] = field(default_factory=Counter)  # rounds
    seen: Counter[str] = field(default_factory=Counter)
    wrong: str | None = None
    seed: int | None = None
    setting: str = ""


@dataclass(frozen=True)
class Subject:
    """A loaded model, and the drafters that run with it, as after --speculation; "off" is none."""

    name: str
    model: CausalModel
    target: Target
    drafters: tuple[str, ...]


class Soak:
    """Rounds over loaded models. `dtype`: of all of them, by name. `context`: of all rounds."""

    def __init__(self, subjects: Sequence[Subject], dtype: str, context: int = 256):
        self.dtype, self._subjects, self._context = dtype, list(subjects), context
        once = Setup(context=context, prefix_cache=False, pool_tokens=2 * context)
        self._once = {s.name: OneShot(make_engine(s.model, None, s.target, once)) for s in self._subjects}
        self.result = SoakResult()

    def round(self, seed: int, actions: int = ACTIONS) -> bool:
        """False: something was wrong; the result says what."""
        pairs = [(subject, drafter) for subject in self._subjects for drafter in subject.drafters]
        subject, drafter = pairs[seed % len(pairs)]  # so many rounds have all of them
        setup, once = self._setup(random.Random(seed)), self._once[subject.name]
        self.result.setting = f"model {subject.name}, drafter {drafter}, {setup}"
        core = make_engine(subject.model, None if drafter == "off" else drafter, subject.target, setup)
        world = World(core, once, same=partial(as_good, once, TOLERANCE[self.dtype]))
        crowd = Crowd(world, seed, subject.target.vocab_size, sampled=self.dtype == "float32")
        try:
            for _ in range(actions):
                crowd.act()
                core.host.audit()
            world.finish()
        except (Wrong, HostFault) as error:
            self.result.wrong, self.result.seed = f"{type(error).__name__}: {error}", seed
            return False
        finally:
            core.close()
        self.result.rounds += 1
        self.result.with_drafter[drafter.partition(":")[0]] += 1
        self.result.seen += Counter(world.count) + Counter({n: int(v) for n, v in core.host.stats()[0].items()})
        return True

    def _setup(self, rng: random.Random) -> Setup:
        chunk = rng.choice([1, 7, 16, 64, 256])
        page = rng.choice([1, 4, 4, 16, 16, 64])
        pool = max(self._context * rng.choice(POOLS) // 8, LEAST_PAGES * page)
        crowded = 1 + min(MOST_ROWS, pool // max(page, 16))  # they are admitted together, and cannot end together
        return Setup(width=rng.randint(1, 6), page_size=page, pool_tokens=pool, chunk=chunk,
                     budget=rng.choice([chunk + 16, 40, 300]), cap_policy=rng.choice(CAP_POLICIES),
                     mixed=rng.random() < 0.8, overlap=rng.random() < 0.7, prefix_cache=rng.random() < 0.8,
                     slots=rng.choice([3, 9, *[crowded] * 4]), context=self._context,
                     host_tokens=self._context * rng.choice([0, 0, 1, 8]))
