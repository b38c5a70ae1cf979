"""On a local Ray cluster of two nodes (two raylets on this host): sessions stay at one replica, streams stream, a
killed replica costs what it was answering, and load brings another one. Ray has an environment of its own, which sees
this one's packages too; its command and KubeRay files are read by the schema of Ray itself."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sysconfig
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from stretto.cli.mapped import read_settings
from stretto.compat import ConfigError
from stretto.replicas.scaling import SCALING_NAMES, Load, Scaling, replicas_for
from tests.clients.environments import python_environment
from tests.clients.test_gateways import free_port
from tests.serve.conftest import events

ROOT = Path(__file__).resolve().parents[2]
STORIES = ROOT / "../shared/data/models/stories260k"
RAY = "ray[serve]==2.60.0"
SCRIPT = ROOT / "tests/clients/scripts/ray_cluster.py"


def idle(running: float = 0, waiting: float = 0, kv_usage: float = 0) -> Load:
    return Load(running, waiting, 16, kv_usage)


@pytest.mark.parametrize("loads, wanted", [
    ([], 0), ([idle()], 0), ([idle(running=1)], 1), ([idle(running=11)], 1), ([idle(running=12)], 2),
    ([idle(running=16, waiting=16)], 3), ([idle(kv_usage=0.9, running=2)], 2), ([idle(waiting=16)], 2),
    ([idle(running=4)] * 4, 2), ([idle(running=16, kv_usage=1.0)] * 7, 10)])
def test_replicas_follow_places_pages_and_queues(loads: list[Load], wanted: int):
    assert replicas_for(loads, 0.7) == wanted


def test_more_load_never_needs_fewer_replicas():
    for lighter, heavier in ((idle(3), idle(4)), (idle(3), idle(3, 1)), (idle(3, kv_usage=0.3), idle(3, kv_usage=0.4))):
        assert replicas_for([lighter] * 10) <= replicas_for([heavier] * 10)


def test_the_examples_are_what_the_application_takes():
    """serve.yaml and rayservice.yaml name settings that exist; the rest of them Ray itself reads, below."""
    for args in map(args_of, (serve_file(), kuberay_file())):
        config = read_settings({name: value for name, value in args.items() if name not in SCALING_NAMES}, "args")
        assert config.model.model == "Qwen/Qwen3-8B" and Scaling.read(args).max_replicas == 8


def test_numbers_may_come_as_text():
    assert Scaling.read({"min_replicas": "2", "max_replicas": 3, "target_load": "0.5", "model": "m"}) \
        == Scaling(2, 3, 0.5, 1.0)


@pytest.mark.parametrize("values, told", [
    ({"min_replicas": "two"}, "min_replicas two does not work with any cluster: it must be a whole number"),
    ({"max_replicas": 1.9}, "max_replicas 1.9 does not work with any cluster: it must be a whole number"),
    ({"min_replicas": True}, "min_replicas True does not work"), ({"num_cpus": None}, "num_cpus None does not work"),
    ({"target_load": "much"}, "target_load much does not work with any cluster: it must be a number"),
    ({"num_cpus": -1}, "num_cpus -1 does not work with any replica"), ({"num_cpus": 0}, "num_cpus 0 does not work"),
    ({"num_cpus": "nan"}, "num_cpus nan does not work"), ({"target_load": 1.5}, "target_load 1.5 does not work"),
    ({"min_replicas": 2}, "min_replicas 2 does not work with max_replicas 1")])
def test_what_is_no_number_of_theirs_is_refused_by_name(values: dict[str, Any], told: str):
    with pytest.raises(ConfigError, match=told):
        Scaling.read(values)


def serve_file() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "deploy/ray/serve.yaml").read_text())


def kuberay_file() -> dict[str, Any]:
    return yaml.safe_load(yaml.safe_load((ROOT / "deploy/ray/rayservice.yaml").read_text())["spec"]["serveConfigV2"])


def args_of(file: dict[str, Any]) -> dict[str, Any]:
    return file["applications"][0]["args"]


# ------------------------------------------------------------------------------------------------------ with Ray itself
def ray_python() -> Path:
    """Ray's interpreter, to which this project and its packages are known."""
    python = python_environment("ray", RAY)
    site = next(python.parents[1].glob("lib/python*/site-packages"))
    (site / "zz_stretto.pth").write_text(f"{ROOT}\n{sysconfig.get_paths()['purelib']}\n")
    return python


class RayCluster:
    def __init__(self, settings: dict[str, Any], log: Path):
        self.port, self._log = free_port(), log
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [str(ray_python()), str(SCRIPT), str(self.port), json.dumps(settings)], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=output, text=True, cwd=log.parent,
                env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"})
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60, trust_env=False)

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise AssertionError(self._log.read_text()[-4000:])

    def ask(self, command: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()
        return self.answer()

    def complete(self, home: str, **fields: Any) -> httpx.Response:
        body = {"model": "stories260k", "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0} | fields
        return self.http.post("/v1/completions", json=body, headers={"x-session-id": home})


@contextlib.contextmanager
def cluster(folder: Path, **settings: Any) -> Iterator[RayCluster]:
    made = RayCluster({"model": str(STORIES.resolve()), "device": "cpu", "kv_tokens": 4096} | settings, folder / "log")
    try:
        assert made.answer() == {"ready": True}
        yield made
    finally:
        made.http.close()
        family = psutil.Process(made.process.pid).children(recursive=True) if made.process.poll() is None else []
        with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired):
            made.process.communicate("exit\n", timeout=60)
        for process in [made.process, *family]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        made.process.wait()


FULL = [pytest.mark.full, pytest.mark.timeout(1200),
        pytest.mark.skipif(not STORIES.exists(), reason="shared/data/models/stories260k is absent")]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    """A replica on each node."""
    with cluster(tmp_path_factory.mktemp("ray"), min_replicas=2, max_replicas=2, max_num_seqs=16) as made:
        yield made


class TestTwoReplicas:
    pytestmark = FULL

    def test_replicas_are_on_both_nodes(self, two: RayCluster):
        status = two.ask("status")
        assert status["replicas"] == 2 and len(status["nodes"]) == 2

    def test_every_turn_of_a_session_reaches_its_replica(self, two: RayCluster):
        """Appended turns to sessions that must exist: one that came elsewhere would be 404."""
        for session in range(20):
            for turn in range(4):
                answer = two.complete(f"session {session}", session_id=f"session {session}", prompt=f"and {turn}",
                                      max_tokens=3, session={"mode": "append", "create": turn == 0})
                assert answer.status_code == 200, f"session {session}, turn {turn}: {answer.text}"
            assert answer.json()["usage"]["prompt_tokens"] > 12
        pages = [two.http.get("/metrics").text for _ in range(20)]
        assert {label for page in pages for label in ('engine="0"', 'engine="1"') if label in page} \
            == {'engine="0"', 'engine="1"'}, "one replica had them all"

    def test_streams_and_errors_pass(self, two: RayCluster):
        streamed = events(two.complete("s", stream=True, max_tokens=20).text)
        assert streamed[-1] == "[DONE]" and len(streamed) > 10
        refused = two.complete("s", stop_token_ids=[-5])
        assert refused.status_code == 400 and refused.json()["error"]["type"] == "invalid_request_error"

    def test_a_killed_replica_costs_what_it_was_answering(self, two: RayCluster):
        """Its clients are told; others go on; sessions are computed again, with the same text."""
        texts = {f"k{i}": two.complete(f"k{i}").json()["choices"][0]["text"] for i in range(8)}
        answers: list[httpx.Response | Exception] = []

        def long(session: str) -> None:
            try:
                answers.append(two.complete(session, max_tokens=400, ignore_eos=True, stream=True))
            except httpx.HTTPError as e:
                answers.append(e)

        threads = [threading.Thread(target=long, args=(session,)) for session in texts]
        for thread in threads:
            thread.start()
        time.sleep(0.3)
        two.ask("kill")
        for thread in threads:
            thread.join()
        whole = [one for one in answers if isinstance(one, httpx.Response) and one.status_code == 200
                 and events(one.text)[-1] == "[DONE]"]
        assert len(answers) == 8 and whole, "the other replica's answers went on"
        for failed in (one for one in answers if one not in whole):  # told: no end of a stream that looks like one
            assert isinstance(failed, httpx.HTTPError) or failed.status_code >= 500 or "error" in failed.text
        ends = time.monotonic() + 60
        for session, text in texts.items():
            while (answer := two.complete(session)).status_code != 200:
                assert time.monotonic() < ends, answer.text
                time.sleep(0.2)
            assert answer.json()["choices"][0]["text"] == text
        while two.ask("status")["replicas"] < 2:
            assert time.monotonic() < ends, "Ray has not restarted it"
            time.sleep(1)


class TestScaling:
    pytestmark = FULL

    def test_load_brings_another_replica(self, tmp_path: Path):
        with cluster(tmp_path, min_replicas=1, max_replicas=2, max_num_seqs=2) as one:
            assert one.ask("status")["replicas"] == 1
            over = threading.Event()

            def client(number: int) -> None:
                while not over.is_set():
                    one.complete(f"c{number}-{time.monotonic()}", max_tokens=300, ignore_eos=True)

            threads = [threading.Thread(target=client, args=(i,)) for i in range(6)]
            for thread in threads:
                thread.start()
            try:
                ends = time.monotonic() + 180
                while one.ask("status")["replicas"] < 2:
                    assert time.monotonic() < ends, "more waits than runs, and no other replica comes"
                    time.sleep(2)
            finally:
                over.set()
                for thread in threads:
                    thread.join()


CHECK_FILES = """
import json, sys
from ray.serve.schema import ServeDeploySchema
from stretto.ray import app
for text in map(json.loads, sys.argv[1:]):
    file = ServeDeploySchema.model_validate(text)
    built = app(file.applications[0].args)
    print(built._bound_deployment.ray_actor_options["num_gpus"])
for bad in ({"port": 9}, {"replicas": 2}, {"modle": 1}, {"min_replicas": 2, "max_replicas": 1},
            {"max_replicas": 1.9}):
    try:
        app({"model": "x", "device": "cpu", **bad})
    except ValueError as e:
        print(e)
"""


CHECK_ROOM = """
import logging
import stretto.ray
logging.basicConfig(format="%(message)s")
stretto.ray.machines = lambda: [{"CPU": 8.0, "GPU": 2.0}, {"CPU": 8.0, "GPU": 4.0}, {"CPU": 64.0}]
for device, ranks in (("auto", 4), ("cuda", 8), ("cpu", 8), ("auto", 8)):
    try:
        built = stretto.ray.app({"model": "x", "device": device, "tensor_parallel_size": ranks})
        print(built._bound_deployment.ray_actor_options["num_gpus"])
    except ValueError as e:
        print(e)
"""


@pytest.mark.full
@pytest.mark.timeout(900)
def test_ranks_that_no_machine_has_room_for_are_refused():
    """Their placement group would wait for ever. Where machines may come, they are waited for, which the log says."""
    made = subprocess.run([str(ray_python()), "-c", CHECK_ROOM], capture_output=True, text=True, timeout=120)
    assert made.returncode == 0, made.stderr
    fits, waits, without, refused = made.stdout.splitlines()
    assert (float(fits), float(waits), float(without)) == (4.0, 8.0, 0.0)
    assert "no machine of the cluster has 8 GPUs now" in made.stderr
    assert "tensor_parallel_size 8 does not work with a cluster whose largest machine has 4 GPUs" in refused


@pytest.mark.full
@pytest.mark.timeout(900)
def test_ray_reads_the_examples_and_bad_settings_are_refused():
    files = [json.dumps(file) for file in (serve_file(), kuberay_file())]
    made = subprocess.run([str(ray_python()), "-c", CHECK_FILES, *files], capture_output=True, text=True, timeout=120)
    assert made.returncode == 0, made.stderr
    first, second, port, replicas, unknown, bounds, broken = made.stdout.splitlines()
    assert float(first) == float(second) == 1.0
    assert "port 9 does not work with Ray Serve" in port and "min_replicas and max_replicas" in replicas
    assert "did you mean model?" in unknown and "min_replicas 2 does not work with max_replicas 1" in bounds
    assert "max_replicas 1.9 does not work with any cluster" in broken
