"""The pieces that decoder models share. Tensors are packed: [T, features], no batch dimension.

Each piece declares its parameters when it is made (`Weights`), fused where one multiplication can replace several, and
runs as few operations as it can. Nothing here reads a device value on the host, so all of it may be captured in a
CUDA graph. The residual stream is updated in place: what must outlive a layer is copied by whoever wants it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from stretto.model.config import ConfigError, RopeConfig
from stretto.model.matrix import best_matrix
from stretto.model.weights import Weights

logger = logging.getLogger(__name__)


class Linear:
    """y = x W^T + b over one or several matrices of a checkpoint, fused by rows."""

    def __init__(self, w: Weights, parts: list[tuple[str, int]], inputs: int, bias: bool = False):
        weight = w.stack([(f"{name}.weight", rows) for name, rows in parts], inputs)
        self._parameters = weight, w.stack([(f"{name}.bias", rows) for name, rows in parts]) if bias else None
        w.then(self._settle)

    def _settle(self) -> None:
        self._matrix = best_matrix(*self._parameters)
        del self._parameters

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, inputs] -> [T, rows]."""
        return self._matrix(x)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual += self(x), in place; returns it."""
        return self._matrix.add_to(residual, x)


class RMSNorm:
    """x / rms(x) * weight over the last dimension, computed in float32."""

    def __init__(self, w: Weights, name: str, size: int, eps: float):
        self.weight = w.take(f"{name}.weight", size)
        self.shape, self.eps = (size,), eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.shape, self.weight, self.eps)


class HeadNorm:
    """RMSNorm of each head of q and of k in one call: x [T, H + Hkv, D], one weight for q heads, one for k heads."""

    def __init__(self, w: Weights, name: str, n_heads: int, n_kv_heads: int, head_dim: int, eps: float):
        self._both = w.stack([(f"{name}.q_norm.weight", head_dim), (f"{name}.k_norm.weight", head_dim)])
        index = torch.tensor([0] * n_heads + [1] * n_kv_heads, device=w.device)
        w.then(lambda: self._spread(index))
        self.shape, self.eps = (head_dim,), eps

    def _spread(self, index: torch.Tensor) -> None:
        self.weight = self._both.view(2, -1)[index]  # [H + Hkv, D]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.shape, None, self.eps).mul_(self.weight)


class Rotary:
    """Rotary position embedding (Su et al. 2021, https://arxiv.org/abs/2104.09864), halves rotated as HF models do.

    The table holds cos and sin in float32 for each position of the context: [positions, D], row p = [cos | sin]. A row
    depends on its position alone, never on how long a sequence has become: cells of the KV cache stay valid for ever.
    """

    def __init__(self, rope: RopeConfig, head_dim: int, positions: int, device: torch.device):
        if rope.dim != head_dim:
            raise ConfigError(f"the config rotates {rope.dim} of {head_dim} features of a head; this model rotates all")
        self.table = rope_table(rope, positions).to(device)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions [T] -> cos and signed sin, each [T, 1, D] float32, for `rotate`."""
        cos, sin = self.table[positions].unsqueeze(1).chunk(2, dim=-1)
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """x [T, H, D], rotated: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin), in float32, rounded once."""
    cos, sin = rope
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)


def rope_table(rope: RopeConfig, positions: int) -> torch.Tensor:
    """[positions, D] float32: cos of D/2 frequencies, then sin."""
    at = torch.arange(positions, dtype=torch.float32)
    if rope.kind == "dynamic":
        angles = at[:, None] * _dynamic_frequencies(rope, at)
    else:
        angles = torch.outer(at, rope_frequencies(rope, positions))
    scale = rope_attention_factor(rope)
    return torch.cat((angles.cos() * scale, angles.sin() * scale), dim=-1)


def _plain_frequencies(rope: RopeConfig) -> torch.Tensor:
    return 1.0 / rope.theta ** (torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim)


def rope_frequencies(rope: RopeConfig, positions: int) -> torch.Tensor:
    """[D / 2] float32. `positions` is the context that is served: longrope has one set of frequencies for contexts of
    the original length and one for longer ones (Ding et al. 2024, https://arxiv.org/abs/2402.13753)."""
    plain = _plain_frequencies(rope)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3_frequencies(rope, plain)
    if rope.kind == "yarn":
        return _yarn_frequencies(rope, plain)
    if rope.kind == "longrope":
        chosen = rope.long_factor if positions > rope.original_max_position else rope.short_factor
        return plain / torch.tensor(chosen, dtype=torch.float32)
    return plain


def _llama3_frequencies(rope: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Llama 3.1: waves longer than the original context are stretched by `factor`, short ones stay, between them a
    linear blend in the number of turns per original context."""
    turns = rope.original_max_position * plain / (2 * math.pi)
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return torch.lerp(plain / rope.factor, plain, keep.clamp(0, 1))


def _yarn_frequencies(rope: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """YaRN (Peng et al. 2023, https://arxiv.org/abs/2309.00071), section 3.2: interpolate features that turn fewer than
    `beta_slow` times in the original context, keep those above `beta_fast`, ramp between."""

    def feature(turns: float) -> float:
        return rope.dim * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = feature(rope.beta_fast), feature(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    ramp = (torch.arange(rope.dim // 2, dtype=torch.float32) - low) / (high - low if high != low else 0.001)
    return torch.lerp(plain, plain / rope.factor, ramp.clamp(0, 1))


def _dynamic_frequencies(rope: RopeConfig, at: torch.Tensor) -> torch.Tensor:
    """Dynamic NTK, [positions, D / 2]: past the original context the base grows with the length. The length that counts
    for position p is p + 1, the one at which token-by-token generation reaches it."""
    length = (at + 1).clamp(min=rope.original_max_position)
    growth = rope.factor * length / rope.original_max_position - (rope.factor - 1)
    base = rope.theta * growth ** (rope.dim / (rope.dim - 2))
    return 1.0 / base[:, None] ** (torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim)


def rope_attention_factor(rope: RopeConfig) -> float:
    """What cos and sin are multiplied by: a temperature of the attention, in yarn and longrope."""
    if rope.kind not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor is not None:
        return float(rope.attention_factor)
    if rope.factor <= 1:
        return 1.0
    if rope.kind == "longrope":
        return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position))

    def temperature(mscale: float) -> float:
        return 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return temperature(rope.mscale) / temperature(rope.mscale_all_dim)
    return temperature(1.0)


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu, "swish": F.silu, "gelu": F.gelu, "relu": F.relu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
}


class GatedMLP:
    """down(act(gate(x)) * up(x)) (Shazeer 2020, https://arxiv.org/abs/2002.05202)."""

    def __init__(self, w: Weights, name: str, hidden: int, inner: int, act: str, bias: bool = False):
        if act not in ACTIVATIONS:
            raise ConfigError(f"hidden_act {act!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
        self.gate_up = Linear(w, [(f"{name}.gate_proj", inner), (f"{name}.up_proj", inner)], hidden, bias)
        self.down = Linear(w, [(f"{name}.down_proj", hidden)], inner, bias)
        self._act = ACTIVATIONS[act]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden]."""
        return self.down(self._inner(x))

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual += self(x), in place; returns it."""
        return self.down.add_to(residual, self._inner(x))

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self._act(gate).mul_(up)


class Embedding:
    """ids [T] -> [T, hidden], a fresh tensor."""

    def __init__(self, w: Weights, name: str, vocab: int, hidden: int):
        self.name = f"{name}.weight"
        self.weight = w.take(self.name, vocab, hidden)

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.weight)


class Head:
    """Hidden states -> float32 logits. With tied embeddings it is the embedding matrix, and a copy of it that the
    checkpoint may hold is left alone; otherwise the checkpoint must hold a matrix of its own. A config that ties and a
    checkpoint that holds another matrix contradict each other: the checkpoint is believed, as transformers does."""

    def __init__(self, w: Weights, name: str, embedding: Embedding, tied: bool):
        own = f"{name}.weight"
        if tied and w.differ(own, embedding.name):
            logger.warning("the config ties the head to the embedding, but %s differs from %s: the checkpoint's own "
                           "head is used; set tie_word_embeddings to false to say so", own, embedding.name)
            tied = False
        if tied:
            self.weight = embedding.weight
            w.ignore(own)
        else:
            self.weight = w.take(own, *embedding.weight.shape)
        w.then(self._settle)

    def _settle(self) -> None:
        """A tied head may be packed as well: the embedding stays as it is, for its rows are looked up."""
        self._matrix = best_matrix(self.weight)
        del self.weight

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._matrix(hidden).float()
