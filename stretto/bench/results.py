"""What a benchmark found, as plain data and as a table."""

from __future__ import annotations

import datetime
import math
import platform
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from rich.table import Table

from stretto.bench.measure import Series, Spread, agreement, ratio, spread
from stretto.bench.startup import Start
from stretto.bench.workload import Workload
from stretto.config import DeviceFacts, gib

PACKAGES = {"transformers": "transformers", "llama-cpp": "llama-cpp-python", "stretto": "stretto"}


def summary(kind: str, model: str, work: Workload, device: DeviceFacts, series: Sequence[Series]) -> dict[str, Any]:
    """JSON-ready. The first series is ours; each of the others gets ratios of ours to it."""
    ours = series[0]
    return {
        "benchmark": kind,
        "date": now(),
        "model": model,
        "workload": {"name": work.name, "prompts": len(work.prompts), "prompt_tokens": work.prompt_tokens,
                     "output_tokens": work.output_tokens},
        "rounds": len(ours.rates),
        "machine": machine(device),
        "engines": [_engine(kind, one) for one in series],
        "ratios": [_ratios(kind, ours, other) for other in series[1:]],
    }


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def machine(device: DeviceFacts) -> dict[str, Any]:
    """Where figures were measured."""
    return {"device": device.name, "kind": device.kind, "cores": device.cores, "threads": torch.get_num_threads(),
            "system": platform.platform(), "python": platform.python_version(), "torch": torch.__version__}


def start_figures(starts: Sequence[Start]) -> dict[str, Any]:
    """JSON-ready spreads of each phase, of the time until ready and of that until the first answer, in seconds."""
    def figure(values: Sequence[float]) -> dict[str, float | None]:
        return {**_rounded(spread(values)), "first": _significant(values[0])}

    return {"phases": {name: figure([start.phases[name] for start in starts]) for name in starts[0].phases},
            "ready": figure([start.ready for start in starts]),
            "first_answer": figure([start.first_answer for start in starts])}


def _engine(kind: str, series: Series) -> dict[str, Any]:
    found: dict[str, Any] = {"name": series.name, "version": _version(series.name), "dtype": series.dtype,
                             "tokens_per_second": _rounded(spread(series.rates))}
    if kind == "latency":
        found["first_token_seconds"] = _rounded(spread(series.first_token))
    found["seconds_per_round"] = _rounded(spread(series.seconds))
    found["peak_memory_bytes"] = series.peak_memory
    found["rates"] = [_significant(rate) for rate in series.rates]
    drafted = series.counters.get("drafted", 0)
    if drafted:
        found["drafts_accepted"] = _significant(series.counters["accepted"] / drafted)
    return found


def _ratios(kind: str, ours: Series, other: Series) -> dict[str, Any]:
    found: dict[str, Any] = {"to": other.name, "tokens_per_second": _rounded(ratio(ours, other)),
                             "same_answer_share": _significant(agreement(ours, other))}
    if kind == "latency":
        found["first_token_seconds"] = _rounded(ratio(ours, other, "first_token"))
    if ours.peak_memory and other.peak_memory:
        found["peak_memory"] = _significant(ours.peak_memory / other.peak_memory)
    return found


def _version(name: str) -> str | None:
    try:
        return version(PACKAGES[name])
    except (KeyError, PackageNotFoundError):
        return None


def _significant(value: float) -> float | None:
    """Four significant figures; None for what is no number, which JSON does not have."""
    return float(f"{value:.4g}") if math.isfinite(value) else None


def _rounded(values: Spread) -> dict[str, float | None]:
    return {name: _significant(value) for name, value in asdict(values).items()}


def table(found: dict[str, Any]) -> Table:
    """One line for each engine."""
    machine, work = found["machine"], found["workload"]
    shown = Table(title=f"{found['benchmark']}: {found['model']}, {work['name']}, {work['output_tokens']} tokens each; "
                        f"{machine['device']}, {machine['threads']} threads, {found['rounds']} rounds",
                  title_justify="left", box=None, padding=(0, 2))
    latency = found["benchmark"] == "latency"
    for column in ("engine", "dtype", "tokens/s", *(["first token"] if latency else []), "peak memory", "ours / theirs",
                   "same text"):
        shown.add_column(column, justify="left" if column in ("engine", "dtype") else "right")
    ratios = {one["to"]: one for one in found["ratios"]}
    for engine in found["engines"]:
        shown.add_row(*_row(engine, ratios.get(engine["name"]), latency))
    return shown


def _row(engine: dict[str, Any], against: dict[str, Any] | None, latency: bool) -> list[str]:
    rate, memory = engine["tokens_per_second"], engine["peak_memory_bytes"]
    cells = [f"{engine['name']} {engine['version'] or ''}", engine["dtype"], _shown(rate)]
    if latency:
        cells.append(f"{1000 * engine['first_token_seconds']['median']:.1f} ms")
    cells.append(gib(memory) if memory else "-")
    cells.append(_shown(against["tokens_per_second"]) if against else "")
    cells.append(f"{against['same_answer_share']:.0%}" if against else "")
    return cells


def _shown(values: dict[str, float | None]) -> str:
    if any(value is None for value in values.values()):
        return "-"
    return f"{values['median']:.4g} ({values['low']:.4g}..{values['high']:.4g})"
