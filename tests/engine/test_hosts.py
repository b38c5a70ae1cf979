"""Ranks that torchrun starts, with two of its agents on one host: rank 0 serves, the other follows; either may die."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path

import msgspec
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from stretto import __version__
from stretto.compat import ConfigError
from stretto.config import (
    Config,
    DeviceFacts,
    ModelFacts,
    ModelSection,
    ParallelSection,
    ServeSection,
    SpeculationSection,
)
from stretto.engine.hosts import (
    LEADER,
    LIFE,
    PLANS,
    Address,
    Introduction,
    Meeting,
    files_of,
    open_store,
    prepare_with,
)
from stretto.engine.launch import Launch, check_launch
from stretto.engine.locate import Located, locate
from stretto.facts import device_facts, model_facts
from tests.engine.small import VOCAB, Oracle, save_tiny

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a",
            "MASTER_PORT": "29500"}


def test_what_torchrun_says():
    launch = Launch.of_environment(TORCHRUN)
    assert launch is not None and (launch.rank, launch.ranks, launch.local_rank, launch.one_host) == (1, 4, 1, False)
    assert Launch.of_environment({}) is None and Launch.of_environment(TORCHRUN | {"WORLD_SIZE": "1"}) is None
    with pytest.raises(ConfigError, match="RANK=x does not work with torchrun's variables"):
        Launch.of_environment(TORCHRUN | {"RANK": "x"})


def test_as_many_processes_as_ranks():
    launch = Launch.of_environment(TORCHRUN)
    assert launch is not None
    check_launch(Config(parallel=ParallelSection(tensor_parallel_size=4)), launch)
    with pytest.raises(ConfigError, match="--tensor-parallel-size 1 does not work with WORLD_SIZE=4"):
        check_launch(Config(), launch)
    with pytest.raises(ConfigError, match="--replicas 2 does not work with WORLD_SIZE=4"):
        check_launch(Config(parallel=ParallelSection(tensor_parallel_size=4), serve=ServeSection(replicas=2)), launch)


# ------------------------------------------------------------------------------------------------------------ meetings
def come(launch: Launch, kind: str, content: object, secret: bytes | None = None) -> Connection:
    """As rank 1 does, with what it has read from the store, or with another secret."""
    address = msgspec.json.decode(open_store(replace(launch, rank=1)).get(LEADER), type=Address)
    connection = Connection(socket.create_connection((address.host, address.port)).detach())
    answer_challenge(connection, address.secret if secret is None else secret)
    deliver_challenge(connection, address.secret)
    connection.send((1, kind, content))
    return connection


def test_a_rank_with_another_model_is_refused_and_a_stranger_is_ignored(tmp_path: Path):
    save_tiny(tmp_path, "llama")
    Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0")).save(str(tmp_path / "tokenizer.json"))
    config = Config(model=ModelSection(str(tmp_path), device="cpu"), parallel=ParallelSection(tensor_parallel_size=2))
    launch = Launch(0, 2, 0, 1, "127.0.0.1", free_port(), False)
    other = replace(model_facts(tmp_path), vocab_size=7)
    told: list[object] = []

    def rank_1() -> None:
        with pytest.raises((AuthenticationError, OSError, EOFError)):
            come(launch, PLANS, None, secret=b"wrong").recv()
        plans = come(launch, PLANS, Introduction(1, "elsewhere", __version__, device_facts(), other,
                                                  files_of(locate(config))))
        with come(launch, LIFE, None):
            told.append(plans.recv())

    joiner = threading.Thread(target=rank_1)
    joiner.start()
    meeting = Meeting(launch)
    with pytest.raises(ConfigError, match=r"rank 1 on elsewhere does not work with rank 0 .* are others; give every"):
        prepare_with(meeting, locate(config))
    joiner.join(20)
    assert "are others" in str(told[0])


def meeting_of(introduction: Introduction) -> Meeting:
    meeting = object.__new__(Meeting)
    meeting.introductions = {1: introduction}
    return meeting


def test_files_of_equal_sizes_are_told_apart_and_hosts_that_pack_otherwise_are_not(tmp_path: Path):
    """The sums of all ranks are the same at every rank, whatever its own part of them is: nobody would notice later."""
    for folder, seed in (("here", 0), ("same", 0), ("tuned", 1)):
        save_tiny(tmp_path / folder / "model", "llama")
        weights = load_file(tmp_path / folder / "model" / "model.safetensors")
        weights["model.embed_tokens.weight"][0] += seed
        save_file(weights, tmp_path / folder / "model" / "model.safetensors", {"format": "pt"})
        head = tmp_path / folder / "head"
        head.mkdir()
        (head / "config.json").write_text('{"architectures": ["LlamaForCausalLMEagle"], "model_type": "llama"}')
        save_file({"fc.weight": torch.full((4, 8), float(seed))}, head / "model.safetensors")

    def found(model: str, head: str, longest: str = "") -> tuple[ModelFacts, dict[str, str]]:
        config = Config(speculation=SpeculationSection(f"eagle:{tmp_path / head / 'head'}" if head else longest))
        path = tmp_path / model / "model"
        return model_facts(path), files_of(Located(config, path, path))

    model, files = found("here", "here")

    def check(theirs: tuple[ModelFacts, dict[str, str]]) -> None:
        meeting_of(Introduction(1, "elsewhere", __version__, (), *theirs)).check(model, files)

    check(found("same", "same"))
    check((replace(model, packed_bytes=(("cpu", 5),), unpacked_bytes=3), files))  # of a processor with other kernels
    assert found("tuned", "here")[0] == model, "sizes do not tell them apart"
    with pytest.raises(ConfigError, match="its files of the model model are others") as refused:
        check(found("tuned", "here"))
    assert "drafter" not in str(refused.value)
    with pytest.raises(ConfigError, match="its files of the drafter are others") as refused:
        check(found("here", "tuned"))
    assert "of the model" not in str(refused.value)
    with pytest.raises(ConfigError, match=r"its files of the drafter are others.*the same command"):
        check(found("here", "", "ngram:longest=5"))


def test_the_memory_of_the_poorest_host_decides(tmp_path: Path):
    meeting = object.__new__(Meeting)
    meeting.launch = Launch(0, 4, 0, 2, "a", 1, False)
    rich, poor = DeviceFacts("cpu", "x", 400, 200), DeviceFacts("cpu", "y", 300, 100)
    gpus = [DeviceFacts("cuda", "g", 80, 79 - i, others=((80, 1),)) for i in range(4)]
    meeting.introductions = {rank: Introduction(rank, "h", __version__, (gpus[rank], poor), None, {})  # type: ignore
                             for rank in (1, 2, 3)}
    cuda, cpu = meeting.devices((gpus[0], rich))
    assert cuda.others == ((80, 78), (80, 77), (80, 76)), "the GPUs of the other ranks, not those beside this one"
    assert (cpu.memory_total, cpu.memory_free) == (600, 200), "two ranks share each host"


# ------------------------------------------------------------------------------------------------------------- for real
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class Hosts:
    """Two agents of torchrun, each of which stands for a host, and the server that rank 0 is."""

    def __init__(self, folder: Path, logs: Path):
        self.port, self.logs = free_port(), [logs / f"host{host}.log" for host in range(2)]
        meet = f"localhost:{free_port()}"
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1",
                   "--rdzv-backend", "c10d", "--rdzv-endpoint", meet, "--rdzv-id", "test", "-m", "stretto", "serve",
                   str(folder), "--tensor-parallel-size", "2", "--device", "cpu", "--port", str(self.port),
                   "--kv-tokens", "2048", "--max-model-len", "200", "--dtype", "float32"]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
        self.agents = [subprocess.Popen(command, stdout=log.open("w"), stderr=subprocess.STDOUT,
                                        env=environment | {"OMP_NUM_THREADS": "1"}) for log in self.logs]

    def ask(self, path: str, body: dict | None = None) -> dict:
        data = None if body is None else json.dumps(body).encode()
        call = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(call, timeout=60) as answer:
            return json.load(answer)

    def until_ready(self, seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while True:
            try:
                self.ask("/readyz")
                return
            except (OSError, urllib.error.HTTPError):
                assert time.monotonic() < deadline, "\n".join(log.read_text()[-3000:] for log in self.logs)
                assert all(agent.poll() is None for agent in self.agents), [log.read_text() for log in self.logs]
                time.sleep(0.2)

    def complete(self, prompt: list[int], tokens: int) -> list[int]:
        body = {"model": "model", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        text = self.ask("/v1/completions", body)["choices"][0]["text"]
        return [int(word.removeprefix("w")) for word in text.split()]

    def workers(self) -> list[psutil.Process]:
        """The two processes that torchrun has started: the server, and the one that follows it."""
        found = [process for agent in self.agents for process in psutil.Process(agent.pid).children()
                 if "stretto" in process.cmdline()]
        return sorted(found, key=lambda process: process.environ()["RANK"])

    def close(self) -> None:
        for agent in self.agents:
            agent.send_signal(signal.SIGTERM)
        for agent in self.agents:
            try:
                agent.wait(40)
            except subprocess.TimeoutExpired:
                agent.kill()


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Hosts, Oracle]]:
    folder = tmp_path_factory.mktemp("hosts") / "model"
    folder.mkdir()
    oracle = Oracle(None, save_tiny(folder, "llama"))  # type: ignore[arg-type]
    Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0")).save(str(folder / "tokenizer.json"))
    made = Hosts(folder, folder.parent)
    try:
        made.until_ready()
        yield made, oracle
    finally:
        made.close()


@pytest.mark.full
@pytest.mark.timeout(400)
def test_two_hosts_answer_as_one_and_live_through_the_death_of_a_rank(hosts: tuple[Hosts, Oracle]):
    made, oracle = hosts
    prompt = [5, 9, 2, 7, 1, 30]
    assert made.complete(prompt, 16) == oracle.answer(prompt, 16)

    server, follower = made.workers()
    (rank,) = [child for child in follower.children() if "spawn_main" in " ".join(child.cmdline())]
    rank.kill()  # the process that computes; its parent joins the next engine
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:  # nobody asks anything: the engine finds out by itself
        try:
            made.ask("/readyz")
            time.sleep(0.1)
        except urllib.error.HTTPError as e:
            assert e.code == 503
            break
    else:
        raise AssertionError("the engine does not notice that a rank has died")
    with pytest.raises(urllib.error.HTTPError) as told:
        made.complete(prompt, 4)
    assert told.value.code == 503
    made.until_ready()
    assert made.complete(prompt, 16) == oracle.answer(prompt, 16)
    assert "rank 1 has died" in "".join(log.read_text() for log in made.logs)

    (engine,) = [child for child in server.children() if "spawn_main" in " ".join(child.cmdline())]
    engine.kill()  # rank 0's: the follower comes to the next one
    time.sleep(1)
    made.until_ready()
    assert made.complete(prompt, 16) == oracle.answer(prompt, 16)


@pytest.mark.full
@pytest.mark.timeout(400)
def test_a_stop_of_all_hosts_leaves_no_process(hosts: tuple[Hosts, Oracle]):
    made, _ = hosts
    family = [process for agent in made.agents for process in psutil.Process(agent.pid).children(recursive=True)]
    made.close()
    assert family and not psutil.wait_procs(family, timeout=20)[1]
