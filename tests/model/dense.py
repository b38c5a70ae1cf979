"""The attention that the tests of models run on: packed sequences, no pages, nothing clever."""

from __future__ import annotations

import torch

from stretto.attn.api import LayerSpec, StateSpec
from stretto.ops.state_step import PartMemory, StateStep, StepStates
from stretto.ragged import RaggedStep


class DenseAttend:
    """Causal attention over packed sequences, one entry of `lengths` each; remembers keys and values between calls, so
    that a sequence may come in several steps."""

    def __init__(self, layers: tuple[LayerSpec, ...], sequences: int = 1, states: tuple[StateSpec, ...] = ()):
        self.layers, self.seen = layers, [0] * sequences
        self.parts = [[PartMemory(torch.zeros(sequences + 1, 1, *part), torch.zeros(1, *part)) for part in spec.parts]
                      for spec in states]
        self.cache: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self.lengths: list[int] = []
        self.sequences = sequences

    def step(self, *lengths: int) -> DenseAttend:
        assert len(lengths) == self.sequences
        self.lengths = list(lengths)
        self.states = StepStates(StateStep(self._ragged(), 1, torch.zeros(sum(lengths), dtype=torch.int64)), self.parts)
        self.seen = [seen + n for seen, n in zip(self.seen, lengths)]
        return self

    def _ragged(self) -> RaggedStep:
        """Of the rows' lengths alone."""
        q, base = torch.tensor(self.lengths), torch.tensor(self.seen)
        cu_q, rows = torch.cat((q[:1] * 0, q.cumsum(0))), torch.arange(len(q)).repeat_interleave(q)
        nothing = torch.zeros(0, dtype=torch.int64)
        return RaggedStep(slots=1 + torch.arange(len(q)), q_len=q, cu_q=cu_q, base=base, kv_len=base + q, n_out=q * 0,
                          cu_out=cu_q * 0, ids=rows, positions=base[rows] + torch.arange(len(rows)) - cu_q[rows],
                          rows=rows, cells=(), out_tokens=nothing, out_rows=nothing, page_tables=(), page_size=1)

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


def of(model, sequences: int = 1) -> DenseAttend:
    return DenseAttend(model.layers, sequences, getattr(model, "states", ()))


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
    attend = attend or of(model)
    positions = torch.arange(start, start + len(ids))
    return model.logits(model.forward(torch.tensor(ids), positions, attend.step(len(ids)), taps))


def greedy(model, ids: list[int], n: int) -> list[int]:
    """The next n ids, token by token."""
    attend, out = of(model), []
    logits = run(model, ids, attend)
    for i in range(n):
        out.append(int(logits[-1].argmax()))
        logits = run(model, out[-1:], attend, len(ids) + i)
    return out
