"""Plots of what benchmarks found, drawn by matplotlib (the extra `plot`) from their JSON files alone. No torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

KINDS = (".svg", ".png", ".pdf")
Found = Mapping[str, Any]


class PlotError(RuntimeError):
    """Results that cannot be drawn, and why."""


def draw(results: Sequence[Found], path: Path) -> None:
    """One picture of results of one kind, each named by its "label" where it has one. The suffix of `path` is its
    format. Raises PlotError."""
    if path.suffix not in KINDS:
        raise PlotError(f"{path} must end in {', '.join(KINDS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise PlotError("plots are drawn by matplotlib: pip install 'stretto[plot]'")
    kinds = {result["benchmark"] for result in results}
    if len(kinds) != 1:
        raise PlotError(f"results of {' and '.join(sorted(kinds))} do not fit in one picture")
    from matplotlib.figure import Figure  # without pyplot: no display, no global state
    from matplotlib.ticker import LogFormatter

    drawing, columns = _DRAWINGS[kinds.pop()]
    figure = Figure(figsize=(5 * columns, 4), layout="constrained")
    panels = list(figure.subplots(1, columns, squeeze=False)[0])
    drawing(panels, results)
    for panel in panels:
        panel.grid(alpha=0.3)
        for axis in (panel.xaxis, panel.yaxis):
            if axis.get_scale() == "log":  # 20, not 2 x 10^1
                axis.set_major_formatter(LogFormatter())
                axis.set_minor_formatter(LogFormatter(minor_thresholds=(1.5, 0.5)))
    figure.suptitle(_title(results))
    figure.savefig(path)


def _title(results: Sequence[Found]) -> str:
    loads = (result["workload"] if "servers" in result or "points" in result else result["model"] for result in results)
    return "; ".join(dict.fromkeys(loads))


def _name(result: Found, name: str) -> str:
    return f"{result['label']}: {name}" if result.get("label") else name


def _loads(panels: list[Any], results: Sequence[Found]) -> None:
    """The share of requests, and of pieces of text, that came within a time."""
    for panel, (key, title) in zip(panels, (("ttft", "first token"), ("itl", "between pieces"))):
        for result in results:
            for server in result["servers"]:
                points = server["curves"][key]
                panel.plot([1000 * value for value in points], range(len(points)), label=_name(result, server["name"]))
        panel.set(title=title, xlabel="ms", ylabel="% within", xscale="log", ylim=(0, 101))
    panels[0].legend()


def _sweeps(panels: list[Any], results: Sequence[Found]) -> None:
    """Output over load, then latency over output: the second is the curve that capacity is read from."""
    for result in results:
        for name, points in _by_server(result).items():
            label, output = _name(result, name), [server["output_tokens_per_second"] for _, server in points]
            panels[0].plot([at for at, _ in points], output, "o-", label=label)
            for panel, key in zip(panels[1:], ("ttft", "tpot")):
                kept = [(rate, server[key]) for rate, (_, server) in zip(output, points) if server[key] is not None]
                x, middle, tail = ([rate for rate, _ in kept], *([1000 * times[share] for _, times in kept]
                                                                 for share in ("p50", "p99")))
                (line,) = panel.plot(x, middle, "o-", label=f"{label} p50")
                panel.plot(x, tail, "o--", color=line.get_color(), label=f"{label} p99")
    panels[0].set(title="output", xlabel=results[0]["over"].replace("_", " "), ylabel="tokens/s")
    panels[1].set(title="first token", xlabel="output tokens/s", ylabel="ms", yscale="log")
    panels[2].set(title="each later token", xlabel="output tokens/s", ylabel="ms", yscale="log")
    for panel in panels[:2]:
        panel.legend()


def _by_server(result: Found) -> dict[str, list[tuple[float, Found]]]:
    found: dict[str, list[tuple[float, Found]]] = {}
    for point in result["points"]:
        for server in point["servers"]:
            found.setdefault(server["name"], []).append((point[result["over"]], server))
    return found


def _engines(panels: list[Any], results: Sequence[Found]) -> None:
    """Medians with the extremes of the rounds."""
    names = [_name(result, engine["name"]) for result in results for engine in result["engines"]]
    spreads = [engine["tokens_per_second"] for result in results for engine in result["engines"]]
    _bars(panels[0], names, spreads)
    panels[0].set(title=results[0]["benchmark"], ylabel="tokens/s")


def _starts(panels: list[Any], results: Sequence[Found]) -> None:
    _bars(panels[0], [_name(result, result["model"]) for result in results], [result["ready"] for result in results])
    panels[0].set(title="start to ready", ylabel="seconds")


def _bars(panel: Any, names: Sequence[str], spreads: Sequence[Mapping[str, float]]) -> None:
    middle = [spread["median"] for spread in spreads]
    error = [[spread["median"] - spread["low"] for spread in spreads],
             [spread["high"] - spread["median"] for spread in spreads]]
    panel.bar(names, middle, yerr=error, capsize=4)


_DRAWINGS: Mapping[str, tuple[Callable[[list[Any], Sequence[Found]], None], int]] = {
    "serve": (_loads, 2), "sweep": (_sweeps, 3), "latency": (_engines, 1), "throughput": (_engines, 1),
    "startup": (_starts, 1)}
