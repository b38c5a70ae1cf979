"""What a load found: percentiles as data, and as a table of servers side by side. No torch in this module."""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from stretto.bench.load import Load, Run, Sample

PERCENTILES = (50, 90, 95, 99)
CURVE = 100  # steps of the curves that plots draw
LIMITS = ("ttft", "tpot", "e2el")  # what goodput may be asked to keep, by vLLM's names


def percentile(values: Sequence[float], share: float) -> float:
    """Linear between the two nearest ranks, as numpy does it. `values` are not empty."""
    ordered = sorted(values)
    place = share / 100 * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Mean, percentiles and largest; None of nothing."""
    if not values:
        return None
    return {"mean": sum(values) / len(values), **{f"p{p}": percentile(values, p) for p in PERCENTILES},
            "max": max(values)}


def curve(values: Sequence[float]) -> list[float]:
    """Every hundredth of the values' distribution, from the smallest to the largest; empty of nothing."""
    return [percentile(values, 100 * step / CURVE) for step in range(CURVE + 1)] if values else []


def report(runs: Sequence[Run], load: Load, workload: str, goodput: Mapping[str, float] | None = None
           ) -> dict[str, Any]:
    """JSON-ready. Times in seconds. Goodput counts requests that keep every limit of `goodput` (names in LIMITS)."""
    limits = goodput or {}
    return {"benchmark": "serve", "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "workload": workload, "loop": "closed" if load.rate is None else "open", "request_rate": load.rate,
            "concurrency": load.concurrency, "api": load.api, "conversations": len(load.conversations),
            "burstiness": load.burstiness, "goodput_limits": dict(limits),
            "servers": [_server(run, limits) for run in runs]}


def _server(run: Run, limits: Mapping[str, float]) -> dict[str, Any]:
    good = [sample for sample in run.samples if sample.error is None]
    errors = [sample.error for sample in run.samples if sample.error is not None]
    output, prompt = sum(s.output_tokens for s in good), sum(s.prompt_tokens for s in good)
    drafted = sum(s.drafted_tokens for s in good)
    target = asdict(run.target)
    del target["api_key"]
    times = {"ttft": [s.first for s in good if s.first is not None],
             "tpot": [s.per_token for s in good if s.per_token is not None],
             "itl": [gap for s in good for gap in s.gaps], "e2e": [s.end for s in good]}
    return {
        **target, "version": run.version, "seconds": run.seconds, "requests": len(run.samples),
        "failed": len(errors), "errors": errors[:5],
        "requests_per_second": len(good) / run.seconds, "output_tokens_per_second": output / run.seconds,
        "prompt_tokens_per_second": prompt / run.seconds, "prompt_tokens": prompt, "output_tokens": output,
        "cached_share": sum(s.cached_tokens for s in good) / prompt if prompt else 0.0,
        "drafts_accepted": sum(s.accepted_tokens for s in good) / drafted if drafted else None,
        "tokens_counted_by_server": all(s.counted for s in good), "client_cpu": run.client_cpu,
        "server_cpu_seconds_per_token": run.server_cpu / output if run.server_cpu is not None and output else None,
        "goodput": sum(_meets(s, limits) for s in good) / run.seconds if limits else None,
        **{name: spread(values) for name, values in times.items()},
        "curves": {name: curve(values) for name, values in times.items()}}


def _meets(sample: Sample, limits: Mapping[str, float]) -> bool:
    """An answer of one token has no time for later ones; one without text has not met a limit for its first."""
    found = {"ttft": sample.first if sample.first is not None else math.inf, "tpot": sample.per_token or 0.0,
             "e2el": sample.end}
    return all(found[name] <= limit for name, limit in limits.items())


def table(found: dict[str, Any]) -> Table:
    """One column a server."""
    made = Table(title=f"{found['workload']}, {found['loop']} loop", title_justify="left")
    made.add_column("")
    for server in found["servers"]:
        made.add_column(server["name"], justify="right")

    def row(name: str, values: list[str]) -> None:
        made.add_row(name, *values)

    servers = found["servers"]
    row("version", [s["version"] or "-" for s in servers])
    row("requests (failed)", [f"{s['requests']} ({s['failed']})" for s in servers])
    row("requests a second", [f"{s['requests_per_second']:.2f}" for s in servers])
    row("output tokens a second", [f"{s['output_tokens_per_second']:.1f}" for s in servers])
    row("prompt tokens a second", [f"{s['prompt_tokens_per_second']:.1f}" for s in servers])
    row("prompt tokens cached", [f"{100 * s['cached_share']:.1f} %" for s in servers])
    if any(s["drafts_accepted"] is not None for s in servers):
        row("drafts accepted", ["-" if s["drafts_accepted"] is None else f"{100 * s['drafts_accepted']:.1f} %"
                                for s in servers])
    if any(s["goodput"] is not None for s in servers):
        row("goodput, requests a second", [f"{s['goodput']:.2f}" for s in servers])
    for key, title in (("ttft", "first token"), ("tpot", "each later token"), ("itl", "between pieces"),
                       ("e2e", "whole answer")):
        for share in ("mean", "p50", "p95", "p99"):
            row(f"{title}, {share} (ms)", ["-" if s[key] is None else f"{1000 * s[key][share]:.1f}" for s in servers])
    if any(s["server_cpu_seconds_per_token"] is not None for s in servers):
        row("server's CPU a token (us)", ["-" if s["server_cpu_seconds_per_token"] is None
                                          else f"{1e6 * s['server_cpu_seconds_per_token']:.0f}" for s in servers])
    row("client's use of a core", [f"{100 * s['client_cpu']:.0f} %" for s in servers])
    return made
