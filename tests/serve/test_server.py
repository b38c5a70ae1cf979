"""The server as a program: starting, draining, dying, and what it leaves behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import uvicorn

from stretto.serve.server import _Server, bind, bind_unix, url_of
from stretto.serve.settings import ServeSettings
from tests.serve.conftest import events

ROOT = Path(__file__).resolve().parents[2]
SLOW = {"step_seconds": 0.02, "max_model_len": 100_000}


class Program:
    def __init__(self, options: dict[str, Any], settings: dict[str, Any]):
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self._file = tempfile.TemporaryFile("w+")  # noqa: SIM115  (lives as long as the program)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.serve.serve_fake", str(self.port), json.dumps(options), json.dumps(settings)],
            cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=self._file)
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=20, trust_env=False)

    def log(self) -> str:
        """What the program has written to stderr."""
        self._file.seek(0)
        return self._file.read()

    def until(self, path: str, status: int, seconds: float = 20.0) -> httpx.Response:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.TransportError):
                answer = self.http.get(path)
                if answer.status_code == status:
                    return answer
            time.sleep(0.05)
        raise AssertionError(f"{path} did not become {status}; exit code {self.process.poll()}")

    def engine(self) -> psutil.Process:
        (engine,) = [c for c in psutil.Process(self.process.pid).children() if "spawn_main" in " ".join(c.cmdline())]
        return engine

    def complete(self, prompt: str, **fields: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 50} | fields)

    def in_thread(self, prompt: str, **fields: Any) -> tuple[threading.Thread, list[httpx.Response]]:
        answers: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: answers.append(self.complete(prompt, **fields)))
        thread.start()
        return thread, answers

    def until_running(self, count: int) -> None:
        deadline = time.monotonic() + 10
        while f'stretto_running{{engine="0",model_name="fake/tiny"}} {count}.0' not in self.http.get("/metrics").text:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def generated(server: Program) -> float:
    line = next(line for line in server.http.get("/metrics").text.splitlines()
                if line.startswith("stretto_generated_tokens_total{"))
    return float(line.rpartition(" ")[2])


@contextlib.contextmanager
def program(options: dict[str, Any] | None = None, **settings: Any) -> Iterator[Program]:
    made = Program(options or {}, settings)
    try:
        yield made
    finally:
        made.http.close()
        made.process.kill()
        made.process.wait()


def test_life_of_a_server():
    """Alive and not ready while it starts; drains on SIGTERM: what runs is finished, new requests are refused."""
    with program({"start_seconds": 1.5} | SLOW) as server:
        starting = server.until("/readyz", 503)
        assert starting.json()["error"]["code"] == "starting" and starting.headers["retry-after"]
        assert server.http.get("/livez").status_code == 200 and server.http.get("/startupz").status_code == 503
        assert server.complete("x").json()["error"]["code"] == "starting"
        server.until("/readyz", 200)
        assert server.http.get("/startupz").status_code == 200
        assert server.complete("say:hi").json()["choices"][0]["text"] == "hi"
        engine = server.engine()
        thread, answers = server.in_thread("x", max_tokens=50, stream=True)
        server.until_running(1)
        server.process.send_signal(signal.SIGTERM)
        draining = server.until("/readyz", 503)
        assert draining.json()["error"]["code"] == "draining"
        assert server.complete("y").json()["error"]["code"] == "draining"
        thread.join(10)
        assert events(answers[0].text)[-1] == "[DONE]"
        assert server.process.wait(10) == 0 and not engine.is_running()
        with socket.create_server(("127.0.0.1", server.port)):
            pass  # the port is free again


@pytest.mark.parametrize("second_signal", [None, signal.SIGINT, signal.SIGHUP])
def test_a_drain_ends_in_time_and_tells_the_clients(second_signal: signal.Signals | None):
    with program(SLOW, drain_timeout=60 if second_signal else 0.3) as server:
        server.until("/readyz", 200)
        calls = [server.in_thread("x", max_tokens=90_000, stream=stream) for stream in (True, False)]
        server.until_running(2)
        server.process.send_signal(second_signal or signal.SIGINT)
        if second_signal:
            server.until("/readyz", 503)
            server.process.send_signal(second_signal)
        assert server.process.wait(10) == 0
        for thread, _ in calls:
            thread.join(10)
        streamed, whole = (answers[0] for _, answers in calls)
        assert events(streamed.text)[-1]["error"]["code"] == "draining"
        assert whole.status_code == 503 and whole.json()["error"]["code"] == "draining"  # no fault of the client
        why = "told to stop again" if second_signal else "--drain-timeout"
        assert whole.headers["retry-after"] and why in whole.json()["error"]["message"]


def test_case_17_07_signals_while_loading_leave_nothing():
    with program({"start_seconds": 60}) as server:
        server.until("/livez", 200)
        time.sleep(0.5)
        engine = server.engine()
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(10) == 0
        psutil.wait_procs([engine], timeout=10)
        assert not engine.is_running()


def test_case_17_07_a_killed_server_leaves_no_engine():
    with program() as server:
        server.until("/readyz", 200)
        family = psutil.Process(server.process.pid).children(recursive=True)
        assert server.engine() in family
        server.process.kill()
        _, alive = psutil.wait_procs(family, timeout=10)
        assert not alive


def test_case_17_07_an_engine_that_is_killed_is_started_again():
    """Who waits is told; probes say what is going on; nothing that reads counters sees them fall; nothing is left."""
    with program({"start_seconds": 1.0} | SLOW) as server:
        server.until("/readyz", 200)
        assert server.complete("say:hello").json()["usage"]["completion_tokens"] == 6
        thread, answers = server.in_thread("x", max_tokens=90_000)
        server.until_running(1)
        before, first = generated(server), server.engine()
        first.kill()
        thread.join(10)
        told = answers[0]
        assert told.status_code == 503 and told.json()["error"]["code"] == "engine_dead" and told.headers["retry-after"]
        assert "ended unexpectedly (exit code -9)" in told.json()["error"]["message"]
        restarting = server.until("/readyz", 503)
        assert restarting.json()["error"]["code"] == "engine_restarting"
        assert server.http.get("/livez").status_code == server.http.get("/startupz").status_code == 200
        refused = server.complete("x")
        assert refused.json()["error"]["code"] == "engine_restarting" and refused.headers["retry-after"] == "5"
        assert generated(server) >= before >= 6
        server.until("/readyz", 200)
        assert server.complete("say:hi").json()["choices"][0]["text"] == "hi"
        assert generated(server) >= before + 3
        assert "stretto_engine_restarts_total" in server.http.get("/metrics").text
        assert not first.is_running() and server.engine().pid != first.pid
        family = psutil.Process(server.process.pid).children(recursive=True)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) == 0
        assert not psutil.wait_procs(family, timeout=10)[1]


def test_an_engine_that_dies_too_often_ends_the_server():
    with program(engine_restarts=1) as server:
        server.until("/readyz", 200)
        assert server.complete("fault:first").json()["error"]["message"].endswith("step failed: first")
        server.until("/readyz", 503)
        server.until("/readyz", 200)
        assert server.complete("exit:second").status_code == 503
        assert server.process.wait(15) == 1
        assert "died 2 times in 600 s" in server.log()


def test_a_stop_while_an_engine_is_started_again():
    with program({"start_seconds": 1.0} | SLOW) as server:
        server.until("/readyz", 200)
        server.engine().kill()
        server.until("/readyz", 503)
        time.sleep(0.8)
        family = psutil.Process(server.process.pid).children(recursive=True)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) == 0
        assert not psutil.wait_procs(family, timeout=10)[1]


def test_case_17_01_a_dead_engine_ends_the_server_with_an_error():
    with program(SLOW, engine_restarts=0) as server:
        server.until("/readyz", 200)
        thread, answers = server.in_thread("x", max_tokens=90_000)
        server.until_running(1)
        server.engine().kill()
        thread.join(10)
        assert answers[0].status_code == 503 and answers[0].json()["error"]["code"] == "engine_dead"
        assert server.process.wait(15) == 1
        assert "ended unexpectedly" in server.log()


def test_a_failed_start_says_why():
    with program({"start_error": "no such model"}) as server:
        assert server.process.wait(20) == 1
        assert "no such model" in server.log()


def test_a_taken_port_is_named_before_anything_loads():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}"):
            bind("127.0.0.1", port)


def test_of_two_servers_that_start_at_once_one_has_the_port():
    """Bound and not listening, both would have it, and one would wait for calls that never come."""
    with bind("127.0.0.1", 0) as first, pytest.raises(OSError, match=r"cannot listen on 127.0.0.1:.*choose another"):
        bind(*first.getsockname())


async def test_an_engine_behind_no_http_server_ends(monkeypatch: pytest.MonkeyPatch):
    async def breaks(self: uvicorn.Server, sockets: list[socket.socket]) -> None:
        raise OSError("no descriptors are left")

    async def waits(self: _Server, url: str) -> int:
        return await asyncio.Event().wait()

    monkeypatch.setattr(uvicorn.Server, "serve", breaks)
    monkeypatch.setattr(_Server, "_run_engine", waits)
    with bind("127.0.0.1", 0) as sock, pytest.raises(OSError, match="no descriptors are left"):
        await asyncio.wait_for(_Server(lambda: None, ServeSettings(), None).run(sock), 10)


def test_urls():
    with bind("127.0.0.1", 0) as sock:
        assert url_of(sock) == f"http://127.0.0.1:{sock.getsockname()[1]}"


def test_settings_are_checked():
    with pytest.raises(ValueError):
        ServeSettings(api_keys=("",))


def test_a_unix_socket_is_served_and_removed(tmp_path: Path):
    path = tmp_path / "s.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(path))  # a file that nobody listens on is replaced
    with program(uds=str(path)) as server:
        server.http = httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://unix")
        server.until("/readyz", 200)
        assert server.complete("say:hi").json()["choices"][0]["text"] == "hi"
        with pytest.raises(OSError, match="another server"):
            bind_unix(path)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) == 0 and not path.exists()


def test_tls(tmp_path: Path):
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl, which makes the certificate, is not installed")
    subprocess.run([openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
                    "-keyout", key, "-out", certificate, "-days", "1", "-subj", "/CN=localhost", "-addext",
                    "subjectAltName=DNS:localhost"], check=True, capture_output=True)
    with program(ssl_certfile=str(certificate), ssl_keyfile=str(key)) as server:
        server.http = httpx.Client(verify=ssl.create_default_context(cafile=certificate), trust_env=False,
                                   base_url=f"https://localhost:{server.port}")
        server.until("/readyz", 200)
        assert server.complete("say:hi").json()["choices"][0]["text"] == "hi"


def test_logs_are_json_with_request_ids():
    with program(log_format="json", engine_restarts=0) as server:
        server.until("/readyz", 200)
        answer = server.http.post("/v1/completions", json={"prompt": "say:hi"}, headers={"X-Request-Id": "mine"})
        assert answer.status_code == 200
        crash = server.http.post("/v1/completions", json={"prompt": "crash:x"}, headers={"X-Request-Id": "a#b"})
        assert crash.status_code == 500
        assert server.http.post("/v1/completions", json={"prompt": "fault:x"}).status_code == 503
        server.process.wait(20)
        print(server.log())  # shown where a line is not JSON
        entries = [json.loads(line) for line in server.log().splitlines()]
    done = next(entry for entry in entries if entry.get("prompt_tokens"))
    assert done["request_id"] == done["id"] == "mine" and done["finish_reasons"] == ["stop"] and done["seconds"] > 0
    assert {entry["process"] for entry in entries} == {"server", "engine"}
    crashed = next(entry for entry in entries if "failed to take request" in entry["message"])
    assert crashed["request_id"] == "a#b" and crashed["process"] == "engine" and "submit failed" in crashed["exception"]
    assert any("step failed" in entry.get("exception", "") for entry in entries)
