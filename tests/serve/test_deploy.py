"""deploy/: the metrics that rules and dashboard name exist, flags and probes too, and files say what they must."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
import yaml

from stretto.cli.sources import OTHER_VARIABLES, PREFIX
from stretto.foreign.translate import setting_names
from stretto.host.counters import Counters
from stretto.protocol import EngineInfo, EngineStats
from stretto.serve.metrics import ServerMetrics
from tests.clients.test_gateways import ROUTER_FLAGS, SMG, SMG_FLAGS
from tests.serve.conftest import Api

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
GAUGES = ("running", "waiting", "sessions", "pages_used_0", "pages_total_0")
CORE = ("loop_seconds", "device_wait_seconds", "engine_restarts")  # counters of the engine's loop and its supervisor


@pytest.fixture(scope="module")
def served() -> set[str]:
    """Names of samples that a server with a real engine shows."""
    info = EngineInfo(model_name="m", vocab_size=1, max_model_len=1, max_num_seqs=1, kv_tokens=1, eos_token_ids=[])
    metrics, counters = ServerMetrics(info, "m"), Counters()
    counters.note_drafts(2, 1)
    metrics.responses["/x", 200] = 1
    metrics.take(EngineStats(counters=counters.as_dict() | dict.fromkeys(CORE, 1.0), gauges=dict.fromkeys(GAUGES, 1.0)))
    return {re.split(r"[{ ]", line)[0] for line in metrics.render().decode().splitlines() if line[0] != "#"}


def named(text: str) -> set[str]:
    return set(re.findall(r"\b(stretto_[a-z0-9_]+)\b", text))


def test_rules_name_what_is_served(served: set[str]):
    rules = yaml.safe_load((DEPLOY / "prometheus/rules.yml").read_text())
    every = [rule for group in rules["groups"] for rule in group["rules"]]
    recorded = {rule["record"] for rule in every if "record" in rule}
    for rule in every:
        assert named(rule["expr"]) <= served, rule["expr"]
        assert set(re.findall(r"\b(stretto:[a-z0-9_:]+)", rule["expr"])) <= recorded
        assert "record" in rule or (rule["annotations"]["summary"] and rule["labels"]["severity"])


def test_the_dashboard_is_that_of_its_script_and_names_what_is_served(served: set[str]):
    spec = importlib.util.spec_from_file_location("make_dashboard", DEPLOY / "grafana/make_dashboard.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    text = (DEPLOY / "grafana/stretto.json").read_text()
    assert json.loads(text) == script.dashboard(), "run python deploy/grafana/make_dashboard.py"
    assert named(text) <= served, named(text) - served


@pytest.mark.parametrize("path", sorted(DEPLOY.rglob("*.y*ml")), ids=lambda path: path.name)
def test_yaml_is_read(path: Path):
    assert all(document for document in yaml.safe_load_all(path.read_text()))


async def test_probes_flags_and_variables_exist(api: Api):
    pod = next(yaml.safe_load_all((DEPLOY / "kubernetes/stretto.yaml").read_text()))["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert (await api.http.get(container[probe]["httpGet"]["path"])).status_code == 200
    drain = int(container["args"][container["args"].index("--drain-timeout") + 1])
    assert pod["terminationGracePeriodSeconds"] > drain
    texts = [path.read_text() for path in DEPLOY.rglob("*") if path.is_file() and path.suffix != ".py"]
    flags = {flag.replace("-", "_") for text in texts for flag in re.findall(r'"--([a-z-]+)"', text)}
    variables = {name.lower() for text in texts for name in re.findall(r"\bSTRETTO_([A-Z_]+)\b", text)}
    variables -= {"port", *(name.removeprefix(PREFIX).lower() for name in OTHER_VARIABLES)}
    assert (flags | variables) - {"index_url", "create_home"} <= setting_names()


def test_gateways_are_started_as_they_are_tested():
    command = " ".join(yaml.safe_load((DEPLOY / "compose/replicas.yaml").read_text())["services"]["gateway"]["command"])
    assert SMG in command and " ".join(SMG_FLAGS) in command
    page = (DEPLOY.parent / "docs/operations.md").read_text()
    assert re.search(rf"^    smg launch .* {' '.join(SMG_FLAGS)}$", page, re.MULTILINE)
    assert re.search(rf"^    vllm-router .* {' '.join(ROUTER_FLAGS)}$", page, re.MULTILINE)
