"""The decoder that all native families share. A family is a `Style`: data, not code.

One layer, hidden states [T, E]; which of the four norms exist is the style's:

    x = norm(h);  q, k, v = qkv(x);  [q, k = norm];  q, k = rotate;  a = out(attend(q, k, v));  h += [norm](a)
    x = norm(h);  m = down(act(gate(x)) * up(x)), or experts(x);                                 h += [norm](m)

Rotation turns the pairs (i, i + D/2) of a head's features. Models that turn neighbours, or a part of the features, have
the rows of their q and k projections put in that order when they are loaded: scores are sums over features, whose
order does not matter, and pairs that are not turned have angle 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from stretto.attn.api import Attend, LayerSpec, StateSpec
from stretto.model.config import ConfigError, ModelConfig
from stretto.model.experts import ExpertMLP
from stretto.model.layers import (
    Embedding,
    GatedMLP,
    Head,
    HeadNorm,
    Linear,
    OffsetHeadNorm,
    OffsetNorm,
    RMSNorm,
    Rotary,
    WholeNorms,
    attend_heads,
)
from stretto.model.shard import Shard, cut_heads, heads_of
from stretto.model.weights import Weights
from stretto.ops.fixed import elementwise
from stretto.ops.layer import Rope
from stretto.wire import STATE


class Mixer(Protocol):
    """What moves between tokens in a layer: attention, or what keeps a state. `out` is the projection back."""

    out: Linear

    def __call__(self, x: torch.Tensor, norm: RMSNorm | None, rope: Rope, attend: Attend) -> torch.Tensor:
        """x [T, E], normed first if there is a norm -> [T, inputs of `out`]."""
        ...


MakeMixer = Callable[[ModelConfig, Weights, int, int], Mixer]  # (config, weights, layer, which of those with states)
MLP = GatedMLP | ExpertMLP
MakeMLP = Callable[[ModelConfig, Weights, int], MLP]  # (config, weights, index of the layer)


@dataclass(frozen=True)
class Norms:
    """The names of a layer's norms, under "model.layers.N."; None: there is none at this place."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


@dataclass(frozen=True)
class Style:
    """What sets families apart."""

    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_norm: bool = False  # RMSNorm of each q and k head before the rotation
    whole_norm: bool = False  # RMSNorm of all of q, and of all of k, before the rotation
    offset_norm: bool = False  # norms multiply by 1 + weight, in float32
    fused_qkv: bool = False  # the checkpoint holds one matrix qkv_proj
    fused_mlp: bool = False  # the checkpoint holds one matrix gate_up_proj
    neighbours: bool = False  # rotation turns features 2i and 2i + 1
    sinks: bool = False
    gated: bool = False  # q_proj also makes a gate for each feature of the attended heads
    norms: Norms = Norms()
    scale: float | None = None  # of attention scores; None: head_dim ** -0.5
    softcap: float | None = None  # of attention scores
    embedding_scale: float | None = None
    residual_scale: float = 1.0  # of what attention and MLP make, before it is added
    logit_divisor: float = 1.0
    logit_cap: float | None = None
    mlp: MakeMLP | None = None  # None: a gated one in every layer
    recurrent: MakeMixer | None = None  # of the layers that keep a state
    state: Callable[[ModelConfig, Shard], StateSpec] | None = None  # of each of them

    @property
    def norm(self) -> type[RMSNorm]:
        return OffsetNorm if self.offset_norm else RMSNorm


class Attention:
    """Projections, norms, rotation and attention of one layer; `out` is the projection back."""

    def __init__(self, config: ModelConfig, w: Weights, layer: int, index: int, style: Style):
        """`index`: which of the attending layers this one is."""
        name, c = f"model.layers.{layer}.self_attn", config
        self.index, self.head_dim, self.gated, self._fixed = index, c.head_dim, style.gated, w.fixed
        self.n_heads, self.n_kv_heads = rank_heads(c, w.shard)
        heads = (c.n_heads, c.n_kv_heads, c.n_kv_heads)
        if style.gated:
            parts = [heads_of(w.shard, f"{name}.{part}_proj", n, size) for part, n, size in
                     zip("qkv", heads, (2 * c.head_dim, c.head_dim, c.head_dim))]
        elif style.fused_qkv:
            total = sum(heads) * c.head_dim
            parts = [heads_of(w.shard, f"{name}.qkv_proj", n, c.head_dim, sum(heads[:i]) * c.head_dim, total)
                     for i, n in enumerate(heads)]
        else:
            parts = [heads_of(w.shard, f"{name}.{part}_proj", n, c.head_dim) for part, n in zip("qkv", heads)]
        self.qkv = Linear(w, parts, c.hidden_size, style.qkv_bias, _row_order(c, style, self.n_heads, self.n_kv_heads))
        self.out = Linear(w, [(f"{name}.o_proj", c.hidden_size)], c.n_heads * c.head_dim, style.out_bias, summed=True)
        head_norm = OffsetHeadNorm if style.offset_norm else HeadNorm
        order = feature_order(c.head_dim, c.rope.dim, style.neighbours) if reorders(c, style) else None
        self.head_norm = (head_norm(w, name, self.n_heads, self.n_kv_heads, c.head_dim, c.norm_eps, order)
                          if style.head_norm else None)
        self.whole_norms = (WholeNorms(w, name, c.n_heads, c.n_kv_heads, c.head_dim, c.norm_eps)
                            if style.whole_norm else None)
        self.sinks = w.stack_pieces([heads_of(w.shard, f"{name}.sinks", c.n_heads, 1)]) if style.sinks else None

    def __call__(self, x: torch.Tensor, norm: RMSNorm | None, rope: Rope, attend: Attend) -> torch.Tensor:
        """See `Mixer`."""
        qkv = self.qkv(x) if norm is None else self.qkv.normed(x, norm)
        if self.whole_norms is not None:
            q, k, _ = qkv.split([n * self.head_dim for n in (self.n_heads, self.n_kv_heads, self.n_kv_heads)], dim=1)
            self.whole_norms(q, k)
        gate = None
        if self.gated:
            width = self.n_heads * self.head_dim
            qkv, gate = qkv[:, :-width].contiguous(), qkv[:, -width:]
        qkv = qkv.view(x.shape[0], -1, self.head_dim)
        attended = attend_heads(attend, self.index, qkv, self.n_heads, rope, self.head_norm, self.sinks)
        attended = attended.reshape(x.shape[0], -1)
        if gate is None:
            return attended
        return attended * (elementwise(torch.sigmoid, gate) if self._fixed else gate.sigmoid())


class DecoderLayer:
    """Attention and MLP, each added to the residual stream in place."""

    def __init__(self, config: ModelConfig, w: Weights, index: int, style: Style):
        name, windows = f"model.layers.{index}", config.windows[:index]

        def norm(part: str | None) -> RMSNorm | None:
            if part is None:
                return None
            return style.norm(w, f"{name}.{part}", config.hidden_size, config.norm_eps)

        self.index, self._scale = index, style.residual_scale
        self.attn: Mixer
        if config.windows[index] == STATE and style.recurrent is not None:
            self.attn = style.recurrent(config, w, index, windows.count(STATE))
        else:
            self.attn = Attention(config, w, index, index - windows.count(STATE), style)
        self.mlp = style.mlp(config, w, index) if style.mlp else gated_mlp(config, w, index, style)
        self.before_attn, self.after_attn = norm(style.norms.before_attention), norm(style.norms.after_attention)
        self.before_mlp, self.after_mlp = norm(style.norms.before_mlp), norm(style.norms.after_mlp)

    def __call__(self, hidden: torch.Tensor, rope: Rope, attend: Attend) -> torch.Tensor:
        """hidden [T, E], updated in place and returned."""
        attended = self.attn(hidden, self.before_attn, rope, attend)
        if self.after_attn is None and self._scale == 1:
            hidden = self.attn.out.add_to(hidden, attended)
        else:
            hidden = self._add(hidden, self.attn.out(attended), self.after_attn)
        alone = self.after_mlp is None and self._scale == 1
        if alone and isinstance(self.mlp, GatedMLP) and self.before_mlp is not None:
            return self.mlp.add_normed(hidden, self.before_mlp)
        x = hidden if self.before_mlp is None else self.before_mlp(hidden)
        if isinstance(self.mlp, ExpertMLP):
            tokens = getattr(attend, "tokens", None)
            return self.mlp.add_to(hidden, x, tokens) if alone else self._add(hidden, self.mlp(x, tokens),
                                                                              self.after_mlp)
        return self.mlp.add_to(hidden, x) if alone else self._add(hidden, self.mlp(x), self.after_mlp)

    def _add(self, hidden: torch.Tensor, made: torch.Tensor, norm: RMSNorm | None) -> torch.Tensor:
        return hidden.add_(made if norm is None else norm(made), alpha=self._scale)


class Decoder:
    """A CausalModel of any native family."""

    graphs = True  # forward may be captured in a CUDA graph

    def __init__(self, config: ModelConfig, w: Weights, context: int, style: Style):
        c = config
        self.config, self.style, self.dtype, self.device, self.fixed = c, style, w.dtype, w.device, w.fixed
        self.vocab_size, self.hidden_size, self.max_position = c.vocab_size, c.hidden_size, context
        _check_shard(c, style, w.shard)
        scale = c.head_dim**-0.5 if style.scale is None else style.scale
        n_heads, n_kv_heads = rank_heads(c, w.shard)
        self.layers = tuple(LayerSpec(n_heads, n_kv_heads, c.head_dim, scale, window, style.softcap, style.sinks)
                            for window in c.windows if window != STATE)
        self.states = (style.state(c, w.shard),) * c.windows.count(STATE) if style.state else ()
        self.embedding = Embedding(w, "model.embed_tokens", c.vocab_size, c.hidden_size)
        self.decoder = [DecoderLayer(c, w, i, style) for i in range(c.n_layers)]
        self.norm = style.norm(w, "model.norm", c.hidden_size, c.norm_eps)
        self.head = Head(w, "lm_head", self.embedding, c.tie_embeddings)
        ordered = reorders(c, style)
        self.rotary = Rotary(c.rope, c.head_dim, context, w.device, ordered)
        self.local_rotary = (Rotary(c.local_rope, c.head_dim, context, w.device, ordered)
                             if c.local_rope is not None else None)
        self._embedding_scale = (None if style.embedding_scale is None else
                                 torch.tensor(style.embedding_scale, dtype=w.dtype, device=w.device))

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, attend: Attend,
                taps: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
        """See CausalModel."""
        hidden = self.embedding(ids)
        if self._embedding_scale is not None:
            hidden = hidden.mul_(self._embedding_scale)
        for layer, (rope, through) in zip(self.decoder, self.each_layer(positions, attend), strict=True):
            hidden = layer(hidden, rope, through)
            if taps is not None and (name := f"hidden.{layer.index}") in taps:
                taps[name] = hidden.clone()  # later layers write into `hidden`
        hidden = self.norm(hidden)
        if taps is not None and "hidden.last" in taps:
            taps["hidden.last"] = hidden
        return hidden

    def each_layer(self, positions: torch.Tensor, attend: Attend) -> list[tuple[Rope, Attend]]:
        """What each layer rotates by, and attends through."""
        rope = self.rotary.at(positions)
        local = rope if self.local_rotary is None else self.local_rotary.at(positions)
        return [(rope if window is None else local, attend) for window in self.config.windows]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[L, E] -> [L, V] float32."""
        logits, cap = self.head(hidden), self.style.logit_cap
        if self.style.logit_divisor != 1:
            logits = logits / self.style.logit_divisor
        return logits if cap is None else torch.tanh(logits / cap) * cap


def gated_mlp(config: ModelConfig, w: Weights, index: int, style: Style) -> GatedMLP:
    """The MLP of a layer without experts."""
    return GatedMLP(w, f"model.layers.{index}.mlp", config.hidden_size, config.intermediate_size, config.hidden_act,
                    style.mlp_bias, style.fused_mlp)


def reorders(config: ModelConfig, style: Style) -> bool:
    """Whether the features of a head stand in another order than in the checkpoint."""
    return style.neighbours or config.rope.dim != config.head_dim


def feature_order(head_dim: int, rotated: int, neighbours: bool) -> list[int]:
    """Which feature of the checkpoint's head comes at each place, so that pairs are (i, i + D/2).

        halves      first | second | rest         ->  first  rest[:half] | second  rest[half:]
        neighbours  f s f s f s    | rest         ->  f f f  rest[:half] | s s s   rest[half:]

    Raises ConfigError where no pairing exists."""
    if head_dim % 2 or rotated % 2:
        raise ConfigError(f"{rotated} of {head_dim} features of a head are rotated; both must be even")
    half, rest = rotated // 2, range(rotated, head_dim)
    first, second = ((range(0, rotated, 2), range(1, rotated, 2)) if neighbours else
                     (range(half), range(half, rotated)))
    return [*first, *rest[: len(rest) // 2], *second, *rest[len(rest) // 2 :]]


def rank_heads(config: ModelConfig, shard: Shard) -> tuple[int, int]:
    """Query heads and KV heads of a rank."""
    return cut_heads(shard, config.n_heads)[1], cut_heads(shard, config.n_kv_heads)[1]


def _check_shard(config: ModelConfig, style: Style, shard: Shard) -> None:
    """Raises ConfigError where the model cannot be cut into so many parts."""
    ranks, kv = shard.ranks, config.n_kv_heads
    if ranks == 1:
        return
    if config.n_heads % ranks or config.intermediate_size % ranks or (kv % ranks and ranks % kv):
        raise ConfigError(f"{config.n_heads} heads, {kv} KV heads and {config.intermediate_size} inner features cannot"
                          f" be shared equally by {ranks} ranks")


def _row_order(config: ModelConfig, style: Style, n_heads: int, n_kv_heads: int) -> torch.Tensor | None:
    """The order of the rows of so many heads of q, k and v one below the other; None: as they are."""
    if not reorders(config, style) and not style.gated:
        return None
    order = torch.tensor(feature_order(config.head_dim, config.rope.dim, style.neighbours))
    if style.gated:
        return _gated_order(order, n_heads, n_kv_heads)
    rotated = torch.arange(n_heads + n_kv_heads)[:, None] * config.head_dim + order
    rest = torch.arange(rotated.numel(), rotated.numel() + n_kv_heads * config.head_dim)
    return torch.cat((rotated.flatten(), rest))


def _gated_order(order: torch.Tensor, n_heads: int, n_kv_heads: int) -> torch.Tensor:
    """As `_row_order`; the rows of each q head come with those of its gate behind them, and all gates go to the end."""
    dim = len(order)
    q = torch.arange(n_heads)[:, None] * 2 * dim
    k = 2 * n_heads * dim + torch.arange(n_kv_heads)[:, None] * dim
    v = 2 * n_heads * dim + n_kv_heads * dim + torch.arange(n_kv_heads * dim)
    return torch.cat([(q + order).flatten(), (k + order).flatten(), v, (q + dim + torch.arange(dim)).flatten()])
