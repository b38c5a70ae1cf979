"""schemathesis over the whole OpenAPI document: whatever it makes of it, no answer is the server's fault."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.clients.environments import python_environment
from tests.serve.test_server import program

pytestmark = pytest.mark.full


def test_case_15_09_no_500_for_any_body(tmp_path: Path):
    python = python_environment("schemathesis", "schemathesis==4.32.5")
    with program({"block": 4, "max_model_len": 2000}) as server:
        server.until("/readyz", 200)
        done = subprocess.run(
            [str(python.with_name("schemathesis")), "run", f"http://127.0.0.1:{server.port}/openapi.json",
             "--checks", "not_a_server_error", "--max-examples", "15", "--continue-on-failure", "--seed", "1",
             "--request-timeout", "30", "--report", "json", "--report-dir", str(tmp_path), "--no-color"],
            capture_output=True, text=True, timeout=280, cwd=tmp_path)
        assert done.returncode == 0, done.stdout[-6000:] + server.log()[-3000:]
        server.until("/readyz", 200)
        answers = server.http.get("/metrics").text
        assert 'status="500"' not in answers and 'status="200"' in answers
    (report,) = tmp_path.glob("*.json")
    assert json.loads(report.read_text())
