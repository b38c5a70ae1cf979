"""Ranks that torchrun has started, on one host or several: how they find each other, and what they tell each other.

    store of torchrun    "stretto/leader" = where rank 0's engine listens; each new engine writes it anew
    rank r --> rank 0    plans    who it is, its memory | rank 0's preparation | plans, answers ...
    rank r --> rank 0    life     nothing is ever said here: its end is the end of the process at the other side

Whoever can reach the store can join, as everywhere in torch.distributed: the network between ranks must be trusted.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from stretto import __version__
from stretto.compat import ConfigError, Refusal
from stretto.config import DeviceFacts, ModelFacts
from stretto.device.ranks import FAILED, RankDied, RanksDevice, RankShard, join_ranks, leave_ranks, serve_rank
from stretto.device.streams import LocalDevice
from stretto.engine.follow import CLOSED, GONE, REFUSED
from stretto.engine.launch import Launch
from stretto.engine.locate import Located
from stretto.engine.prepare import Prepared, prepare_located
from stretto.engine.process import end_with_parent
from stretto.engine.ranks import MakeDevice, rank_device
from stretto.facts import device_facts, model_facts
from stretto.logs import set_up_logging
from stretto.model.digest import digest
from stretto.model.hub import ModelNotFound
from stretto.spec.context import DrafterError
from stretto.spec.registry import draft_checkpoint

LEADER = "stretto/leader"
START_SECONDS = 600.0  # until all ranks must have come
HELLO_SECONDS = 10  # for whoever has connected to show that it is a rank
EXIT_SECONDS = 10.0  # for a rank to end in order
PLANS, LIFE = "plans", "life"
ALIVE = {"SO_KEEPALIVE": 1, "TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 11_000}
"""Of each connection: a host that is gone without a word is noticed after some 11 s."""

log = logging.getLogger(__name__)


class Address(msgspec.Struct):
    """Where rank 0's engine listens. `secret` proves that both have read the same store."""

    host: str
    port: int
    secret: bytes


@dataclass(frozen=True)
class Introduction:
    """What a rank says of itself."""

    rank: int
    host: str
    version: str
    devices: tuple[DeviceFacts, ...]
    model: ModelFacts
    files: dict[str, str]  # see `files_of`


@dataclass(frozen=True)
class Order:
    """What rank 0 sends to each rank that may take part: what it has prepared, and the port of the store of the
    sums."""

    prepared: Prepared
    port: int


def open_store(launch: Launch) -> dist.TCPStore:
    """torchrun's, or one at the same address that rank 0 keeps."""
    keeps = launch.rank == 0 and not launch.agents_store
    return dist.TCPStore(launch.address, launch.port, None, keeps, timedelta(seconds=START_SECONDS),
                         wait_for_workers=False)


def _tuned(connection: socket.socket) -> Connection:
    """As a message connection: small messages leave at once, and the end of the other host is noticed. Until `_trust`
    nothing is waited for longer than HELLO_SECONDS."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _wait_at_most(connection, HELLO_SECONDS)
    for name, value in ALIVE.items():
        if hasattr(socket, name):  # some are Linux's
            level = socket.SOL_SOCKET if name.startswith("SO_") else socket.IPPROTO_TCP
            connection.setsockopt(level, getattr(socket, name), value)
    return Connection(connection.detach())


def _wait_at_most(connection: socket.socket, seconds: int) -> None:
    """0: as long as it takes."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))


def _trust(connection: Connection) -> None:
    """It has shown that it is one of ours."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        _wait_at_most(same, 0)


# --------------------------------------------------------------------------------------------------------------- rank 0
class Meeting:
    """Rank 0 waits for all others. Then either `lead` or `refuse`."""

    def __init__(self, launch: Launch):
        """Raises TimeoutError where they do not come."""
        self.launch, self._secret = launch, secrets.token_bytes(32)
        self._listener = _listen(launch.address)
        self._store = open_store(launch)
        here = Address(launch.address, self._listener.getsockname()[1], self._secret)
        self._store.set(LEADER, msgspec.json.encode(here).decode())
        self.plans: dict[int, Connection] = {}
        self.lives: dict[int, Connection] = {}
        self.introductions: dict[int, Introduction] = {}
        deadline = time.monotonic() + START_SECONDS
        while len(self.plans) < launch.ranks - 1 or len(self.lives) < launch.ranks - 1:
            self._welcome(deadline)

    def _welcome(self, deadline: float) -> None:
        self._listener.settimeout(max(0.1, deadline - time.monotonic()))
        try:
            connection = _tuned(self._listener.accept()[0])
        except TimeoutError:
            missing = sorted(set(range(1, self.launch.ranks)) - self.plans.keys())
            raise TimeoutError(f"after {START_SECONDS:g} s no word of the ranks {missing}: does torchrun run on every"
                               " host?") from None
        try:
            deliver_challenge(connection, self._secret)
            answer_challenge(connection, self._secret)
            rank, kind, content = connection.recv()
            _trust(connection)
        except (AuthenticationError, OSError, EOFError, ValueError):
            return  # none of ours
        log.info("rank %d has come: %s", rank, kind)
        if kind == LIFE:
            self.lives[rank] = connection
        else:
            self.plans[rank], self.introductions[rank] = connection, content

    def devices(self, own: tuple[DeviceFacts, ...]) -> tuple[DeviceFacts, ...]:
        """This host's devices, beside which stand those of the other ranks. The memory of a CPU is what all ranks would
        have if every host had as little as the poorest."""
        found = []
        for device in own:
            theirs = [other for introduction in self.introductions.values() for other in introduction.devices
                      if other.kind == device.kind]
            if device.kind == "cuda":
                device = replace(device, others=tuple((o.memory_total, o.memory_free) for o in theirs))
            elif not self.launch.one_host:
                least = min((device, *theirs), key=lambda o: o.memory_free)
                share = self.launch.ranks / self.launch.local_ranks
                device = replace(device, memory_total=int(least.memory_total * share),
                                 memory_free=int(least.memory_free * share))
            found.append(device)
        return tuple(found)

    def check(self, model: ModelFacts, files: Mapping[str, str]) -> None:
        """Raises compat.ConfigError for a rank that has other files, or another version of this program."""
        refusals = [Refusal(f"rank {one.rank} on {one.host}", f"rank 0 on {socket.gethostname()}", why, remedy)
                    for one in self.introductions.values() for why, remedy in _differences(one, model, files)]
        if refusals:
            raise ConfigError(refusals)

    def refuse(self, why: str) -> None:
        for connection in self.plans.values():
            with suppress(OSError):
                connection.send(why)

    def lead(self, prepared: Prepared, fixed: bool) -> HostRanks:
        return HostRanks(self, prepared, fixed)


def _listen(host: str) -> socket.socket:
    """At the address by which the others know this host; where that is none of its own, at all of them."""
    try:
        return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError:
        return socket.create_server(("", 0))


def files_of(located: Located) -> dict[str, str]:
    """Digests of what every rank loads at its start, by what it is; of adapters see `engine.adapters`. What cannot be
    read has the cause as its digest: rank 0 says it as its own refusal, and no other rank may be without it."""
    found, asked = {"model": digest(located.path)}, located.config.speculation.speculation
    try:
        drafter = draft_checkpoint(asked) if asked != "off" else None
        found["drafter"] = asked if drafter is None else digest(drafter)
    except (DrafterError, ModelNotFound, OSError) as e:
        found["drafter"] = str(e)
    return found


def _differences(one: Introduction, model: ModelFacts, files: Mapping[str, str]) -> list[tuple[str, str]]:
    found = []
    if one.version != __version__:
        found.append((f"it runs stretto {one.version}, rank 0 {__version__}", "install the same version everywhere"))
    others = {what for what, mark in files.items() if one.files.get(what) != mark}
    if _of_files(one.model) != _of_files(model):
        others.add("model")
    for what in sorted(others, reverse=True):
        name = f"model {model.name}" if what == "model" else what
        found.append((f"its files of the {name} are others", "give every host the same files, and the same command"))
    return found


def _of_files(model: ModelFacts) -> ModelFacts:
    """Without what depends on the host: how weights are packed."""
    return replace(model, packed_bytes=(), exact_packed_bytes=None, unpacked_bytes=0)


class HostRanks:
    """The other ranks of one engine, as `engine.ranks.Ranks`."""

    def __init__(self, meeting: Meeting, prepared: Prepared, fixed: bool):
        self._meeting, self._fixed, self._device = meeting, fixed, prepared.resolved.device
        launch = meeting.launch
        self._store = dist.TCPStore(launch.address, 0, None, True, timedelta(seconds=START_SECONDS),
                                    wait_for_workers=False)
        for rank, connection in sorted(meeting.plans.items()):
            try:
                connection.send(Order(prepared, self._store.port))
            except OSError as e:
                raise RankDied(f"rank {rank} has died") from e

    @property
    def _plans(self) -> list[Connection]:
        return [self._meeting.plans[rank] for rank in sorted(self._meeting.plans)]

    def join(self) -> RankShard:
        launch = self._meeting.launch
        self._shard = join_ranks(0, launch.ranks, self._store, rank_device(self._device, launch.local_rank),
                                 self._fixed, launch.one_host)
        return self._shard

    def lead(self, own: LocalDevice) -> RanksDevice:
        lives = [self._meeting.lives[rank] for rank in sorted(self._meeting.lives)]
        return RanksDevice(own, self._shard, self._plans, self.close, lives)

    def close(self, failed: bool = False) -> None:
        if not failed:
            leave_ranks()
            for life in self._meeting.lives.values():
                life.poll(EXIT_SECONDS)  # its end: the rank has gone
        for connection in (*self._meeting.plans.values(), *self._meeting.lives.values()):
            connection.close()


# ---------------------------------------------------------------------------------------------------------- other ranks
def run_follower(arguments: tuple[Located, Launch, int], make: MakeDevice) -> None:
    """The process of a rank above 0, for the life of one engine. Ends with one of the exit codes of `follow`."""
    located, launch, parent = arguments
    end_with_parent(parent)
    serve = located.config.serve
    set_up_logging(serve.log_level, serve.log_format, f"rank {launch.rank}")
    try:
        follower = _Follower(located, launch)
    except TimeoutError as e:
        log.error("%s", e)
        sys.exit(GONE)
    order = follower.plans.recv()
    if not isinstance(order, Order):
        log.error("rank 0 could not start: %s", order)
        sys.exit(REFUSED)
    sys.exit(CLOSED if follower.run(order, make) else 1)


class _Follower:
    """One of the other ranks: its end of the two connections."""

    def __init__(self, located: Located, launch: Launch):
        """Raises TimeoutError where no engine of rank 0 is found."""
        self.located, self.launch, self._over = located, launch, False
        if torch.cuda.is_available():
            torch.cuda.set_device(launch.local_rank)
        introduction = Introduction(launch.rank, socket.gethostname(), __version__, device_facts(),
                                    model_facts(located.path), files_of(located))
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                address = msgspec.json.decode(open_store(launch).get(LEADER), type=Address)
                self.plans = self._connect(address, PLANS, introduction)
                self.life = self._connect(address, LIFE, None)
                break
            except (OSError, EOFError, AuthenticationError, dist.DistError):  # of an engine that has gone
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no engine of rank 0 at {launch.address} within {START_SECONDS:g} s") from None
                time.sleep(0.5)
        threading.Thread(target=self._watch, name="life of rank 0", daemon=True).start()

    def _connect(self, address: Address, kind: str, content: Any) -> Connection:
        connection = _tuned(socket.create_connection((address.host, address.port), timeout=HELLO_SECONDS))
        answer_challenge(connection, address.secret)
        deliver_challenge(connection, address.secret)
        connection.send((self.launch.rank, kind, content))
        _trust(connection)
        return connection

    def _watch(self) -> None:
        """This process may be waiting for a sum that rank 0 will never join."""
        with suppress(OSError, EOFError):
            self.life.recv()
        if not self._over:
            log.error("rank 0 has gone")
            os._exit(1)

    def run(self, order: Order, make: MakeDevice) -> bool:
        """Whether rank 0 has closed in order."""
        launch, resolved = self.launch, order.prepared.resolved
        prepared = replace(order.prepared, path=self.located.path, tokenizer_path=self.located.tokenizer_path,
                           target=replace(order.prepared.target, path=self.located.path))
        if resolved.device == "cpu":
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // launch.local_ranks))
        try:
            store = dist.TCPStore(launch.address, order.port, None, False, timedelta(seconds=START_SECONDS))
            shard = join_ranks(launch.rank, launch.ranks, store, rank_device(resolved.device, launch.local_rank),
                               resolved.config.model.deterministic, launch.one_host)
            device, depth = make(prepared, shard)
        except Exception as e:
            self.plans.send((FAILED, f"{type(e).__name__}: {e}"))
            raise
        self._over = serve_rank(device, self.plans, depth)
        if self._over:
            leave_ranks()
        return self._over


def prepare_with(meeting: Meeting, located: Located) -> Prepared:
    """As `prepare_located`, for all ranks; where that refuses, they are told. Raises the same."""
    try:
        prepared = prepare_located(located, meeting.devices)
        meeting.check(prepared.facts.model, files_of(located))
    except Exception as e:
        meeting.refuse(str(e))
        raise
    return prepared
