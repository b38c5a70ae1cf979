"""Flags of vLLM and SGLang, as tables: which flag of ours means the same, which ask for what is so anyway, and why
there is none for the others. No torch in this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


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
