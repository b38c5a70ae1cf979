"""What is raised for a model that cannot be served. No torch in this module."""

from __future__ import annotations

from pathlib import Path

FETCH_LFS = "fetch the files themselves with `git lfs pull`"


class ConfigError(ValueError):
    """A configuration that cannot be served. Names the key, its value and what would do."""


def is_pointer(path: Path) -> bool:
    """Whether this is what Git LFS leaves where a file was not fetched."""
    with path.open("rb") as file:
        return file.read(64).startswith(b"version https://git-lfs")
