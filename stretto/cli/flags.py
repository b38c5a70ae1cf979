"""The table of settings in docs/configuration.md, written from config.py: `make docs`. A test compares the two."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import typing
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

from cyclopts import Parameter

from stretto import config as settings
from stretto.cli.options import ServerSections
from stretto.marked import with_part

START, END = "<!-- settings -->", "<!-- end of settings -->"
_DEFAULT = re.compile(r"\s*Default: (.*?)\.(?=\s|$)", re.DOTALL)


def table() -> str:
    """In Markdown: flag, default, meaning; a heading row for each section."""
    rows = ["| flag | default | |", "|---|---|---|"]
    helps = _help_texts()
    for hint in typing.get_type_hints(ServerSections, include_extras=True).values():
        if typing.get_origin(hint) is not typing.Annotated:
            continue
        section: Any = typing.get_args(hint)[0]
        groups: Any = next(extra.group for extra in hint.__metadata__ if isinstance(extra, Parameter))
        rows.append(f"| **{groups[0].name}** | | |")
        types = typing.get_type_hints(section)
        rows += [_row(field, types[field.name], helps[section.__name__, field.name]) for field in fields(section)]
    return "\n".join(rows)


def _row(field: Field[Any], kind: Any, text: str) -> str:
    said = _DEFAULT.search(text)
    default = said[1] if said else _shown(field.default)
    meaning = _DEFAULT.sub("", text).strip().removesuffix(".")
    choices = [str(choice) for part in (kind, *typing.get_args(kind)) if typing.get_origin(part) is typing.Literal
               for choice in typing.get_args(part)]
    if not all(re.search(rf"\b{choice}\b", meaning) for choice in choices):
        meaning += f": {', '.join(f'`{choice}`' for choice in choices)}"
    return f"| {_flags(field, kind)} | {default} | {meaning} |"


def _flags(field: Field[Any], kind: Any) -> str:
    flag = f"`--{field.name.replace('_', '-')}`"
    if field.name == "model":
        return f"`MODEL`, {flag}"
    is_switch = kind is bool or bool in typing.get_args(kind)
    return f"{flag}, `--no-{field.name.replace('_', '-')}`" if is_switch and field.default is not False else flag


def _shown(default: object) -> str:
    if default is MISSING or default in (None, (), ""):
        return ""
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, str):
        return f"`{default}`"
    return f"{default:g}" if isinstance(default, float) else str(default)


def _help_texts() -> dict[tuple[str, str], str]:
    """(section, field) -> the text below the field, on one line."""
    found = {}
    for node in ast.parse(inspect.getsource(settings)).body:
        if isinstance(node, ast.ClassDef):
            for field, text in zip(node.body, node.body[1:]):
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(
                        text, ast.Expr) and isinstance(text.value, ast.Constant):
                    found[node.name, field.target.id] = " ".join(str(text.value.value).split())
    return found


def with_table(page: str) -> str:
    """The page with today's table between its marks. Raises ValueError where they are missing."""
    return with_part(page, START, END, table())


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_table(path.read_text()))
