"""Sizes of a model, as far as memory and time depend on them: of a public shape by its name (`shapes.json`), of a
config.json, or of a folder or hub id that has one on this disk."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from stretto.model.config import ModelConfig
from stretto.model.errors import ConfigError
from stretto.wire import STATE

FILE = Path(__file__).with_name("shapes.json")
WEIGHT_BITS, KV_BITS = (4, 8, 16), (8, 16)


@dataclass(frozen=True)
class Shape:
    """`windows`: of the layers that keep a window. `experts`: of a layer, 0 where it is dense; `chosen` of them compute
    a token, each `inner` features wide."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    tied: bool
    context: int
    windows: tuple[int, ...] = ()
    experts: int = 0
    chosen: int = 0
    weight_bits: int = 16
    kv_bits: int = 16

    @property
    def attention_weights(self) -> int:
        """Of a layer, in numbers."""
        return self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)

    @property
    def expert_weights(self) -> int:
        """Of one expert, or of the MLP of a dense layer."""
        return 3 * self.hidden * self.inner

    @property
    def head_weights(self) -> int:
        return self.hidden * self.vocab

    @property
    def weight_bytes(self) -> float:
        """On the devices in all. Head and embedding stay in 16 bits."""
        layer = self.attention_weights + max(self.experts, 1) * self.expert_weights
        return self.layers * layer * self.weight_bits / 8 + self.head_weights * (2 if self.tied else 4)

    @property
    def kv_layer_bytes(self) -> float:
        """Of a token in a layer."""
        return 2 * self.kv_heads * self.head_dim * self.kv_bits / 8

    @property
    def kv_token_bytes(self) -> float:
        """Of a token in the layers that keep all of them."""
        return self.kv_layer_bytes * (self.layers - len(self.windows))

    @property
    def window_bytes(self) -> float:
        """Of a sequence in the layers that keep a window, when they are full."""
        return self.kv_layer_bytes * sum(self.windows)

    def kv_share(self, ranks: int) -> float:
        """Of the KV cache that each of so many devices holds: at least one head."""
        return max(1 / ranks, 1 / self.kv_heads)

    def layer_weights_read(self, tokens: float) -> float:
        """Numbers of a layer that a step of so many tokens reads: of experts those that any token has chosen."""
        if not self.experts:
            return self.attention_weights + self.expert_weights
        hit = self.experts * (1 - (1 - self.chosen / self.experts) ** tokens)
        return self.attention_weights + hit * self.expert_weights

    @property
    def layer_weights_used(self) -> int:
        """Numbers of a layer that a token is multiplied with."""
        return self.attention_weights + (self.chosen if self.experts else 1) * self.expert_weights


@lru_cache(maxsize=1)
def _file() -> dict[str, dict[str, Any]]:
    return json.loads(FILE.read_text(encoding="utf-8"))


def known_shapes() -> tuple[str, ...]:
    return tuple(_file())


def find_shape(model: str, weight_bits: int | None = None, kv_bits: int = 16) -> Shape:
    """`weight_bits`: None takes what the checkpoint says, else 16. Raises ValueError that says what is known."""
    for name, bits, allowed in (("weight", weight_bits, WEIGHT_BITS), ("KV", kv_bits, KV_BITS)):
        if bits is not None and bits not in allowed:
            raise ValueError(f"{bits} bits of a {name}: it can be one of {', '.join(map(str, allowed))}")
    name, raw = _find(model)
    try:
        config = ModelConfig.from_hf(raw)
    except (ConfigError, KeyError, TypeError) as e:
        raise ValueError(f"the sizes of {model} cannot be read: {e}") from e
    if STATE in config.windows:
        raise ValueError(f"{model} has layers that keep a state; plans know layers of attention alone")
    method = config.quantization
    stored = getattr(method, "bits", None) or 16 if method is not None else 16
    experts = config.value("num_experts") or config.value("num_local_experts") or 0
    return Shape(
        name=name, layers=config.n_layers, hidden=config.hidden_size, heads=config.n_heads,
        kv_heads=config.n_kv_heads, head_dim=config.head_dim,
        inner=(config.value("moe_intermediate_size") if experts else None) or config.intermediate_size,
        vocab=config.vocab_size, tied=config.tie_embeddings, context=config.max_position,
        windows=tuple(window for window in config.windows if window is not None), experts=experts,
        chosen=config.value("num_experts_per_tok") or 0 if experts else 0,
        weight_bits=weight_bits or stored, kv_bits=kv_bits)


def _find(model: str) -> tuple[str, dict[str, Any]]:
    plain = model.rpartition("/")[2].lower()
    for name in (plain, plain.removesuffix("-instruct"), plain.removeprefix("meta-")):
        if name in _file():
            return name, _file()[name]
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    if path.is_file():
        return path.parent.name if path.name == "config.json" else path.stem, json.loads(path.read_text("utf-8"))
    try:
        cached = try_to_load_from_cache(model, "config.json") if model.count("/") == 1 else None
    except HFValidationError:  # a path, such as /models
        cached = None
    if isinstance(cached, str):
        return plain, json.loads(Path(cached).read_text("utf-8"))
    raise ValueError(f"no sizes of {model!r} are at hand: name a public shape ({', '.join(known_shapes())}), a folder,"
                     " a config.json, or a model of the hub that has been fetched before")
