"""The load of a plan: conversations of one or more turns, drawn from a few numbers or read from a trace.

    rate=16,prompt=64..2048,output=16..512,turns=4,think=20,shared=500      16 requests a second over all
    users=200,prompt=400,output=200,turns=10,think=30                       200 people who answer after 30 s
    trace.jsonl     {"at": 0.0, "prompt": 812, "output": 90, "session": "a"} a line; `prompt` counts what is new
"""

from __future__ import annotations

import json
import math
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

USUAL_SECONDS = 120.0  # that a drawn load lasts, as long as that is
LEAST_TURNS, MOST_TURNS = 400, 2500  # turns, about
LOOKED_AT = 20_000  # turns of a trace; a minute of a plan
ANSWER_SECONDS = 3.0  # a guess, to say how many turns a user has in some time


class Turn(NamedTuple):
    """`think`: seconds from the end of the answer before to this turn. `fresh`: it begins another conversation."""

    prompt: int  # new tokens
    output: int
    think: float = 0.0
    fresh: bool = False


class Talk(NamedTuple):
    """One conversation, or those of one user one after the other. `at`: seconds at which its first turn here comes.
    `history`: tokens of turns that were before that."""

    at: float
    turns: tuple[Turn, ...]
    history: int = 0


class Drawn(NamedTuple):
    """What comes to a server on which such a load has been for long. `seconds`: until nobody looks any more."""

    talks: list[Talk]
    seconds: float


@dataclass(frozen=True)
class Lengths:
    """Tokens, log-uniform from `least` to `most`."""

    least: int
    most: int

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """"500" or "64..2048". Raises ValueError."""
        least, dots, most = text.partition("..")
        try:
            found = cls(int(least), int(most if dots else least))
        except ValueError:
            found = None
        if found is None or not 1 <= found.least <= found.most:
            raise ValueError(f"{text!r} is no number of tokens: write 500, or LEAST..MOST such as 64..2048, in"
                             " whole numbers from 1 up")
        return found

    def draw(self, rng: random.Random) -> int:
        return int(self.least * (self.most / self.least) ** rng.random())

    @property
    def mean(self) -> float:
        if self.least == self.most:
            return float(self.least)
        return (self.most - self.least) / math.log(self.most / self.least)

    def __str__(self) -> str:
        return str(self.least) if self.least == self.most else f"{self.least}..{self.most}"


@dataclass(frozen=True)
class Load:
    """Either `rate` (requests a second; every turn is one) or `users` (who each have one conversation at a time).
    `shared`: tokens at the beginning of every conversation that are the same in all (a system prompt), besides
    `prompt`."""

    prompt: Lengths
    output: Lengths
    rate: float | None = None
    users: int | None = None
    turns: int = 1
    think: float = 10.0
    shared: int = 0

    def __post_init__(self) -> None:
        if (self.rate is None) == (self.users is None):
            raise ValueError("a load has either a rate (requests a second) or users")
        for name, value in (("rate", self.rate), ("users", self.users), ("turns", self.turns)):
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name}={value:g}: it must be above 0 and finite")
        for name, value in (("think", self.think), ("shared", self.shared)):
            if not 0 <= value < math.inf:
                raise ValueError(f"{name}={value:g}: it must be 0 or more, and finite")

    @property
    def amount(self) -> float:
        """Requests a second, or users."""
        return float(self.rate if self.rate is not None else self.users or 0)

    @property
    def unit(self) -> str:
        return "requests/s" if self.rate is not None else "users"

    @property
    def longest(self) -> int:
        """Tokens of the longest conversation."""
        return self.shared + self.turns * (self.prompt.most + self.output.most)

    def with_amount(self, amount: float) -> Load:
        if self.rate is not None:
            return replace(self, rate=amount)
        return replace(self, users=max(1, round(amount)))

    def draw(self, seed: int = 0) -> Drawn:
        """Of a load with pauses some conversations have begun before: whoever thinks at time 0 goes on after another
        exponential pause, since such pauses have no memory."""
        rng = random.Random(seed)
        return self._of_users(rng) if self.rate is None else self._of_rate(rng, self.rate)

    def incessant(self, people: int, turns: int, seed: int = 0) -> list[Talk]:
        """So many who all begin at once and never pause, until there have been `turns` turns or more: a server that is
        always full."""
        rng = random.Random(seed)
        hasty = replace(self, think=0.0)
        conversations = math.ceil(turns / people / self.turns)
        return [Talk(0.0, tuple(turn for _ in range(conversations) for turn in hasty._turns(rng, again=True)))
                for _ in range(people)]

    def _of_rate(self, rng: random.Random, rate: float) -> Drawn:
        seconds = max(LEAST_TURNS / rate, min(USUAL_SECONDS, MOST_TURNS / rate))
        starts, at, talks = rate / self.turns, 0.0, list[Talk]()
        for stage in range(1, self.turns if self.think else 1):
            expected = starts * self.think
            count = int(expected) + (rng.random() < expected % 1)
            talks += [self._under_way(rng, stage, rng.expovariate(1 / self.think)) for _ in range(count)]
        while (at := at + rng.expovariate(starts)) < seconds:
            talks.append(Talk(at, self._turns(rng)))
        return Drawn(sorted(talks), seconds)

    def _of_users(self, rng: random.Random) -> Drawn:
        assert self.users is not None
        pause = self.think + ANSWER_SECONDS
        seconds = max(2 * self.think + 20, LEAST_TURNS * pause / self.users)
        conversations = math.ceil(3 * seconds / pause / self.turns) + 1
        talks = []
        for _ in range(self.users):
            at = rng.expovariate(1 / self.think) if self.think else rng.random()
            first = self._under_way(rng, rng.randrange(self.turns), at)
            later = (turn for _ in range(conversations) for turn in self._turns(rng, again=True))
            talks.append(first._replace(turns=(*first.turns, *later)))
        return Drawn(sorted(talks), seconds)

    def _under_way(self, rng: random.Random, stage: int, at: float) -> Talk:
        """A conversation of which so many turns are over."""
        turns = self._turns(rng)
        return Talk(at, turns[stage:], sum(turn.prompt + turn.output for turn in turns[:stage]))

    def _turns(self, rng: random.Random, again: bool = False) -> tuple[Turn, ...]:
        """Of one conversation; `again`: after another one of the same user."""
        return tuple(Turn(self.prompt.draw(rng) + (self.shared if index == 0 else 0), self.output.draw(rng),
                          rng.expovariate(1 / self.think) if (index or again) and self.think else 0.0,
                          fresh=again and index == 0) for index in range(self.turns))

    def __str__(self) -> str:
        turns = f", {self.turns} turns {self.think:g} s apart" if self.turns > 1 else ""
        shared = f"{self.shared} tokens that are the same in all, " if self.shared else ""
        amount = f"{self.amount:,.0f}" if self.amount.is_integer() else f"{self.amount:g}"
        return f"{amount} {self.unit}: {shared}prompts of {self.prompt}, answers of {self.output}{turns}"


def parse_load(text: str) -> Load:
    """As in the module's first lines. Raises ValueError that names the part."""
    found: dict[str, str] = {}
    for part in text.replace(" ", ",").split(","):
        if part:
            name, equals, value = part.partition("=")
            if not equals or name not in Load.__dataclass_fields__:
                names = ", ".join(Load.__dataclass_fields__)
                raise ValueError(f"{part!r} is no part of a load: write NAME=VALUE with the names {names}")
            found[name] = value
    if lacking := [name for name in ("prompt", "output") if name not in found]:
        raise ValueError(f"the load lacks {' and '.join(lacking)}, in tokens: prompt=500 or prompt=64..2048")
    parts: dict[str, Any] = {name: _part(name, value) for name, value in found.items()}
    try:
        return Load(**parts)
    except ValueError as e:
        raise ValueError(f"load {text!r}: {e}") from e


def _part(name: str, text: str) -> Lengths | float:
    """The value of one NAME=VALUE. Raises ValueError that names both."""
    try:
        if name in ("prompt", "output"):
            return Lengths.parse(text)
        return float(text) if name in ("rate", "think") else int(text)
    except ValueError as e:
        why = e if name in ("prompt", "output") else (
            f"{text!r} is no {'number' if name in ('rate', 'think') else 'whole number'}")
        raise ValueError(f"{name}={text}: {why}") from None


def read_trace(path: Path) -> list[Talk]:
    """A trace's conversations, the first request at 0 seconds. Turns of one session follow each other as far apart as
    their times say, less the time that answers take, which is not known: they come no sooner than in the trace. Raises
    ValueError with the line."""
    sessions: dict[object, list[tuple[float, int, int]]] = defaultdict(list)
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            at, prompt, output = float(entry["at"]), int(entry["prompt"]), int(entry["output"])
            session = entry.get("session")
        except (ValueError, OverflowError, KeyError, TypeError) as e:
            raise ValueError(f"{path} line {number} is not {{\"at\": s, \"prompt\": n, \"output\": n}}: {e}") from e
        if prompt < 1 or output < 1 or not 0 <= at < math.inf:
            raise ValueError(f"{path} line {number}: tokens are 1 or more, times 0 or more")
        if not (session is None or isinstance(session, str | int)):
            raise ValueError(f"{path} line {number}: session is {json.dumps(session)}; it is a text or a whole number")
        sessions[("line", number) if session is None else session].append((at, prompt, output))
    if not sessions:
        raise ValueError(f"{path} holds no request")
    start = min(at for entries in sessions.values() for at, _, _ in entries)
    return sorted(_talk(sorted(entries), start) for entries in sessions.values())


def _talk(entries: Sequence[tuple[float, int, int]], start: float) -> Talk:
    before = [entries[0][0], *(at for at, _, _ in entries[:-1])]
    turns = tuple(Turn(prompt, output, at - last) for (at, prompt, output), last in zip(entries, before, strict=True))
    return Talk(entries[0][0] - start, turns)


def shares(talks: Sequence[Talk], replicas: int) -> list[Sequence[Talk]]:
    """What each of several replicas gets of a trace whose conversations are dealt out in turn. Of a trace of more than
    LOOKED_AT turns some replicas are left out, evenly: what is looked at holds about so many."""
    turns = sum(len(talk.turns) for talk in talks)
    step = max(1, min(replicas, turns // LOOKED_AT))
    return [talks[one::replicas] for one in range(0, replicas, step)]
