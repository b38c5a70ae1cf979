"""The front end's side of an engine: who waits for what. No torch in this module.

Results come in one message per step and are sorted into one mailbox per request. A mailbox holds at most one Output
per choice: a reader that is slower than the engine finds what it missed joined into one Output, so it holds nobody up,
and a mailbox never holds more than the request's own answer.

Everything here runs on one event loop; only `send` crosses to the engine, and it never blocks.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable

import msgspec

from stretto.compat import ConfigError
from stretto.engine.messages import (
    Aborted,
    AbortRequest,
    AskStats,
    Command,
    Died,
    Event,
    Manage,
    Managed,
    Outputs,
    Progress,
    Refused,
    Started,
    Stats,
    Submit,
    Tick,
    Trace,
    Traced,
)
from stretto.protocol import (
    Action,
    EngineDead,
    EngineInfo,
    EngineStats,
    Output,
    Request,
    RequestError,
    SessionInfo,
    StepRecord,
    check_request,
)

HOPELESS = 4  # stall timeouts of silence after which an engine is not expected to come back
COMPUTING_PATIENCE = 10  # an engine that computes may be silent so many times longer than one that does nothing


def join_outputs(first: Output, second: Output) -> Output:
    """One Output that says what two consecutive ones of the same choice say. `first` may be reused."""
    first.token_ids.extend(second.token_ids)
    first.text += second.text
    if first.logprobs is None:
        first.logprobs = second.logprobs
    elif second.logprobs is not None:
        first.logprobs.extend(second.logprobs)
    if second.prompt_logprobs is not None:
        first.prompt_logprobs = second.prompt_logprobs
    first.usage = second.usage or first.usage
    first.finish_reason, first.stop_reason, first.error = second.finish_reason, second.stop_reason, second.error
    first.error_code, first.error_param = second.error_code, second.error_param
    first.embedding = second.embedding
    return first


class Mailbox:
    """What a request's reader has not taken yet, joined per choice, and how it ended."""

    def __init__(self, rid: str, choices: int):
        self.rid = rid  # the client's id
        self.unfinished = choices
        self.received = 0  # ids that the reader took and came back after: it has passed them on
        self._waiting: dict[int, Output] = {}
        self._failure: Exception | None = None
        self._reader: asyncio.Future[None] | None = None  # it waits

    def put(self, output: Output) -> None:
        earlier = self._waiting.get(output.index)
        self._waiting[output.index] = join_outputs(earlier, output) if earlier is not None else output
        if output.finish_reason is not None:
            self.unfinished -= 1
        self._wake()

    def fail(self, failure: Exception) -> None:
        self._failure = failure
        self._wake()

    def _wake(self) -> None:
        reader = self._reader
        if reader is not None:
            self._reader = None
            if not reader.done():  # it may be cancelled
                reader.set_result(None)

    @property
    def exhausted(self) -> bool:
        """Every choice has finished, and the reader has taken it all."""
        return self.unfinished == 0 and not self._waiting

    async def take(self) -> list[Output]:
        """At least one Output. Raises the failure once everything before it has been taken."""
        while not self._waiting:
            if self._failure is not None:
                raise self._failure
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        outputs, self._waiting = list(self._waiting.values()), {}
        return outputs


class Router:
    """Implements AsyncEngine's verbs over `send` and `deliver`; the owner moves the messages and reports death."""

    def __init__(self, send: Callable[[Command], None], stall_timeout: float):
        self._send = send
        self._stall_timeout = stall_timeout
        self._serials = itertools.count(1)
        self._mailboxes: dict[str, Mailbox] = {}  # by wire id
        self._wire_ids: dict[str, str] = {}  # by the client's id, while live
        self._aborts: dict[str, asyncio.Future[bool]] = {}
        self._stats: dict[int, asyncio.Future[EngineStats]] = {}
        self._managed: dict[int, asyncio.Future[list[SessionInfo]]] = {}
        self._traces: dict[int, asyncio.Future[list[StepRecord]]] = {}
        self._silent = 0.0  # seconds without a message, counted by check_stall
        self.started: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
        self.progress = "starting"
        self.cause: str | None = None  # why the engine is dead
        self.dead = asyncio.Event()

    # ------------------------------------------------------------------------------------------- from the engine
    def deliver(self, event: Event) -> None:
        self._silent = 0.0
        if isinstance(event, Outputs):
            for output in event.outputs:
                self._deliver_output(output)
        elif isinstance(event, Tick):
            pass
        elif isinstance(event, Stats):
            _resolve(self._stats.pop(event.serial, None), event.stats)
        elif isinstance(event, Traced):
            _resolve(self._traces.pop(event.serial, None), event.records)
        elif isinstance(event, Managed):
            _settle(self._managed.pop(event.serial, None), event)
        elif isinstance(event, Aborted):
            _resolve(self._aborts.pop(event.rid, None), event.was_live)
        elif isinstance(event, Refused):
            if (mailbox := self._mailboxes.get(event.rid)) is not None:
                self._free_id(mailbox.rid, event.rid)
                mailbox.fail(RequestError(event.message, param=event.param, code=event.code))
        elif isinstance(event, Progress):
            self.progress = event.text
        elif isinstance(event, Started):
            if not self.started.done():
                self.started.set_result(event.info)
        elif isinstance(event, Died):
            for output in event.outputs:
                self._deliver_output(output)
            self.die(event.cause, ConfigError(event.refusals) if event.refusals else None)

    def _deliver_output(self, output: Output) -> None:
        mailbox = self._mailboxes.get(output.rid)
        if mailbox is not None:  # None: its reader has gone
            mailbox.put(output)
            if mailbox.unfinished == 0:
                self._free_id(mailbox.rid, output.rid)

    def _free_id(self, rid: str, wire_id: str) -> None:
        """A finished request frees its id at once, even while its reader is still reading."""
        if self._wire_ids.get(rid) == wire_id:
            del self._wire_ids[rid]

    def die(self, cause: str, start_error: ConfigError | None = None) -> None:
        """The engine will not answer again: everybody who waits is told. The first cause stands. `start_error`: what
        whoever waits for the start is told instead."""
        if self.cause is not None:
            return
        self.cause = cause
        if start_error is not None and not self.started.done():
            self.started.set_exception(start_error)
            self.started.exception()  # nobody may be waiting; that is no error
        error = EngineDead(cause)
        for mailbox in self._mailboxes.values():
            if mailbox.unfinished > 0:
                mailbox.fail(error)
        waiting: list[asyncio.Future] = [*self._stats.values(), *self._managed.values(), *self._aborts.values(),
                                         *self._traces.values(), self.started]
        for future in waiting:
            if not future.done():
                future.set_exception(EngineDead(cause))
                future.exception()  # nobody may be waiting; that is no error
        self._stats.clear()
        self._managed.clear()
        self._traces.clear()
        self._aborts.clear()
        self.dead.set()

    # --------------------------------------------------------------------------------------------- liveness
    @property
    def live(self) -> int:
        """Requests that have a reader."""
        return len(self._mailboxes)

    def healthy(self) -> bool:
        return self.cause is None and self._silent < self._stall_timeout

    @property
    def hopeless(self) -> bool:
        """The engine has been silent for so long that whoever can should end it."""
        return self._silent >= HOPELESS * self._stall_timeout

    def check_stall(self, elapsed: float, computing: bool) -> None:
        """Called every `elapsed` seconds by the owner, who says whether the engine used the processor since.
        Readers of a wedged engine are told instead of waiting for ever. It may come back (a stopped process, a very
        long step), so their requests are withdrawn from it as well.

        Silence is counted in calls, not read from a clock: a front end that was held up itself blames nobody. A large
        step on a small machine may take minutes; it is told from a wedged one by the processor time it uses."""
        self._silent += elapsed / COMPUTING_PATIENCE if computing else elapsed
        if self.cause is None and self._silent >= self._stall_timeout:
            error = EngineDead(f"the engine loop makes no progress (stall timeout {self._stall_timeout:g} s)")
            for mailbox in self._mailboxes.values():
                if mailbox.unfinished > 0:
                    mailbox.fail(error)

    # ---------------------------------------------------------------------------------------- AsyncEngine's verbs
    async def generate(self, request: Request, info: EngineInfo) -> AsyncIterator[Output]:
        """See AsyncEngine.generate."""
        check_request(request, info)
        if self.cause is not None:
            raise EngineDead(self.cause)
        rid = request.rid
        if rid in self._wire_ids:
            raise RequestError(f"a request with the id {rid!r} is still running; take another id, or wait for it",
                               param="request_id", code="duplicate_request_id")
        wire_id = f"{rid}#{next(self._serials)}"
        mailbox = Mailbox(rid, request.sampling.n)
        self._mailboxes[wire_id], self._wire_ids[rid] = mailbox, wire_id
        refused = False
        try:
            self._send(Submit(_with_rid(request, wire_id)))
            while not mailbox.exhausted:
                for output in await mailbox.take():
                    output.rid, ids = rid, len(output.token_ids)
                    yield output
                    mailbox.received += ids
        except RequestError:
            refused = True
            raise
        finally:
            del self._mailboxes[wire_id]
            self._free_id(rid, wire_id)
            if mailbox.unfinished > 0 and not refused and self.cause is None:
                self._send(AbortRequest(wire_id, mailbox.received))

    async def abort(self, rid: str) -> bool:
        wire_id = self._wire_ids.get(rid)
        if wire_id is None:
            return False
        if self.cause is not None:
            raise EngineDead(self.cause)
        future = self._aborts.get(wire_id)
        if future is None:
            future = self._aborts[wire_id] = asyncio.get_running_loop().create_future()
            self._send(AbortRequest(wire_id, self._mailboxes[wire_id].received))
        return await asyncio.shield(future)

    async def stats(self) -> EngineStats:
        if self.cause is not None:
            raise EngineDead(self.cause)
        serial = next(self._serials)
        future = self._stats[serial] = asyncio.get_running_loop().create_future()
        self._send(AskStats(serial))
        try:
            return await future
        finally:
            self._stats.pop(serial, None)

    async def trace(self, steps: int) -> list[StepRecord]:
        """Records up to `steps` steps from now on (0: none); what was recorded until now."""
        if self.cause is not None:
            raise EngineDead(self.cause)
        serial = next(self._serials)
        future = self._traces[serial] = asyncio.get_running_loop().create_future()
        self._send(Trace(serial, steps))
        try:
            return await future
        finally:
            self._traces.pop(serial, None)

    async def manage(self, action: Action) -> list[SessionInfo]:
        """See AsyncEngine.manage."""
        if self.cause is not None:
            raise EngineDead(self.cause)
        serial = next(self._serials)
        future = self._managed[serial] = asyncio.get_running_loop().create_future()
        self._send(Manage(serial, action))
        try:
            return await future
        finally:
            self._managed.pop(serial, None)


def _with_rid(request: Request, rid: str) -> Request:
    """Under its wire id. A session's turn goes on being named as its client named it."""
    session = request.session
    if session is not None and session.turn_id is None:
        session = msgspec.structs.replace(session, turn_id=request.rid)
    return msgspec.structs.replace(request, rid=rid, session=session)


def _settle(future: asyncio.Future[list[SessionInfo]] | None, event: Managed) -> None:
    if event.message is None:
        _resolve(future, event.sessions)
    elif future is not None and not future.done():
        future.set_exception(RequestError(event.message, param=event.param, code=event.code))


def _resolve(future: asyncio.Future | None, value) -> None:
    if future is not None and not future.done():
        future.set_result(value)
