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
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

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


LOOKUP = ("prompt_lookup_max", "prompt_lookup_min")  # vLLM's longest and shortest n-gram that is looked up
BOUNDED = {"ngram": "ngram:longest={longest},shortest={shortest}"}  # vLLM's method -> our drafter with its settings
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
VALUES: Mapping[str, Mapping[str, str]] = {"--kv-cache-dtype": {"fp8": "fp8_e4m3", "bf16": "bfloat16"},
                                            "--dtype": {"half": "float16", "float": "float32"}}
# Values of such flags that ask for our default, which has no word of its own here.
DEFAULTS: Mapping[str, Mapping[str, str]] = {"--max-model-len": dict.fromkeys(
    ("auto", "-1"), "the model's context, or what the KV memory holds of it, is what an unset one gives")}

_TOOLS = "how a model writes calls and reasoning is read from its chat template"
_CHUNKS = "prompts are always fed in chunks; --chunk-size may be as large as a step"
_ONE_DEVICE = "replicas are servers of their own, with a router in front"
_LOGS = "texts of requests are never logged; each finished call has a line, and --access-log adds HTTP requests"
_GRAPHS = "the sizes of CUDA graphs follow from --max-num-seqs; --enforce-eager makes none"
_COMPILED = "kernels are compiled before they are used, whatever the settings"
_HOSTS = "torchrun starts the ranks of several hosts (docs/scaling.md)"
_PUT_BACK = "what the KV memory cannot hold is put back, and goes on later with the same text"
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
    "--no-enable-chunked-prefill": Foreign(_CHUNKS, False),
    "--no-chunked-prefill": Foreign(_CHUNKS, False),
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
    "--compilation-config": _never(_COMPILED),
    "-O": _never(_COMPILED),
    "--enable-torch-compile": Foreign(_COMPILED, False),
    "--torch-compile-max-bs": _never(_COMPILED),
    "--cuda-graph-max-bs": _never(_GRAPHS),
    "--cuda-graph-bs": _never(_GRAPHS),
    "--cudagraph-capture-sizes": _never(_GRAPHS),
    "--max-seq-len-to-capture": _never(_GRAPHS),
    "--schedule-conservativeness": _never(_PUT_BACK),
    "--preemption-mode": _never(_PUT_BACK, "recompute"),
    "--num-gpu-blocks-override": _never("the size of the KV cache is --kv-tokens or --kv-memory"),
    "--distributed-executor-backend": _never("ranks of one host are processes of their own", "mp"),
    "--nnodes": _never(_HOSTS, "1"),
    "--node-rank": _never(_HOSTS, "0"),
    "--dist-init-addr": _never(_HOSTS),
    "--limit-mm-per-prompt": _never("text alone is served, no images or audio"),
    "--hf-overrides": _never("a model is what its config.json says"),
    "--rope-scaling": _never("a model is what its config.json says"),
    "--enable-sleep-mode": Foreign("an idle server keeps its memory", False),
    "--kv-transfer-config": _never("KV caches stay with their server"),
    "--kv-events-config": _never("no events of the cache are published"),
}

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
    rest = iter(tokens)
    for token in rest:
        if token == "--":
            ours += [(token, None), *((left, None) for left in rest)]
            break
        flag, equals, value = _parts(token)
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


def _parts(token: str) -> tuple[str, str, str]:
    """A flag, "=" where its value is in the same token, and that value. vLLM's -O3 is -O=3."""
    level = re.fullmatch(r"-O(\d+|[.=].*)", token)
    return ("-O", "=", level[1]) if level else token.partition("=")


class _Refusal(UsageError):
    """A flag that has no counterpart."""


def _takes_value(flag: str) -> bool:
    entry = ALIASES.get(flag) or ALWAYS.get(flag) or REFUSED.get(flag)
    return flag in {"--speculative-config", *VALUES, *DEFAULTS} or (entry is not None and entry.takes_value)


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
    if flag in VALUES or flag in DEFAULTS:
        ours = our_value(flag, value, told)
        return [] if ours is None else [(flag, ours)]
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
