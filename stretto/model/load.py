"""From a path to a model that is ready to run.

    folder with config.json  ->  ModelConfig + SafetensorsSource  --+-- architecture known --> build_model
    file .gguf               ->  ModelConfig + GGUFSource         --+
    folder, architecture not known here                             --> transformers' own model (fallback.py)
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from stretto.model.api import CausalModel
from stretto.model.config import (
    ConfigError,
    ModelConfig,
    architecture_of,
    is_bare,
    read_config,
    served_positions,
)
from stretto.model.dequantize import dequantized
from stretto.model.gguf import GGUFSource
from stretto.model.gguf_config import gguf_config
from stretto.model.lora import AdapterBank
from stretto.model.progress import LoadLog
from stretto.model.registry import NATIVE, find_builder
from stretto.model.shard import Shard
from stretto.model.source import PackedSource, SafetensorsSource, WeightSource, text_part
from stretto.model.weights import Progress, Weights

log = logging.getLogger(__name__)

NO_ROOM = "{} runs through transformers' own modules, which have no room for LoRA adapters"
NO_RANKS = "{} runs through transformers' own modules, which are not cut into ranks"


def load_model(path: str | Path, *, dtype: torch.dtype, device: torch.device, progress: Progress | None = None,
               context: int | None = None, fixed: bool = False, adapters: AdapterBank | None = None,
               shard: Shard | None = None) -> CausalModel:
    """Loads a model from an HF folder or a GGUF file.

    `context` is the number of positions that will be served; None: all that the model was trained for. It sizes the
    rotary table, and a longrope model uses its short frequencies only where it is at most the original context.
    `progress` is called with (elements copied, elements in all); the log says it, too. `fixed`: results do not
    depend on the batch, bit for bit. `adapters`: linear layers get room for LoRA adapters.
    `shard`: the rank whose part is loaded.

    Raises ConfigError for a configuration that cannot be served and WeightError for weights that do not fit it."""
    path, progress = Path(path), LoadLog(dtype.itemsize, progress)
    if path.suffix == ".gguf":
        source: WeightSource = GGUFSource(path)
        return build_model(ModelConfig.from_hf(gguf_config(path)), source, dtype, device, progress, context, fixed,
                           adapters, shard)
    raw, generation = read_config(path)
    if find_builder(architecture_of(raw)) is None:
        if fixed:
            raise ConfigError(f"{architecture_of(raw)} runs through transformers' own modules, whose sums depend on the"
                              " batch: it cannot be deterministic")
        if shard is not None and shard.ranks > 1:
            raise ConfigError(NO_RANKS.format(architecture_of(raw)))
        if adapters is not None:
            raise ConfigError(NO_ROOM.format(architecture_of(raw)))
        from stretto.model.fallback import load_fallback  # imports transformers, which takes seconds

        return load_fallback(path, raw, generation, dtype=dtype, device=device, progress=progress, context=context)
    config = ModelConfig.from_hf(raw, generation)
    if is_bare(str((raw.get("architectures") or [""])[0])):
        log.warning("%s is a decoder without a head: its embeddings are what it was made for, its texts mean nothing",
                    path.name)
    return build_model(config, open_weights(path, config), dtype, device, progress, context, fixed, adapters,
                       shard)


def open_weights(folder: Path, config: ModelConfig) -> WeightSource:
    """The weights of an HF folder for a native family, by their usual names. Raises WeightError."""
    return dequantized(text_part(SafetensorsSource(folder)), config.quantization)


def check_native(config: ModelConfig, source: WeightSource) -> CausalModel | None:
    """Finds what keeps a native model from loading, without reading its weights: what its family refuses, and tensors
    that are missing, misshapen or too many. Packages' models are not built here; theirs shows at load. Raises
    ConfigError and WeightError. Returns the model without weights."""
    if config.architecture not in NATIVE:
        return None
    weights = Weights(source, torch.float32, torch.device("meta"))
    model = NATIVE[config.architecture](config, weights, 1)
    weights.check()
    return model


def kept_bytes(config: ModelConfig, source: WeightSource, dtype: torch.dtype, device: str) -> tuple[int, int] | None:
    """Bytes of a native model's weights as they are kept on a device of this type, where some stay in fewer bits than
    `dtype` has, and those that one product takes beside them; else None. Reads no weights."""
    if config.architecture not in NATIVE or not isinstance(source, PackedSource):
        return None
    weights = Weights(source, dtype, torch.device("meta"), kernels=device)
    NATIVE[config.architecture](config, weights, 1)
    return weights.nbytes, weights.scratch_bytes


def build_on_meta(path: Path, adapters: AdapterBank | None = None, shard: Shard | None = None) -> None:
    """Builds a native model without its weights, for what only its building tells: how much room adapters need,
    whether it can be cut into ranks. Raises ConfigError."""
    if path.suffix == ".gguf":
        config = ModelConfig.from_hf(gguf_config(path))
        source: WeightSource = GGUFSource(path)
    else:
        raw, generation = read_config(path)
        if architecture_of(raw) not in NATIVE:
            raise ConfigError((NO_ROOM if adapters is not None else NO_RANKS).format(architecture_of(raw)))
        config = ModelConfig.from_hf(raw, generation)
        source = open_weights(path, config)
    weights = Weights(source, torch.float32, torch.device("meta"), adapters=adapters, shard=shard)
    NATIVE[config.architecture](config, weights, 1)


def build_model(config: ModelConfig, source: WeightSource, dtype: torch.dtype, device: torch.device,
                progress: Progress | None = None, context: int | None = None, fixed: bool = False,
                adapters: AdapterBank | None = None, shard: Shard | None = None) -> CausalModel:
    """A model of a known architecture with the weights of any source. Raises ConfigError and WeightError."""
    builder = find_builder(config.architecture)
    if builder is None:
        raise ConfigError(f"{config.architecture} has no native model here (there are {', '.join(NATIVE)}), and "
                          "only an HF folder can be served through transformers")
    context = served_positions(config.architecture, config.max_position, context)
    weights = Weights(source, dtype, device, fixed, adapters, shard)
    model = builder(config, weights, context)
    weights.fill(progress)
    if isinstance(source, PackedSource):
        source.told(dtype)
    return model
