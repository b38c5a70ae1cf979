"""The first file of a replica's or gateway's process: ties it to its parent, then runs the program that it is told.

    python -P tether.py NAME PARENT_PID   < {"module": ..., "argv": [...], "cores": [...]}

It is run by its path, with nothing but the standard library, so that it also starts programs of other environments.
Their arguments come through the standard input because they hold keys, and command lines are seen by everybody.
"""

import ctypes
import json
import os
import runpy
import signal
import sys
import threading
import time

PARENT_POLL_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent(parent: int) -> None:
    """This process is killed when its parent ends: by the kernel (Linux), or by a thread that watches."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_POLL_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()


def main() -> None:
    end_with_parent(int(sys.argv[2]))
    job = json.loads(sys.stdin.readline())
    if job["cores"]:
        os.sched_setaffinity(0, job["cores"])
    sys.argv = [sys.argv[1], *job["argv"]]
    runpy.run_module(job["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
