"""The gateway in front of the replicas: `smg`, a program of its own, how it is started and how it is told who is there.

Requests that name a session in a header stay with the replica that has it; that of a new session is drawn at random.
Others go where their prompt's beginning was last seen, unless that replica is busier than the rest (`cache_aware` with
sticky routing keys). What smg does for us besides: a request that a replica did not take, or lost before its answer
began, goes to another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import secrets
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from stretto.compat import ConfigError, Refusal
from stretto.config import Config, ServeSection

PROGRAM = "smg"
INSTALL = "pip install 'stretto[router]'"
# Of the session headers that the server reads (serve/sessions.py) those that name a conversation as long as it lasts.
# smg routes by all of them, and passes the first two on.
SESSION_HEADERS = ("x-smg-routing-key", "x-correlation-id", "x-session-id", "x-dynamo-session-id", "x-session-affinity")
REGISTER_SECONDS, WITHDRAW_SECONDS = 60.0, 60.0
LONG = 7 * 24 * 3600  # seconds; the replicas themselves end calls that take too long
UNEVEN = 16  # requests that one replica has more than another, from which on the load decides and not the prefix
POLL_SECONDS = 0.05


def find_python(replicas: int) -> str:
    """The interpreter of the environment that has smg: this one, or that of the `smg` on the PATH. Raises
    ConfigError."""
    if importlib.util.find_spec(PROGRAM) is not None:
        return sys.executable
    script = shutil.which(PROGRAM)
    if script is not None and (python := Path(script).with_name("python")).exists():
        return str(python)
    raise ConfigError([Refusal(f"--replicas {replicas}", "this installation", f"it has no gateway ({PROGRAM})",
                               INSTALL)])


@dataclass(frozen=True)
class Gateway:
    """One gateway. `key`: opens its control interface, and nobody else knows it."""

    python: str
    host: str
    port: int
    metrics_port: int
    serve: ServeSection
    key: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)

    @property
    def url(self) -> str:
        scheme = "https" if self.serve.ssl_certfile else "http"
        return f"{scheme}://[{self.host}]:{self.port}" if ":" in self.host else f"{scheme}://{self.host}:{self.port}"

    @property
    def argv(self) -> list[str]:
        """Arguments of the program. Keys of clients are checked here and by the replicas."""
        serve = self.serve
        argv = ["launch", "--host", self.host, "--port", str(self.port), "--prometheus-port", str(self.metrics_port),
                "--policy", "cache_aware", "--balance-abs-threshold", str(UNEVEN), "--sticky-sessions",
                "--assignment-mode", "random", "--routing-key-headers", *SESSION_HEADERS,
                "--disable-tokenizer-autoload", "--history-backend", "none",
                "--health-check-interval-secs", "2", "--health-failure-threshold", "2",
                "--worker-startup-check-interval", "1", "--request-timeout-secs", str(LONG),
                "--shutdown-grace-period-secs", "5", "--max-payload-size", str(serve.max_body_bytes),
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
        if serve.allowed_origins:
            argv += ["--cors-allowed-origins", *serve.allowed_origins]
        return argv


def make_gateway(config: Config, port: int, metrics_port: int) -> Gateway:
    """Raises ConfigError without smg."""
    return Gateway(find_python(config.serve.replicas), config.serve.host, port, metrics_port, config.serve)


class Control:
    """The control interface of a running gateway. Every wait has an end: TimeoutError says what for."""

    def __init__(self, gateway: Gateway):
        host = "127.0.0.1" if gateway.host in ("0.0.0.0", "") else "::1" if gateway.host == "::" else gateway.host
        here = f"[{host}]" if ":" in host else host
        scheme = gateway.url.partition(":")[0]
        self._worker_key = next(iter(gateway.serve.api_key), None)
        self._http = httpx.AsyncClient(base_url=f"{scheme}://{here}:{gateway.port}", timeout=10, trust_env=False,
                                       verify=False, headers={"Authorization": f"Bearer {gateway.key}"})

    async def close(self) -> None:
        await self._http.aclose()

    async def alive(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return (await self._http.get("/liveness")).status_code == 200
        return False

    async def workers(self) -> dict[str, dict[str, Any]]:
        """By URL."""
        answer = await self._http.get("/workers")
        answer.raise_for_status()
        return {worker["url"]: worker for worker in answer.json()["workers"]}

    async def admit(self, url: str) -> None:
        """From the return on, requests go there."""
        await self._until(lambda known: url not in known, WITHDRAW_SECONDS, f"the gateway does not let go of {url}")
        body = {"url": url} | ({"api_key": self._worker_key} if self._worker_key else {})
        answer = await self._http.post("/workers", json=body)
        if answer.status_code >= 300:
            raise OSError(f"the gateway does not take {url}: {answer.status_code} {answer.text[:200]}")
        await self._until(lambda known: known.get(url, {}).get("is_healthy", False), REGISTER_SECONDS,
                          f"the gateway finds {url} unhealthy")

    async def withdraw(self, url: str) -> None:
        """From the return on, no new request goes there; those that run go on."""
        worker = (await self.workers()).get(url)
        if worker is not None:
            await self._http.delete(f"/workers/{worker['id']}")
            await self._until(lambda known: known.get(url, {}).get("status") in (None, "draining"), WITHDRAW_SECONDS,
                              f"the gateway still sends to {url}")

    async def _until(self, reached: Callable[[dict[str, dict[str, Any]]], bool], seconds: float, else_: str) -> None:
        try:
            async with asyncio.timeout(seconds):
                while not reached(await self.workers()):
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError:
            raise TimeoutError(f"{else_} after {seconds:g} s") from None
