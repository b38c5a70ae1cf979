"""What runs in the next step: decide, then apply.

    admit     waiting turns take slots while the pool has room for them, in order of rank; those whose pages come from
              host memory once they have come, and the others do not wait for them
    decide    each running turn is a chunk row or a decode row; `share_budget` gives the caps
    reserve   pages up to hi + cap; where they are short: idle sessions, waiting turns, then running turns give way
    launch    caps go in flight; operations and rows become the plan

Who gives way is always the turn of the largest rank, so the smallest rank is never retracted and always ends. A turn
is admitted only where the pool has room for all its ids, those still to be fed by others, and some growth of everybody.
A turn that was retracted asks for at least what it gave back, while those that took it have grown: it returns when a
turn has ended, not before, so no two turns go on evicting each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from stretto.host.counters import Counters
from stretto.host.elastic import Choice, Demand
from stretto.host.faults import need
from stretto.host.lease import Reservation
from stretto.host.ledger import Ledger
from stretto.host.limits import HostDrafter, HostLimits
from stretto.host.ops import Ops
from stretto.host.queue import Queue
from stretto.host.share import first_come, share_budget
from stretto.host.slots import Slots
from stretto.host.turn import Turn
from stretto.wire import Goal, HostDraft, Seam, StepPlan

GENERATE = Goal.GENERATE
GROWTH = 16  # tokens that admission leaves to every turn


Rows = dict[Turn, tuple[Reservation, bool]]
"""The turns of a step: what each has reserved, so there is no row without pages; whether its row is a chunk."""


class Refusal(NamedTuple):
    """The head of the queue found no room, after so many turns had ended; with so many pages it looks again."""

    turn: Turn
    ended: int
    wanted: list[int]  # of each group


class Planner:
    """`reclaim_idle` takes the pages of one idle session and says whether it found one. `expire` ends a turn that the
    pool cannot hold any longer, `quarantine` one whose books are broken or whose drafter fails (strict: it raises)."""

    def __init__(self, limits: HostLimits, ledger: Ledger, slots: Slots, queue: Queue, ops: Ops, counters: Counters,
                 reclaim_idle: Callable[[], bool], expire: Callable[[Turn], None],
                 quarantine: Callable[[Turn, Exception], None]):
        self._limits, self._ledger, self._slots, self._queue = limits, ledger, slots, queue
        self._ops, self._counters = ops, counters
        self._reclaim_idle, self._expire, self._quarantine = reclaim_idle, expire, quarantine
        self._seq = 0
        self._arriving: dict[Turn, None] = {}  # admitted, they wait in the queue for pages that come from the host
        self._chunk_step_last = False
        self._refused: Refusal | None = None
        self._choice: Choice | None = None  # of the step that is planned

    def plan(self) -> StepPlan | None:
        """The next step, or None where no row can run (operations then wait for the next plan)."""
        for _ in range(2):  # a turn may have given way to a row that then did not come about: look once more
            self._admit()
            rows = self._reserve(*self._decide())
            if rows:
                return self._launch(rows)
        return None

    # -------------------------------------------------------------------------------------------------- admission
    def _admit(self) -> None:
        self._seat_arrived(waiting=False)
        claims: list[int] | None = None  # pages of each group that the turns admitted before will ask for
        while (turn := self._queue.first(self._arriving)) is not None and self._may_look(turn) \
                and self._slots.vacant > len(self._arriving):
            claims = self._claims() if claims is None else claims
            if not self._find_room(turn, claims):
                break
            assert turn.lease is not None
            claims = [a + b for a, b in zip(claims, self._claim(turn))]
            if self._ledger.arrived(turn.lease):
                self._seat(turn)
            else:
                self._arriving[turn] = None
        if not self._slots.running:  # nobody is held up by a step that waits for copies
            self._seat_arrived(waiting=True)

    def _seat_arrived(self, waiting: bool) -> None:
        """Seats the turns whose pages have come from the host; `waiting`: all of them, and the step waits."""
        for turn in list(self._arriving):
            if turn.lease is None:  # it ended, or gave way
                del self._arriving[turn]
            elif waiting or self._ledger.arrived(turn.lease):
                self._seat(turn)

    def _seat(self, turn: Turn) -> None:
        assert turn.lease is not None
        self._arriving.pop(turn, None)
        self._queue.remove(turn)
        counters = self._counters
        if turn.usage.retractions == 0:
            turn.usage.cached_tokens = min(turn.lease.lo, turn.job.prompt)
            if turn.job.request.arrival:
                turn.usage.queue_seconds = time.monotonic() - turn.job.request.arrival
            counters.prompt_tokens += turn.job.prompt
            counters.cached_tokens += turn.usage.cached_tokens
        counters.recomputed_tokens += max(0, turn.expected - turn.lease.lo)
        self._ledger.wait_for(turn.lease)
        seam = Seam.KEEP if self._slots.holds_seam(turn) else self._ledger.seam(turn.lease)
        self._slots.seat(turn, seam)
        if self._limits.elastic is not None:
            self._limits.elastic.seated(turn.slot, _who(turn), turn.job.request.sampling.temperature > 0)

    def _may_look(self, turn: Turn) -> bool:
        """A head that found no room looks again when a turn has ended, or the pages that it lacked have come back:
        a prefix match costs as much as the prompt is long."""
        refused = self._refused
        return (refused is None or refused.turn is not turn or not self._slots.running
                or refused.ended != self._slots.ended
                or all(self._ledger.available(g) >= n for g, n in enumerate(refused.wanted)))

    def _find_room(self, turn: Turn, claims: list[int]) -> bool:
        """True with a lease on the turn. A turn without room holds no pages that it did not hold before."""
        adopted = turn.lease is None
        if turn.lease is None:
            self._adopt(turn)
        while not self._has_room(turn, claims):
            if self._reclaim(keep=turn):
                continue
            if not self._slots.running and not any(other.lease for other in self._arriving):
                break  # it has the pool to itself
            lacking = [a + b - self._ledger.available(g) for g, (a, b) in enumerate(zip(self._claim(turn), claims))]
            if adopted:
                self._give_up(turn)
            wanted = [self._ledger.available(g) + n for g, n in enumerate(lacking)]
            self._refused = Refusal(turn, self._slots.ended, wanted)
            return False
        assert turn.lease is not None
        if not self._ledger.fetch(turn.lease):
            self._give_up(turn)
            self._adopt(turn, restore=False)
        return True

    def _adopt(self, turn: Turn, restore: bool = True) -> None:
        turn.lease = self._ledger.adopt(turn.tokens, turn.adoptable, turn.job.limit - 1, turn.job.request.cache_salt,
                                        turn.home, restore)
        turn.home = None

    def _give_up(self, turn: Turn) -> None:
        """The turn's pages may go; it will look for them again."""
        assert turn.lease is not None
        turn.home = self._ledger.give_up(turn.lease, turn.tokens, slot=max(turn.slot, 0))
        turn.lease = None

    def _has_room(self, turn: Turn, claims: list[int]) -> bool:
        own = self._claim(turn)
        return all(own[g] + claims[g] <= self._ledger.available(g) for g in range(len(claims)))

    def _claim(self, turn: Turn) -> list[int]:
        """Pages of each group that a turn lacks for all its ids and some growth."""
        lease = turn.lease
        assert lease is not None
        upto = min(lease.top, max(len(turn.tokens), lease.hi) + GROWTH) + turn.job.lookahead
        return self._ledger.needed(lease, upto)

    def _claims(self) -> list[int]:
        total = [0] * len(self._limits.pages)
        for turn in (*self._slots.running, *self._arriving):
            total = [a + b for a, b in zip(total, self._claim(turn))]
        return total

    # ----------------------------------------------------------------------------------------------------- decide
    def _decide(self) -> tuple[list[tuple[Turn, int]], list[tuple[Turn, int]]]:
        """(turn, cap) of the chunk rows and of the decode rows."""
        fills: list[tuple[Turn, int]] = []
        decoding: list[Turn] = []
        for turn in self._slots.running:
            lease = turn.lease
            assert lease is not None
            owed = turn.fill_to - lease.lo - lease.flying  # given ids that no launched step covers
            if owed > 0:
                fills.append((turn, owed))
            elif turn.job.goal == GENERATE and len(turn.tokens) + len(lease.flight) < turn.job.limit:
                # Every step in flight that samples emits at least one id: no row beyond what the limit can take.
                # (A chunk in flight samples nothing; counting it delays a row until its result, no more.)
                decoding.append(turn)
        if not self._limits.mixed and fills and decoding:
            self._chunk_step_last = not self._chunk_step_last
            if self._chunk_step_last:
                decoding = []
            else:
                fills = []
        fills.sort(key=lambda fill: fill[0].job.rank)
        prompts, widths = self._wishes(fills, decoding)
        chunk_caps, tail_caps = self._caps(prompts, widths)
        if sum(tail_caps) < len(widths) + sum(widths):  # the budget was short for some
            self._rotate(decoding, tail_caps)
        return ([(turn, cap) for (turn, _), cap in zip(fills, chunk_caps) if cap],
                [(turn, cap) for turn, cap in zip(decoding, tail_caps) if cap])

    def _wishes(self, fills: list[tuple[Turn, int]], decoding: list[Turn]) -> tuple[list[int], list[int]]:
        """Prompt tokens that each chunk row owes, and drafts that each decode row may have verified: all of them, or as
        many as pay in this step."""
        owed, widths = [n for _, n in fills], [turn.job.width for turn in decoding]
        if self._limits.elastic is None:
            return owed, widths
        chunks = [min(self._limits.chunk, n) for n in owed]
        self._choice = choice = self._limits.elastic.choose(Demand(
            slots=np.asarray([turn.slot for turn in decoding], dtype=np.int64),
            widths=np.asarray(widths, dtype=np.int64),
            fixed=np.asarray([turn.job.width_is_named if turn.grammar is None else self._is_fixed(turn)
                              for turn in decoding], bool),
            context=_context(decoding), chunk_tokens=min(sum(chunks), self._limits.budget - len(decoding)),
            chunk_context=_context(turn for turn, _ in fills) + sum(chunks)))
        return first_come(chunks, max(choice.chunk_tokens, 1)), choice.drafts

    def _is_fixed(self, turn: Turn) -> bool:
        """The request names its number of drafts, or its grammar knows what must follow."""
        if turn.job.width_is_named:
            return True
        return turn.grammar is not None and len(turn.grammar.forced()) > self._limits.depth

    def _rotate(self, decoding: list[Turn], caps: list[int]) -> None:
        """In the next step those come first that got nothing in this one, then those that got less than they want."""
        partly = [turn for turn, cap in zip(decoding, caps) if 0 < cap <= turn.job.width]
        self._slots.rotate(partly + [turn for turn, cap in zip(decoding, caps) if cap > turn.job.width])

    def _caps(self, fills: list[int], drafts: list[int]) -> tuple[list[int], list[int]]:
        limits = self._limits
        return share_budget(fills, drafts, chunk=limits.chunk, budget=limits.budget, policy=limits.cap_policy)

    # ---------------------------------------------------------------------------------------------------- reserve
    def _reserve(self, chunks: list[tuple[Turn, int]], tails: list[tuple[Turn, int]]) -> Rows:
        rows: Rows = {}
        reserve, drafter = self._ledger.reserve, self._limits.drafter
        for is_chunk, wanted in ((True, chunks), (False, tails)):
            for turn, cap in wanted:
                if turn.slot < 0:
                    continue  # retracted for an earlier row
                try:
                    assert turn.lease is not None
                    reservation = reserve(turn.lease, cap, turn.job.lookahead) or self._retract_for(turn, cap, rows)
                    if reservation is None:
                        continue
                    if reservation.mapped:
                        self._ops.map(turn.slot, reservation.mapped)
                    if (drafter is not None or turn.grammar is not None) and not is_chunk:
                        self._propose_for(turn, reservation.q_cap, drafter)
                    rows[turn] = reservation, is_chunk
                except Exception as cause:  # whatever it is, it is of this request
                    self._quarantine(turn, cause)
        return rows

    def _propose_for(self, turn: Turn, q_cap: int, drafter: HostDrafter | None) -> None:
        if q_cap > 1 and len(turn.tokens) > turn.job.prompt:
            self._propose(drafter, turn)

    def _propose(self, drafter: HostDrafter | None, turn: Turn) -> None:
        """A proposal of the host arrives behind up to `depth` steps of K + 1 ids: it must be that much longer. What a
        grammar forces is the best one; it stands where a drafter of the device has offered something, too."""
        width, depth = turn.job.width, self._limits.depth
        longest = width + (width + 1) * depth
        ids = turn.grammar.forced() if turn.grammar is not None else []
        if len(ids) > depth:  # else all of it will be known when it arrives
            self._counters.forced_drafts += 1
        elif drafter is not None:
            ids = drafter(turn.tokens, longest)
        else:
            return
        if ids := ids[:longest]:
            self._counters.host_drafts += 1
            self._ops.draft(HostDraft(turn.slot, turn.epoch, len(turn.tokens), ids))

    def _retract_for(self, turn: Turn, cap: int, rows: Rows) -> Reservation | None:
        """Pages are short: others give way. None where the turn itself gave way, waits for a step in flight, or ended
        for want of pages."""
        lease, lookahead = turn.lease, turn.job.lookahead
        assert lease is not None
        while True:
            if not self._reclaim():
                if len(self._slots.running) == 1:
                    return self._reserve_alone(turn, cap)
                victim = max(self._slots.running, key=lambda t: t.job.rank)
                rows.pop(victim, None)
                self._retract(victim)
                if victim is turn:
                    return None
            reservation = self._ledger.reserve(lease, cap, lookahead)
            if reservation is not None:
                return reservation

    def _reserve_alone(self, turn: Turn, cap: int) -> Reservation | None:
        """The pool holds nothing else. Steps in flight may slide a window; a smaller chunk may fit; else it is full."""
        lease = turn.lease
        assert lease is not None
        if lease.flight:
            return None
        while cap > 1:
            cap //= 2
            reservation = self._ledger.reserve(lease, cap, turn.job.lookahead)
            if reservation is not None:
                return reservation
        self._expire(turn)
        return None

    def _reclaim(self, keep: Turn | None = None) -> bool:
        """A pin is a preference: idle sessions first, then waiting turns that hold pages, the last to run first."""
        if not self._reclaim_idle():
            turn = self._queue.last_with_lease(after=keep)
            if turn is None:
                return False
            self._give_up(turn)
        self._counters.reclaimed += 1
        return True

    def _retract(self, turn: Turn) -> None:
        """Back to the queue with its ids alone; what it had fed stays in the prefix tree while there is room."""
        lease = turn.lease
        assert lease is not None
        self._counters.retractions += 1
        turn.usage.retractions += 1
        turn.expected = lease.lo
        self._give_up(turn)
        self._slots.leave(turn)
        self._queue.push(turn)

    # ----------------------------------------------------------------------------------------------------- launch
    def _launch(self, rows: Rows) -> StepPlan:
        wire_rows: list[tuple[int, int, int]] = []
        caps: dict[int, int] = {}  # of decode rows, by slot
        planned = widest = 0
        masked = processed = False
        for turn, (reservation, is_chunk) in rows.items():
            job, slot, cap = turn.job, turn.slot, reservation.q_cap
            self._ledger.launch(reservation, self._seq)
            wire_rows.append((slot, turn.epoch, cap))
            planned += cap
            if not is_chunk:
                caps[slot] = cap
            if job.width > widest:
                widest = job.width
            if turn.grammar is not None:
                masked = masked or _is_masked(turn)
            processed = processed or job.processed
        need(planned <= self._limits.budget, f"a step of {planned} tokens; the budget is {self._limits.budget}")
        self._count(planned, len(wire_rows), caps)
        self._counters.processor_steps += processed
        self._counters.masked_steps += masked
        plan = self._ops.take(self._seq, self._draft_width(widest), wire_rows)
        self._ledger.save_ahead()
        plan.late_mask = masked
        if self._choice is not None:
            self._bound(plan, planned, sum(caps.values()) - len(caps))
        if self._limits.elastic is not None and self._choice is not None:
            tokens = plan.tokens or planned
            self._limits.elastic.launched(self._seq, self._choice, caps, tokens, plan.draft_width, planned - tokens)
        self._seq += 1
        return plan

    def _bound(self, plan: StepPlan, planned: int, drafts: int) -> None:
        """Of `planned` tokens, with so many drafts among them at most: how many the step has room for."""
        assert self._choice is not None
        if absent := min(self._choice.absent, drafts):
            plan.tokens = planned - absent
        plan.least = self._choice.least

    def _draft_width(self, widest: int) -> int:
        """Drafts that the device proposes at the end of the step; `widest`: the most that one of its rows may have."""
        if self._limits.drafter is not None:
            return 0
        return widest if self._choice is None else min(widest, self._choice.draft_width)

    def _count(self, planned: int, rows: int, tails: dict[int, int]) -> None:
        """A step of so many tokens in so many rows; `tails`: q_cap of those that decode."""
        counters, n_tails, tail_tokens = self._counters, len(tails), sum(tails.values())
        counters.steps += 1
        counters.planned_tokens += planned
        counters.chunk_rows += rows - n_tails
        counters.chunk_tokens += planned - tail_tokens
        counters.decode_rows += n_tails
        if n_tails and rows > n_tails:
            counters.mixed_steps += 1
            counters.tail_rows += n_tails
            counters.tail_tokens += tail_tokens


def _who(turn: Turn) -> tuple[str, int]:
    """Whose drafts are judged alike: of a session from turn to turn, of a retracted request when it is back."""
    return (turn.session.sid, -1) if turn.session is not None else (turn.job.request.rid, turn.job.index)


def _context(turns: Iterable[Turn]) -> int:
    """KV cells that they read."""
    return sum(turn.lease.lo for turn in turns if turn.lease is not None)


def _is_masked(turn: Turn) -> bool:
    """Of a turn whose row is launched: it has a grammar, and the row samples."""
    lease = turn.lease
    return turn.grammar is not None and lease is not None and lease.lo + lease.flying >= turn.fill_to
