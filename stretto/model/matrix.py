"""A weight matrix and how it is multiplied: as torch does; on CPUs in oneDNN's own layout, packed once at load; on GPUs
by our own kernels where few rows come (`ops.skinny`), with what stands before and after fused into one launch.

Packing has two gains. Speed: a few rows (a decoded token, a verify window) cost 1.2 to 2.5 times less than with torch's
plain layout, which is packed anew at each multiplication. And with one exception a row's result does not depend on how
many rows come with it, bit for bit; the exception, a row alone against a long matrix, is found when the matrix is
packed, and then runs as two equal rows. So a model's text on a CPU is the same in any batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F

from stretto.ops.launch import overlaps, shared_memory
from stretto.ops.layer import gate, rms_norm
from stretto.ops.skinny import few_rows_blocks, fits, one_row_blocks

if TYPE_CHECKING:
    from stretto.ops.triton_skinny import Blocks

_ROWS = 16  # the layout is chosen for this many rows; it serves 1 to thousands about as well


class Matrix(Protocol):
    """W [outputs, inputs], with a bias or without."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, inputs] -> x W^T + b, [T, outputs]."""
        ...

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual [T, outputs] += self(x), in place; returns it."""
        ...

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """As self(x), in float32."""
        ...


class PlainMatrix:
    """torch's own multiplication."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None):
        self._weight, self._bias, self._transposed = weight, bias, weight.t()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight, self._bias)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).float()

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        residual.addmm_(x, self._transposed)
        return residual if self._bias is None else residual.add_(self._bias)


class CudaMatrix(PlainMatrix):
    """torch's multiplication for many rows, our own kernels for one row and for few. 16-bit weights, as they are."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None):
        super().__init__(weight, bias)
        self._pdl, self._shared = overlaps(weight.device), shared_memory(weight.device)
        self._arrivals = torch.zeros(-(-weight.shape[0] // 16), dtype=torch.int32, device=weight.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        blocks = self._blocks(x, self._outputs, False)
        return super().__call__(x) if blocks is None else self._launch(x, blocks, self._empty(x, self._outputs))

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        blocks = self._blocks(x, self._outputs, False) if residual.is_contiguous() else None
        return super().add_to(residual, x) if blocks is None else self._launch(x, blocks, residual, add=True)

    def normed(self, x: torch.Tensor, norm: torch.Tensor, eps: float, act: str | None = None) -> torch.Tensor:
        """self(RMSNorm of x); with `act`, the two halves of that gated: act(first) * second, [T, outputs / 2]."""
        gated = act in ("silu", "swish")
        outputs = self._outputs // (1 + gated)
        blocks = self._blocks(x, outputs, gated) if gated or act is None else None
        if blocks is None:
            y = self(rms_norm(x, norm, eps))
            return y if act is None else gate(y, act)
        if x.shape[0] == 1:
            return self._launch(x, blocks, self._empty(x, outputs), norm, eps, gated)
        return self._launch(rms_norm(x, norm, eps), blocks, self._empty(x, outputs), gated=gated)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """The float32 sums themselves: rounding them would make ties."""
        out, blocks = self._empty(x, self._outputs, torch.float32), self._blocks(x, self._outputs, False)
        if blocks is not None:
            return self._launch(x, blocks, out)
        torch.mm(x, self._transposed, out_dtype=torch.float32, out=out)
        return out if self._bias is None else out.add_(self._bias)

    @property
    def _outputs(self) -> int:
        return self._weight.shape[0]

    @staticmethod
    def _empty(x: torch.Tensor, outputs: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(x.shape[0], outputs, dtype=dtype or x.dtype, device=x.device)

    def _blocks(self, x: torch.Tensor, outputs: int, gated: bool) -> Blocks | None:
        """Of our kernel for so many rows; None where there is none, or torch's product is as fast."""
        rows, inputs = x.shape
        if rows == 0 or x.stride(1) != 1:
            return None
        if rows == 1:
            return one_row_blocks(outputs, inputs, gated)
        return few_rows_blocks(rows, outputs, inputs, gated, self._shared)

    def _launch(self, x: torch.Tensor, blocks: Blocks, out: torch.Tensor, norm: torch.Tensor | None = None,
                eps: float = 0.0, gated: bool = False, add: bool = False) -> torch.Tensor:
        """Only a single row can be normed on the way. Returns `out`."""
        from stretto.ops.triton_skinny import launch_few_rows, launch_one_row

        if x.shape[0] == 1:
            launch_one_row(x, self._weight, out, blocks, self._pdl, norm, eps, self._bias, gated, add)
        else:
            launch_few_rows(x, self._weight, out, blocks, self._pdl, self._arrivals, self._bias, gated, add)
        return out


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

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).float()

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")


def best_matrix(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Matrix:
    """The fastest form of a filled weight on its device."""
    if fits(weight):
        return CudaMatrix(weight, bias)
    return PackedMatrix(weight, bias) if _packable(weight) else PlainMatrix(weight, bias)


def _packable(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available() or not torch.backends.mkldnn.enabled:
        return False
    if weight.dtype is torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if weight.dtype is torch.float16:
        return torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return weight.dtype is torch.float32
