"""Sessions: ids that stay, and a lease that may.

    idle ----turn----> running ----finished----> idle        the turn is history; the lease stays with the session
      |                   | \\-----aborted------> idle        rolled back, or what the client received stays
      |                   |  \\----failed-------> idle        rolled back
      |                   turn: waits, if there is room      (a retracted turn is running: it waits for pages)
      |                   close: closing, until it has ended
      pool short: the lease goes, the ids stay, KV is computed again
      idle for `ttl` seconds, or closed: gone

A session's history is its finished turns. How a turn ended is said by whoever ends it, never inferred. Expiry is
decided here alone, when a verb or a tick looks at the clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import log2
from typing import Literal, NamedTuple

import msgspec

from stretto.host.counters import Counters
from stretto.host.history import History, Past, common
from stretto.host.intake import Intake
from stretto.host.lease import Lease
from stretto.host.ledger import Ledger
from stretto.host.limits import HostLimits
from stretto.host.live import Live
from stretto.host.ops import Ops
from stretto.host.prefix import Node
from stretto.host.queue import Queue
from stretto.host.slots import Slots
from stretto.host.turn import ERROR, Turn
from stretto.protocol import Output, Request, RequestError, SessionInfo, SessionTurn
from stretto.wire import Seam

FINISHED, ROLLED_BACK, KEPT, FAILED = "finished", "rolled_back", "kept", "failed"  # how a turn ended

BESIDE = ("session_busy", "session_closing", "session_salt", "too_many_sessions")  # no reason not to answer a request
MOST_WORTH = 8.0  # of a session, where 1 is one that shares nothing
MAX_GONE = 1 << 16  # ids remembered of sessions that expired or made room, so that no client starts anew unknowingly


class Waiting(NamedTuple):
    """A turn behind the live one, and its place among all requests, which it has from the time when it came."""

    request: Request
    serial: int


class Made(NamedTuple):
    turn: Turn
    past: Past | None  # what it follows
    kept: int  # ids of its prompt that are history


@dataclass(eq=False, slots=True)
class Session:
    sid: str
    cache_salt: str
    ttl: float  # seconds
    capacity: int | None
    used: float  # when, by the host's clock
    history: History = field(default_factory=History)
    lease: Lease | None = None  # while idle, unless it was reclaimed
    home: Node | None = None  # where its pages are once they were reclaimed, of ledgers that share none
    rank: tuple[float, int] = (0.0, 0)  # of its lease: the smallest is reclaimed first
    proved: int = 0  # ids of the history whose KV was computed, whether or not it is still held
    turn: Turn | None = None
    base: tuple[Past | None, int] = (None, 0)  # of the live turn: what it follows, and how many ids of it
    waiting: deque[Waiting] = field(default_factory=deque)
    closing: bool = False
    keeps: bool = False  # its history is here alone: some turn was appended
    turns: int = 0
    last_turn: str = "none"

    @property
    def tokens(self) -> list[int]:
        """Of finished turns."""
        return self.history.tokens

    @property
    def queued(self) -> Request | None:
        return self.waiting[0].request if self.waiting else None


class Sessions:
    """Raises KeyError for a session that is not open, RequestError for what cannot be done."""

    def __init__(self, limits: HostLimits, ledger: Ledger, slots: Slots, queue: Queue, live: Live, intake: Intake,
                 ops: Ops, counters: Counters):
        self._limits, self._ledger, self._slots, self._queue, self._live = limits, ledger, slots, queue, live
        self._intake, self._ops, self._counters = intake, ops, counters
        self._open: dict[str, Session] = {}  # least recently used first
        self._waiting: dict[str, Session] = {}  # by the id of the request that waits behind a live turn
        self._idle: dict[Session, None] = {}  # with a lease
        self._floor, self._clock = 0.0, count()  # of ranks
        self._gone: dict[str, None] = {}  # ids of sessions that no client closed, the oldest first

    # ------------------------------------------------------------------------------------------------------ verbs
    def open(self, sid: str, cache_salt: str = "", ttl: float | None = None, capacity: int | None = None) -> Session:
        self.expire()
        if sid in self._open:
            raise RequestError(f"session {sid!r} is open already", param="session_id", code="session_exists")
        if len(self._open) >= self._limits.max_sessions:
            self._displace()
        self._gone.pop(sid, None)
        session = Session(sid, cache_salt, self._limits.session_ttl if ttl is None else ttl, capacity,
                          self._limits.clock())
        self._open[sid] = session
        self._counters.sessions_opened += 1
        return session

    def submit(self, request: Request) -> bool:
        """The turn that `request.session` describes. A turn that is refused leaves everything as it was. False: the
        session has no room for it, and it shall run beside."""
        try:
            self._submit(request)
        except RequestError as error:
            if request.session is None or request.session.on_busy != "beside" or error.code not in BESIDE:
                raise
            self._counters.turns_beside += 1
            return False
        return True

    def _submit(self, request: Request) -> None:
        order = request.session
        assert order is not None
        self.expire()
        self._check(request)
        session, opened = self._open.get(order.sid), False
        if session is None or order.branch_from is not None:
            session, opened = self._open_for(request, order), True
        try:
            self._take(session, request)
        except RequestError:
            if opened:
                self._remove(session)
            raise

    def append(self, sid: str, request: Request) -> None:
        """The session's next turn: `request.tokens` follow its history."""
        self.get(sid)
        self.submit(msgspec.structs.replace(request, session=SessionTurn(sid=sid, mode="append")))

    def branch(self, sid: str, new_sid: str, n: int | None = None) -> Session:
        """A new session on the first `n` ids of an idle one (None: all); shares its pages where it still has them."""
        session = self._open[sid]
        n = len(session.tokens) if n is None else n
        _need_idle(session, "branched")
        if not session.tokens:
            raise RequestError(f"session {sid!r} has no history to branch yet: open a new one", param="branch_from")
        if not 1 <= n <= len(session.tokens):
            raise RequestError(f"offset is {n}; session {sid!r} can be branched at 1..{len(session.tokens)}, the number"
                               " of its tokens", param="offset")
        child = self.open(new_sid, session.cache_salt, session.ttl, session.capacity)
        child.history, child.keeps = session.history.branch(n), session.keeps
        held = min(n, session.lease.lo) if session.lease is not None else 0
        if session.lease is not None and held:
            child.lease, _ = self._ledger.fork(session.lease, session.tokens, held, session.lease.top)
        if session.home is not None:
            child.home = self._ledger.join(session.home)
        child.proved = min(n, session.proved)
        self._counters.branches += 1
        if child.lease is not None:
            self._keep_idle(child, child.lease)
        return child

    def rewind(self, sid: str, n: int) -> None:
        """The history's first `n` ids stay; of an idle session."""
        session = self._open[sid]
        _need_idle(session, "rewound")
        if not 0 <= n <= len(session.tokens):
            raise RequestError(f"offset is {n}; session {sid!r} can be rewound to 0..{len(session.tokens)}, the number"
                               " of its tokens", param="offset")
        tokens = session.tokens
        session.history.cut(n)
        session.proved = min(session.proved, n)
        self._touch(session)
        if session.lease is not None:
            del self._idle[session]
            old, session.lease = session.lease, None
            lease, session.home = self._cut(old, tokens, n)
            if lease is not None:
                self._keep_idle(session, lease)

    def close(self, sid: str) -> None:
        """An idle session goes at once, one with a live turn when that turn, and those that wait, have ended."""
        session = self._open[sid]
        session.closing = True
        if session.turn is None:
            self._remove(session)

    def get(self, sid: str) -> Session:
        return self._open[sid]

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Session]:
        """Least recently used first."""
        return iter(list(self._open.values()))

    def now(self) -> float:
        return self._limits.clock()

    @property
    def room(self) -> int:
        """Sessions that can be opened without one having to go."""
        return max(0, self._limits.max_sessions - len(self._open))

    def take_back(self, session: Session) -> None:
        """One that was saved before the engine started; there must be room for it."""
        self._open[session.sid] = session

    def __contains__(self, sid: str) -> bool:
        return sid in self._open

    @property
    def held_tokens(self) -> int:
        """Ids of all histories."""
        return sum(len(session.tokens) for session in self._open.values())

    def info(self, sid: str | None = None) -> list[SessionInfo]:
        """Of one session, or of all, most recently used first."""
        self.expire()
        now = self._limits.clock()
        chosen = reversed(self._open.values()) if sid is None else [self._open[sid]]
        return [self._info(session, now) for session in chosen]

    def shown(self, session: Session) -> SessionInfo:
        """Of one that was just opened; however short it may live, it does not expire here."""
        return self._info(session, self._limits.clock())

    def turns_of(self, sid: str) -> list[str]:
        """Ids of the requests that wait behind the live turn, last first, then of the live one."""
        session = self._open[sid]
        live = [session.turn.job.request.rid] if session.turn is not None else []
        return [one.request.rid for one in reversed(session.waiting)] + live

    # --------------------------------------------------------------------------------------------- from the engine
    def waits(self, rid: str) -> bool:
        return rid in self._waiting

    def leases(self) -> list[Lease]:
        return [s.lease for s in self._idle if s.lease is not None]

    def reclaim(self) -> bool:
        """Takes the lease of the least valuable idle session: its full pages go into the prefix tree, where they are
        evicted one by one, so no more is lost than is needed. False where no idle session has one."""
        session = min(self._idle, key=lambda s: s.rank, default=None)
        if session is None or session.lease is None:
            return False
        del self._idle[session]
        self._floor = session.rank[0]
        session.home, session.lease = self._ledger.give_up(session.lease, session.tokens), None
        return True

    def forget(self, leases: Sequence[Lease]) -> None:
        """Leases that were set aside: their sessions keep their ids."""
        for session in [session for session in self._idle if session.lease in leases]:
            session.lease = None
            del self._idle[session]

    def reclaim_all(self) -> None:
        while self.reclaim():
            pass

    def expire(self) -> None:
        """Closes the sessions that have been idle for longer than they may."""
        now = self._limits.clock()
        late = [s for s in self._open.values() if s.turn is None and now - s.used > s.ttl]
        for session in late:
            self._counters.sessions_expired += 1
            self._lose(session)

    def ended(self, turn: Turn, exact: bool) -> list[Output]:
        """A turn finished, its lease settled, its slot still taken. `exact`: the device ended it, so the slot still
        holds the taps of its last cell."""
        session, lease = turn.session, turn.lease
        assert session is not None and lease is not None
        self._commit(session, turn, FINISHED)
        session.proved = lease.lo
        following = self._made_in_place(session, exact)
        if following is not None and self._continue_in_place(session, turn, following, exact):
            return []
        slot = turn.slot
        self._slots.leave(turn, returns=True, exact=exact)
        turn.lease = None
        self._ledger.rest(lease, slot, exact)
        if not lease.lo:  # it holds nothing from where it could go on
            session.home, lease = self._ledger.give_up(lease, session.tokens), None
        self._park(session, lease)
        return self._next(session, following)

    def finished_without_pages(self, turn: Turn) -> list[Output]:
        """The pool holds no more of a turn, whose lease is gone."""
        session = turn.session
        assert session is not None
        self._commit(session, turn, FINISHED)
        session.proved, session.home, turn.home = 0, turn.home, None
        return self._next(session)

    def aborted(self, turn: Turn, received: int | None) -> list[Output]:
        """A turn was ended by its client, its slot gone, its lease, if any, still there. `received`: generated ids
        that the client surely has; None: all that were delivered."""
        session = turn.session
        assert session is not None
        order, lease, whole = turn.job.request.session, turn.lease, list(turn.tokens)
        generated = len(turn.tokens) - turn.job.prompt
        stays = generated if received is None else min(received, generated)
        if order is not None and order.on_disconnect == "keep" and stays > 0:
            del turn.tokens[turn.job.prompt + stays :]
            self._commit(session, turn, KEPT)
            self._counters.turns_kept += 1
        else:
            self._roll_back(session, ROLLED_BACK)
        turn.lease, session.home, turn.home = None, turn.home, None
        if lease is not None:
            self._ledger.settle(lease, len(whole))
            self._ledger.rest(lease, slot=0)
            lease, session.home = self._cut(lease, whole, common(session.tokens, whole))
            self._park(session, lease)
        return self._next(session)

    def failed(self, turn: Turn) -> list[Output]:
        """A turn was ended by an error, its slot and lease gone."""
        session = turn.session
        assert session is not None
        self._roll_back(session, FAILED)
        session.home, turn.home = turn.home, None
        return self._next(session)

    def cancel(self, rid: str) -> bool:
        """Drops a request that waits behind a live turn."""
        session = self._waiting.pop(rid, None)
        if session is None:
            return False
        session.waiting = deque(one for one in session.waiting if one.request.rid != rid)
        return True

    # ------------------------------------------------------------------------------------------------ turns begin
    def _check(self, request: Request) -> None:
        if request.rid in self._live or self.waits(request.rid):
            raise RequestError(f"request {request.rid!r} is live already", param="rid")
        if request.sampling.n != 1:
            raise RequestError(f"n is {request.sampling.n}; a session's turn has n 1, since its answer becomes the"
                               " history: branch the session for other answers", param="n")

    def _open_for(self, request: Request, order: SessionTurn) -> Session:
        if order.branch_from is not None:
            if order.branch_from not in self._open:
                raise not_found(order.branch_from)
            return self.branch(order.branch_from, order.sid)
        if not order.create or (order.mode == "append" and order.sid in self._gone and not order.replace):
            raise not_found(order.sid)
        return self.open(order.sid, request.cache_salt)

    def _take(self, session: Session, request: Request) -> None:
        order = request.session
        assert order is not None
        if request.cache_salt != session.cache_salt:
            raise RequestError(f"session {session.sid!r} was opened with another cache_salt or adapter: send those"
                               " with every turn", param="cache_salt", code="session_salt")
        if session.closing:
            raise RequestError(f"session {session.sid!r} is closing and takes no more turns", param="session_id",
                               code="session_closing")
        if session.turn is None:
            self._start(session, self._make(session, Waiting(request, self._intake.serial())))
        else:
            self._wait(session, request, order)
        session.closing |= order.final
        session.keeps |= order.mode == "append"
        self._touch(session)

    def _wait(self, session: Session, request: Request, order: SessionTurn) -> None:
        if order.on_busy != "wait" or len(session.waiting) >= self._limits.session_queue:
            self._counters.sessions_busy += 1
            raise RequestError(f"session {session.sid!r} has a live turn and {len(session.waiting)} that wait (the"
                               f" limit is {self._limits.session_queue}): send this one when they have ended, or abort"
                               " them", param="session_id", code="session_busy")
        session.waiting.append(Waiting(request, self._intake.serial()))
        self._waiting[request.rid] = session

    def _make(self, session: Session, following: Waiting) -> Made:
        """To be called once for each turn. Raises RequestError, and has changed nothing then."""
        request, order = following.request, following.request.session
        assert order is not None
        past, tokens, kept = session.history.prompt_of(order, request.tokens)
        scored = 0 if order.mode == "tag" else kept  # what the client did not send is not scored for it
        turn = self._intake.turn(request, tokens, following.serial, scores_from=scored, capacity=session.capacity)
        turn.session = session
        return Made(turn, past, kept)

    def _start(self, session: Session, made: Made) -> None:
        turn, past, kept = made
        shared = _shared(session, turn, kept)
        turn.begins = (session.tokens, shared)
        turn.expected = min(session.proved, shared, turn.adoptable)
        turn.home, session.home = session.home, None
        if session.lease is not None:
            del self._idle[session]
            lease, session.lease = session.lease, None
            turn.lease, turn.home = self._cut(lease, session.tokens, min(shared, turn.adoptable))
            if turn.lease is not None:
                self._ledger.limit(turn.lease, turn.job.limit - 1)
        self._enter(session, turn, past, kept)
        self._queue.push(turn)

    def _made_in_place(self, session: Session, exact: bool) -> Made | None:
        """The turn that waits, if it may take over the slot of the one that has ended."""
        if not session.waiting or (self._ledger.has_states and not exact):
            return None  # with states, the slot's is where the device went on to
        request, serial = session.waiting[0]
        first = self._queue.first(())
        if first is not None and first.job.rank < (request.priority, serial, 0):
            return None  # slot and pages are theirs who came before
        try:
            return self._make(session, session.waiting[0])
        except RequestError:
            return None  # told by `_next`

    def _continue_in_place(self, session: Session, old: Turn, made: Made, exact: bool) -> bool:
        """The next turn takes over slot and pages, where it only adds to the history. What is in flight for the old
        epoch is ignored on both sides."""
        lease, n = old.lease, len(old.tokens)
        new, past, kept = made
        assert lease is not None
        if _shared(session, new, kept) < n or not lease.lo <= new.adoptable or not new.ready:
            return False
        del self._waiting[session.waiting.popleft().request.rid]
        new.expected = lease.lo
        self._ops.map(old.slot, self._ledger.publish(lease, old.tokens))
        self._ops.map(old.slot, self._ledger.slide(lease))
        self._ledger.limit(lease, new.job.limit - 1)
        new.lease, old.lease = lease, None
        new.usage.cached_tokens = lease.lo
        self._counters.prompt_tokens += new.job.prompt
        self._counters.cached_tokens += lease.lo
        seam = Seam.KEEP if exact else self._ledger.seam(lease)
        self._slots.reseat(old, new, seam, log_from=n)
        self._enter(session, new, past, kept)
        self._counters.in_place_turns += 1
        return True

    def _enter(self, session: Session, turn: Turn, past: Past | None, kept: int) -> None:
        session.turn, session.base = turn, (past, kept)
        turn.usage.prompt_tokens = turn.job.prompt
        self._live.add(turn)
        self._counters.session_turns += 1

    # -------------------------------------------------------------------------------------------------- turns end
    def _commit(self, session: Session, turn: Turn, how: str) -> None:
        order, (past, kept) = turn.job.request.session, session.base
        assert order is not None
        session.history.commit(order.turn_id or turn.job.request.rid, order, past, kept, turn.tokens,
                               turn.job.prompt)
        session.turn, session.last_turn = None, how
        session.turns += 1
        self._touch(session)

    def _roll_back(self, session: Session, how: str) -> None:
        session.turn, session.last_turn = None, how
        self._counters.turns_rolled_back += 1
        self._touch(session)

    def _cut(self, lease: Lease, tokens: list[int], n: int) -> tuple[Lease | None, Node | None]:
        """A lease on the first `n` of its tokens, or on less; None: on nothing, the turn looks in the prefix tree, or
        where the second says (`Ledger.give_up`).

        A shared page is never written: where it holds cell n - 1, the lease goes back to the page's start, unless a
        fork, which copies the page, saves most of it."""
        if 0 < lease.draft_lo <= n:
            return lease, None
        if n < lease.lo and n // self._ledger.page_size < len(lease.nodes) and n % self._ledger.page_size > 1:
            child, _ = self._ledger.fork(lease, tokens, n, lease.top)
            if child is not None:
                self._ledger.drop(lease, useful=n)
                return child, None
        if n > 0 and self._ledger.truncate(lease, n) > 0:
            return lease, None
        return None, self._ledger.give_up(lease, tokens, useful=n)

    def _park(self, session: Session, lease: Lease | None) -> None:
        """The lease, which reaches no further than the history, stays with the session."""
        if lease is None:
            return
        self._ledger.publish(lease, session.tokens)
        self._ledger.slide(lease)
        self._ledger.shrink(lease)
        session.proved = max(lease.lo, min(session.proved, len(session.tokens)))
        self._keep_idle(session, lease)

    def _keep_idle(self, session: Session, lease: Lease) -> None:
        """Ranked as pages of the prefix tree are (host/prefix.py): by its tokens for the memory that it alone holds, in
        doublings, then by when it was used."""
        session.lease = lease
        worth = 2.0 ** round(log2(max(self._ledger.worth(lease), 1 / 16)))
        session.rank = self._floor + min(worth, MOST_WORTH), next(self._clock)
        self._idle[session] = None

    def _next(self, session: Session, made: Made | None = None) -> list[Output]:
        """Starts the first turn that waits and can run, which may be made already; those that cannot are told. A
        closing session goes."""
        outputs: list[Output] = []
        while session.turn is None and session.waiting:
            following = session.waiting.popleft()
            request = following.request
            del self._waiting[request.rid]
            try:
                self._start(session, made or self._make(session, following))
            except RequestError as error:
                outputs.append(Output(request.rid, 0, [], "", ERROR, error=str(error),
                                      error_code=error.code or "invalid_request", error_param=error.param))
        if session.turn is None and session.closing:
            self._remove(session)
        return outputs

    # ----------------------------------------------------------------------------------------------------- inside
    def _touch(self, session: Session) -> None:
        session.used = self._limits.clock()
        self._open[session.sid] = self._open.pop(session.sid)

    def _displace(self) -> None:
        """Makes room for a new session: the idle one longest unused goes whose client sends its history anyway."""
        session = next((s for s in self._open.values() if s.turn is None and not s.keeps), None)
        if session is None:
            raise RequestError(f"{len(self._open)} sessions are open, which is this server's limit, and none of them"
                               " can be closed without losing its history: close some, or raise the limit",
                               param="session_id", code="too_many_sessions")
        self._counters.sessions_displaced += 1
        self._lose(session)

    def _lose(self, session: Session) -> None:
        """Closes a session that no client closed. One that appends to it later is told."""
        self._gone[session.sid] = None
        if len(self._gone) > MAX_GONE:
            del self._gone[next(iter(self._gone))]
        self._remove(session)

    def _remove(self, session: Session) -> None:
        del self._open[session.sid]
        self._slots.forget(session)
        self._idle.pop(session, None)
        if session.lease is not None:
            self._ledger.publish(session.lease, session.tokens)
            self._ledger.drop(session.lease)
            session.lease = None
        if session.home is not None:
            self._ledger.forget(session.home)
            session.home = None
        self._counters.sessions_closed += 1

    def _info(self, session: Session, now: float) -> SessionInfo:
        lease = session.lease or (session.turn.lease if session.turn is not None else None)
        state: Literal["idle", "running", "closing"]
        state = "closing" if session.closing else "running" if session.turn is not None else "idle"
        return SessionInfo(
            id=session.sid, state=state, tokens=len(session.tokens),
            cached_tokens=min(lease.lo, len(session.tokens)) if lease is not None else 0, turns=session.turns,
            waiting=len(session.waiting), last_turn=session.last_turn,  # type: ignore[arg-type]
            idle_seconds=0.0 if session.turn is not None else max(0.0, now - session.used), ttl=session.ttl,
            capacity=session.capacity)


def _shared(session: Session, turn: Turn, kept: int) -> int:
    """How many first ids a new turn has in common with the session's history. Histories are long, and most turns are
    known to begin with all of theirs: only the others are compared."""
    order = turn.job.request.session
    assert order is not None
    if order.mode == "tag" or (kept == len(session.tokens) and order.after is None):
        return kept
    return common(session.tokens, turn.tokens)


def _need_idle(session: Session, verb: str) -> None:
    if session.turn is not None:
        raise RequestError(f"session {session.sid!r} has a live turn and cannot be {verb} before it has ended: wait for"
                           " it, or abort it", param="session_id", code="session_busy")


def not_found(sid: str) -> RequestError:
    return RequestError(f"there is no session {sid!r}: it was never opened, was closed, or was idle for too long",
                        param="session_id", code="session_not_found")
