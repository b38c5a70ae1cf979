"""What commands show people: words as they are, since a name may hold brackets that rich would read as markup, and wide
where no terminal limits it."""

from __future__ import annotations

import contextlib
import sys
from typing import Any, TextIO

from rich.console import Console, RenderableType

WIDTH = 160  # of tables that go to a file or a pipe


def screen() -> Console:
    """Standard output."""
    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else WIDTH, markup=False)


class Patient:
    """A file that may be full, such as a log on a full disk: what is told there is worth no failure of what it tells
    of. Otherwise the file itself."""

    def __init__(self, file: TextIO):
        self._file = file

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._file.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def error_screen() -> Console:
    """Standard error: progress and failures, beside what is asked for."""
    return Console(file=Patient(sys.stderr), highlight=False, markup=False)  # type: ignore[arg-type]


def show(what: RenderableType) -> None:
    screen().print(what)
