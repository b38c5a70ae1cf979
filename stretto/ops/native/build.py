"""Compiles a C++ file for the processor it runs on, once: the library stays in the cache folder under a name that is
made of all that it depends on.

    key = sha256(source, headers, compiler and its version, flags, processor)     native/<name>-<key>.so

Compiled into a folder of its own and moved into place, one process at a time: whoever finds the file finds all of it.
Where the cache folder cannot be written to, or holds a library of another user, a temporary folder of this process
serves, and a warning says so. No torch in this module.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from filelock import FileLock

from stretto.cache import cache_folder

log = logging.getLogger(__name__)

HEADERS = Path(__file__).parent
# Sums are contracted to fused multiply-adds in one way, whatever the compiler's default.
FLAGS = ("-std=gnu++17", "-O3", "-march=native", "-ffp-contract=fast", "-fPIC", "-shared", "-fvisibility=hidden")
COMPILERS = ("c++", "g++", "clang++")
SECONDS = 120  # that a compiler may take
DAY = 86_400  # seconds
WAY_OUT = "install a C++ compiler (Debian, Ubuntu: apt install g++), or set CXX to one"


class BuildError(Exception):
    """No library. The message says why, and the way out."""


def compiler() -> list[str]:
    """The command of this machine's C++ compiler: $CXX, else the first of COMPILERS. Raises BuildError."""
    given = os.environ.get("CXX")
    for command in (shlex.split(given),) if given else ((name,) for name in COMPILERS):
        if found := shutil.which(command[0]):
            return [found, *command[1:]]
    raise BuildError(f"CXX is {given!r}, and there is no such program; {WAY_OUT}" if given else
                     f"there is no C++ compiler ({', '.join(COMPILERS)}); {WAY_OUT}")


def build(source: Path) -> Path:
    """The library of `source`, compiled if it is not in the cache. Raises BuildError."""
    command = [*compiler(), *FLAGS, f"-I{HEADERS}"]
    name = f"{source.stem}-{_key(source, command)}.so"
    try:
        folder = cache_folder() / "native"
        if not (folder / name).is_file():
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            _built(command, source, folder / name)
        return _own(folder / name)
    except (OSError, RuntimeError) as kept:  # a full disk, a lock that nobody gives, no home, another user's file
        log.warning("native kernels %s cannot be kept (%s): compiled for this process alone", source.stem, kept)
    try:
        return _built(command, source, Path(_own_folder().name) / name)
    except OSError as e:
        raise BuildError(f"neither the cache nor a temporary folder can hold {source.stem} ({e}); free some room, or"
                         " set STRETTO_CACHE to a folder that has some") from e


def _built(command: list[str], source: Path, target: Path) -> Path:
    with FileLock(f"{target}.lock", timeout=2 * SECONDS):
        if not target.is_file():
            _sweep(target.parent)
            _compile(command, source, target)
    return target


def _sweep(folder: Path) -> None:
    """Removes what compilations have left that were killed."""
    for left in folder.glob("tmp*"):
        with contextlib.suppress(OSError):  # others compile, too, and theirs go when they are done
            if time.time() - left.stat().st_mtime > DAY:
                shutil.rmtree(left)


def _compile(command: list[str], source: Path, target: Path) -> None:
    log.info("compiling %s for this processor", source.name)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        try:
            done = subprocess.run([*command, "-o", str(made), str(source)], capture_output=True, text=True,
                                  timeout=SECONDS, check=False, env={**os.environ, "LC_ALL": "C"})
        except subprocess.TimeoutExpired:
            raise BuildError(f"{command[0]} took more than {SECONDS} s for {source.name}; try again, or set CXX to "
                             "another compiler") from None
        except OSError as e:
            raise BuildError(f"{command[0]} cannot be run ({e}); {WAY_OUT}") from e
        if done.returncode and os.strerror(errno.ENOSPC) in done.stderr:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target.parent))
        if done.returncode < 0 or "Killed" in done.stderr:
            raise BuildError(f"{command[0]} was killed while it compiled {source.name}; it takes some 500 MB: leave it"
                             " more memory, and start again")
        if done.returncode:
            raise BuildError(f"{command[0]} failed on {source.name}: {_first_error(done.stderr)}; set CXX to a newer "
                             "compiler")
        os.replace(made, target)


def _first_error(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[0] if lines else "it said nothing")


def _key(source: Path, command: list[str]) -> str:
    made_of = hashlib.sha256()
    for path in (source, *sorted(HEADERS.glob("*.h"))):
        made_of.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    for text in (*command, _version(*command), _processor()):
        made_of.update(text.encode() + b"\0")
    return made_of.hexdigest()[:20]


@functools.cache
def _version(*command: str) -> str:
    """Of what compiles, be it behind `ccache`, too."""
    try:
        return subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""  # compiling will say what is wrong


@functools.cache
def _processor() -> str:
    """What -march=native depends on: a cache folder may be shared by several machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = _macos_processor()
    wanted = ("model name", "flags", "CPU implementer", "CPU part", "Features", "isa")
    told = sorted({line for line in lines if line.partition(":")[0].strip() in wanted})
    return "\n".join((platform.machine(), platform.processor(), *told))


def _macos_processor() -> list[str]:
    try:
        done = subprocess.run(["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, timeout=30,
                              check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [f"model name: {done.stdout.strip()}"]


def _own(library: Path) -> Path:
    """Raises PermissionError for one that another user but root has put there: its code would run as this user."""
    owner = library.stat().st_uid
    if owner not in (0, os.getuid()):
        raise PermissionError(f"{library} belongs to user {owner}")
    return library


@functools.cache
def _own_folder() -> tempfile.TemporaryDirectory:
    """Of this process alone: what others could write to is nothing to load code from. Removed when the process ends."""
    return tempfile.TemporaryDirectory(prefix="stretto-native-")
