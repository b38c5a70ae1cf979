"""The three heads, as they are trained. Each computes for every anchor of a batch what it would draft there, given the
true ids before each draft: a chain of drafts is read as far as it is right.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from training.modules import MLP, Attention, RMSNorm, Rotary, small_start

START = 0.1  # of the target's final norm: a head that knows nothing yet should not be sure of anything


@dataclass(frozen=True)
class Shape:
    """Sizes of a head's layers; heads and rotation are the target's."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    columns: tuple[int, ...]  # which of the states that are kept of the target the head reads
    theta: float
    eps: float


@dataclass(frozen=True)
class Seen:
    """What a head reads. B windows, T positions, A anchors, K drafts."""

    taps: torch.Tensor  # [B, T, n, E]: the target's states after n layers
    embedded: torch.Tensor  # [B, T, E], of the ids
    owner: torch.Tensor  # [B, T] int64: the sequence that each position is of
    position: torch.Tensor  # [B, T] int64: in it
    anchors: torch.Tensor  # [B, A] int64: places in the window, none of which begins a sequence
    following: torch.Tensor  # [B, A, K, E]: embedding of the id before each draft (the anchor's own for the first)
    before: torch.Tensor  # [B, A, K] int64: those ids

    def visible(self) -> torch.Tensor:
        """Which positions each anchor comes after, or stands on: those of its own sequence. [B, A, T] bool."""
        places = torch.arange(self.owner.shape[1], device=self.owner.device)
        same = self.owner[:, None] == self.owner.gather(1, self.anchors)[..., None]
        return same & (places <= self.anchors[..., None])


def taken(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """x [B, T, E] at places [B, A] -> [B, A, E]."""
    return x.gather(1, at[..., None].expand(-1, -1, x.shape[2]))


def picked(taps: torch.Tensor, columns: tuple[int, ...]) -> torch.Tensor:
    """Some of the states side by side: [B, T, n, E] -> [B, T, columns * E]."""
    return torch.cat([taps[:, :, i] for i in columns], -1)


Factors = list[tuple[torch.Tensor, torch.Tensor]]  # x [N, E] and w [D, E]: the sum of x w^T is the logits


class Head(Protocol):
    ids: torch.Tensor  # [D] int64: target ids of its own vocabulary

    def drafts(self, seen: Seen) -> torch.Tensor:
        """-> [B, A, K, E]."""
        ...

    def factors(self, hidden: torch.Tensor, before: torch.Tensor) -> Factors:
        """hidden [N, K, E], ids before [N, K] -> what gives the logits [N * K, D]."""
        ...

    def confidence(self, hidden: torch.Tensor, before: torch.Tensor) -> torch.Tensor | None:
        """Logits of the probability that the best draft is right, [N * K]; None for a head that gives none."""
        ...


def logits_of(factors: Factors) -> torch.Tensor:
    """[N, D]."""
    (x, w), *more = factors
    logits = x.to(w.dtype) @ w.t()
    for x, w in more:
        logits = logits.addmm(x.to(logits.dtype), w.t().to(logits.dtype))
    return logits


class EagleLayer(nn.Module):
    def __init__(self, s: Shape):
        super().__init__()
        self.hidden_norm, self.input_layernorm = RMSNorm(s.hidden, s.eps), RMSNorm(s.hidden, s.eps)
        self.self_attn = Attention(s.hidden, s.heads, s.kv_heads, s.head_dim, s.eps, inputs=2 * s.hidden)
        self.post_attention_layernorm = RMSNorm(s.hidden, s.eps)
        self.mlp = MLP(s.hidden, s.inner)

    def joined(self, embedded: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.input_layernorm(embedded), self.hidden_norm(features)], -1)


class Eagle3(nn.Module):
    """EAGLE3 with training-time test (arXiv 2503.01840, section 3.2): later drafts continue from the head's own states.

    Cell p is made from id p and the features of p-1, and turns by p-1. An anchor a reads cells 1 .. a, then its own."""

    def __init__(self, shape: Shape, ids: torch.Tensor, norm: torch.Tensor, head: torch.Tensor):
        """norm [E] and head [V, E]: the target's, to start from."""
        super().__init__()
        self.columns = shape.columns
        self.fc = nn.Linear(len(shape.columns) * shape.hidden, shape.hidden, bias=False)
        self.midlayer = EagleLayer(shape)
        self.norm = RMSNorm(shape.hidden, shape.eps)
        self.lm_head = nn.Linear(shape.hidden, len(ids), bias=False)
        self.rotary = Rotary(shape.head_dim, shape.theta)
        small_start(self)
        with torch.no_grad():
            self.norm.weight.copy_(START * norm)
            self.lm_head.weight.copy_(head[ids])
        self.register_buffer("ids", ids, persistent=False)

    def drafts(self, seen: Seen) -> torch.Tensor:
        layer, attn, anchors = self.midlayer, self.midlayer.self_attn, seen.anchors
        features = self.fc(picked(seen.taps, self.columns))
        cells = layer.joined(seen.embedded[:, 1:], features[:, :-1])  # cell p at place p-1
        turned = (seen.position[:, 1:] - 1).clamp(min=0)
        context = attn.keys(cells, turned, self.rotary)
        before = seen.visible()[..., 1:] & (seen.position[:, None, 1:] > 0)  # [B, A, T-1]
        at = anchors - 1
        before = before.scatter(2, at[..., None], True)  # an anchor sees its own cell
        feature, x, first, own, out = taken(features, at), taken(cells, at), turned.gather(1, at), [], []
        for step in range(seen.following.shape[2]):
            if step:
                x = layer.joined(seen.following[:, :, step], feature)
                own.append(attn.keys(x, first + step, self.rotary))
            chain = tuple(torch.stack(parts, 2) for parts in zip(*own, strict=True)) if own else None
            q = attn.queries(x, first + step, self.rotary)[:, :, None]
            feature = feature + attn.attend(q, context, chain, before)[:, :, 0]
            feature = feature + layer.mlp(layer.post_attention_layernorm(feature))
            out.append(feature)
        return torch.stack(out, 2)

    def factors(self, hidden: torch.Tensor, before: torch.Tensor) -> Factors:
        return [(self.norm(hidden).flatten(0, 1), self.lm_head.weight)]

    def confidence(self, hidden: torch.Tensor, before: torch.Tensor) -> None:
        return None


class BlockLayer(nn.Module):
    def __init__(self, s: Shape):
        super().__init__()
        self.input_layernorm = RMSNorm(s.hidden, s.eps)
        self.self_attn = Attention(s.hidden, s.heads, s.kv_heads, s.head_dim, s.eps, head_norm=True)
        self.post_attention_layernorm = RMSNorm(s.hidden, s.eps)
        self.mlp = MLP(s.hidden, s.inner)


class DFlash(nn.Module):
    """DFLASH (arXiv 2602.06036): the block [last id, mask ...] sees the target's states before it, and itself."""

    def __init__(self, shape: Shape, size: int, mask: torch.Tensor, ids: torch.Tensor, norm: torch.Tensor,
                 head: torch.Tensor, from_anchor: bool = False):
        """size: positions of a block.  mask [E]: embedding of the mask id.  ids [D]: those that can be drafted.  norm
        [E], head [V, E]: the target's, of which the head is shared.  from_anchor: hidden state i speaks of the id after
        its own position."""
        super().__init__()
        self.columns = shape.columns
        self.fc = nn.Linear(len(shape.columns) * shape.hidden, shape.hidden, bias=False)
        self.hidden_norm = RMSNorm(shape.hidden, shape.eps)
        self.layers = nn.ModuleList(BlockLayer(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden, shape.eps)
        self.rotary = Rotary(shape.head_dim, shape.theta)
        small_start(self)
        with torch.no_grad():
            self.norm.weight.copy_(START * norm)
        self.size, self.from_anchor = size, from_anchor
        self.register_buffer("mask", mask.clone(), persistent=False)
        self.register_buffer("ids", ids, persistent=False)
        self.register_buffer("head", head[ids], persistent=False)

    def drafts(self, seen: Seen) -> torch.Tensor:
        anchors, size = seen.anchors, self.size
        states = self.hidden_norm(self.fc(picked(seen.taps, self.columns)))
        x = self.mask.float().expand(*anchors.shape, size, -1).clone()
        x[:, :, 0] = seen.following[:, :, 0].float()
        place = seen.position.gather(1, anchors)[..., None] + torch.arange(size, device=anchors.device)
        before = seen.visible().scatter(2, anchors[..., None], False)  # [B, A, T]: the anchor's state is not known yet
        for layer in self.layers:
            attn, normed = layer.self_attn, layer.input_layernorm(x)
            context, own = attn.keys(states, seen.position, self.rotary), attn.keys(normed, place, self.rotary)
            x = x + attn.attend(attn.queries(normed, place, self.rotary), context, own, before)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        x = self.norm(x)
        return x if self.from_anchor else x[:, :, 1:]

    def factors(self, hidden: torch.Tensor, before: torch.Tensor) -> Factors:
        return [(hidden.flatten(0, 1), self.head)]

    def confidence(self, hidden: torch.Tensor, before: torch.Tensor) -> torch.Tensor | None:
        return None


class Markov(nn.Module):
    """Biases of the logits by what was drafted before: one step of a recurrent cell for each draft (DeepSpec's "rnn").

    [gate, candidate, output] = joint [state | W1 of the id before | hidden state];  bias = W2 tanh(output)
    state' = gate state + (1 - gate) tanh(candidate)"""

    def __init__(self, hidden: int, vocab: int, drafted: int, rank: int):
        super().__init__()
        self.markov_w1, self.markov_w2 = nn.Embedding(vocab, rank), nn.Linear(rank, drafted, bias=False)
        self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)
        small_start(self)
        nn.init.normal_(self.markov_w1.weight, std=1.0)
        nn.init.zeros_(self.markov_w2.weight)

    def outputs(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """hidden [N, K, E], embedded [N, K, r]: W1 of the ids before -> what W2 makes biases of, [N, K, r]."""
        state, found = torch.zeros_like(embedded[:, 0]), []
        for x, h in zip(embedded.unbind(1), hidden.unbind(1), strict=True):
            gate, candidate, output = self.joint_proj(torch.cat([state, x, h], 1)).chunk(3, 1)
            gate = gate.sigmoid()
            state = gate * state + (1 - gate) * candidate.tanh()
            found.append(output.tanh())
        return torch.stack(found, 1)


class DSpark(DFlash):
    """DSPARK: DFLASH's block, whose logits the ids before each draft correct; and a guess whether it is right."""

    def __init__(self, shape: Shape, size: int, mask: torch.Tensor, ids: torch.Tensor, norm: torch.Tensor,
                 head: torch.Tensor, rank: int):
        super().__init__(shape, size, mask, ids, norm, head, from_anchor=True)
        self.markov_head = Markov(shape.hidden, len(head), len(ids), rank)
        self.confidence_head = nn.ModuleDict({"proj": nn.Linear(shape.hidden + rank, 1)})

    def factors(self, hidden: torch.Tensor, before: torch.Tensor) -> Factors:
        head = self.markov_head
        outputs = head.outputs(hidden, head.markov_w1(before))
        return [(hidden.flatten(0, 1), self.head), (outputs.flatten(0, 1), head.markov_w2.weight)]

    def confidence(self, hidden: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        features = torch.cat([hidden, self.markov_head.markov_w1(before)], -1).detach()
        return self.confidence_head["proj"](features).flatten()


def shape_of(config: Any, inner: int, layers: int, columns: tuple[int, ...]) -> Shape:
    """config: transformers' configuration of the target."""
    rope = getattr(config, "rope_parameters", None) or {}
    theta = rope.get("rope_theta") or config.rope_theta
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Shape(config.hidden_size, inner, config.num_attention_heads, config.num_key_value_heads, head_dim, layers,
                 columns, float(theta), config.rms_norm_eps)
