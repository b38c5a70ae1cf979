"""Every way to serve a load with one kind of device: how many of them share a model, how prompts are cut, how many
replicas. Of each the load that one replica bears, by simulation, and what users would see; the fewest devices first."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from stretto.plan.hardware import Engine, Hardware
from stretto.plan.load import LEAST_TURNS, Load, Talk, shares
from stretto.plan.shapes import Shape
from stretto.plan.simulate import Outcome, Replica, Together, simulate, simulate_long
from stretto.plan.steps import Steps

UTILIZATION = 0.9  # of a device's memory, as the engine takes it by default
BUFFERS = 3e9  # bytes of a step's buffers and CUDA graphs
MOST_SEATS = 256
GROUPS = (1, 2, 4, 8)
START, FACTOR = 16.0, 4.0  # of the search for what a replica bears, in requests a second or users
CROWD, TURNS_EACH = 1.25, 8  # people for a place of a replica that is always full, turns of each
BISECTIONS, CLOSE = 7, 1.03


@dataclass(frozen=True)
class Goals:
    """What 99 of 100 must see; seconds."""

    first: float = 2.0
    between: float = 0.1


@dataclass(frozen=True)
class Schedule:
    """As `stretto serve` takes it."""

    chunk: int
    budget: int

    @property
    def flags(self) -> str:
        return f"--chunk-size {self.chunk} --max-num-batched-tokens {self.budget}"


SCHEDULES = (Schedule(2048, 8192), Schedule(512, 768))


@dataclass(frozen=True)
class Option:
    """One way. `per_replica`: requests a second, or users, that one replica bears; 0 where it cannot serve at all,
    which `limit` explains. `kv_tokens`: of a replica. `output_rate`: generated tokens a second, of all replicas."""

    ranks: int
    schedule: Schedule
    kv_tokens: int
    per_replica: float
    replicas: int
    limit: str
    output_rate: float = 0.0
    outcome: Outcome | None = field(default=None, compare=False)

    @property
    def devices(self) -> int:
        return self.ranks * self.replicas

    @property
    def fits(self) -> bool:
        return self.outcome is not None


@dataclass(frozen=True)
class Question:
    """What is planned. `headroom`: share of what a replica bears that it is given. `drafts`, `accepted`: of a drafter,
    as in simulate.Replica."""

    shape: Shape
    hardware: Hardware
    engine: Engine
    load: Load | Sequence[Talk]
    goals: Goals = Goals()
    headroom: float = 0.8
    seats: int = MOST_SEATS
    drafts: int = 0
    accepted: float = 1.0


def plan(question: Question) -> list[Option]:
    """Those that fit, by devices and then by time to the first token; then those that do not, with the reason."""
    found = [_Capacity(question, ranks, schedule).option() for ranks in GROUPS if ranks <= question.hardware.node
             for schedule in SCHEDULES]
    return sorted(found, key=lambda one: (not one.fits, one.devices,
                                          one.outcome.first_token(0.99) if one.outcome else 0.0, one.ranks))


def kv_room(shape: Shape, hardware: Hardware, ranks: int, seats: int) -> int:
    """Tokens that the KV memory of a replica holds; below 0 where the weights alone are too large."""
    share = shape.kv_share(ranks)
    room = hardware.memory * UTILIZATION - BUFFERS - shape.weight_bytes / ranks - seats * shape.window_bytes * share
    if not shape.kv_token_bytes:
        return int(1e12) if room > 0 else -1
    return int(room / share / shape.kv_token_bytes)


def undivided(shape: Shape, ranks: int) -> str:
    """What so many devices cannot share; "": nothing."""
    cut = {"heads": shape.heads % ranks, "KV heads": shape.kv_heads % ranks and ranks % shape.kv_heads,
           "inner features": shape.inner % ranks}
    sizes = {"heads": shape.heads, "KV heads": shape.kv_heads, "inner features": shape.inner}
    return " and ".join(f"{sizes[name]} {name}" for name, rest in cut.items() if rest)


class _Capacity:
    """One grouping of devices with one schedule."""

    def __init__(self, question: Question, ranks: int, schedule: Schedule):
        self._question, self._ranks, self._schedule = question, ranks, schedule
        self._load = question.load
        self._kv = kv_room(question.shape, question.hardware, ranks, question.seats)

    def option(self) -> Option:
        why = self._impossible()
        if why:
            return self._none(why)
        asked = self._question
        steps = Steps(asked.shape, asked.hardware, asked.engine, self._ranks)
        self._replica = Replica(
            steps.cost(self._schedule.budget + asked.seats * (1 + asked.drafts)), self._kv, asked.seats,
            self._schedule.budget, self._schedule.chunk, drafts=asked.drafts, accepted=asked.accepted,
            shared=self._load.shared if isinstance(self._load, Load) else 0)
        return self._of_load(self._load) if isinstance(self._load, Load) else self._of_trace(self._load)

    def _none(self, why: str) -> Option:
        return Option(self._ranks, self._schedule, max(self._kv, 0), 0.0, 0, why)

    def _impossible(self) -> str:
        shape, load = self._question.shape, self._load
        if rest := undivided(shape, self._ranks):
            return f"{self._ranks} devices cannot share {rest}"
        if self._kv <= 0:
            per = shape.weight_bytes / self._ranks / 1e9
            return f"memory: {per:.0f} GB of weights a device leave no room for KV"
        longest = load.longest if isinstance(load, Load) else max(
            sum(turn.prompt + turn.output for turn in talk.turns) for talk in load)
        if longest > shape.context:
            return f"conversations of up to {longest} tokens: the model's context is {shape.context}"
        if longest > self._kv:
            return f"memory: conversations of up to {longest} tokens, and room for {self._kv}"
        return ""

    # ------------------------------------------------------------------------------------------------- drawn loads
    def _of_load(self, load: Load) -> Option:
        def run(amount: float) -> Outcome:
            return simulate_long(self._replica, load.with_amount(amount).draw())

        least = 1.0 if load.users is not None else 1e-3
        alone = run(least)
        if broken := self._broken(alone):
            return self._none(f"{broken} with hardly any load")
        most, limit = self._most(run, least, max(least, self._bound(load)))
        replicas = max(1, math.ceil(load.amount / (most * self._question.headroom) - 1e-9))
        share = load.amount / replicas
        outcome = run(share if load.users is None else max(1.0, share))
        return Option(self._ranks, self._schedule, self._kv, most, replicas, limit, outcome.steady_rate * replicas,
                      outcome)

    def _bound(self, load: Load) -> float:
        """The amount of `load` beyond which more comes than a replica does when it is always full. What is drawn of a
        high rate is too short to show that: all of it may come and go within the goals. By Little's law so many users
        are those of that rate who think, or wait for what the goals allow."""
        cells = load.shared + load.turns * (load.prompt.mean + load.output.mean)
        fitting = 2 * self._kv / cells  # conversations that run are half over
        people = max(1, math.ceil(min(CROWD * self._question.seats, fitting)))
        talks = load.incessant(people, max(TURNS_EACH * people, LEAST_TURNS))
        outputs = [turn.output for talk in talks for turn in talk.turns]
        rate = simulate(self._replica, talks).steady_rate * len(outputs) / sum(outputs)
        goals = self._question.goals
        return rate if load.users is None else rate * (
            load.think + goals.first + load.output.mean * goals.between)

    def _most(self, run: Callable[[float], Outcome], least: float, bound: float) -> tuple[float, str]:
        """The largest amount up to `bound` that is borne, and what happens above it. `least` is borne."""
        low = high = min(max(START, least), bound)
        outcome = run(low)
        if self._broken(outcome):
            while low > least and self._broken(tried := run(low := max(low / FACTOR, least))):
                high, outcome = low, tried
        else:
            while high < bound and not self._broken(outcome := run(high := min(high * FACTOR, bound))):
                low = high
        if not self._broken(outcome):
            return bound, "throughput: more comes than is done"
        for _ in range(BISECTIONS):
            middle = (low * high) ** 0.5
            if high / low < CLOSE:
                break
            tried = run(middle)
            if self._broken(tried):
                high, outcome = middle, tried
            else:
                low = middle
        return low, self._broken(outcome)

    def _broken(self, outcome: Outcome) -> str:
        """Which goal is missed, and why; "": none."""
        goals = self._question.goals
        if outcome.between(0.99) > goals.between:
            return f"next token: 99 % within {1e3 * outcome.between(0.99):.0f} ms"
        if outcome.first_token(0.99) > goals.first or outcome.grows:
            if outcome.blocked_by_kv > 0.2 * outcome.seconds:
                return "KV memory: requests wait until others have ended"
            waits = sum(outcome.waited) > 0.5 * sum(outcome.first)
            return "--max-num-seqs: requests wait for a place" if waits else "first token: prompts queue"
        return ""

    # ------------------------------------------------------------------------------------------------------ traces
    def _of_trace(self, talks: Sequence[Talk]) -> Option:
        def run(replicas: int) -> Outcome:
            return Together.of([simulate(self._replica, share) for share in shares(talks, replicas)])

        high = 1
        while (broken := self._broken(run(high))) and high < len(talks):
            high = min(2 * high, len(talks))
        if broken:
            return self._none(f"{broken} with one conversation a replica")
        low = 0  # too few
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._broken(run(middle)) else (low, middle)
        limit = self._broken(run(low)) if low else ""
        replicas = math.ceil(high / self._question.headroom - 1e-9) if low else high
        outcome = run(replicas)
        return Option(self._ranks, self._schedule, self._kv, len(talks) / high, replicas, limit,
                      _rate_of_trace(talks, outcome.seconds), outcome)


def _rate_of_trace(talks: Sequence[Talk], seconds: float) -> float:
    """Generated tokens a second of the whole trace, of which the last replica has done its share after so many
    seconds; the last request may come to one that was not looked at."""
    last = max(talk.at + sum(turn.think for turn in talk.turns) for talk in talks)
    return sum(turn.output for talk in talks for turn in talk.turns) / max(seconds, last)

