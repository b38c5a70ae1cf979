"""The configuration: what a user may set, what machine and model are, and what follows. No torch in this module.

`Config` holds what was asked, in frozen sections; a value that was not set is None (or "auto"). `Facts` holds what was
found. `resolve(config, facts)` is called once and gives a frozen `Resolved` in which every value is known, with a list
of `Decision`s that says of each what was asked, what it is now, and why. Three rules:

    a value that was set is kept, or the start is refused with the names of both sides (compat.ConfigError);
    only values that were not set are fitted to the machine, and each fit is a Decision;
    nothing is read from anywhere else: no global, no environment variable behind the scenes.

Flags have vLLM's names where vLLM has the flag. The string below a field is its help text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Literal

from stretto.compat import (
    DEVICES,
    REJECTION,
    Component,
    ConfigError,
    Drafting,
    Refusal,
    check,
    drafter_features,
    engine_component,
    model_taps,
)

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
DEFAULT_PAGE_SIZE = 16
DEFAULT_UTILIZATION = 0.9  # of a GPU's memory
CPU_KV_CEILING = 4 * GIB  # KV memory on a CPU, where not set
CPU_KV_SHARE = 0.5  # of the memory that the weights leave free, where not set
DEFAULT_SEQS = {"cpu": 64, "cuda": 256}
DEFAULT_STEP_TOKENS = {"cpu": 512, "cuda": 8192}
DEFAULT_CHUNK = {"cpu": 512, "cuda": 2048}
LEAST_STEP_TOKENS = 64
LEAST_CONTEXT = 64
SCRATCH_SHARE = 0.25  # most of the memory left by the weights that step buffers take, where the sizes were not set
DEFAULT_DRAFT_TOKENS = 4
HOST_STAGING = 64 * MIB  # device memory in which pages are gathered on their way to host memory and back


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
    """Type of weights, KV cache and activations."""
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
    prefix_caching: bool | None = None
    """Requests with a common beginning share its KV pages. Default: on."""
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
    others: tuple[tuple[int, int], ...] = ()  # (total, free) memory of further devices of this kind


@dataclass(frozen=True)
class KVGroupFacts:
    """Layers that share page tables. `values`: numbers that one token stores in them, keys and values together."""

    window: int | None
    values: int


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
    kv: int

    @property
    def budget(self) -> int:
        return self.weights + self.draft_weights + self.adapters + self.step_buffers + self.slot_table + self.kv


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
    pages: tuple[int, ...]  # per KV group, the null page included
    windows: tuple[int | None, ...]  # per KV group: the model's and the drafter's, full attention first
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


def resolve(config: Config, facts: Facts) -> Resolved:
    """The configuration as it will run on this machine with this model.

    Raises ConfigError, with every refusal that could be found, where something that was set cannot be kept."""
    return _Resolution(config, facts).result()


def check_values(config: Config) -> None:
    """Refuses values that no machine and no model could take; `resolve` begins with it. Raises ConfigError."""
    if refusals := [*_ranges(config), *_exclusive(config)]:
        raise ConfigError(refusals)


def _ranges(config: Config) -> Iterator[Refusal]:
    kv, schedule, serve = config.kv, config.schedule, config.serve
    counts = {"--max-model-len": config.model.max_model_len, "--page-size": kv.page_size,
              "--kv-memory": kv.kv_memory, "--kv-tokens": kv.kv_tokens, "--max-num-seqs": schedule.max_num_seqs,
              "--max-num-batched-tokens": schedule.max_num_batched_tokens, "--chunk-size": schedule.chunk_size,
              "--tensor-parallel-size": config.parallel.tensor_parallel_size}
    if config.lora.on:
        counts |= {"--max-loras": config.lora.max_loras, "--max-lora-rank": config.lora.max_lora_rank}
    sessions = {"--max-sessions": schedule.max_sessions, "--session-ttl": schedule.session_ttl,
                "--session-queue": schedule.session_queue}
    for flag, number in sessions.items():
        if not number >= 0:  # so that NaN is refused as well
            yield Refusal(f"{flag} {number:g}", "any start", "it must be 0 or more", f"set {flag} to 0 or more")
    for flag, value in counts.items():
        if value is not None and value < 1:
            yield Refusal(f"{flag} {value}", "any start", "it must be 1 or more", f"set {flag} to a positive number")
    if schedule.slo_itl_ms is not None and not schedule.slo_itl_ms > 0:
        yield Refusal(f"--slo-itl-ms {schedule.slo_itl_ms:g}", "any step", "it takes some time", "set more than 0")
    if config.kv.kv_host_bytes is not None and config.kv.kv_host_bytes < 0:
        yield Refusal(f"--kv-host-bytes {config.kv.kv_host_bytes}", "any start", "it must be 0 or more",
                      "leave it out, or give a size")
    for module in config.lora.lora_modules:
        if not all(module.partition("=")):
            yield Refusal(f"--lora-modules {module}", "any adapter", "it is not NAME=FOLDER",
                          "write it as --lora-modules NAME=FOLDER")
    if config.model.max_model_len == 1:
        yield Refusal("--max-model-len 1", "any request", "a prompt and an answer need 2 tokens", "set 2 or more")
    if kv.gpu_memory_utilization is not None and not 0 < kv.gpu_memory_utilization <= 1:
        yield Refusal(f"--gpu-memory-utilization {kv.gpu_memory_utilization:g}", "any device",
                     "it is a fraction of the memory", "set a number above 0 and up to 1")
    template = config.model.chat_template
    if template is not None and not template.is_file():
        yield Refusal(f"--chat-template {template}", "this disk", "there is no such file", "give a template's path")
    if config.sampling.max_logprobs < -1:
        yield Refusal(f"--max-logprobs {config.sampling.max_logprobs}", "any server", "it counts tokens",
                      "set 0 or more, or -1 for the whole vocabulary")
    if not 0 <= serve.port <= 65535:
        yield Refusal(f"--port {serve.port}", "any network", "ports are 0..65535", "choose another")
    if (serve.ssl_certfile is None) != (serve.ssl_keyfile is None):
        given, lacks = ("certfile", "keyfile") if serve.ssl_certfile is not None else ("keyfile", "certfile")
        yield Refusal(f"--ssl-{given}", "TLS", "it needs a certificate and its key", f"give --ssl-{lacks} as well")
    endpoint = serve.otlp_traces_endpoint
    if endpoint is not None and not endpoint.startswith(("http://", "https://")):
        yield Refusal(f"--otlp-traces-endpoint {endpoint}", "OTLP over HTTP", "it is no http or https URL",
                      "give the whole one, such as http://localhost:4318/v1/traces")
    if serve.request_timeout is not None and not serve.request_timeout > 0:
        yield Refusal(f"--request-timeout {serve.request_timeout:g}", "any request", "it must be above 0",
                      "leave it out")
    for name, lowest in (("stall_timeout", 1), ("engine_restarts", 0), ("max_live_requests", 1),
                         ("max_body_bytes", 1024)):
        if getattr(serve, name) < lowest:
            yield Refusal(f"--{name.replace('_', '-')} {getattr(serve, name)}", "any server",
                         f"it must be at least {lowest}", "leave it out")


def _exclusive(config: Config) -> Iterator[Refusal]:
    kv, speculation = config.kv, config.speculation
    sizes = {"--kv-memory": kv.kv_memory, "--kv-tokens": kv.kv_tokens,
             "--gpu-memory-utilization": kv.gpu_memory_utilization}
    given = [flag for flag, value in sizes.items() if value is not None]
    if len(given) > 1:
        yield Refusal(given[0], given[1], "both size the KV cache", "keep one of them")
    tokens = speculation.speculation_tokens
    if speculation.speculation == "off" and tokens not in (0, "auto"):
        yield Refusal(f"--speculation-tokens {tokens}", "--speculation off",
                     "there is no drafter to propose them", "name a drafter with --speculation")
    if tokens != "auto" and tokens < 0:
        yield Refusal(f"--speculation-tokens {tokens}", "any drafter",
                     "it must be 0 or more", "set 0 or more")


class _Resolution:
    """One run of `resolve`. Each method decides one section and notes its decisions; refusals are collected."""

    def __init__(self, config: Config, facts: Facts):
        self.config, self.facts, self.model = config, facts, facts.model
        self.drafter = None if config.speculation.speculation == "off" else facts.drafter
        self.groups = self._union_of_groups()
        self.decisions: list[Decision] = []
        self.refusals: list[Refusal] = []

    def result(self) -> Resolved:
        check_values(self.config)
        device = self._device()
        width, lookahead = self._speculation()
        self._parallel(device)
        self._stop_if_refused()
        assert device is not None  # or it was refused
        device = self._smallest(device)
        dtype = self._dtype(device)
        context = self._context()
        page_size = self.config.kv.page_size or DEFAULT_PAGE_SIZE
        seqs, budget, chunk = self._sizes(device, dtype, width, context, page_size)
        memory = self._memory(device, dtype, (seqs, budget), width, context, page_size)
        self._stop_if_refused()
        need = chunk + 2 * (width + 1) + lookahead + page_size
        pages, tokens = self._pages(memory.kv, dtype, page_size, seqs, need)
        context = self._fit_context(context, tokens - width - lookahead, page_size)
        page_bytes = tuple(self._page_bytes(dtype, page_size))
        host_pages = self._host_pages(device, memory, pages, page_bytes)
        self._stop_if_refused()
        self._refuse_changes()
        mixed, overlap, prefix = self._switches(device)
        sampling = self._sampling_defaults()
        return Resolved(
            config=self.config, model_name=self.model.name, device=device.kind, dtype=dtype, max_model_len=context,
            seed=self.config.model.seed, page_size=page_size, pages=pages,
            windows=tuple(group.window for group in self.groups), kv_tokens=tokens, prefix_caching=prefix,
            host_pages=host_pages, page_bytes=page_bytes,
            max_num_seqs=seqs, max_num_batched_tokens=budget, chunk_size=chunk, mixed_chunk=mixed,
            depth=1 if overlap else 0, cap_policy=self.config.schedule.cap_policy,
            drafter=self.config.speculation.speculation if width else None, speculation_tokens=width,
            elastic=bool(width) and self.config.speculation.speculation_tokens == "auto",
            lookahead=lookahead, sampling_defaults=sampling, memory=memory, decisions=tuple(self.decisions))

    def _note(self, feature: str, asked: object, now: object, why: str = "", changed: bool = False) -> None:
        self.decisions.append(Decision(feature, _shown(asked), _shown(now), why, changed))

    def _refuse(self, feature: str, component: str, why: str, remedy: str) -> None:
        self.refusals.append(Refusal(feature, component, why, remedy))

    def _stop_if_refused(self) -> None:
        if self.refusals:
            raise ConfigError(self.refusals)

    # ------------------------------------------------------------------------------------------ device and type
    def _device(self) -> DeviceFacts | None:
        asked, found = self.config.model.device, self.facts.devices
        if asked not in ("auto", *DEVICES):
            self._refuse(f"--device {asked}", "engine stretto", f"it runs on {' and '.join(DEVICES)}",
                         "choose one of them")
            return None
        if asked == "auto":
            why = "a CUDA device is present" if found[0].kind == "cuda" else "no CUDA device is present"
            self._note("device", "auto", found[0].kind, why)
            return found[0]
        match = next((device for device in found if device.kind == asked), None)
        if match is None:
            self._refuse(f"--device {asked}", "this machine", "PyTorch finds no such device here",
                         "run `stretto doctor`, or choose --device cpu")
        else:
            self._note("device", asked, asked)
        return match

    def _dtype(self, device: DeviceFacts) -> str:
        asked = self.config.model.dtype
        if asked != "auto":
            self._note("dtype", asked, asked)
            return asked
        now, why = self._auto_dtype(device)
        self._note("dtype", "auto", now, why)
        return now

    def _auto_dtype(self, device: DeviceFacts) -> tuple[str, str]:
        stored = self.model.dtype
        if device.kind == "cuda":
            if stored == "float16" or not device.bfloat16:
                return "float16", f"stored as {stored}" if stored == "float16" else "this GPU has no bfloat16"
            return "bfloat16", f"stored as {stored}"
        size = self.model.parameters * ITEM_BYTES["float32"]
        if size > device.memory_free // 2:
            return "bfloat16", f"float32 weights would take {gib(size)} of {gib(device.memory_free)} free memory"
        return "float32", "exact, and fast on every CPU"

    # ------------------------------------------------------------------------------------------ speculation
    def _speculation(self) -> tuple[int, int]:
        """Draft width and lookahead."""
        asked, tokens = self.config.speculation.speculation, self.config.speculation.speculation_tokens
        drafter = self.drafter
        if asked == "off":
            self._acceptance(None)
            self._note("speculation", "off", "off")
            return 0, 0
        if drafter is None:
            self._refuse(f"--speculation {asked}", "this installation", "no drafter of that name is registered",
                         "see `stretto doctor` for the drafters that are")
            return 0, 0
        caps = drafter.caps
        engine = engine_component(model_taps(self.model.n_layers))
        self.refusals += check(drafter_features(drafter.name, caps), [engine])
        if tokens != "auto" and tokens > caps.max_width:
            self._refuse(f"--speculation-tokens {tokens}", f"drafter {drafter.name}",
                         f"it proposes at most {caps.max_width} tokens", f"set {caps.max_width} or fewer")
        width = min(caps.max_width, drafter.usual_width) if tokens == "auto" else tokens
        self._acceptance(drafter)
        why = "each step decides how many pay" if tokens == "auto" else ""
        self._note("speculation", asked, "on" if width else "off", f"up to {width} draft tokens a sequence and step")
        self._note("speculation_tokens", tokens, f"0..{width}" if tokens == "auto" else width, why)
        return width, caps.lookahead if width else 0

    def _parallel(self, device: DeviceFacts | None) -> None:
        ranks, config = self.config.parallel.tensor_parallel_size, self.config
        self._note("tensor_parallel_size", ranks, ranks, "the ranks share each layer" if ranks > 1 else "")
        if ranks == 1:
            return
        flag = f"--tensor-parallel-size {ranks}"
        if device is not None and device.kind == "cuda" and 1 + len(device.others) < ranks:
            count = 1 + len(device.others)
            self._refuse(flag, "this machine", f"it has {count} GPU{'s' * (count > 1)}", f"set {count} or fewer")
        if not self.model.native:
            self._refuse(flag, f"model {self.model.name}", "it runs through transformers' own modules, which are not"
                         " cut into ranks", "set it to 1")
        for on, feature, why in ((config.lora.on, "--enable-lora", "adapters are not cut into ranks"),
                                 (config.model.deterministic, "--deterministic", "sums over ranks round otherwise"),
                                 (config.kv.kv_host_bytes, "--kv-host-bytes", "each rank would time its own copies")):
            if on:
                self._refuse(flag, feature, why, "leave one of them out")

    def _smallest(self, device: DeviceFacts) -> DeviceFacts:
        """The device whose memory decides: every rank has as many pages."""
        others = device.others[: self.config.parallel.tensor_parallel_size - 1]
        if device.kind == "cpu":  # one memory for all ranks
            ranks = self.config.parallel.tensor_parallel_size
            return replace(device, memory_total=device.memory_total // ranks, memory_free=device.memory_free // ranks)
        total, free = min([(device.memory_total, device.memory_free), *others], key=lambda memory: memory[1])
        return replace(device, memory_total=total, memory_free=free)

    # ------------------------------------------------------------------------------------------ sizes of a step
    def _context(self) -> int:
        asked, most = self.config.model.max_model_len, self.model.context
        if asked is not None and asked > most:
            self._refuse(f"--max-model-len {asked}", f"model {self.model.name}", f"its context is {most} tokens",
                         f"set {most} or fewer")
        return most if asked is None else asked

    def _sizes(self, device: DeviceFacts, dtype: str, width: int, context: int, page: int) -> tuple[int, int, int]:
        """Sequences, tokens of a step, tokens of a chunk. What was not set shrinks until the buffers of a step fit."""
        asked = self.config.schedule
        seqs = asked.max_num_seqs or DEFAULT_SEQS[device.kind]
        budget = asked.max_num_batched_tokens or DEFAULT_STEP_TOKENS[device.kind]
        room = SCRATCH_SHARE * max(device.memory_free - self._weights(dtype), 0)
        fitted_budget, fitted_seqs = budget, seqs
        while asked.max_num_batched_tokens is None and fitted_budget > LEAST_STEP_TOKENS \
                and self._step_buffers(dtype, fitted_seqs, fitted_budget, width) > room:
            fitted_budget //= 2
        while asked.max_num_seqs is None and fitted_seqs > 1 and \
                self._slot_table(fitted_seqs, context, page, width) \
                + self._step_buffers(dtype, fitted_seqs, fitted_budget, width) > room:
            fitted_seqs //= 2
        why = "fitted to the memory that the weights leave"
        self._note("max_num_seqs", asked.max_num_seqs, fitted_seqs, why if fitted_seqs < seqs else "",
                   fitted_seqs < seqs)
        self._note("max_num_batched_tokens", asked.max_num_batched_tokens, fitted_budget,
                   why if fitted_budget < budget else "", fitted_budget < budget)
        return fitted_seqs, fitted_budget, self._chunk(device, fitted_budget, width)

    def _chunk(self, device: DeviceFacts, budget: int, width: int) -> int:
        asked = self.config.schedule.chunk_size
        if budget < 1 + width:
            self._refuse(f"--max-num-batched-tokens {budget}", f"--speculation-tokens {width}",
                         f"a sequence with {width} draft tokens needs {1 + width} tokens of a step",
                         f"set {1 + width} or more")
        if asked is not None and asked > budget:
            self._refuse(f"--chunk-size {asked}", f"--max-num-batched-tokens {budget}",
                         "a chunk cannot be larger than a step", "lower the one or raise the other")
        chunk = min(DEFAULT_CHUNK[device.kind], budget) if asked is None else asked
        self._note("chunk_size", asked, chunk)
        return chunk

    # ------------------------------------------------------------------------------------------ memory
    def _weights(self, dtype: str) -> int:
        """On one device: the embedding whole, the rest cut."""
        embedding = self.model.vocab_size * self.model.hidden_size
        cut = (self.model.parameters - embedding) // self.config.parallel.tensor_parallel_size
        return (embedding + max(cut, 0)) * ITEM_BYTES[dtype]

    def _step_buffers(self, dtype: str, seqs: int, budget: int, width: int) -> int:
        """Activations of one layer at the widest step, and three copies of the logits."""
        logit_rows = min(budget, seqs * (1 + width))
        activations = budget * (6 * self.model.hidden_size + 3 * self.model.intermediate_size) * ITEM_BYTES[dtype]
        return activations + 3 * 4 * logit_rows * self.model.vocab_size

    def _acceptance(self, drafter: DrafterFacts | None) -> None:
        """Refuses rejection sampling where nobody knows what the drafts were drawn from."""
        asked = self.config.speculation.acceptance_method
        if asked == "rejection" and drafter is None:
            self._refuse("--acceptance-method rejection", "--speculation off", "without drafts nothing is accepted",
                         "leave it out, or choose a drafter")
        elif asked == "rejection" and drafter is not None:
            component = Component("drafter", drafter.name, frozenset({"drafter:q"} if drafter.caps.q == "full" else ()))
            self.refusals += check([REJECTION], [component])
            if self.config.model.deterministic:
                self._refuse("--deterministic", "--acceptance-method rejection",
                             "a seed's text depends on which positions were drafted", "leave one of them out")
        if drafter is not None:
            self._note("acceptance method", asked, asked, "a seed's text depends on what was drafted, its distribution"
                       " does not" if asked == "rejection" else "")

    def _slot_table(self, seqs: int, context: int, page_size: int, width: int) -> int:
        """The token log, a page table for each KV group, the drafter's seam, and what drafts were drawn from."""
        taps = self.drafter.tap_values if self.drafter else 0
        drawn = width * self.model.vocab_size if self.config.speculation.acceptance_method == "rejection" else 0
        return 4 * (seqs + 1) * (context + len(self.groups) * (context // page_size + 1) + taps + drawn)

    def _memory(self, device: DeviceFacts, dtype: str, step: tuple[int, int], width: int, context: int,
                page_size: int) -> MemoryPlan:
        seqs, budget = step
        buffers = self._step_buffers(dtype, seqs, budget, width)
        buffers += HOST_STAGING if self.config.kv.kv_host_bytes else 0
        draft = self.drafter.parameters * ITEM_BYTES[dtype] if self.drafter else 0
        adapters = self.facts.adapter_values * ITEM_BYTES[dtype]
        plan = MemoryPlan(self._weights(dtype), draft, adapters, buffers,
                          self._slot_table(seqs, context, page_size, width), kv=0)
        kv, why = self._kv_bytes(device, dtype, plan.budget)
        asked = self.config.kv
        said = asked.kv_tokens or (gib(asked.kv_memory) if asked.kv_memory else asked.gpu_memory_utilization)
        if kv <= 0:
            self._refuse(f"model {self.model.name}", f"the memory of {device.name}",
                         f"weights and buffers take {gib(plan.budget)} of {gib(device.memory_free)} free",
                         "choose a smaller model or dtype, or lower --max-num-batched-tokens")
        elif kv + plan.budget > device.memory_free:
            self._refuse(f"a KV cache of {gib(kv)}", f"the memory of {device.name}",
                         f"weights and buffers take {gib(plan.budget)}, and only {gib(device.memory_free)} are free",
                         "lower --kv-memory or --kv-tokens")
        self._note("KV memory", said, gib(max(kv, 0)), why)
        return replace(plan, kv=max(kv, 0))

    def _kv_bytes(self, device: DeviceFacts, dtype: str, taken: int) -> tuple[int, str]:
        asked, left = self.config.kv, device.memory_free - taken
        if asked.kv_memory is not None:
            return asked.kv_memory, ""
        if asked.kv_tokens is not None:
            page = asked.page_size or DEFAULT_PAGE_SIZE
            pages = -(-asked.kv_tokens // page) + 1
            return pages * sum(self._page_bytes(dtype, page)), f"{asked.kv_tokens} tokens"
        if device.kind == "cpu":
            if asked.gpu_memory_utilization is not None:
                self._refuse(f"--gpu-memory-utilization {asked.gpu_memory_utilization:g}", "--device cpu",
                             "it is a fraction of a GPU's memory", "set --kv-memory instead")
            return self._cpu_kv_bytes(dtype, left)
        share = DEFAULT_UTILIZATION if asked.gpu_memory_utilization is None else asked.gpu_memory_utilization
        used_by_others = device.memory_total - device.memory_free
        return (min(int(share * device.memory_total) - used_by_others - taken, left),
                f"{share:.0%} of {gib(device.memory_total)}, less weights and buffers")

    def _cpu_kv_bytes(self, dtype: str, left: int) -> tuple[int, str]:
        """Not more than every sequence could use at full context, half of what is free, or 4 GiB."""
        seqs = self.config.schedule.max_num_seqs or DEFAULT_SEQS["cpu"]
        context = self.config.model.max_model_len or self.model.context
        page = self.config.kv.page_size or DEFAULT_PAGE_SIZE
        most = 2 * seqs * (context // page + 2) * sum(self._page_bytes(dtype, page))
        bounds = [(CPU_KV_CEILING, "the ceiling on a CPU; set --kv-memory for more"),
                  (int(CPU_KV_SHARE * left), f"half of the {gib(max(left, 0))} that the weights leave free"),
                  (most, f"twice what {seqs} sequences of {context} tokens need")]
        return min(bounds)

    def _union_of_groups(self) -> tuple[KVGroupFacts, ...]:
        """The model's and the drafter's layers of one window share a group, since they share its page table."""
        own = self.drafter.kv_groups if self.drafter else ()
        heads, ranks = self.model.n_kv_heads, max(1, self.config.parallel.tensor_parallel_size)
        held = max(1, heads // ranks)  # KV heads of a rank
        values = {group.window: group.values * held // heads if ranks > 1 else group.values
                  for group in self.model.kv_groups}
        for group in own:
            values[group.window] = values.get(group.window, 0) + group.values
        order = sorted(values, key=lambda window: (window is not None, window or 0))
        return tuple(KVGroupFacts(window, values[window]) for window in order)

    def _page_bytes(self, dtype: str, page_size: int) -> list[int]:
        """Of each group. The drafter's taps lie beside the pages of group 0."""
        taps = self.drafter.tap_values if self.drafter else 0
        return [(group.values * page_size + (taps if index == 0 else 0)) * ITEM_BYTES[dtype]
                for index, group in enumerate(self.groups)]

    def _pages(self, kv: int, dtype: str, page_size: int, seqs: int, need: int) -> tuple[tuple[int, ...], int]:
        """Pages per group, null page included, and the tokens of one sequence that they hold.

        A window group never needs more than `seqs` windows (and as much again, so that prefixes can stay cached); what
        it leaves goes to the full groups:

            full group     |<------------------------------ tokens ------------------------------>|
            window group   |<-- 2 * seqs * (window + need) -->|   or as many as the full group, if fewer
        """
        groups, asked = self.groups, self.config.kv.kv_tokens
        if asked is not None:
            count = -(-asked // page_size)
            return (count + 1,) * len(groups), count * page_size
        each = self._page_bytes(dtype, page_size)
        equal = kv // sum(each)
        pages = [equal if group.window is None else min(equal, -(-2 * seqs * (group.window + need) // page_size) + 1)
                 for group in groups]
        left = kv - sum(count * size for count, size in zip(pages, each))
        full = [index for index, group in enumerate(groups) if group.window is None]
        for index in full:
            pages[index] += left // sum(each[i] for i in full)
        if min(pages) < 2:
            self._refuse(f"page size {page_size}", f"a KV cache of {gib(kv)}", "it does not hold two pages",
                         "give more --kv-memory or a smaller --page-size")
        held = [(count - 1) * page_size for count, group in zip(pages, groups) if group.window is None]
        return tuple(pages), min(held) if held else self._window_tokens(pages, page_size, need)

    def _host_pages(self, device: DeviceFacts, memory: MemoryPlan, pages: tuple[int, ...],
                    page_bytes: tuple[int, ...]) -> tuple[int, ...]:
        """Each group has the share of host memory that it has of the device's. Refused where it does not fit."""
        asked = self.config.kv.kv_host_bytes
        if not asked:
            self._note("kv_host_bytes", asked, False, "KV that leaves the device is computed again")
            return ()
        held = [count - 1 for count in pages]  # but for the null page
        if min(held) < 1:  # refused for that already
            return ()
        ranks = self.config.parallel.tensor_parallel_size
        share = asked / ranks / sum(count * size for count, size in zip(held, page_bytes))
        host_pages = tuple(int(count * share) for count in held)
        cpu = next((found for found in self.facts.devices if found.kind == "cpu"), device)
        free = cpu.memory_free - (ranks * memory.budget if device.kind == "cpu" else 0)
        if min(host_pages) < 1:
            whole = sum(count * size for count, size in zip(held, page_bytes))
            least = ranks * max(whole // count + 1 for count in held)
            self._refuse(f"--kv-host-bytes {gib(asked)}", f"page size {self.config.kv.page_size or DEFAULT_PAGE_SIZE}",
                         "it does not hold one page of each KV group",
                         f"give {gib(least)} or more, or a smaller --page-size")
        elif asked > free:
            self._refuse(f"--kv-host-bytes {gib(asked)}", "the memory of this machine",
                         f"{gib(max(free, 0))} of it are free", "give less")
        full = [n for n, group in zip(host_pages, self.groups) if group.window is None] or host_pages
        tokens = min(full) * (self.config.kv.page_size or DEFAULT_PAGE_SIZE)
        why = f"{tokens} tokens, copied back where that beats computing them"
        if device.kind == "cpu":
            why += "; on a CPU as much more --kv-memory does the same without copies"
        self._note("kv_host_bytes", gib(asked), gib(asked), why)
        return host_pages

    def _window_tokens(self, pages: list[int], page_size: int, need: int) -> int:
        """Where every layer has a window, pages behind it are given back, so a sequence of any length runs once the
        widest window and a step fit."""
        fits = all((count - 1) * page_size >= (group.window or 0) + need
                   for count, group in zip(pages, self.groups))
        return self.model.context + need if fits else (min(pages) - 1) * page_size

    def _fit_context(self, context: int, room: int, page_size: int) -> int:
        asked = self.config.model.max_model_len
        least = min(LEAST_CONTEXT, context)
        if context > room and asked is not None:
            self._refuse(f"--max-model-len {asked}", "the KV cache", f"it holds a sequence of {max(room, 0)} tokens",
                         f"give it more memory, or set --max-model-len {max(room, 0)} or fewer")
        elif context > room and room < least:
            self._refuse(f"model {self.model.name}", "the KV cache",
                         f"it holds a sequence of {max(room, 0)} tokens; {least} are the least that make sense",
                         "give it more memory with --kv-memory")
        fitted = min(context, room)
        why = f"what the KV cache holds; the model has {context}: set it, or give more --kv-memory" \
            if fitted < context else ("the model's context" if asked is None else "")
        self._note("max_model_len", asked, fitted, why, changed=fitted < context)
        self._note("page_size", self.config.kv.page_size, page_size)
        return fitted

    # ------------------------------------------------------------------------------------------ switches
    def _sampling_defaults(self) -> tuple[tuple[str, float], ...]:
        asked, found = self.config.serve.generation_config, self.model.sampling_defaults
        now = found if asked == "auto" else ()
        why = "the model's generation_config.json; requests may say otherwise" if now else "those of the OpenAI API"
        if found and not now:
            why += f"; generation_config.json has {_listed(found)}"
        self._note("sampling defaults", asked, _listed(now) or "OpenAI's", why)
        return now

    def _refuse_changes(self) -> None:
        """With --strict, what was fitted to this machine is refused instead."""
        for decision in self.decisions if self.config.model.strict else ():
            if decision.changed:
                self._refuse(f"{decision.feature} {decision.asked}", "--strict",
                             f"it would be {decision.now}: {decision.why}",
                             f"set --{decision.feature.replace('_', '-')} {decision.now}")
        self._stop_if_refused()

    def _graphs(self, eager: bool, device: DeviceFacts) -> None:
        """A note only: whoever makes the device half reads what was asked."""
        why = "a CPU has none" if device.kind == "cpu" else "" if eager else "captured at start, and when first needed"
        self._note("CUDA graphs", not eager, device.kind == "cuda" and not eager, why)

    def _switches(self, device: DeviceFacts) -> tuple[bool, bool, bool]:
        schedule, kv = self.config.schedule, self.config.kv
        mixed = schedule.mixed_chunk is not False
        overlap = schedule.overlap is not False
        prefix = kv.prefix_caching is not False
        self._note("mixed steps", schedule.mixed_chunk, mixed,
                   "prompt chunks ride with running sequences" if mixed else "")
        self._note("overlap", schedule.overlap, overlap, "1 step in flight" if overlap else "")
        for name in ("logprobs_mode", "max_logprobs"):
            self._note(name, getattr(self.config.sampling, name), getattr(self.config.sampling, name))
        code = self.config.sampling.enable_custom_logit_processor
        self._note("code of requests", code, code, "every client can run code in the engine" if code else "")
        fixed = self.config.model.deterministic
        self._note("deterministic", fixed, fixed,
                   "one order of summing for every row, at a cost in speed" if fixed else "")
        self._lora()
        self._note("cap policy", schedule.cap_policy, schedule.cap_policy)
        self._note("prefix caching", kv.prefix_caching, prefix)
        self._graphs(schedule.enforce_eager, device)
        template, strict = self.config.model.chat_template, self.config.model.strict
        self._note("chat template", template, template or "the model's own")
        self._note("strict", strict, strict, "nothing was fitted" if strict else "")
        for name in ("slo_itl_ms", "max_sessions", "session_ttl", "session_queue"):
            self._note(name, getattr(schedule, name), getattr(schedule, name))
        return mixed, overlap, prefix


    def _lora(self) -> None:
        lora = self.config.lora
        room = f"{lora.max_loras} adapters of rank {lora.max_lora_rank}"
        self._note("LoRA adapters", lora.on, f"room for {room}" if lora.on else "off")
        if lora.on and self.config.model.deterministic:
            self._refuse("--enable-lora", "--deterministic", "how an adapter's products round depends on the batch",
                         "merge the adapter into the model, or leave one of them out")


def _listed(values: tuple[tuple[str, float], ...]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in values)


def _shown(value: object) -> str:
    if value is None:
        return "auto"
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)


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
