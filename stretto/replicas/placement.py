"""Which replica runs where: ports, GPUs, cores. Decided once, before anything starts."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import NamedTuple

from stretto.compat import ConfigError, Refusal
from stretto.config import Config

LOOPBACK = "127.0.0.1"  # only the gateway calls replicas
PROBE_SECONDS = 120.0
_NAMES_GPU = re.compile(r"\d|GPU-|MIG-")
CAN_SHARE = sys.platform == "linux"  # a bound port with who listens there, where both have SO_REUSEADDR
_COUNT_GPUS = "import torch; print(torch.cuda.device_count())"


@dataclass(frozen=True)
class Place:
    """Of one replica. `gpus`: as CUDA_VISIBLE_DEVICES names them; (): it runs on a CPU. `cores`: (): any."""

    index: int
    port: int
    gpus: tuple[str, ...] = ()
    cores: tuple[int, ...] = ()

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"

    @property
    def hardware(self) -> str:
        """For people."""
        if self.gpus:
            return f"GPU {', '.join(self.gpus)}"
        return f"cores {', '.join(map(str, self.cores))}" if self.cores else "all cores, shared"


def visible_gpus() -> tuple[str, ...]:
    """GPUs that this process may use: those that CUDA_VISIBLE_DEVICES names, up to the first entry that names none (-1,
    for one), as CUDA reads it; or all that torch sees. torch is asked in a process of its own, since it takes seconds
    to load and this one does without it. Raises OSError where it does not answer."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return tuple(takewhile(_NAMES_GPU.match, (gpu.strip() for gpu in named.split(","))))
    try:
        asked = subprocess.run([sys.executable, "-c", _COUNT_GPUS], capture_output=True, text=True,
                               timeout=PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        raise OSError(f"torch has not told the number of GPUs within {PROBE_SECONDS:g} s: look at nvidia-smi, name the"
                      " GPUs in CUDA_VISIBLE_DEVICES, or choose --device cpu") from None
    return tuple(map(str, range(int(asked.stdout)))) if asked.returncode == 0 else ()


def usable_cores() -> tuple[int, ...]:
    """(): this system cannot keep a process to cores."""
    return tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()


class Ports(NamedTuple):
    gateway: int
    replicas: tuple[int, ...]
    metrics: int  # of the gateway


@contextmanager
def ports_after(gateway: socket.socket, wanted: int, replicas: int) -> Iterator[Ports]:
    """The ports after the gateway's, so that they are the same at the next start; or free ones where `wanted`, the port
    that was asked for, is 0. `gateway` is bound to its own. Within the context nobody else is given any of them, also
    while a replica is away. Raises OSError that names a port which is taken."""
    own = gateway.getsockname()[1]
    with ExitStack() as held:
        found = [held.enter_context(reserved(LOOPBACK, own + i if wanted else 0, "replicas and the gateway's metrics"
                                    " take the ports after --port: choose another --port, or 0 for free ones"))
                 for i in range(1, replicas + 2)]
        *others, metrics = (sock.getsockname()[1] for sock in found)
        if not CAN_SHARE:
            for sock in (gateway, *found):
                sock.close()
        yield Ports(own, tuple(others), metrics)


def place(config: Config, gpus: Sequence[str], cores: Sequence[int], ports: Sequence[int]) -> tuple[Place, ...]:
    """Every replica gets --tensor-parallel-size GPUs of its own, neighbours first; without GPUs, an equal share of the
    cores. Raises ConfigError where there are too few GPUs."""
    count, ranks = config.serve.replicas, config.parallel.tensor_parallel_size
    if config.model.device == "cuda" or (gpus and config.model.device != "cpu"):
        if len(gpus) < count * ranks:
            least, fit = f"{len(gpus)} GPU{'s' if len(gpus) != 1 else ''}", len(gpus) // ranks
            remedy = f"set --replicas {fit} or less" if fit else "choose fewer, or another --device"
            raise ConfigError([Refusal(
                f"--replicas {count}", f"--tensor-parallel-size {ranks} on {least}",
                f"{count * ranks} GPUs are needed, {ranks} each", remedy)])
        shares = [Place(i, 0, gpus=tuple(gpus[i * ranks : (i + 1) * ranks])) for i in range(count)]
    else:
        each = len(cores) // count
        shares = [Place(i, 0, cores=tuple(cores[i * each : (i + 1) * each])) for i in range(count)]
    return tuple(replace(share, port=port) for share, port in zip(shares, ports, strict=True))


def reserved(host: str, port: int, remedy: str) -> socket.socket:
    """Bound to that port, or to a free one for 0, and not listening: who means this very port may listen there beside
    it (Linux, which all our programs ask for), and nobody else is given it. Raises OSError that names it."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except (OSError, OverflowError) as e:
        sock.close()
        why = getattr(e, "strerror", None) or e
        raise OSError(f"cannot listen on {host}:{port}: {why}; {remedy}") from e
    return sock
