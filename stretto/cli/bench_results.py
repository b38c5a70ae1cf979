"""`stretto bench plot` and `compare`: what earlier benchmarks wrote with --output-json. Loads no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stretto.bench.compare import CompareError, table
from stretto.bench.compare import compare as compare_results
from stretto.bench.plots import PlotError, draw
from stretto.cli.failures import CommandFailed
from stretto.cli.screen import show

WORSE = 4  # exit code of a comparison with figures beyond the tolerance
KINDS = ("serve", "sweep", "latency", "throughput", "startup")


def plot(*files: Path, output: Path) -> int:
    """Draw what benchmarks wrote with --output-json: several files of one kind in one picture.

    Parameters
    ----------
    files
        Results of `bench serve`, `sweep`, `latency`, `throughput` or `startup`.
    output
        The picture: .svg, .png or .pdf.
    """
    results = [{**result, "label": label if len(files) > 1 else ""} for label, result in _read(files)]
    try:
        draw(results, output)
    except (PlotError, OSError) as e:
        raise CommandFailed(str(e)) from e
    return 0


def compare(*files: Path, tolerance: float | None = None) -> int:
    """Compare what benchmarks wrote with --output-json: each figure, and its ratio to the first server's, engine's or
    file's.

    Parameters
    ----------
    files
        Results; one file with several servers or engines, or several files.
    tolerance
        Percent that a figure may be worse than the first; beyond it the exit code is 4.
    """
    try:
        comparison = compare_results(_read(files))
    except CompareError as e:
        raise CommandFailed(str(e)) from e
    show(table(comparison))
    worse = comparison.worse(tolerance / 100) if tolerance is not None else []
    for line in worse:
        print(f"worse by more than {tolerance:g} %: {line}")
    return WORSE if worse else 0


def _read(files: tuple[Path, ...]) -> list[tuple[str, dict[str, Any]]]:
    """(label, result) of each file. Raises CommandFailed."""
    if not files:
        raise CommandFailed("name one or more files that benchmarks wrote with --output-json")
    found = []
    for file in files:
        try:
            result = json.loads(file.read_text())
        except OSError as e:
            raise CommandFailed(f"{file} cannot be read: {e.strerror}") from e
        except ValueError as e:
            raise CommandFailed(f"{file} is not JSON: {e}") from e
        if not isinstance(result, dict) or result.get("benchmark") not in KINDS:
            raise CommandFailed(f"{file} is no result of a benchmark ({', '.join(KINDS)})")
        found.append((file.stem, result))
    labels = [label for label, _ in found]
    return [(label if labels.count(label) == 1 else f"{number} {label}", result)
            for number, (label, result) in enumerate(found, 1)]
