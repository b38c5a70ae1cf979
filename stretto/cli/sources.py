"""Where settings come from: the command line, then STRETTO_* variables, then a YAML file; the first wins.

Flags of vLLM and SGLang are read too (stretto/foreign), and every translation is told. What means nothing here, a flag
of theirs or a variable, is told as well, or refused with --strict. No torch in this module.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

import yaml
from cyclopts import Token
from cyclopts.argument import ArgumentCollection

from stretto.config import READ_AS, UsageError
from stretto.foreign.flags import SPELLINGS
from stretto.foreign.translate import Told, our_value, read_mapping, setting_names, suggestion, translate_tokens

PREFIX = "STRETTO_"
OTHER_VARIABLES = frozenset({"STRETTO_CACHE", "STRETTO_CONFIG"})  # read elsewhere
# What Kubernetes sets in every pod beside a Service that is called "stretto".
_SERVICE_LINK = re.compile(r"STRETTO_(SERVICE_(HOST|PORT)|PORT_\d+_(TCP|UDP))")
CLIENT_COMMANDS = frozenset({("chat",), ("ps",), ("eval",), ("completion",), ("plan",), ("bench", "serve"),
                             ("bench", "sweep"), ("bench", "plot"), ("bench", "compare")})
REPEATED = frozenset({"--served-model-name", "--lora-modules", "--api-key", "--allowed-origins"})  # one value each time
SERVER_COMMANDS = frozenset({"serve", "explain", "doctor"})  # those that take the server's settings


@dataclass
class Settings:
    """What was read, in the order of precedence: command-line tokens, then mappings of setting to value."""

    tokens: list[str]
    variables: dict[str, object] = field(default_factory=dict)
    file: dict[str, object] = field(default_factory=dict)
    file_name: str = ""
    notes: list[str] = field(default_factory=list)


def is_client(tokens: Sequence[str]) -> bool:
    """Whether the command speaks to a running server, or to none, so that it has no settings of an engine."""
    if tuple(tokens[:1]) == ("run-batch",):
        return any(token.partition("=")[0] == "--base-url" for token in tokens)
    return tuple(tokens[:1]) in CLIENT_COMMANDS or tuple(tokens[:2]) in CLIENT_COMMANDS


def gather(tokens: Sequence[str], environment: Mapping[str, str], config_file: Path | None) -> Settings:
    """Reads all three. Raises UsageError."""
    settings = Settings(list(tokens))
    if is_client(tokens):
        if config_file is not None:
            settings.notes.append(f"{config_file} is not read: `stretto {tokens[0]}` has no engine to set up")
        return settings  # variables may well be those of the server on the same machine
    told = Told(settings.notes, [])
    settings.tokens = translate_tokens(tokens, told)
    settings.notes += _read_as_model(settings.tokens)
    unset = frozenset(told.unset)
    settings.variables = _without(unset, read_variables(environment, told))
    unset = frozenset(told.unset)
    if config_file is not None:
        settings.file_name = str(config_file)
        settings.file = _without(unset, read_file(config_file, told))
    if tokens and tokens[0] not in SERVER_COMMANDS:
        server_only = setting_names() - setting_names(server=False)
        for source in (settings.variables, settings.file):
            for name in sorted(server_only & source.keys()):
                del source[name]
                settings.notes.append(f"{name} is a setting of the server; `stretto {tokens[0]}` has none")
    if told.void and _is_strict(settings):
        raise UsageError("\n".join(f"{note} (refused by --strict)" for note in told.void))
    settings.notes += told.void
    return settings


def _read_as_model(tokens: Sequence[str]) -> list[str]:
    """A note where a second value behind a flag of vLLM's lists becomes the model, since no other is named."""
    named = [token.partition("=")[0] for token in tokens]
    if "--model" in named or (len(tokens) > 1 and not tokens[1].startswith("-")):
        return []
    for flag, value, model in zip(tokens, tokens[1:], tokens[2:], strict=False):
        if flag in REPEATED and not any(word.startswith("-") for word in (value, model)):
            return [f"{model} is read as the model: {flag} takes one value at a time; a second one is {flag} {model}"]
    return []


def _without(flags: frozenset[str], settings: dict[str, object]) -> dict[str, object]:
    """Settings without those for which a source of more weight asks for the default."""
    return {name: value for name, value in settings.items() if "--" + name.replace("_", "-") not in flags}


def _is_strict(settings: Settings) -> bool:
    """Asked before the command line is parsed: the first source that says so wins."""
    for token in settings.tokens:
        if token.partition("=")[0] in ("--strict", "--no-strict"):
            return token not in ("--no-strict", "--strict=false")
    values = (source["strict"] for source in (settings.variables, settings.file) if "strict" in source)
    return str(next(values, False)).lower() in ("true", "1", "yes", "on")


# -------------------------------------------------------------------------------------------- variables and the file
def read_variables(environment: Mapping[str, str], told: Told) -> dict[str, object]:
    """Settings among the environment's STRETTO_* variables. A variable that is no setting is told, not refused: the
    environment is shared with others. Lists are separated by commas or blanks. Raises UsageError."""
    known, found = setting_names(), dict[str, object]()
    for variable in sorted(environment):
        value = environment[variable]
        if not variable.startswith(PREFIX) or variable in OTHER_VARIABLES or _SERVICE_LINK.match(variable):
            continue
        written = variable.removeprefix(PREFIX).lower()
        name = SPELLINGS.get(written, written)
        if name in found:
            raise UsageError(f"{variable}={value} and another variable both set {name}: keep one of them")
        if name == "port" and value.startswith("tcp://"):  # another variable of a Kubernetes Service
            continue
        if name not in known:
            told.void.append(f"the variable {variable} is not a setting{suggestion(name, known, PREFIX)}")
        elif name in ("allowed_origins", "api_key", "admin_api_key", "served_model_name"):
            found[name] = [part for part in re.split(r"[,\s]+", value) if part]
        elif (ours := our_value("--" + name.replace("_", "-"), value, told)) is not None:
            found[name] = ours
    return found


def read_file(path: Path, told: Told) -> dict[str, object]:
    """Settings of a YAML file: flags without their dashes. Raises UsageError, for unknown keys too."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise UsageError(f"{path} cannot be read: {e.strerror}") from e
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise UsageError(f"{path} is not YAML: {' '.join(str(e).split())}") from e
    if not isinstance(data, dict | None):
        raise UsageError(f"{path} holds a {type(data).__name__}; it must hold settings, one `name: value` a line")
    return read_mapping(data or {}, str(path), told)


# -------------------------------------------------------------------------------------------- numbers for people
_BROKEN_NUMBER = re.compile(r"[+-]?\d*\.\d*[1-9]\d*")  # as opposed to 30.0


def _source_of(token: Token) -> str:
    return f" in {token.source}" if token.source not in ("", "cli") else ""


UNITS = {"--" + name.replace("_", "-"): parse for name, parse in READ_AS.items()}


def read_units(app: object, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """A source for cyclopts that runs after all others: turns "32K" and "4GiB" into plain numbers, and refuses what
    cyclopts would round."""
    for argument in arguments:
        parse = UNITS.get(argument.name)
        if parse is None and int in (argument.hint, *get_args(argument.hint)) and float not in get_args(argument.hint):
            for token in argument.tokens:
                if _BROKEN_NUMBER.fullmatch(token.value):
                    raise UsageError(f"{argument.name} is {token.value}{_source_of(token)}; it must be a whole number")
        for index, token in enumerate(argument.tokens if parse else ()):
            try:
                argument.tokens[index] = token.evolve(value=str(parse(token.value)))  # type: ignore[misc]
            except ValueError as e:
                raise UsageError(f"{argument.name}: {e}") from e
