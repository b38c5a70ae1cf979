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
    "--enable-deterministic-inference": _switch("--deterministic"),
    "--fastapi-root-path": Alias("--root-path"),
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
_EXPERTS = "all experts of a layer are on each of its GPUs, shared by --tensor-parallel-size as its other weights are"
_HEADS = "the GPUs of --tensor-parallel-size share the heads of every sequence; replicas are servers of their own"
_CONTEXT = "a sequence is on the GPUs of one --tensor-parallel-size group, all of it on each"
_STATES = "states are kept in float32"
_TEXT = "text alone is served, no images or audio"
_SPLIT = "a server feeds prompts and generates; KV caches stay with it"
_BACKEND = "kernels follow from the device; `stretto explain` shows which"
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
    "--enable-priority-scheduling": Foreign("requests always run by priority, the lowest value first, then by arrival",
                                            False),
    "--schedule-low-priority-values-first": Foreign("the lowest value always runs first", False),
    "--disable-log-requests": Foreign(_LOGS, False),
    "--no-enable-log-requests": Foreign(_LOGS, False),
    "--disable-log-stats": Foreign("statistics are metrics, not lines of the log", False),
    "--disable-uvicorn-access-log": Foreign(_LOGS, False),
    "--enable-request-id-headers": Foreign("X-Request-Id always comes back", False),
    "--enable-prompt-tokens-details": Foreign("usage always tells what the cache held", False),
    "--enable-force-include-usage": Foreign("clients ask for it by stream_options.include_usage", False),
    "--disable-frontend-multiprocessing": Foreign("server and engine are two processes, whatever is asked", False),
    "--use-tqdm-on-load": Foreign("progress is told where there is a terminal", False),
    "--no-use-tqdm-on-load": Foreign("progress is told where there is a terminal", False),
    "--skip-server-warmup": Foreign("there is no warm-up request", False),
    "--enable-p2p-check": Foreign("GPUs that reach each other are found at the start", False),
    "--enable-tokenizer-batch-encode": Foreign("prompts are tokenised on threads beside the steps", False),
    "--decode-log-interval": Foreign("statistics are metrics, not lines of the log"),
    "--log-requests": Foreign(_LOGS, False),
    "--log-requests-level": Foreign(_LOGS),
    "--enable-log-requests": Foreign(_LOGS, False),
    "--max-log-len": Foreign(_LOGS),
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
    "--attention-backend": _never(_BACKEND, "auto"),
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
    "--limit-mm-per-prompt": _never(_TEXT),
    "--hf-overrides": _never("a model is what its config.json says"),
    "--rope-scaling": _never("a model is what its config.json says"),
    "--enable-sleep-mode": Foreign("an idle server keeps its memory", False),
    "--kv-transfer-config": _never("KV caches stay with their server"),
    "--kv-events-config": _never("no events of the cache are published"),
    "--revision": _never("it stands behind the model's name: owner/model@revision"),
    "--code-revision": _never("code that comes with a model is never run"),
    "--tokenizer-revision": _never("it stands behind the tokenizer's name: --tokenizer owner/model@revision"),
    "--download-dir": _never("models are kept where HF_HOME says"),
    "--model-impl": _never("what is not native runs through transformers; `stretto explain` shows which", "auto"),
    "--config-format": _never("config.json or a GGUF file's head is read", "auto", "hf"),
    "--skip-tokenizer-init": Foreign("texts need it, and token ids are taken beside texts", False),
    "--tokenizer-worker-num": _never("prompts are tokenised on threads of the server", "1"),
    "--api-server-count": _never("one process serves HTTP; --replicas N starts several servers", "1"),
    "--headless": Foreign(_HOSTS, False),
    "--max-num-partial-prefills": _never(_CHUNKS, "1"),
    "--max-long-partial-prefills": _never(_CHUNKS, "1"),
    "--long-prefill-token-threshold": _never(_CHUNKS, "0"),
    "--max-prefill-tokens": _never("tokens of a step are --max-num-batched-tokens, those of one prompt --chunk-size"),
    "--prefill-max-requests": _never("tokens of a step are --max-num-batched-tokens, those of one prompt --chunk-size"),
    "--max-queued-requests": _never("requests that run and wait are counted together: --max-live-requests"),
    "--disable-custom-all-reduce": Foreign("sums over GPUs choose their way by size and host", False),
    "--calculate-kv-scales": Foreign("an 8-bit cache has a scale for each head of each token, always", False),
    "--quantization-param-path": _never("an 8-bit cache has a scale for each head of each token, always"),
    "--collect-detailed-traces": _never("--otlp-traces-endpoint sends one trace a request; POST /start_profile records"
                                        " steps"),
    "--show-hidden-metrics-for-version": _never("metrics are never hidden"),
    "--response-role": _never("answers are the assistant's", "assistant"),
    "--chat-template-content-format": _never("how parts of a message are written is the chat template's", "auto"),
    "--default-chat-template-kwargs": _never("requests name them in chat_template_kwargs"),
    "--trust-request-chat-template": Foreign("templates come from the model's files, not from requests", False),
    "--tool-parser-plugin": _never(_TOOLS),
    "--reasoning-parser-plugin": _never(_TOOLS),
    "--exclude-tools-when-tool-choice-none": Foreign("they always are", False),
    "--structured-outputs-config": _never("grammars are llguidance's"),
    "--logits-processors": _never("processors are registered by entry point (docs/sampling.md)"),
    "--middleware": _never("put a proxy in front"),
    "--ssl-ca-certs": _never("clients show keys, not certificates: --api-key; or put a proxy in front"),
    "--ssl-cert-reqs": _never("clients show keys, not certificates: --api-key; or put a proxy in front", "0"),
    "--enable-ssl-refresh": Foreign("certificates are read at the start", False),
    "--allowed-methods": _never("pages of --allowed-origins may use every method that there is"),
    "--allowed-headers": _never("pages of --allowed-origins may send every header"),
    "--allow-credentials": Foreign("keys are headers, not cookies", False),
    "--disable-fastapi-docs": Foreign("/docs holds nothing of this server but its routes", False),
    "--grpc-mode": Foreign("the server speaks HTTP", False),
    "--max-cpu-loras": _never("adapters that are loaded are on the device: --max-loras"),
    "--fully-sharded-loras": Foreign("how adapters are shared by ranks follows from the layer", False),
    "--speculative-attention-mode": _never("one kernel family serves chunks, drafts and single tokens"),
    "--speculative-token-map": _never("a reduced draft vocabulary is read from the draft checkpoint"),
    "--speculative-accept-threshold-single": _never("acceptance never changes the distribution: --acceptance-method"),
    "--speculative-accept-threshold-acc": _never("acceptance never changes the distribution: --acceptance-method"),
    "--expert-parallel-size": _never(_EXPERTS, "1"),
    "--enable-ep-moe": Foreign(_EXPERTS, False),
    "--ep-size": _never(_EXPERTS, "1"),
    "--enable-expert-parallel": Foreign(_EXPERTS, False),
    "-ep": Foreign(_EXPERTS, False),
    "--enable-eplb": Foreign(_EXPERTS, False),
    "--all2all-backend": _never(_EXPERTS),
    "--enable-dp-attention": Foreign(_HEADS, False),
    "--enable-dp-lm-head": Foreign(_HEADS, False),
    "-dp": _never(_ONE_DEVICE, "1"),
    "--dp": _never(_ONE_DEVICE, "1"),
    "-pp": _never("one device runs all layers", "1"),
    "--decode-context-parallel-size": _never(_CONTEXT, "1"),
    "--prefill-context-parallel-size": _never(_CONTEXT, "1"),
    "-dcp": _never(_CONTEXT, "1"),
    "--base-gpu-id": _never("CUDA_VISIBLE_DEVICES says which GPUs there are", "0"),
    "--gpu-id-step": _never("CUDA_VISIBLE_DEVICES says which GPUs there are", "1"),
    "--nccl-port": _never("ranks of one host find a port by themselves"),
    "--master-addr": _never(_HOSTS),
    "--master-port": _never(_HOSTS),
    "--mamba-cache-dtype": _never(_STATES, "auto", "float32"),
    "--mamba-ssm-cache-dtype": _never(_STATES, "auto", "float32"),
    "--mamba-ssm-dtype": _never(_STATES, "float32"),
    "--mamba-block-size": _never("states are kept every --state-interval tokens"),
    "--additional-config": _never("it is for hardware that this engine does not run on"),
    "--disable-cascade-attn": Foreign("common beginnings share pages, not kernels", False),
    "--disable-sliding-window": Foreign("a model's windows are part of what it is", False),
    "--disable-hybrid-kv-cache-manager": Foreign("every kind of layer has pages of its own, always", False),
    "--disable-hybrid-swa-memory": Foreign("every kind of layer has pages of its own, always", False),
    "--swa-full-tokens-ratio": _never("layers with windows and without draw on the memory as they need it"),
    "--radix-eviction-policy": _never("what would cost the most to compute again stays longest"),
    "--warmups": _never("there is no warm-up request"),
    "--enable-memory-saver": Foreign("an idle server keeps its memory", False),
    "--weight-version": _never("a server has the weights that it was started with"),
    "--enable-return-hidden-states": Foreign("hidden states are not returned; /v1/embeddings has vectors", False),
    "--enable-return-routed-experts": Foreign("which experts ran is not returned", False),
    "--allowed-local-media-path": _never(_TEXT),
    "--allowed-media-domains": _never(_TEXT),
    "--enable-multimodal": Foreign(_TEXT, False),
    "--language-model-only": Foreign("it is so anyway: " + _TEXT, False),
    "--interleave-mm-strings": Foreign(_TEXT, False),
    "--disable-mm-preprocessor-cache": Foreign(_TEXT, False),
}

# Families of flags: what begins so and stands in none of the tables is refused with the reason of its family.
FAMILIES: Mapping[str, str] = {
    "--mm-": _TEXT, "--limit-mm-": _TEXT, "--video-": _TEXT, "--skip-mm-": _TEXT, "--encoder-": _TEXT,
    "--disaggregation-": _SPLIT, "--pd-": _SPLIT, "--kv-transfer-": _SPLIT, "--ec-transfer-": _SPLIT,
    "--data-parallel-": _ONE_DEVICE, "--dp-": _ONE_DEVICE, "--load-balance-": _ONE_DEVICE,
    "--moe-": _EXPERTS, "--ep-": _EXPERTS, "--eplb-": _EXPERTS, "--expert-": _EXPERTS, "--deepep-": _EXPERTS,
    "--elastic-ep-": _EXPERTS, "--enable-dbo": _EXPERTS, "--dbo-": _EXPERTS, "--ubatch-": _EXPERTS,
    "--attn-cp-": _CONTEXT, "--dcp-": _CONTEXT, "--cp-": _CONTEXT,
    "--hicache-": _HOST_TIER, "--enable-lmcache": _HOST_TIER, "--kv-offloading-": _HOST_TIER,
    "--cuda-graph-": _GRAPHS, "--cudagraph-": _GRAPHS, "--disable-cuda-graph-": _GRAPHS,
    "--enable-piecewise-cuda-graph": _GRAPHS, "--piecewise-cuda-graph-": _GRAPHS,
    "--torch-compile-": _COMPILED, "--enable-torch-compile-": _COMPILED,
    "--model-loader-": "weights are read from safetensors and GGUF files as they are",
    "--modelopt-": "how weights are stored is read from the model", "--quantize-": "weights are quantised beforehand",
    "--torchao-": "how weights are stored is read from the model",
    "--prefill-attention-": _BACKEND, "--decode-attention-": _BACKEND, "--mm-attention-": _BACKEND,
    "--attention-": _BACKEND, "--linear-attn-": _BACKEND, "--mamba-backend": _BACKEND, "--mamba-": _STATES,
    "--nsa-": "no native model attends sparsely", "--dsa-": "no native model attends sparsely",
    "--fp8-gemm-": _BACKEND, "--fp4-gemm-": _BACKEND, "--bf16-gemm-": _BACKEND, "--kernel-": _BACKEND,
    "--crash-dump-": "what the last steps were stands in the log where a check fails",
    "--bucket-": "buckets of metrics are fixed", "--prompt-tokens-buckets": "buckets of metrics are fixed",
    "--generation-tokens-buckets": "buckets of metrics are fixed",
    "--prefill-delayer-": _CHUNKS, "--enable-prefill-delayer": _CHUNKS, "--enable-dynamic-chunking": _CHUNKS,
    "--priority-scheduling-": _PUT_BACK,
    "--speculative-": "drafts are set by --speculation and --speculation-tokens; the rest follows from the drafter",
    "--spec-decoding-": "drafts are set by --speculation and --speculation-tokens; the rest follows from the drafter",
    "--ngram-prompt-lookup-": "write --speculation ngram:longest=5,shortest=2",
    "--tokenizer-pool-": "prompts are tokenised on threads of the server",
    "--ray-": "Ray Serve runs stretto.ray:app (docs/scaling.md)",
    "--remote-instance-": "weights are read from files", "--custom-weight-loader": "weights are read from files",
    "--rl-": "weights are those of the start", "--weight-transfer-": "weights are those of the start",
    "--scheduler-": "requests run by priority, then arrival", "--retraction-": _PUT_BACK,
    "--pipeline-parallel-": "one device runs all layers", "--pp-": "one device runs all layers",
}
