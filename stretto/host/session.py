"""Sessions: ids that stay, and a lease that may.

    idle ----append----> running ----end of turn----> idle        the lease stays with the session
                            |                           |
                     append: waits           pool short: reclaimed; the ids stay, KV is computed again
                            v
               end of turn: in place, same slot and pages, a new epoch

A session's history is its finished turns. A turn that was aborted, or ended with an error, leaves no trace in it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from stretto.host.counters import Counters
from stretto.host.intake import Intake
from stretto.host.ledger import Lease, Ledger
from stretto.host.live import Live
from stretto.host.ops import Ops
from stretto.host.queue import Queue
from stretto.host.slots import Slots
from stretto.host.turn import ERROR, Turn
from stretto.protocol import Output, Request, RequestError
from stretto.wire import Seam


@dataclass(eq=False, slots=True)
class Session:
    sid: str
    cache_salt: str
    tokens: list[int] = field(default_factory=list)  # of finished turns
    lease: Lease | None = None  # while idle, unless it was reclaimed
    turn: Turn | None = None
    queued: Request | None = None  # the next turn's request, which came before this one ended


class Sessions:
    """Raises KeyError for a session that is not open, RequestError for what cannot be done."""

    def __init__(self, ledger: Ledger, slots: Slots, queue: Queue, live: Live, intake: Intake, ops: Ops,
                 counters: Counters):
        self._ledger, self._slots, self._queue, self._live = ledger, slots, queue, live
        self._intake, self._ops, self._counters = intake, ops, counters
        self._open: dict[str, Session] = {}
        self._waiting: dict[str, Session] = {}  # by the id of the request that waits behind a live turn
        self._idle: dict[Session, None] = {}  # with a lease, least recently used first

    # ------------------------------------------------------------------------------------------------------ verbs
    def open(self, sid: str, cache_salt: str = "") -> Session:
        if sid in self._open:
            raise RequestError(f"session {sid!r} is open already", param="session")
        session = self._open[sid] = Session(sid, cache_salt)
        return session

    def append(self, sid: str, request: Request) -> None:
        """The session's next turn: `request.tokens` follow its history. Waits, one at most, behind a live turn."""
        session = self._open[sid]
        if request.sampling.n != 1 or request.cache_salt != session.cache_salt:
            raise RequestError("a session's turn has n 1 and the session's cache_salt", param="session")
        if request.rid in self._live or self.waits(request.rid):
            raise RequestError(f"request {request.rid!r} is live already", param="rid")
        if session.turn is None:
            self._start(session, request)
        elif session.queued is None:
            session.queued = request
            self._waiting[request.rid] = session
        else:
            raise RequestError(f"session {sid!r} has a live turn and one that waits", param="session")

    def branch(self, sid: str, new_sid: str, n: int) -> Session:
        """A new session on the first `n` ids of an idle one; shares its pages where it still has them."""
        session = self._open[sid]
        if session.turn is not None or not 1 <= n <= len(session.tokens):
            raise RequestError(f"session {sid!r} cannot branch at {n}: it must be idle and have that many ids ("
                               f"{len(session.tokens)})", param="session")
        child = self.open(new_sid, session.cache_salt)
        child.tokens = session.tokens[:n]
        if session.lease is not None and n <= session.lease.lo:
            child.lease, _ = self._ledger.fork(session.lease, session.tokens, n, session.lease.top)
        self._counters.branches += 1
        if child.lease is not None:
            self._idle[child] = None
        return child

    def rewind(self, sid: str, n: int) -> None:
        """The history's first `n` ids stay; of an idle session."""
        session = self._open[sid]
        if session.turn is not None or not 0 <= n <= len(session.tokens):
            raise RequestError(f"session {sid!r} cannot be rewound to {n}: it must be idle and have that many ids",
                               param="session")
        session.tokens = session.tokens[:n]
        if session.lease is not None and self._ledger.truncate(session.lease, n) == 0:
            self._give_up(session)  # the next turn looks in the prefix tree

    def close(self, sid: str) -> None:
        """Of an idle session; its live turn is aborted first."""
        session = self._open[sid]
        if session.turn is not None:
            raise RequestError(f"session {sid!r} has a live turn: abort it first", param="session")
        del self._open[sid]
        self._give_up(session)

    def get(self, sid: str) -> Session:
        return self._open[sid]

    # --------------------------------------------------------------------------------------------- from the engine
    def waits(self, rid: str) -> bool:
        return rid in self._waiting

    def leases(self) -> list[Lease]:
        return [s.lease for s in self._idle if s.lease is not None]

    def reclaim(self) -> bool:
        """Takes the lease of the session that has been idle longest. False where no idle session has one."""
        session = next(iter(self._idle), None)
        if session is None:
            return False
        self._give_up(session)
        return True

    def ended(self, turn: Turn, exact: bool) -> list[Output]:
        """A turn finished, its lease settled, its slot still taken. `exact`: the device ended it, so the slot still
        holds the taps of its last cell."""
        session, lease = turn.session, turn.lease
        assert session is not None and lease is not None
        session.tokens, session.turn = list(turn.tokens), None
        outputs: list[Output] = []
        following = self._following(session, outputs)
        if following is None:
            self._slots.leave(turn)
            self._ledger.publish(lease, turn.tokens)
            self._ledger.slide(lease)
            self._ledger.shrink(lease)
            session.lease, turn.lease = lease, None
            self._idle[session] = None
        else:
            self._continue_in_place(session, turn, following, exact)
        return outputs

    def aborted(self, turn: Turn) -> list[Output]:
        """A turn ended without a trace, its slot and lease gone. The one that waits behind it starts."""
        session = turn.session
        assert session is not None
        session.turn = None
        outputs: list[Output] = []
        following = self._following(session, outputs)
        if following is not None:
            self._enter(session, following)
            self._queue.push(following)
        return outputs

    def cancel(self, rid: str) -> bool:
        """Drops a request that waits behind a live turn."""
        session = self._waiting.pop(rid, None)
        if session is None:
            return False
        session.queued = None
        return True

    # ----------------------------------------------------------------------------------------------------- inside
    def _start(self, session: Session, request: Request) -> None:
        turn = self._intake.turn(request, session.tokens + request.tokens, scores_from=len(session.tokens))
        if session.lease is not None:
            del self._idle[session]
            turn.lease, session.lease = session.lease, None
            self._ledger.limit(turn.lease, turn.job.limit - 1)
        self._enter(session, turn)
        self._queue.push(turn)

    def _following(self, session: Session, outputs: list[Output]) -> Turn | None:
        request, session.queued = session.queued, None
        if request is None:
            return None
        del self._waiting[request.rid]
        try:
            return self._intake.turn(request, session.tokens + request.tokens, scores_from=len(session.tokens))
        except RequestError as error:
            outputs.append(Output(request.rid, 0, [], "", ERROR, error=str(error)))
            return None

    def _continue_in_place(self, session: Session, old: Turn, new: Turn, exact: bool) -> None:
        """What is in flight for the old epoch is ignored on both sides."""
        lease = old.lease
        assert lease is not None
        self._ops.map(old.slot, self._ledger.publish(lease, old.tokens))
        self._ops.map(old.slot, self._ledger.slide(lease))
        self._ledger.limit(lease, new.job.limit - 1)
        new.lease, old.lease = lease, None
        new.usage.cached_tokens = lease.lo
        seam = Seam.KEEP if exact else self._ledger.seam(lease)
        self._slots.reseat(old, new, seam, log_from=len(old.tokens))
        self._enter(session, new)
        self._counters.in_place_turns += 1

    def _enter(self, session: Session, turn: Turn) -> None:
        turn.session, session.turn = session, turn
        turn.usage.prompt_tokens = turn.job.prompt
        self._live.add(turn)
        self._counters.session_turns += 1

    def _give_up(self, session: Session) -> None:
        self._idle.pop(session, None)
        if session.lease is not None:
            self._ledger.publish(session.lease, session.tokens)
            self._ledger.drop(session.lease)
            session.lease = None
