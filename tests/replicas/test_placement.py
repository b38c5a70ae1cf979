"""Where replicas run, what is refused before anything starts, and what keeps a process tied to its parent."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import psutil
import pytest

from stretto.cli.failures import CommandFailed
from stretto.cli.plan import run as plan
from stretto.cli.replicas import fleet_report, replica_config, serve_replicas
from stretto.compat import ConfigError
from stretto.config import Config, LoraSection, ModelSection, ParallelSection, ScheduleSection, ServeSection
from stretto.replicas import tether
from stretto.replicas.gateway import Gateway, Smg, VllmRouter, find_python
from stretto.replicas.placement import CAN_SHARE, LOOPBACK, Place, place, ports_after, reserved, visible_gpus
from stretto.resolve import check_values

PORTS = (8001, 8002)  # of two replicas


def config(replicas: int, ranks: int = 1, device: str = "auto", **serve) -> Config:
    return Config(model=ModelSection(device=device), parallel=ParallelSection(tensor_parallel_size=ranks),
                  serve=ServeSection(replicas=replicas, port=0, **serve))


def test_gpus_are_divided_in_neighbouring_groups():
    places = place(config(2, ranks=2), ["0", "1", "2", "3", "4"], range(16), PORTS)
    assert [one.gpus for one in places] == [("0", "1"), ("2", "3")] and all(one.cores == () for one in places)
    assert [one.gpus for one in place(config(2), ["GPU-a", "GPU-b"], (), PORTS)] == [("GPU-a",), ("GPU-b",)]


def test_cores_are_divided_where_there_are_no_gpus():
    assert [one.cores for one in place(config(2), (), (0, 1, 4, 5, 6), PORTS)] == [(0, 1), (4, 5)]
    assert [one.cores for one in place(config(3), (), (0, 1), (1, 2, 3))] == [(), (), ()]
    assert [one.gpus for one in place(config(2, device="cpu"), ["0"], (0, 1), PORTS)] == [(), ()]


@pytest.mark.parametrize("asked, gpus, ranks", [(3, 2, 1), (2, 3, 2), (2, 0, 1)])
def test_too_few_gpus_are_refused_with_both_names(asked: int, gpus: int, ranks: int):
    with pytest.raises(ConfigError, match=rf"--replicas {asked} does not work with --tensor-parallel-size {ranks} on "
                                          rf"{gpus} GPU.*{asked * ranks} GPUs are needed"):
        place(config(asked, ranks, device="cuda"), [str(i) for i in range(gpus)], (0, 1), PORTS)


def test_a_taken_port_is_named():
    with socket.create_server((LOOPBACK, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}: .*choose another"):
            reserved(LOOPBACK, port, "choose another")
    with (reserved(LOOPBACK, 65535, "") as last,
          pytest.raises(OSError, match=r"127.0.0.1:65536: .*choose another --port, or 0 for free ones"),
          ports_after(last, 65535, 1)):
        pass


@pytest.mark.skipif(not CAN_SHARE, reason="other systems let nobody listen beside a bound port")
def test_ports_are_kept_for_those_who_mean_them():
    """Before the start, and while a replica is away: it may listen there, and nobody else is given its port."""
    with reserved(LOOPBACK, 0, "") as gateway, ports_after(gateway, 0, 2) as ports:
        kept = (ports.gateway, *ports.replicas, ports.metrics)
        assert len(set(kept)) == 4
        for port in kept:
            with socket.socket() as stranger, pytest.raises(OSError):
                stranger.bind((LOOPBACK, port))
            with socket.create_server((LOOPBACK, port)), socket.create_connection((LOOPBACK, port)):
                pass
            with socket.create_server((LOOPBACK, port)):  # again, as after a restart
                pass
    with socket.create_server((LOOPBACK, kept[1])):
        pass


def test_visible_gpus_are_those_that_the_variable_names(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-abc")
    assert visible_gpus() == ("3", "GPU-abc")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == ()


@pytest.mark.parametrize("named, found", [("-1", ()), ("0,-1,1", ("0",)), ("none", ()), ("void", ()), ("0,,1", ("0",)),
                                          ("MIG-a, 2 , no", ("MIG-a", "2"))])
def test_the_first_entry_that_names_no_gpu_ends_the_list(monkeypatch: pytest.MonkeyPatch, named: str, found: tuple):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert visible_gpus() == found


def never_answers(*command: object, timeout: float, **options: object):
    raise subprocess.TimeoutExpired("python", timeout)


def test_a_probe_that_does_not_end_is_told_in_a_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(subprocess, "run", never_answers)
    with pytest.raises(OSError, match=r"within 120 s.*--device cpu"):
        visible_gpus()
    with pytest.raises(CommandFailed, match=r"within 300 s.*--hw"):
        plan("llama-3.1-8b", hw="here")


class _Sockets:
    """Stands for the socket module: a free port is the lowest that nobody holds."""

    AF_INET = SOL_SOCKET = SO_REUSEADDR = 0
    held: ClassVar[set[int]] = set()

    class socket(contextlib.AbstractContextManager):
        def __init__(self, family: int):
            pass

        def setsockopt(self, *option: int) -> None:
            pass

        def bind(self, address: tuple[str, int]) -> None:
            self.port = address[1] or next(port for port in range(50_000, 60_000) if port not in _Sockets.held)
            _Sockets.held.add(self.port)

        def getsockname(self) -> tuple[str, int]:
            return LOOPBACK, self.port

        def close(self) -> None:
            _Sockets.held.discard(self.port)

        def __exit__(self, *error: object) -> None:
            self.close()


@pytest.mark.parametrize("port", [0, 8000])
def test_gateway_replicas_and_metrics_have_ports_of_their_own(monkeypatch: pytest.MonkeyPatch, port: int):
    made: list[tuple[Sequence[Place], Gateway]] = []

    class NoFleet:
        def __init__(self, places: Sequence[Place], job: object, gateway: Gateway, *rest: object):
            made.append((places, gateway))

        async def run(self, on_ready: object) -> int:
            assert not CAN_SHARE or len(_Sockets.held) == 4, "somebody else may be given one"
            return 7

    monkeypatch.setattr("stretto.replicas.placement.socket", _Sockets)
    monkeypatch.setattr("stretto.replicas.gateway.find_python", lambda *names: "python")
    monkeypatch.setattr("stretto.cli.replicas.Fleet", NoFleet)
    asked = config(2, device="cpu")
    assert serve_replicas(replace(asked, serve=replace(asked.serve, port=port, host="localhost"))) == 7
    ((places, gateway),) = made
    ports = [gateway.port, *(one.port for one in places), gateway.metrics_port]
    assert ports == ([8000, 8001, 8002, 8003] if port else [50_000, 50_001, 50_002, 50_003])
    assert gateway.argv[gateway.argv.index("--host") + 1] == LOOPBACK, "gateways take no names"
    assert not _Sockets.held


def test_a_host_that_is_none_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("stretto.cli.replicas.Fleet", None)
    with pytest.raises(OSError, match=r"cannot listen on no\.such\.host\.invalid:0: .*; choose another --host"):
        serve_replicas(config(2, device="cpu", host="no.such.host.invalid"))


@pytest.mark.parametrize("serve, names", [
    (ServeSection(replicas=2, uds=Path("/x")), "--uds /x does not work with --replicas 2"),
    (ServeSection(replicas=2, root_path="/llm"), "--root-path /llm does not work with --replicas 2"),
    (ServeSection(replicas=2, gateway="vllm-router", host="0.0.0.0"), "--host 0.0.0.0 does not work with --gateway"),
    (ServeSection(replicas=2, gateway="vllm-router", ssl_certfile=Path("c"), ssl_keyfile=Path("k")),
     "--ssl-certfile does not work with --gateway vllm-router"),
    (ServeSection(gateway="smg"), "--gateway smg does not work with --replicas 1"),
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
    asked = Config(serve=ServeSection(replicas=2, gateway="smg", port=0, host="0.0.0.0", api_key=("k",),
                                      ssl_certfile=Path("c"), ssl_keyfile=Path("k")))
    first, second = place(asked, (), (), PORTS)
    own = replica_config(asked, second)
    assert (own.serve.host, own.serve.port, own.serve.replicas) == ("127.0.0.1", second.port, 1)
    assert own.serve.api_key == ("k",) and own.serve.ssl_certfile is None
    check_values(own)
    assert first.port != second.port


def test_the_gateway_gets_every_key_and_the_report_none():
    serve = ServeSection(replicas=2, api_key=("one", "two"), admin_api_key=("three",), max_body_bytes=7)
    made = Smg("python", 8000, 8003, serve)
    argv = " ".join(made.argv)
    assert "--api-key one" in argv and "key1:two" in argv and "key2:three" in argv and "--max-payload-size 7" in argv
    assert made.key in argv and made.key not in repr(made)
    places = place(config(2), (), (), PORTS)
    report = json.dumps(fleet_report(places, made))
    assert "one" not in json.loads(report)["gateway"].values() and made.key not in report and places[1].url in report
    open_to_all = Smg("python", 8000, 8003, ServeSection(admin_api_key=("three",)))
    assert "--api-key" not in open_to_all.argv
    assert "one" not in VllmRouter("python", 8000, 8003, serve).argv, "it passes keys on, and checks none"


@pytest.mark.parametrize("kind", [Smg, VllmRouter])
@pytest.mark.parametrize("host, shown", [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::1", "[::1]"),
                                         ("10.0.0.5", "10.0.0.5")])
def test_the_gateways_own_metrics_are_where_it_is(kind: type[Gateway], host: str, shown: str):
    """By themselves smg's are on every address, whatever --host says."""
    made = kind("python", 8000, 8003, ServeSection(host=host, replicas=2))
    assert made.argv[made.argv.index("--prometheus-host") + 1] == host
    assert fleet_report((), made)["gateway"]["own_metrics"] == f"http://{shown}:8003/metrics"


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
