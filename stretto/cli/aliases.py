"""Flags of vLLM and SGLang: translated where ours means the same, told where they ask for nothing, else refused.

    --context-length 4096            --max-model-len 4096          an alias, printed as such
    --enable-chunked-prefill                                       asks for what is always so, printed as such
    --kv-cache-dtype fp8             --kv-cache-dtype fp8_e4m3     another name of a value, printed as such
    --load-format auto                                             asks for what is so anyway, printed as such
    --load-format gguf               refused, with the reason and the nearest command line that is accepted

No torch in this module.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stretto.cli.failures import UsageError


@dataclass(frozen=True)
class Alias:
    """Another engine's flag. `flag` is ours; a `value` replaces the given one, None keeps it."""

    flag: str
    value: str | None = None
    takes_value: bool = True


@dataclass(frozen=True)
class Foreign:
    """A flag of theirs that has no counterpart. `harmless`: values that ask for what is so anyway."""

    why: str
    takes_value: bool = True
    harmless: frozenset[str] = frozenset()


def _switch(flag: str) -> Alias:
    return Alias(flag, takes_value=False)


def _never(why: str, *harmless: str) -> Foreign:
    return Foreign(why, True, frozenset(harmless))


DRAFT_MODEL = "--speculation's model"  # stands for their own flag until it is joined with the drafter's name
DRAFT_STEPS = "--speculation-tokens, if no other says it"

# Second spellings of settings, as variables: STRETTO_SPEC_TOKENS.
SPELLINGS: Mapping[str, str] = {"spec": "speculation", "spec_method": "speculation",
                                "spec_tokens": "speculation_tokens"}

ALIASES: Mapping[str, Alias] = {
    "--kv.host-bytes": Alias("--kv-host-bytes"),
    "--spec": Alias("--speculation"),
    "--spec.method": Alias("--speculation"),
    "--spec.tokens": Alias("--speculation-tokens"),
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
    "--watchdog-timeout": Alias("--stall-timeout"),
    "--lora-paths": Alias("--lora-modules"),
    "--max-loras-per-batch": Alias("--max-loras"),
    "--enable-mixed-chunk": _switch("--mixed-chunk"),
    "--disable-overlap-schedule": _switch("--no-overlap"),
    "--disable-radix-cache": _switch("--no-prefix-caching"),
    "--disable-cuda-graph": _switch("--enforce-eager"),
    "--speculative-algorithm": Alias("--speculation"),
    "--speculative-draft-model-path": Alias(DRAFT_MODEL),
    "--speculative-num-draft-tokens": Alias("--speculation-tokens"),
    "--speculative-num-steps": Alias(DRAFT_STEPS),
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

# Other names of values of flags that are ours as well.
VALUES: Mapping[str, Mapping[str, str]] = {"--kv-cache-dtype": {"fp8": "fp8_e4m3", "bf16": "bfloat16"}}

_TOOLS = "how a model writes calls and reasoning is read from its chat template"
_ONE_DEVICE = "replicas are servers of their own, with a router in front"
_LOGS = "texts of requests are never logged; each finished call has a line, and --access-log adds HTTP requests"
_HOST_TIER = "host memory for the KV cache has a size with a unit: --kv-host-bytes 32GiB"

ALWAYS: Mapping[str, Foreign] = {  # whatever their value
    "--enable-chunked-prefill": Foreign("prompts are always fed in chunks", False),
    "--enable-streaming-session": Foreign("sessions are always on", False),
    "--enable-metrics": Foreign("metrics are always on", False),
    "--enable-cache-report": Foreign("usage always tells what the cache held", False),
    "--enable-auto-tool-choice": Foreign(_TOOLS, False),
    "--tool-call-parser": Foreign(_TOOLS),
    "--reasoning-parser": Foreign(_TOOLS),
    "--is-embedding": Foreign("embeddings are served beside text", False),
    "--enable-priority-scheduling": Foreign("requests always run by priority, then arrival", False),
    "--disable-log-requests": Foreign(_LOGS, False),
    "--no-enable-log-requests": Foreign(_LOGS, False),
    "--disable-log-stats": Foreign("statistics are metrics, not lines of the log", False),
    "--disable-uvicorn-access-log": Foreign(_LOGS, False),
    "--enable-request-id-headers": Foreign("X-Request-Id always comes back", False),
}

REFUSED: Mapping[str, Foreign] = {
    "--trust-remote-code": Foreign("code that comes with a model is never run", False),
    "--quantization": _never("how weights are stored is read from the model; give a GGUF file, or a quantised"
                             " checkpoint", "none", "None"),
    "--load-format": _never("how weights are stored is read from the model", "auto", "safetensors"),
    "--tokenizer-mode": _never("tokenizers are read from tokenizer.json or GGUF files", "auto", "fast"),
    "--cpu-offload-gb": _never("weights are held on one device", "0"),
    "--swap-space": _never(_HOST_TIER, "0"),
    "--kv-offloading-size": _never(_HOST_TIER, "0"),
    "--hicache-size": _never(_HOST_TIER, "0"),
    "--hicache-ratio": _never(_HOST_TIER),
    "--enable-hierarchical-cache": Foreign(_HOST_TIER, False),
    "--pipeline-parallel-size": _never("one device runs all layers", "1"),
    "--pp-size": _never("one device runs all layers", "1"),
    "--data-parallel-size": _never(_ONE_DEVICE, "1"),
    "--dp-size": _never(_ONE_DEVICE, "1"),
    "--no-enable-chunked-prefill": Foreign("prompts are always fed in chunks; --chunk-size may be as large as a step",
                                           False),
    "--speculative-eagle-topk": _never("drafts are chains, not trees", "1"),
    "--attention-backend": _never("it follows from the device; `stretto explain` shows which", "auto"),
    "--sampling-backend": _never("there is one sampler for all rows"),
    "--grammar-backend": _never("grammars are llguidance's", "llguidance"),
    "--guided-decoding-backend": _never("grammars are llguidance's", "auto", "guidance", "llguidance"),
    "--schedule-policy": _never("requests run by priority, then arrival", "fcfs"),
    "--scheduling-policy": _never("requests run by priority, then arrival", "fcfs", "priority"),
    "--stream-interval": _never("what a step gives is sent at once", "1"),
    "--task": _never("text and embeddings are served at the same time", "auto", "generate", "embed", "embedding"),
    "--runner": _never("text and embeddings are served at the same time", "auto", "generate", "pooling"),
    "--convert": _never("text and embeddings are served at the same time", "auto", "none", "embed"),
    "--override-generation-config": _never("defaults are the model's (--generation-config auto) or OpenAI's (none)"),
    "--compilation-config": _never("kernels are compiled before they are used, whatever the settings"),
    "--enable-torch-compile": Foreign("kernels are compiled before they are used, whatever the settings", False),
    "--hf-overrides": _never("a model is what its config.json says"),
    "--rope-scaling": _never("a model is what its config.json says"),
    "--enable-sleep-mode": Foreign("an idle server keeps its memory", False),
    "--kv-transfer-config": _never("KV caches stay with their server"),
    "--kv-events-config": _never("no events of the cache are published"),
}

Pair = tuple[str, str | None]  # a flag of ours, and its value where it takes one


@dataclass
class Told:
    """What the user is told of a translation. `void`: of what means nothing here; an error under --strict."""

    notes: list[str]
    void: list[str]


def translate_tokens(tokens: Sequence[str], told: Told) -> list[str]:
    """The command line with other engines' flags replaced by ours. Raises UsageError with the nearest command line that
    is accepted where a flag has no counterpart."""
    ours: list[Pair] = []
    refusals: list[str] = []
    rest = iter(tokens)
    for token in rest:
        if token == "--":
            ours += [(token, None), *((left, None) for left in rest)]
            break
        flag, equals, value = token.partition("=")
        if _takes_value(flag) and not equals:
            value = next(rest, "")
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


class _Refusal(UsageError):
    """A flag that has no counterpart."""


def _takes_value(flag: str) -> bool:
    entry = ALIASES.get(flag) or ALWAYS.get(flag) or REFUSED.get(flag)
    return flag == "--speculative-config" or flag in VALUES or (entry is not None and entry.takes_value)


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
            raise _Refusal(f"{flag} is not a setting of this engine: {REFUSED[flag].why}")
        told.void.append(f"{flag} {value}: {REFUSED[flag].why}")
        return []
    if flag in ALWAYS:
        told.void.append(f"{flag}: {ALWAYS[flag].why}")
        return []
    if flag == "--speculative-config":
        return _speculative_config(value, told)
    if flag in VALUES:
        ours = VALUES[flag].get(value, value)
        if ours != value:
            told.notes.append(f"{flag} {value} is read as {flag} {ours}")
        return [(flag, ours)]
    if flag not in ALIASES:
        return None
    if flag == "--speculative-num-draft-tokens" and value.isdigit():
        value = str(max(int(value) - 1, 0))  # SGLang counts the token that is verified together with the drafts
    if flag == "--speculative-algorithm":
        value = value.lower()
    alias = ALIASES[flag]
    pair = (alias.flag, value if alias.takes_value else None)
    told.notes.append(f"{flag} is read as {_told(pair)}")
    return [pair]


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
    if not isinstance(given, dict) or (unknown := sorted(given.keys() - known.keys())):
        what = f"has {', '.join(unknown)}" if isinstance(given, dict) else f"is {value}"
        raise UsageError(f"--speculative-config {what}; it is an object that may hold {', '.join(known)}")
    pairs: list[Pair] = [(flag, str(given[key])) for key, flag in known.items() if key in given]
    pairs = _join_drafter(pairs)
    told.notes.append(f"--speculative-config is read as {' '.join(_told(pair) for pair in pairs)}")
    return pairs


def as_setting(flag: str, value: str | None) -> tuple[str, object]:
    """A pair as a setting. A switch of ours becomes a truth value: "--no-overlap" sets overlap to false."""
    name = flag.removeprefix("--")
    if flag in (DRAFT_MODEL, DRAFT_STEPS):
        return flag, value
    if value is not None:
        return name.replace("-", "_"), value
    return name.removeprefix("no-").replace("-", "_"), not name.startswith("no-")
