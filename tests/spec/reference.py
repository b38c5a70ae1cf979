"""Draft logits by the papers' formulas: one sequence, float64 where it helps, no cache, no pages, nothing shared with
the product. Every function takes the whole sequence and computes everything anew."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.spec.checkpoints import HEAD_DIM, HEADS, KV_HEADS, Tensors

EPS = 1e-5


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


def rope(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """x [T, H, D]: pairs (i, i + D/2) turn by position * 10000^(-2i/D)."""
    half = HEAD_DIM // 2
    angle = positions[:, None].double() * 10000.0 ** (-torch.arange(half).double() / half)
    cos, sin = angle.cos().float()[:, None], angle.sin().float()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """q [Q, H, D], k and v [C, Hkv, D], seen [Q, C] bool -> [Q, H * D]."""
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    scores = torch.einsum("qhd,chd->hqc", q, k) / HEAD_DIM**0.5
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("hqc,chd->qhd", weights, v).flatten(1)


def project(t: Tensors, name: str, x: torch.Tensor, heads: int) -> torch.Tensor:
    return F.linear(x, t[f"{name}.weight"], t.get(f"{name}.bias")).view(len(x), heads, HEAD_DIM)


def mlp(t: Tensors, prefix: str, x: torch.Tensor) -> torch.Tensor:
    gate = F.silu(x @ t[f"{prefix}.mlp.gate_proj.weight"].T) * (x @ t[f"{prefix}.mlp.up_proj.weight"].T)
    return gate @ t[f"{prefix}.mlp.down_proj.weight"].T


def causal_layer(t: Tensors, prefix: str, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    at, attn = torch.arange(len(x)), f"{prefix}.self_attn"
    q = rope(project(t, f"{attn}.q_proj", x, HEADS), at)
    k = rope(project(t, f"{attn}.k_proj", x, KV_HEADS), at)
    out = attention(q, k, project(t, f"{attn}.v_proj", x, KV_HEADS), at[:, None] >= at)
    residual = residual + out @ t[f"{attn}.o_proj.weight"].T
    return residual + mlp(t, prefix, rms(residual, t[f"{prefix}.post_attention_layernorm.weight"]))


# ---------------------------------------------------------------------------------------------- heads that continue
def eagle(t: Tensors, embedded: torch.Tensor, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """embedded[i] of token i+1, features[i] of position i. Returns (input of the head, next features), [T, E]."""
    h = F.linear(torch.cat([embedded, features], -1), t["fc.weight"], t["fc.bias"])
    h = causal_layer(t, "layers.0", h, h)
    h = causal_layer(t, "layers.1", rms(h, t["layers.1.input_layernorm.weight"]), h)
    return h, h


def eagle3(t: Tensors, embedded: torch.Tensor, features: torch.Tensor, prefix: str,
           norm_before_residual: bool) -> tuple[torch.Tensor, torch.Tensor]:
    normed = rms(features, t[f"{prefix}.hidden_norm.weight"])
    x = torch.cat([rms(embedded, t[f"{prefix}.input_layernorm.weight"]), normed], -1)
    h = causal_layer(t, prefix, x, normed if norm_before_residual else features)
    return rms(h, t["norm.weight"]), h


def mtp(t: Tensors, embedded: torch.Tensor, features: torch.Tensor, naming: str,
        prefix: str) -> tuple[torch.Tensor, torch.Tensor]:
    if naming == "mimo":
        pair = (rms(features, t[f"{prefix}.hidden_layernorm.weight"]),
                rms(embedded, t[f"{prefix}.token_layernorm.weight"]))
        x, last = torch.cat(pair, -1) @ t[f"{prefix}.input_proj.weight"].T, "final_layernorm"
    else:
        pair = (rms(embedded, t[f"{prefix}.enorm.weight"]), rms(features, t[f"{prefix}.hnorm.weight"]))
        x, last = torch.cat(pair, -1) @ t[f"{prefix}.eh_proj.weight"].T, "shared_head.norm"
    h = causal_layer(t, prefix, rms(x, t[f"{prefix}.input_layernorm.weight"]), x)
    out = rms(h, t[f"{prefix}.{last}.weight"])
    return out, out


# ------------------------------------------------------------------------------------------------------------- blocks
def block(t: Tensors, n_layers: int, context: torch.Tensor, embedded: torch.Tensor,
          windows: list[int | None]) -> torch.Tensor:
    """context [C, taps * E] of positions 0 .. C-1, embedded [B, E] of the block at C .. C+B-1 -> hidden [B, E]. A layer
    with a window is causal."""
    states = rms(context @ t["fc.weight"].T, t["hidden_norm.weight"])
    c, b, h = len(states), len(embedded), embedded
    at = torch.arange(c + b)
    for i in range(n_layers):
        attn = f"layers.{i}.self_attn"
        x = rms(h, t[f"layers.{i}.input_layernorm.weight"])
        both = torch.cat([states, x])
        q = rope(rms(project(t, f"{attn}.q_proj", x, HEADS), t[f"{attn}.q_norm.weight"]), at[c:])
        k = rope(rms(project(t, f"{attn}.k_proj", both, KV_HEADS), t[f"{attn}.k_norm.weight"]), at)
        seen = torch.ones(b, c + b, dtype=torch.bool)
        if windows[i] is not None:
            seen = (at[c:, None] >= at) & (at[c:, None] - at < windows[i])
        h = h + attention(q, k, project(t, f"{attn}.v_proj", both, KV_HEADS), seen) @ t[f"{attn}.o_proj.weight"].T
        h = h + mlp(t, f"layers.{i}", rms(h, t[f"layers.{i}.post_attention_layernorm.weight"]))
    return rms(h, t["norm.weight"])


def markov_bias(t: Tensors, head: str, state: torch.Tensor, before: int,
                hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """state [r], hidden [E] -> the next state, biases over the draft's ids."""
    e, w2 = t["markov_head.markov_w1.weight"][before], t["markov_head.markov_w2.weight"]
    if head == "vanilla":
        return state, w2 @ e
    if head == "gated":
        z = torch.cat([hidden, e])
        return state, w2 @ (torch.sigmoid(t["markov_head.gate_proj.weight"] @ z + t["markov_head.gate_proj.bias"]) * e)
    z = t["markov_head.joint_proj.weight"] @ torch.cat([state, e, hidden]) + t["markov_head.joint_proj.bias"]
    gate, candidate, output = z.chunk(3)
    gate = torch.sigmoid(gate)
    return gate * state + (1 - gate) * torch.tanh(candidate), w2 @ torch.tanh(output)


def spread(t: Tensors, logits: torch.Tensor, vocab: int) -> torch.Tensor:
    """Draft ids to target ids."""
    if "d2t" not in t:
        return logits
    out = torch.full((vocab,), float("-inf"))
    for i, delta in enumerate(t["d2t"].tolist()):
        out[i + delta] = logits[i]
    return out
