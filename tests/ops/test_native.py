"""Native kernels: compiled once, kept under a name that says of what; what is missing is said; loops over torch's
threads."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from stretto.ops.native import attention, layer, packed, step
from stretto.ops.native import build as building
from stretto.ops.native import library as libraries
from stretto.ops.native.build import COMPILERS, BuildError, build, compiler
from stretto.ops.native.library import load, names, openmp_runtime, threaded
from stretto.wire import Goal, Int

COMPILED = any(shutil.which(name) for name in COMPILERS)
needs_compiler = pytest.mark.skipif(not COMPILED, reason="no C++ compiler")

SOURCE = """
#include "threads.h"
EXPORT void twice(const float *x, float *out, int64_t n, int threads) {
    stretto::for_each(n, threads, [&](int64_t i) { out[i] = 2 * x[i]; });
}
"""


@pytest.fixture
def source(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("STRETTO_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    path = tmp_path / "twice.cpp"
    path.write_text(SOURCE)
    return path


@needs_compiler
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_loop_over_threads(source, threads):
    twice = load(source).twice
    twice.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
    x, out = torch.arange(1000, dtype=torch.float32), torch.zeros(1000)
    twice(x.data_ptr(), out.data_ptr(), 1000, threads)
    assert torch.equal(out, 2 * x)


@needs_compiler
def test_compiled_once_and_again_when_it_changes(source, monkeypatch):
    first = build(source)
    stamp = first.stat().st_mtime_ns
    assert build(source) == first and first.stat().st_mtime_ns == stamp
    assert first.parent.name == "native" and not list(first.parent.glob("tmp*"))
    source.write_text(SOURCE.replace("2 *", "3 *"))
    assert build(source) != first
    source.write_text(SOURCE)
    monkeypatch.setattr(building, "FLAGS", (*building.FLAGS, "-DOTHER"))
    assert build(source) != first


@needs_compiler
def test_what_a_killed_compilation_left_goes(source):
    folder = build(source).parent
    for name, age in (("tmpold", 2 * building.DAY), ("tmpnew", 0)):
        (folder / name).mkdir()
        (folder / name / "some.so").write_text("")
        os.utime(folder / name, (time.time() - age,) * 2)
    source.write_text(SOURCE + "// again")
    build(source)
    assert [path.name for path in folder.glob("tmp*")] == ["tmpnew"]


@needs_compiler
def test_a_folder_that_cannot_be_written_to(source, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("STRETTO_CACHE", str(tmp_path / "file"))
    assert "stretto-native-" in str(build(source))
    assert "native kernels twice cannot be kept" in caplog.text and "compiled for this process alone" in caplog.text


@needs_compiler
def test_a_library_of_another_user_is_not_loaded(source, monkeypatch, caplog):
    kept = build(source)
    monkeypatch.setattr(building.os, "getuid", lambda: kept.stat().st_uid + 1)
    monkeypatch.setattr(building.Path, "stat", _owned_by(kept, 12345))
    assert build(source) != kept
    assert f"{kept} belongs to user 12345" in caplog.text


def _owned_by(path: Path, user: int):
    of = Path.stat

    def stat(self, **kwargs):
        found = of(self, **kwargs)
        return os.stat_result([*found[:4], user, *found[5:10]]) if self == path else found

    return stat


@needs_compiler
@pytest.mark.parametrize(("script", "said"), [
    ("kill -9 $$", "was killed while it compiled twice.cpp; .*leave it more memory"),
    ("echo twice.cpp:3: error: in $LC_ALL >&2; exit 1", "failed on twice.cpp: twice.cpp:3: error: in C;"),
])
def test_how_a_compiler_failed(source, tmp_path, monkeypatch, script, said):
    program = tmp_path / "compiler"
    program.write_text(f'#!/bin/sh\n[ "$1" = --version ] || {{ {script}; }}\n')
    program.chmod(0o755)
    monkeypatch.setenv("CXX", str(program))
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    with pytest.raises(BuildError, match=said):
        build(source)


def test_the_key_knows_the_compiler_behind_another_program(tmp_path):
    inner = tmp_path / "inner"
    keys = []
    for version in "12":
        inner.write_text(f"#!/bin/sh\necho {version}\n")
        inner.chmod(0o755)
        building._version.cache_clear()
        keys.append(building._version("/usr/bin/env", str(inner)))
    assert keys == ["1\n", "2\n"]


@needs_compiler
@pytest.mark.parametrize("trouble", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("no home")])
def test_a_cache_that_fails_costs_the_next_start_a_compilation(source, monkeypatch, trouble):
    """A full disk, a lock that nobody gives, a home that is not known."""
    compiled = building._compile

    def compile_elsewhere(command, source, target):
        if "stretto-native-" not in str(target):
            raise trouble
        compiled(command, source, target)

    monkeypatch.setattr(building, "_compile", compile_elsewhere)
    assert "stretto-native-" in str(build(source))


@needs_compiler
def test_no_room_anywhere_is_said(source, monkeypatch):
    def compile_nowhere(command, source, target):
        raise OSError(errno.ENOSPC, "No space left on device")

    source.write_text(SOURCE + "// compiled nowhere before")
    monkeypatch.setattr(building, "_compile", compile_nowhere)
    with pytest.raises(BuildError, match=r"No space left on device.*free some room, or set STRETTO_CACHE"):
        build(source)


@needs_compiler
def test_a_compiler_that_fails_is_quoted(source):
    source.write_text("int main() { return missing_name; }")
    with pytest.raises(BuildError, match=r"failed on twice.cpp: .*error: .*missing_name.*set CXX to a newer"):
        build(source)


def test_no_compiler(source, monkeypatch):
    monkeypatch.setattr(building.shutil, "which", lambda name: None)
    with pytest.raises(BuildError, match=r"no C\+\+ compiler \(c\+\+, g\+\+, clang\+\+\); install .* or set CXX"):
        build(source)
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    with pytest.raises(BuildError, match="CXX is 'no-such-compiler -O2'"):
        compiler()


def test_what_is_missing_is_said_once(source, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(building.shutil, "which", lambda name: None)
    monkeypatch.setattr(libraries, "HEADERS", source.parent)
    libraries._attempt.cache_clear()
    assert libraries.library("twice") is None and libraries.library("twice") is None
    assert "no C++ compiler" in str(libraries.trouble("twice"))
    assert len(caplog.records) == 1 and "native kernels twice: there is no C++ compiler" in caplog.text
    libraries._attempt.cache_clear()


@needs_compiler
@pytest.mark.parametrize("name", names())
def test_every_kernel_compiles_here(name):
    assert libraries.trouble(name) is None


@pytest.mark.skipif(not shutil.which("clang++"), reason="no clang++")
@pytest.mark.parametrize("name", names())
def test_clang_takes_every_kernel(name):
    """The compiler of macOS, and the last of `COMPILERS`."""
    done = subprocess.run(["clang++", *building.FLAGS, "-fsyntax-only", str(building.HEADERS / f"{name}.cpp")],
                          capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@needs_compiler
@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited on Linux alone")
def test_memory_that_is_short_is_an_error_and_long_rows_need_none():
    """Exceptions of C++ end in the call, in whichever thread they arise: in those of attention, in the caller's."""
    done = subprocess.run([sys.executable, "-m", "tests.ops.native_memory"], capture_output=True, text=True,
                          timeout=160, check=False)
    refused = "refused: a native kernel got no memory: leave it more, by a smaller --kv-tokens"
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["long rows done", f"wide heads {refused}", f"products {refused}"]


@needs_compiler
@pytest.mark.parametrize(("thrown", "error"), [("std::bad_alloc()", MemoryError),
                                               ("std::length_error(\"\")", RuntimeError)])
@pytest.mark.parametrize("threads", [1, 3])
def test_exceptions_of_any_thread_become_pythons(source, monkeypatch, thrown, error, threads):
    source.write_text(SOURCE + """
EXPORT int throws(int64_t n, int threads) {
    return stretto::code_of([&] { stretto::for_each(n, threads, [](int64_t i) { if (i == 40) throw WHAT; }); });
}
""".replace("WHAT", thrown))
    made = load(source)
    monkeypatch.setattr(libraries, "library", lambda name: made)
    throws = libraries.allocating("twice", "throws", ctypes.c_int64, ctypes.c_int)
    assert throws(40, threads) == 0
    with pytest.raises(error):
        throws(100, threads)


FIELDS = [("attention", "Layer", attention.Layer), ("attention", "Step", attention._Step),
              ("heads.h", "Heads", layer.Heads), ("layer", "Norm", layer.Norm), ("layer", "Product", layer.Product),
              ("packed", "Matrix", packed._Matrix), ("step", "Table", step._Table), ("step", "Bound", step._Bound),
              ("step", "Judged", step._Judged)]
TYPES = {"int64_t": ctypes.c_int64, "int32_t": ctypes.c_int32, "float": ctypes.c_float, "Multiply": ctypes.c_void_p}


@pytest.mark.parametrize(("file", "name", "structure"), FIELDS, ids=[name for _, name, _ in FIELDS])
def test_structures_are_the_same_on_both_sides(file, name, structure):
    text = re.sub("//.*", "", (building.HEADERS / (file if "." in file else f"{file}.cpp")).read_text())
    body = re.search(rf"^struct {name} {{(.*?)^}};", text, re.DOTALL | re.MULTILINE).group(1)
    fields = []
    for kind, declared in re.findall(r"^    (?:const )?(\w+) ([*\w, ]+);", body, re.MULTILINE):
        for field in declared.split(","):
            fields.append((field.strip(" *"), ctypes.c_void_p if "*" in field else TYPES[kind]))
    assert fields == structure._fields_


@pytest.mark.parametrize("path", [*building.HEADERS.glob("*.cpp"), *building.HEADERS.glob("*.h")], ids=lambda p: p.name)
def test_lines_are_as_long_as_pythons(path):
    assert not [line for line in path.read_text().splitlines() if len(line) > 120]


def test_columns_of_the_slot_table_are_numbered_alike():
    text = (building.HEADERS / "step.cpp").read_text()
    names = re.search(r"enum Column {(.*?)}", text).group(1).replace(" ", "").split(",")
    assert [Int[name] for name in names] == list(range(len(names)))
    assert int(re.search(r"GENERATE = (\d+)", text).group(1)) == Goal.GENERATE


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no Linux")
def test_kernels_run_on_the_threads_of_torch():
    torch.zeros(1)
    assert openmp_runtime() is not None and Path(torch.__file__).parent in openmp_runtime().parents
    assert threaded()
