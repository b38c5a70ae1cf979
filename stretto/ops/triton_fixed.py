"""The Triton kernels of a product in which a row's result does not depend on the rows beside it, bit for bit.

Every row is summed by the same instructions in the same order, whatever the number of rows. The inputs of long matrices
are cut into parts, and the sums of the parts are added in order; in small steps programs share the parts of a tile:

    up to 64 rows    program | part 0 |            tile's sum = ((0 + part 0) + part 1) + ...,
                     program          | part 1 |   made by the last that arrives
    more rows        program | part 0 | part 1 |   the same additions by one program, tile of rows by tile of rows

This needs the copy engine of sm_90 (`tiled`). Elsewhere one kernel with one size of tiles walks the inputs from the
first to the last. Which of the two is a matter of the matrix alone. Imported only where it is going to run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from stretto.ops.launch import dependent, overlaps
from stretto.ops.triton_layer import begin

ROWS, OUTPUTS, INPUTS = 64, 64, 64  # of a tile; float32 tiles have half the inputs
TILE_OUTPUTS, TILE_INPUTS = 128, 64  # where tiles come by the copy engine
PROGRAMS = 200  # that a small step should have, about as many as fit a large device at a time


@triton.jit
def _dot(a, b, acc, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """Triton's interpreter multiplies bfloat16 as integers: there the operands are widened."""
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit(do_not_specialize=["m"])
def fixed_kernel(x, w, bias, out, m, n, inputs, x_stride, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                 BIAS: tl.constexpr, PDL: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """out[m, n] = x[m, inputs] W^T, W [n, inputs]; sums in float32."""
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    x_at = x + tl.minimum(rows, m - 1).to(tl.int64)[:, None] * x_stride + k[None, :]
    w_at = w + tl.minimum(columns, n - 1).to(tl.int64)[None, :] * inputs + k[:, None]
    begin(PDL)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in tl.range(0, inputs, BK):
        left = k < inputs - start
        a = tl.load(x_at + start, mask=left[None, :], other=0.0)
        b = tl.load(w_at + start, mask=left[:, None], other=0.0)
        acc = _dot(a, b, acc, PRECISION, UPCAST)
    if BIAS:
        acc += tl.load(bias + columns, mask=columns < n, other=0.0).to(tl.float32)[None, :]
    to = out + rows.to(tl.int64)[:, None] * n + columns[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=(rows < m)[:, None] & (columns < n)[None, :])


@triton.jit
def _sum(x_tiles, w_tiles, row, column, first, last, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
         STAGES: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """The tile at (row, column), of the inputs [first, last). [BM, BN] float32."""
    acc = tl.zeros((BM, BN), tl.float32)
    for k in tl.range(first, last, BK, num_stages=STAGES):
        acc = _dot(x_tiles.load([row, k]), w_tiles.load([column, k]).T, acc, PRECISION, UPCAST)
    return acc


@triton.jit(do_not_specialize=["m"])
def fixed_tiles_kernel(x_tiles, w_tiles, bias, out, partial, arrivals, m, n, inputs, BM: tl.constexpr,
                       BN: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr, SHARED: tl.constexpr,
                       STAGES: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr, PRECISION: tl.constexpr,
                       UPCAST: tl.constexpr):
    """out[m, n] = x[m, inputs] W^T by tiles [BM, BN]. SHARED: m <= BM, PARTS programs share the inputs of a tile."""
    row = tl.program_id(1) * BM
    column = tl.program_id(0) * BN
    tokens = row + tl.arange(0, BM)
    columns = column + tl.arange(0, BN)
    keep = (tokens < m)[:, None] & (columns < n)[None, :]
    each = inputs // PARTS
    begin(PDL)
    finish = True
    total = tl.zeros((BM, BN), tl.float32)
    if SHARED:
        part = tl.program_id(2)
        mine = partial + part.to(tl.int64) * m * n
        at = tokens[:, None] * n + columns[None, :]
        tl.store(mine + at, _sum(x_tiles, w_tiles, row, column, part * each, part * each + each, BM, BN, BK, STAGES,
                                 PRECISION, UPCAST), mask=keep)
        tl.debug_barrier()  # every thread's part stands before the arrival that announces it
        finish = tl.atomic_add(arrivals + tl.program_id(0), 1, sem="acq_rel") == PARTS - 1
        if finish:
            tl.store(arrivals + tl.program_id(0), 0)  # for the next launch
            for s in tl.static_range(PARTS):  # past the first-level cache, which misses what others wrote
                total += tl.load(partial + s * m * n + at, mask=keep, other=0.0, cache_modifier=".cg")
    else:
        for s in tl.range(PARTS):
            last = tl.where(s == PARTS - 1, inputs, s * each + each)
            total += _sum(x_tiles, w_tiles, row, column, s * each, last, BM, BN, BK, STAGES, PRECISION, UPCAST)
    if finish:
        if BIAS:
            total += tl.load(bias + columns, mask=columns < n, other=0.0).to(tl.float32)[None, :]
        to = out + tokens.to(tl.int64)[:, None] * n + columns[None, :]
        tl.store(to, total.to(out.dtype.element_ty), mask=keep)


INTERPRETED = isinstance(fixed_kernel, InterpretedFunction)


def tiled(weight: torch.Tensor) -> bool:
    """Whether this matrix's tiles come by the copy engine."""
    able = overlaps(weight.device) or INTERPRETED
    return able and weight.element_size() == 2 and weight.is_contiguous() and weight.shape[1] % 8 == 0 \
        and weight.data_ptr() % 16 == 0


def parts_of(outputs: int, inputs: int) -> int:
    """Parts of the inputs, so that there are about PROGRAMS programs in a step of few rows."""
    tiles = triton.cdiv(outputs, TILE_OUTPUTS)
    return next((parts for parts in (8, 4, 2)
                 if tiles * parts <= 1.5 * PROGRAMS and inputs % (parts * TILE_INPUTS) == 0
                 and inputs // parts >= 4 * TILE_INPUTS), 1)


def launch_tiles(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor,
                 arrivals: torch.Tensor | None) -> None:
    """As `launch_fixed`, into `out`. `arrivals`: zeros, int32, one a tile of outputs; zeros again afterwards."""
    (m, inputs), n = x.shape, out.shape[1]
    parts, small = parts_of(n, inputs), m <= ROWS
    rows, shared = ROWS if small else 2 * ROWS, small and parts > 1
    tiles = triton.cdiv(n, TILE_OUTPUTS)
    partial = torch.empty(parts * m * n, dtype=torch.float32, device=x.device) if shared else x
    if shared and arrivals is None:
        arrivals = torch.zeros(tiles, dtype=torch.int32, device=x.device)
    if x.data_ptr() % 16 or x.stride(0) * x.element_size() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    fixed_tiles_kernel[(tiles, triton.cdiv(m, rows), parts if shared else 1)](
        TensorDescriptor.from_tensor(x, [rows, TILE_INPUTS]),
        TensorDescriptor.from_tensor(weight, [TILE_OUTPUTS, TILE_INPUTS]), x if bias is None else bias, out, partial,
        arrivals if shared else x, m, n, inputs, BM=rows, BN=TILE_OUTPUTS, BK=TILE_INPUTS, PARTS=parts, SHARED=shared,
        STAGES=4, BIAS=bias is not None, PDL=overlaps(x.device), PRECISION="tf32",
        UPCAST=INTERPRETED and x.dtype is torch.bfloat16, num_warps=4 if small else 8, **dependent(x.device))


def launch_fixed(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype,
                 arrivals: torch.Tensor | None = None) -> torch.Tensor:
    """x [m, inputs] and weight [n, inputs] -> [m, n] in `dtype`. `arrivals` as for `launch_tiles`; None: made anew."""
    x = x if x.stride(1) == 1 else x.contiguous()
    (m, inputs), n = x.shape, weight.shape[0]
    out = torch.empty(m, n, dtype=dtype, device=x.device)
    if m and tiled(weight):
        launch_tiles(x, weight, bias, out, arrivals)
    elif m:
        wide = x.dtype is torch.float32
        fixed_kernel[(triton.cdiv(n, OUTPUTS), triton.cdiv(m, ROWS))](
            x, weight, x if bias is None else bias, out, m, n, inputs, x.stride(0), BM=ROWS, BN=OUTPUTS,
            BK=INPUTS // 2 if wide else INPUTS, BIAS=bias is not None, PDL=overlaps(x.device),
            PRECISION="ieee" if wide else "tf32", UPCAST=INTERPRETED and x.dtype is torch.bfloat16, num_warps=4,
            num_stages=3, **dependent(x.device))
    return out
