"""Environments of other people's clients: one folder each, made on demand, kept, never mixed with the project's own.

    ~/.cache/stretto/clients/NAME-HASH/      HASH: of what is asked for; another version is another folder

A folder that could not be filled (no package index, no npm) makes the test that wants it skip, and says why. Variables:
STRETTO_CLIENTS names another parent folder.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

SECONDS = 600  # of one installation
COMPLETE = "complete"  # a file that is written last


def python_environment(name: str, *requirements: str) -> Path:
    """The Python of a virtual environment with these requirements and nothing else."""
    def fill(folder: Path) -> None:
        _run(sys.executable, "-m", "venv", str(folder))
        _run(str(_python(folder)), "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
             "--prefer-binary", "--retries", "1", *requirements)

    return _python(_environment(name, requirements, fill))


def node_environment(name: str, *packages: str) -> Path:
    """A folder with these npm packages, from which `node` finds them."""
    if shutil.which("npm") is None or shutil.which("node") is None:
        pytest.skip("there is no node and npm")

    def fill(folder: Path) -> None:
        folder.mkdir()
        _run("npm", "install", "--prefix", str(folder), "--no-audit", "--no-fund", "--loglevel=error", *packages)

    return _environment(name, packages, fill)


def _environment(name: str, wanted: tuple[str, ...], fill) -> Path:
    parent = Path(os.environ.get("STRETTO_CLIENTS") or Path.home() / ".cache/stretto/clients")
    parent.mkdir(parents=True, exist_ok=True)
    tag = hashlib.sha256(repr((wanted, sys.version_info[:2])).encode()).hexdigest()[:10]
    folder = parent / f"{name}-{tag}"
    with FileLock(f"{folder}.lock"):
        if not (folder / COMPLETE).exists():
            shutil.rmtree(folder, ignore_errors=True)
            try:
                fill(folder)
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as e:
                shutil.rmtree(folder, ignore_errors=True)
                said = (getattr(e, "stderr", None) or str(e)).strip().splitlines()
                pytest.skip(f"{', '.join(wanted)} cannot be installed: {said[-1] if said else e}")
            (folder / COMPLETE).touch()
    return folder


def _python(folder: Path) -> Path:
    return folder / "bin" / "python"


def _run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=SECONDS, capture_output=True, text=True,
                   env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"})
