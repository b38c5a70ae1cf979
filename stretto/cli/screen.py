"""What commands show people: words as they are, since a name may hold brackets that rich would read as markup, and wide
where no terminal limits it."""

from __future__ import annotations

import sys

from rich.console import Console, RenderableType

WIDTH = 160  # of tables that go to a file or a pipe


def screen() -> Console:
    """Standard output."""
    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else WIDTH, markup=False)


def error_screen() -> Console:
    """Standard error: progress and failures, beside what is asked for."""
    return Console(stderr=True, highlight=False, markup=False)


def show(what: RenderableType) -> None:
    screen().print(what)
