"""The pieces that decoder models share. Tensors are packed: [T, features], no batch dimension.

Each piece declares its parameters when it is made (`Weights`), fused where one multiplication can replace several, and
runs as few operations as it can. Nothing here reads a device value on the host, so all of it may be captured in a
CUDA graph. The residual stream is updated in place: what must outlive a layer is copied by whoever wants it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F

from stretto.attn.api import Attend
from stretto.model.config import ConfigError, RopeConfig
from stretto.model.matrix import CudaMatrix, Matrix, best_matrix, fixed_matrix
from stretto.model.packed_matrix import JoinedMatrix, NativeMatrix, packed_matrix
from stretto.model.shard import Columns, Piece, columns_of, first_holder, heads_of, rows_of, whole
from stretto.model.weights import Weights
from stretto.ops.attend import StepAttention
from stretto.ops.fixed import elementwise
from stretto.ops.gates import GATES as ACTIVATIONS
from stretto.ops.layer import HeadWeights, Rope, fused, gate, rms_norm, rotate
from stretto.ops.packed import Packed

logger = logging.getLogger(__name__)


class Linear:
    """y = x W^T + b over one or several matrices of a checkpoint, fused by rows."""

    def __init__(self, w: Weights, parts: Sequence[tuple[str, int] | Piece], inputs: int, bias: bool = False,
                 order: torch.Tensor | None = None, summed: bool = False):
        """`parts`: (name, rows) of whole matrices, or this rank's pieces of them. `order` [rows] says which row of
        these comes at each place; None: as they are. `summed`: each rank has its part of the inputs, and what they
        make of them is added up."""
        pieces = [part if isinstance(part, Piece) else whole(*part) for part in parts]
        self._order, self._fixed, self._shard = order, w.fixed, w.shard if summed and w.shard.ranks > 1 else None
        weights = w.matrices([replace(p, name=f"{p.name}.weight") for p in pieces], inputs, summed, order is not None)
        w.multiplied(weights)
        bias_of = [replace(p, name=f"{p.name}.bias") for p in pieces] if bias else None
        self._parameters = weights, None if bias_of is None else w.stack_pieces(bias_of)
        self._bias_elsewhere = self._shard is not None and w.shard.rank > 0  # it counts once
        columns = columns_of(w.shard, inputs) if summed else Columns(inputs, 0, inputs)
        self._delta = (w.adapters.declare(pieces, columns, order, w.dtype, w.device)
                       if w.adapters is not None else None)
        w.then(self._settle)

    def _settle(self) -> None:
        weights, bias = self._parameters
        if self._order is not None:
            (weight,) = weights
            order = self._order.to((weight.codes if isinstance(weight, Packed) else weight).device)
            weights = [weight.take(order) if isinstance(weight, Packed) else weight[order]]
            bias = None if bias is None else bias[order]
        self._matrix = matrix_of(weights, None if self._bias_elsewhere else bias, self._fixed)
        del self._parameters, self._order

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, inputs] -> [T, rows]."""
        made = self._own(x)
        return made if self._shard is None else self._shard.sum(made)

    def _own(self, x: torch.Tensor) -> torch.Tensor:
        """What this rank makes of its inputs."""
        made = self._matrix(x)
        return made if self._delta is None or not self._delta.active else self._delta.add_to(made, x)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual += self(x), in place; returns it."""
        if self._shard is not None:
            return self._shard.add(residual, self._own(x))
        made = self._matrix.add_to(residual, x)
        return made if self._delta is None or not self._delta.active else self._delta.add_to(made, x)

    @property
    def _alone(self) -> bool:
        """No adapter adds to what the matrix makes."""
        return self._delta is None or not self._delta.active

    def joined(self, x: torch.Tensor) -> NativeMatrix | None:
        """The matrix, where the product of x can be one call with what stands around it."""
        matrix = self._matrix
        if isinstance(matrix, NativeMatrix) and self._shard is None and self._alone and matrix.joins(x):
            return matrix
        return None

    def normed(self, x: torch.Tensor, norm: RMSNorm, act: str | None = None) -> torch.Tensor:
        """self(norm(x)), in fewer launches and calls; with `act`, the gated halves of it, [T, rows / 2]."""
        if isinstance(self._matrix, CudaMatrix | NativeMatrix) and self._alone:
            return self._matrix.normed(x, norm.weight, norm.eps, act)
        return self(norm(x)) if act is None else self.gated(norm(x), act)

    def gated(self, x: torch.Tensor, act: str) -> torch.Tensor:
        """x [T, inputs] -> act(first half) * second half, [T, rows / 2]."""
        made = self(x)
        if self._fixed and not fused(made):
            first, second = made.chunk(2, dim=-1)
            return elementwise(ACTIVATIONS[act], first).mul_(second)
        return gate(made, act)


def matrix_of(weights: Sequence[torch.Tensor | Packed], bias: torch.Tensor | None, fixed: bool) -> Matrix:
    """The fastest form of matrices one below the other, as one."""
    made: list[Matrix] = []
    at = 0
    for weight in weights:
        rows = weight.outputs if isinstance(weight, Packed) else weight.shape[0]
        mine = None if bias is None else bias.narrow(0, at, rows)
        made.append(packed_matrix(weight, mine) if isinstance(weight, Packed) else
                    fixed_matrix(weight, mine) if fixed else best_matrix(weight, mine))
        at += rows
    return made[0] if len(made) == 1 else JoinedMatrix(made)


class RMSNorm:
    """x / rms(x) * weight over the last dimension, computed in float32."""

    def __init__(self, w: Weights, name: str, size: int, eps: float):
        self.weight = w.take(f"{name}.weight", size)
        self.shape, self.eps = (size,), eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)


class OffsetNorm(RMSNorm):
    """RMSNorm by 1 + weight, all of it in float32."""

    def __init__(self, w: Weights, name: str, size: int, eps: float):
        super().__init__(w, name, size, eps)
        w.then(self._add_one)

    def _add_one(self) -> None:
        self.weight = 1 + self.weight.float()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if fused(x):  # the kernel computes in float32 whatever it reads
            return super().__call__(x)
        return super().__call__(x.float()).to(x.dtype)


class HeadNorm:
    """RMSNorm of each head of q and of k in one call: x [T, H + Hkv, D], one weight for q heads, one for k heads."""

    def __init__(self, w: Weights, name: str, n_heads: int, n_kv_heads: int, head_dim: int, eps: float,
                 order: Sequence[int] | None = None):
        """`order`: which of the checkpoint's features stands at each place of a head; None: as they are."""
        self._order = order
        self._both = w.stack([(f"{name}.q_norm.weight", head_dim), (f"{name}.k_norm.weight", head_dim)])
        index = torch.tensor([0] * n_heads + [1] * n_kv_heads, device=w.device)
        w.then(lambda: self._spread(index))
        self.shape, self.eps = (head_dim,), eps

    def _spread(self, index: torch.Tensor) -> None:
        both = self._both.view(2, -1)
        if self._order is not None:
            both = both[:, torch.tensor(self._order, device=both.device)]
        self.weight = both[index]  # [H + Hkv, D]
        q, k = both.unbind(0)
        self.each = HeadWeights(q, k, self.eps)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.shape, None, self.eps).mul_(self.weight)


class OffsetHeadNorm(HeadNorm):
    """HeadNorm by 1 + weight, all of it in float32."""

    def _spread(self, index: torch.Tensor) -> None:
        self._both = 1 + self._both.float()
        super()._spread(index)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return super().__call__(x.float()).to(x.dtype)


class WholeNorms:
    """RMSNorm of all of q, and of all of k, in place. Where ranks share the heads, the squares are added up over them:
    those of heads that several ranks hold, once."""

    def __init__(self, w: Weights, name: str, n_heads: int, n_kv_heads: int, head_dim: int, eps: float):
        self._shard, self._eps, counts = w.shard, eps, (n_heads, n_kv_heads)
        self._weights = [w.stack_pieces([heads_of(w.shard, f"{name}.{part}_norm.weight", n, head_dim)])
                         for part, n in zip("qk", counts)]
        self._held = [float(first_holder(w.shard, n)) / (n * head_dim) for n in counts]

    def __call__(self, q: torch.Tensor, k: torch.Tensor) -> None:
        """q, k [T, a rank's heads * D], views of one tensor."""
        if self._shard.ranks == 1:
            for x, weight in zip((q, k), self._weights):
                x.copy_(rms_norm(x, weight, self._eps))
            return
        squares = [x.float().square().sum(-1) * held for x, held in zip((q, k), self._held)]
        scales = (self._shard.sum(torch.stack(squares, -1)) + self._eps).rsqrt()
        for x, weight, scale in zip((q, k), self._weights, scales.unbind(-1)):
            x.copy_(x.float() * scale[:, None] * weight)


class Rotary:
    """Rotary position embedding (Su et al. 2021, https://arxiv.org/abs/2104.09864), halves rotated as HF models do.

    The table holds cos and sin in float32 for each position of the context: [positions, D], row p = [cos | sin]. A row
    depends on its position alone, never on how long a sequence has become: cells of the KV cache stay valid for ever.
    """

    def __init__(self, rope: RopeConfig, head_dim: int, positions: int, device: torch.device, ordered: bool = False):
        """`ordered`: the model has put the features of its heads in the order of `decoder.feature_order`, so that a
        part of them may be rotated: the other pairs stand still."""
        if rope.dim != head_dim and not ordered:
            raise ConfigError(f"the config rotates {rope.dim} of {head_dim} features of a head; this model rotates all")
        still = (head_dim - rope.dim) // 2
        cos, sin = rope_table(rope, positions).chunk(2, dim=-1)
        self.table = torch.cat((F.pad(cos, (0, still), value=1.0), F.pad(sin, (0, still))), dim=-1).to(device)

    def at(self, positions: torch.Tensor) -> Rope:
        """positions [T] int64."""
        return Rope(self.table, positions.contiguous())


def attend_heads(attend: Attend, layer: int, qkv: torch.Tensor, n_heads: int, rope: Rope,
                 head_norm: HeadNorm | None, sinks: torch.Tensor | None = None) -> torch.Tensor:
    """qkv [T, H + 2 Hkv, D] as projected: norms and rotates q and k, then attends. Returns [T, H, D]. Where there are
    kernels, norm, rotation and the write of keys and values are one."""
    if isinstance(attend, StepAttention) and attend.projects(layer, qkv):
        return attend.projected(layer, qkv, n_heads, rope, head_norm.each if head_norm is not None else None, sinks)
    rotated = (qkv.shape[1] + n_heads) // 2
    qk, v = qkv[:, :rotated], qkv[:, rotated:]
    if head_norm is not None:
        qk = head_norm(qk)
    qk = rotate(qk, rope)
    q, k = qk[:, :n_heads], qk[:, n_heads:]
    return attend(layer, q, k, v) if sinks is None else attend(layer, q, k, v, sinks)


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
    if rope.kind == "none":
        return torch.zeros_like(plain)
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


class GatedMLP:
    """down(act(gate(x)) * up(x)) (Shazeer 2020, https://arxiv.org/abs/2002.05202)."""

    def __init__(self, w: Weights, name: str, hidden: int, inner: int, act: str, bias: bool = False,
                 fused: bool = False, names: tuple[str, str] = ("gate_up_proj", "down_proj")):
        """`fused`: the checkpoint holds gate and up as one matrix, the first of `names`; the second is `down`."""
        if act not in ACTIVATIONS:
            raise ConfigError(f"hidden_act {act!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
        one = f"{name}.{names[0]}"
        parts = ([rows_of(w.shard, one, 2 * inner, first, inner) for first in (0, inner)] if fused else
                 [rows_of(w.shard, f"{name}.{part}_proj", inner) for part in ("gate", "up")])
        self.gate_up = Linear(w, parts, hidden, bias)
        self.down = Linear(w, [(f"{name}.{names[1]}", hidden)], inner, bias, summed=True)
        self._act = act

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden]."""
        return self.down(self.gate_up.gated(x, self._act))

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual += self(x), in place; returns it."""
        return self.down.add_to(residual, self.gate_up.gated(x, self._act))

    def add_normed(self, residual: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        """residual += self(norm(residual)), in place; returns it."""
        first, second = self.gate_up.joined(residual), self.down.joined(residual)
        if first is not None and second is not None:
            return first.add_mlp(residual, norm.weight, norm.eps, self._act, second)
        return self.down.add_to(residual, self.gate_up.normed(residual, norm, self._act))


class Embedding:
    """ids [T] -> [T, hidden], a fresh tensor."""

    def __init__(self, w: Weights, name: str, vocab: int, hidden: int):
        self.name, self.vocab, self.hidden, self._dtype = f"{name}.weight", vocab, hidden, w.dtype
        (self.weight,) = w.matrices([whole(self.name, vocab)], hidden)

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        if isinstance(self.weight, Packed):
            return self.weight.take(ids).dequantized(self._dtype)
        return F.embedding(ids, self.weight)

    def rows(self, start: int, count: int) -> torch.Tensor | Packed:
        """A view of some of them."""
        return (self.weight.rows if isinstance(self.weight, Packed) else partial(self.weight.narrow, 0))(start, count)


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
        vocab, hidden = embedding.vocab, embedding.hidden
        self._join = w.shard.join if w.shard.ranks > 1 and vocab % w.shard.ranks == 0 else None
        piece = whole(own, vocab) if self._join is None else rows_of(w.shard, own, vocab)
        if tied:
            self.weights = [embedding.rows(piece.start, piece.rows)]
            w.ignore(own)
        else:
            self.weights = w.matrices([piece], hidden)
        w.multiplied(self.weights, elsewhere=tied)
        self._fixed = w.fixed
        w.then(self._settle)

    def _settle(self) -> None:
        """A tied head may be packed as well: the embedding stays as it is, for its rows are looked up."""
        self._matrix = matrix_of(self.weights, None, self._fixed)
        del self.weights

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self._matrix.logits(hidden)
        return logits if self._join is None else self._join(logits)
