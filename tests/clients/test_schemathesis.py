"""schemathesis over the whole OpenAPI document: whatever it makes of it, no answer is the server's fault. Behind the
API stands the whole engine, so that sessions, prompts of every kind and grammars go all the way."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path

import pytest

from stretto.protocol import AsyncEngine
from tests.clients.environments import python_environment
from tests.serve.conftest import make_served
from tests.serve.test_load import real_core

HOOKS = Path(__file__).parent / "scripts/schemathesis_hooks.py"
pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]


async def test_case_15_09_no_500_for_any_body(tmp_path: Path):
    python = python_environment("schemathesis", "schemathesis==4.32.5")
    async with make_served(real_core, served_model_names=("fake/tiny",)) as api:
        done = await asyncio.to_thread(
            subprocess.run,
            [str(python.with_name("schemathesis")), "run", f"{api.url}/openapi.json", "--checks", "not_a_server_error",
             "--max-examples", "6", "--continue-on-failure", "--seed", "1", "--request-timeout", "30", "--no-color",
             "--suppress-health-check", "all"],
            capture_output=True, text=True, timeout=500, cwd=tmp_path,
            env={**os.environ, "SCHEMATHESIS_HOOKS": str(HOOKS)})
        assert done.returncode == 0, done.stdout[-6000:]
        statuses = {status for _, status in api.service.metrics.responses}
        assert 200 in statuses and not any(status >= 500 for status in statuses), statuses
        assert (await api.engine.stats()).counters["generated_tokens"] > 1000, "hardly anything has reached the engine"
        await still_answers(api.engine)
        assert (await api.http.get("/health")).status_code == 200


async def still_answers(engine: AsyncEngine) -> None:
    gauges = (await engine.stats()).gauges
    assert gauges["running"] == gauges["waiting"] == 0
