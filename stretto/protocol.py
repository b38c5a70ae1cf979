"""The messages between a front end (Python API, HTTP server) and the engine. No torch in this module.

The same structs travel in process (as objects) and between processes (msgpack through msgspec).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Literal, Protocol

import msgspec

from stretto.params import MAX_LOGPROBS, SamplingParams

ENGINE_DEAD = "engine_dead"  # error code of what was in flight when the engine stopped

class SessionTurn(msgspec.Struct, kw_only=True, omit_defaults=True):
    """How a request continues a session. Its prompt is:

        tag       Request.tokens, which the client sends whole; what they share with the history is not computed again
        append    the history (after `after`, `offset`, `drop_previous_output`, or none of it with `replace`), then
                  Request.tokens; or, behind a history that is not empty, `continuation` where it is given
    """

    sid: str
    mode: Literal["tag", "append"] = "tag"
    create: bool = True  # opens the session where it is not open; False: session_not_found
    branch_from: str | None = None  # the session is new, and starts with the history of this one
    after: str | None = None  # the turn, by its `turn_id`, that this one follows; None: the last one
    offset: int | None = None  # the history's first `offset` ids stay; negative: all but the last ones
    replace: bool = False  # with `after`: the turns that followed it are forgotten; without: the whole history is
    drop_previous_output: bool = False  # the history ends with the prompt of its last turn
    continuation: list[int] | None = None
    join: bool = False  # the continuation's first id is left out where the history ends with it
    # Behind a live turn: wait, if there is room; session_busy; or, where the prompt is whole and the session a hint,
    # run as a request without a session.
    on_busy: Literal["wait", "reject", "beside"] = "wait"
    on_disconnect: Literal["rollback", "keep"] = "rollback"  # an aborted turn: no trace, or what was received stays
    final: bool = False  # the session closes when this turn has ended
    turn_id: str | None = None  # by which later turns may name it; None: the request's id


class Request(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One request: token ids in, n choices out. Checked by the front end before it is sent (see `check_request`)."""

    rid: str
    tokens: list[int]
    sampling: SamplingParams
    priority: int = 0  # lower runs earlier
    cache_salt: str = ""  # prefixes are shared only between requests of equal salt
    adapter: str | None = None  # the LoRA adapter that answers; None: the model itself
    want_text: bool = True  # False: ids only, the engine does not detokenise
    arrival: float = 0.0  # time.monotonic of the front end
    session: SessionTurn | None = None
    # With max_tokens 0: one vector, the hidden state of the last token or the mean over all of them, after the final
    # norm; not normalised.
    pooling: Literal["last", "mean"] | None = None


# ------------------------------------------------------------------------------------------------------- sessions
class OpenSession(msgspec.Struct, tag=True, kw_only=True):
    """Opens a session, without a turn. Refused where the id is taken, or no session can make room."""

    sid: str
    cache_salt: str = ""
    adapter: str | None = None  # that will answer its turns
    ttl: float | None = None  # seconds idle until it closes; None: the server's setting
    capacity: int | None = None  # most ids of its history; None: the context


class CloseSession(msgspec.Struct, tag=True):
    """An idle session goes at once. One with a live turn takes no more turns and goes when that one ends, which `abort`
    makes now."""

    sid: str
    abort: bool = False


class GetSession(msgspec.Struct, tag=True):
    sid: str | None = None  # None: all of them


class BranchSession(msgspec.Struct, tag=True):
    """A new session on the first `at` ids of an idle one's history; None: on all of them."""

    sid: str
    new_sid: str
    at: int | None = None


class RewindSession(msgspec.Struct, tag=True):
    """The first `at` ids of an idle session's history stay."""

    sid: str
    at: int


class FlushCache(msgspec.Struct, tag=True):
    """Frees every KV page that no running turn uses; idle sessions keep their ids."""


class LoadAdapter(msgspec.Struct, tag=True):
    """A LoRA adapter, by the name that requests will give: a folder in PEFT's layout."""

    name: str
    path: str


class UnloadAdapter(msgspec.Struct, tag=True):
    """Requests that have begun go on; new ones may not name it."""

    name: str


SessionAction = OpenSession | CloseSession | GetSession | BranchSession | RewindSession | FlushCache
Action = SessionAction | LoadAdapter | UnloadAdapter


class SessionInfo(msgspec.Struct, kw_only=True):
    """What may be known of a session."""

    id: str
    state: Literal["idle", "running", "closing"]
    tokens: int  # ids of its history
    cached_tokens: int  # of them, those whose KV the session holds now
    turns: int  # that became history
    waiting: int  # turns behind the live one
    last_turn: Literal["none", "finished", "rolled_back", "kept", "failed"]  # how the last one to end ended
    idle_seconds: float
    ttl: float
    capacity: int | None


class TokenLogprob(msgspec.Struct, array_like=True):
    """One token's log-probability under the model (before any processor), with the best alternatives, best first."""

    token_id: int
    logprob: float | None  # None: the first prompt token has none
    top_ids: list[int]
    top_logprobs: list[float]


class Usage(msgspec.Struct, array_like=True):
    """Counts of one choice so far."""

    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens whose KV was found, at the first admission
    completion_tokens: int = 0
    drafted_tokens: int = 0  # drafts that were verified
    accepted_tokens: int = 0
    steps: int = 0  # steps that emitted tokens
    retractions: int = 0
    queue_seconds: float = 0.0  # from arrival to the first admission
    verified_runs: list[int] = []  # item n: in how many steps n drafts were verified; n = 0 is not counted
    accepted_runs: list[int] = []  # item n: in how many of these steps n drafts were accepted

    def note_drafts(self, verified: int, accepted: int) -> None:
        """Of one step."""
        if verified:
            self.drafted_tokens += verified
            self.accepted_tokens += accepted
            _count(self.verified_runs, verified)
            _count(self.accepted_runs, accepted)

    def snapshot(self) -> Usage:
        """As it is now, while this one is counted on."""
        now: Usage = self.__copy__()  # type: ignore[attr-defined]  # what copy.copy looks for first, each time
        if self.verified_runs:
            now.verified_runs, now.accepted_runs = self.verified_runs.copy(), self.accepted_runs.copy()
        return now


def _count(runs: list[int], n: int) -> None:
    """A histogram gets one more item n."""
    if n >= len(runs):
        runs.extend([0] * (n + 1 - len(runs)))
    runs[n] += 1


def reached(runs: Sequence[int]) -> list[int]:
    """Item p: how many runs of a histogram go beyond place p."""
    return [sum(runs[place + 1 :]) for place in range(len(runs) - 1)]


class Output(msgspec.Struct, array_like=True):
    """What one step added to one choice of a request. Text, ids and log-probabilities describe the same span.

    The ids of a matched stop string or stop id are counted in usage and listed in `token_ids`; their text is left out
    unless the request asked for it."""

    rid: str
    index: int
    token_ids: list[int]
    text: str
    finish_reason: str | None = None  # stop | length | abort | error
    stop_reason: int | str | None = None  # the stop id or string that matched
    usage: Usage | None = None  # on the last output, and on every one that carries ids
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None  # on the first output of choice 0
    error: str | None = None  # with finish_reason "error"
    error_code: str | None = None  # with `error`: ENGINE_DEAD, or the request could not be served (see RequestError)
    error_param: str | None = None  # with `error_code`: the field that is at fault
    embedding: bytes | None = None  # of a request with pooling: float32, little-endian


class EngineInfo(msgspec.Struct, kw_only=True):
    """What a front end must know of a started engine."""

    model_name: str
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    kv_tokens: int  # tokens that the KV pool holds
    eos_token_ids: list[int]
    speculation_tokens: int = 0  # widest draft
    hidden_size: int = 0  # numbers of an embedding; 0: this engine gives none
    pooling: Literal["last", "mean"] = "last"  # of embeddings, as the checkpoint wants it
    no_embeddings: str = ""  # why the checkpoint's own embeddings cannot be made
    sampling_defaults: dict[str, int | float] = {}  # by the names of SamplingParams
    max_logprobs: int = MAX_LOGPROBS  # alternatives at a token, at most; -1: the whole vocabulary
    logit_processors: list[str] = []  # by which names requests may ask for them
    adapters: dict[str, str] = {}  # LoRA adapters that are loaded: name -> path
    max_loras: int = 0  # that may be loaded; 0: none
    custom_logit_processor: bool = False  # requests may bring code of their own
    server_info: dict = {}  # the resolved configuration and the start-up report, JSON-ready


class EngineStats(msgspec.Struct, kw_only=True):
    """A snapshot of counters (monotone) and gauges; the source of /metrics."""

    counters: dict[str, float] = {}
    gauges: dict[str, float] = {}
    histograms: dict[str, list[float]] = {}  # observations since the last snapshot


class StepRecord(msgspec.Struct, array_like=True):
    """One step of a trace. Times of time.perf_counter, in seconds; `counts`: what processing it added to counters."""

    seq: int
    rows: int
    planning: float  # the host began to plan it
    planned: float
    launched: float
    waiting: float = 0.0  # the host began to wait for it
    collected: float = 0.0
    processed: float = 0.0
    counts: dict[str, int] = {}


class RequestError(ValueError):
    """A request that cannot be served as asked: becomes HTTP 400. `param` names the field, `code` is OpenAI's."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.param, self.code = param, code


class EngineDead(RuntimeError):
    """The engine has stopped; the message carries the cause."""


class EngineRestarting(EngineDead):
    """The engine has stopped and is being started again: worth another try soon."""


class AsyncEngine(Protocol):
    """What the HTTP server needs; the in-process engine and the client of an engine process both provide it."""

    info: EngineInfo

    def generate(self, request: Request) -> AsyncIterator[Output]:
        """Outputs of every choice as they come, the last of each with a finish_reason. Closing the iterator aborts.
        Raises RequestError for a request that `check_request` refuses, EngineDead when the engine has stopped."""
        ...

    async def abort(self, rid: str) -> bool:
        """True if such a request was live. Returns once the engine has released it."""
        ...

    async def stats(self) -> EngineStats: ...

    async def manage(self, action: Action) -> list[SessionInfo]:
        """The sessions that the action is about, as they are after it. Raises RequestError."""
        ...

    async def start_trace(self, steps: int) -> None:
        """Records the next steps, at most so many. A recording that runs begins anew."""
        ...

    async def stop_trace(self) -> list[StepRecord]:
        """The steps recorded so far, in order; the recording ends."""
        ...

    async def healthy(self) -> bool:
        """True while the engine's loop makes progress."""
        ...

    async def close(self) -> None: ...


def check_request(request: Request, info: EngineInfo) -> None:
    """Raises RequestError if the request can never run on this engine."""
    n = len(request.tokens)
    if n == 0:
        raise RequestError("the prompt is empty; it needs at least one token", param="prompt")
    if n >= info.max_model_len and request.pooling is not None:
        raise RequestError(f"the text to embed has {n} tokens; a text may have {info.max_model_len - 1} here, one less"
                           " than this model's context: shorten it, or set truncate_prompt_tokens",
                           param="prompt", code="context_length_exceeded")
    if n >= info.max_model_len:
        raise RequestError(f"the prompt has {n} tokens; this model's context is {info.max_model_len} tokens, of which"
                           f" at least one must be left for the answer: shorten the prompt to {info.max_model_len - 1}",
                           param="prompt", code="context_length_exceeded")
    if n + 1 > info.kv_tokens:
        raise RequestError(f"the prompt has {n} tokens; the KV cache holds {info.kv_tokens}: shorten the prompt, or"
                           " give the server more KV memory", param="prompt", code="context_length_exceeded")
    continuation = request.session.continuation or [] if request.session is not None else []
    bad = next((t for t in (*request.tokens, *continuation) if not 0 <= t < info.vocab_size), None)
    if bad is not None:
        raise RequestError(f"prompt token id {bad} is not in the vocabulary (0..{info.vocab_size - 1})", param="prompt")
    try:
        request.sampling.check(info.vocab_size, info.max_logprobs)
    except ValueError as e:
        raise RequestError(str(e), param=getattr(e, "param", None)) from e
    _check_processors(request, info)
    if request.pooling is not None:
        _check_pooling(request, info)


def _check_pooling(request: Request, info: EngineInfo) -> None:
    if info.no_embeddings or not info.hidden_size:
        why = f": {info.no_embeddings}" if info.no_embeddings else ""
        raise RequestError(f"{info.model_name} gives no embeddings{why}", param="pooling", code="unsupported_parameter")
    if request.sampling.max_tokens != 0 or request.sampling.n != 1:
        raise RequestError("a request with pooling generates nothing: max_tokens must be 0, n 1", param="pooling")
    if request.session is not None:
        raise RequestError("pooling and sessions exclude each other: an embedding is of its own tokens alone",
                           param="pooling")


def _check_processors(request: Request, info: EngineInfo) -> None:
    for use in request.sampling.logit_processors:
        if use.source and not info.custom_logit_processor:
            raise RequestError("custom_logit_processor brings code, which this server does not run: it was started"
                               " without --enable-custom-logit-processor", param="custom_logit_processor")
        if use.name and use.name not in info.logit_processors:
            known = ", ".join(info.logit_processors) or "none"
            raise RequestError(f"logit_processors names {use.name!r}; this server has {known}",
                               param="logit_processors")
