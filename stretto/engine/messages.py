"""What a front end and an engine loop say to each other. No torch in this module.

The same structs travel as objects between threads and as msgpack between processes. A request is known to the engine
by its *wire id*, which the front end makes unique for ever: a client may use an id again the moment it is free, and
results of the earlier request, still under way, can never reach the later one.
"""

from __future__ import annotations

import msgspec

from stretto.compat import Refusal
from stretto.protocol import Action, EngineInfo, EngineStats, Output, Request, SessionInfo, StepRecord


class Submit(msgspec.Struct, tag=True):
    request: Request


class AbortRequest(msgspec.Struct, tag=True):
    """Answered by Aborted once the engine has released the request. `received`: generated ids that the reader took and
    passed on; None: nobody knows, so all that were delivered."""

    rid: str
    received: int | None = None


class Manage(msgspec.Struct, tag=True):
    """About sessions or the cache. Answered by Managed."""

    serial: int
    action: Action


class AskStats(msgspec.Struct, tag=True):
    serial: int


class Trace(msgspec.Struct, tag=True):
    """Records up to `steps` steps; 0: ends the recording. Answered by Traced with what was recorded until now."""

    serial: int
    steps: int


class Shutdown(msgspec.Struct, tag=True):
    """The loop aborts what it holds, closes the core and ends."""


Command = Submit | AbortRequest | Manage | AskStats | Trace | Shutdown


class Progress(msgspec.Struct, tag=True):
    """A line about the start-up, for people and for /startupz."""

    text: str


class Started(msgspec.Struct, tag=True):
    info: EngineInfo


class Outputs(msgspec.Struct, tag=True):
    """Everything one step gave, in one message."""

    outputs: list[Output]


class Refused(msgspec.Struct, tag=True):
    """The core could not take a request; the fields of RequestError."""

    rid: str
    message: str
    param: str | None
    code: str | None


class Aborted(msgspec.Struct, tag=True):
    rid: str
    was_live: bool


class Managed(msgspec.Struct, tag=True):
    """What an action found or left; or, where it could not be done, the fields of RequestError."""

    serial: int
    sessions: list[SessionInfo]
    message: str | None = None
    param: str | None = None
    code: str | None = None


class Stats(msgspec.Struct, tag=True):
    serial: int
    stats: EngineStats


class Traced(msgspec.Struct, tag=True):
    serial: int
    records: list[StepRecord]


class Tick(msgspec.Struct, tag=True):
    """Sent between steps, at least twice a second while steps are short: the loop makes progress."""


class Died(msgspec.Struct, tag=True):
    """The loop has ended for a reason other than Shutdown; nothing follows. `outputs` are the last ones of every choice
    in flight: in one message with the cause, so that whoever reads them already finds the engine dead. `refusals`: of
    a configuration that cannot be served as asked; then the loop never began."""

    cause: str
    outputs: list[Output] = []
    refusals: list[Refusal] = []


Event = Progress | Started | Outputs | Refused | Aborted | Managed | Stats | Traced | Tick | Died
