"""The native kernels of this process: which there are, why one is missing, functions to call.

    kernel = function("packed", "multiply", c_void_p, c_int64, ...)      # library("packed") is not None
    kernel(x.data_ptr(), rows, ..., torch.get_num_threads())

Calls release the interpreter's lock. What a library computes with is torch's own OpenMP runtime (threads.h).
"""

from __future__ import annotations

import ctypes
import functools
import logging
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from stretto.ops.native.build import HEADERS, BuildError, build

log = logging.getLogger(__name__)

_OPENMP = re.compile(r"/lib(gomp|iomp5|omp)[^/]*$")


def names() -> list[str]:
    """Of all libraries."""
    return sorted(path.stem for path in HEADERS.glob("*.cpp"))


def library(name: str) -> ctypes.CDLL | None:
    """The loaded library; None where it cannot be had, see `trouble`."""
    found = _attempt(HEADERS / f"{name}.cpp")
    return None if isinstance(found, str) else found


def trouble(name: str) -> str | None:
    """Why a library is missing and the way out; None where it is there."""
    found = _attempt(HEADERS / f"{name}.cpp")
    return found if isinstance(found, str) else None


def troubles() -> dict[str, str]:
    """Why libraries are missing, by name, and "threads" where they have one alone; empty where all is well. What has to
    be compiled is, all at once."""
    with ThreadPoolExecutor() as pool:
        found = {name: why for name, why in zip(names(), pool.map(trouble, names())) if why is not None}
    if len(found) < len(names()) and not threaded():
        found["threads"] = "torch has loaded no OpenMP runtime with GOMP_parallel; install torch from its own wheels"
    return found


def function(name: str, symbol: str, *arguments: type) -> Callable[..., None]:
    """A function of a library that is there, which returns nothing."""
    found = library(name)
    assert found is not None, trouble(name)
    return ctypes.CFUNCTYPE(None, *arguments)((symbol, found))


def allocating(name: str, symbol: str, *arguments: type) -> Callable[..., int]:
    """A function that returns `code_of` (threads.h): raises MemoryError where memory is short, and RuntimeError for any
    other exception of C++."""
    found = library(name)
    assert found is not None, trouble(name)
    made = ctypes.CFUNCTYPE(ctypes.c_int, *arguments)((symbol, found))
    made.errcheck = _checked  # type: ignore[assignment]
    return made


def _checked(code: int, made: object, arguments: object) -> int:
    if code > 1:
        raise RuntimeError("a native kernel has failed, which is a fault of this engine: please report it")
    if code:
        raise MemoryError("a native kernel got no memory: leave it more, by a smaller --kv-tokens")
    return code


@functools.cache
def _attempt(source: Path) -> ctypes.CDLL | str:
    """Tried once: a compiler that has failed is not asked again."""
    try:
        return load(source)
    except BuildError as e:
        log.info("native kernels %s: %s", source.stem, e)
        return str(e)


def load(source: Path) -> ctypes.CDLL:
    """Builds, loads, and gives it torch's threads. Raises BuildError."""
    path = build(source)
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as e:
        raise BuildError(f"{path} cannot be loaded ({e}); remove it, and it is built again; if its folder is mounted"
                         " noexec, set STRETTO_CACHE to one that is not") from e
    parallel = _parallel()
    if parallel is not None:
        loaded.stretto_use_threads(parallel)
    return loaded


def threaded() -> bool:
    """Whether kernels run on torch's threads; if not, in the thread that calls them."""
    return _parallel() is not None


@functools.cache
def _parallel() -> ctypes.c_void_p | None:
    """GOMP_parallel of the OpenMP runtime that torch has loaded."""
    runtime = openmp_runtime()
    if runtime is None or not torch.backends.openmp.is_available():
        return None
    try:
        return ctypes.cast(ctypes.CDLL(str(runtime)).GOMP_parallel, ctypes.c_void_p)
    except (OSError, AttributeError):
        return None


def openmp_runtime() -> Path | None:
    """Of those in this process, torch's own first: other packages may have brought theirs."""
    own = Path(torch.__file__).parent
    try:
        mapped = {line.split(maxsplit=5)[-1].strip() for line in Path("/proc/self/maps").read_text().splitlines()}
        found = sorted(path for path in mapped if _OPENMP.search(path))
    except OSError:  # no Linux
        found = sorted(str(path) for path in own.glob("lib/lib*omp*"))
    return next((Path(p) for p in sorted(found, key=lambda p: own not in Path(p).parents)), None)
