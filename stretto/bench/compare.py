"""Results of benchmarks side by side: the figures that matter, with their ratios to the first. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

Found = Mapping[str, Any]
_LOAD = (  # key, share of its spread, what people call it, unit, factor, whether more is better
    ("requests_per_second", "", "requests a second", "", 1, True),
    ("output_tokens_per_second", "", "output tokens a second", "", 1, True),
    ("goodput", "", "goodput, requests a second", "", 1, True),
    ("ttft", "p50", "first token, p50", "ms", 1e3, False), ("ttft", "p99", "first token, p99", "ms", 1e3, False),
    ("tpot", "p50", "each later token, p50", "ms", 1e3, False),
    ("tpot", "p99", "each later token, p99", "ms", 1e3, False), ("itl", "p99", "between pieces, p99", "ms", 1e3, False),
    ("e2e", "p50", "whole answer, p50", "ms", 1e3, False),
    ("server_cpu_seconds_per_token", "", "server's CPU a token", "us", 1e6, False))
_ENGINE = (("tokens_per_second", "median", "tokens a second", "", 1, True),
           ("first_token_seconds", "median", "first token", "ms", 1e3, False),
           ("peak_memory_bytes", "", "peak memory", "MiB", 2.0**-20, False))
_START = (("ready", "median", "start to ready", "s", 1, False),
          ("first_answer", "median", "start to first answer", "s", 1, False))


@dataclass(frozen=True)
class Figure:
    """One number of one column. `more_is_better` says in which direction it may have become worse."""

    column: str
    row: str
    value: float
    more_is_better: bool


class CompareError(ValueError):
    """Results that have no figure in common."""


def figures(result: Found, label: str) -> list[Figure]:
    """What of a result can be compared. `label` tells its columns from those of other results."""
    kind = result["benchmark"]
    if kind == "serve":
        return [f for server in result["servers"] for f in _of(_column(label, server["name"]), server, _LOAD)]
    if kind == "sweep":
        return [f for point in result["points"] for server in point["servers"] for f in _of(
            _column(label, server["name"]), server, _LOAD, f"{result['over'].replace('_', ' ')} "
            f"{point[result['over']]:g}: ")]
    if kind == "startup":
        return list(_of(label, result, _START))
    return [f for engine in result["engines"] for f in _of(_column(label, engine["name"]), engine, _ENGINE)]


def _column(label: str, name: str) -> str:
    return f"{label}: {name}" if label else name


def _of(column: str, found: Found, rows: Sequence[tuple], prefix: str = "") -> Iterator[Figure]:
    for key, share, title, unit, factor, more_is_better in rows:
        value = found.get(key)
        if isinstance(value, Mapping):
            value = value[share]
        if value is not None:
            yield Figure(column, f"{prefix}{title}{f' ({unit})' if unit else ''}", factor * value, more_is_better)


@dataclass(frozen=True)
class Comparison:
    """Columns in the order given; the first is what the others are compared with."""

    columns: tuple[str, ...]
    cells: Mapping[tuple[str, str], Figure]  # by (row, column)
    rows: tuple[str, ...]

    def ratio(self, row: str, column: str) -> float | None:
        """To the first column; None where one of the two has no such figure, or the first one's is 0."""
        base, own = self.cells.get((row, self.columns[0])), self.cells.get((row, column))
        return own.value / base.value if base is not None and own is not None and base.value else None

    def worse(self, tolerance: float) -> list[str]:
        """Figures that are worse than the first column's by more than this share of it, in words."""
        found = []
        for (row, column), figure in self.cells.items():
            ratio = self.ratio(row, column)
            if ratio is not None and (1 - ratio if figure.more_is_better else ratio - 1) > tolerance:
                found.append(f"{row}: {figure.value:.4g} of {column} is {ratio:.3f} times that of {self.columns[0]}")
        return found


def compare(results: Sequence[tuple[str, Found]]) -> Comparison:
    """`results`: (label, result). Raises CompareError."""
    found = [figure for label, result in results for figure in figures(result, label if len(results) > 1 else "")]
    comparison = Comparison(tuple(dict.fromkeys(f.column for f in found)), {(f.row, f.column): f for f in found},
                            tuple(dict.fromkeys(f.row for f in found)))
    if len(comparison.columns) < 2:
        raise CompareError("there is only one server, engine or result: nothing to compare it with")
    if not any(comparison.ratio(row, column) for row in comparison.rows for column in comparison.columns[1:]):
        raise CompareError("the results have no figure in common: "
                           + ", ".join(dict.fromkeys(str(result["benchmark"]) for _, result in results)))
    return comparison


def table(comparison: Comparison) -> Table:
    """One column for each server, engine or result, with the ratio to the first behind each figure."""
    made = Table()
    made.add_column("")
    for column in comparison.columns:
        made.add_column(column, justify="right")
    for row in comparison.rows:
        made.add_row(row, *(_cell(comparison, row, column) for column in comparison.columns))
    return made


def _cell(comparison: Comparison, row: str, column: str) -> str:
    figure = comparison.cells.get((row, column))
    if figure is None:
        return "-"
    ratio = comparison.ratio(row, column) if column != comparison.columns[0] else None
    return f"{figure.value:.4g}" + (f" ({ratio:.2f}x)" if ratio is not None else "")
