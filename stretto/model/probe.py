"""What it takes to find out, at load, how a foreign model attends: a dense attention, and a mask that can be asked."""

from __future__ import annotations

from collections.abc import Callable

import torch

from stretto.attn.api import LayerSpec

TOKENS, SPLIT = 12, 7  # tokens of a trial, and of its first step where it runs in two
FURTHEST = 1 << 17  # masks are looked at up to this position; a wider window counts as none


class UnknownMask(ValueError):
    """A mask that is neither causal nor a causal window."""


def probe_ids(vocab_size: int, device: torch.device) -> torch.Tensor:
    """TOKENS ids spread over the vocabulary, [T] int64."""
    return (torch.arange(TOKENS, device=device) * 7919 + 1) % vocab_size


class ProbeAttend:
    """Dense causal attention of one sequence, which remembers keys and values. `spec_of` gives the layer's spec when
    its call comes."""

    def __init__(self, spec_of: Callable[[int], LayerSpec]):
        self._spec_of = spec_of
        self._cache: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                 sinks: torch.Tensor | None = None) -> torch.Tensor:
        if layer in self._cache:
            k, v = (torch.cat(pair) for pair in zip(self._cache[layer], (k, v), strict=True))
        self._cache[layer] = k, v
        return dense_attention(self._spec_of(layer), q, k, v, sinks)


def dense_attention(spec: LayerSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                    sinks: torch.Tensor | None) -> torch.Tensor:
    """q [n, H, D] are the last n of the m positions of k and v [m, Hkv, D]. Returns [n, H, D]."""
    n, m, repeats = q.shape[0], k.shape[0], spec.n_heads // spec.n_kv_heads
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k).float() * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    query, key = torch.arange(m - n, m, device=q.device)[:, None], torch.arange(m, device=q.device)
    seen = key <= query
    if spec.window is not None:
        seen &= key > query - spec.window
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.float().view(-1, 1, 1).expand(-1, n, 1)), dim=-1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :m].to(v.dtype), v)


class MaskProbe:
    """A mask function for transformers' AttentionMaskInterface that asks instead of building: which keys may a query
    far out see? The tensor it returns stands for the answer; `window` finds it again in an attention call."""

    def __init__(self, max_position: int):
        self._reach = min(max_position, FURTHEST)
        self._windows: dict[int, int | None] = {}
        self._kept: list[torch.Tensor] = []  # while these live, their addresses are theirs alone

    def __call__(self, batch_size: int, q_length: int, kv_length: int, mask_function: Callable, *,
                 dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", **_) -> torch.Tensor:
        token = torch.zeros(batch_size, 1, q_length, kv_length, dtype=dtype, device=device)
        self._kept.append(token)
        self._windows[token.data_ptr()] = window_of(mask_function, self._reach)
        return token

    def window(self, mask: torch.Tensor | None) -> int | None:
        """The window that a mask given to an attention call stands for. Raises UnknownMask for a foreign one."""
        if not isinstance(mask, torch.Tensor) or mask.data_ptr() not in self._windows:
            raise UnknownMask("the model builds its attention mask itself")
        return self._windows[mask.data_ptr()]


def window_of(mask_function: Callable, reach: int) -> int | None:
    """The window of a mask function (batch, head, query, key) -> seen: None if every query sees all keys up to itself.
    Raises UnknownMask if two queries see spans of different lengths (chunks), or anything but a span."""
    narrow: set[int] = set()
    full = 0  # the widest span that reaches back to position 0
    for query in (reach // 3, reach // 2 + 1, reach - 1):
        width = _visible(mask_function, query)
        if width == query + 1:
            full = max(full, width)
        else:
            narrow.add(width)
    if len(narrow) > 1 or (narrow and full > min(narrow)):
        raise UnknownMask(f"its mask is no sliding window: queries see spans of {sorted(narrow | {full})} keys")
    return narrow.pop() if narrow else None


def _visible(mask_function: Callable, query: int) -> int:
    """How many keys the query sees: the last ones up to itself, or else UnknownMask."""
    zero, keys = torch.tensor(0), torch.arange(query + 2)
    seen = torch.as_tensor(mask_function(zero, zero, torch.tensor(query), keys)).expand(query + 2)
    width = int(seen.sum())
    if seen[query + 1] or not bool(seen[query + 1 - width : query + 1].all()):
        raise UnknownMask(f"its mask is not causal: the query at {query} sees other keys than those just before it")
    return width


def close_enough(ours: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether two sets of logits differ by rounding only, relative to their spread."""
    tolerance = 1e-3 if dtype in (torch.float32, torch.float64) else 6e-2
    return bool((ours - right).abs().max() <= tolerance * right.abs().max())
