"""The gateway in front of the replicas: a program of somebody else, how it is started and told who is there.

smg: requests that name a session in a header stay with the replica that has it; that of a new session is drawn at
random. Others go where their prompt's beginning was last seen, unless that replica is busier than the rest.
vllm-router: those of a session have a place on a ring of hashes, and others are spread. What both do for us besides: a
request that a replica did not take, or lost before its answer began, goes to another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import secrets
import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import httpx

from stretto.compat import ConfigError, Refusal
from stretto.config import ServeSection
from stretto.replicas.offers import DEFAULT_GATEWAY, OFFERS

INSTALL = {"smg": "pip install 'stretto[router]'", "vllm-router": "pip install vllm-router"}
# Of the session headers that the server reads (serve/sessions.py) those that name a conversation as long as it lasts.
# smg routes by all of them, and passes the first two on.
SESSION_HEADERS = ("x-smg-routing-key", "x-correlation-id", "x-session-id", "x-dynamo-session-id", "x-session-affinity")
REGISTER_SECONDS, WITHDRAW_SECONDS = 60.0, 60.0
LONG = 7 * 24 * 3600  # seconds; the replicas themselves end calls that take too long
UNEVEN = 16  # requests that one replica has more than another, from which on the load decides and not the prefix
POLL_SECONDS = 0.05
ANYWHERE = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}  # addresses to listen on -> one to call


def _bracketed(host: str) -> str:
    """As it stands in a URL."""
    return f"[{host}]" if ":" in host else host


def find_python(program: str, module: str, replicas: int) -> str:
    """The interpreter of the environment that has the gateway: this one, or that of the program on the PATH. Raises
    ConfigError."""
    if importlib.util.find_spec(module) is not None:
        return sys.executable
    script = shutil.which(program)
    if script is not None and (python := Path(script).with_name("python")).exists():
        return str(python)
    raise ConfigError([Refusal(f"--replicas {replicas}", "this installation", f"it has no gateway ({program})",
                               INSTALL.get(program, ""))])


@dataclass(frozen=True)
class Gateway(ABC):
    """One gateway: its program, and its control interface as calls of `http`."""

    python: str
    port: int
    metrics_port: int
    serve: ServeSection
    program: ClassVar[str]
    module: ClassVar[str]

    @property
    @abstractmethod
    def argv(self) -> list[str]:
        """Arguments of the program."""

    @abstractmethod
    async def workers(self, http: httpx.AsyncClient) -> dict[str, bool]:
        """URLs, and whether new requests go there."""

    @abstractmethod
    async def add(self, http: httpx.AsyncClient, url: str) -> httpx.Response:
        """It may take a while until requests go there."""

    @abstractmethod
    async def remove(self, http: httpx.AsyncClient, url: str) -> None:
        """What runs there goes on."""

    @property
    def url(self) -> str:
        return self._at(self.serve.host)

    @property
    def control_url(self) -> str:
        return self._at(ANYWHERE.get(self.serve.host, self.serve.host))

    @property
    def control_headers(self) -> dict[str, str]:
        return {}

    @property
    def metrics_url(self) -> str:
        """Its own metrics, from this machine: without TLS and keys, so on no other address than `url`."""
        host = ANYWHERE.get(self.serve.host, self.serve.host)
        return f"http://{_bracketed(host)}:{self.metrics_port}/metrics"

    def _at(self, host: str) -> str:
        return f"{'https' if self.serve.ssl_certfile else 'http'}://{_bracketed(host)}:{self.port}"

    @property
    def _usual(self) -> list[str]:
        serve = self.serve
        argv = ["--host", serve.host, "--port", str(self.port),
                "--prometheus-host", serve.host, "--prometheus-port", str(self.metrics_port),
                "--health-check-interval-secs", "2", "--health-failure-threshold", "2",
                "--worker-startup-check-interval", "1", "--request-timeout-secs", str(LONG),
                "--max-payload-size", str(serve.max_body_bytes)]
        return [*argv, "--cors-allowed-origins", *serve.allowed_origins] if serve.allowed_origins else argv


@dataclass(frozen=True)
class Smg(Gateway):
    """Keys of clients are checked here and by the replicas. `key`: opens the control interface, nobody else's."""

    program, module = "smg", "smg"
    key: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)

    @property
    def argv(self) -> list[str]:
        serve = self.serve
        argv = ["launch", *self._usual, "--policy", "cache_aware", "--balance-abs-threshold", str(UNEVEN),
                "--sticky-sessions", "--assignment-mode", "random", "--routing-key-headers", *SESSION_HEADERS,
                "--disable-tokenizer-autoload", "--history-backend", "none", "--shutdown-grace-period-secs", "5",
                "--log-json", "--log-level", "error" if serve.log_level == "error" else "warn",
                "--control-plane-api-keys", f"fleet:fleet:admin:{self.key}"]
        keys = [*serve.api_key, *serve.admin_api_key] if serve.api_key else []
        if keys:
            argv += ["--api-key", keys[0]]
        for number, key in enumerate(keys[1:], 1):
            argv += ["--tenant-api-key", f"key{number}:{key}"]
        for name in serve.served_model_name[1:]:
            argv += ["--model-alias", f"{name}={serve.served_model_name[0]}"]
        if serve.ssl_certfile:
            argv += ["--tls-cert-path", str(serve.ssl_certfile), "--tls-key-path", str(serve.ssl_keyfile)]
        return argv

    @property
    def control_headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"}

    async def _entries(self, http: httpx.AsyncClient) -> dict[str, dict[str, Any]]:
        answer = await http.get("/workers")
        answer.raise_for_status()
        return {worker["url"]: worker for worker in answer.json()["workers"]}

    async def workers(self, http: httpx.AsyncClient) -> dict[str, bool]:
        return {url: worker["is_healthy"] for url, worker in (await self._entries(http)).items()}

    async def add(self, http: httpx.AsyncClient, url: str) -> httpx.Response:
        keys = self.serve.api_key[:1]
        return await http.post("/workers", json={"url": url} | ({"api_key": keys[0]} if keys else {}))

    async def remove(self, http: httpx.AsyncClient, url: str) -> None:
        entries = await self._entries(http)
        if url in entries:
            await http.delete(f"/workers/{entries[url]['id']}")


@dataclass(frozen=True)
class VllmRouter(Gateway):
    """Passes on everything unread, keys of clients too, which the replicas check."""

    program, module = "vllm-router", "vllm_router.launch_router"

    @property
    def argv(self) -> list[str]:
        level = "error" if self.serve.log_level == "error" else "warning"
        return [*self._usual, "--policy", "consistent_hash", "--log-level", level]

    async def workers(self, http: httpx.AsyncClient) -> dict[str, bool]:
        answer = await http.get("/workers")
        answer.raise_for_status()
        return {worker["url"]: worker["is_healthy"] for worker in answer.json()["workers"]}

    async def add(self, http: httpx.AsyncClient, url: str) -> httpx.Response:
        return await http.post("/add_worker", params={"url": url})

    async def remove(self, http: httpx.AsyncClient, url: str) -> None:
        await http.post("/remove_worker", params={"url": url})


PROGRAMS: dict[str, type[Smg] | type[VllmRouter]] = {"smg": Smg, "vllm-router": VllmRouter}
assert PROGRAMS.keys() == OFFERS.keys()


def make_gateway(serve: ServeSection, port: int, metrics_port: int) -> Gateway:
    """The one that the settings name. Raises ConfigError where it is not installed."""
    kind = PROGRAMS[serve.gateway or DEFAULT_GATEWAY]
    return kind(find_python(kind.program, kind.module.partition(".")[0], serve.replicas), port, metrics_port, serve)


class Control:
    """The control interface of a running gateway. Every wait has an end: TimeoutError says what for."""

    def __init__(self, gateway: Gateway):
        self._gateway = gateway
        self._http = httpx.AsyncClient(base_url=gateway.control_url, timeout=10, trust_env=False, verify=False,
                                       headers=gateway.control_headers)

    async def close(self) -> None:
        await self._http.aclose()

    async def alive(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return (await self._http.get("/liveness")).status_code == 200
        return False

    async def admit(self, url: str) -> None:
        """From the return on, requests go there. One caller at a time: what an attempt before has left is removed."""
        if url in await self._gateway.workers(self._http):
            await self._gateway.remove(self._http, url)
        await self._until(lambda known: url not in known, WITHDRAW_SECONDS, f"the gateway does not let go of {url}")
        answer = await self._gateway.add(self._http, url)
        if answer.status_code >= 300:
            raise OSError(f"the gateway does not take {url}: {answer.status_code} {answer.text[:200]}")
        await self._until(lambda known: known.get(url, False), REGISTER_SECONDS, f"the gateway finds {url} unhealthy")

    async def withdraw(self, url: str) -> None:
        """From the return on, no new request goes there; those that run go on."""
        await self._gateway.remove(self._http, url)
        await self._until(lambda known: not known.get(url, False), WITHDRAW_SECONDS,
                          f"the gateway still sends to {url}")

    async def _until(self, reached: Callable[[dict[str, bool]], bool], seconds: float, else_: str) -> None:
        try:
            async with asyncio.timeout(seconds):
                while not reached(await self._gateway.workers(self._http)):
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError:
            raise TimeoutError(f"{else_} after {seconds:g} s") from None
