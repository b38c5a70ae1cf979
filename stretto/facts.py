"""What is found before anything is loaded: devices, memory, and the model's sizes from its files' headers.

Sizes are exact for native models (the parameters are counted from the shapes in the files). Of a model that runs
through transformers the layers are known for certain only once it is loaded: see `kv_groups`, and compare.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from stretto.attn.api import LayerSpec, StateSpec
from stretto.config import DeviceFacts, DrafterFacts, Facts, KVGroupFacts, ModelFacts
from stretto.device.kv import bytes_per_token, group_layers
from stretto.device.states import states_of
from stretto.model.config import ConfigError, ModelConfig, architecture_of, read_config
from stretto.model.gguf import GGUFSource
from stretto.model.gguf_config import gguf_config
from stretto.model.load import check_native, kept_bytes, open_weights
from stretto.model.registry import find_builder
from stretto.model.source import SafetensorsSource, WeightSource
from stretto.ops.native import library, packed
from stretto.text.gguf_names import name_of
from stretto.wire import STATE


def gather_facts(path: Path, drafter: DrafterFacts | None = None) -> Facts:
    """Facts of this machine and of the model at `path` (an HF folder or a GGUF file). Raises model.config.ConfigError
    and model.source.WeightError for a model that cannot be served."""
    return Facts(devices=device_facts(), model=model_facts(path), drafter=drafter)


# ------------------------------------------------------------------------------------------------------------- devices
def device_facts() -> tuple[DeviceFacts, ...]:
    """The current CUDA device where there is one, then the CPU."""
    return (*_cuda_facts(), _cpu_facts())


def _cuda_facts() -> tuple[DeviceFacts, ...]:
    if not torch.cuda.is_available():
        return ()
    free, total = torch.cuda.mem_get_info()
    current = torch.cuda.current_device()
    others = [torch.cuda.mem_get_info(i) for i in range(torch.cuda.device_count()) if i != current]
    return (DeviceFacts("cuda", torch.cuda.get_device_name(), total, free, cores=usable_cores(),
                        bfloat16=torch.cuda.get_device_capability() >= (8, 0),
                        fp8=torch.cuda.get_device_capability() >= (8, 9),
                        others=tuple((total, free) for free, total in others)),)


def _cpu_facts() -> DeviceFacts:
    memory = psutil.virtual_memory()
    total, free = memory.total, memory.available
    limit, used = _cgroup_memory()
    if limit is not None:
        total, free = min(total, limit), min(free, max(limit - used, 0))
    missing = library.troubles()
    return DeviceFacts("cpu", _cpu_name(), total, free, cores=usable_cores(),
                       kernels=tuple(name for name in library.names() if name not in missing),
                       missing=tuple(sorted(missing.items())))


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine() or "cpu"


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cgroup_memory() -> tuple[int | None, int]:
    """The memory limit of this container and what is used of it, in bytes; (None, 0) where there is none. Page cache
    counts as used there, but can be given back, so it is not counted here."""
    root = Path("/sys/fs/cgroup")
    v2 = ("memory.max", "memory.current", "memory.stat", "inactive_file")
    v1 = ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file")
    for limit_file, used_file, stat_file, cache in (v2, v1):
        try:
            limit = int((root / limit_file).read_text())
            used = int((root / used_file).read_text())
            stat = dict(line.split() for line in (root / stat_file).read_text().splitlines())
        except (OSError, ValueError):  # no such file, or "max"
            continue
        return limit, max(used - int(stat.get(cache, 0)), 0)
    return None, 0


# --------------------------------------------------------------------------------------------------------------- model
def model_facts(path: Path) -> ModelFacts:
    """Sizes of the model at `path`."""
    if path.suffix == ".gguf":
        return _native_facts(path, ModelConfig.from_hf(gguf_config(path)), GGUFSource(path), None)
    raw, generation = read_config(path)
    if find_builder(architecture_of(raw)) is None:
        return _fallback_facts(path, raw, generation)
    config = ModelConfig.from_hf(raw, generation)
    return _native_facts(path, config, open_weights(path, config), generation)


def _native_facts(path: Path, config: ModelConfig, source: WeightSource,
                  generation: Mapping[str, Any] | None) -> ModelFacts:
    model = check_native(config, source)
    kept = {device: found for device in ("cpu", "cuda")
            if (found := kept_bytes(config, source, torch.bfloat16, device)) is not None}
    exact = kept_bytes(config, source, torch.float32, "cpu") if packed.available() else None
    states = [] if model is None else states_of(model)
    layers = [LayerSpec(config.n_heads, config.n_kv_heads, config.head_dim, 1.0, window) for window in config.windows
              if window != STATE]
    return ModelFacts(
        name=model_name(path), architecture=config.architecture,
        n_layers=config.n_layers, hidden_size=config.hidden_size, intermediate_size=_inner_width(config),
        vocab_size=config.vocab_size, context=config.max_position, parameters=count_parameters(source),
        dtype="gguf" if path.suffix == ".gguf" else config.dtype or "float32",
        kv_groups=kv_groups(layers, states), n_kv_heads=config.n_kv_heads,
        sampling_defaults=sampling_defaults(generation),
        packed_bytes=tuple((device, size) for device, (size, _) in kept.items()),
        exact_packed_bytes=None if exact is None else exact[0], unpacked_bytes=kept.get("cuda", (0, 0))[1])


def _inner_width(config: ModelConfig) -> int:
    """Features that a token has inside an MLP, for the memory of a step: three tensors of this width at once. With
    experts a token has as many rows as it chooses, and they stand beside the experts' answers."""
    chosen = config.value("num_experts_per_tok")
    dense = config.value("intermediate_size_mlp") or config.intermediate_size
    if not chosen:
        return dense
    inner = config.value("moe_intermediate_size") or config.intermediate_size
    return max(dense, chosen * max(inner, (inner + config.hidden_size) // 3))


def _fallback_facts(path: Path, raw: Mapping[str, Any], generation: Mapping[str, Any] | None) -> ModelFacts:
    """From what transformers reads out of config.json; it gives common names to what models call differently."""
    from stretto.model.fallback import check_fallback  # imports transformers, which takes long

    whole = check_fallback(path, raw)
    config = whole.get_text_config()
    needed = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "max_position_embeddings")
    missing = [key for key in needed if getattr(config, key, None) is None]
    if missing:
        raise ConfigError(f"{path}: a model of type {whole.model_type!r} has no {', '.join(missing)} in its config; "
                          "such models are not served")
    heads, hidden = config.num_attention_heads, config.hidden_size
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    layers = [LayerSpec(heads, kv_heads, head_dim, 1.0, window) for window in _fallback_windows(config)]
    return ModelFacts(
        name=model_name(path), architecture=(whole.architectures or [whole.model_type])[0],
        n_layers=config.num_hidden_layers, hidden_size=hidden,
        intermediate_size=getattr(config, "intermediate_size", None) or 4 * hidden, vocab_size=config.vocab_size,
        context=config.max_position_embeddings, parameters=count_parameters(SafetensorsSource(path)),
        dtype=str(whole.dtype or "float32").removeprefix("torch."), kv_groups=kv_groups(layers),
        n_kv_heads=kv_heads, native=False, sampling_defaults=sampling_defaults(generation))


def _fallback_windows(config) -> list[int | None]:
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if types is not None:
        return [window if kind == "sliding_attention" else None for kind in types]
    return [window] * config.num_hidden_layers


def model_name(path: Path) -> str:
    """The last part of the path, of a GGUF file without ".gguf" and a part's number; owner/model for a folder of the
    hub's cache."""
    if path.suffix == ".gguf":
        return name_of(path)
    folder = path.resolve()
    if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):
        return folder.parent.parent.name.removeprefix("models--").replace("--", "/")
    return folder.name


# Keys of generation_config.json that set defaults, by the names of SamplingParams: the same that vLLM takes.
_DEFAULTS = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p",
             "repetition_penalty": "repetition_penalty", "max_new_tokens": "max_tokens"}


def sampling_defaults(generation: Mapping[str, Any] | None) -> tuple[tuple[str, float], ...]:
    """Sampling defaults that a generation_config.json holds."""
    found = ((ours, (generation or {}).get(theirs)) for theirs, ours in _DEFAULTS.items())
    return tuple((name, value) for name, value in found if isinstance(value, int | float) and value is not True)


def kv_groups(layers: Sequence[LayerSpec], states: Sequence[StateSpec] = ()) -> tuple[KVGroupFacts, ...]:
    """The KV groups of a model's layers, in the order of device.kv.group_layers."""
    groups = group_layers(layers, [STATE] if states else [])
    return tuple(KVGroupFacts(STATE, sum(spec.values for spec in states)) if group.window == STATE else
                 KVGroupFacts(group.window, bytes_per_token(layers, group, torch.int8),
                              sum(2 * layers[i].n_kv_heads for i in group.layers)) for group in groups)


def count_parameters(source: WeightSource) -> int:
    """Numbers in all tensors of a checkpoint, from their shapes alone."""
    return sum(math.prod(source.shape(name)) for name in source.names())
