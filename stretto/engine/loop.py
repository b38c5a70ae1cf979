"""The engine loop: one function, run on a thread (inprocess.py) or in a process of its own (process.py).

    commands --> inbox --+                                   one step:
                         v                                     drain the inbox      (blocks only when idle)
              [ drain | step | send ]  --> events              core.step()          (blocks only on the device)
                                                               send its outputs     (one message)

The core is made, stepped and closed on this one thread; everything else talks to it through messages. No torch here.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import Protocol

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
    ENGINE_DEAD,
    Action,
    EngineInfo,
    EngineStats,
    Output,
    Request,
    RequestError,
    SessionInfo,
    StepRecord,
)

TICK_SECONDS = 0.5

log = logging.getLogger(__name__)


class Core(Protocol):
    """What the loop drives."""

    info: EngineInfo

    def submit(self, request: Request) -> None:
        """Raises RequestError for a request that the core cannot serve."""
        ...

    def abort(self, rid: str, received: int | None = None) -> list[Output]: ...

    def manage(self, action: Action) -> tuple[list[SessionInfo], list[Output]]:
        """(sessions, last outputs of turns that the action ended). Raises RequestError where it cannot be done."""
        ...

    def tick(self) -> None:
        """Called at least twice a second while steps are short, also when there is nothing to do."""
        ...

    def step(self) -> list[Output]:
        """Runs one step, returns what became ready; blocks only on the device."""
        ...

    @property
    def has_work(self) -> bool: ...

    def stats(self) -> EngineStats: ...

    def trace(self, steps: int) -> list[StepRecord]: ...

    def close(self) -> None: ...


class Inbox(Protocol):
    def take(self, timeout: float) -> list[Command]:
        """Every command that has arrived, in order; waits up to `timeout` seconds for the first one."""
        ...


CoreFactory = Callable[[], Core]
Send = Callable[[Event], None]


def describe(error: BaseException) -> str:
    """One line: the kind of error and its text."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


class StartFailed(Exception):
    """Raised by a factory for a reason that its message explains to the user: no traceback would add to it."""


class LiveChoices:
    """Which choices of which requests have not finished; so that a dying loop can answer each of them."""

    def __init__(self) -> None:
        self._open: dict[str, set[int]] = {}

    def __contains__(self, rid: str) -> bool:
        return rid in self._open

    def add(self, request: Request) -> None:
        self._open[request.rid] = set(range(request.sampling.n))

    def remove(self, rid: str) -> None:
        self._open.pop(rid, None)

    def rids(self) -> list[str]:
        return list(self._open)

    def endings(self, rid: str, reason: str, error: str | None = None, code: str | None = None) -> list[Output]:
        """The last output of every choice of a request that will not finish by itself."""
        return [Output(rid=rid, index=index, token_ids=[], text="", finish_reason=reason, error=error, error_code=code)
                for index in sorted(self._open.get(rid, ()))]

    def errors(self, cause: str) -> list[Output]:
        """The last output of every choice of every request."""
        return [output for rid in self._open for output in self.endings(rid, "error", cause, ENGINE_DEAD)]

    def note(self, outputs: list[Output]) -> None:
        for out in outputs:
            if out.finish_reason is not None and out.rid in self._open:
                choices = self._open[out.rid]
                choices.discard(out.index)
                if not choices:
                    del self._open[out.rid]


class _Loop:
    def __init__(self, core: Core, inbox: Inbox, send: Send):
        self.core, self.inbox, self.send = core, inbox, send
        self.live = LiveChoices()
        self.next_tick = 0.0

    def run(self) -> None:
        """Until Shutdown. Whatever core.step() raises passes through."""
        while self.serve_commands():
            self.tick()
            if self.core.has_work:
                self.deliver(self.core.step())

    def serve_commands(self) -> bool:
        """False: Shutdown has come."""
        for command in self.inbox.take(0.0 if self.core.has_work else TICK_SECONDS):
            if isinstance(command, Submit):
                self.submit(command.request)
            elif isinstance(command, AbortRequest):
                self.abort(command.rid, command.received)
            elif isinstance(command, Manage):
                self.manage(command)
            elif isinstance(command, AskStats):
                self.send(Stats(command.serial, self.core.stats()))
            elif isinstance(command, Trace):
                self.send(Traced(command.serial, self.core.trace(command.steps)))
            else:
                for rid in self.live.rids():
                    self.abort(rid)
                return False
        return True

    def submit(self, request: Request) -> None:
        self.live.add(request)  # before the core has it: should submit() fail badly, this request is answered too
        try:
            self.core.submit(request)
        except RequestError as e:
            self.live.remove(request.rid)
            self.send(Refused(request.rid, str(e), e.param, e.code))
        except Exception as e:  # one request's trouble; the others go on
            log.exception("the core failed to take request %s", request.rid, extra={"request_id": request.rid})
            self.deliver(self.live.endings(request.rid, "error", describe(e)))

    def manage(self, command: Manage) -> None:
        try:
            sessions, outputs = self.core.manage(command.action)
        except RequestError as e:
            self.send(Managed(command.serial, [], str(e), e.param, e.code))
        except Exception as e:  # of whoever asked; the requests go on
            log.exception("the core failed at %s", command.action)
            self.send(Managed(command.serial, [], describe(e), None, "internal_error"))
        else:
            self.deliver(outputs)
            self.send(Managed(command.serial, sessions))

    def abort(self, rid: str, received: int | None = None) -> None:
        if rid not in self.live:  # unknown, refused, or finished while the abort was under way
            self.send(Aborted(rid, False))
            return
        self.deliver(self.core.abort(rid, received))
        self.deliver(self.live.endings(rid, "abort"))  # choices that the core left without a last output
        self.send(Aborted(rid, True))

    def deliver(self, outputs: list[Output]) -> None:
        if outputs:
            self.live.note(outputs)
            self.send(Outputs(outputs))

    def tick(self) -> None:
        now = time.monotonic()
        if now >= self.next_tick:
            self.next_tick = now + TICK_SECONDS / 2
            self.core.tick()
            self.send(Tick())


class _ProgressHandler(logging.Handler):
    def __init__(self, send: Send):
        super().__init__(logging.INFO)
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        self._send(Progress(record.getMessage()))


@contextlib.contextmanager
def _progress_relayed(send: Send) -> Iterator[None]:
    """While it is open, what the package logs at INFO or above is sent as Progress too."""
    logger, handler = logging.getLogger("stretto"), _ProgressHandler(send)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def run_loop(factory: CoreFactory, inbox: Inbox, send: Send) -> bool:
    """Makes the core, serves until Shutdown, closes the core. Sends Started first; Died last, and only when something
    failed: at start, or in a step (every choice in flight gets an "error" output with it).

    Returns True after a clean end."""
    loop: _Loop | None = None
    core: Core | None = None
    try:
        with _progress_relayed(send):
            core = factory()
        loop = _Loop(core, inbox, send)
        send(Started(core.info))
        loop.run()
    except ConfigError as e:
        send(Died(str(e), refusals=list(e.refusals)))
        return False
    except StartFailed as e:
        send(Died(str(e)))
        return False
    except Exception as e:
        log.exception("the engine %s", "loop failed" if loop else "could not start")
        cause = describe(e)
        send(Died(cause, loop.live.errors(cause) if loop is not None else []))
        _close_after_failure(core)
        return False
    core.close()
    return True


def _close_after_failure(core: Core | None) -> None:
    if core is not None:
        try:
            core.close()
        except Exception as e:  # mostly what has just been told, once more
            log.warning("closing the failed core failed as well: %s", describe(e))
            log.debug("where", exc_info=True)
