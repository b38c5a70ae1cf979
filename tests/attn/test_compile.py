"""The kernels compile for devices that are not here: the interpreter accepts much that the compiler does not."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KIB = 1024
SHARED = {80: 99 * KIB, 90: 227 * KIB}  # of one program; the 80 family includes sm_86, sm_89 and sm_120


def compile_kernels(arch: int, head_dim: int, dtype: str, *options: str) -> dict[str, int]:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.attn.compile_kernels", str(arch), str(head_dim), dtype, *options]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return {k: v for line in done.stdout.splitlines() for k, v in json.loads(line).items()}


FULL = [pytest.param(*p, marks=pytest.mark.full) for p in itertools.product(
    (80, 90), (64, 80, 96, 128, 256), ("bf16", "fp16", "fp32"), ((), ("--window", "1024", "--softcap", "--sinks")))]


@pytest.mark.parametrize(("arch", "head_dim", "dtype", "options"),
                         [(90, 128, "bf16", ()), (80, 80, "fp16", ("--window", "1024", "--sinks")), *FULL])
def test_kernels_compile_and_fit_a_multiprocessor(arch, head_dim, dtype, options):
    shared = compile_kernels(arch, head_dim, dtype, *options)
    assert {"plan", "chunk"} < set(shared)
    assert max(v for k, v in shared.items() if "all" not in k) <= SHARED[arch]
    if arch == 90:  # the programs that the table wants on a multiprocessor fit there, each with 1 KiB of its own
        assert max(v for k, v in shared.items() if "all" in k) <= 225 * KIB
