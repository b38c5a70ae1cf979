"""Everything about a start that is known before weights are loaded: find the model, read its headers, resolve.

    Config --locate--> Located --prepare--> Prepared (path, facts, resolved)        then `build.py` loads and joins

`Prepared` is plain data, so it can travel to the processes that will hold the engine and its ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from stretto.compat import ConfigError, Refusal
from stretto.config import DEFAULT_DRAFT_TOKENS, Config, DeviceFacts, DrafterFacts, Facts, KVGroupFacts, Resolved
from stretto.engine.locate import Located, locate
from stretto.facts import gather_facts
from stretto.model.config import ConfigError as ModelConfigError
from stretto.model.hub import ModelNotFound
from stretto.model.load import build_on_meta
from stretto.model.lora import AdapterBank, AdapterError, read_adapter
from stretto.model.registry import find_builder
from stretto.model.shard import Shard
from stretto.model.source import WeightError
from stretto.resolve import resolve
from stretto.spec.context import DrafterError, DrafterMissing, Target
from stretto.spec.registry import drafter_sizes, make_host_drafter
from stretto.text.gguf_file import GGUFError
from stretto.text.tokenizer import TokenizerError

START_FAILURES = (ModelNotFound, ModelConfigError, WeightError, TokenizerError, GGUFError, DrafterError)
"""By which a model refuses to start; their messages are for the user."""


Devices = Callable[[tuple[DeviceFacts, ...]], tuple[DeviceFacts, ...]]


@dataclass(frozen=True)
class Prepared:
    """Everything that is known before weights are loaded."""

    path: Path
    tokenizer_path: Path
    facts: Facts
    resolved: Resolved
    target: Target  # what a drafter may know of the model
    timings: dict[str, float] = field(default_factory=dict)  # seconds


def prepare(config: Config) -> Prepared:
    """Finds the model (fetching it if need be), reads its headers and resolves the configuration.

    Raises ModelNotFound, model.config.ConfigError, WeightError, and compat.ConfigError with every refusal."""
    started = time.perf_counter()
    located = locate(config)
    found = time.perf_counter() - started
    prepared = prepare_located(located)
    return replace(prepared, timings={"find model": found} | prepared.timings)


def prepare_located(located: Located, devices: Devices = lambda own: own) -> Prepared:
    """`prepare` of a model that has been found. `devices`: of all hosts, given those of this one. Raises the same,
    except ModelNotFound of the model itself."""
    started = time.perf_counter()
    facts = gather_facts(located.path)
    facts = replace(facts, devices=devices(facts.devices))
    target = Target(facts.model.name, located.path, facts.model.vocab_size, facts.model.hidden_size,
                    facts.model.n_layers, facts.model.context, located.tokenizer_path)
    facts = _with_drafter(located.config, facts, target)
    if located.config.model.deterministic and find_builder(facts.model.architecture) is None:
        raise ConfigError([not_fixed(facts.model.name, "transformers' own code of it")])
    _check_ranks(located, facts.model.name)
    facts = _with_adapters(located, facts)
    resolved = resolve(located.config, facts)
    return Prepared(located.path, located.tokenizer_path, facts, resolved, target,
                    {"resolve": time.perf_counter() - started})


def _with_drafter(config: Config, facts: Facts, target: Target) -> Facts:
    """What the drafter declares for this target. A block is proposed in one pass whatever is offered of it, so all of
    it may be, unless the configuration says otherwise."""
    asked, tokens = config.speculation.speculation, config.speculation.speculation_tokens
    if asked == "off":
        return facts
    try:
        most = drafter_sizes(asked, target).caps
        usual = most.max_width if most.shape == "block" else min(most.max_width, DEFAULT_DRAFT_TOKENS)
        sizes = drafter_sizes(asked, target, usual if tokens == "auto" else tokens)
        if sizes.caps.where == "host":
            make_host_drafter(asked)  # its packages are missing now rather than after the weights are loaded
    except DrafterError as e:
        here = "this installation" if isinstance(e, DrafterMissing) else f"model {target.name}"
        refusal = Refusal(f"--speculation {asked}", here, str(e), "correct it, or choose another drafter")
        raise ConfigError([refusal]) from e
    name = asked.partition(":")[0]
    groups = tuple(KVGroupFacts(*group) for group in sizes.kv_groups)
    found = DrafterFacts(name, sizes.caps, sizes.parameters, groups, sizes.tap_values, usual)
    if tokens == 0:  # it will not be loaded
        found = DrafterFacts(name, sizes.caps)
    return replace(facts, drafter=found)


def _with_adapters(located: Located, facts: Facts) -> Facts:
    """How much room LoRA adapters need on each rank."""
    lora, shard = located.config.lora, Shard(0, located.config.parallel.tensor_parallel_size)
    if not lora.on or min(lora.max_loras, lora.max_lora_rank) < 1:
        return facts
    bank = AdapterBank(lora.max_loras, lora.max_lora_rank)
    try:
        build_on_meta(located.path, bank, shard)
    except ModelConfigError as e:
        raise ConfigError([Refusal("--enable-lora", f"model {facts.model.name}", str(e),
                                   "merge the adapter into the model, or choose another one")]) from e
    for module in lora.lora_modules:
        name, _, folder = module.partition("=")
        if not folder:
            continue  # `resolve` says what is wrong with it
        try:
            bank.check(read_adapter(Path(folder).expanduser()))
        except AdapterError as e:
            raise ConfigError([Refusal(f"--lora-modules {name}={folder}", f"model {facts.model.name}", str(e),
                                       "correct it, or leave it out")]) from e
    return replace(facts, adapter_values=bank.values)


def _check_ranks(located: Located, name: str) -> None:
    """Raises compat.ConfigError for a model that cannot be cut into so many ranks."""
    ranks = located.config.parallel.tensor_parallel_size
    if ranks <= 1:
        return
    try:
        build_on_meta(located.path, shard=Shard(0, ranks))
    except ModelConfigError as e:
        raise ConfigError([Refusal(f"--tensor-parallel-size {ranks}", f"model {name}", str(e),
                                   "choose another number of ranks, or 1")]) from e


def not_fixed(name: str, implementation: str) -> Refusal:
    return Refusal("--deterministic", f"model {name}", f"{implementation} sums in an order that depends on the batch",
                   "serve it without, or choose a model of a native family")
