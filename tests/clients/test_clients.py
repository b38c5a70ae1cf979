"""Clients that others wrote, each in an environment of its own, against the scripted server."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.environments import node_environment, python_environment
from tests.serve.test_server import Program, program

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]  # an environment may have to be made first
SCRIPTS = Path(__file__).parent / "scripts"
KEY = "secret"
CLIENTS = {"anthropic": ("anthropic==2.14.0",), "litellm": ("litellm==1.110.2",),
           "langchain": ("langchain-openai==1.7.4",)}
JAVASCRIPT = ("openai@6.49.0",)


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


@pytest.mark.parametrize("package", CLIENTS)
def test_python_clients(server: Program, package: str):
    python = python_environment(package, *CLIENTS[package])
    assert run(server, str(python), str(SCRIPTS / f"{package}_client.py")).endswith("ok\n")


EXAMPLES = (Path(__file__).resolve().parents[2] / "docs/api.md").read_text()


@pytest.fixture(scope="module")
def example_server() -> Iterator[Program]:
    """As the documents call it."""
    with program({"block": 3, "max_model_len": 4000, "model_name": "SmolLM2-135M-Instruct"}) as made:
        made.until("/readyz", 200)
        yield made


@pytest.mark.parametrize("package", ["litellm", "langchain"])
def test_documented_programs(example_server: Program, package: str, tmp_path: Path):
    python = python_environment(package, *CLIENTS[package])
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", EXAMPLES, re.DOTALL)
               if re.match(rf"(?:import|from) {package}", block)]
    assert example(example_server, tmp_path / "example.py", code, str(python))


def test_documented_programs_in_javascript(example_server: Program, tmp_path: Path):
    folder = node_environment("openai-npm", *JAVASCRIPT)
    (tmp_path / "node_modules").symlink_to(folder / "node_modules")
    (code,) = re.findall(r"```js\n(.*?)```", EXAMPLES, re.DOTALL)
    assert example(example_server, tmp_path / "example.mjs", code, "node")


def example(server: Program, file: Path, code: str, interpreter: str) -> str:
    """What the program printed."""
    file.write_text(code.replace("http://127.0.0.1:8000", f"http://127.0.0.1:{server.port}"))
    done = subprocess.run([interpreter, str(file)], capture_output=True, text=True, timeout=120, cwd=file.parent,
                          env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def test_openai_for_javascript(server: Program):
    folder = node_environment("openai-npm", *JAVASCRIPT)
    assert run(server, "node", str(SCRIPTS / "openai_client.mjs"), folder=folder).endswith("ok\n")
