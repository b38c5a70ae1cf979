"""From what was asked and what was found to what will run: `resolve`, called once. No torch in this module.

    Config, Facts  ->  every value decided, each with a Decision  ->  Resolved
                       every conflict that could be found         ->  ConfigError with all of them
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from stretto.compat import (
    DEVICES,
    REJECTION,
    Component,
    ConfigError,
    Refusal,
    check,
    drafter_features,
    engine_component,
    model_taps,
)
from stretto.config import (
    GIB,
    HOST_STAGING,
    Config,
    Decision,
    DeviceFacts,
    DrafterFacts,
    Facts,
    KVGroupFacts,
    MemoryPlan,
    Resolved,
    ServeSection,
    gib,
)
from stretto.replicas.offers import DEFAULT_GATEWAY, OFFERS
from stretto.wire import STATE, state_cells

LOOPBACK = ("127.0.0.1", "::1", "localhost")
FP8 = "fp8_e4m3"
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, FP8: 1}
DEFAULT_PAGE_SIZE = 16
DEFAULT_STATE_INTERVAL = 256  # tokens
STATES_SHARE = 2  # at most 1 / so much of the KV memory holds kept states
DEFAULT_UTILIZATION = 0.9  # of a GPU's memory
CPU_KV_CEILING = 4 * GIB  # KV memory on a CPU, where not set
CPU_KV_SHARE = 0.5  # of the memory that the weights leave free, where not set
DEFAULT_SEQS = {"cpu": 64, "cuda": 256}
DEFAULT_STEP_TOKENS = {"cpu": 512, "cuda": 8192}
DEFAULT_CHUNK = {"cpu": 512, "cuda": 2048}
GRAPH_MEMORY = GIB  # kept for CUDA graphs: 50 of an 8B model take 0.4 GiB, up to `graphs.MOST_LATER` more come later
RANKS_MEMORY = GIB // 2  # kept where several GPUs share a model: NCCL's buffers, and memory for small sums
LEAST_STEP_TOKENS = 64
LEAST_CONTEXT = 64
LARGE_ON_CPU = 2 * GIB  # float32 weights above this are avoided where they can stay packed
SCRATCH_SHARE = 0.25  # most of the memory left by the weights that step buffers take, where the sizes were not set




def resolve(config: Config, facts: Facts) -> Resolved:
    """The configuration as it will run on this machine with this model.

    Raises ConfigError, with every refusal that could be found, where something that was set cannot be kept."""
    return _Resolution(config, facts).result()


def check_values(config: Config) -> None:
    """Refuses values that no machine and no model could take; `resolve` begins with it. Raises ConfigError."""
    if refusals := [*_ranges(config), *_of_the_server(config.serve), *_exclusive(config)]:
        raise ConfigError(refusals)


def _of_the_server(serve: ServeSection) -> Iterator[Refusal]:
    """What no server could be told."""
    for name in ("api_key", "admin_api_key", "served_model_name"):
        if not all(getattr(serve, name)):
            yield Refusal(f"--{name.replace('_', '-')} ''", "any request", "an empty one opens and names nothing",
                          "leave it out, or give one; a variable of the shell may be unset")
    if not serve.drain_timeout >= 0:
        yield Refusal(f"--drain-timeout {serve.drain_timeout:g}", "any server", "it must be 0 or more", "leave it out")
    if serve.root_path and not serve.root_path.startswith("/"):
        yield Refusal(f"--root-path {serve.root_path}", "any URL", "a path begins with /",
                      f"write it as /{serve.root_path}")
    for origin in serve.allowed_origins:
        if origin not in ("*", "null") and ("://" not in origin or origin.endswith("/")):
            yield Refusal(f"--allowed-origins {origin}", "any browser",
                          "it sends an origin as scheme://host or scheme://host:port, without a / at its end",
                          "write it so, or * for any")
    usual = ServeSection()
    for name in ("host", "port"):
        if serve.uds is not None and getattr(serve, name) != getattr(usual, name):
            yield Refusal(f"--{name} {getattr(serve, name)}", f"--uds {serve.uds}",
                          "a server listens on a socket of the disk or on a port", "leave out one of them")


def _ranges(config: Config) -> Iterator[Refusal]:
    kv, schedule, serve = config.kv, config.schedule, config.serve
    counts = {"--max-model-len": config.model.max_model_len, "--page-size": kv.page_size,
              "--state-interval": kv.state_interval, "--kv-memory": kv.kv_memory, "--kv-tokens": kv.kv_tokens,
              "--max-num-seqs": schedule.max_num_seqs,
              "--max-num-batched-tokens": schedule.max_num_batched_tokens, "--chunk-size": schedule.chunk_size,
              "--tensor-parallel-size": config.parallel.tensor_parallel_size,
              "--replicas": serve.replicas}
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
        yield Refusal(f"--slo-itl-ms {schedule.slo_itl_ms:g}", "any step", "each takes some time", "set more than 0")
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
    if config.serve.replicas > 1:
        yield from _behind_gateway(config)
    elif config.serve.gateway is not None:
        yield Refusal(f"--gateway {config.serve.gateway}", f"--replicas {config.serve.replicas}",
                     "one server stands behind no gateway", "set --replicas, or leave out --gateway")


def _behind_gateway(config: Config) -> Iterator[Refusal]:
    """What has no meaning for several servers behind a gateway, or is more than this one can do."""
    serve, file = config.serve, config.schedule.session_file
    name = serve.gateway or DEFAULT_GATEWAY
    many, gateway, offer = f"--replicas {serve.replicas}", f"--gateway {name}", OFFERS[name]
    if serve.uds is not None:
        yield Refusal(f"--uds {serve.uds}", many, "the gateway listens on a port", "leave out one of them")
    if serve.root_path:
        yield Refusal(f"--root-path {serve.root_path}", many, "the gateway knows no path in front of its own",
                      "let the proxy in front strip the path, and leave it out")
    if file is not None:
        yield Refusal(f"--session-file {file}", many, "a session goes on at another replica while its own is away, and"
                      " the file would bring back what it was before", "leave it out: clients send the history again")
    if config.lora.on and not offer.every_name:
        yield Refusal("--enable-lora", gateway, "it passes on the name of one model alone", "choose another --gateway")
    if serve.ssl_certfile is not None and not offer.tls:
        yield Refusal("--ssl-certfile", gateway, "it serves no TLS", "choose another --gateway, or a proxy in front")
    if not (offer.guarded or serve.host in LOOPBACK):
        yield Refusal(f"--host {serve.host}", gateway, "whoever reaches it can add servers to it",
                      "listen on 127.0.0.1 behind a proxy that passes on /v1, or choose another --gateway")


class _Resolution:
    """One run of `resolve`. Each method decides one section and notes its decisions; refusals are collected."""

    def __init__(self, config: Config, facts: Facts):
        self.config, self.facts, self.model = config, facts, facts.model
        self.drafter = None if config.speculation.speculation == "off" else facts.drafter
        self.groups = self._union_of_groups()
        self.kind, self.kv_dtype = "cpu", "float32"  # decided below
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
        self.kind, dtype = device.kind, self._dtype(device)
        self._native_kernels(device)
        self._quantised(dtype)
        self.kv_dtype = self._kv_dtype(device, dtype)
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
        mixed, overlap, prefix = self._switches(device)
        self._note_states(page_size)
        sampling = self._sampling_defaults()
        self._stop_if_refused()
        self._refuse_changes()
        return Resolved(
            config=self.config, model_name=self.model.name, device=device.kind, dtype=dtype, max_model_len=context,
            seed=self.config.model.seed, page_size=page_size,
            kv_dtype=self.kv_dtype, pages=pages,
            windows=tuple(group.window for group in self.groups),
            state_every=self._state_every(page_size), kv_tokens=tokens, prefix_caching=prefix,
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

    def _native_kernels(self, device: DeviceFacts) -> None:
        if device.kind == "cpu":
            names: dict[str, list[str]] = {}
            for name, why in device.missing:
                names.setdefault(why, []).append(name)
            self._note("native kernels", "", ", ".join(device.kernels) or "none",
                       "; ".join(f"without {', '.join(some)}: {why}" for why, some in names.items()))

    def _quantised(self, dtype: str) -> None:
        """A note of quantised weights: kept in their bits as far as this device has kernels for them, or as numbers."""
        if self.model.packed_bytes:
            packed, numbers = self._packed_bytes(dtype), self.model.parameters * ITEM_BYTES[dtype]
            self._note("quantised weights", "", gib(numbers if packed is None else packed),
                       f"dequantised to {dtype}: they stay packed with {self._packing_types()}" if packed is None else
                       f"as {dtype} all would take {gib(numbers)}")

    def _packing_types(self) -> str:
        if self.kind == "cuda":
            return "--dtype bfloat16 and float16, and without --deterministic"
        if self.model.exact_packed_bytes is None:
            return "--dtype bfloat16, and in float32 where there are native kernels"
        return "--dtype float32 and bfloat16"

    def _kv_dtype(self, device: DeviceFacts, dtype: str) -> str:
        asked = self.config.kv.kv_cache_dtype
        now = dtype if asked == "auto" else asked
        if now == FP8 and not device.fp8:
            self._refuse(f"--kv-cache-dtype {FP8}", f"device {device.name}",
                         "its kernels have no such numbers, which came with compute capability 8.9",
                         "leave it out, or set bfloat16")
        self._note("kv_cache_dtype", asked, now, "that of --dtype" if asked == "auto" else
                   "rounds keys and values to 4 significant bits" if now == FP8 else "")
        return now

    def _auto_dtype(self, device: DeviceFacts) -> tuple[str, str]:
        stored = self.model.dtype
        if device.kind == "cuda":
            if stored == "float16" or not device.bfloat16:
                return "float16", f"stored as {stored}" if stored == "float16" else "this GPU has no bfloat16"
            return "bfloat16", f"stored as {stored}"
        exact = self.model.exact_packed_bytes
        size = self.model.parameters * ITEM_BYTES["float32"] if exact is None else exact
        if size > device.memory_free // 2:
            return "bfloat16", f"float32 weights would take {gib(size)} of {gib(device.memory_free)} free memory"
        packed = dict(self.model.packed_bytes).get("cpu")
        if packed is not None and packed < size // 4 and size > LARGE_ON_CPU:
            return "bfloat16", f"weights stay packed, {gib(packed)} instead of {gib(size)} of float32"
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
        ranks = self.config.parallel.tensor_parallel_size
        self._note("tensor_parallel_size", ranks, ranks, "the ranks share each layer" if ranks > 1 else "")
        if (replicas := self.config.serve.replicas) > 1:
            self._note("replicas", replicas, replicas, "each is a server of its own with these settings")
        if ranks == 1:
            return
        flag = f"--tensor-parallel-size {ranks}"
        if device is not None and device.kind == "cuda" and 1 + len(device.others) < ranks:
            count = 1 + len(device.others)
            self._refuse(flag, "this machine", f"it has {count} GPU{'s' * (count > 1)}", f"set {count} or fewer")
        if not self.model.native:
            self._refuse(flag, f"model {self.model.name}", "it runs through transformers' own modules, which are not"
                         " cut into ranks", "set it to 1")

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
        room = SCRATCH_SHARE * max(device.memory_free - self._weights(dtype) - self._unpacked(dtype), 0)
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
        ranks, packed = self.config.parallel.tensor_parallel_size, self._packed_bytes(dtype)
        embedding = self.model.vocab_size * self.model.hidden_size
        if packed is not None:
            whole = min(embedding * ITEM_BYTES[dtype], packed)
            return whole + (packed - whole) // ranks
        cut = (self.model.parameters - embedding) // ranks
        return (embedding + max(cut, 0)) * ITEM_BYTES[dtype]

    def _packed_bytes(self, dtype: str) -> int | None:
        """Of all weights, where quantised ones are kept in their bits; see `model.packed_matrix.stays_packed`."""
        sixteen = dict(self.model.packed_bytes).get(self.kind)
        if self.kind == "cpu":
            return {"float32": self.model.exact_packed_bytes, "bfloat16": sixteen}.get(dtype)
        return None if ITEM_BYTES[dtype] != 2 or self.config.model.deterministic else sixteen

    def _unpacked(self, dtype: str) -> int:
        """For the matrix that many rows are multiplied by, made anew of packed weights; graphs have memory of their
        own for it."""
        if self.kind != "cuda" or self._packed_bytes(dtype) is None:
            return 0
        places = 1 if self.config.schedule.enforce_eager else 2
        return places * self.model.unpacked_bytes // self.config.parallel.tensor_parallel_size

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
        """The token log, a page table for each KV group, the drafter's seam, what drafts were drawn from, states."""
        taps = self.drafter.tap_values if self.drafter else 0
        taps += state_cells(width) * sum(group.values + taps for group in self.groups if group.window == STATE)
        drawn = width * self.model.vocab_size if self.config.speculation.acceptance_method == "rejection" else 0
        return 4 * (seqs + 1) * (context + len(self.groups) * (context // page_size + 1) + taps + drawn)

    def _memory(self, device: DeviceFacts, dtype: str, step: tuple[int, int], width: int, context: int,
                page_size: int) -> MemoryPlan:
        seqs, budget = step
        buffers = self._step_buffers(dtype, seqs, budget, width) + self._unpacked(dtype)
        buffers += HOST_STAGING if self.config.kv.kv_host_bytes else 0
        buffers += RANKS_MEMORY if device.kind == "cuda" and self.config.parallel.tensor_parallel_size > 1 else 0
        draft = self.drafter.parameters * ITEM_BYTES[dtype] if self.drafter else 0
        adapters = self.facts.adapter_values * ITEM_BYTES[dtype]
        graphs = GRAPH_MEMORY if device.kind == "cuda" and not self.config.schedule.enforce_eager else 0
        plan = MemoryPlan(self._weights(dtype), draft, adapters, buffers,
                          self._slot_table(seqs, context, page_size, width), graphs, kv=0)
        kv, why = self._kv_bytes(device, dtype, plan.budget)
        asked = self.config.kv
        said = asked.kv_tokens or (gib(asked.kv_memory) if asked.kv_memory else asked.gpu_memory_utilization)
        if kv <= 0:
            self._refuse(f"model {self.model.name}", f"the memory of {device.name}",
                         f"weights and buffers take {gib(plan.budget)} of {gib(device.memory_free)} free",
                         "choose a smaller model or dtype, or lower --max-num-batched-tokens")
        elif kv + plan.budget > device.memory_free:
            self._refuse(f"a KV cache of {gib(kv)}", f"the memory of {device.name}",
                         f"weights, buffers and graphs take {gib(plan.budget)}, and only {gib(device.memory_free)} are"
                         " free", "lower --kv-memory or --kv-tokens")
        self._note("KV memory", said, gib(max(kv, 0)), why)
        return replace(plan, kv=max(kv, 0))

    def _kv_bytes(self, device: DeviceFacts, dtype: str, taken: int) -> tuple[int, str]:
        asked, left = self.config.kv, device.memory_free - taken
        if asked.kv_memory is not None:
            return asked.kv_memory, ""
        if asked.kv_tokens is not None:
            page = asked.page_size or DEFAULT_PAGE_SIZE
            pages = -(-asked.kv_tokens // page) + 1
            sizes = zip(self.groups, self._page_bytes(dtype, page))
            return (sum(size * (self._states(pages, page) if group.window == STATE else pages)
                        for group, size in sizes), f"{asked.kv_tokens} tokens")
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
        every = self._state_every(page)
        most = 2 * seqs * (context // page + 2) * sum(
            -(-size // every) if group.window == STATE else size
            for group, size in zip(self.groups, self._page_bytes(dtype, page)))
        bounds = [(CPU_KV_CEILING, "the ceiling on a CPU; set --kv-memory for more"),
                  (int(CPU_KV_SHARE * left), f"half of the {gib(max(left, 0))} that the weights leave free"),
                  (most, f"twice what {seqs} sequences of {context} tokens need")]
        return min(bounds)

    def _union_of_groups(self) -> tuple[KVGroupFacts, ...]:
        """The model's and the drafter's layers of one window share a group, since they share its page table."""
        own = self.drafter.kv_groups if self.drafter else ()
        heads, ranks = self.model.n_kv_heads, max(1, self.config.parallel.tensor_parallel_size)
        held = max(1, heads // ranks)  # KV heads of a rank
        found: dict[int | None, KVGroupFacts] = {}
        for group in self.model.kv_groups:
            part, of = (1, ranks) if group.window == STATE else (held, heads)
            found[group.window] = (KVGroupFacts(group.window, group.values * part // of, group.heads * part // of)
                                   if ranks > 1 else group)
        for group in own:
            before = found.get(group.window, KVGroupFacts(group.window, 0))
            found[group.window] = KVGroupFacts(group.window, before.values + group.values, before.heads + group.heads)
        return tuple(found[window] for window in sorted(found, key=lambda w: (w is not None, w or 0)))

    def _page_bytes(self, dtype: str, page_size: int) -> list[int]:
        """Of each group. The drafter's taps lie beside the pages of the `state` group, or else of group 0."""
        taps, windows = self.drafter.tap_values if self.drafter else 0, [group.window for group in self.groups]
        beside = windows.index(STATE) if STATE in windows else 0
        scales = int(self.kv_dtype == FP8)
        return [(4 * group.values if group.window == STATE else
                 (group.values * ITEM_BYTES[self.kv_dtype] + group.heads * scales) * page_size)
                + (taps * ITEM_BYTES[dtype] if index == beside else 0) for index, group in enumerate(self.groups)]

    def _state_every(self, page_size: int) -> int:
        """Pages from one kept state to the next."""
        return -(-(self.config.kv.state_interval or DEFAULT_STATE_INTERVAL) // page_size)

    def _states(self, pages: int, page_size: int) -> int:
        """Pages of the `state` group where full groups have so many, the null page included."""
        return -(-pages // self._state_every(page_size)) + 1

    def _pages(self, kv: int, dtype: str, page_size: int, seqs: int, need: int) -> tuple[tuple[int, ...], int]:
        """Pages per group, null page included, and the tokens of one sequence that they hold.

        A window group never needs more than `seqs` windows (and as much again, so that prefixes can stay cached); what
        it leaves goes to the full groups:

            full group     |<------------------------------ tokens ------------------------------>|
            window group   |<-- 2 * seqs * (window + need) -->|   or as many as the full group, if fewer
            state group    |      s      |      s      |      s      |      s      |      s       |   or half of it all
        """
        groups, asked = self.groups, self.config.kv.kv_tokens
        if asked is not None:
            count = -(-asked // page_size)
            return tuple(self._states(count + 1, page_size) if group.window == STATE else count + 1
                         for group in groups), count * page_size
        each = self._page_bytes(dtype, page_size)
        of_states = sum(size for size, group in zip(each, groups) if group.window == STATE)
        equal = kv // (sum(each) - of_states - (-of_states // self._state_every(page_size)))
        states = min(self._states(equal, page_size), max(2, kv // STATES_SHARE // max(of_states, 1)))
        equal = (kv - states * of_states) // max(sum(each) - of_states, 1) if of_states else equal
        pages = [states if group.window == STATE else equal if group.window is None else
                 min(equal, -(-2 * seqs * (group.window + need) // page_size) + 1) for group in groups]
        left = kv - sum(count * size for count, size in zip(pages, each))
        full = [index for index, group in enumerate(groups) if group.window is None]
        for index in full:
            pages[index] += left // sum(each[i] for i in full)
        if min(pages) < 2:
            self._refuse(f"page size {page_size}", f"a KV cache of {gib(kv)}", "it does not hold two pages",
                         "give more --kv-memory or a smaller --page-size")
        held = [(count - 1) * page_size for count, group in zip(pages, groups) if group.window is None]
        return tuple(pages), min(held) if held else self._window_tokens(pages, page_size, need)

    def _note_states(self, page_size: int) -> None:
        """Refuses an interval where nothing has one."""
        asked, every = self.config.kv.state_interval, self._state_every(page_size) * page_size
        if not any(group.window == STATE for group in self.groups):
            if asked is not None:
                self._refuse(f"--state-interval {asked}", f"model {self.model.name}",
                             "none of its layers keeps a state", "leave it out")
            self._note("state_interval", asked, False, "none of the model's layers keeps a state")
            return
        self._note("state_interval", asked, every, "tokens; shared prefixes go on from there")

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
            self._refuse(f"--kv-host-bytes {asked}", f"page size {self.config.kv.page_size or DEFAULT_PAGE_SIZE}",
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
                         "raise --kv-tokens" if self.config.kv.kv_tokens is not None else
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
        for name in ("slo_itl_ms", "max_sessions", "session_ttl", "session_queue", "session_file"):
            value = getattr(schedule, name)
            self._note(name, value, "off" if value is None else value)
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
