"""The options of the Python interface: flat, named as the fields of the sections of `Config`, each of the type that its
field has or a text that reads as one, as on the command line. Options of vLLM and SGLang are read as their flags are.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import numpy as np

from stretto.config import READ_AS, Config
from stretto.engine.prepare import Prepared
from stretto.foreign.translate import Told, UnknownSetting, read_mapping, setting_names

_WORDS = {bool: "True or False", int: "a whole number", float: "a number", str: "text", Path: "a path",
          type(None): "None", tuple: "a list of texts"}
_SWITCHES = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def make_config(model: str | None, options: Mapping[str, Any]) -> Config:
    """A Config from flat options; sizes and counts as the flags take them, "4GiB" and "8K". What was made of options of
    other engines, and what means nothing without a server, is told as a warning. Raises TypeError for an option that is
    none, ValueError for a value that its option cannot have and for what cannot be had here."""
    told = Told([], [])
    try:
        named = read_mapping(options, "the options", told)
    except UnknownSetting as e:
        raise TypeError(f"{e}; known: {', '.join(sorted(setting_names()))}") from e
    left = {name: _typed(name, value) for name, value in named.items()}
    if model is not None:
        left["model"] = _typed("model", model)
    told.void += [f"{name}: a setting of `stretto serve`; there is no server here"
                  for name in left.keys() & {field.name for field in fields(Config().serve)}]
    if told.void and left.get("strict"):
        raise ValueError("\n".join(f"{note} (refused by strict=True)" for note in told.void))
    for note in (*told.notes, *told.void):
        warnings.warn(note, stacklevel=3)
    config = Config()
    for section in fields(Config):
        old = getattr(config, section.name)
        mine = {field.name: left.pop(field.name) for field in fields(old) if field.name in left}
        config = replace(config, **{section.name: replace(old, **mine)})
    return config


def tell_missing(prepared: Prepared) -> None:
    """A warning where the model runs on this processor without the kernels that make it fast: there is no table of the
    start to say so."""
    if prepared.resolved.device != "cpu":
        return
    found = {why: [name for name, reason in device.missing if reason == why]
             for device in prepared.facts.devices if device.kind == "cpu" for _, why in device.missing}
    for why, names in found.items():
        warnings.warn(f"without native kernels: {', '.join(names)}, so this is several times slower: {why}",
                      stacklevel=3)


@cache
def _hints() -> dict[str, Any]:
    """The type of every setting."""
    sections = (type(getattr(Config(), section.name)) for section in fields(Config))
    return {name: hint for section in sections for name, hint in get_type_hints(section).items()}


def _typed(name: str, value: Any) -> Any:
    """The value as its field keeps it. Raises ValueError."""
    if isinstance(value, str) and name in READ_AS:
        return READ_AS[name](value)
    if isinstance(value, np.generic):
        value = value.item()
    hint = _hints()[name]
    kinds = get_args(hint) if get_origin(hint) not in (None, Literal, tuple) else (hint,)
    if isinstance(value, os.PathLike) and str in kinds:
        return os.fspath(value)
    if isinstance(value, (str, os.PathLike)) and Path in kinds:
        return Path(value)
    if isinstance(value, str) and get_origin(hint) is tuple:
        return (value,)
    try:
        return msgspec.convert(_read(value, kinds), hint)
    except (msgspec.ValidationError, TypeError):
        unset = f"; leave it out for {_default(name)!r}" if value is None else ""
        raise ValueError(f"{name} is {value!r}; it must be {_in_words(kinds)}{unset}") from None


def _read(value: Any, kinds: tuple[Any, ...]) -> Any:
    """A word for a switch, or the text of a number, as what it says where such a one is wanted; others as they are."""
    if bool in kinds and isinstance(value, (str, int)):
        return _SWITCHES.get(str(value).lower(), value)
    number = next((kind for kind in (int, float) if kind in kinds), None)
    if number is None or not isinstance(value, str):
        return int(value) if number is int and isinstance(value, float) and value.is_integer() else value
    try:
        return number(value)
    except ValueError:
        return value


def _default(name: str) -> Any:
    sections = (getattr(Config(), section.name) for section in fields(Config))
    return next(getattr(section, name) for section in sections if hasattr(section, name))


def _in_words(kinds: tuple[Any, ...]) -> str:
    return " or ".join(" or ".join(map(repr, get_args(kind))) if get_origin(kind) is Literal
                       else _WORDS[get_origin(kind) or kind] for kind in kinds)
