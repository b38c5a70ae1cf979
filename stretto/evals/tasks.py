"""What a task is: examples of a file, how each is asked, and what counts as right. No torch in this module."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

Record = dict[str, Any]


class DataError(ValueError):
    """A file that is not of the form that a task needs; the message names the place."""


@dataclass(frozen=True)
class Verdict:
    """`answer`: what was read out of the reply; None where nothing could be."""

    correct: bool
    answer: str | None
    expected: str


class Task(Protocol):
    """One example is a `Record`. `shots` are examples with their answers, shown before the question."""

    name: str
    max_tokens: int
    stop: tuple[str, ...]  # of plain completions, which do not end by themselves

    def check(self, record: Record) -> None:
        """Raises DataError for a record without what the task needs."""
        ...

    def messages(self, record: Record, shots: Sequence[Record]) -> list[dict[str, str]]: ...

    def prompt(self, record: Record, shots: Sequence[Record]) -> str:
        """The same for a model that goes on with text."""
        ...

    def judge(self, record: Record, reply: str) -> Verdict:
        """May take seconds; runs on a thread."""
        ...


def records_of(path: Path, columns: Sequence[str]) -> list[Record]:
    """Of a file with one JSON object a line, a JSON list, or CSV; .gz of each. CSV without a header gets `columns`.
    Raises DataError."""
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
    except OSError as e:
        raise DataError(f"{path} cannot be read: {e.strerror or e}") from e
    except (UnicodeDecodeError, EOFError) as e:
        raise DataError(f"{path} is not text: {e}") from e
    kind = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    if kind == ".csv":
        return _csv(text, columns)
    try:
        found = json.loads(text) if text.lstrip().startswith("[") else [
            json.loads(line) for line in text.splitlines() if line.strip()]
    except ValueError as e:
        raise DataError(f"{path} is neither a JSON list nor one JSON object a line: {e}") from e
    if not all(isinstance(record, dict) for record in found):
        raise DataError(f"{path} holds something else than objects")
    return found


def _csv(text: str, columns: Sequence[str]) -> list[Record]:
    rows = [row for row in csv.reader(io.StringIO(text)) if row]
    if rows and "question" in [cell.strip().lower() for cell in rows[0]]:
        columns, rows = [cell.strip().lower() for cell in rows[0]], rows[1:]
    return [dict(zip(columns, row, strict=False)) for row in rows]


def checked(task: Task, path: Path, records: Iterable[Record]) -> list[Record]:
    """The records, each of which the task can ask. Raises DataError."""
    found = list(records)
    for number, record in enumerate(found, 1):
        try:
            task.check(record)
        except DataError as e:
            raise DataError(f"{path}, example {number}: {e}") from e
    if not found:
        raise DataError(f"{path} holds no examples")
    return found


def text_field(record: Record, name: str) -> str:
    value = record.get(name)
    if not isinstance(value, str) or not value.strip():
        raise DataError(f'it has no text "{name}"; there are {", ".join(map(repr, record)) or "no fields"}')
    return value


def dialogue(pairs: Iterable[tuple[str, str]], question: str, system: str) -> list[dict[str, str]]:
    """Messages with earlier questions and answers as turns."""
    made = [{"role": "system", "content": system}]
    for asked, answered in pairs:
        made += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    return [*made, {"role": "user", "content": question}]

