"""The attention that the tests of models run on: packed sequences, no pages, nothing clever."""

from __future__ import annotations

import torch

from stretto.attn.api import LayerSpec


class DenseAttend:
    """Causal attention over packed sequences, one entry of `lengths` each; remembers keys and values between calls, so
    that a sequence may come in several steps."""

    def __init__(self, layers: tuple[LayerSpec, ...], sequences: int = 1):
        self.layers = layers
        self.cache: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self.lengths: list[int] = []
        self.sequences = sequences

    def step(self, *lengths: int) -> DenseAttend:
        assert len(lengths) == self.sequences
        self.lengths = list(lengths)
        return self

    def __call__(self, layer, q, k, v, sinks=None):
        spec, out, at = self.layers[layer], [], 0
        for row, n in enumerate(self.lengths):
            span = slice(at, at + n)
            old = self.cache.get((layer, row))
            keys = k[span] if old is None else torch.cat((old[0], k[span]))
            values = v[span] if old is None else torch.cat((old[1], v[span]))
            self.cache[layer, row] = keys.clone(), values.clone()
            out.append(_attend(spec, q[span], keys, values, sinks))
            at += n
        return torch.cat(out)


def _attend(spec: LayerSpec, q, k, v, sinks):
    """q [n, H, D] are the last n of the m positions of k, v [m, Hkv, D]."""
    assert q.shape[1:] == (spec.n_heads, spec.head_dim)
    assert k.shape[1:] == v.shape[1:] == (spec.n_kv_heads, spec.head_dim)
    n, m = q.shape[0], k.shape[0]
    k, v = (x.repeat_interleave(spec.n_heads // spec.n_kv_heads, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k).float() * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    query, key = torch.arange(m - n, m)[:, None], torch.arange(m)[None]
    hidden = key > query
    if spec.window is not None:
        hidden = hidden | (key <= query - spec.window)
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.float().view(-1, 1, 1).expand(-1, n, 1)), dim=-1)
    weights = scores.softmax(-1)[..., :m].to(v.dtype)
    return torch.einsum("hqk,khd->qhd", weights, v)


def run(model, ids: list[int], attend: DenseAttend | None = None, start: int = 0, taps=None) -> torch.Tensor:
    """Logits [T, V] of one sequence whose first `start` tokens `attend` has seen."""
    attend = attend or DenseAttend(model.layers)
    positions = torch.arange(start, start + len(ids))
    return model.logits(model.forward(torch.tensor(ids), positions, attend.step(len(ids)), taps))


def greedy(model, ids: list[int], n: int) -> list[int]:
    """The next n ids, token by token."""
    attend, out = DenseAttend(model.layers), []
    logits = run(model, ids, attend)
    for i in range(n):
        out.append(int(logits[-1].argmax()))
        logits = run(model, out[-1:], attend, len(ids) + i)
    return out
