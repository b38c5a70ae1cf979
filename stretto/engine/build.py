"""From a configuration to an engine: find the model, resolve, load, allocate, join the halves.

    Config --prepare--> Prepared (path, facts, resolved: nothing is loaded)  --build_core--> EngineCore

`Prepared` is plain data, so it can travel to the process that will hold the engine.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from stretto import __version__
from stretto.attn.api import AttentionBackend
from stretto.attn.select import choose_backend
from stretto.compat import ConfigError, Refusal
from stretto.config import Config, DrafterFacts, Facts, Resolved, resolve
from stretto.device.kv import KVCache, group_layers
from stretto.device.runner import Runner
from stretto.device.slots import SlotTable
from stretto.device.streams import make_device
from stretto.engine.core import EngineCore
from stretto.facts import gather_facts
from stretto.host.half import HostHalf
from stretto.host.limits import HostLimits
from stretto.model.api import CausalModel
from stretto.model.config import read_config, token_ids
from stretto.model.gguf import gguf_config
from stretto.model.hub import resolve_model
from stretto.model.load import load_model
from stretto.params import SamplingParams
from stretto.protocol import EngineInfo
from stretto.report import start_report
from stretto.spec.api import Drafter
from stretto.spec.registry import DrafterContext, DrafterError, drafter_caps, make_drafter
from stretto.text.stream import IncrementalText
from stretto.text.tokenizer import Tokenizer, load_tokenizer

Progress = Callable[[str, int, int], None]
"""(what, done, of how many): loading and warm-up."""


@dataclass(frozen=True)
class Prepared:
    """Everything that is known before weights are loaded."""

    path: Path
    tokenizer_path: Path
    facts: Facts
    resolved: Resolved
    timings: dict[str, float] = field(default_factory=dict)  # seconds


def prepare(config: Config) -> Prepared:
    """Finds the model (fetching it if need be), reads its headers and resolves the configuration.

    Raises ModelNotFound, model.config.ConfigError, WeightError, and compat.ConfigError with every refusal."""
    started = time.perf_counter()
    path = resolve_model(config.model.model)
    tokenizer_path = resolve_model(config.model.tokenizer) if config.model.tokenizer else path
    found = time.perf_counter()
    facts = gather_facts(path, _drafter_facts(config.speculation.speculation))
    resolved = resolve(config, facts)
    return Prepared(path, tokenizer_path, facts, resolved,
                    {"find model": found - started, "resolve": time.perf_counter() - found})


def _drafter_facts(asked: str) -> DrafterFacts | None:
    if asked == "off":
        return None
    try:
        return DrafterFacts(asked.partition(":")[0], drafter_caps(asked))
    except DrafterError as e:
        refusal = Refusal(f"--speculation {asked}", "engine stretto", str(e), "choose another drafter")
        raise ConfigError([refusal]) from e


def build_core(prepared: Prepared, progress: Progress | None = None) -> EngineCore:
    """Loads weights, allocates the KV cache and starts the device half. Call it on the thread that will step it."""
    timings = dict(prepared.timings)
    resolved = prepared.resolved
    torch.manual_seed(resolved.seed or 0)  # nothing samples from it; libraries may
    device, dtype = torch.device(resolved.device), getattr(torch, resolved.dtype)
    clock = _Clock(timings)
    tokenizer = load_tokenizer(prepared.tokenizer_path)
    clock.lap("tokenizer")
    copied = partial(progress, "weights") if progress else None
    model = load_model(prepared.path, dtype=dtype, device=device, progress=copied, context=resolved.max_model_len)
    clock.lap("weights")
    runner, backend = make_runner(model, resolved)
    host = HostHalf(host_limits(resolved, eos_ids(prepared, tokenizer)), text_streams(tokenizer))
    clock.lap("KV cache")
    info = _info(prepared, model, backend, host, tokenizer, timings)
    return EngineCore(host, make_device(runner, overlap=resolved.depth > 0), info, resolved.depth)


class _Clock:
    def __init__(self, timings: dict[str, float]):
        self.timings, self.last = timings, time.perf_counter()

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.timings[phase], self.last = now - self.last, now


def make_runner(model: CausalModel, resolved: Resolved) -> tuple[Runner, AttentionBackend]:
    """The device half's step for a loaded model. Raises compat.ConfigError where the layers, now known for certain,
    need what no backend has, or differ from the groups that the memory was planned for."""
    groups = group_layers(model.layers)
    if tuple(g.window for g in groups) != resolved.windows:
        raise ConfigError([Refusal(f"KV groups {resolved.windows}", f"model {resolved.model_name}",
                                   f"its layers turn out to have {tuple(g.window for g in groups)}")])
    backend = choose_backend(model.layers, resolved.page_size, model.device, model.dtype)
    kv = KVCache(model.layers, groups, [n - 1 for n in resolved.pages], resolved.page_size, model.dtype, model.device)
    table = SlotTable(resolved.max_num_seqs + 1, resolved.max_model_len, resolved.page_size, len(groups), model.device)
    return Runner(model, backend, kv, table, _drafter(resolved, model)), backend


def _drafter(resolved: Resolved, model: CausalModel) -> Drafter | None:
    if resolved.drafter is None:
        return None
    context = DrafterContext(width=resolved.speculation_tokens, vocab_size=model.vocab_size, device=model.device)
    return make_drafter(resolved.drafter, context)


def host_limits(resolved: Resolved, eos: frozenset[int]) -> HostLimits:
    return HostLimits(
        page_size=resolved.page_size, pages=tuple(n - 1 for n in resolved.pages), windows=resolved.windows,
        max_slots=resolved.max_num_seqs + 1, max_model_len=resolved.max_model_len, chunk=resolved.chunk_size,
        budget=resolved.max_num_batched_tokens, cap_policy=resolved.cap_policy, mixed=resolved.mixed_chunk,
        depth=resolved.depth, width=resolved.speculation_tokens, lookahead=resolved.lookahead,
        prefix_cache=resolved.prefix_caching, eos_token_ids=eos, strict="PYTEST_VERSION" in os.environ,
        seeds=random.SystemRandom() if resolved.seed is None else random.Random(resolved.seed))


def text_streams(tokenizer: Tokenizer) -> Callable[[SamplingParams], IncrementalText]:
    def make(sampling: SamplingParams) -> IncrementalText:
        return IncrementalText.for_request(tokenizer, sampling)
    return make


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
    resolved = prepared.resolved
    report = start_report(resolved, prepared.facts, __version__, timings, type(backend).__name__)
    return EngineInfo(model_name=resolved.model_name, vocab_size=model.vocab_size, max_model_len=resolved.max_model_len,
                      max_num_seqs=resolved.max_num_seqs, kv_tokens=resolved.kv_tokens,
                      eos_token_ids=sorted(eos_ids(prepared, tokenizer)),
                      speculation_tokens=resolved.speculation_tokens, server_info=report)



