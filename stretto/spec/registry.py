"""Drafters by name. A third party adds one by an entry point of the group "stretto.drafters".

    [project.entry-points."stretto.drafters"]
    mine = "my_package:Mine"          # a DrafterKind: Mine.caps(settings), Mine.make(settings, context)

On the command line: `--speculation ngram`, or with settings after a colon: `--speculation ngram:longest=5,shortest=3`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol

import torch

from stretto.spec.api import Drafter, DrafterCaps
from stretto.spec.ngram import LONGEST, SHORTEST, NgramDrafter
from stretto.spec.scripted import ScriptedDrafter

GROUP = "stretto.drafters"


class DrafterError(ValueError):
    """A drafter that cannot be made as asked."""


@dataclass(frozen=True)
class DrafterContext:
    """What a drafter may know of the engine when it is made. `width`: most drafts a row, as configured."""

    width: int
    vocab_size: int
    device: torch.device


class DrafterKind(Protocol):
    """One kind of drafter: what an entry point gives."""

    def caps(self, settings: str) -> DrafterCaps:
        """What it would declare with these settings, before any weight is loaded. `max_width` is its widest."""
        ...

    def make(self, settings: str, context: DrafterContext) -> Drafter: ...


@dataclass(frozen=True)
class _Kind:
    caps: Callable[[str], DrafterCaps]
    make: Callable[[str, DrafterContext], Drafter]


WIDEST = 32  # of drafters without weights, whose width costs them nothing


def _ngram(settings: str, context: DrafterContext) -> Drafter:
    numbers = {"longest": LONGEST, "shortest": SHORTEST}
    for part in filter(None, settings.split(",")):
        name, _, value = part.partition("=")
        if name not in numbers or not value.isdigit():
            raise DrafterError(f"drafter ngram: {part!r} is no setting; it takes longest=N and shortest=N")
        numbers[name] = int(value)
    try:
        return NgramDrafter(context.width, **numbers)
    except ValueError as e:
        raise DrafterError(f"drafter ngram: {e}") from e


def _scripted(settings: str, context: DrafterContext) -> Drafter:
    """Settings: a JSON file {"answers": [[ids] ...], "accuracy": 0..1, "variable": bool, "seed": int}."""
    try:
        script = json.loads(Path(settings).read_text())
        return ScriptedDrafter(script["answers"], context.width, float(script.get("accuracy", 1.0)),
                               vocab_size=context.vocab_size, variable=bool(script.get("variable", False)),
                               seed=int(script.get("seed", 0)), device=context.device)
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise DrafterError(f"drafter scripted: {settings!r} must be a JSON file with \"answers\", lists of token ids "
                           f"({type(e).__name__}: {e})") from e


def _weightless(settings: str) -> DrafterCaps:
    return DrafterCaps(shape="chain", max_width=WIDEST, variable=True)


BUILT_IN: dict[str, DrafterKind] = {"ngram": _Kind(_weightless, _ngram), "scripted": _Kind(_weightless, _scripted)}


def find_drafter(asked: str) -> tuple[DrafterKind, str]:
    """The kind and the settings of `asked`: a name, or a name, a colon and settings. Raises DrafterError."""
    name, _, settings = asked.partition(":")
    plugins = {p.name: p for p in entry_points(group=GROUP)}
    if name in plugins and name in BUILT_IN:
        raise DrafterError(f"drafter {name} is built in, and {plugins[name].value} claims it too: uninstall one")
    if name in plugins:
        return plugins[name].load(), settings
    if name not in BUILT_IN:
        raise DrafterError(f"there is no drafter {name!r}; known: {', '.join(sorted({*BUILT_IN, *plugins}))}")
    return BUILT_IN[name], settings


def drafter_caps(asked: str) -> DrafterCaps:
    """What the drafter declares, before its weights are loaded. Raises DrafterError."""
    kind, settings = find_drafter(asked)
    return kind.caps(settings)


def make_drafter(asked: str, context: DrafterContext) -> Drafter:
    """The drafter, ready to run. Raises DrafterError."""
    kind, settings = find_drafter(asked)
    return kind.make(settings, context)
