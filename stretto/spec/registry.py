"""Drafters by name. A third party adds one by an entry point of the group "stretto.drafters".

    [project.entry-points."stretto.drafters"]
    mine = "my_package:Mine"          # a DrafterKind, or a class of such: caps(settings), make(settings, context)

On the command line: `--speculation ngram`, or with settings after a colon: `--speculation ngram:longest=5,shortest=3`,
`--speculation eagle3:FOLDER-OR-HUB-ID`. A draft checkpoint whose config says what it is needs no name:
`--speculation FOLDER-OR-HUB-ID`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import torch

from stretto.model.config import ConfigError
from stretto.model.hub import resolve_model
from stretto.model.source import WeightError
from stretto.spec.api import Drafter, DrafterCaps
from stretto.spec.context import DrafterContext, DrafterError, DrafterKind, DrafterMissing, DrafterSizes, Target
from stretto.spec.dflash import DFlash
from stretto.spec.dspark import DSpark
from stretto.spec.eagle import Eagle
from stretto.spec.eagle3 import Eagle3
from stretto.spec.identify import identify
from stretto.spec.mtp import MTP
from stretto.spec.ngram import LONGEST, SHORTEST, NgramDrafter
from stretto.spec.plugin import Plugin, as_plugin
from stretto.spec.scripted import ScriptedDrafter
from stretto.spec.standalone import Standalone
from stretto.spec.suffix import Suffix

__all__ = ["BUILT_IN", "GROUP", "DrafterContext", "DrafterError", "DrafterKind", "draft_checkpoint", "drafter_caps",
           "drafter_sizes", "find_drafter", "make_drafter", "make_host_drafter"]

GROUP = "stretto.drafters"


@dataclass(frozen=True)
class _Kind:
    caps: Callable[[str], DrafterCaps]
    make: Callable[[str, DrafterContext], Drafter]


WIDEST = 32  # of drafters without weights, whose width costs them nothing


def _ngram_settings(settings: str) -> dict[str, int]:
    """Raises DrafterError."""
    numbers = {"longest": LONGEST, "shortest": SHORTEST}
    for part in filter(None, settings.split(",")):
        name, _, value = part.partition("=")
        if name not in numbers or not value.isdigit():
            raise DrafterError(f"drafter ngram: {part!r} is no setting; it takes longest=N and shortest=N")
        numbers[name] = int(value)
    try:
        NgramDrafter(1, **numbers)
    except ValueError as e:
        raise DrafterError(f"drafter ngram: {e}") from e
    return numbers


def _ngram(settings: str, context: DrafterContext) -> Drafter:
    return NgramDrafter(context.width, **_ngram_settings(settings))


def _ngram_caps(settings: str) -> DrafterCaps:
    _ngram_settings(settings)
    return _weightless(settings)


def _scripted(settings: str, context: DrafterContext) -> Drafter:
    """Settings: a JSON file {"answers": [[ids] ...], "accuracy": 0..1, "variable": bool, "seed": int}."""
    script = _script(settings)
    try:
        return ScriptedDrafter(script["answers"], context.width, float(script.get("accuracy", 1.0)),
                               vocab_size=context.vocab_size, variable=bool(script.get("variable", False)),
                               seed=int(script.get("seed", 0)), device=context.device)
    except (ValueError, KeyError, TypeError) as e:
        raise DrafterError(SCRIPT.format(settings, e)) from e


def _script(settings: str) -> dict[str, Any]:
    """Raises DrafterError."""
    try:
        return json.loads(Path(settings).read_text())
    except (OSError, ValueError) as e:
        raise DrafterError(SCRIPT.format(settings, e)) from e


def _scripted_caps(settings: str) -> DrafterCaps:
    _script(settings)
    return _weightless(settings)


def _weightless(settings: str) -> DrafterCaps:
    return DrafterCaps(shape="chain", max_width=WIDEST, variable=True)


BUILT_IN: dict[str, DrafterKind] = {
    "ngram": _Kind(_ngram_caps, _ngram), "scripted": _Kind(_scripted_caps, _scripted), "suffix": Suffix(),
    "standalone": Standalone(), "eagle": Eagle(), "eagle3": Eagle3(), "mtp": MTP(), "nextn": MTP(), "dflash": DFlash(),
    "dspark": DSpark()}


FOR_TESTS = frozenset({"scripted"})  # understood, but not offered
SCRIPT = "drafter scripted (for tests): {!r} must be a JSON file with \"answers\", lists of token ids ({})"


def known_drafters(plugins: Iterable[str]) -> list[str]:
    """Names that a user may choose."""
    return sorted({*BUILT_IN, *plugins} - FOR_TESTS)


def missing_package(name: str) -> str | None:
    """What a drafter says of a package that it needs and that is not installed; None where it has all."""
    try:
        make_host = getattr(BUILT_IN[name], "host", None)
        if make_host is not None:
            make_host("")
    except DrafterMissing as e:
        return str(e)
    return None


def find_drafter(asked: str) -> tuple[DrafterKind, str]:
    """The kind and the settings of `asked`: a name, or a name, a colon and settings, or a draft checkpoint whose config
    says what it is. Raises DrafterError."""
    name, _, settings = asked.partition(":")
    plugins = {p.name: p for p in entry_points(group=GROUP)}
    if name in plugins and name in BUILT_IN:
        raise DrafterError(f"drafter {name} is built in, and {plugins[name].value} claims it too: uninstall one")
    if name in plugins:
        return _loaded(plugins[name]), settings
    if name not in BUILT_IN:
        kind = identify(asked)
        if kind is None:
            raise DrafterError(f"there is no drafter {name!r}, and no draft checkpoint of that name whose config says"
                               f" what it is; known: {', '.join(known_drafters(plugins))}")
        return BUILT_IN[kind], asked
    return BUILT_IN[name], settings


def _loaded(plugin: EntryPoint) -> DrafterKind:
    """Raises DrafterError, whatever the package does when it is imported."""
    try:
        loaded = plugin.load()
    except Exception as e:
        raise DrafterError(f"drafter {plugin.name}: its package gives no {plugin.value} ({type(e).__name__}: {e})"
                           ) from e
    return as_plugin(plugin.name, loaded)


def drafter_caps(asked: str) -> DrafterCaps:
    """What the drafter declares, before its weights are loaded. Raises DrafterError."""
    kind, settings = find_drafter(asked)
    return kind.caps(settings)


def drafter_sizes(asked: str, target: Target, width: int | None = None) -> DrafterSizes:
    """What the drafter declares for this target, and the memory it takes; nothing is loaded. The loop of a chain runs
    `width` times, so its lookahead is no longer than that. Raises DrafterError."""
    kind, settings = find_drafter(asked)
    sizes_of = getattr(kind, "sizes", None)
    with _said_of(asked):
        sizes: DrafterSizes = sizes_of(settings, target) if sizes_of else DrafterSizes(kind.caps(settings))
    if width is not None and sizes.caps.shape == "chain":
        sizes = replace(sizes, caps=replace(sizes.caps, lookahead=min(sizes.caps.lookahead, width)))
    return sizes


def draft_checkpoint(asked: str) -> Path | None:
    """The draft checkpoint that `asked` names, on this disk (fetched if need be); None where it names none, as with the
    heads that ship with the package. Of a third party's drafter: what its settings begin with, if that is a path.
    Raises DrafterError and model.hub.ModelNotFound."""
    kind, settings = find_drafter(asked)
    named = settings.partition(",")[0]
    if not named or "=" in named:
        return None
    path = Path(named).expanduser()
    if kind in BUILT_IN.values() and not path.is_file():
        return resolve_model(named)
    return path if path.exists() else None


def make_host_drafter(asked: str, vocab_size: int | None = None) -> Callable[[Sequence[int], int], list[int]]:
    """Of a kind that proposes on the host: (confirmed ids, width) -> at most that many ids that may follow. Such a kind
    has a method `host(settings)`. `vocab_size`: of the target, where it is known. Raises DrafterError."""
    kind, settings = find_drafter(asked)
    if isinstance(kind, Plugin):
        return kind.host(settings, vocab_size)
    return getattr(kind, "host")(settings)  # noqa: B009 - kinds that declare so have it, the protocol has not


def make_drafter(asked: str, context: DrafterContext) -> Drafter:
    """The drafter, ready to run. Raises DrafterError."""
    kind, settings = find_drafter(asked)
    with _said_of(asked):
        return kind.make(settings, context)


@contextmanager
def _said_of(asked: str) -> Iterator[None]:
    """What is wrong with a draft checkpoint's config or weights is said of the drafter; also where a value of a wrong
    kind in its config has got as far as the place that needs another. A device that fails is let through."""
    try:
        yield
    except DrafterError:
        raise
    except (ConfigError, WeightError) as e:
        raise DrafterError(f"drafter {asked}: {e}") from e
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise  # of the device, whatever the config says
    except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RuntimeError) as e:
        raise DrafterError(f"drafter {asked}: its config.json asks for what cannot be made ({type(e).__name__}: {e})"
                           ) from e
