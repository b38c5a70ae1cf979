"""`stretto matrix`: what works with what, and which test shows it, from the record that is installed with the package
(`matrix_page` writes it)."""

from __future__ import annotations

import difflib
import json
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console

from stretto.cli.failures import CommandFailed
from stretto.matrix import Matrix, load

MARKS = {"yes": "[green]●[/]", "refused": "[red]R[/]", "untested": "[yellow]?[/]", "one at a time": "[dim]–[/]"}


def matrix(*features: str, as_json: Annotated[bool, Parameter(name="--json", negative=())] = False) -> int:
    """Which features work together, and the test that shows it.

    Parameters
    ----------
    features
        One: with every other. Two: with each other. Default: all with all.
    as_json
        Print the cells as JSON.
    """
    found = load()
    names = [feature.name for feature in found.features]
    unknown = [name for name in features if name not in names]
    if unknown or len(features) > 2:
        near = difflib.get_close_matches(unknown[0], names, n=1) if unknown else []
        meant = f" (did you mean {near[0]!r}?)" if near else ""
        raise CommandFailed(f"{', '.join(unknown) or 'more than two'}{meant}: name at most two of:"
                            f" {', '.join(names)}")
    if as_json:
        chosen = [(a, b) for a in features[:1] or names for b in features[1:] or names]
        print(json.dumps([{"features": pair, **vars(found.cell(*pair))} for pair in chosen], indent=2))
    elif features:
        _print_cells(found, features[0], list(features[1:]) or names, Console())
    else:
        _print_all(found, names, Console())
    return 0


def _print_cells(found: Matrix, name: str, others: list[str], console: Console) -> None:
    for other in others:
        cell = found.cell(name, other)
        says = {"yes": f"yes, by {cell.says}", "refused": f"refused: {cell.says}"}.get(cell.state, cell.state)
        console.print(f"{name} with {other}: {says}", highlight=False, markup=False, soft_wrap=True)


def _print_all(found: Matrix, names: list[str], console: Console) -> None:
    """One character a cell: a column is as wide as that, whatever the terminal."""
    width = max(map(len, names)) + 4
    numbers = range(1, len(names) + 1)
    lines = [" " * width + "".join(str(n // 10) if n % 10 == 0 else " " for n in numbers),
             " " * width + "".join(str(n % 10) for n in numbers)]
    for n, name in zip(numbers, names):
        cells = "".join(MARKS[found.cell(name, other).state] for other in names[:n])
        lines.append(f"{f'{n:2} {name}':{width}}{cells}")
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False)
    console.print(f"{MARKS['yes']} yes   {MARKS['refused']} refused   {MARKS['untested']} untested  "
                  f" {MARKS['one at a time']} one at a time\nDetails: stretto matrix FEATURE [FEATURE]")
