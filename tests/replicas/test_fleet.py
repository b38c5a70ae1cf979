"""Several servers behind the gateway, under load: restarts lose nothing, deaths cost what had begun, one signal ends
all. The gateway is a program of an environment of its own (tests/clients/environments.py)."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from stretto.replicas.offers import OFFERS
from tests.clients.environments import python_environment
from tests.clients.test_gateways import ROUTER, SMG
from tests.serve.conftest import events

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]  # an environment may have to be made first
ROOT = Path(__file__).resolve().parents[2]
STORIES = ROOT / "../shared/data/models/stories260k"
OPTIONS = {"max_model_len": 100_000, "step_seconds": 0.005}


class FleetProgram:
    def __init__(self, folder: Path, count: int, options: dict[str, Any], settings: dict[str, Any]):
        self._log = folder / "log"
        self.key = settings.get("api_keys", [None])[0]
        self.program = settings.get("gateway", {}).get("gateway", "smg")
        python = str(python_environment(self.program, {"smg": SMG, "vllm-router": ROUTER}[self.program]))
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.replicas.fleet_of_fakes", python, str(count),
                 json.dumps(options), json.dumps(settings)],
                cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=log, text=True)
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        self.http = httpx.Client(timeout=60, trust_env=False, headers=headers)  # at the address that the report names

    def ready(self) -> dict[str, Any]:
        """The report; ends with the fleet's first line."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.log()
        report = json.loads(line)
        self.http.base_url = report["gateway"]["url"]
        return report

    def log(self) -> str:
        return self._log.read_text()

    def until(self, what: Callable[[], bool], seconds: float = 60) -> None:
        ends = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < ends and self.process.poll() is None, self.log()[-3000:]
            time.sleep(0.05)

    def complete(self, prompt: str | list[int], session: str, **fields: Any) -> httpx.Response:
        body = {"model": "fake/tiny", "prompt": prompt, "max_tokens": 40} | fields
        return self.http.post("/v1/completions", json=body, headers={"x-session-id": session})

    def replica(self, index: int) -> psutil.Process:
        (found,) = [child for child in psutil.Process(self.process.pid).children()
                    if f"replica-{index}" in child.cmdline()]
        return found

    def gateway(self) -> psutil.Process:
        """The child that is no replica; it chooses its name itself."""
        (found,) = [child for child in psutil.Process(self.process.pid).children()
                    if not any("replica-" in part for part in child.cmdline())]
        return found


@contextlib.contextmanager
def fleet(folder: Path, count: int = 2, options: dict[str, Any] | None = None,
          **settings: Any) -> Iterator[FleetProgram]:
    made = FleetProgram(folder, count, OPTIONS | (options or {}), settings)
    try:
        yield made
    finally:
        made.http.close()
        family = psutil.Process(made.process.pid).children(recursive=True) if made.process.poll() is None else []
        made.process.kill()
        made.process.wait()
        assert not psutil.wait_procs(family, timeout=10)[1], "something outlives the fleet"


class Load:
    """Clients that go on until they are told to stop; each is a session of its own, and every second call streams."""

    def __init__(self, served: FleetProgram, clients: int, tokens: int):
        self.answers: list[tuple[str, bool, httpx.Response]] = []
        self._served, self._tokens, self._over = served, tokens, threading.Event()
        self._threads = [threading.Thread(target=self._client, args=(i,)) for i in range(clients)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _client(self, number: int) -> None:
        turn = 0
        while not self._over.is_set():
            streamed = bool(turn % 2)
            answer = self._served.complete(f"client {number} turn {turn}", f"client {number}",
                                           max_tokens=self._tokens, stream=streamed)
            self.answers.append((f"client {number}", streamed, answer))
            turn += 1

    def failures(self) -> list[str]:
        """Answers that are not whole: another status, an error in the stream, or no end."""
        return [f"{who}: {answer.status_code} {answer.text[-300:]}" for who, streamed, answer in self.answers
                if answer.status_code != 200 or (streamed and (events(answer.text)[-1] != "[DONE]"
                                                               or '"error"' in answer.text))]


both = pytest.mark.parametrize("program", ["smg", "vllm-router"])


@both
def test_a_rolling_restart_loses_no_request(tmp_path: Path, program: str):
    with fleet(tmp_path, gateway={"gateway": program}, api_keys=["k1", "k2"], admin_keys=["a1"]) as served:
        report = served.ready()
        assert [one["replica"] for one in report["replicas"]] == [0, 1] and "k1" not in json.dumps(report)
        before = [served.replica(i).pid for i in (0, 1)]
        with Load(served, 8, 60) as load:
            time.sleep(0.5)
            served.process.send_signal(signal.SIGHUP)
            served.until(lambda: "all replicas have been restarted" in served.log())
            time.sleep(0.5)
        assert load.failures() == [] and len(load.answers) > 16
        assert not {served.replica(i).pid for i in (0, 1)} & set(before)
        for key, status in (("k2", 200), ("a1", 200), ("wrong", 401)):
            answer = served.http.post("/v1/completions", json={"prompt": "say:hi", "model": "fake/tiny"},
                                      headers={"Authorization": f"Bearer {key}"})
            assert answer.status_code == status, f"{key}: {answer.text}"
        if OFFERS[program].guarded:
            assert served.http.post("/workers", json={"url": "http://127.0.0.1:9"}).status_code in (401, 403)
        secret = [argument for child in psutil.Process(served.process.pid).children(recursive=True)
                  for argument in child.cmdline() if "k1" in argument or "k2" in argument or "admin" in argument]
        assert secret == [], "keys can be seen by everybody on this machine"


@both
def test_a_killed_replica_costs_no_more_than_what_it_was_answering(tmp_path: Path, program: str):
    with fleet(tmp_path, gateway={"gateway": program}) as served:
        served.ready()
        running: list[str] = []  # texts; one whose connection breaks is an error as well

        def long(number: int) -> None:
            try:
                running.append(served.complete("x", f"running {number}", max_tokens=500, stream=True).text)
            except httpx.HTTPError as e:
                running.append(f'"error" {e!r}')

        threads = [threading.Thread(target=long, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        time.sleep(1)
        victim = served.replica(1)
        victim.kill()
        with Load(served, 4, 20) as load:  # who comes after it notices nothing
            for thread in threads:
                thread.join()
            served.until(lambda: "replica 1 serves" in served.log().partition("has died")[2])
        assert load.failures() == [] and len(load.answers) > 8
        told = [text for text in running if '"error"' in text]
        assert told and len(told) < 8, "the sessions were not on both replicas"
        short = [text[-400:] for text in running if text not in told and '"finish_reason":"length"' not in text]
        assert short == [], "an answer was cut off in silence"
        assert "replica 1 has died (exit code -9)" in served.log() and victim.pid != served.replica(1).pid


def test_sessions_stay_where_they_are_and_common_beginnings_meet(tmp_path: Path):
    with fleet(tmp_path, count=3) as served:
        urls = [one["url"] for one in served.ready()["replicas"]]

        def answered() -> list[float]:
            pages = [httpx.get(f"{url}/metrics", trust_env=False).text.splitlines() for url in urls]
            return [sum(float(line.rpartition(" ")[2]) for line in page
                        if line.startswith("stretto_http_responses_total{") and 'route="/v1/completions"' in line)
                    for page in pages]

        pages = served.http.get("/engine_metrics").text
        assert all(f'engine="{number}"' in pages for number in range(3))
        homes = set()
        for session in range(12):
            before = answered()
            for turn in range(4):
                assert served.complete(f"say:{session} {turn}", f"session {session}").status_code == 200
            grown = [now - old for now, old in zip(answered(), before, strict=True)]
            assert sorted(grown) == [0, 0, 4], f"session {session} was at {grown}"
            homes.add(grown.index(4))
        assert len(homes) > 1, "twelve sessions, and one server has them all"
        before, prompt = answered(), "say:" + "one long beginning that all of them share " * 20
        for ending in range(6):  # no session: the prefix decides
            served.http.post("/v1/completions",
                             json={"model": "fake/tiny", "prompt": f"{prompt}{ending}", "max_tokens": 2})
        assert sorted(now - old for now, old in zip(answered(), before, strict=True)) == [0, 0, 6]


def test_tls_ends_at_the_gateway_and_pages_elsewhere_may_call(tmp_path: Path):
    """So do all names of the model, and bodies have their limit there."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl, which makes the certificate, is not installed")
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run([openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
                    "-keyout", key, "-out", certificate, "-days", "1", "-subj", "/CN=localhost", "-addext",
                    "subjectAltName=DNS:localhost"], check=True, capture_output=True)
    own = {"ssl_certfile": str(certificate), "ssl_keyfile": str(key), "allowed_origins": ["https://chat.example"],
           "max_body_bytes": 10_000, "served_model_name": ["fake/tiny", "chat"]}
    with fleet(tmp_path, gateway=own, served_model_names=["fake/tiny", "chat"],
               allowed_origins=["https://chat.example"]) as served:
        served.ready()
        served.http = httpx.Client(verify=ssl.create_default_context(cafile=certificate), trust_env=False,
                                   base_url=f"https://localhost:{served.http.base_url.port}", timeout=30)
        for model in ("fake/tiny", "chat"):
            answer = served.complete("say:hi", "s", model=model)
            assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == "hi", answer.text
        assert served.complete("say:" + "x" * 20_000, "s").status_code == 413
        page = {"Origin": "https://chat.example", "Access-Control-Request-Method": "POST"}
        allowed = served.http.options("/v1/completions", headers=page)
        assert allowed.headers["access-control-allow-origin"] in ("https://chat.example", "*")
        called = served.http.post("/v1/completions", json={"model": "fake/tiny", "prompt": "say:hi"},
                                  headers={"Origin": "https://chat.example"})
        assert called.status_code == 200


def test_adapters_and_token_ids_pass_where_nothing_is_read(tmp_path: Path):
    router, adapters = {"gateway": "vllm-router"}, {"fine": "/adapters/fine"}
    with fleet(tmp_path, options={"adapters": adapters}, gateway=router) as served:
        served.ready()
        answer = served.complete("say:hi", "s", model="fine")
        assert answer.status_code == 200 and answer.json()["model"] == "fine", answer.text
        assert served.complete([1, 2, 3], "s").status_code == 200
        assert served.complete("x", "s", model="none").status_code == 404


@both
def test_a_stop_drains_and_leaves_nothing(tmp_path: Path, program: str):
    with fleet(tmp_path, gateway={"gateway": program}) as served:
        served.ready()
        family = psutil.Process(served.process.pid).children(recursive=True)
        answers: list[httpx.Response] = []
        threads = [threading.Thread(target=lambda i=i: answers.append(
            served.complete("x", f"s{i}", max_tokens=300, stream=True))) for i in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(0.5)
        served.process.send_signal(signal.SIGINT)
        for thread in threads:
            thread.join()
        assert [events(answer.text)[-1] for answer in answers] == ["[DONE]"] * 4
        assert all('"error"' not in answer.text for answer in answers)
        assert served.process.wait(30) == 0, served.log()
        assert not psutil.wait_procs(family, timeout=5)[1]


def test_a_killed_gateway_comes_back_and_a_killed_fleet_leaves_nothing(tmp_path: Path):
    with fleet(tmp_path) as served:
        served.ready()
        served.gateway().kill()
        served.until(lambda: "the gateway has died (exit code -9)" in served.log())

        def answers() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return all(served.complete("say:hi", f"s{i}").status_code == 200 for i in range(6))
            return False

        served.until(answers)
        family = psutil.Process(served.process.pid).children(recursive=True)
        served.process.kill()
        assert not psutil.wait_procs(family, timeout=10)[1]


@pytest.mark.skipif(not STORIES.exists(), reason="shared/data/models/stories260k is absent")
def test_the_command_serves_real_engines_with_sessions(tmp_path: Path):
    """`stretto serve --replicas 2`: a session goes on at its replica, appended to, and is found nowhere else."""
    smg = python_environment("smg", SMG)
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", "from stretto.cli.main import main; main()", "serve",
             str(STORIES), "--replicas", "2", "--port", "0", "--device", "cpu"],
            env={**os.environ, "PATH": f"{smg.parent}:{os.environ['PATH']}"}, stderr=log)
    http = httpx.Client(timeout=60, trust_env=False)
    try:
        ends = time.monotonic() + 120
        while '"event": "replicas"' not in (tmp_path / "log").read_text():
            assert process.poll() is None and time.monotonic() < ends, (tmp_path / "log").read_text()
            time.sleep(0.1)
        line = next(line for line in (tmp_path / "log").read_text().splitlines() if '"event": "replicas"' in line)
        http.base_url = json.loads(line)["gateway"]["url"]
        urls = [one["url"] for one in json.loads(line)["replicas"]]
        for session in ("one", "two", "three"):
            for turn in range(3):
                body = {"model": "stories260k", "prompt": f"Once {turn}", "max_tokens": 5, "session_id": session,
                        "session": {"mode": "append"}}
                answer = http.post("/v1/completions", json=body, headers={"x-session-id": session})
                assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 5
            known = [httpx.get(f"{url}/v1/sessions/{session}", trust_env=False) for url in urls]
            assert sorted(one.status_code for one in known) == [200, 404]
            assert next(one.json()["turns"] for one in known if one.status_code == 200) == 3
        by_header = http.post("/v1/completions", headers={"x-smg-routing-key": "four"},
                              json={"model": "stories260k", "prompt": "Once", "max_tokens": 5})
        assert by_header.status_code == 200
        known = [httpx.get(f"{url}/v1/sessions/four", trust_env=False).status_code for url in urls]
        assert sorted(known) == [200, 404]
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        http.close()
        process.kill()
        process.wait()


def test_replicas_that_cannot_start_end_the_start(tmp_path: Path):
    with fleet(tmp_path, options={"start_error": "no such model"}) as served:
        assert served.process.wait(60) != 0
        assert "no such model" in served.log()
