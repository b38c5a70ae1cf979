"""Where replicas run, what is refused before anything starts, and what keeps a process tied to its parent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from stretto.cli.replicas import fleet_report, replica_config
from stretto.compat import ConfigError
from stretto.config import Config, LoraSection, ModelSection, ParallelSection, ScheduleSection, ServeSection
from stretto.replicas import tether
from stretto.replicas.gateway import Smg, VllmRouter, find_python
from stretto.replicas.placement import free_ports, place, visible_gpus
from stretto.resolve import check_values


def config(replicas: int, ranks: int = 1, device: str = "auto", **serve) -> Config:
    return Config(model=ModelSection(device=device), parallel=ParallelSection(tensor_parallel_size=ranks),
                  serve=ServeSection(replicas=replicas, port=0, **serve))


def test_gpus_are_divided_in_neighbouring_groups():
    places = place(config(2, ranks=2), ["0", "1", "2", "3", "4"], range(16))
    assert [one.gpus for one in places] == [("0", "1"), ("2", "3")] and all(one.cores == () for one in places)
    assert [one.gpus for one in place(config(2), ["GPU-a", "GPU-b"], ())] == [("GPU-a",), ("GPU-b",)]


def test_cores_are_divided_where_there_are_no_gpus():
    assert [one.cores for one in place(config(2), (), (0, 1, 4, 5, 6))] == [(0, 1), (4, 5)]
    assert [one.cores for one in place(config(3), (), (0, 1))] == [(), (), ()]
    assert [one.gpus for one in place(config(2, device="cpu"), ["0"], (0, 1))] == [(), ()]


@pytest.mark.parametrize("asked, gpus, ranks", [(3, 2, 1), (2, 3, 2), (2, 0, 1)])
def test_too_few_gpus_are_refused_with_both_names(asked: int, gpus: int, ranks: int):
    with pytest.raises(ConfigError, match=rf"--replicas {asked} does not work with --tensor-parallel-size {ranks} on "
                                          rf"{gpus} GPU.*{asked * ranks} GPUs are needed"):
        place(config(asked, ranks, device="cuda"), [str(i) for i in range(gpus)], (0, 1))


def test_a_taken_port_is_named():
    (port,) = free_ports([0])
    with pytest.raises(OSError, match=f"127.0.0.1:{port}.*choose another --port"):
        free_ports([port, port])


def test_visible_gpus_are_those_that_the_variable_names(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-abc")
    assert visible_gpus() == ("3", "GPU-abc")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == ()


@pytest.mark.parametrize("serve, names", [
    (ServeSection(replicas=2, uds=Path("/x")), "--uds /x does not work with --replicas 2"),
    (ServeSection(replicas=2, root_path="/llm"), "--root-path /llm does not work with --replicas 2"),
    (ServeSection(replicas=2, gateway="vllm-router", host="0.0.0.0"), "--host 0.0.0.0 does not work with --gateway"),
    (ServeSection(replicas=2, gateway="vllm-router", ssl_certfile=Path("c"), ssl_keyfile=Path("k")),
     "--ssl-certfile does not work with --gateway vllm-router"),
    (ServeSection(replicas=0), "--replicas 0")])
def test_what_has_no_meaning_behind_the_gateway_is_refused(serve: ServeSection, names: str):
    with pytest.raises(ConfigError, match=names):
        check_values(Config(serve=serve))


def test_adapters_are_refused_since_the_gateway_would_answer_with_the_model_itself():
    lora = LoraSection(lora_modules=("a=/a",))
    with pytest.raises(ConfigError, match="--enable-lora does not work with --gateway smg"):
        check_values(Config(serve=ServeSection(replicas=2), lora=lora))
    check_values(Config(serve=ServeSection(replicas=2, gateway="vllm-router"), lora=lora))


def test_sessions_in_a_file_are_refused_since_they_go_on_elsewhere():
    with pytest.raises(ConfigError, match="--session-file /s does not work with --replicas 2"):
        check_values(Config(serve=ServeSection(replicas=2), schedule=ScheduleSection(session_file=Path("/s"))))


def test_a_missing_gateway_is_named_with_its_installation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"--replicas 2 .*smg.*pip install 'stretto\[router\]'"):
        find_python("smg", "no_such_module", 2)
    script = tmp_path / "no_such_gateway"
    for file in (script, tmp_path / "python"):
        file.touch(mode=0o755)
    assert find_python("no_such_gateway", "no_such_module", 2) == str(tmp_path / "python")


def test_a_replica_has_the_settings_of_all_at_its_own_address():
    asked = Config(serve=ServeSection(replicas=2, port=0, host="0.0.0.0", api_key=("k",), ssl_certfile=Path("c"),
                                      ssl_keyfile=Path("k")))
    first, second = place(asked, (), ())
    own = replica_config(asked, second)
    assert (own.serve.host, own.serve.port, own.serve.replicas) == ("127.0.0.1", second.port, 1)
    assert own.serve.api_key == ("k",) and own.serve.ssl_certfile is None
    assert first.port != second.port


def test_the_gateway_gets_every_key_and_the_report_none():
    serve = ServeSection(replicas=2, api_key=("one", "two"), admin_api_key=("three",), max_body_bytes=7)
    made = Smg("python", 8000, 8003, serve)
    argv = " ".join(made.argv)
    assert "--api-key one" in argv and "key1:two" in argv and "key2:three" in argv and "--max-payload-size 7" in argv
    assert made.key in argv and made.key not in repr(made)
    places = place(config(2), (), ())
    report = json.dumps(fleet_report(places, made))
    assert "one" not in json.loads(report)["gateway"].values() and made.key not in report and places[1].url in report
    open_to_all = Smg("python", 8000, 8003, ServeSection(admin_api_key=("three",)))
    assert "--api-key" not in open_to_all.argv
    assert "one" not in VllmRouter("python", 8000, 8003, serve).argv, "it passes keys on, and checks none"


CHILD = "import time; time.sleep(60)"
PARENT = """
import subprocess, sys, os, json
child = subprocess.Popen([sys.executable, "-P", sys.argv[1], "name", str(os.getpid())], stdin=subprocess.PIPE)
child.stdin.write(json.dumps({"module": sys.argv[2], "argv": ["a", "b"], "cores": []}).encode() + b"\\n")
child.stdin.close()
print(child.pid, flush=True)
child.wait()
"""


def test_a_tethered_program_runs_with_its_arguments_and_ends_with_its_parent(tmp_path: Path):
    (tmp_path / "sleeper.py").write_text("import sys, pathlib, time\n"
                                         f"pathlib.Path({str(tmp_path / 'ran')!r}).write_text(' '.join(sys.argv[1:]))\n"
                                         + CHILD)
    parent = subprocess.Popen([sys.executable, "-c", PARENT, tether.__file__, "sleeper"], stdout=subprocess.PIPE,
                              text=True, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    ends = time.monotonic() + 10
    while not (tmp_path / "ran").exists() and time.monotonic() < ends:
        time.sleep(0.02)
    assert (tmp_path / "ran").read_text() == "a b"
    assert "a b" not in " ".join(child.cmdline()), "arguments may hold keys"
    parent.kill()
    parent.wait()
    child.wait(timeout=5)
