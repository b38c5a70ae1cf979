"""Where settings come from: the command line, then STRETTO_* variables, then a YAML file; the first wins.

Flags of vLLM and SGLang that mean the same here under another name are translated, and every translation is told. Flags
of theirs that this engine does not have are refused with the reason. No torch in this module.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

import yaml
from cyclopts.argument import ArgumentCollection

from stretto.config import Config, parse_count, parse_size

PREFIX = "STRETTO_"
OTHER_VARIABLES = frozenset({"STRETTO_CACHE", "STRETTO_CONFIG"})  # read elsewhere
# What Kubernetes sets in every pod beside a Service that is called "stretto".
_SERVICE_LINK = re.compile(r"STRETTO_(SERVICE_(HOST|PORT)|PORT_\d+_(TCP|UDP))")
CLIENT_COMMANDS = frozenset({("chat",), ("ps",), ("eval",), ("bench", "serve"), ("bench", "sweep"), ("bench", "plot"),
                             ("bench", "compare")})
SERVER_COMMANDS = frozenset({"serve", "explain", "doctor"})  # those that take the server's settings


class UsageError(ValueError):
    """A command line, variable or file that cannot be understood."""


@dataclass(frozen=True)
class Alias:
    """Another engine's flag. `flag` is ours; a `value` replaces the given one, None keeps it."""

    flag: str
    value: str | None = None
    takes_value: bool = True


def _switch(flag: str) -> Alias:
    return Alias(flag, takes_value=False)


DRAFT_MODEL = "--speculation's model"  # stands for their own flag until it is joined with the drafter's name

ALIASES: Mapping[str, Alias] = {
    # SGLang
    "--model-path": Alias("--model"),
    "--tokenizer-path": Alias("--tokenizer"),
    "--context-length": Alias("--max-model-len"),
    "--max-running-requests": Alias("--max-num-seqs"),
    "--chunked-prefill-size": Alias("--chunk-size"),
    "--mem-fraction-static": Alias("--gpu-memory-utilization"),
    "--max-total-tokens": Alias("--kv-tokens"),
    "--tp-size": Alias("--tensor-parallel-size"),
    "--tp": Alias("--tensor-parallel-size"),
    "--random-seed": Alias("--seed"),
    "--enable-mixed-chunk": _switch("--mixed-chunk"),
    "--disable-overlap-schedule": _switch("--no-overlap"),
    "--disable-radix-cache": _switch("--no-prefix-caching"),
    "--speculative-algorithm": Alias("--speculation"),
    "--speculative-draft-model-path": Alias(DRAFT_MODEL),
    "--speculative-num-draft-tokens": Alias("--speculation-tokens"),
    # vLLM
    "--block-size": Alias("--page-size"),
    "--kv-cache-memory-bytes": Alias("--kv-memory"),
    "--enable-prefix-caching": _switch("--prefix-caching"),
    "--no-enable-prefix-caching": _switch("--no-prefix-caching"),
    "--async-scheduling": _switch("--overlap"),
    "--no-async-scheduling": _switch("--no-overlap"),
    "-tp": Alias("--tensor-parallel-size"),
    "--uvicorn-log-level": Alias("--log-level"),
}

REFUSED: Mapping[str, str] = {
    "--trust-remote-code": "code that comes with a model is never run",
    "--quantization": "how weights are stored is read from the model; give a GGUF file for quantised ones",
    "--kv-cache-dtype": "the KV cache has the type of --dtype",
    "--enable-lora": "there are no LoRA adapters yet",
    "--enable-auto-tool-choice": "there are no tool calls yet",
    "--tool-call-parser": "there are no tool calls yet",
    "--reasoning-parser": "reasoning is not separated from the answer yet",
    "--pipeline-parallel-size": "one device runs the whole model so far",
    "--data-parallel-size": "start one server for each replica and a router in front",
    "--dp-size": "start one server for each replica and a router in front",
    "--no-enable-chunked-prefill": "prompts are always fed in chunks; --chunk-size may be as large as a step",
    "--speculative-eagle-topk": "drafts are chains, not trees",
}

ALWAYS: Mapping[str, str] = {
    "--enable-chunked-prefill": "prompts are always fed in chunks",
    "--enable-streaming-session": "sessions are always on",
}


@dataclass
class Settings:
    """What was read, in the order of precedence: command-line tokens, then mappings of setting to value."""

    tokens: list[str]
    variables: dict[str, object] = field(default_factory=dict)
    file: dict[str, object] = field(default_factory=dict)
    file_name: str = ""
    notes: list[str] = field(default_factory=list)


def setting_names(server: bool = True) -> frozenset[str]:
    """Every setting, as in "max_model_len"."""
    sections = [getattr(Config(), section.name) for section in fields(Config) if server or section.name != "serve"]
    return frozenset(setting.name for section in sections for setting in fields(section))


def is_client(tokens: Sequence[str]) -> bool:
    """Whether the command speaks to a running server, so that it has no settings of an engine."""
    if tuple(tokens[:1]) == ("run-batch",):
        return any(token.partition("=")[0] == "--base-url" for token in tokens)
    return tuple(tokens[:1]) in CLIENT_COMMANDS or tuple(tokens[:2]) in CLIENT_COMMANDS


def gather(tokens: Sequence[str], environment: Mapping[str, str], config_file: Path | None) -> Settings:
    """Reads all three. Raises UsageError."""
    settings = Settings([])
    settings.tokens = translate_tokens(tokens, settings.notes)
    if is_client(tokens):
        if config_file is not None:
            settings.notes.append(f"{config_file} is not read: `stretto {tokens[0]}` speaks to a server that runs")
        return settings  # variables may well be those of the server on the same machine
    settings.variables = read_variables(environment, settings.notes)
    if config_file is not None:
        settings.file_name = str(config_file)
        settings.file = read_file(config_file, settings.notes)
    if tokens and tokens[0] not in SERVER_COMMANDS:
        server_only = setting_names() - setting_names(server=False)
        for source in (settings.variables, settings.file):
            for name in sorted(server_only & source.keys()):
                del source[name]
                settings.notes.append(f"{name} is a setting of the server; `stretto {tokens[0]}` has none")
    return settings


# -------------------------------------------------------------------------------------------- other engines' flags
Pair = tuple[str, str | None]  # a flag of ours, and its value where it takes one


def translate_tokens(tokens: Sequence[str], notes: list[str]) -> list[str]:
    """The command line with other engines' flags replaced by ours. What was replaced is added to `notes`."""
    ours: list[Pair] = []
    rest = iter(tokens)
    for token in rest:
        if token == "--":
            ours += [(token, None), *((left, None) for left in rest)]
            break
        flag, equals, value = token.partition("=")
        if _takes_value(flag) and not equals:
            value = next(rest, "")
        pairs = translate(flag, value, notes)
        ours += [(token, None)] if pairs is None else pairs
    return [part for pair in _join_drafter(ours) for part in pair if part is not None]


def _takes_value(flag: str) -> bool:
    return flag == "--speculative-config" or (flag in ALIASES and ALIASES[flag].takes_value)


def _join_drafter(pairs: list[Pair]) -> list[Pair]:
    """Theirs name a drafter and its model in two flags, ours in one: "eagle3" and "owner/model" become
    "eagle3:owner/model"; a model alone says itself what it is."""
    model = next((value for flag, value in pairs if flag == DRAFT_MODEL), None)
    if model is None:
        return pairs
    name = next((value for flag, value in pairs if flag == "--speculation"), None)
    others = [pair for pair in pairs if pair[0] not in (DRAFT_MODEL, "--speculation")]
    return [*others, ("--speculation", f"{name}:{model}" if name else model)]


def translate(flag: str, value: str, notes: list[str]) -> list[Pair] | None:
    """Our flags for another engine's; None if `flag` is not one of theirs. Raises UsageError for one we do not have."""
    if flag in REFUSED:
        raise UsageError(f"{flag} is not a setting of this engine: {REFUSED[flag]}")
    if flag in ALWAYS:
        notes.append(f"{flag}: {ALWAYS[flag]}")
        return []
    if flag == "--speculative-config":
        return _speculative_config(value, notes)
    if flag not in ALIASES:
        return None
    if flag == "--speculative-num-draft-tokens" and value.isdigit():
        value = str(max(int(value) - 1, 0))  # SGLang counts the token that is verified together with the drafts
    if flag == "--speculative-algorithm":
        value = value.lower()
    alias = ALIASES[flag]
    pair = (alias.flag, value if alias.takes_value else None)
    notes.append(f"{flag} is read as {_told(pair)}")
    return [pair]


def _told(pair: Pair) -> str:
    flag, value = pair
    if flag == DRAFT_MODEL:
        return f"the model in --speculation NAME:{value}"
    return flag if value is None else f"{flag} {value}"


def _speculative_config(value: str, notes: list[str]) -> list[Pair]:
    """vLLM's JSON object."""
    try:
        given = json.loads(value)
    except ValueError as e:
        raise UsageError(f"--speculative-config is not JSON ({e}); use --speculation and --speculation-tokens") from e
    known = {"method": "--speculation", "model": DRAFT_MODEL, "num_speculative_tokens": "--speculation-tokens"}
    if not isinstance(given, dict) or (unknown := sorted(given.keys() - known.keys())):
        what = f"has {', '.join(unknown)}" if isinstance(given, dict) else f"is {value}"
        raise UsageError(f"--speculative-config {what}; it is an object that may hold {', '.join(known)}")
    pairs: list[Pair] = [(flag, str(given[key])) for key, flag in known.items() if key in given]
    pairs = _join_drafter(pairs)
    notes.append(f"--speculative-config is read as {' '.join(_told(pair) for pair in pairs)}")
    return pairs


# -------------------------------------------------------------------------------------------- variables and the file
def read_variables(environment: Mapping[str, str], notes: list[str]) -> dict[str, object]:
    """Settings among the environment's STRETTO_* variables. A variable that is no setting is told, not refused: the
    environment is shared with others. Lists are separated by commas or blanks."""
    known, found = setting_names(), dict[str, object]()
    for variable in sorted(environment):
        value = environment[variable]
        if not variable.startswith(PREFIX) or variable in OTHER_VARIABLES or _SERVICE_LINK.match(variable):
            continue
        name = variable.removeprefix(PREFIX).lower()
        if name == "port" and value.startswith("tcp://"):  # another variable of a Kubernetes Service
            continue
        if name not in known:
            notes.append(f"the variable {variable} is not a setting{_suggestion(name, known, PREFIX)}")
        elif name in ("api_key", "admin_api_key", "served_model_name"):
            found[name] = [part for part in re.split(r"[,\s]+", value) if part]
        else:
            found[name] = value
    return found


def read_file(path: Path, notes: list[str]) -> dict[str, object]:
    """Settings of a YAML file: flags without their dashes. Raises UsageError, for unknown keys too."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise UsageError(f"{path} cannot be read: {e.strerror}") from e
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise UsageError(f"{path} is not YAML: {' '.join(str(e).split())}") from e
    if not isinstance(data, dict | None):
        raise UsageError(f"{path} holds a {type(data).__name__}; it must hold settings, one `name: value` a line")
    found: dict[str, object] = {}
    for key, value in (data or {}).items():
        for name, translated in _file_entry(path, str(key), value, notes):
            if name in found:
                raise UsageError(f"{path} sets {name} twice")
            found[name] = translated
    model = found.pop(DRAFT_MODEL, None)
    if model is not None:
        found["speculation"] = f"{found['speculation']}:{model}" if "speculation" in found else model
    return found


def _file_entry(path: Path, key: str, value: object, notes: list[str]) -> list[tuple[str, object]]:
    known, name = setting_names(), key.replace("-", "_")
    if name in known:
        return [(name, value)]
    flag = "--" + key.replace("_", "-")
    if flag in ALIASES and not ALIASES[flag].takes_value and value is not True:
        raise UsageError(f"{path}: {key} is a switch of another engine and can only be true; "
                         f"use {ALIASES[flag].flag.removeprefix('--')}")
    text = json.dumps(value) if isinstance(value, dict) else str(value)
    pairs = translate(flag, text, notes)
    if pairs is None:
        raise UsageError(f"{path}: unknown setting {key!r}{_suggestion(name, known)}")
    return [_as_setting(*pair) for pair in pairs]


def _as_setting(flag: str, value: str | None) -> tuple[str, object]:
    """A switch of ours becomes a truth value: "--no-overlap" sets overlap to false."""
    name = flag.removeprefix("--")
    if flag == DRAFT_MODEL:
        return flag, value
    if value is not None:
        return name.replace("-", "_"), value
    return name.removeprefix("no-").replace("-", "_"), not name.startswith("no-")


def _suggestion(name: str, known: frozenset[str], prefix: str = "") -> str:
    close = difflib.get_close_matches(name, known, n=1)
    if not close:
        return ""
    return f"; did you mean {prefix + close[0].upper() if prefix else close[0]}?"


# -------------------------------------------------------------------------------------------- numbers for people
UNITS = {"--max-model-len": parse_count, "--kv-tokens": parse_count, "--max-num-batched-tokens": parse_count,
         "--chunk-size": parse_count, "--kv-memory": parse_size}


def read_units(app: object, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """A source for cyclopts that runs after all others: turns "32K" and "4GiB" into plain numbers."""
    for argument in arguments:
        parse = UNITS.get(argument.name)
        for index, token in enumerate(argument.tokens if parse else ()):
            try:
                argument.tokens[index] = token.evolve(value=str(parse(token.value)))  # type: ignore[misc]
            except ValueError as e:
                raise UsageError(f"{argument.name}: {e}") from e
