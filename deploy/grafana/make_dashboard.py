"""Writes stretto.json, the Grafana dashboard. Run it after changing a panel: python deploy/grafana/make_dashboard.py"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SOURCE = {"type": "prometheus", "uid": "${source}"}
CHOSEN = 'model_name=~"$model", instance=~"$instance"'


def rate(metric: str, by: str = "") -> str:
    return f"sum{f' by ({by})' if by else ''} (rate({metric}{{{CHOSEN}}}[$__rate_interval]))"


def quantiles(metric: str) -> list[tuple[str, str]]:
    observed = rate(f"{metric}_bucket", "le")
    return [(f"p{int(100 * q)}", f"histogram_quantile({q}, {observed})") for q in (0.5, 0.95, 0.99)]


# (title, unit, stacked, [(legend, query)])
PANELS: list[tuple[str, str, bool, list[tuple[str, str]]]] = [
    ("Requests", "short", False, [("running", f"sum(stretto_running{{{CHOSEN}}})"),
                                  ("waiting", f"sum(stretto_waiting{{{CHOSEN}}})")]),
    ("Tokens a second", "short", False, [("generated", rate("stretto_generated_tokens_total")),
                                         ("prompt", rate("stretto_prompt_tokens_total"))]),
    ("Time to first token", "s", False, quantiles("stretto_time_to_first_token_seconds")),
    ("Between tokens", "s", False, quantiles("stretto_inter_token_latency_seconds")),
    ("Time in the queue", "s", False, quantiles("stretto_request_queue_time_seconds")),
    ("Whole answer", "s", False, quantiles("stretto_e2e_request_latency_seconds")),
    ("Tokens a step, by kind", "short", True, [("{{kind}}", f"{rate('stretto_step_tokens_total', 'kind')} / scalar("
                                                            f"{rate('stretto_steps_total')})")]),
    ("Rows a step, by kind", "short", True, [("{{kind}}", f"{rate('stretto_step_rows_total', 'kind')} / scalar("
                                                          f"{rate('stretto_steps_total')})")]),
    ("KV cache in use", "percentunit", False, [("{{instance}}", f"stretto_kv_usage{{{CHOSEN}}}")]),
    ("Prompt tokens found in the cache", "percentunit", False, [
        ("share", f"{rate('stretto_cached_tokens_total')} / {rate('stretto_prompt_tokens_total')}")]),
    ("Drafts accepted", "percentunit", False, [
        ("all", f"{rate('stretto_accepted_total')} / {rate('stretto_drafted_total')}"),
        ("place {{position}}", f"{rate('stretto_accepted_per_position_total', 'position')} / "
                               f"{rate('stretto_drafted_per_position_total', 'position')}")]),
    ("Put back, aborted, failed", "short", False, [
        ("retractions", rate("stretto_retractions_total")),
        ("{{cause}}", rate("stretto_request_aborts_total", "cause")),
        ("faults", rate("stretto_faults_total")), ("engine restarts", rate("stretto_engine_restarts_total"))]),
    ("Choices that ended, by reason", "short", True, [
        ("{{finished_reason}}", rate("stretto_request_success_total", "finished_reason"))]),
    ("HTTP answers", "short", True, [("{{route}} {{status}}", rate("stretto_http_responses_total", "route, status"))]),
    ("Sessions", "short", False, [("open", f"sum(stretto_sessions{{{CHOSEN}}})"),
                                  ("turns a second", rate("stretto_session_turns_total"))]),
    ("Host: share of time waiting for the device", "percentunit", False, [
        ("share", f"{rate('stretto_device_wait_seconds_total')} / {rate('stretto_loop_seconds_total')}")]),
]


def panel(i: int, title: str, unit: str, stacked: bool, queries: list[tuple[str, str]]) -> dict[str, Any]:
    custom = {"fillOpacity": 30 if stacked else 0, "stacking": {"mode": "normal" if stacked else "none"}}
    return {"id": i + 1, "type": "timeseries", "title": title, "datasource": SOURCE,
            "gridPos": {"h": 8, "w": 12, "x": 12 * (i % 2), "y": 8 * (i // 2)},
            "fieldConfig": {"defaults": {"unit": unit, "min": 0, "custom": custom}, "overrides": []},
            "targets": [{"refId": chr(65 + j), "expr": query, "legendFormat": legend, "datasource": SOURCE}
                        for j, (legend, query) in enumerate(queries)]}


def variable(name: str, label: str) -> dict[str, Any]:
    query = f"label_values(stretto_running, {label})"
    return {"name": name, "type": "query", "datasource": SOURCE, "query": {"query": query, "refId": name},
            "includeAll": True, "multi": True, "refresh": 2, "current": {"text": "All", "value": "$__all"}}


def dashboard() -> dict[str, Any]:
    source = {"name": "source", "label": "Data source", "type": "datasource", "query": "prometheus"}
    return {"uid": "stretto", "title": "Stretto", "schemaVersion": 39, "editable": True, "refresh": "10s",
            "time": {"from": "now-30m", "to": "now"}, "tags": ["stretto"],
            "templating": {"list": [source, variable("model", "model_name"), variable("instance", "instance")]},
            "panels": [panel(i, *each) for i, each in enumerate(PANELS)]}


if __name__ == "__main__":
    (HERE / "stretto.json").write_text(json.dumps(dashboard(), indent=2) + "\n")
