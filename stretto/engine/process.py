"""An engine loop in a process of its own: the child's side, and the parent's handle on the child.

    front process                             engine process (spawned)
      PUSH  ---- commands, msgpack ---->  PULL
      PULL  <---- events, msgpack ------  PUSH        both over ipc in a private folder

No orphan: the kernel kills the child when its parent dies (Linux), and a thread of the child watches its parent's id
(everywhere). Signals of the terminal or of a supervisor reach the whole process group; the child ignores them, because
the parent decides when the engine stops.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Literal

import msgspec
import psutil
import zmq

from stretto.engine.collector import RestingInbox, look_once, spare_collector
from stretto.engine.loop import Core, CoreFactory, run_loop
from stretto.engine.messages import Command, Event
from stretto.logs import set_up_logging

PARENT_POLL_SECONDS = 1.0
FOLDER = "stretto-"  # of the sockets, in the folder for temporary files; the front process's id follows
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class ZmqInbox:
    """Commands from the front process."""

    def __init__(self, socket: zmq.Socket):
        self._socket = socket
        self._decoder = msgspec.msgpack.Decoder(Command)

    def take(self, timeout: float) -> list[Command]:
        if not self._socket.poll(int(timeout * 1000)):
            return []
        commands: list[Command] = []
        while True:
            try:
                commands.append(self._decoder.decode(self._socket.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return commands


@contextlib.contextmanager
def deaf_children() -> Iterator[None]:
    """Processes that are started inside hear neither SIGINT nor SIGTERM from their first instruction on: a Ctrl-C that
    meets one within its imports would have it print where it was. What comes for this thread meanwhile comes later."""
    resource_tracker.ensure_running()  # the first start would do so, and lift every block then
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_parent(parent_pid: int) -> None:
    """This process ends a second after its parent at the latest, whatever it waits for then. Called first thing;
    signals that reach the whole process group are left to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(PARENT_POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()


def _die_with_parent(parent_pid: int) -> None:
    """The same at once, where the kernel can see to it: when the thread ends that has started this process."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    end_with_parent(parent_pid)


def _child_main(factory: CoreFactory, address: str, parent_pid: int, log_level: int,
                log_format: Literal["text", "json"]) -> None:
    """Runs in the child. Exits with 0 after Shutdown, with 1 when the engine failed."""
    _die_with_parent(parent_pid)
    set_up_logging(log_level, log_format, "engine")
    context = zmq.Context()
    commands, events = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    for socket in (commands, events):
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, 5000)  # the last words
    commands.connect(f"{address}-commands")
    events.connect(f"{address}-events")
    encoder = msgspec.msgpack.Encoder()

    def send(event: Event) -> None:
        events.send(encoder.encode(event))

    clean = run_loop(partial(_make_settled, factory), RestingInbox(ZmqInbox(commands)), send)
    context.destroy(linger=5000)
    sys.exit(0 if clean else 1)


def _make_settled(factory: CoreFactory) -> Core:
    core = factory()
    spare_collector()
    look_once()
    return core


def sweep_folders() -> None:
    """Removes the folders of front processes that were killed and could not remove them themselves."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER}[0-9]*-*"):
        pid = folder.name.removeprefix(FOLDER).partition("-")[0]
        if pid.isdecimal() and not psutil.pid_exists(int(pid)) and folder.stat().st_uid == os.getuid():
            shutil.rmtree(folder, ignore_errors=True)


class EngineProcess:
    """The parent's handle: starts the child, sends it commands, ends it.

    Start it on a thread that lives as long as the engine shall: Linux ties the child's life to that thread."""

    def __init__(self, factory: CoreFactory, log_level: int = logging.INFO,
                 log_format: Literal["text", "json"] = "text"):
        sweep_folders()
        self._folder = Path(tempfile.mkdtemp(prefix=f"{FOLDER}{os.getpid()}-"))  # mode 0700
        address = f"ipc://{self._folder}/engine"
        self.context = zmq.Context()
        self._commands = self.context.socket(zmq.PUSH)
        self._commands.set_hwm(0)
        self._commands.setsockopt(zmq.LINGER, 0)
        self._commands.bind(f"{address}-commands")
        self.events_address = f"{address}-events"
        self._encoder = msgspec.msgpack.Encoder()
        self.process: BaseProcess = multiprocessing.get_context("spawn").Process(
            target=_child_main, args=(factory, address, os.getpid(), log_level, log_format), name="stretto engine")

    def start(self) -> None:
        with deaf_children():
            self.process.start()

    def send(self, command: Command) -> None:
        """Never blocks. A command to an engine that has gone, or is just going, is dropped: its end is reported
        elsewhere. (The queue is unbounded, so the only reason not to take a command is that nobody listens.)"""
        with contextlib.suppress(zmq.Again):
            self._commands.send(self._encoder.encode(command), zmq.NOBLOCK)

    def cpu_seconds(self) -> float:
        """Processor time that the child has used; 0 where the system does not tell."""
        try:
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # utime, stime: proc(5)

    def end(self, timeout: float) -> int | None:
        """Waits for the child to exit, then makes it. Returns its exit code; safe to call again."""
        if self.process.pid is not None:
            self.process.join(timeout)
            if self.process.is_alive():
                self.process.kill()
                self.process.join()
        return self.process.exitcode

    def close(self) -> None:
        self.context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)
