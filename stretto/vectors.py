"""Embeddings as callers get them: whole arrays, each vector of length 1. No torch in this module."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def unit_vectors(raw: Sequence[bytes], dimensions: int | None = None) -> np.ndarray:
    """`Output.embedding` of N requests -> [N, dimensions] float32. `dimensions`: only so many of the first numbers.
    A vector of nothing but zeros stays one. Raises FloatingPointError where a number is not finite."""
    vectors = np.stack([np.frombuffer(one, "<f4") for one in raw])[:, :dimensions].astype(np.float64)
    if not np.isfinite(vectors).all():
        raise FloatingPointError("the model's hidden states are not finite numbers")
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return (vectors / np.where(lengths > 0, lengths, 1)).astype(np.float32)


def cosines(vectors: np.ndarray, left: int) -> np.ndarray:
    """Of the first `left` unit vectors with those behind them, one with each or pair by pair. [N, D] -> [N - left]."""
    return (vectors[:left] * vectors[left:]).sum(1)
