"""The names of GGUF files. A model may be split into parts, NAME-00001-of-00003.gguf and so on."""

from __future__ import annotations

import re
from pathlib import Path

_PART = re.compile(r"(?P<name>.+)-\d{5}-of-(?P<count>\d{5})\.gguf")


def parts_of(path: str | Path) -> list[Path]:
    """All parts of the model that this file is a part of, by their names; the file alone where its name is no part's.

    >>> [p.name for p in parts_of("m-00002-of-00002.gguf")]
    ['m-00001-of-00002.gguf', 'm-00002-of-00002.gguf']
    """
    path = Path(path)
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    return [path.with_name(f"{match['name']}-{i + 1:05}-of-{count:05}.gguf") for i in range(count)]


def name_of(path: Path) -> str:
    """The file's name without its end, and without the number of a part."""
    match = _PART.fullmatch(path.name)
    return match["name"] if match else path.stem
