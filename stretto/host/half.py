"""The host half of the engine, whole: requests in, plans out, results in, outputs out.

    loop:   submit / abort          at any time between steps
            plan()      -> StepPlan    sent to the device; up to `depth` plans may be in flight
            process()   <- StepResult  in order, one for each plan
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from stretto.host.adapters import salted
from stretto.host.audit import audit, check, repair
from stretto.host.cost import StepClock
from stretto.host.counters import Counters
from stretto.host.faults import HostFault
from stretto.host.grammar import Grammars, GrammarState, wait_for
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
    BranchSession,
    CloseSession,
    FlushCache,
    OpenSession,
    Output,
    Request,
    RequestError,
    RewindSession,
    SessionAction,
    SessionInfo,
)
from stretto.text.masks import MaskAsk, MaskMaker
from stretto.text.stream import TextStream
from stretto.wire import LateMask, StepPlan, StepResult

logger = logging.getLogger(__name__)


class HostHalf:
    """Not thread-safe: one loop owns it. Raises HostFault (strict) where a check of the books fails."""

    def __init__(self, limits: HostLimits, text_stream: Callable[[SamplingParams], TextStream] | None = None,
                 grammars: Grammars | None = None):
        self.limits, self._grammars = limits, grammars
        self._masks = MaskMaker(grammars.vocab_size if grammars is not None else 0)
        self._masked: list[GrammarState] = []  # of the last mask
        self.counters = Counters()
        self._ops = Ops()
        self.ledger = Ledger(limits, self._ops)
        self.slots = Slots(limits.max_slots, self._ops)
        self.queue, self._live = Queue(), Live()
        self._clock = StepClock(limits.step_clock)
        self._intake = Intake(limits, text_stream, grammars)
        self.sessions = Sessions(limits, self.ledger, self.slots, self.queue, self._live, self._intake, self._ops,
                                 self.counters)
        self.results = Results(limits, self.ledger, self.slots, self.queue, self._live, self._intake, self.sessions,
                               self._ops, self.counters)
        self.planner = Planner(limits, self.ledger, self.slots, self.queue, self._ops, self.counters,
                               self.sessions.reclaim, self._expire, self._quarantine)
        self._unsent: list[Output] = []  # of turns that ended while a step was planned
        self._audited = 0  # steps when every page was looked at for the last time

    def submit(self, request: Request) -> None:
        """Raises RequestError where the request can never run, or its id is live."""
        if request.adapter is not None:
            salt = salted(request.cache_salt, self.limits.adapter(request.adapter))
            request = msgspec.structs.replace(request, cache_salt=salt)
        if request.session is not None and self.sessions.submit(request):
            self.counters.requests += 1
            return
        if request.rid in self._live or self.sessions.waits(request.rid):
            raise RequestError(f"request {request.rid!r} is live already", param="rid")
        turn = self._intake.turn(request, request.tokens, self._intake.serial())
        turn.usage.prompt_tokens = turn.job.prompt
        self.counters.requests += 1
        self._live.add(turn)
        self.queue.push(turn)

    def abort(self, rid: str, received: int | None = None) -> list[Output]:
        """The last outputs of the request's live choices; [] where no such request is live. Nothing follows them.
        `received`: generated ids that the client surely has; None: all that were delivered."""
        return self.results.abort(rid, received)

    def manage(self, action: SessionAction) -> tuple[list[SessionInfo], list[Output]]:
        """(the sessions that the action is about, last outputs of turns that it ended). Raises RequestError."""
        sessions = self.sessions
        try:
            if isinstance(action, OpenSession):
                salt = action.cache_salt
                if action.adapter is not None:
                    salt = salted(salt, self.limits.adapter(action.adapter))
                return [sessions.shown(sessions.open(action.sid, salt, action.ttl, action.capacity))], []
            if isinstance(action, BranchSession):
                return [sessions.shown(sessions.branch(action.sid, action.new_sid, action.at))], []
            if isinstance(action, RewindSession):
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
        if action.sid in self.sessions:  # one that was closing already went with its last turn
            self.sessions.close(action.sid)
        left = action.sid in self.sessions
        return self.sessions.info(action.sid) if left else before, outputs

    def tick(self) -> None:
        """Called now and then, also when idle: closes sessions that were idle for too long; looks at every page where
        nothing runs, once after the last step."""
        self.sessions.expire()
        if self.counters.steps != self._audited and not self.has_work:
            self._audited = self.counters.steps
            try:
                self.audit()
            except HostFault as fault:
                self._contain(fault)

    def plan(self) -> StepPlan | None:
        """The next step; None where nothing can run before a result or a request comes.

        Call `take_outputs` after it: a turn may end here, for want of pages."""
        self._note_compiled()
        plan = self.planner.plan()
        if plan is not None:
            self._clock.launched(plan.seq)
        self._check()
        return plan

    def mask(self, plan: StepPlan) -> LateMask:
        """What the rows of a plan with `late_mask` may sample. To be called when every earlier step is processed and
        no later one is planned: then each row's length and drafts are known here."""
        asks: list[MaskAsk] = []
        self._masked = []
        for i, (slot, epoch, cap) in enumerate(plan.rows):
            turn = self.slots.owner(slot, epoch)  # None: it has ended since; its row samples for nobody
            if turn is not None and turn.grammar is not None and turn.lease is not None:
                pending = len(turn.tokens) - turn.lease.lo
                if cap >= pending:
                    asks.append(self._mask_ask(i, turn, self._drafts(turn, plan)[: cap - pending]))
                    self._masked.append(turn.grammar)
        self.counters.masked_positions += sum(1 + len(ask.drafts) for ask in asks)
        mask, stuck = self._masks.make(plan.seq, len(plan.rows), asks)
        self.counters.masks_reused = self._masks.reused
        for i in stuck:
            turn = self.slots.owner(*plan.rows[i][:2])
            assert turn is not None and turn.grammar is not None and self._grammars is not None
            self._grammars.forget(turn.grammar)
            self._unsent += self.results.fail(turn, str(turn.grammar.error() or "the grammar cannot go on"))
        return mask

    def spread(self, plan: StepPlan) -> None:
        """Turns whose masks wait for each other get more automata; those that have worked for long get no new turns. To
        be called when the plan's mask has gone out: the device waits for that, and not for this."""
        work = self._masks.work
        for state in self._masked:
            if self._grammars is not None and state.automaton in work:
                self._grammars.worked(state, work.pop(state.automaton))
        for rows in self._masks.slow:
            turns = [self.slots.owner(*plan.rows[row][:2]) for row in rows]
            states = [turn.grammar for turn in turns if turn is not None and turn.grammar is not None]
            if self._grammars is not None and states:
                self._grammars.spread(states, self._masks.threads)

    def _mask_ask(self, row: int, turn: Turn, drafts: list[int]) -> MaskAsk:
        least = turn.job.prompt + turn.job.request.sampling.min_tokens
        assert turn.grammar is not None
        return MaskAsk(row, turn.grammar.matcher, drafts, max(0, least - len(turn.tokens)),
                       (*turn.job.stop_ids, *self.limits.eos_token_ids), turn.grammar.automaton,
                       id(turn.grammar.grammar), turn.grammar.keys(drafts), turn.grammar.grammar.places)

    @staticmethod
    def _drafts(turn: Turn, plan: StepPlan) -> list[int]:
        """The drafts that the plan's row finds behind its known ids: of the plan, by the device's rule, or else those
        that the device offered last."""
        known = len(turn.tokens)
        for draft in plan.drafts:
            if (draft.slot, draft.epoch) == (turn.slot, turn.epoch):
                behind = known - draft.at
                room = min(turn.job.limit - 1 - known, turn.job.width)
                if turn.tokens[draft.at :] == draft.ids[:behind] and len(draft.ids) > behind and room > 0:
                    return draft.ids[behind : behind + room]
        epoch, offered = turn.grammar.offered if turn.grammar is not None else (-1, [])
        return offered if epoch == turn.epoch else []

    def _note_compiled(self) -> None:
        """Ends the turns whose grammar has turned out to be unusable, or whose patience is over."""
        for turn in self._intake.compiling[:]:
            assert turn.grammar is not None and self._grammars is not None
            live = turn in self._live.of(turn.job.request.rid)
            crowded, fault = turn.grammar.crowded, turn.grammar.fault
            if live and not (crowded or fault or turn.grammar.ready):
                continue
            self._intake.compiling.remove(turn)
            self._grammars.leave(turn.grammar)
            if live and crowded:
                self._unsent += self.results.crowd_out(turn)
            elif live and fault is not None:
                self._unsent += self.results.fail(turn, fault)

    def bound_patience(self, seconds: float) -> None:
        """So long a grammar that takes long waits at most for others of other users."""
        if self._grammars is not None:
            self._grammars.patience = seconds

    def rest(self, seconds: float) -> None:
        """Where nothing can run before a grammar is compiled: until one is, or so long."""
        if self._intake.compiling:
            wait_for([turn.grammar for turn in self._intake.compiling if turn.grammar is not None], seconds)

    def close(self) -> None:
        self._masks.close()
        if self._grammars is not None:
            self._grammars.close()

    def process(self, result: StepResult) -> list[Output]:
        seconds = self._clock.ended(result.seq)
        outputs = self.take_outputs() + self.results.process(result)
        if self.limits.elastic is not None:
            told = 0.0 if self.limits.step_work else result.seconds
            self.limits.elastic.ran(result, max(seconds, told))
        self._check()
        return outputs

    def _check(self) -> None:
        """The pool equation."""
        try:
            check(self.ledger)
        except HostFault as fault:
            self._contain(fault)

    def _contain(self, fault: HostFault) -> None:
        """Books that do not add up end a test. A server counts it, tells the last steps, ends the requests whose pages
        are in doubt and takes such pages from idle sessions; then it serves on."""
        if self.limits.strict:
            raise fault
        self.counters.broken_books += 1
        logger.error("%s; the last results: %s", fault, self.results.recent)
        turns = [turn for turn in self._live if turn.lease is not None]
        leases = [turn.lease for turn in turns if turn.lease is not None]
        doubtful = repair(self.ledger, [*leases, *self.sessions.leases()])
        self.sessions.forget(doubtful)
        for turn in turns:
            if turn.lease in doubtful:
                turn.lease = None
                self._unsent += self.results.quarantine(turn, fault)

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

    @property
    def adapters_in_use(self) -> set[int]:
        """Numbers that live turns have."""
        return {turn.job.adapter for turn in self._live}

    def flush_cache(self) -> int:
        """Frees every page that no turn uses; returns how many. Idle sessions keep their ids."""
        self.sessions.reclaim_all()
        return self.ledger.flush()

    def audit(self) -> None:
        """Page by page; raises HostFault. O(pages): when idle, and in tests."""
        turns = list(self._live)
        leases = [turn.lease for turn in turns if turn.lease is not None]
        audit(self.ledger, [*leases, *self.sessions.leases()])

    def stats(self) -> tuple[dict[str, float], dict[str, float]]:
        """(counters, gauges)."""
        gauges: dict[str, float] = {"running": len(self.slots.running), "waiting": len(self.queue),
                                    "sessions": len(self.sessions), "session_tokens": self.sessions.held_tokens,
                                    "session_cached_tokens": sum(lease.lo for lease in self.sessions.leases())}
        for g, pages in enumerate(self.limits.pages):
            free, loose = len(self.ledger.free[g]), self.ledger.tree.loose[g]
            gauges |= {f"pages_total_{g}": pages, f"pages_free_{g}": free, f"pages_evictable_{g}": loose,
                       f"pages_used_{g}": pages - free - loose}
        counters = self.counters.as_dict()
        if self.ledger.tier is not None:
            counters |= self.ledger.tier.counters()
            gauges |= self.ledger.tier.gauges()
        if self.limits.elastic is not None:
            counters |= self.limits.elastic.counters.as_dict()
        return counters, gauges
