"""Elastic speculation: each step decides how much to speculate.

Verified drafts pay while a step has time to spare and cost once it has not. So with every plan the host weighs

    gain    the chance that a draft is accepted             (acceptance.py, per row and place in the draft)
    cost    the time that verifying it adds to the step     (cost.py, from measured steps)

and hands out drafts by gain until the next one would cost more time than its tokens are worth. What a second is worth
is the best rate of tokens that decoding alone can reach now:

    rate  = max over n of (rows + gain of the n best drafts) / (seconds of a step with them, proposals included)
    drafts of a step = the n that makes   rows + gain(n) - rate * seconds(n)   largest

Where the best rate comes without drafts, nothing is proposed either, and now and then a step probes whether that is
still so. All of it changes how fast an answer comes, never what it says. The rule follows the goodput idea of
SmartSpec (Liu et al. 2024, arXiv 2406.14066) with a cost that knows of contexts and prompt chunks. No torch here.

    plan N     proposes w drafts a row (w for the step after it)
    plan N+1   verifies up to w of them, and says what is proposed for N+2

How many of them are there is known on the device alone. Where a drafter often finds fewer, a step is made as large as
what is likely to come, and drafts that do not fit wait (ops/bind.py). A drafter that knows the chances of its own ids
is told with each plan which of them pay (`least`): it sees each draft, while the averages here see only rows.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import NormalDist

import numpy as np

from stretto.host.acceptance import Acceptance
from stretto.host.cost import CostModel, StepWork
from stretto.host.sizes import PREPARING, Sizes
from stretto.wire import ROW_FED, ROW_FLAGS, ROW_NEW, ROW_OFFERED, ROW_SLOT, ROW_VERIFIED, StepResult

RATED_STEPS = 4  # after which the best rate is looked for again
STAY = 1.02  # a larger width must promise so much more before it replaces the present one
WORTH = 1.008  # of the rate without drafts: what promises less is within what step times are known to
PROBE_SHARE = 0.004  # of the time that probing may cost
PROBE_EXTRA = 0.03  # of a plain step's time that one probe may add, where more than one row fits into that
PROBE_LEAST = 8  # steps between probes, at least
LIKELY = 0.5  # drafts that must be offered on average, so that a probe verifies any
EXPLORE_SHARE = 0.004  # of the time that trying sizes of steps may cost of which nothing is known of late
EXPLORE_EVERY = 8  # steps between such tries, at least
EXPLORE_MOST = 3.0  # plain steps that they may cost at the start, and that may be saved up later
EXPLORE_UNASKED = 1.0  # saved plain steps from which one proposes for it alone, where no other would
STALE = 64  # steps after which a size is tried again
SURPRISE = 0.05  # by which the usual acceptance must have risen in a probe, so that another follows at once
REMEMBERED = 4096  # requests and sessions without a slot
TOLD_ROWS = (1, 16, 256)  # for which `describe` says what proposals cost
NORMAL = NormalDist()
LEAST_STEP, MOST_LEAST = 0.05, 0.9  # steps in which `least` moves, and its largest value
NOTHING = np.zeros((0, 0)), np.zeros((0, 0))  # gains and costs where there are no drafts to choose from
LEAST_CHUNK = 64  # prompt tokens of a step that a latency goal leaves, at least


@dataclass(frozen=True, slots=True)
class Demand:
    """What could run in a step. Arrays are [R], one entry for each decode row."""

    slots: np.ndarray  # int
    widths: np.ndarray  # int: most drafts that the row may have verified
    fixed: np.ndarray  # bool: the request names its number of drafts
    context: int  # KV cells that the decode rows read, in all
    chunk_tokens: int = 0  # prompt tokens that could run
    chunk_context: int = 0  # KV cells that the chunk rows read, in all


@dataclass(frozen=True, slots=True)
class Choice:
    drafts: list[int]  # verified at most, of each decode row
    chunk_tokens: int  # prompt tokens, at most
    draft_width: int  # to propose at the end of the step
    verifiable: int  # drafts that a row can have waiting
    absent: int  # of all these drafts, those that will hardly be offered: the step has no room for them
    least: float  # chance below which no draft of this step's proposals pays
    work: StepWork
    plain_seconds: float  # what the step would have taken without drafts
    round_seconds: float  # and another one after it, without prompt chunks


@dataclass(slots=True)
class ElasticCounters:
    """Sums, so that averages over any span can be had. `regret`: seconds lost against plain decoding, by the model."""

    steps: int = 0
    probes: int = 0
    speculating_steps: int = 0  # in which drafts could be verified
    absent_drafts: int = 0  # that rows might have verified, and for which steps had no room made
    timed_steps: int = 0
    predicted_seconds: float = 0.0
    measured_seconds: float = 0.0
    plain_seconds: float = 0.0  # that plain decoding would have taken for the same tokens, by the model
    regret_seconds: float = 0.0
    chosen: list[int] = field(default_factory=list)  # decode rows by the number of drafts they were given

    def as_dict(self) -> dict[str, float]:
        """By name; decode rows that were given n drafts as `elastic_chosen.n`."""
        values = asdict(self)
        chosen = values.pop("chosen")
        return {f"elastic_{name}": value for name, value in values.items()} | {
            f"elastic_chosen.{n}": count for n, count in enumerate(chosen)}


@dataclass(slots=True)
class _Flight:
    """A launched step, until its time is known."""

    choice: Choice
    work: StepWork
    allowed: np.ndarray  # drafts that each row which decodes may verify, by slot; -1: it does not decode


class Elastic:
    """`widths`: the draft widths that may be proposed, 0 among them, the largest last. `exact`: a step is as large as
    what it feeds; otherwise as large as its plan says, and what is not filled is padding. `goal`: most seconds of a
    step, or None. `on_host`: proposals come with the plan that verifies them, not a step before. `adapts`: False where
    every row has as many drafts as it may, and only prompt chunks are fitted to the goal. `confident`: the drafter
    knows the chances of its ids."""

    def __init__(self, cost: CostModel, n_slots: int, widths: Sequence[int], exact: bool, goal: float | None = None,
                 on_host: bool = False, adapts: bool = True, confident: bool = False):
        if not widths or widths[0] != 0 or list(widths) != sorted(set(widths)):
            raise ValueError(f"widths {list(widths)} must rise from 0 to the most drafts of a step")
        self.cost, self.widths, self.exact, self.goal = cost, tuple(widths), exact, goal
        self.on_host, self.adapts, self.confident = on_host, adapts, confident
        self.acceptance, self._n_slots = Acceptance(n_slots, widths[-1]), n_slots
        self.counters = ElasticCounters(chosen=[0] * (widths[-1] + 1))
        self._drafted = widths[-1] if on_host else 0  # width that the last plan proposes, which the next one may verify
        self.favourite = widths[-1]  # the width that pays best
        self._rated, self._rated_rows = (0.0, widths[-1]), 0  # the best rate and its width, for so many rows
        self._probe_in = PROBE_LEAST
        self._tried = False  # the drafts that the last plan proposes are for a probe, which is counted
        self._spare = 0.0  # standard deviations of the offered drafts for which a step has room beyond their mean
        self._saved = EXPLORE_MOST  # plain steps that trying sizes may cost
        self._believed = 1.0  # acceptance of first drafts at the last probe
        self._flights: dict[int, _Flight] = {}
        self._sizes = Sizes(cost, widths[-1], 0.0 if exact else PREPARING)
        self._occupants: dict[int, Hashable] = {}  # slot -> who sits there
        self._known: OrderedDict[Hashable, np.ndarray] = OrderedDict()  # of those that left

    def seated(self, slot: int, who: Hashable, sampled: bool = False) -> None:
        """A slot has a new occupant. One that was here before, a session or a retracted request, is remembered."""
        before = self._occupants.pop(slot, None)
        if before is not None:
            self._known[before] = self.acceptance.remember(slot)
            if len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        self.acceptance.forget(slot, sampled)
        for other in [s for s, occupant in self._occupants.items() if occupant == who]:
            self._known[who] = self.acceptance.remember(other)
            del self._occupants[other]
        if (known := self._known.pop(who, None)) is not None:
            self.acceptance.recall(slot, known)
        self._occupants[slot] = who

    def describe(self) -> dict[str, object]:
        """For people: what the decisions rest on."""
        return {"draft_widths": list(self.widths), "adapts": self.adapts, "step_goal_ms": self.goal and 1e3 * self.goal,
                "measured_steps": self.cost.samples, "step_times": self.cost.describe(),
                "proposing_ms": {n: round(1e3 * self.cost.proposing(n, self.widths[-1]), 3) for n in TOLD_ROWS}}

    # --------------------------------------------------------------------------------------------------- one step
    def choose(self, demand: Demand) -> Choice:
        """For the next plan. Whatever it says is only an upper bound: a plan may hold less."""
        rows = len(demand.slots)
        if not self.adapts:
            demand = replace(demand, fixed=np.ones(rows, dtype=bool))
        self.acceptance.step(demand.slots)
        self._saved = min(self._saved + EXPLORE_SHARE, EXPLORE_MOST)
        rated = rows != self._rated_rows or self.counters.steps % RATED_STEPS == 0
        gains, offered = self._weigh(demand) if rated or self._drafted else NOTHING
        if rated:
            lasting = np.maximum(offered, self.acceptance.lasting)
            self._rated, self._rated_rows = self._best_rate(demand, gains * lasting, lasting), rows
        rate, width = self._rated
        probing = self._is_probe_due(demand, width)
        verifiable = self._drafted
        drafts, absent = self._drafts(demand, gains * offered, offered, rate)
        if not self.on_host:
            self._tried = probing
            self.counters.probes += probing
        width = self._next_width(demand, width, probing)
        verified = sum(drafts) - absent
        chunk = self._chunk(demand, verified)
        work = self._work(demand, rows + verified + chunk, width, chunk)
        plain = self.cost.seconds(self._work(demand, rows + chunk, 0, chunk))
        another = self.cost.seconds(self._work(demand, rows, 0, 0))
        least = self._least(demand, self._price(demand, rate, verified)) if width and self.confident else 0.0
        return Choice(drafts, chunk, width, verifiable, absent, least, work, plain, another)

    def _weigh(self, demand: Demand) -> tuple[np.ndarray, np.ndarray]:
        """Gain of each draft if it is offered and how likely that is, [R, K]; gains of drafts that the row may not have
        are 0."""
        gains = self.acceptance.accepted(demand.slots)
        places = np.arange(gains.shape[1])
        return np.where(places < demand.widths[:, None], gains, 0.0), self.acceptance.offered(demand.slots)

    def _best_rate(self, demand: Demand, gains: np.ndarray, offered: np.ndarray) -> tuple[float, int]:
        """The best rate of tokens that the decode rows reach alone, and the draft width it takes."""
        rows = len(demand.slots)
        if not rows:
            return 0.0, self.favourite
        best, at, present, none = 0.0, 0, 0.0, 0.0
        for width in self.widths:
            inside = gains[:, :width]
            gain, _, tokens = _cumulated(inside, offered[:, :width], _ranked(inside), self._spare)
            seconds = self.cost.curve(self._work(demand, rows, width, 0), rows + tokens)
            rate = float(((rows + gain) / self._bounded(seconds)).max())
            if width == self.favourite:
                present = rate
            if width == 0:
                none = rate
            if rate > best:
                best, at = rate, width
        if best < WORTH * none:  # proposals that bring nothing would go on for ever
            best, at = none, 0
        if at > self.favourite and best < STAY * present:  # what is hardly better is not worth proposing more
            best, at = present, self.favourite
        self.favourite = at
        return best, at

    def _bounded(self, seconds: np.ndarray) -> np.ndarray:
        """Without a latency goal, as it is; steps beyond the goal count as endless, but for the shortest."""
        if self.goal is None:
            return seconds
        return np.where((seconds <= self.goal) | (np.arange(len(seconds)) == 0), seconds, np.inf)

    def _drafts(self, demand: Demand, gains: np.ndarray, costs: np.ndarray, rate: float) -> tuple[list[int], int]:
        """How many drafts each decode row verifies, of those that the last plan proposes; and for how many of all these
        the step has no room, as so many will hardly be there."""
        rows, width = len(demand.slots), self._drafted
        fixed = np.where(demand.fixed, demand.widths, 0)
        if not width or demand.fixed.all():
            return fixed.tolist(), 0
        free = ~demand.fixed[:, None]
        gains, costs = gains[:, :width] * free, costs[:, :width] * free
        ranked = _ranked(gains)
        gain, offered, tokens = _cumulated(gains, costs, ranked, self._spare)
        chunk = demand.chunk_tokens if self.goal is None else min(demand.chunk_tokens, LEAST_CHUNK)
        work, sizes = self._work(demand, rows, 0, chunk), rows + chunk + int(fixed.sum()) + tokens
        seconds = self.cost.curve(work, sizes)
        value = gain / rate - self._bounded(seconds)
        best = n = self._sizes.best(work, sizes, value)
        if not chunk and (self.favourite == 0 or self.counters.steps % EXPLORE_EVERY == 0):
            n = self._explored(work, sizes, value, n)
        probing = self._probe_in < 0
        if probing:
            n = max(n, self._probe_size(seconds, offered))
            self._probe_in = self._probe_interval(rows, seconds, n)
            self._believed = self.acceptance.best
        self.counters.probes += not self._tried and (n != best or (probing and self.on_host))
        chosen = np.minimum(np.bincount(ranked[:n] // width, minlength=rows), demand.widths) * ~demand.fixed
        self._weigh_room(demand, rate, float(gain[n]), float(offered[n]), int(tokens[n]))
        absent = 0 if self.exact or self.on_host else max(0, int(chosen.sum()) - int(tokens[n]))
        return (chosen + fixed).tolist(), absent

    def _explored(self, work: StepWork, sizes: np.ndarray, value: np.ndarray, best: int) -> int:
        """Now and then a size that did not run for long takes the place of the best one: what it costs may have been
        measured in a bad moment, and nothing else would tell. Each size has the same share of what that may cost: the
        less is lost by it, as far as is known, the more often it runs."""
        plain, places = self.cost.seconds(work), self.cost.place(work, sizes)
        last = np.flatnonzero(np.diff(places, append=-1))  # the most drafts of each size
        loss, age = np.maximum((value[best] - value[last]) / plain, 0.01), self.cost.age(places[last])
        possible = (age > STALE) & (loss < EXPLORE_MOST) & self._sizes.prepared(work, sizes[last])
        if not possible.any():
            return best
        chosen = int(np.where(possible, age / loss, 0.0).argmax())
        if loss[chosen] > self._saved:
            return best
        self._saved -= float(loss[chosen])
        return int(last[chosen])

    def _weigh_room(self, demand: Demand, rate: float, gain: float, offered: float, room: int) -> None:
        """How many standard deviations of room a step has beyond the drafts that are offered on average: the last place
        must be filled often enough to be worth its time, as with a newsvendor's last paper."""
        if self.exact or self.on_host or offered <= 0:
            self._spare = 0.0
            return
        filled = self._price(demand, rate, room) / max(gain / offered, 1e-9)
        self._spare = NORMAL.inv_cdf(min(max(1 - filled, 0.3), 0.98))

    def _price(self, demand: Demand, rate: float, drafts: int) -> float:
        """The chance from which a draft is worth its time in a step with about so many: what a token more costs, at
        the best rate of tokens."""
        rows, most = len(demand.slots), len(demand.slots) * (1 + self.widths[-1])
        around = np.asarray([max(rows, int(0.8 * (rows + drafts))), min(int(1.2 * (rows + drafts)) + 8, most)])
        if self.exact:  # what is not offered makes a smaller step of any size, and some are slower than larger ones
            around = np.asarray([rows, most])
        if around[0] >= around[1]:
            return 0.0
        seconds = self.cost.curve(self._work(demand, rows, 0, 0), around)
        return rate * float(seconds[1] - seconds[0]) / float(around[1] - around[0])

    @staticmethod
    def _least(demand: Demand, price: float) -> float:
        """Requests that name their number of drafts get them all."""
        return 0.0 if demand.fixed.any() else min(round(price / LEAST_STEP) * LEAST_STEP, MOST_LEAST)

    def _next_width(self, demand: Demand, width: int, probing: bool) -> int:
        asked = int(demand.widths[demand.fixed].max(initial=0))
        wanted = max(width, self.widths[-1] if probing else 0, asked)
        return next(w for w in self.widths if w >= wanted)

    def _chunk(self, demand: Demand, drafts: int) -> int:
        """Prompt tokens, as many as the latency goal leaves."""
        if self.goal is None or demand.chunk_tokens <= LEAST_CHUNK:
            return demand.chunk_tokens
        sizes = np.arange(LEAST_CHUNK, demand.chunk_tokens + 1)
        rows = len(demand.slots)
        work = self._work(demand, rows, 0, demand.chunk_tokens)._replace(pairs=1)  # the others are added below
        seconds = self.cost.curve(work, rows + drafts + sizes) + self.cost.attending(sizes * demand.chunk_context)
        return int(sizes[max(0, int(np.searchsorted(seconds, self.goal, side="right")) - 1)])

    def _work(self, demand: Demand, tokens: int, width: int, chunk: int) -> StepWork:
        return StepWork(len(demand.slots), tokens, demand.context + (demand.chunk_context if chunk else 0),
                        chunk * demand.chunk_context, width)

    # ----------------------------------------------------------------------------------------------------- probes
    def _is_probe_due(self, demand: Demand, width: int) -> bool:
        """Where nothing would be proposed: whether this step is to propose for a probe in the next one."""
        rows = len(demand.slots)
        if width or not rows or not self.widths[-1]:
            self._probe_in = PROBE_LEAST
            return False
        found = self.acceptance.best
        if found > self._believed + SURPRISE:
            self._probe_in = 0
        self._believed = min(self._believed, found)
        self._probe_in -= 1
        if self._drafted and not self.on_host:
            return False
        if self._saved >= EXPLORE_UNASKED and self.counters.steps % EXPLORE_EVERY == 0:
            plain = self.cost.seconds(self._work(demand, rows, 0, 0))
            self._saved -= self.cost.proposing(rows, self.widths[-1]) / plain
            return True
        return self._probe_in < 0

    def _probe_size(self, seconds: np.ndarray, offered: np.ndarray) -> int:
        """Drafts of a probe: one row's, or as many as add little to the step. None where the drafter has found hardly
        any lately: what it proposes now is seen without room for it in the next step."""
        cheap = int(np.searchsorted(seconds, seconds[0] * (1 + PROBE_EXTRA), side="right")) - 1
        n = min(max(self._drafted, cheap), len(seconds) - 1)
        return n if self.on_host or offered[n] >= LIKELY else 0

    def _probe_interval(self, rows: int, seconds: np.ndarray, n: int) -> int:
        """Steps until the next probe, so that all of them take their share of the time and no more."""
        extra = float(seconds[n] - seconds[0]) + self.cost.proposing(rows, self._drafted)
        return max(PROBE_LEAST, int(extra / (PROBE_SHARE * max(float(seconds[0]), 1e-9))))

    # ---------------------------------------------------------------------------------------------------- results
    def launched(self, seq: int, choice: Choice, caps: Mapping[int, int], tokens: int, draft_width: int,
                 absent: int) -> None:
        """The plan that came of a choice: q_cap of the rows that decode, by slot; tokens of all its rows at most; what
        it proposes; for how many of its rows' drafts it has no room: of the choice's `absent` ones those that it could
        leave out."""
        if not self.on_host:
            self._drafted = draft_width
        slots, n = np.fromiter(caps, np.int64, len(caps)), np.fromiter(caps.values(), np.int64, len(caps)) - 1
        allowed = np.full(self._n_slots, -1)
        allowed[slots] = n = np.minimum(n, choice.verifiable)
        work = choice.work._replace(tokens=tokens, draft_width=draft_width)
        self._sizes.ran(work)
        self._flights[seq] = _Flight(choice, work, allowed)
        self.counters.steps += 1
        self.counters.speculating_steps += bool(n.any())
        self.counters.absent_drafts += absent
        for width, rows in enumerate(np.bincount(n).tolist()):
            self.counters.chosen[width] += rows

    def ran(self, result: StepResult, seconds: float) -> None:
        """A step's result, and how long it took: from the end of the one before, or from its own launch."""
        flight = self._flights.pop(result.seq, None)
        if flight is None:
            return
        work, table = flight.work, result.counts().astype(np.int64)
        allowed = flight.allowed[table[:, ROW_SLOT]]
        rows = table[allowed >= 0]
        new = rows[:, ROW_NEW]
        emitted = int(new.sum())
        if len(rows):
            self.acceptance.note(rows[:, ROW_SLOT], rows[:, ROW_VERIFIED], np.maximum(new - 1, 0))
        if work.draft_width or self.on_host:
            self._note_offers(table, allowed, work.draft_width)
        if self.exact:
            work = work._replace(tokens=int(table[:, ROW_FED].sum()))
        counters = self.counters
        counters.timed_steps += 1
        counters.predicted_seconds += self.cost.observe(work, seconds)
        counters.measured_seconds += seconds
        if len(rows):
            plain = flight.choice.plain_seconds + max(0.0, emitted / len(rows) - 1) * flight.choice.round_seconds
            counters.plain_seconds += plain
            counters.regret_seconds += max(0.0, seconds - plain)

    def _note_offers(self, table: np.ndarray, allowed: np.ndarray, width: int) -> None:
        """What the drafter found: for the rows of this step at its end; on the host, for those that it verified.
        `table`: of each row, see StepResult.counts; `allowed` drafts of each row (-1: it does not decode)."""
        slots = table[:, ROW_SLOT]
        if self.on_host:
            asked, found, told = allowed, table[:, ROW_VERIFIED], allowed >= 0
        else:
            asked, found = np.full_like(slots, width), table[:, ROW_OFFERED]
            told = (table[:, ROW_NEW] > 0) & (table[:, ROW_FLAGS] & 1 == 0)
        self.acceptance.note_offers(slots[told], asked[told], found[told])


def _ranked(gains: np.ndarray) -> np.ndarray:
    """Flat places of [R, K] gains, best first. Of equal ones the earlier draft of a row comes first."""
    return np.argsort((np.arange(gains.shape[1]) * 1e-9 - gains).ravel())


def _cumulated(gains: np.ndarray, chances: np.ndarray, ranked: np.ndarray,
               spare: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of the n best drafts, n = 0 .. R * K, [R * K + 1] each: their gain, how many are offered on average, and the room
    that a step has for them, `spare` standard deviations more. Drafts of a row come and go together, more or less:
    their sum varies by half the width more than that of independent ones."""
    gain, offered, tokens = np.zeros((3, len(ranked) + 1))
    chances = chances.ravel()[ranked]
    np.cumsum(gains.ravel()[ranked], out=gain[1:])
    np.cumsum(chances, out=offered[1:])
    if spare:
        np.cumsum(chances * (1 - chances), out=tokens[1:])
        tokens = np.maximum.accumulate(offered + spare * np.sqrt(tokens * (1 + gains.shape[1]) / 2))
    else:
        tokens = offered
    return gain, offered, np.clip(np.ceil(tokens - 1e-6), 0, np.arange(len(tokens))).astype(np.int64)
