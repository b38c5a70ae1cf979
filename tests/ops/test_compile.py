"""The fused kernels compile for devices that are not here: the interpreter accepts much that the compiler does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED = {80: 99 * 1024, 90: 227 * 1024}  # of one program; the 80 family includes sm_86, sm_89 and sm_120
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("arch", [90, pytest.param(80, marks=pytest.mark.full)])
def test_kernels_compile(arch: int) -> None:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-m", "tests.ops.compile_kernels", str(arch)], cwd=ROOT, env=env,
                          capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    shared = {k: v for line in done.stdout.splitlines() for k, v in json.loads(line).items()}
    assert {"rotate", "judge", "16 rows of 3072 to 1024"} <= set(shared)
    assert max(shared.values()) <= SHARED[arch]
