"""Runs code that nobody has read. No torch in this module.

Limits, not a wall: a process of its own in an empty folder, without the environment's variables, with bounds on its
time, memory, files and processes. It has the rights of the user who runs it and can reach the network; whoever needs
more runs the whole command in a container.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile

SECONDS = 10.0
LIMITS = {"RLIMIT_AS": 2 << 30, "RLIMIT_FSIZE": 16 << 20, "RLIMIT_NPROC": 64, "RLIMIT_CORE": 0}
REACHED_THE_END = 77  # exit code; code that ends itself, sys.exit(0) included, has another
SAID = 300  # characters of an error that are kept

# Limits itself before it runs what comes on its standard input: the parent has threads, so nothing of its own may run
# between fork and exec.
_BOOT = f"""
import json, os, resource, sys
for name, most in json.loads(sys.argv[1]).items():
    resource.setrlimit(getattr(resource, name), (most, most))
code = sys.stdin.read()
sys.stdin = open(os.devnull)
exec(compile(code, "answer", "exec"), {{"__name__": "answer"}})
os._exit({REACHED_THE_END})
"""


def run_python(code: str, seconds: float = SECONDS) -> str | None:
    """None if the module ran to its end, else why not."""
    limits = LIMITS | {"RLIMIT_CPU": int(seconds) + 1}
    with (tempfile.TemporaryDirectory(prefix="stretto-eval-") as folder, tempfile.TemporaryFile("w+") as given,
          tempfile.TemporaryFile("w+", errors="replace") as said):  # files: a pipe stays open as long as a grandchild
        given.write(code)
        given.seek(0)
        child = subprocess.Popen([sys.executable, "-I", "-c", _BOOT, json.dumps(limits)], cwd=folder, stdin=given,
                                 env={"PATH": "/usr/bin:/bin", "HOME": folder}, start_new_session=True,
                                 stdout=subprocess.DEVNULL, stderr=said)
        try:
            child.wait(seconds)
        except subprocess.TimeoutExpired:
            return f"it did not end within {seconds:g} s"
        finally:
            _end(child)
        said.seek(0)
        lines = said.read().strip().splitlines()
    if child.returncode == REACHED_THE_END:
        return None
    return (lines[-1] if lines else f"it ended itself with exit code {child.returncode}")[:SAID]


def _end(child: subprocess.Popen) -> None:
    """The child and what it has started; its group is its own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
