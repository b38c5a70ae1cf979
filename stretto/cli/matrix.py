"""`stretto matrix`: what works with what, and which test shows it. With --write, in a checkout, the page and the record
that is installed with the package."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from stretto.cli.failures import CommandFailed
from stretto.matrix import Matrix, Proof, dump, fewest, load

ROOT = Path(__file__).parents[2]  # of a checkout
PAGE, RECORD = "docs/matrix.md", "stretto/matrix.json"
MARKS = {"yes": "[green]●[/]", "refused": "[red]R[/]", "untested": "[yellow]?[/]", "one at a time": "[dim]–[/]"}


def matrix(*features: str, as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
           write: Annotated[bool, Parameter(negative=())] = False) -> int:
    """Which features work together, and the test that shows it.

    Parameters
    ----------
    features
        One: with every other. Two: with each other. Default: all with all.
    as_json
        Print the cells as JSON.
    write
        Collect the tests of this checkout, and write docs/matrix.md and the record.
    """
    if write:
        return _write()
    found = load()
    names = [feature.name for feature in found.features]
    unknown = [name for name in features if name not in names]
    if unknown or len(features) > 2:
        raise CommandFailed(f"{', '.join(unknown) or 'more than two'}: name at most two of: {', '.join(names)}")
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
    table = Table("", *(str(at + 1) for at in range(len(names))), box=None, padding=(0, 0, 0, 1))
    for at, name in enumerate(names):
        table.add_row(f"{at + 1} {name}", *(MARKS[found.cell(name, other).state] for other in names[: at + 1]))
    console.print(table, crop=False, no_wrap=True)
    console.print(f"{MARKS['yes']} yes   {MARKS['refused']} refused   {MARKS['untested']} untested  "
                  f" {MARKS['one at a time']} one at a time.   Details: stretto matrix FEATURE [FEATURE]")


# ------------------------------------------------------------------------------------------------------------- writing
def collected(root: Path = ROOT) -> Matrix:
    """What the tests of a checkout declare to prove: as few of them as show every pair; of those that run always before
    those that are marked `full`, and before those that need a GPU. Raises CommandFailed."""
    if not (root / "tests").is_dir():
        raise CommandFailed(f"{root} is no checkout of the project: it has no folder tests")
    files = sorted(str(path.relative_to(root)) for path in (root / "tests").rglob("test_*.py")
                   if "tests.proofs" in path.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "proofs.json"
        ran = subprocess.run([sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "", "-p",
                              "no:cacheprovider", "--proofs", str(out), *files], cwd=root, capture_output=True,
                             text=True)
        if not out.exists():
            raise CommandFailed(f"the tests cannot be collected:\n{ran.stdout}{ran.stderr}")
        found = json.loads(out.read_text())
    ranks = [[Proof(one["test"], tuple(one["features"])) for one in found if one["rank"] == rank] for rank in range(3)]
    return Matrix(fewest(*ranks))


def _write() -> int:
    from stretto.cli.matrix_page import matrix_page  # imports torch

    found = collected()
    (ROOT / RECORD).write_text(dump(found))
    (ROOT / PAGE).write_text(matrix_page(found))
    untested = found.untested()
    print(f"{PAGE}: {len(found.features)} features, {len(found.proofs)} proofs, {len(untested)} cells untested")
    return 0
