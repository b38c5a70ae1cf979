"""A weight matrix and how it is multiplied: as torch does, or on CPUs in oneDNN's own layout, packed once at load.

Packing has two gains. Speed: a few rows (a decoded token, a verify window) cost 1.2 to 2.5 times less than with torch's
plain layout, which is packed anew at each multiplication. And with one exception a row's result does not depend on how
many rows come with it, bit for bit; the exception, a row alone against a long matrix, is found when the matrix is
packed, and then runs as two equal rows. So a model's text on a CPU is the same in any batch.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

_ROWS = 16  # the layout is chosen for this many rows; it serves 1 to thousands about as well


class Matrix(Protocol):
    """W [outputs, inputs], with a bias or without."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, inputs] -> x W^T + b, [T, outputs]."""
        ...

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual [T, outputs] += self(x), in place; returns it."""
        ...


class PlainMatrix:
    """torch's own multiplication."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None):
        self._weight, self._bias, self._transposed = weight, bias, weight.t()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight, self._bias)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        residual.addmm_(x, self._transposed)
        return residual if self._bias is None else residual.add_(self._bias)


class PackedMatrix:
    """oneDNN's multiplication by a matrix that is kept in packed form only."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None):
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
        self._bias, self._twice = bias, False
        x = torch.randn(_ROWS, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.dtype)
        self._twice = not torch.equal(self(x[:1]), self(x)[:1])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._twice and x.shape[0] == 1:
            return self._multiply(x.expand(2, -1))[:1]
        return self._multiply(x)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return residual.add_(self(x))

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")


def best_matrix(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Matrix:
    """The fastest form of a filled weight on its device."""
    return PackedMatrix(weight, bias) if _packable(weight) else PlainMatrix(weight, bias)


def _packable(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available() or not torch.backends.mkldnn.enabled:
        return False
    if weight.dtype is torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if weight.dtype is torch.float16:
        return torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return weight.dtype is torch.float32
