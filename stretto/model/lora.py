"""LoRA adapters (Hu et al. 2021, https://arxiv.org/abs/2106.09685) in the layout of PEFT, several in one batch.

    y = W x + scale * B (A x)        A [r, inputs], B [rows, r]; each token has its own adapter, or none

The adapters of a matrix stand side by side in two tall matrices, so that any mixture of them is two multiplications:

    down [N P R, inputs]    A of adapter 1 | A of adapter 2 | ...       N adapters, P parts of a fused matrix, rank R
    up   [N P R, rows]      scale * B^T, in the columns of its part

    t = x down^T  [T, N P R];   t = 0 where a column is not of the token's adapter;   y += t up

Nothing here reads a device value on the host, and a step in which no row has an adapter does none of it.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from stretto.model.shard import Columns, Piece, modules_of
from stretto.model.source import name_alone

log = logging.getLogger(__name__)

MARK = ("lora_A.weight", "lora_B.weight")
PREFIX = "base_model.model."


class AdapterError(ValueError):
    """An adapter that cannot be used, with the reason and the way out."""


@dataclass(frozen=True)
class AdapterFile:
    """An adapter's matrices by the names of the modules they belong to: (A [r, inputs], B [rows, r], scale)."""

    path: Path
    rank: int
    modules: dict[str, tuple[torch.Tensor, torch.Tensor, float]]


class AdapterBank:
    """Room for `count` adapters of rank `rank` at most, numbered 1..count. Matrices of a model declare themselves while
    it is built; `select` says before each forward pass which token has which adapter."""

    def __init__(self, count: int, rank: int):
        self.count, self.rank = count, rank
        self.chosen: torch.Tensor | None = None  # [T, N] of the matrices' type: 1 where the token has that adapter
        self._deltas: dict[str, tuple[Delta, int]] = {}  # by module: its matrix, and which part of it

    def declare(self, pieces: Sequence[Piece], columns: Columns, order: torch.Tensor | None, dtype: torch.dtype,
                device: torch.device) -> Delta:
        """For a matrix of these pieces of modules, one below the other, its rows then put in `order`; of all of them
        it has these columns."""
        modules = modules_of(pieces)
        delta = Delta(self, [of_module for _, of_module in modules], columns, order, dtype, device)
        self._deltas |= {name.removeprefix("model."): (delta, part) for part, (name, _) in enumerate(modules)}
        return delta

    @property
    def values(self) -> int:
        """Numbers that the adapters' matrices hold in all."""
        deltas = {id(delta): delta for delta, _ in self._deltas.values()}.values()
        return sum(delta.down.numel() + delta.up.numel() for delta in deltas)

    def select(self, adapter: torch.Tensor | None) -> None:
        """adapter [T]: the number of each token's adapter, 0 for none. None: no token of the step has one."""
        if adapter is None:
            self.chosen = None
            return
        numbers = torch.arange(1, self.count + 1, device=adapter.device)
        self.chosen = adapter[:, None] == numbers

    def check(self, adapter: AdapterFile) -> None:
        """Raises AdapterError where it does not fit this model."""
        if adapter.rank > self.rank:
            raise AdapterError(f"the adapter {adapter.path} has rank {adapter.rank}; this server has room for"
                               f" {self.rank}: start it with --max-lora-rank {adapter.rank}")
        unknown = sorted(name for name in adapter.modules if name not in self._deltas)
        if unknown:
            raise AdapterError(f"the adapter {adapter.path} changes {', '.join(unknown[:4])}"
                               f"{' ...' if len(unknown) > 4 else ''} ({len(unknown)} modules), which this model does"
                               " not have, or cannot have adapted: only its linear layers outside experts and head can")
        for name, (a, b, _) in adapter.modules.items():
            delta, part = self._deltas[name]
            wanted = (delta.columns.total, delta.parts[part][0].total)
            if (a.shape[1], b.shape[0]) != wanted:
                raise AdapterError(f"{name} of the adapter {adapter.path} maps {a.shape[1]} to {b.shape[0]} features;"
                                   f" the model's maps {wanted[0]} to {wanted[1]}")

    def load(self, number: int, adapter: AdapterFile) -> None:
        """Puts a checked adapter in place `number`, which no row of a step in flight has."""
        self.clear(number)
        for name, (a, b, scale) in adapter.modules.items():
            delta, part = self._deltas[name]
            delta.load(number, part, a, b, scale)

    def clear(self, number: int) -> None:
        for delta, _ in self._deltas.values():
            delta.clear(number)


class Delta:
    """The adapters of one matrix, or of a rank's part of it: that rank's columns of A and its rows of B, so that its
    result is one summand of y like the matrix's own."""

    def __init__(self, bank: AdapterBank, parts: list[list[Piece]], columns: Columns, order: torch.Tensor | None,
                 dtype: torch.dtype, device: torch.device):
        self.bank, self.parts, self.columns, self._order = bank, parts, columns, order
        self.rows = [sum(piece.rows for piece in part) for part in parts]
        places = bank.count * len(parts) * bank.rank
        self.down = torch.zeros(places, columns.count, dtype=dtype, device=device)
        self.up = torch.zeros(places, sum(self.rows), dtype=dtype, device=device)

    @property
    def active(self) -> bool:
        return self.bank.chosen is not None

    def add_to(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """y [T, rows] += what the tokens' adapters make of x [T, inputs]; returns y."""
        chosen = self.bank.chosen
        assert chosen is not None
        t = (x @ self.down.t()).view(len(x), self.bank.count, -1) * chosen[:, :, None]
        return y.addmm_(t.view(len(x), -1), self.up)

    def _places(self, number: int, part: int) -> slice:
        first = ((number - 1) * len(self.parts) + part) * self.bank.rank
        return slice(first, first + self.bank.rank)

    def load(self, number: int, part: int, a: torch.Tensor, b: torch.Tensor, scale: float) -> None:
        places, rank = self._places(number, part), a.shape[0]
        self.down[places][:rank] = a[:, self.columns.start :][:, : self.columns.count].to(self.down.dtype)
        first = sum(self.rows[:part])
        mine = torch.cat([b[piece.start : piece.start + piece.rows] for piece in self.parts[part]])
        grown = torch.zeros(rank, sum(self.rows), dtype=torch.float32)
        grown[:, first : first + self.rows[part]] = scale * mine.float().t()
        if self._order is not None:
            grown = grown[:, self._order.cpu()]
        self.up[places][:rank] = grown.to(self.up.dtype)

    def clear(self, number: int) -> None:
        for part in range(len(self.parts)):
            places = self._places(number, part)
            self.down[places] = 0
            self.up[places] = 0


# ------------------------------------------------------------------------------------------------------------ files
def read_adapter(path: Path) -> AdapterFile:
    """An adapter folder as PEFT saves it: adapter_config.json and adapter_model.safetensors. Raises AdapterError for
    what is missing or damaged, or is more than low-rank changes of linear layers."""
    config = _config(path)
    pairs: dict[str, list[torch.Tensor | None]] = {}
    for name, tensor in _tensors(path).items():
        module, mark = _module_of(path, name)
        pairs.setdefault(module, [None, None])[mark] = tensor
    modules = {}
    for module, (a, b) in pairs.items():
        if a is None or b is None or a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1] or not a.numel():
            raise AdapterError(f"{module} of the adapter {path} lacks one of its two matrices, or their ranks differ")
        try:
            scale = _scale(config, module, a.shape[0])
        except (re.error, AttributeError, TypeError, ValueError) as e:
            raise AdapterError(f"the adapter {path} has lora_alpha or alpha_pattern that cannot be read ({e}): correct"
                               " adapter_config.json") from e
        modules[module.removeprefix("model.")] = (a, b, scale)
    if not modules:
        raise AdapterError(f"the adapter {path} changes nothing")
    return AdapterFile(path, max(a.shape[0] for a, _, _ in modules.values()), modules)


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    file = path / "adapter_model.safetensors"
    if not file.is_file():
        raise AdapterError(f"{path} has no adapter_model.safetensors"
                           + (": save it with safe_serialization=True; pickled weights are not read"
                              if (path / "adapter_model.bin").is_file() else ""))
    try:
        with safe_open(file, framework="pt") as opened:
            found = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as e:
        raise AdapterError(f"{file} ({file.stat().st_size} bytes) is truncated or damaged ({e}): fetch it again") from e
    for name, tensor in found.items():
        if not tensor.dtype.is_floating_point or not tensor.float().isfinite().all():
            raise AdapterError(f"{name} of the adapter {path} holds what is no number, or infinite: it is damaged")
    return found


# What an adapter may ask for beyond low-rank changes, and why it is not served.
_REFUSED = {
    "use_dora": "DoRA changes norms of whole matrices", "modules_to_save": "it holds whole modules",
    "fan_in_fan_out": "its matrices are transposed", "lora_bias": "it has biases",
    "layer_replication": "it runs layers several times", "trainable_token_indices": "it changes embeddings",
    "target_parameters": "it changes experts", "alora_invocation_tokens": "it acts behind certain tokens alone",
    "arrow_config": "it is a mixture of adapters", "use_qalora": "its inputs are pooled",
    "use_bdlora": "its matrices are made of blocks",
}
# What says nothing about the numbers that are served: where they came from, how they were trained and saved.
_NEUTRAL = {
    "peft_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode",
    "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules", "exclude_modules", "bias",
    "lora_dropout", "init_lora_weights", "layers_to_transform", "layers_pattern", "loftq_config", "eva_config",
    "corda_config", "megatron_config", "megatron_core", "runtime_config", "ensure_weight_tying", "qalora_group_size",
    "lora_ga_config",
}


def _config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads((path / "adapter_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise AdapterError(f"{path} is no adapter folder: adapter_config.json cannot be read ({e})") from e
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else type(config).__name__
        raise AdapterError(f"the adapter {path} is of type {kind}; only LORA is served")
    for key, value in config.items():
        if value and key in _REFUSED:
            raise AdapterError(f"the adapter {path} has {key} set: {_REFUSED[key]}, which is not served; merge it into "
                               "the model")
        if value and key not in _NEUTRAL:
            log.warning("the adapter %s has %s set (%.60r), which is not known and has no effect", path, key, value)
    if config.get("bias") not in (None, "none"):
        raise AdapterError(f"the adapter {path} has bias {config['bias']!r}: trained biases are not served; merge it")
    return config


def _module_of(path: Path, name: str) -> tuple[str, int]:
    """("model.layers.0.self_attn.q_proj", 0 for A and 1 for B). Of an adapter of a multimodal model the name within
    its text part."""
    for mark, end in enumerate(MARK):
        if name.endswith(f".{end}"):
            module = name_alone(name.removeprefix(PREFIX).removesuffix(f".{end}"))
            if module is not None:
                return module, mark
            raise AdapterError(f"the adapter {path} changes {name}, of what sees images; only text is served")
    raise AdapterError(f"the adapter {path} holds {name}; only lora_A and lora_B of linear layers are served")


def _scale(config: dict[str, Any], module: str, rank: int) -> float:
    """alpha / r, or alpha / sqrt(r) with rslora (Kalajdzievski 2023, https://arxiv.org/abs/2312.03732). A pattern is
    a regular expression for the end of a module's name, and the first that fits counts, as in PEFT."""
    alpha = config.get("lora_alpha") or config.get("r") or rank
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            alpha = value
            break
    if not math.isfinite(alpha):
        raise ValueError(f"{alpha} is no finite number")
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)
