"""Two gateways in front of two servers: sessions stay where they are, every API passes, a client that leaves is felt
behind the gateway, and a server that dies costs no more than what it was doing."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.clients.environments import python_environment
from tests.serve.test_server import Program, program

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]  # an environment may have to be made first
SMG, SMG_FLAGS = "smg==1.13.0", ("--policy", "consistent_hashing", "--routing-key-headers", "x-session-id")
ROUTER, ROUTER_FLAGS = "vllm-router==0.1.17", ("--policy", "consistent_hash")


def smg(workers: list[str], port: int, metrics: int) -> list[str]:
    python = python_environment("smg", SMG)
    return [str(python.with_name("smg")), "launch", "--worker-urls", *workers, "--port", str(port),
            "--prometheus-port", str(metrics), *SMG_FLAGS, "--health-check-interval-secs", "1"]


def vllm_router(workers: list[str], port: int, metrics: int) -> list[str]:
    python = python_environment("vllm-router", ROUTER)
    return [str(python.with_name("vllm-router")), "--worker-urls", *workers, "--port", str(port),
            "--prometheus-port", str(metrics), *ROUTER_FLAGS]


@dataclass
class Gateway:
    http: httpx.Client
    workers: tuple[Program, Program]

    def complete(self, prompt: str, session: str, **fields: object) -> httpx.Response:
        body = {"model": "fake/tiny", "prompt": prompt, "max_tokens": 9} | fields
        return self.http.post("/v1/completions", json=body, headers={"x-session-id": session})


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


@pytest.fixture(scope="module", params=[smg, vllm_router], ids=["smg", "vllm-router"])
def gateway(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    options = {"max_model_len": 4000, "step_seconds": 0.005}
    with program(options) as one, program(options) as two:
        for worker in (one, two):
            worker.until("/readyz", 200)
        port, log = free_port(), tmp_path_factory.mktemp("gateway") / "log"
        urls = [f"http://127.0.0.1:{worker.port}" for worker in (one, two)]
        with log.open("w") as output:
            process = subprocess.Popen(request.param(urls, port, free_port()), stdout=output, stderr=output)
        http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30, trust_env=False)
        try:
            _until_serving(http, process, log)
            yield Gateway(http, (one, two))
        finally:
            http.close()
            process.kill()
            process.wait()


def _until_serving(http: httpx.Client, process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if http.get("/v1/models").status_code == 200:
                return
        time.sleep(0.2)
    raise AssertionError(f"the gateway does not serve: {log.read_text()[-2000:]}")


def value(worker: Program, name: str, *labels: str) -> float:
    """The sum of a metric's series that have these labels."""
    lines = worker.http.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines
               if line.startswith(name + "{") and all(label in line for label in labels))


def answered(worker: Program) -> float:
    return value(worker, "stretto_http_responses_total", 'route="/v1/completions"')


def test_a_session_stays_with_its_server(gateway: Gateway):
    homes = set()
    for session in range(10):
        before = [answered(worker) for worker in gateway.workers]
        for _ in range(3):
            assert gateway.complete("say:hi", f"session {session}").json()["choices"][0]["text"] == "hi"
        grown = [answered(worker) - old for worker, old in zip(gateway.workers, before, strict=True)]
        assert sorted(grown) == [0, 3], f"session {session} was at {grown}"
        homes.add(grown.index(3))
    assert homes == {0, 1}, "ten sessions, and one server has them all"


@pytest.mark.parametrize("path, body, read", [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "say:hi"}]},
     lambda found: found["choices"][0]["message"]["content"]),
    ("/v1/responses", {"input": "say:hi"}, lambda found: found["output"][0]["content"][0]["text"]),
    ("/v1/messages", {"messages": [{"role": "user", "content": "say:hi"}], "max_tokens": 9},
     lambda found: found["content"][0]["text"]),
    ("/generate", {"text": "say:hi", "sampling_params": {"max_new_tokens": 9}}, lambda found: found["text"])])
def test_every_api_passes(gateway: Gateway, path: str, body: dict, read: Callable[[dict], str]):
    model = {} if path == "/generate" else {"model": "fake/tiny"}
    answer = gateway.http.post(path, json=model | body, headers={"x-session-id": "s"})
    assert answer.status_code == 200 and read(answer.json()) == "hi", answer.text


def test_streams_and_errors_pass(gateway: Gateway):
    body = {"model": "fake/tiny", "messages": [{"role": "user", "content": "say:streamed"}], "stream": True}
    answer = gateway.http.post("/v1/chat/completions", json=body)
    assert answer.text.count("data: ") > 8 and answer.text.rstrip().endswith("data: [DONE]")
    refused = gateway.complete("x", "s", stop_token_ids=[-5])
    assert refused.status_code == 400 and refused.json()["error"]["type"] == "invalid_request_error"


def test_case_6_03_a_client_that_leaves_is_felt_behind_the_gateway(gateway: Gateway):
    before = sum(value(w, "stretto_request_aborts_total", "client_disconnected") for w in gateway.workers)
    body = {"model": "fake/tiny", "prompt": "x", "max_tokens": 3000, "stream": True}
    with gateway.http.stream("POST", "/v1/completions", json=body) as answer:
        next(answer.iter_lines())
        assert sum(value(w, "stretto_running") for w in gateway.workers) == 1
    deadline = time.monotonic() + 5
    while sum(value(w, "stretto_running") for w in gateway.workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert sum(value(w, "stretto_running") for w in gateway.workers) == 0
    after = sum(value(w, "stretto_request_aborts_total", "client_disconnected") for w in gateway.workers)
    assert after == before + 1


def test_the_sessions_of_a_dead_server_move(gateway: Gateway):
    """The last test of a gateway: one of its servers is gone afterwards."""
    gateway.workers[0].process.kill()
    deadline, good = time.monotonic() + 40, 0
    while good < 20 and time.monotonic() < deadline:  # twenty in a row, over all sessions
        answer = gateway.complete("say:hi", f"session {good % 10}")
        good = good + 1 if answer.status_code == 200 and answer.json()["choices"][0]["text"] == "hi" else 0
    assert good == 20
