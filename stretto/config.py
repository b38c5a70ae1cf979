"""The configuration: what a user may set, what machine and model are, and what follows. No torch in this module.

`Config` holds what was asked, in frozen sections; a value that was not set is None (or "auto"). `Facts` holds what was
found. `resolve.resolve(config, facts)` is called once and gives a frozen `Resolved` in which every value is known, with
a list of `Decision`s that says of each what was asked, what it is now, and why. Three rules:

    a value that was set is kept, or the start is refused with the names of both sides (compat.ConfigError);
    only values that were not set are fitted to the machine, and each fit is a Decision;
    nothing is read from anywhere else: no global, no environment variable behind the scenes.

Flags have vLLM's names where vLLM has the flag. The string below a field is its help text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Literal

from stretto.compat import Drafting

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
DEFAULT_DRAFT_TOKENS = 4
HOST_STAGING = 64 * MIB  # device memory in which pages are gathered on their way to host memory and back


class UsageError(ValueError):
    """A command line, variable, file or mapping of settings that cannot be understood."""


# ------------------------------------------------------------------------------------------------ what a user may set
@dataclass(frozen=True)
class ModelSection:
    """Which model, and how it is held."""

    model: str | None = None
    """Folder, .gguf file or hub id. Default: SmolLM2-135M-Instruct."""
    _: KW_ONLY
    tokenizer: str | None = None
    """Folder or .gguf file with the tokenizer. Default: the model's own."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of weights and activations, and of the KV cache unless --kv-cache-dtype names another."""
    device: str = "auto"
    """auto, cpu or cuda."""
    max_model_len: int | None = None
    """Longest prompt and answer together, in tokens. Default: the model's context, or what the KV memory holds."""
    seed: int | None = None
    """Source of the seeds of requests that name none. Default: random."""
    deterministic: bool = False
    """Text, ids and log-probabilities are the same bit for bit, whatever runs beside a request: batch, chunks, drafts,
    retraction. Slower (docs/sampling.md)."""
    chat_template: Path | None = None
    """File with a Jinja chat template, instead of the model's own."""
    strict: bool = False
    """Refuse to start where the context would be fitted to the memory, or a flag or variable means nothing here."""


@dataclass(frozen=True)
class KVSection:
    """The paged KV cache."""

    page_size: int | None = None
    """Tokens per page. Default: 16."""
    kv_memory: int | None = None
    """Memory of the KV cache, such as 4GiB. Default: what is left (cuda), at most 4 GiB (cpu)."""
    gpu_memory_utilization: float | None = None
    """Fraction of the GPU's memory that weights, KV cache and buffers take in all. Default: 0.9."""
    kv_tokens: int | None = None
    """Tokens that the KV cache holds, instead of a memory size."""
    kv_cache_dtype: Literal["auto", "fp8_e4m3", "bfloat16", "float16", "float32"] = "auto"
    """Type of cached keys and values. auto: that of --dtype; fp8_e4m3: 8 bits, with a scale for each head of each token
    (docs/quantization.md)."""
    prefix_caching: bool | None = None
    """Requests with a common beginning share its KV pages. Default: on."""
    state_interval: int | None = None
    """Of models whose layers keep states: tokens from one kept state to the next; a shared prefix goes on from the last
    one in it. Default: 256."""
    kv_host_bytes: int | None = None
    """Host memory for KV that leaves the device, such as 32GiB: it is copied back where that beats computing it again.
    Default: none."""


@dataclass(frozen=True)
class ScheduleSection:
    """What runs in a step."""

    max_num_seqs: int | None = None
    """Most sequences that run at once. Default: 64 (cpu), 256 (cuda)."""
    max_num_batched_tokens: int | None = None
    """Most tokens in a step. Default: 512 (cpu), 8192 (cuda)."""
    chunk_size: int | None = None
    """Most tokens of one prompt in a step. Default: 512 (cpu), 2048 (cuda)."""
    mixed_chunk: bool | None = None
    """Prompt chunks and running sequences share steps. Default: on."""
    overlap: bool | None = None
    """The host plans the next step while the device runs one. Default: on."""
    enforce_eager: bool = False
    """Launch every kernel by itself instead of replaying CUDA graphs: slower, for debugging."""
    cap_policy: Literal["full", "one_in_mixed", "budget"] = "full"
    """Draft tokens verified in a step: full width always; one token a sequence in steps that also hold a prompt chunk;
    or what the step's token budget leaves."""
    max_sessions: int = 4096
    """Most sessions that are open at once."""
    session_ttl: float = 3600.0
    """Seconds idle until a session closes, unless it was opened with its own."""
    slo_itl_ms: float | None = None
    """Milliseconds that a step may take, so that tokens follow each other that fast: prompts are fed in smaller chunks
    and fewer drafts are verified, as far as that helps. Default: as fast as possible over all."""
    session_queue: int = 8
    """Turns that may wait behind the live one of a session; a further one is refused."""
    session_file: Path | None = None
    """File in which idle sessions are kept when the engine is stopped, and from which they come back at its start. It
    holds their tokens, not their KV."""


@dataclass(frozen=True)
class SpeculationSection:
    """Speculative decoding."""

    speculation: str = "off"
    """off, a drafter (ngram, suffix, eagle3:MODEL ...), or a draft model that says itself what it is."""
    speculation_tokens: int | Literal["auto"] = "auto"
    """Draft tokens of a sequence in a step: a number that holds for every step, or auto: each step decides by what they
    cost and how often they are accepted, up to 4, or to all that a drafter proposes in one pass."""

    acceptance_method: Literal["coupled", "rejection"] = "coupled"
    """coupled: a draft is accepted where the target's own noise chooses it, so a seed gives one text with or without
    drafts; rejection: with probability min(1, p/q), for drafters that draw their ids."""


@dataclass(frozen=True)
class SamplingSection:
    """What requests may ask of the sampler."""

    logprobs_mode: Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"] = "raw_logprobs"
    """What logprobs are: of the model's own distribution, or of the one that a token is drawn from, after processors,
    temperature and filters; or the logits behind either."""
    max_logprobs: int = 20
    """Most alternatives that a request may ask for at a token; -1: the whole vocabulary."""
    enable_custom_logit_processor: bool = False
    """Run logit processors that requests bring as code (custom_logit_processor). Whoever can send a request can then
    do anything that this server can: only where every client is trusted."""


@dataclass(frozen=True)
class LoraSection:
    """LoRA adapters of the model."""

    enable_lora: bool = False
    """Keep room for LoRA adapters, which requests name as their model. On where --lora-modules names some."""
    lora_modules: tuple[str, ...] = ()
    """Adapters to load at the start, as NAME=FOLDER in PEFT's layout."""
    max_loras: int = 4
    """Adapters that can be loaded at once; requests of all of them share steps."""
    max_lora_rank: int = 16
    """Largest rank of an adapter."""

    @property
    def on(self) -> bool:
        return self.enable_lora or bool(self.lora_modules)


@dataclass(frozen=True)
class ParallelSection:
    """Several devices."""

    tensor_parallel_size: int = 1
    """GPUs, or processes on a CPU, that share each layer."""


@dataclass(frozen=True)
class ServeSection:
    """The HTTP server."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8000
    """Port to listen on; 0 takes a free one."""
    uds: Path | None = None
    """Listen on this Unix socket instead of a port."""
    ssl_certfile: Path | None = None
    """Certificate, with its chain, for TLS; needs --ssl-keyfile."""
    ssl_keyfile: Path | None = None
    """Private key of the certificate."""
    root_path: str = ""
    """Path under which a proxy shows the server."""
    allowed_origins: tuple[str, ...] = ()
    """An origin whose web pages may call the server, such as https://chat.example, or *; may be given several times."""
    api_key: tuple[str, ...] = ()
    """A key that clients must send; may be given several times."""
    admin_api_key: tuple[str, ...] = ()
    """A key of operators: for /flush_cache, /start_profile, /stop_profile and aborting everything. Default: any key."""
    served_model_name: tuple[str, ...] = ()
    """Names by which clients may call the model. Default: the last part of the model's path."""
    generation_config: Literal["auto", "none"] = "auto"
    """Sampling defaults from the model's generation_config.json (auto) or OpenAI's (none)."""
    strict_requests: bool = False
    """Refuse requests with unknown fields instead of naming them in a response header."""
    request_timeout: float | None = None
    """Most seconds that a call may take, from its arrival to its end. Default: as long as it takes."""
    drain_timeout: float = 30.0
    """Seconds that running requests get to finish when the server is told to stop."""
    stall_timeout: float = 25.0
    """Seconds after which an engine that neither speaks nor computes counts as wedged."""
    engine_restarts: int = 3
    """Times within ten minutes that an engine which has died is started again; one more death ends the server."""
    replicas: int = 1
    """Servers of this model on this machine, each with its own engine, GPUs or cores and port, behind a gateway that
    listens on --port and keeps sessions and common prompt beginnings together (stretto[router])."""
    gateway: Literal["smg", "vllm-router"] | None = None
    """The gateway in front of --replicas: smg, or vllm-router, which passes on everything unread, LoRA adapters too.
    Default: smg."""
    max_live_requests: int = 4096
    """Most requests that run and wait; a further one is told to come back (429)."""
    max_body_bytes: int = 32 * 2**20
    """Largest request body in bytes."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe messages that are logged."""
    log_format: Literal["text", "json"] = "text"
    """One line of text, or one JSON object, for each message."""
    access_log: bool = False
    """Log every HTTP request."""
    otlp_traces_endpoint: str | None = None
    """Send OpenTelemetry traces there by OTLP over HTTP, such as http://localhost:4318/v1/traces."""


@dataclass(frozen=True)
class Config:
    """Everything a user may set."""

    model: ModelSection = field(default_factory=ModelSection)
    kv: KVSection = field(default_factory=KVSection)
    schedule: ScheduleSection = field(default_factory=ScheduleSection)
    speculation: SpeculationSection = field(default_factory=SpeculationSection)
    sampling: SamplingSection = field(default_factory=SamplingSection)
    lora: LoraSection = field(default_factory=LoraSection)
    parallel: ParallelSection = field(default_factory=ParallelSection)
    serve: ServeSection = field(default_factory=ServeSection)


# ------------------------------------------------------------------------------------------------------ what was found
@dataclass(frozen=True)
class DeviceFacts:
    """One device. Memory in bytes; on a CPU, `memory_free` is what can be had without swapping."""

    kind: Literal["cpu", "cuda"]
    name: str
    memory_total: int
    memory_free: int
    cores: int = 1
    bfloat16: bool = False  # computes in bfloat16 natively
    fp8: bool = True  # its kernels can read and write e4m3
    others: tuple[tuple[int, int], ...] = ()  # (total, free) memory of further devices of this kind
    kernels: tuple[str, ...] = ()  # compiled on this machine for its processor
    missing: tuple[tuple[str, str], ...] = ()  # such kernels that are not there, each with the reason and the way out


@dataclass(frozen=True)
class KVGroupFacts:
    """Layers that share page tables. `values`: numbers that one token stores in them, keys and values together;
    `heads`: heads that these make up, each of which has a scale of its own in an 8-bit cache. Where the window is
    wire.STATE, `values` are the float32 numbers of one sequence's state."""

    window: int | None
    values: int
    heads: int = 0


@dataclass(frozen=True)
class ModelFacts:
    """What is known of a model before its weights are loaded."""

    name: str
    architecture: str
    n_layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    context: int  # positions that the model was trained for, rope scaling included
    parameters: int
    dtype: str  # of the checkpoint
    kv_groups: tuple[KVGroupFacts, ...]
    n_kv_heads: int = 1
    native: bool = True  # run by this engine's own layers, not by transformers' modules
    sampling_defaults: tuple[tuple[str, float], ...] = ()  # of generation_config.json, by the names of SamplingParams
    packed_bytes: tuple[tuple[str, int], ...] = ()  # of quantised weights by type of device, for 16-bit activations
    exact_packed_bytes: int | None = None  # the same on a CPU in float32, where it has kernels for that
    unpacked_bytes: int = 0  # of the largest matrix that a GPU makes anew of packed weights, for one product


@dataclass(frozen=True)
class DrafterFacts:
    """A drafter before its weights are loaded. `kv_groups`: its own layers. `tap_values`: numbers kept for the seam,
    beside each page and in each slot."""

    name: str
    caps: Drafting
    parameters: int = 0
    kv_groups: tuple[KVGroupFacts, ...] = ()
    tap_values: int = 0
    usual_width: int = DEFAULT_DRAFT_TOKENS  # drafts of a step at most, where the configuration says nothing


@dataclass(frozen=True)
class Facts:
    """Devices in order of preference; the drafter that the configuration names, where it names one."""

    devices: tuple[DeviceFacts, ...]
    model: ModelFacts
    drafter: DrafterFacts | None = None
    adapter_values: int = 0  # numbers that the room for LoRA adapters holds


# --------------------------------------------------------------------------------------------------------- what follows
@dataclass(frozen=True)
class Decision:
    """One line of the start-up report. `changed`: fitted to the machine, away from the usual default."""

    feature: str
    asked: str
    now: str
    why: str = ""
    changed: bool = False


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on the device. `budget` is their sum."""

    weights: int
    draft_weights: int
    adapters: int
    step_buffers: int
    slot_table: int
    graphs: int  # that captured CUDA graphs may take
    kv: int

    @property
    def budget(self) -> int:
        return (self.weights + self.draft_weights + self.adapters + self.step_buffers + self.slot_table + self.graphs
                + self.kv)


@dataclass(frozen=True)
class Resolved:
    """The configuration as it will run. Every value is known."""

    config: Config
    model_name: str
    device: str
    dtype: str
    max_model_len: int
    seed: int | None
    page_size: int
    kv_dtype: str  # "fp8_e4m3" or a type as `dtype`
    pages: tuple[int, ...]  # per KV group, the null page included
    windows: tuple[int | None, ...]  # per KV group: the model's and the drafter's, full attention first, then states
    state_every: int  # pages from one kept state to the next
    kv_tokens: int  # tokens of one sequence that the pool holds
    prefix_caching: bool
    host_pages: tuple[int, ...]  # of host memory, per KV group; (): none
    page_bytes: tuple[int, ...]  # per KV group
    max_num_seqs: int
    max_num_batched_tokens: int
    chunk_size: int
    mixed_chunk: bool
    depth: int  # steps in flight while the host plans: 1 with overlap, 0 without
    cap_policy: str
    drafter: str | None  # as asked, with its settings
    speculation_tokens: int  # most drafts of a sequence and step
    elastic: bool  # each step decides how many
    lookahead: int  # cells past the committed length that the drafter writes
    sampling_defaults: tuple[tuple[str, float], ...]  # of requests to the server that do not say otherwise
    memory: MemoryPlan
    decisions: tuple[Decision, ...]


# ------------------------------------------------------------------------------------------------------- human numbers
_SIZE_UNITS = {"": 1, "b": 1, "k": KIB, "kb": 10**3, "kib": KIB, "m": MIB, "mb": 10**6, "mib": MIB, "g": GIB,
               "gb": 10**9, "gib": GIB, "t": GIB << 10, "tb": 10**12, "tib": GIB << 10}
_COUNT_UNITS = {"": 1, "k": 1000, "K": 1024, "m": 10**6, "M": 1024**2}


def parse_size(text: str) -> int:
    """Bytes of "4GiB", "512 MiB", "4g" or "4294967296". Raises ValueError for anything else."""
    return _parse(text, _SIZE_UNITS, text.strip().lower(), "4GiB, 512MiB or a number of bytes")


def parse_count(text: str) -> int:
    """A number of tokens: "8192", "8k" (8000), "8K" (8192); vLLM reads both the same way."""
    return _parse(text, _COUNT_UNITS, text.strip(), "8192, 8k (8000) or 8K (8192)")


READ_AS: dict[str, Callable[[str], int]] = {  # options that may be written for people
    **dict.fromkeys(("max_model_len", "kv_tokens", "max_num_batched_tokens", "chunk_size"), parse_count),
    **dict.fromkeys(("kv_memory", "kv_host_bytes"), parse_size)}


def _parse(text: str, units: dict[str, int], cleaned: str, examples: str) -> int:
    number = cleaned.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
    unit = cleaned[len(number):].strip()
    try:
        return int(float(number) * units[unit])
    except (ValueError, KeyError, OverflowError):
        raise ValueError(f"{text!r} is not a number as in {examples}") from None


def gib(size: int) -> str:
    """Bytes for people."""
    return f"{size / GIB:.2f} GiB" if size >= GIB // 10 else f"{size / MIB:.1f} MiB"
