"""What a load found: percentiles as data, as a table of servers side by side, and as a plot. No torch."""

from __future__ import annotations

import datetime
import html
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from stretto.bench.load import Load, Run, Sample

PERCENTILES = (50, 90, 95, 99)
COLOURS = ("#7a3e9d", "#1f8a70", "#d9822b", "#2f6fb2", "#b3261e", "#6d6d72")


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


def report(runs: Sequence[Run], load: Load, workload: str, slo_ttft: float | None = None,
           slo_tpot: float | None = None) -> dict[str, Any]:
    """JSON-ready. Times in seconds. Goodput counts requests within both limits, where limits are given."""
    return {"benchmark": "serve", "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "workload": workload, "loop": "closed" if load.rate is None else "open", "request_rate": load.rate,
            "concurrency": load.concurrency, "api": load.api, "conversations": len(load.conversations),
            "slo": {"ttft_seconds": slo_ttft, "tpot_seconds": slo_tpot},
            "servers": [_server(run, slo_ttft, slo_tpot) for run in runs]}


def _server(run: Run, slo_ttft: float | None, slo_tpot: float | None) -> dict[str, Any]:
    good = [sample for sample in run.samples if sample.error is None]
    errors = [sample.error for sample in run.samples if sample.error is not None]
    output, prompt = sum(s.output_tokens for s in good), sum(s.prompt_tokens for s in good)
    drafted = sum(s.drafted_tokens for s in good)
    target = asdict(run.target)
    del target["api_key"]
    return {
        **target, "seconds": run.seconds, "requests": len(run.samples), "failed": len(errors), "errors": errors[:5],
        "requests_per_second": len(good) / run.seconds, "output_tokens_per_second": output / run.seconds,
        "prompt_tokens_per_second": prompt / run.seconds, "prompt_tokens": prompt, "output_tokens": output,
        "cached_share": sum(s.cached_tokens for s in good) / prompt if prompt else 0.0,
        "drafts_accepted": sum(s.accepted_tokens for s in good) / drafted if drafted else None,
        "tokens_counted_by_server": all(s.counted for s in good), "client_cpu": run.client_cpu,
        "goodput": sum(_meets(s, slo_ttft, slo_tpot) for s in good) / run.seconds
        if slo_ttft is not None or slo_tpot is not None else None,
        "ttft": spread([s.first for s in good if s.first is not None]),
        "tpot": spread([s.per_token for s in good if s.per_token is not None]),
        "itl": spread([gap for s in good for gap in s.gaps]), "e2e": spread([s.end for s in good])}


def _meets(sample: Sample, ttft: float | None, tpot: float | None) -> bool:
    in_time = ttft is None or (sample.first is not None and sample.first <= ttft)
    return in_time and (tpot is None or sample.per_token is None or sample.per_token <= tpot)


def table(found: dict[str, Any]) -> Table:
    """One column a server."""
    made = Table(title=f"{found['workload']}, {found['loop']} loop", title_justify="left")
    made.add_column("")
    for server in found["servers"]:
        made.add_column(server["name"], justify="right")

    def row(name: str, values: list[str]) -> None:
        made.add_row(name, *values)

    servers = found["servers"]
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
    row("client's use of a core", [f"{100 * s['client_cpu']:.0f} %" for s in servers])
    return made


def plot(runs: Sequence[Run], title: str) -> str:
    """An SVG with two panels: the share of requests whose first token, and of pieces that, came within a time."""
    panels = (("first token", [sorted(s.first for s in run.samples if s.first is not None) for run in runs]),
              ("between pieces", [sorted(gap for s in run.samples for gap in s.gaps) for run in runs]))
    parts = [f'<text x="20" y="24" font-size="15">{html.escape(title)}</text>']
    for i, (name, series) in enumerate(panels):
        parts.append(_panel(60 + i * 460, name, series))
    for i, run in enumerate(runs):
        x = 60 + i * 180
        parts.append(f'<rect x="{x}" y="378" width="12" height="12" fill="{COLOURS[i % len(COLOURS)]}"/>'
                     f'<text x="{x + 18}" y="388">{html.escape(run.target.name[:24])}</text>')
    return ('<svg xmlns="http://www.w3.org/2000/svg" width="960" height="400" font-family="sans-serif" font-size="12">'
            f'<rect width="960" height="400" fill="white"/>{"".join(parts)}</svg>\n')


def _panel(left: float, name: str, series: list[list[float]]) -> str:
    """Cumulative shares over a logarithmic axis of milliseconds."""
    width, top, height = 400.0, 50.0, 290.0
    values = [1000 * value for one in series for value in one if value > 0] or [1.0]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)) + 1e-9)
    high = max(high, low + 1)

    def x(milliseconds: float) -> float:
        place = (math.log10(max(milliseconds, 10.0**low)) - low) / (high - low)
        return left + width * min(1.0, max(0.0, place))

    parts = [f'<text x="{left}" y="{top - 8}">{name}: share within (ms)</text>']
    for power in range(low, high + 1):
        at = x(10.0**power)
        parts.append(f'<line x1="{at:.1f}" y1="{top}" x2="{at:.1f}" y2="{top + height}" stroke="#ddd"/>'
                     f'<text x="{at - 8:.1f}" y="{top + height + 16}">{10.0**power:g}</text>')
    for share in (0, 0.5, 0.9, 1.0):
        y = top + height * (1 - share)
        parts.append(f'<line x1="{left}" y1="{y}" x2="{left + width}" y2="{y}" stroke="#ddd"/>'
                     f'<text x="{left - 38}" y="{y + 4}">{100 * share:.0f} %</text>')
    for i, one in enumerate(series):
        points = " ".join(f"{x(1000 * value):.1f},{top + height * (1 - (j + 1) / len(one)):.1f}"
                          for j, value in enumerate(one))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{COLOURS[i % len(COLOURS)]}" stroke-width="2"/>')
    return "".join(parts)
