"""Flags of vLLM and SGLang: translated where ours means the same, told where they ask for nothing, else refused.

    --context-length 4096            --max-model-len 4096          an alias, printed as such
    --enable-chunked-prefill                                       asks for what is always so, printed as such
    --kv-cache-dtype fp8             --kv-cache-dtype fp8_e4m3     another name of a value, printed as such
    --load-format auto                                             asks for what is so anyway, printed as such
    --load-format gguf               refused, with the reason and the nearest command line that is accepted

No torch in this module.
"""

from __future__ import annotations

import difflib
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from stretto.config import Config, UsageError
from stretto.foreign.flags import (
    ALIASES,
    ALWAYS,
    BOUNDED,
    DEFAULTS,
    DRAFT_MODEL,
    DRAFT_STEPS,
    FAMILIES,
    LOOKUP,
    REFUSED,
    VALUES,
    Alias,
)

Pair = tuple[str, str | None]  # a flag of ours, and its value where it takes one


@dataclass
class Told:
    """What the user is told of a translation. `void`: of what means nothing here; an error under --strict. `unset`:
    flags that were given a word for their default, which sources of less weight may not set then."""

    notes: list[str]
    void: list[str]
    unset: set[str] = field(default_factory=set)


def translate_tokens(tokens: Sequence[str], told: Told) -> list[str]:
    """The command line with other engines' flags replaced by ours. Raises UsageError with the nearest command line that
    is accepted where a flag has no counterpart."""
    ours: list[Pair] = []
    refusals: list[str] = []
    left = list(tokens)
    while left:
        token = left.pop(0)
        if token == "--":
            ours += [(token, None), *((one, None) for one in left)]
            break
        flag, equals, value = _parts(token)
        if not equals and left and _takes_value(flag, left[0]):
            value = left.pop(0)
        try:
            pairs = translate(flag, value, told)
        except _Refusal as e:
            refusals.append(str(e))
            continue
        ours += [(token, None)] if pairs is None else pairs
    accepted = [part for pair in _join_steps(_join_drafter(ours)) for part in pair if part is not None]
    if refusals:
        raise UsageError("\n".join([*refusals, f"accepted is: {shlex.join(['stretto', *accepted])}"]))
    return accepted


def _parts(token: str) -> tuple[str, str, str]:
    """A flag, "=" where its value is in the same token, and that value. vLLM's -O3 is -O=3."""
    level = re.fullmatch(r"-O(\d+|[.=].*)", token)
    return ("-O", "=", level[1]) if level else token.partition("=")


class _Refusal(UsageError):
    """A flag that has no counterpart."""


def _refusal(flag: str, why: str) -> _Refusal:
    return _Refusal(f"{flag} is not a setting of this engine: {why}")


def _takes_value(flag: str, following: str) -> bool:
    entry = ALIASES.get(flag) or ALWAYS.get(flag) or REFUSED.get(flag)
    if entry is None and _family(flag) is not None:  # nothing more is known of it
        return not following.startswith("-") and not flag.startswith(("--enable-", "--disable-", "--no-", "--skip-"))
    return flag in {"--speculative-config", *VALUES, *DEFAULTS} or (entry is not None and entry.takes_value)


def _family(flag: str) -> str | None:
    """Why no flag of this kind is a setting here; the longest beginning that fits says it."""
    found = max((start for start in FAMILIES if flag.startswith(start)), key=len, default=None)
    return None if found is None else FAMILIES[found]


def _join_drafter(pairs: list[Pair]) -> list[Pair]:
    """Theirs name a drafter and its model in two flags, ours in one: "eagle3" and "owner/model" become
    "eagle3:owner/model"; a model alone says itself what it is."""
    model = next((value for flag, value in pairs if flag == DRAFT_MODEL), None)
    if model is None:
        return pairs
    name = next((value for flag, value in pairs if flag == "--speculation"), None)
    others = [pair for pair in pairs if pair[0] not in (DRAFT_MODEL, "--speculation")]
    return [*others, ("--speculation", f"{name}:{model}" if name else model)]


def _join_steps(pairs: list[Pair]) -> list[Pair]:
    """SGLang's steps of a chain are its tokens, less the one that is verified with them: one of the two will do."""
    other = any(flag == "--speculation-tokens" or flag.startswith("--speculation-tokens=") for flag, _ in pairs)
    return [("--speculation-tokens", value) if flag == DRAFT_STEPS else (flag, value) for flag, value in pairs
            if not (other and flag == DRAFT_STEPS)]


def translate(flag: str, value: str, told: Told) -> list[Pair] | None:
    """Our flags for another engine's; None if `flag` is not one of theirs. Raises UsageError for one we do not have."""
    if flag in REFUSED:
        if value not in REFUSED[flag].harmless:
            raise _refusal(flag, REFUSED[flag].why)
        told.void.append(f"{flag} {value}: {REFUSED[flag].why}")
        return []
    if flag in ALWAYS:
        told.void.append(f"{flag}: {ALWAYS[flag].why}")
        return []
    if flag == "--speculative-config":
        return _speculative_config(value, told)
    if flag in VALUES or flag in DEFAULTS:
        ours = our_value(flag, value, told)
        return [] if ours is None else [(flag, ours)]
    if flag not in ALIASES:
        if (why := _family(flag)) is not None:
            raise _refusal(flag, why)
        return None
    if flag == "--speculative-num-draft-tokens" and value.isdigit():
        value = str(max(int(value) - 1, 0))  # SGLang counts the token that is verified together with the drafts
    if flag == "--speculative-algorithm":
        value = value.lower()
    alias = ALIASES[flag]
    pair = (alias.flag, value if alias.takes_value else None)
    told.notes.append(f"{flag} is read as {_told(pair)}")
    return [pair]


def our_value(flag: str, value: str, told: Told) -> str | None:
    """Another engine's word for a value of a flag that is ours as well; None for one that asks for our default."""
    if (why := DEFAULTS.get(flag, {}).get(value)) is not None:
        told.notes.append(f"{flag} {value} is read as no {flag}: {why}")
        told.unset.add(flag)
        return None
    ours = VALUES.get(flag, {}).get(value, value)
    if ours != value:
        told.notes.append(f"{flag} {value} is read as {flag} {ours}")
    return ours


def _told(pair: Pair) -> str:
    flag, value = pair
    if flag == DRAFT_MODEL:
        return f"the model in --speculation NAME:{value}"
    if flag == DRAFT_STEPS:
        return f"--speculation-tokens {value}"
    return flag if value is None else f"{flag} {value}"


def _speculative_config(value: str, told: Told) -> list[Pair]:
    """vLLM's JSON object."""
    try:
        given = json.loads(value)
    except ValueError as e:
        raise UsageError(f"--speculative-config is not JSON ({e}); use --speculation and --speculation-tokens") from e
    known = {"method": "--speculation", "model": DRAFT_MODEL, "num_speculative_tokens": "--speculation-tokens"}
    if not isinstance(given, dict) or (unknown := sorted(given.keys() - known.keys() - set(LOOKUP))):
        what = f"has {', '.join(unknown)}" if isinstance(given, dict) else f"is {value}"
        raise UsageError(f"--speculative-config {what}; it is an object that may hold {', '.join([*known, *LOOKUP])}")
    given = _with_lookup(given)
    pairs: list[Pair] = [(flag, str(given[key])) for key, flag in known.items() if key in given]
    pairs = _join_drafter(pairs)
    told.notes.append(f"--speculative-config is read as {' '.join(_told(pair) for pair in pairs)}")
    return pairs


def _with_lookup(given: dict[str, object]) -> dict[str, object]:
    """The two bounds of vLLM's n-grams behind our drafter's name; one alone is both, as there."""
    bounds = [given[key] for key in LOOKUP if key in given]
    if not bounds:
        return given
    if (ours := BOUNDED.get(str(given.get("method")))) is None:
        raise UsageError(f"--speculative-config has {' and '.join(key for key in LOOKUP if key in given)}, which are"
                         ' settings of {"method": "ngram"}')
    return given | {"method": ours.format(longest=bounds[0], shortest=bounds[-1])}


def as_setting(flag: str, value: str | None) -> tuple[str, object]:
    """A pair as a setting. A switch of ours becomes a truth value: "--no-overlap" sets overlap to false."""
    name = flag.removeprefix("--")
    if flag in (DRAFT_MODEL, DRAFT_STEPS):
        return flag, value
    if value is not None:
        return name.replace("-", "_"), value
    return name.removeprefix("no-").replace("-", "_"), not name.startswith("no-")


# ----------------------------------------------------------------------------------------- mappings, as files hold them
def setting_names(server: bool = True) -> frozenset[str]:
    """Every setting of ours, as in "max_model_len"."""
    sections = [getattr(Config(), section.name) for section in fields(Config) if server or section.name != "serve"]
    return frozenset(setting.name for section in sections for setting in fields(section))


class UnknownSetting(UsageError):
    """A name that is no setting, and none of another engine's."""


def read_mapping(data: Mapping[Any, object], source: str, told: Told) -> dict[str, object]:
    """Settings of ours from a mapping, which may use other engines' names. `source`: what held it, for errors. Raises
    UsageError, UnknownSetting for a name that means nothing."""
    found: dict[str, object] = {}
    for key, value in data.items():
        for name, translated in _file_entry(source, str(key), value, told):
            if name in found:
                raise UsageError(f"{source} sets {name} twice")
            found[name] = translated
    if (steps := found.pop(DRAFT_STEPS, None)) is not None:
        found.setdefault("speculation_tokens", steps)
    model = found.pop(DRAFT_MODEL, None)
    if model is not None:
        found["speculation"] = f"{found['speculation']}:{model}" if "speculation" in found else model
    return found


def _file_entry(path: str, key: str, value: object, told: Told) -> list[tuple[str, object]]:
    known, name = setting_names(), key.replace("-", "_")
    if name in known:
        ours = our_value("--" + name.replace("_", "-"), str(value), told)
        return [] if ours is None else [(name, value if ours == str(value) else ours)]
    if name == "spec" and isinstance(value, dict):
        return [entry for part, inner in value.items() for entry in _file_entry(path, f"spec.{part}", inner, told)]
    flag = "--" + key.replace("_", "-")
    if (switched := _switched(path, key, flag, value, told)) is not None:
        return switched
    text = json.dumps(value) if isinstance(value, dict) else str(value)
    pairs = translate(flag, text, told)
    if pairs is None:
        raise UnknownSetting(f"{path}: unknown setting {key!r}{suggestion(name, known)}")
    return [as_setting(*pair) for pair in pairs]


def _switched(path: str, key: str, flag: str, value: object, told: Told) -> list[tuple[str, object]] | None:
    """What a mapping can say of another engine's flag and a command line cannot: that a switch is off, or that nothing
    is set. None: it says neither."""
    entry = ALIASES.get(flag) or ALWAYS.get(flag) or REFUSED.get(flag)
    if entry is None and _family(flag) is None and flag != "--speculative-config":
        return None
    if value is None or (value is False and not (entry is not None and entry.takes_value)):
        if value is None or not isinstance(entry, Alias):
            told.void.append(f"{key}: {json.dumps(value)} asks for nothing")
            return []
        name, on = as_setting(entry.flag, None)
        told.notes.append(f"{key}: false is read as {name}: {json.dumps(not on)}")
        return [(name, not on)]
    if value is not True and isinstance(entry, Alias) and not entry.takes_value:
        raise UsageError(f"{path}: {key} is a switch of another engine and can only be true or false; use"
                         f" {entry.flag.removeprefix('--')}")
    return None


def suggestion(name: str, known: frozenset[str], prefix: str = "") -> str:
    close = difflib.get_close_matches(name, known, n=1)
    if not close:
        return ""
    return f"; did you mean {prefix + close[0].upper() if prefix else close[0]}?"
