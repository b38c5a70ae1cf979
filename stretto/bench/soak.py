"""`stretto soak`: random clients on a small pool for as long as one likes, every answer checked by replay.

    each round     a seed -> a setting (page, chunk, budget, policy, overlap, prefix cache, pool, drafter) -> a crowd
    each step      the books are checked; after each action every page is audited
    at its end     every session is closed; no page may be held

A round is a function of its seed: a failure names it, and the same seed does it again.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from stretto.bench.rounding import TOLERANCE
from stretto.host.faults import HostFault
from stretto.host.limits import CAP_POLICIES
from stretto.model.api import CausalModel
from stretto.params import SamplingParams
from stretto.replay import Ask, Crowd, OneShot, World, Wrong
from stretto.spec.context import Target
from stretto.testing import Setup, make_engine

ACTIONS = 150  # of a round
WIDEST = 20  # alternatives of a token that are looked through when an answer differs


@dataclass
class SoakResult:
    """What happened in all rounds; `wrong` is the first failure and `seed` that of its round."""

    rounds: int = 0
    seen: Counter[str] = field(default_factory=Counter)
    wrong: str | None = None
    seed: int | None = None
    setting: str = ""


class Soak:
    """Rounds over one loaded model. `drafters`: as after --speculation; "off" is none."""

    def __init__(self, model: CausalModel, target: Target, drafters: Sequence[str], dtype: str, context: int = 256):
        self._model, self._target, self._drafters, self._dtype, self._context = model, target, drafters, dtype, context
        once = make_engine(model, None, target, Setup(context=context, prefix_cache=False, pool_tokens=2 * context))
        self._once = OneShot(once)
        self.result = SoakResult()

    def round(self, seed: int, actions: int = ACTIONS) -> bool:
        """False: something was wrong; the result says what."""
        rng = random.Random(seed)
        setup, drafter = self._setup(rng), rng.choice(list(self._drafters))
        self.result.setting = f"drafter {drafter}, {setup}"
        core = make_engine(self._model, None if drafter == "off" else drafter, self._target, setup)
        world = World(core, self._once, same=self._rounding)
        crowd = Crowd(world, seed, self._target.vocab_size, sampled=self._dtype == "float32")
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
        self.result.seen += Counter(world.count) + Counter({n: int(v) for n, v in core.host.stats()[0].items()})
        return True

    def _setup(self, rng: random.Random) -> Setup:
        chunk = rng.choice([1, 7, 16, 64, 256])
        return Setup(width=rng.randint(1, 6), page_size=rng.choice([1, 4, 16, 64]),
                     pool_tokens=rng.choice([self._context * 3 // 4, self._context, 4 * self._context]), chunk=chunk,
                     budget=rng.choice([chunk + 16, 40, 300]), cap_policy=rng.choice(CAP_POLICIES),
                     mixed=rng.random() < 0.8, overlap=rng.random() < 0.7, prefix_cache=rng.random() < 0.8,
                     slots=rng.choice([3, 5, 9]), context=self._context)

    def _rounding(self, ask: Ask) -> bool:
        """Whether the first id that differs was as good as the expected one, up to rounding."""
        if ask.sampling.temperature > 0:
            return False
        at = next((i for i, (a, b) in enumerate(zip(ask.got, ask.expected)) if a != b), None)
        if at is None:
            return False
        sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=WIDEST)
        outputs = self._once.outputs(ask.prompt + ask.got[:at], sampling)
        score = next(output.logprobs for output in outputs if output.logprobs)[0]
        known = dict(zip(score.top_ids, score.top_logprobs, strict=True))
        return ask.got[at] in known and score.top_logprobs[0] - known[ask.got[at]] <= TOLERANCE[self._dtype]
