"""`stretto serve` as users run it: its process never loads torch, and says how a start fails."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

STORIES = Path(__file__).resolve().parents[2] / "../shared/data/models/stories260k"
MAIN = "from stretto.cli.main import main; main()"


def serve(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", MAIN, "serve", *arguments], stderr=subprocess.PIPE, text=True)


@pytest.mark.skipif(not STORIES.exists(), reason="shared/data/models/stories260k is absent")
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="this system does not list what a process has mapped")
def test_the_front_process_never_loads_torch():
    """The address answers while the model loads, and what answers holds no torch, before or after."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = serve(str(STORIES), "--port", str(port), "--max-num-seqs", "4", "--speculation", "ngram")
    said: set[str] = set()
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=20) as http:
            deadline, ready = time.monotonic() + 90, False
            while not ready:
                assert time.monotonic() < deadline and process.poll() is None
                try:
                    started = http.get("/startupz")
                except httpx.TransportError:
                    time.sleep(0.05)
                    continue
                ready = started.status_code == 200
                if not ready:
                    said.add(started.json()["error"]["message"])
                    assert http.get("/livez").status_code == 200
                time.sleep(0.02)
            answer = http.post("/v1/completions", json={"prompt": "Once upon", "max_tokens": 4, "temperature": 0})
            assert answer.json()["choices"][0]["finish_reason"] == "length"
            info = http.get("/server_info").json()
        assert "the server is starting: starting the engine's process" in said
        assert info["features"] and info["start"]
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        assert "pydantic_core" in maps and "torch" not in maps
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.communicate()


def test_what_the_engine_refuses_is_told_without_a_traceback(tmp_path: Path):
    """A model that cannot be served: found in the engine's process, told by this one."""
    shape = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 300, "hidden_size": 64,
             "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
             "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    process = serve(str(tmp_path), "--port", "0")
    said = process.communicate(timeout=90)[1]
    assert process.returncode == 1, said
    assert "Traceback" not in said and "error" in said and str(tmp_path) in said


@pytest.mark.parametrize(("arguments", "word"), [
    (("--port", "99999"), "--port 99999"), (("--ssl-keyfile", "key.pem"), "--ssl-certfile"),
    (("--engine-restarts", "-1"), "--engine-restarts -1")])
def test_impossible_values_are_refused_before_anybody_can_call(arguments: tuple[str, str], word: str, tmp_path: Path):
    process = serve(str(tmp_path), *arguments)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 3 and word in said and "refused:" in said


def test_a_certificate_that_cannot_be_used_ends_the_start(tmp_path: Path):
    (tmp_path / "key.pem").write_text("no key")
    process = serve(str(tmp_path), "--port", "0", "--ssl-certfile", str(tmp_path / "none.pem"), "--ssl-keyfile",
                    str(tmp_path / "key.pem"))
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 1 and "none.pem and key" in said and "cannot be used" in said, said
    assert "Traceback" not in said


def test_traces_by_another_protocol_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    process = serve(str(tmp_path), "--otlp-traces-endpoint", "http://localhost:4318/v1/traces")
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 3 and "OTEL_EXPORTER_OTLP_PROTOCOL=grpc" in said and "http/protobuf" in said


@pytest.mark.skipif(not STORIES.exists(), reason="shared/data/models/stories260k is absent")
def test_refusals_come_home_from_the_engines_process():
    process = serve(str(STORIES), "--port", "0", "--speculation", "nonsense")
    said = process.communicate(timeout=90)[1]
    assert process.returncode == 3 and "refused: --speculation nonsense" in said and "Traceback" not in said, said


def ctrl_c(process: subprocess.Popen[str], seconds: float) -> str:
    """What a terminal does: the whole group of processes gets it. Returns what was said."""
    time.sleep(seconds)
    os.killpg(process.pid, signal.SIGINT)
    return process.communicate(timeout=30)[1]


def in_a_group(program: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", program, *arguments], stderr=subprocess.PIPE, text=True,
                            start_new_session=True)


@pytest.mark.skipif(not STORIES.exists(), reason="shared/data/models/stories260k is absent")
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no file that is always full")
def test_a_log_on_a_full_disk_stops_nobody():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with open("/dev/full", "w") as full:
        process = subprocess.Popen([sys.executable, "-c", MAIN, "serve", str(STORIES), "--port", str(port),
                                    "--access-log"], stderr=full, stdout=full)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=20) as http:
            deadline = time.monotonic() + 90
            while not ready(http):
                assert time.monotonic() < deadline and process.poll() is None
                time.sleep(0.1)
            for _ in range(300):  # more than any buffer of the log
                assert http.get("/livez").status_code == 200
            assert http.post("/v1/completions", json={"prompt": "Once", "max_tokens": 2}).status_code == 200
        process.send_signal(signal.SIGTERM)
        process.wait(20)
    finally:
        process.kill()
        process.wait()


@pytest.mark.skipif(not STORIES.exists(), reason="shared/data/models/stories260k is absent")
@pytest.mark.parametrize("seconds", [0.05, 0.6])
def test_ctrl_c_while_the_engine_starts_shows_nobodys_code(seconds: float):
    """The engine's process imports for seconds, and would print where it was."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = in_a_group(MAIN, "serve", str(STORIES), "--port", str(port))
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as http:
            deadline = time.monotonic() + 60
            while not serving(http, "starting the engine's process"):
                assert time.monotonic() < deadline and process.poll() is None
                time.sleep(0.02)
        said = ctrl_c(process, seconds)
        assert process.returncode == 0 and "stopped while starting" in said and "Traceback" not in said, said
    finally:
        process.kill()
        process.communicate()


def ready(http: httpx.Client) -> bool:
    try:
        return http.get("/readyz").status_code == 200
    except httpx.TransportError:
        return False


def serving(http: httpx.Client, word: str) -> bool:
    try:
        return word in http.get("/startupz").text
    except httpx.TransportError:
        return False


def test_ctrl_c_in_any_command_ends_as_others_do():
    program = ("import sys, time\nfrom stretto.cli import main\n"
               "def sleep(*args): print('ready', file=sys.stderr, flush=True); time.sleep(60)\n"
               "main.run_app = sleep\nmain.main()")
    process = in_a_group(program)
    assert process.stderr is not None and process.stderr.readline() == "ready\n"
    assert ctrl_c(process, 0.1) == "" and process.returncode == -signal.SIGINT
