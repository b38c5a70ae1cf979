"""Noise that is a function: Gumbel values keyed by (request seed, choice, position, stream, token id).

There is no generator object, so nothing depends on batch, schedule or rank. The hash is SplitMix64 (Steele, Lea and
Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014): the key is its state, the token id its counter.
Sampling by argmax(logits / temperature + Gumbel noise) draws from the softmax exactly (the Gumbel-max trick).
"""

from __future__ import annotations

import torch

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # as signed 64-bit, like every constant here: int64 arithmetic wraps
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64

TARGET_STREAM = 0  # the noise that chooses a token; drafters that sample use the same noise at the same position


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(x: torch.Tensor) -> torch.Tensor:
    """SplitMix64's output function on int64 states."""
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def noise_keys(seed_low: torch.Tensor, seed_high: torch.Tensor, choice: torch.Tensor, position: torch.Tensor,
               stream: int = TARGET_STREAM) -> torch.Tensor:
    """One 64-bit key a sampled position. All arguments [L] int32 (or int64); `position` is the log position."""
    seed = (seed_high.long() << 32) | (seed_low.long() & 0xFFFFFFFF)
    key = mix(seed + _GOLDEN)
    key = mix(key ^ (choice.long() * _GOLDEN + stream))
    return mix(key + position.long() * _GOLDEN)


def uniform(keys: torch.Tensor) -> torch.Tensor:
    """keys [L] int64 -> float64 [L], strictly inside (0, 1)."""
    return (_shift(mix(keys + _GOLDEN), 11).double() + 0.5) * 2.0**-53


def gumbel(keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """keys [L], ids [L, N] or [N] int64 (target token ids). Returns float32 noise [L, N], always finite.

    The winners of an argmax come from small exponential values, so those keep full relative precision: u is drawn near
    0 with 53 bits and E = -log(1 - u), Gumbel = -log(E)."""
    bits = _shift(mix(keys[:, None] + (ids + 1) * _GOLDEN), 11)
    u = ((bits.double() + 0.5) * 2.0**-53).float().clamp_(max=1 - 2.0**-24)
    return u.neg_().log1p_().neg_().log_().neg_()
