"""From a configuration to an engine: find the model, resolve, load, allocate, join the halves.

    Prepared (prepare.py: nothing is loaded)  --build_core-->  EngineCore
                                              --rank_half-->   the device half of another rank
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial

import torch

from stretto import __version__
from stretto.attn.api import AttentionBackend
from stretto.attn.select import choose_backend
from stretto.cache import cache_folder
from stretto.compat import ConfigError, Refusal, attention_component, attention_features, check
from stretto.config import (
    Resolved,
    gib,
)
from stretto.device.graphs import chunk_shapes, tokens_bucket, usual_shapes
from stretto.device.host_pages import PinError
from stretto.device.kv import KVCache, kv_dtype
from stretto.device.ranks import RankFailed, RankShard
from stretto.device.runner import Runner
from stretto.device.slots import SlotTable
from stretto.device.states import kv_groups
from stretto.device.streams import DeviceHalf, LocalDevice, make_device
from stretto.engine.adapters import AdapterLoader
from stretto.engine.core import EngineCore
from stretto.engine.hosts import HostRanks, Meeting, prepare_with, run_follower
from stretto.engine.launch import Launch
from stretto.engine.locate import Located
from stretto.engine.loop import StartFailed
from stretto.engine.prepare import START_FAILURES, Prepared, not_fixed, prepare_located
from stretto.engine.ranks import Ranks
from stretto.engine.step_times import FORMAT, StepTimes, cached
from stretto.host.adapters import Adapters
from stretto.host.cost import CostModel
from stretto.host.elastic import Elastic
from stretto.host.grammar import Grammars
from stretto.host.half import HostHalf
from stretto.host.limits import HostDrafter, HostLimits
from stretto.host.sizes import is_first
from stretto.model.api import CausalModel
from stretto.model.config import read_config, token_ids
from stretto.model.gguf_config import gguf_config
from stretto.model.load import load_model
from stretto.model.lora import AdapterBank
from stretto.model.pooling import pooling_facts
from stretto.model.source import WeightError
from stretto.params import SamplingParams
from stretto.protocol import EngineInfo, LoadAdapter, RequestError
from stretto.report import start_report
from stretto.sample.custom import CustomProcessors, ProcessorError, Registry
from stretto.sample.features import StepShape
from stretto.sample.logprobs import Reporting
from stretto.sample.rejection import Proposals
from stretto.spec.context import DrafterError
from stretto.spec.registry import make_drafter, make_host_drafter
from stretto.text.grammar import GrammarTokenizer, vocabulary
from stretto.text.stream import IncrementalText
from stretto.text.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""(what, done, of how many): loading and warm-up."""

GRAMMAR_PATIENCE = 60.0  # seconds, of servers

def start_core(located: Located) -> EngineCore:
    """Both parts, for a process whose parent has found the model. Raises StartFailed with what a user can understand,
    and compat.ConfigError with every refusal."""
    launch = Launch.of_environment()
    try:
        if launch is None:
            core = build_core(prepare_located(located))
        else:
            meeting = Meeting(launch)
            prepared = prepare_with(meeting, located)
            core = build_core(prepared, ranks=meeting.lead(prepared, located.config.model.deterministic))
    except (*START_FAILURES, RankFailed, TimeoutError) as e:
        raise StartFailed(str(e)) from e
    core.host.bound_patience(GRAMMAR_PATIENCE)
    return core


def build_core(prepared: Prepared, progress: Progress | None = None,
               ranks: Ranks | HostRanks | None = None) -> EngineCore:
    """Loads weights, allocates the KV cache and starts the device half. Call it on the thread that will step it.
    `ranks`: those that there are already; None: they are started where there shall be some."""
    ranks = ranks or start_ranks(prepared)
    try:
        return _build(prepared, ranks, progress)
    except BaseException:
        if ranks is not None:
            ranks.close(failed=True)
        raise


def _build(prepared: Prepared, ranks: Ranks | HostRanks | None, progress: Progress | None) -> EngineCore:
    timings = dict(prepared.timings)
    resolved = prepared.resolved
    torch.manual_seed(resolved.seed or 0)  # nothing samples from it; libraries may
    clock = _Clock(timings)
    tokenizer = load_tokenizer(prepared.tokenizer_path)
    clock.lap("tokenizer")
    parts = load_parts(prepared, ranks.join() if ranks else None, progress, clock)
    model, runner = parts.model, parts.runner
    device_half: DeviceHalf = ranks.lead(parts.device) if ranks else parts.device
    processors = runner.table.custom.registry
    limits = host_limits(resolved, eos_ids(prepared, tokenizer), _host_drafter(prepared, model.vocab_size), processors)
    if _costs_work(resolved):
        limits = replace(limits, step_clock=parts.device.worked, step_work=True)
    if model.device.type == "cuda" and not resolved.config.schedule.enforce_eager:
        shapes = [replace(shape, fixed=runner.fixed) for shape in _shapes(resolved, limits)]
        device_half.warm_up(shapes, partial(progress, "graphs") if progress else None)
        clock.lap("graphs")
    if resolved.elastic or resolved.config.schedule.slo_itl_ms is not None:
        limits = replace(limits, elastic=_elastic(prepared, limits, device_half, model.vocab_size, progress))
        clock.lap("step times")
    host = HostHalf(limits, text_streams(tokenizer), grammars(tokenizer, model.vocab_size, limits.eos_token_ids))
    info = _info(prepared, model, runner.backend, host, tokenizer, timings)
    if limits.elastic is not None:
        info.server_info["elastic"] = limits.elastic.describe()
    info.max_logprobs = resolved.config.sampling.max_logprobs
    info.logit_processors, info.custom_logit_processor = sorted(processors.named), processors.allow_code
    loader = AdapterLoader(host, device_half) if runner.adapters else None
    core = EngineCore(host, device_half, info, resolved.depth, loader, resolved.config.schedule.session_file)
    _load_adapters(core, resolved)
    return core


def _shapes(resolved: Resolved, limits: HostLimits) -> list[StepShape]:
    """Of the steps that will come again and again. Where each step decides about drafts, most that only decode propose
    nothing, and few large ones verify much."""
    width = resolved.speculation_tokens
    own = 0 if limits.drafter is not None else width  # proposed on the device
    chunks = chunk_shapes(limits.budget, 0 if resolved.elastic else own)
    shapes = usual_shapes(resolved.max_num_seqs, 1 + width, own)
    if not resolved.elastic:
        return shapes + chunks
    plain = [replace(shape, draft_width=0) for shape in shapes if shape.width == 1 and own]
    return [shape for shape in shapes if is_first(shape.rows, shape.tokens or 0)] + plain + chunks


@dataclass(frozen=True)
class Parts:
    """What one rank holds."""

    model: CausalModel
    runner: Runner
    device: LocalDevice


def load_parts(prepared: Prepared, shard: RankShard | None = None, progress: Progress | None = None,
               clock: _Clock | None = None) -> Parts:
    """The weights, KV memory and device half of a rank; None: of all of the model."""
    resolved, lora = prepared.resolved, prepared.resolved.config.lora
    device = shard.device if shard else torch.device(resolved.device)
    bank = AdapterBank(lora.max_loras, lora.max_lora_rank) if lora.on else None
    model = load_model(prepared.path, dtype=getattr(torch, resolved.dtype), device=device,
                       progress=partial(progress, "weights") if progress else None, context=resolved.max_model_len,
                       fixed=resolved.config.model.deterministic, adapters=bank, shard=shard)
    if clock:
        clock.lap("weights")
    runner, _ = make_runner(model, prepared, shard)
    runner.adapters = bank
    half = make_device(runner, resolved.depth > 0, not resolved.config.schedule.enforce_eager)
    if clock:
        clock.lap("KV cache")
    return Parts(model, runner, half)


def start_ranks(prepared: Prepared) -> Ranks | None:
    """The processes of the other ranks, where several share the model."""
    resolved = prepared.resolved
    ranks = resolved.config.parallel.tensor_parallel_size
    if ranks == 1:
        return None
    return Ranks(ranks, resolved.device, prepared, rank_half, fixed=resolved.config.model.deterministic)


def rank_half(prepared: Prepared, shard: RankShard) -> tuple[DeviceHalf, int]:
    """For ranks 1, 2, ...: the device half, and how many steps are in flight."""
    return load_parts(prepared, shard).device, prepared.resolved.depth


def follow_engine(arguments: tuple[Located, Launch, int]) -> None:
    """What a process of torchrun runs for each engine of rank 0 (`engine.hosts.run_follower`)."""
    run_follower(arguments, rank_half)


def _load_adapters(core: EngineCore, resolved: Resolved) -> None:
    """Those that the configuration names. Raises compat.ConfigError."""
    core.info.max_loras = resolved.config.lora.max_loras if resolved.config.lora.on else 0
    for module in resolved.config.lora.lora_modules:
        name, _, path = module.partition("=")
        try:
            core.manage(LoadAdapter(name, path))
        except RequestError as e:
            raise ConfigError([Refusal(f"--lora-modules {module}", f"model {resolved.model_name}", str(e),
                                       "correct it, or leave it out")]) from e


def _elastic(prepared: Prepared, limits: HostLimits, device: DeviceHalf, vocab_size: int,
             progress: Progress | None) -> Elastic:
    """The policy of each step, on the step times of this machine: measured now, or by an earlier start like this."""
    resolved, exact = prepared.resolved, prepared.resolved.device == "cpu"
    times = StepTimes(device, limits, vocab_size)
    told = partial(progress, "step times") if progress else None
    samples, _ = cached(cache_folder(), _times_key(prepared, limits), lambda: times.measure(progress=told))
    width, goal = limits.width, resolved.config.schedule.slo_itl_ms
    caps = prepared.facts.drafter.caps if prepared.facts.drafter is not None else None
    chain = caps is not None and caps.shape == "chain"
    widths = sorted({0, (width + 1) // 2, width}) if chain else sorted({0, width})
    return Elastic(CostModel(samples, limits.budget, None if exact else tokens_bucket), limits.max_slots, widths, exact,
                   goal and goal / 1e3, on_host=limits.drafter is not None, adapts=resolved.elastic,
                   confident=caps is not None and caps.confidence)


def _times_key(prepared: Prepared, limits: HostLimits) -> list[object]:
    """All that measured step times depend on: the machine, the model, how it computes, the sizes, and how they are
    measured."""
    resolved, config = prepared.resolved, prepared.resolved.config
    machine = next(d for d in prepared.facts.devices if d.kind == resolved.device)
    return [__version__, torch.__version__, machine.name, machine.cores, machine.kernels, torch.get_num_threads(),
            resolved.model_name, prepared.facts.model.parameters, resolved.dtype, resolved.kv_dtype, resolved.drafter,
            resolved.speculation_tokens, limits.pages, limits.page_size, limits.max_slots, limits.chunk, limits.budget,
            limits.max_model_len, config.parallel.tensor_parallel_size, config.model.deterministic,
            config.schedule.enforce_eager, config.speculation.acceptance_method, limits.depth, limits.step_work, FORMAT]


class _Clock:
    def __init__(self, timings: dict[str, float]):
        self.timings, self.last = timings, time.perf_counter()

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.timings[phase], self.last = now - self.last, now


def make_runner(model: CausalModel, prepared: Prepared,
                shard: RankShard | None = None) -> tuple[Runner, AttentionBackend]:
    """The device half's step for a loaded model, its drafter loaded. Raises compat.ConfigError where the layers, now
    known for certain, need what no backend has, or differ from the groups that the memory was planned for."""
    resolved, drafter = prepared.resolved, prepared.facts.drafter if prepared.resolved.drafter else None
    groups = kv_groups(model, [group.window for group in drafter.kv_groups] if drafter else [])
    if tuple(g.window for g in groups) != resolved.windows:
        raise ConfigError([Refusal(f"KV groups {resolved.windows}", f"model {resolved.model_name}",
                                   f"its layers turn out to have {tuple(g.window for g in groups)}")])
    fixed = resolved.config.model.deterministic
    if fixed and not getattr(model, "fixed", False):
        raise ConfigError([not_fixed(resolved.model_name, type(model).__name__)])
    backend = choose_backend(model.layers, resolved.page_size, model.device, model.dtype, fixed, resolved.kv_dtype)
    kv = KVCache(model.layers, groups, [n - 1 for n in resolved.pages], resolved.page_size,
                 kv_dtype(resolved.kv_dtype), model.device)
    table = SlotTable(resolved.max_num_seqs + 1, resolved.max_model_len, resolved.page_size, len(groups), model.device,
                      resolved.lookahead)
    if resolved.config.speculation.acceptance_method == "rejection":
        table.proposals = Proposals(len(table.log), resolved.speculation_tokens, model.vocab_size, model.device)
    table.custom = _processors(table, model.vocab_size, resolved)
    runner = Runner(model, backend, kv, table, width=resolved.speculation_tokens)
    runner.reporting = Reporting.of(resolved.config.sampling.logprobs_mode)
    if drafter is not None and drafter.caps.where == "device":
        _load_drafter(runner, prepared, shard)
    if resolved.host_pages:
        _keep_on_host(runner, resolved)
    return runner, backend


def _keep_on_host(runner: Runner, resolved: Resolved) -> None:
    """Raises compat.ConfigError where the system does not let so much memory be pinned."""
    try:
        runner.keep_on_host(resolved.host_pages)
    except PinError as e:
        asked = resolved.config.kv.kv_host_bytes or 0
        raise ConfigError([Refusal(f"--kv-host-bytes {gib(asked)}", "this machine", str(e), "give less")]) from e


def _processors(table: SlotTable, vocab_size: int, resolved: Resolved) -> CustomProcessors:
    """Raises compat.ConfigError for an installed logit processor that does not load."""
    allow_code = resolved.config.sampling.enable_custom_logit_processor
    try:
        registry = Registry.installed(allow_code)
    except ProcessorError as e:
        raise ConfigError([Refusal("the logit processors", "this installation", str(e), "uninstall it")]) from e
    if allow_code:
        logger.warning("--enable-custom-logit-processor: whoever can send a request can run code in this process")
    return CustomProcessors(len(table.log), table.device, registry, vocab_size)


def _load_drafter(runner: Runner, prepared: Prepared, shard: RankShard | None) -> None:
    """Raises compat.ConfigError, naming both sides."""
    resolved, asked = prepared.resolved, str(prepared.resolved.drafter)
    context = runner.drafting.context(resolved.speculation_tokens, resolved.max_model_len, prepared.target)
    context = replace(context, shard=shard or context.shard)
    try:
        runner.adopt(make_drafter(asked, context))
    except (DrafterError, WeightError) as e:
        raise ConfigError([Refusal(f"--speculation {asked}", f"model {resolved.model_name}", str(e),
                                   "choose another drafter")]) from e
    refusals = check(attention_features(runner.drafting.layers, resolved.page_size, resolved.device, graphs=False),
                     [attention_component(type(runner.backend).__name__, runner.backend.caps)])
    if refusals:
        raise ConfigError(refusals)


def _host_drafter(prepared: Prepared, vocab_size: int) -> HostDrafter | None:
    drafter, resolved = prepared.facts.drafter, prepared.resolved
    if resolved.drafter is None or drafter is None or drafter.caps.where != "host":
        return None
    try:
        return make_host_drafter(resolved.drafter, vocab_size)
    except DrafterError as e:
        raise ConfigError([Refusal(f"--speculation {resolved.drafter}", "this installation", str(e),
                                   "choose another drafter")]) from e


def host_limits(resolved: Resolved, eos: frozenset[int], drafter: HostDrafter | None = None,
                processors: Registry | None = None) -> HostLimits:
    return HostLimits(
        page_size=resolved.page_size, pages=tuple(n - 1 for n in resolved.pages), windows=resolved.windows,
        adapters=Adapters(resolved.config.lora.max_loras) if resolved.config.lora.on else None,
        max_slots=resolved.max_num_seqs + 1, max_model_len=resolved.max_model_len, chunk=resolved.chunk_size,
        budget=resolved.max_num_batched_tokens, cap_policy=resolved.cap_policy, mixed=resolved.mixed_chunk,
        depth=resolved.depth, width=resolved.speculation_tokens, lookahead=resolved.lookahead,
        max_sessions=resolved.config.schedule.max_sessions, session_ttl=resolved.config.schedule.session_ttl,
        session_queue=resolved.config.schedule.session_queue,
        host_pages=resolved.host_pages, page_bytes=resolved.page_bytes, prefix_cache=resolved.prefix_caching,
        state_every=resolved.state_every,
        eos_token_ids=eos, strict="PYTEST_VERSION" in os.environ, drafter=drafter,
        check_processor=processors.check if processors is not None else None,
        seeds=random.SystemRandom() if resolved.seed is None else random.Random(resolved.seed))


def _costs_work(resolved: Resolved) -> bool:
    """On a CPU that others may use as well, what a step costs is how long it works, not how long it waits for its turn:
    that differs from one moment to the next, and not from one kind of step to another. A goal for latency is in seconds
    of the clock."""
    return resolved.device == "cpu" and resolved.config.schedule.slo_itl_ms is None


def text_streams(tokenizer: Tokenizer) -> Callable[[SamplingParams], IncrementalText]:
    def make(sampling: SamplingParams) -> IncrementalText:
        return IncrementalText.for_request(tokenizer, sampling)
    return make


def grammars(tokenizer: GrammarTokenizer, vocab_size: int, eos: Collection[int]) -> Grammars:
    return Grammars(partial(vocabulary, tokenizer, vocab_size, sorted(eos)), vocab_size)


def eos_ids(prepared: Prepared, tokenizer: Tokenizer) -> frozenset[int]:
    """Every id that ends an answer: of config.json, generation_config.json and the tokenizer."""
    if prepared.path.suffix == ".gguf":
        found = token_ids("eos_token_id", gguf_config(prepared.path))
    else:
        found = token_ids("eos_token_id", *read_config(prepared.path))
    own = tokenizer.eos_token_id
    return frozenset(found) | ({own} if own is not None else set())


def _info(prepared: Prepared, model: CausalModel, backend: AttentionBackend, host: HostHalf, tokenizer: Tokenizer,
          timings: dict[str, float]) -> EngineInfo:
    resolved, pooling = prepared.resolved, pooling_facts(prepared.path)
    attention = type(backend).__name__ + (f"; {backend.caps.lack}" if backend.caps.lack else "")
    report = start_report(resolved, prepared.facts, __version__, timings, attention)
    return EngineInfo(model_name=resolved.model_name, vocab_size=model.vocab_size, max_model_len=resolved.max_model_len,
                      max_num_seqs=resolved.max_num_seqs, kv_tokens=resolved.kv_tokens,
                      hidden_size=model.hidden_size, pooling=pooling.pooling, no_embeddings=pooling.lack,
                      sampling_defaults=dict(resolved.sampling_defaults),
                      eos_token_ids=sorted(eos_ids(prepared, tokenizer)),
                      speculation_tokens=resolved.speculation_tokens, server_info=report)



