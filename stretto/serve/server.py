"""`run_server`: the whole life of a server process, from the first bind to the exit code. It never loads torch.

    bind port | find model | start engine process, load tokenizer | serve ...... | drain       | close engine | exit
    probes:     /livez 200, /readyz and /startupz 503 "starting"    all 200        /readyz 503
    requests:   503 with Retry-After                                answered       new ones 503

The first SIGTERM, SIGHUP or Ctrl-C drains: requests in flight get `drain_timeout` seconds. A second one, or the end of
that time, aborts them. An engine that dies is started again: its clients are told, /readyz is 503 until there is a new
one. One that dies too often takes the server with it, exit code 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import uvicorn
import uvloop
from starlette.types import ASGIApp, Receive, Scope, Send

from stretto.engine.client import EngineClient
from stretto.engine.collector import spare_collector
from stretto.engine.loop import CoreFactory
from stretto.engine.supervisor import Supervisor
from stretto.protocol import EngineDead, EngineInfo
from stretto.serve.app import build_app
from stretto.serve.errors import ApiError, JSONResponse
from stretto.serve.interfaces import ServeTokenizer
from stretto.serve.service import Service
from stretto.serve.settings import ServeSettings
from stretto.serve.tracing import otlp_provider

LAST_ANSWERS_SECONDS = 5.0  # for clients of a dead engine, or of an aborted request, to get their error
BACKLOG = 2048  # connections that wait to be accepted, as uvicorn has it
TIME_OVER = "the time for it was over (--drain-timeout)"
KEEP_ALIVE_SECONDS = 75  # longer than the usual 60 s of a proxy, so that the proxy closes first

log = logging.getLogger(__name__)
TokenizerFactory = Callable[[], ServeTokenizer]
OnReady = Callable[[EngineInfo, str], None]


@dataclass(frozen=True)
class Model:
    """What a server starts, once it is found. `engine`: makes the core, in a process of its own, once more for each
    time that it dies; picklable. `tokenizer`: makes the tokenizer, in the server's process."""

    engine: CoreFactory
    tokenizer: TokenizerFactory


FindModel = Callable[[], Model]


class StartGate:
    """Stands for the app while the engine starts: it is alive, not ready, and says what it is doing."""

    def __init__(self) -> None:
        self.app: ASGIApp | None = None
        self.progress = "starting"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.app is not None:
            await self.app(scope, receive, send)
        elif scope["path"] == "/livez":
            await JSONResponse({"status": "starting"})(scope, receive, send)
        else:
            refusal = ApiError(503, f"the server is starting: {self.progress}", code="starting",
                               headers={"Retry-After": "5"})
            await refusal.response()(scope, receive, send)

    def note(self, progress: str) -> None:
        self.progress = progress


class _Uvicorn(uvicorn.Server):
    """Leaves signals to run_server."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Stops:
    """Counts SIGTERM, SIGINT, and the SIGHUP of a terminal that closes, which `nohup` has ignored."""

    def __init__(self) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()

    def listen(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                loop.add_signal_handler(number, self._stop)

    def _stop(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


def bind(host: str, port: int) -> socket.socket:
    """A listening address, taken before anything slow starts. Raises OSError that names it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(BACKLOG)  # now: of two who are only bound, both would believe that the address is theirs
    except OSError as e:
        sock.close()
        raise OSError(f"cannot listen on {host}:{port}: {e.strerror}; choose another --host or --port") from e
    return sock


def bind_unix(path: Path) -> socket.socket:
    """A listening Unix socket. A file that a dead server has left is replaced; a living one's is not. Raises OSError
    that names it."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket():
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
                if other.connect_ex(str(path)) != errno.ECONNREFUSED:
                    raise OSError(errno.EADDRINUSE, "another server listens there")
            path.unlink()
        sock.bind(str(path))
        sock.listen(BACKLOG)
    except OSError as e:
        sock.close()
        raise OSError(f"cannot listen on {path}: {e.strerror}; choose another --uds") from e
    return sock


def url_of(sock: socket.socket, tls: bool = False) -> str:
    if sock.family == socket.AF_UNIX:
        return f"unix:{sock.getsockname()}"
    host, port = sock.getsockname()[:2]
    scheme = "https" if tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _allow_many_connections() -> None:
    """A thousand clients need more descriptors than the usual soft limit; the hard limit is the operator's word."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class _Server:
    """One run. Every await of `run` is bounded by a signal, a timeout, or the engine's death."""

    def __init__(self, find_model: FindModel, settings: ServeSettings, on_ready: OnReady | None):
        self.find_model, self.settings, self.on_ready = find_model, settings, on_ready
        self.gate, self.stops = StartGate(), _Stops()

    async def run(self, sock: socket.socket) -> int:
        settings = self.settings
        self.stops.listen()
        config = uvicorn.Config(
            self.gate, http="httptools", ws="none", lifespan="off", log_level=settings.log_level, server_header=False,
            access_log=settings.access_log, timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=int(LAST_ANSWERS_SECONDS), log_config=None, ssl_certfile=settings.ssl_certfile,
            ssl_keyfile=settings.ssl_keyfile)
        try:
            config.load()  # now rather than in the task: there nobody would hear of it
        except OSError as e:
            pair = f"certificate {settings.ssl_certfile} and key {settings.ssl_keyfile}"
            raise OSError(f"{pair} cannot be used: {e}") from e
        server = _Uvicorn(config)
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        running = asyncio.create_task(self._run_engine(url_of(sock, settings.ssl_certfile is not None)))
        try:
            await asyncio.wait((serving, running), return_when=asyncio.FIRST_COMPLETED)
            if not running.done():  # nobody would hear of an engine behind no server
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
                serving.result()
                raise OSError("the HTTP server has ended")
            return running.result()
        finally:
            server.should_exit = True
            await serving

    async def _run_engine(self, url: str) -> int:
        starting = asyncio.create_task(self._start())
        stop = asyncio.create_task(self.stops.first.wait())
        await asyncio.wait((starting, stop), return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()  # ends the engine process
            await asyncio.gather(starting, return_exceptions=True)
            log.info("stopped while starting")
            return 0
        try:
            engine, tokenizer = starting.result()
        except EngineDead as e:
            log.error("the engine could not start: %s", e)
            return 1
        endpoint = self.settings.otlp_traces_endpoint
        app = build_app(engine, tokenizer, self.settings, otlp_provider(endpoint) if endpoint else None)
        engine.on_change = app.state.service.note_interruption
        spare_collector()
        self.gate.app = app
        if self.on_ready is not None:
            self.on_ready(engine.info, url)
        log.info("ready on %s", url)
        try:
            return await self._serve(engine, app.state.service)
        finally:
            await engine.close()
            app.state.service.close()

    async def _start(self) -> tuple[Supervisor, ServeTokenizer]:
        settings = self.settings
        self.gate.note("finding the model")
        model = await asyncio.to_thread(self.find_model)
        self.gate.note("starting the engine's process")
        start = functools.partial(
            EngineClient.start, model.engine, stall_timeout=settings.stall_timeout,
            start_timeout=settings.start_timeout, on_progress=self.gate.note,
            log_level=logging.getLevelName(settings.log_level.upper()), log_format=settings.log_format)
        starting = asyncio.create_task(Supervisor.start(start, settings.engine_restarts))
        loading = asyncio.create_task(asyncio.to_thread(model.tokenizer))
        try:
            return await asyncio.gather(starting, loading)
        except BaseException:  # either failed, or this start was cancelled: nothing of it stays
            starting.cancel()
            engine, _ = await asyncio.gather(starting, loading, return_exceptions=True)
            if isinstance(engine, Supervisor):
                await engine.close()
            raise

    async def _serve(self, engine: Supervisor, service: Service) -> int:
        stop, dead = asyncio.create_task(self.stops.first.wait()), asyncio.create_task(engine.dead())
        await asyncio.wait((stop, dead), return_when=asyncio.FIRST_COMPLETED)
        service.draining = True
        if dead.done():
            log.error("the engine has died: %s", dead.result())
            await self._until_idle(service, LAST_ANSWERS_SECONDS)
            return 1
        log.info("draining: %d requests in flight", service.live_calls)
        await self._until_idle(service, self.settings.drain_timeout)
        died = dead.done()
        dead.cancel()
        if service.live_calls and not died:
            why = "it was told to stop again" if self.stops.second.is_set() else TIME_OVER
            log.warning("aborting %d requests that were not complete when %s", service.live_calls, why)
            with contextlib.suppress(TimeoutError, EngineDead):
                await asyncio.wait_for(service.end_drain(why), LAST_ANSWERS_SECONDS)
        return 1 if died else 0

    async def _until_idle(self, service: Service, timeout: float) -> None:
        """Until no call is live, time is up, or the second signal comes."""
        ends = asyncio.get_running_loop().time() + timeout
        while service.live_calls and not self.stops.second.is_set():
            left = ends - asyncio.get_running_loop().time()
            if left <= 0:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.stops.second.wait(), min(left, 0.05))


def run_server(find_model: FindModel, settings: ServeSettings, on_ready: OnReady | None = None) -> int:
    """Serves until SIGTERM, Ctrl-C or the engine's last death. Blocks; call it on the main thread.

    Args:
        find_model: called once, on a thread, when the address answers; it may take long.
        on_ready: called once with the engine's info and the server's URL.
    Returns the exit code: 0 after a stop that was asked for, 1 when the engine failed.
    Raises OSError when the address is taken, compat.ConfigError for a configuration that the engine refuses, and what
    `find_model` and the tokenizer's factory raise."""
    sock = bind(settings.host, settings.port) if settings.uds is None else bind_unix(settings.uds)
    _allow_many_connections()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            return runner.run(_Server(find_model, settings, on_ready).run(sock))
        finally:
            if settings.uds is not None:
                settings.uds.unlink(missing_ok=True)
