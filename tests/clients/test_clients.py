"""Clients that others wrote, each in an environment of its own, against the scripted server."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.environments import node_environment, python_environment
from tests.serve.test_server import Program, program

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]  # an environment may have to be made first
SCRIPTS = Path(__file__).parent / "scripts"
KEY = "secret"


@pytest.fixture(scope="module")
def server() -> Iterator[Program]:
    options = {"block": 3, "max_model_len": 4000, "step_seconds": 0.002}
    with program(options, api_keys=[KEY], tokenizer="calling") as made:
        made.until("/readyz", 200)
        yield made


def run(server: Program, *command: str, folder: Path | None = None) -> str:
    """What the client printed; it must end well."""
    done = subprocess.run([*command, f"http://127.0.0.1:{server.port}", KEY], capture_output=True, text=True,
                          timeout=120, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    server.until("/readyz", 200)
    return done.stdout


@pytest.mark.parametrize("script, requirements", [
    ("anthropic", ("anthropic==2.14.0",)), ("litellm", ("litellm==1.110.2",)),
    ("langchain", ("langchain-openai==1.7.4",))])
def test_python_clients(server: Program, script: str, requirements: tuple[str, ...]):
    python = python_environment(script, *requirements)
    assert run(server, str(python), str(SCRIPTS / f"{script}_client.py")).endswith("ok\n")


def test_openai_for_javascript(server: Program):
    folder = node_environment("openai-npm", "openai@6.49.0")
    assert run(server, "node", str(SCRIPTS / "openai_client.mjs"), folder=folder).endswith("ok\n")
