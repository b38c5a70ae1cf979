"""The host half of the engine, whole: requests in, plans out, results in, outputs out.

    loop:   submit / abort          at any time between steps
            plan()      -> StepPlan    sent to the device; up to `depth` plans may be in flight
            process()   <- StepResult  in order, one for each plan
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from stretto.host.counters import Counters
from stretto.host.faults import HostFault
from stretto.host.intake import Intake
from stretto.host.ledger import Ledger
from stretto.host.limits import HostLimits
from stretto.host.live import Live
from stretto.host.ops import Ops
from stretto.host.planner import Planner
from stretto.host.queue import Queue
from stretto.host.results import Results
from stretto.host.session import Sessions, not_found
from stretto.host.slots import Slots
from stretto.host.turn import Turn
from stretto.params import SamplingParams
from stretto.protocol import (
    Action,
    BranchSession,
    CloseSession,
    FlushCache,
    OpenSession,
    Output,
    Request,
    RequestError,
    RewindSession,
    SessionInfo,
)
from stretto.text.stream import TextStream
from stretto.wire import StepPlan, StepResult

logger = logging.getLogger(__name__)


class HostHalf:
    """Not thread-safe: one loop owns it. Raises HostFault (strict) where a check of the books fails."""

    def __init__(self, limits: HostLimits, text_stream: Callable[[SamplingParams], TextStream] | None = None):
        self.limits = limits
        self.counters = Counters()
        self._ops = Ops()
        self.ledger = Ledger(limits, self._ops)
        self.slots = Slots(limits.max_slots, self._ops)
        self.queue, self._live = Queue(), Live()
        self._intake = Intake(limits, text_stream)
        self.sessions = Sessions(limits, self.ledger, self.slots, self.queue, self._live, self._intake, self._ops,
                                 self.counters)
        self.results = Results(limits, self.ledger, self.slots, self.queue, self._live, self._intake, self.sessions,
                               self._ops, self.counters)
        self.planner = Planner(limits, self.ledger, self.slots, self.queue, self._ops, self.counters,
                               self.sessions.reclaim, self._expire, self._quarantine)
        self._unsent: list[Output] = []  # of turns that ended while a step was planned

    def submit(self, request: Request) -> None:
        """Raises RequestError where the request can never run, or its id is live."""
        if request.rid in self._live or self.sessions.waits(request.rid):
            raise RequestError(f"request {request.rid!r} is live already", param="rid")
        if request.session is not None:
            self.sessions.submit(request)
            self.counters.requests += 1
            return
        turn = self._intake.turn(request, request.tokens)
        turn.usage.prompt_tokens = turn.job.prompt
        self.counters.requests += 1
        self._live.add(turn)
        self.queue.push(turn)

    def abort(self, rid: str, received: int | None = None) -> list[Output]:
        """The last outputs of the request's live choices; [] where no such request is live. Nothing follows them.
        `received`: generated ids that the client surely has; None: all that were delivered."""
        return self.results.abort(rid, received)

    def manage(self, action: Action) -> tuple[list[SessionInfo], list[Output]]:
        """(the sessions that the action is about, last outputs of turns that it ended). Raises RequestError."""
        sessions = self.sessions
        try:
            if isinstance(action, OpenSession):
                sessions.open(action.sid, action.cache_salt, action.ttl, action.capacity)
            elif isinstance(action, BranchSession):
                sessions.branch(action.sid, action.new_sid, action.at)
                return sessions.info(action.new_sid), []
            elif isinstance(action, RewindSession):
                sessions.rewind(action.sid, action.at)
            elif isinstance(action, CloseSession):
                return self._close(action)
            elif isinstance(action, FlushCache):
                self.flush_cache()
                return [], []
            return sessions.info(action.sid), []
        except KeyError as e:
            raise not_found(e.args[0]) from None

    def _close(self, action: CloseSession) -> tuple[list[SessionInfo], list[Output]]:
        """The session as it was left: "closing" while a turn runs."""
        outputs: list[Output] = []
        before = self.sessions.info(action.sid)
        for rid in self.sessions.turns_of(action.sid) if action.abort else ():
            outputs += self.abort(rid)
        self.sessions.close(action.sid)
        left = action.sid in self.sessions
        return self.sessions.info(action.sid) if left else before, outputs

    def tick(self) -> None:
        """Called now and then, also when idle: closes sessions that were idle for too long."""
        self.sessions.expire()

    def plan(self) -> StepPlan | None:
        """The next step; None where nothing can run before a result or a request comes.

        Call `take_outputs` after it: a turn may end here, for want of pages."""
        plan = self.planner.plan()
        self._check()
        return plan

    def process(self, result: StepResult) -> list[Output]:
        outputs = self.take_outputs() + self.results.process(result)
        self._check()
        return outputs

    def _check(self) -> None:
        """The pool equation. A server counts a broken one, and says so once."""
        try:
            self.ledger.check()
        except HostFault as fault:
            if self.limits.strict:
                raise
            if not self.counters.broken_books:
                logger.error("%s", fault)
            self.counters.broken_books += 1

    def take_outputs(self) -> list[Output]:
        outputs, self._unsent = self._unsent, []
        return outputs

    def _expire(self, turn: Turn) -> None:
        self._unsent += self.results.expire(turn)

    def _quarantine(self, turn: Turn, cause: Exception) -> None:
        self._unsent += self.results.quarantine(turn, cause)

    @property
    def has_work(self) -> bool:
        """Turns wait or run, or an output was not taken."""
        return bool(self.slots.running or self.queue or self._unsent)

    def flush_cache(self) -> int:
        """Frees every page that no turn uses; returns how many. Idle sessions keep their ids."""
        self.sessions.reclaim_all()
        return self.ledger.flush()

    def audit(self) -> None:
        """Page by page; raises HostFault. O(pages): when idle, and in tests."""
        turns = list(self._live)
        leases = [turn.lease for turn in turns if turn.lease is not None]
        self.ledger.audit([*leases, *self.sessions.leases()])

    def stats(self) -> tuple[dict[str, float], dict[str, float]]:
        """(counters, gauges)."""
        gauges: dict[str, float] = {"running": len(self.slots.running), "waiting": len(self.queue),
                                    "sessions": len(self.sessions), "session_tokens": self.sessions.held_tokens,
                                    "session_cached_tokens": sum(lease.lo for lease in self.sessions.leases())}
        for g, pages in enumerate(self.limits.pages):
            free, loose = len(self.ledger.free[g]), self.ledger.tree.loose[g]
            gauges |= {f"pages_total_{g}": pages, f"pages_free_{g}": free, f"pages_evictable_{g}": loose,
                       f"pages_used_{g}": pages - free - loose}
        return self.counters.as_dict(), gauges
