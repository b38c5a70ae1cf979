"""Triton kernels for weights that stay packed (`packed.py`): times few rows, made into numbers again, and the rounding
of rows to e4m3. Imported only where they are going to run.

Codes are small whole numbers or e4m3, which 16-bit types hold exactly. So they are multiplied as they are, and each
group's sums by its scale; an offset of a group is multiplied by the sum of the inputs of that group:

    out = sum over groups of  scale * (codes x) + offset * sum(x)

The order of summing an output is the same whatever the rows beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from stretto.ops.launch import dependent, overlaps
from stretto.ops.packed import BLOCK, Packed
from stretto.ops.triton_fp8 import rounded
from stretto.ops.triton_grouped import block_of
from stretto.ops.triton_launch import begin

HALF = tl.constexpr(BLOCK // 2)


@dataclass(frozen=True)
class Blocks:
    """One launch: each program makes `outputs` outputs of every row, reading `columns` columns of W at a time."""

    outputs: int
    columns: int
    stages: int
    warps: int


@triton.jit
def _dot(a, b, acc, UPCAST: tl.constexpr):
    """Triton's interpreter multiplies what has less than 32 bits as whole numbers: there the operands are widened."""
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc)


@triton.jit
def _number(code, FP4: tl.constexpr):
    """Of four bits, as float32."""
    if FP4:  # sign, two bits of exponent, one of fraction
        m = (code & 7).to(tl.float32)
        m = tl.where(m < 4, m * 0.5, tl.where(m < 6, m - 2.0, m * 2.0 - 8.0))
        return tl.where(code >= 8, -m, m)
    else:
        return code.to(tl.float32) - 8.0


@triton.jit
def _group(scales, offsets, groups, index, x, sums, OFFSETS: tl.constexpr):
    """What a group adds to the outputs: its sums [BN, BM] by scale, and the sum of its inputs x [K, BM] by offset."""
    made = sums * tl.load(scales + groups + index).to(tl.float32)[:, None]
    if OFFSETS:
        made += tl.load(offsets + groups + index).to(tl.float32)[:, None] * tl.sum(x.to(tl.float32), 0)[None, :]
    return made


@triton.jit(do_not_specialize=["m"])
def few_rows_kernel(x, codes, scales, offsets, bias, row_scales, out, m, n, inputs, x_stride, NIBBLES: tl.constexpr,
                    FP4: tl.constexpr, GROUP: tl.constexpr, OFFSETS: tl.constexpr, BIAS: tl.constexpr,
                    ADD: tl.constexpr, ROW_SCALES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                    STAGES: tl.constexpr, PDL: tl.constexpr, UPCAST: tl.constexpr):
    """out[m, n] (+)= x[m, inputs] W^T for m <= BM. GROUP: columns that share a scale, 0: all of a row. ROW_SCALES: x is
    e4m3, with a scale for each row."""
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    tokens = tl.arange(0, BM)
    groups = rows.to(tl.int64) * (inputs // GROUP if GROUP > 0 else 1)
    x_row = x + tl.minimum(tokens, m - 1)[None, :] * x_stride
    acc = tl.zeros((BN, BM), tl.float32)
    zero = tl.zeros((BN, BM), tl.float32)
    begin(PDL)
    if NIBBLES:
        byte = tl.arange(0, BK // 2)
        low = byte // HALF * (2 * HALF) + byte % HALF  # the column in the low bits of each byte
        at = codes + rows.to(tl.int64)[:, None] * (inputs // 2) + byte[None, :]
        for start in tl.range(0, inputs, BK, num_stages=STAGES):
            both = tl.load(at + start // 2, eviction_policy="evict_first")
            x_low = tl.load(x_row + start + low[:, None])
            x_high = tl.load(x_row + start + low[:, None] + HALF)
            w_low = _number(both & 15, FP4).to(x.dtype.element_ty)
            w_high = _number(both >> 4, FP4).to(x.dtype.element_ty)
            index = start // GROUP if GROUP > 0 else 0
            if GROUP == HALF:  # then BK is 64, and the halves are groups of their own
                acc += _group(scales, offsets, groups, index, x_low, _dot(w_low, x_low, zero, UPCAST), OFFSETS)
                acc += _group(scales, offsets, groups, index + 1, x_high, _dot(w_high, x_high, zero, UPCAST), OFFSETS)
            else:
                sums = _dot(w_high, x_high, _dot(w_low, x_low, zero, UPCAST), UPCAST)
                acc += _group(scales, offsets, groups, index, x_low.to(tl.float32) + x_high.to(tl.float32), sums,
                              OFFSETS)
    else:
        k = tl.arange(0, BK)
        at = codes + rows.to(tl.int64)[:, None] * inputs + k[None, :]
        for start in tl.range(0, inputs, BK, num_stages=STAGES):
            w = tl.load(at + start, eviction_policy="evict_first")
            b = tl.load(x_row + start + k[:, None])
            if w.dtype != x.dtype.element_ty:
                w = w.to(tl.float32).to(x.dtype.element_ty)
            sums = _dot(w, b, acc if GROUP == 0 and not OFFSETS else zero, UPCAST)
            if GROUP == 0 and not OFFSETS:
                acc = sums
            else:
                acc += _group(scales, offsets, groups, start // GROUP if GROUP > 0 else 0, b, sums, OFFSETS)
        if GROUP == 0 and not OFFSETS:
            acc = acc * tl.load(scales + rows).to(tl.float32)[:, None]
    keep = (tokens < m)[None, :] & (rows >= 0)[:, None]
    if ROW_SCALES:
        acc = acc * tl.load(row_scales + tokens, mask=tokens < m, other=0.0)[None, :]
    if BIAS:
        acc += tl.load(bias + rows).to(tl.float32)[:, None]
    to = out + tokens[None, :].to(tl.int64) * n + rows[:, None]
    if ADD:
        acc += tl.load(to, mask=keep, other=0.0).to(tl.float32)
    tl.store(to, acc.to(out.dtype.element_ty), mask=keep)


@triton.jit
def _of_group(number, scales, offsets, at, inside, OFFSETS: tl.constexpr):
    """Numbers [K, BN] of one group by its scales [BN], in float32."""
    number = number * tl.load(scales + at, mask=inside, other=0.0).to(tl.float32)[None, :]
    if OFFSETS:
        number += tl.load(offsets + at, mask=inside, other=0.0).to(tl.float32)[None, :]
    return number


@triton.jit(do_not_specialize=["n_experts"])
def grouped_kernel(x, codes, scales, offsets, bias, bounds, rows_in, rows_out, out, n_experts, n, inputs, x_stride,
                   NIBBLES: tl.constexpr, FP4: tl.constexpr, GROUP: tl.constexpr, OFFSETS: tl.constexpr,
                   BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EXPERTS: tl.constexpr, BIAS: tl.constexpr,
                   UPCAST: tl.constexpr):
    """As `triton_grouped.grouped_kernel`: BM places of one expert times BN outputs. Numbers are made of the codes on
    the way, and rounded as if the matrix had been dequantised. BK divides `inputs` and a group."""
    expert, first, end = block_of(bounds, tl.program_id(1), n_experts, BM, EXPERTS)
    if expert < n_experts:
        places = first + tl.arange(0, BM)
        real = places < end
        source = tl.load(rows_in + places, mask=real, other=0)
        columns = tl.program_id(0) * BN + tl.arange(0, BN)
        inside = columns < n
        rows = expert.to(tl.int64) * n + tl.minimum(columns, n - 1)
        groups = rows * (inputs // GROUP if GROUP > 0 else 1)
        x_row = x + source[:, None] * x_stride
        acc = tl.zeros((BM, BN), tl.float32)
        if NIBBLES:
            byte = tl.arange(0, HALF)
            at = codes + rows[None, :] * (inputs // 2) + byte[:, None]
            for start in tl.range(0, inputs, 2 * HALF):
                both = tl.load(at + start // 2)
                for half in tl.static_range(2):
                    column = start + half * HALF
                    a = tl.load(x_row + column + byte[None, :], mask=real[:, None], other=0.0)
                    number = _number(both >> 4 if half == 1 else both & 15, FP4)
                    group = groups + (column // GROUP if GROUP > 0 else 0)
                    b = _of_group(number, scales, offsets, group, inside, OFFSETS).to(x.dtype.element_ty)
                    acc = _dot(a, b, acc, UPCAST)
        else:
            k = tl.arange(0, BK)
            at = codes + rows[None, :] * inputs + k[:, None]
            for start in tl.range(0, inputs, BK):
                a = tl.load(x_row + start + k[None, :], mask=real[:, None], other=0.0)
                group = groups + (start // GROUP if GROUP > 0 else 0)
                b = _of_group(tl.load(at + start).to(tl.float32), scales, offsets, group, inside, OFFSETS)
                acc = _dot(a, b.to(x.dtype.element_ty), acc, UPCAST)
        if BIAS:
            acc += tl.load(bias + expert * n + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
        target = tl.load(rows_out + places, mask=real, other=0)
        to = out + target[:, None] * n + columns[None, :]
        tl.store(to, acc.to(out.dtype.element_ty), mask=real[:, None] & inside[None, :])


@triton.jit
def dequantize_kernel(codes, scales, offsets, out, inputs, NIBBLES: tl.constexpr, FP4: tl.constexpr,
                      GROUP: tl.constexpr, OFFSETS: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr):
    """One program for BK columns of a row, BK a multiple of BLOCK or all of the row."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BK + tl.arange(0, BK)
    inside = k < inputs
    begin(PDL)
    if NIBBLES:
        at = row * (inputs // 2) + k // (2 * HALF) * HALF + k % HALF
        both = tl.load(codes + at, mask=inside, other=0).to(tl.int32)
        number = _number(tl.where(k // HALF % 2 == 1, both >> 4, both & 15), FP4)
    else:
        number = tl.load(codes + row * inputs + k, mask=inside, other=0.0).to(tl.float32)
    group = row * (inputs // GROUP if GROUP > 0 else 1) + (k // GROUP if GROUP > 0 else k * 0)
    number = number * tl.load(scales + group, mask=inside, other=0.0).to(tl.float32)
    if OFFSETS:
        number += tl.load(offsets + group, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * inputs + k, number.to(out.dtype.element_ty), mask=inside)


@triton.jit
def round_rows_kernel(x, out, scales, inputs, x_stride, BLOCK_K: tl.constexpr, PDL: tl.constexpr):
    """Each row to e4m3, its largest number to 448. One program a row."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    begin(PDL)
    a = tl.load(x + row * x_stride + k, mask=k < inputs, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(a), 0), 1e-12) / 448.0
    tl.store(scales + row, scale)
    tl.store(out + row * inputs + k, rounded(a / scale).to(out.dtype.element_ty), mask=k < inputs)


INTERPRETED = isinstance(few_rows_kernel, InterpretedFunction)


def blocks_for(weight: Packed) -> Blocks:
    """Many small programs where outputs are few, so that all multiprocessors read. A group is never divided, and what a
    program reads at a time lies in one group, or in the two of a block."""
    group = weight.inputs if weight.layout.group == weight.inputs else weight.layout.group
    least = 64 if weight.layout.bits == 4 else 32
    columns = max(c for c in (32, 64, 128, 256) if c == least or (c <= 256 and group % c == 0 and weight.inputs % c == 0
                                                                  and c >= least))
    outputs = 64 if weight.outputs >= 16384 and weight.outputs % 64 == 0 else 32 if weight.outputs % 32 == 0 else 16
    return Blocks(outputs, columns, 4, 4)


def _shape(weight: Packed) -> dict:
    layout = weight.layout
    return {"NIBBLES": layout.bits == 4, "FP4": layout.kind == "fp4", "OFFSETS": layout.offsets,
            "GROUP": 0 if layout.group == weight.inputs else layout.group}


def launch_few_rows(x: torch.Tensor, weight: Packed, out: torch.Tensor, bias: torch.Tensor | None = None,
                    add: bool = False, row_scales: torch.Tensor | None = None, blocks: Blocks | None = None) -> None:
    """x [m, inputs] with contiguous rows, m <= MOST_ROWS; out [m, outputs] contiguous. `row_scales` [m]: of e4m3."""
    blocks = blocks or blocks_for(weight)
    (m, inputs), n = x.shape, weight.outputs
    few_rows_kernel[(n // blocks.outputs,)](
        x, weight.codes, weight.scales, x if weight.offsets is None else weight.offsets, x if bias is None else bias,
        weight.scales if row_scales is None else row_scales, out, m, n, inputs, x.stride(0), **_shape(weight),
        BIAS=bias is not None, ADD=add, ROW_SCALES=row_scales is not None, BM=max(16, triton.next_power_of_2(m)),
        BN=blocks.outputs, BK=blocks.columns, STAGES=blocks.stages, PDL=overlaps(x.device),
        UPCAST=INTERPRETED and x.dtype is not torch.float32, num_warps=blocks.warps, **dependent(x.device))


def launch_grouped(x: torch.Tensor, weight: Packed, bias: torch.Tensor | None, bounds: torch.Tensor,
                   rows_in: torch.Tensor, rows_out: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """As `triton_grouped.launch_grouped`; `weight` has the rows of all experts one below the other; bounds [E + 1]."""
    n_experts, places, layout = len(bounds) - 1, len(rows_in), weight.layout
    n, inputs = weight.outputs // n_experts, weight.inputs
    bm = min(max(16, triton.next_power_of_2(-(-places // n_experts))), 128)
    blocks = min(-(-places // bm) + n_experts, places)  # every block but one an expert is full, and none is empty
    if blocks == 0:
        return out
    group = 0 if layout.group == inputs else layout.group
    bn, bk = 128 if n >= 128 else 64, min(64, group or 64)
    grouped_kernel[(triton.cdiv(n, bn), blocks)](
        x, weight.codes, weight.scales, x if weight.offsets is None else weight.offsets, x if bias is None else bias,
        bounds, rows_in, rows_out, out, n_experts, n, inputs, x.stride(0), **_shape(weight),
        BM=bm, BN=bn, BK=bk,
        EXPERTS=triton.next_power_of_2(n_experts), BIAS=bias is not None,
        UPCAST=INTERPRETED and x.dtype is not torch.float32, num_warps=4 if bm <= 64 else 8, num_stages=3)
    return out


def launch_dequantize(weight: Packed, dtype: torch.dtype) -> torch.Tensor:
    """[outputs, inputs], rounded once."""
    out = torch.empty(weight.outputs, weight.inputs, dtype=dtype, device=weight.codes.device)
    block = min(1024, triton.next_power_of_2(weight.inputs))
    dequantize_kernel[(weight.outputs, triton.cdiv(weight.inputs, block))](
        weight.codes, weight.scales, out if weight.offsets is None else weight.offsets, out, weight.inputs,
        **_shape(weight), BK=block, PDL=overlaps(out.device), num_warps=4, **dependent(out.device))
    return out


def round_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [m, inputs] -> e4m3 [m, inputs], and scales [m] float32: a row is its codes by its scale."""
    m, inputs = x.shape
    codes = torch.empty(m, inputs, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(m, dtype=torch.float32, device=x.device)
    if m:
        block = triton.next_power_of_2(inputs)
        round_rows_kernel[(m,)](x, codes, scales, inputs, x.stride(0), BLOCK_K=block, PDL=overlaps(x.device),
                                num_warps=max(1, min(8, block // 512)), **dependent(x.device))
    return codes, scales


def round_rows_reference(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = x.float().abs().amax(1).clamp_(min=1e-12) / 448.0
    return (x.float() / scales[:, None]).to(torch.float8_e4m3fn), scales
