"""What commands that measure share: checks of their numbers, and telling what they found. No torch in this module."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from stretto.cli.failures import CommandFailed
from stretto.cli.screen import show


def at_least(options: Any, least: Mapping[str, float]) -> None:
    """Raises CommandFailed for the first of these options that lies below its least value; None may be."""
    for name, smallest in least.items():
        value = getattr(options, name)
        if value is not None and value < smallest:
            raise CommandFailed(f"--{name.replace('_', '-')} is {value}; it must be {smallest} or more")


def tell(found: Mapping[str, Any], path: Path | None, as_json: bool, table: Callable[[Any], Table]) -> None:
    """Writes the figures to `path`, if there is one, and prints them: as JSON, or as the table that `table` makes."""
    text = json.dumps(found, indent=2)
    if path is not None:
        try:
            path.write_text(text + "\n")
        except OSError as e:
            raise CommandFailed(f"{path} cannot be written: {e.strerror}") from e
    if as_json:
        print(text)
    else:
        show(table(found))
