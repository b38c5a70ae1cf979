"""A weight matrix and how it is multiplied: as torch does; on CPUs in oneDNN's own layout, packed once at load; on GPUs
by our own kernels where few rows come (`ops.skinny`), with what stands before and after fused into one launch.

Packing has two gains. Speed: a few rows (a decoded token, a verify window) cost 1.2 to 2.5 times less than with torch's
plain layout, which is packed anew at each multiplication. And with one exception a row's result does not depend on how
many rows come with it, bit for bit; the exception, a row alone against a long matrix, is found when the matrix is
packed, and then runs as two equal rows. So a model's text on a CPU is the same in any batch.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from stretto.ops.blocks import Blocks, OneRow, SomeRows
from stretto.ops.launch import overlaps, shared_memory
from stretto.ops.layer import gate, rms_norm
from stretto.ops.skinny import blocks_for, fits

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
    """torch's multiplication for many rows, our own kernels for up to 256. 16-bit weights, as they are."""

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
        out = self._empty(x, outputs)
        if isinstance(blocks, OneRow):
            return self._launch(x, blocks, out, norm, eps, gated)
        return self._launch(rms_norm(x, norm, eps), blocks, out, gated=gated)

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
        if x.stride(1) != 1:
            return None
        return blocks_for(x.shape[0], outputs, x.shape[1], gated, self._shared, self._pdl and x.is_contiguous())

    def _launch(self, x: torch.Tensor, blocks: Blocks, out: torch.Tensor, norm: torch.Tensor | None = None,
                eps: float = 0.0, gated: bool = False, add: bool = False) -> torch.Tensor:
        """Only a row alone can be normed. Returns `out`."""
        from stretto.ops.triton_skinny import launch_few_rows, launch_one_row
        from stretto.ops.triton_some_rows import launch_some_rows

        if isinstance(blocks, SomeRows):
            launch_some_rows(x, self._weight, out, blocks, self._pdl, self._bias)
        elif isinstance(blocks, OneRow):
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


class FixedMatrix:
    """A multiplication on CPUs in which a row's result depends on that row alone, bit for bit: always so many rows at a
    time. That a row's place among them does not matter is tried out when the matrix is made; if it did, rows would be
    multiplied one by one."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None):
        self._inner = PackedMatrix(weight, bias) if _packable(weight) else PlainMatrix(weight, bias)
        self._outputs, self.rows = weight.shape[0], _ROWS
        x = torch.randn(_ROWS, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.dtype)
        turned = x.roll(1, 0)
        turned[0] = 0
        same = torch.equal(self._inner(x)[:-1], self._inner(turned)[1:])
        alike = self._inner(x[:1].expand(_ROWS, -1).contiguous())
        if not (same and bool((alike == alike[0]).all())):
            self.rows = 1

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        count = len(x)
        if not count:
            return x.new_zeros(0, self._outputs)
        padded = F.pad(x, (0, 0, 0, -count % self.rows))
        return torch.cat([self._inner(tile) for tile in padded.split(self.rows)])[:count]

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return residual.add_(self(x))

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).float()


class FixedCudaMatrix(PlainMatrix):
    """The same on GPUs: one order of summing, whatever the rows."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None):
        super().__init__(weight, bias)
        self._arrivals = torch.zeros(-(-weight.shape[0] // 128), dtype=torch.int32, device=weight.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._launch(x, x.dtype)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self._launch(x, torch.float32)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return residual.add_(self(x))

    def _launch(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        from stretto.ops.triton_fixed import launch_fixed

        return launch_fixed(x, self._weight, self._bias, dtype, self._arrivals)


def fixed_matrix(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Matrix:
    """The form whose results do not depend on the batch."""
    return FixedCudaMatrix(weight, bias) if weight.is_cuda else FixedMatrix(weight, bias)


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
