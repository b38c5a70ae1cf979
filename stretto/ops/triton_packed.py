"""Triton kernels for weights that stay packed (`packed.py`): times few rows, times the rows of experts, made into
numbers again, and the rounding of rows to e4m3. Imported only where they are going to run.

Few rows only stream the weights, so little may be done to each number. Codes of 8 bits are multiplied as they are, and
the sums of a group by its scale; an offset of a group is multiplied by the sum of its inputs. Codes of 4 bits become
numbers two at a time (`_conversion`), rounded as if the matrix had been dequantised.

The order of summing an output is the same whatever the rows beside it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from stretto.ops.gates import Gate
from stretto.ops.launch import dependent, multiprocessors, overlaps, shared_memory
from stretto.ops.packed import BLOCK, ByGroups, Packed
from stretto.ops.triton_dot import dot
from stretto.ops.triton_fp8 import rounded
from stretto.ops.triton_grouped import Tile, block_of, blocks_of, finish, gate_options, rows_of
from stretto.ops.triton_launch import begin

HALF = tl.constexpr(BLOCK // 2)
STAGES = 4


@dataclass(frozen=True)
class Blocks:
    """One launch: `split` programs share the columns of `outputs` outputs of every row, each reading `parts` times
    `part` columns of W at a time."""

    outputs: int
    part: int
    parts: int
    stages: int
    warps: int
    split: int = 1


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
def _parts(pair, DTYPE: tl.constexpr):
    """(scale, offset) of pairs, both float32."""
    scale = (pair & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    return scale, (pair >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


def _conversion(fp4: bool) -> str:
    """PTX: four bytes ($4) of two codes each, and a pair for each byte's low code ($5 ..) and high code ($9 ..), to
    four bfloat16 numbers of the low codes ($0, $1) and four of the high ones ($2, $3), two at a time:

        e2m1   its bits stand where those of a bfloat16 do, which makes it 2^-126 times too small; times 2^126
        int4   below a constant that makes it 128 + code; less 136

    and each by its scale, plus its offset, rounded once. All of it but that rounding is exact."""
    lines = ["{.reg .b32 p0, p1, t, u, s, o, k1, k2, k3, k4;", "prmt.b32 p0, $4, 0, 0x4140;",
             "prmt.b32 p1, $4, 0, 0x4342;"]
    if fp4:
        lines += ["mov.b32 k1, 0x01C001C0;", "mov.b32 k2, 0x80008000;", "mov.b32 k3, 0x7E807E80;", "mov.b32 k4, k2;"]
    else:
        lines += ["mov.b32 k1, 0x000F000F;", "mov.b32 k2, 0x43004300;", "mov.b32 k3, 0x3F803F80;",
                  "mov.b32 k4, 0xC308C308;"]
    for half in range(2):
        for pair in range(2):
            if fp4:
                lines += [f"shl.b32 t, p{pair}, {2 if half else 6};", f"shl.b32 u, p{pair}, {8 if half else 12};",
                          "and.b32 t, t, k1;", "lop3.b32 t, u, k2, t, 0xEA;"]
            else:
                lines += [f"shr.u32 t, p{pair}, {4 if half else 0};", "lop3.b32 t, t, k1, k2, 0xEA;"]
            source = f"${5 + 4 * half + 2 * pair}"
            lines += ["fma.rn.bf16x2 t, t, k3, k4;", f"prmt.b32 s, {source}, 0, 0x1010;",
                      f"prmt.b32 o, {source}, 0, 0x3232;", f"fma.rn.bf16x2 ${2 * half + pair}, t, s, o;"]
    return " ".join([*lines, "}"])


CONVERSION = {fp4: _conversion(fp4) for fp4 in (False, True)}


@triton.jit
def _halves(both, low, high, DTYPE: tl.constexpr, FP4: tl.constexpr, ASM: tl.constexpr):
    """Bytes of two codes, and the pairs (a scale, an offset) of the low and the high ones, which have the same shape or
    are spread to it -> numbers of the low and of the high codes, rounded once."""
    if ASM == "":
        scale, offset = _parts(low, DTYPE)
        first = _number(both & 15, FP4) * scale + offset
        scale, offset = _parts(high, DTYPE)
        second = _number(both >> 4, FP4) * scale + offset
        return first.to(DTYPE), second.to(DTYPE)
    else:
        return tl.inline_asm_elementwise(ASM, "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r", [both, low, high],
                                         dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4)


@triton.jit
def _joined(acc, partial, arrivals, BN: tl.constexpr, BM: tl.constexpr, SPLIT: tl.constexpr):
    """(whether this program is the last of its tile, then the sums of all of them, added in the order of their parts).
    `arrivals` are left as they were found, 0."""
    tile, part = tl.program_id(0), tl.program_id(1)
    last = True
    if SPLIT > 1:
        inside = tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
        tl.store(partial + (tile * SPLIT + part) * (BN * BM) + inside, acc)
        tl.debug_barrier()  # every thread's part stands before the arrival that announces it
        last = tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == SPLIT - 1
        if last:
            tl.store(arrivals + tile, 0)
            acc = tl.zeros((BN, BM), tl.float32)
            for s in tl.static_range(SPLIT):  # past the first-level cache, which misses what others wrote
                acc += tl.load(partial + (tile * SPLIT + s) * (BN * BM) + inside, cache_modifier=".cg")
    return last, acc


@triton.jit(do_not_specialize=["m"])
def few_nibbles_kernel(x, codes, pairs, bias, out, partial, arrivals, m, n, inputs, x_stride, GROUP: tl.constexpr,
                       BIAS: tl.constexpr, ADD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PARTS: tl.constexpr,
                       SPLIT: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
                       UPCAST: tl.constexpr):
    """out[m, n] (+)= x[m, inputs] W^T for m <= BM, int4 codes. pairs [groups, n] int32: a scale in the low 16 bits, an
    offset in the high ones. PARTS blocks of 64 columns in one turn of the loop."""
    DTYPE: tl.constexpr = x.dtype.element_ty
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    tokens = tl.arange(0, BM)
    byte = tl.arange(0, HALF)
    x_at = x + tokens[None, :] * x_stride + byte[:, None]
    at = codes + rows.to(tl.int64)[:, None] * (inputs // 2) + byte[None, :]
    real = (tokens < m)[None, :]
    each = inputs // SPLIT
    begin(PDL)
    acc = tl.zeros((BN, BM), tl.float32)
    for turn in tl.range(0, each, 2 * HALF * PARTS, num_stages=STAGES):
        for part in tl.static_range(PARTS):
            column = tl.program_id(1) * each + turn + part * 2 * HALF
            both = tl.load(at + column // 2)
            low = tl.load(pairs + (column // GROUP * n if GROUP > 0 else 0) + rows)
            high = tl.load(pairs + ((column + HALF) // GROUP * n if GROUP > 0 else 0) + rows)
            a = tl.load(x_at + column, mask=real, other=0.0)
            b = tl.load(x_at + column + HALF, mask=real, other=0.0)
            first, second = _halves(both, low[:, None], high[:, None], DTYPE, False, ASM)
            acc = dot(first, a, acc, "tf32", UPCAST)
            acc = dot(second, b, acc, "tf32", UPCAST)
    last, acc = _joined(acc, partial, arrivals, BN, BM, SPLIT)
    if last:
        _store(acc, bias, out, tokens, rows, m, n, BIAS, ADD)


@triton.jit
def sums_kernel(x, out, inputs, x_stride, EACH: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_E: tl.constexpr,
                BM: tl.constexpr, PDL: tl.constexpr):
    """out [inputs / EACH, BM] float32: the sums of EACH neighbouring numbers of a row of x. One program a row."""
    row = tl.program_id(0)
    g = tl.arange(0, BLOCK_G)
    e = tl.arange(0, BLOCK_E)
    k = g[:, None] * EACH + e[None, :]
    begin(PDL)
    a = tl.load(x + row.to(tl.int64) * x_stride + k, mask=(e < EACH)[None, :] & (k < inputs), other=0.0)
    tl.store(out + g * BM + row, tl.sum(a.to(tl.float32), 1), mask=g * EACH < inputs)


@triton.jit
def _store(acc, bias, out, tokens, rows, m, n, BIAS: tl.constexpr, ADD: tl.constexpr):
    """acc [BN, BM] to its place, with bias and what stands there."""
    keep = (tokens < m)[None, :] & (rows >= 0)[:, None]
    if BIAS:
        acc += tl.load(bias + rows).to(tl.float32)[:, None]
    to = out + tokens[None, :].to(tl.int64) * n + rows[:, None]
    if ADD:
        acc += tl.load(to, mask=keep, other=0.0).to(tl.float32)
    tl.store(to, acc.to(out.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=["m"])
def few_bytes_kernel(x, x_sums, codes, scales, offsets, bias, row_scales, out, m, n, inputs, x_stride,
                     GROUP: tl.constexpr, OFFSETS: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr,
                     ROW_SCALES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PART: tl.constexpr,
                     PARTS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr, UPCAST: tl.constexpr):
    """The same of int8 or e4m3 codes. scales and offsets [groups, n] float32. ROW_SCALES: x is e4m3, with a scale for
    each row. x_sums: of PART columns, or of all where a row has one scale; read with OFFSETS. PARTS times PART columns
    in one turn of the loop, each part in one group."""
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    tokens = tl.arange(0, BM)
    k = tl.arange(0, PART)
    x_at = x + tl.minimum(tokens, m - 1)[None, :] * x_stride + k[:, None]
    at = codes + rows.to(tl.int64)[:, None] * inputs + k[None, :]
    acc = tl.zeros((BN, BM), tl.float32)
    begin(PDL)
    for start in tl.range(0, inputs, PART * PARTS, num_stages=STAGES):
        for part in tl.static_range(PARTS):
            column = start + part * PART
            w = tl.load(at + column)
            b = tl.load(x_at + column)
            if w.dtype != x.dtype.element_ty:
                w = w.to(tl.float32).to(x.dtype.element_ty)
            if GROUP == 0:
                acc = dot(w, b, acc, "tf32", UPCAST)
            else:
                sums = dot(w, b, tl.zeros((BN, BM), tl.float32), "tf32", UPCAST)
                group = column // GROUP * n + rows
                acc += sums * tl.load(scales + group)[:, None]
                if OFFSETS:
                    acc += tl.load(offsets + group)[:, None] * tl.load(x_sums + column // PART * BM + tokens)[None, :]
    if GROUP == 0:
        acc = acc * tl.load(scales + rows)[:, None]
        if OFFSETS:
            acc += tl.load(offsets + rows)[:, None] * tl.load(x_sums + tokens)[None, :]
    if ROW_SCALES:
        acc = acc * tl.load(row_scales + tokens, mask=tokens < m, other=0.0)[None, :]
    _store(acc, bias, out, tokens, rows, m, n, BIAS, ADD)


@triton.jit(do_not_specialize=["n_experts", "alpha", "limit"])
def grouped_kernel(x, codes, scales, offsets, bias, bounds, rows_in, rows_out, out, n_experts, n, inputs, x_stride,
                   each, alpha, limit, NIBBLES: tl.constexpr, FP4: tl.constexpr, GROUP: tl.constexpr,
                   OFFSETS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr,
                   EXPERTS: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr, ASM: tl.constexpr,
                   UPCAST: tl.constexpr, PDL: tl.constexpr):
    """As `triton_grouped.grouped_kernel`; codes and scales as `packed.ByGroups` has them, of all experts' rows one
    below the other. Numbers are made of the codes on the way, and rounded as if the matrix had been dequantised. BK
    divides `inputs` and a group; of 4 bits PARTS blocks of 64 columns are read in one turn of the loop."""
    DTYPE: tl.constexpr = x.dtype.element_ty
    begin(PDL)
    expert, first, end = block_of(bounds, tl.program_id(1), n_experts, BM, EXPERTS)
    if expert < n_experts:
        places = first + tl.arange(0, BM)
        real = places < end
        source = tl.load(rows_in + places, mask=real, other=0) // each
        columns = tl.program_id(0) * BN + tl.arange(0, BN)
        row = rows_of(columns, n, GATE)
        rows = expert * n + tl.minimum(row, n - 1)
        of_rows, width = scales + rows, n_experts * n
        x_row = x + source[:, None] * x_stride
        acc = tl.zeros((BM, BN), tl.float32)
        if NIBBLES:
            byte = tl.arange(0, HALF)
            at = codes + rows.to(tl.int64)[None, :] * (inputs // 2) + byte[:, None]
            for start in tl.range(0, inputs, 2 * HALF * PARTS):
                for part in tl.static_range(PARTS):
                    column = start + part * 2 * HALF
                    both = tl.load(at + column // 2)
                    low = tl.load(of_rows + (column // GROUP * width if GROUP > 0 else 0))
                    high = tl.load(of_rows + ((column + HALF) // GROUP * width if GROUP > 0 else 0))
                    a = tl.load(x_row + column + byte[None, :], mask=real[:, None], other=0.0)
                    b = tl.load(x_row + column + HALF + byte[None, :], mask=real[:, None], other=0.0)
                    first_half, second_half = _halves(both, low[None, :], high[None, :], DTYPE, FP4, ASM)
                    acc = dot(a, first_half, acc, "tf32", UPCAST)
                    acc = dot(b, second_half, acc, "tf32", UPCAST)
        else:
            k = tl.arange(0, BK)
            at = codes + rows.to(tl.int64)[None, :] * inputs + k[:, None]
            for start in tl.range(0, inputs, BK):
                a = tl.load(x_row + start + k[None, :], mask=real[:, None], other=0.0)
                group = start // GROUP * width if GROUP > 0 else 0
                b = tl.load(at + start).to(tl.float32) * tl.load(of_rows + group)[None, :]
                if OFFSETS:
                    b += tl.load(offsets + rows + group)[None, :]
                acc = dot(a, b.to(DTYPE), acc, "tf32", UPCAST)
        finish(acc, bias + expert * n, tl.where(columns < n, row, n), rows_out, places, real, out, n, alpha, limit, BM,
               BN, BIAS, GATE)


@triton.jit
def dequantize_kernel(codes, scales, offsets, out, n, inputs, NIBBLES: tl.constexpr, FP4: tl.constexpr,
                      GROUP: tl.constexpr, OFFSETS: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr):
    """One program for BK columns of a row of n, BK a multiple of BLOCK or all of the row; scales and offsets as
    `packed.ByGroups` has them, pairs of `out`'s type."""
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
    last = tl.minimum(k, inputs - 1)
    at = (last // GROUP if GROUP > 0 else last * 0) * n + row
    if NIBBLES:
        scale, offset = _parts(tl.load(scales + at), out.dtype.element_ty)
        number = number * scale + offset
    else:
        number = number * tl.load(scales + at)
        if OFFSETS:
            number += tl.load(offsets + at)
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


INTERPRETED = isinstance(few_bytes_kernel, InterpretedFunction)


def blocks_for(weight: Packed | ByGroups, rows: int, itemsize: int, shared: int, programs: int = 132) -> Blocks:
    """What a program reads at a time is large, so that memory is never idle, and lies in one group part by part; with
    the inputs of `rows` rows, of `itemsize` bytes each, it fits the `shared` memory of a program. `programs`: that run
    at once, one on each multiprocessor."""
    group, inputs, bits = weight.layout.group, weight.inputs, weight.layout.bits
    if bits == 4:
        return _nibble_blocks(weight, rows, programs)
    outputs = 32 if weight.outputs % 32 == 0 else 16

    def room(part: int) -> int:
        """How many parts fit."""
        scales = 4 * (outputs + rows) * (2 if group < part else 1)
        return (shared - 4096) // ((STAGES - 1) * (part * outputs + part * rows * itemsize + scales))

    part = max(p for p in (32, 64, 128, 256) if p == 32 or (inputs % p == 0 and group % p == 0 and room(p)))
    parts = max(n for n in (1, 2, 4, 8, 16) if n == 1 or (n * part <= 512 and n <= room(part)
                                                          and inputs % (part * n) == 0))
    return Blocks(outputs, part, parts, STAGES, 4)


def _nibble_blocks(weight: Packed | ByGroups, rows: int, programs: int) -> Blocks:
    """A warp for each 16 outputs, so that none makes the numbers that another makes. Where that leaves multiprocessors
    without a program, up to 8 share the columns, two turns of the loop each at least; then tiles are smaller, but no
    smaller than two warps', since Triton builds no pipeline for one."""
    blocks = weight.inputs // BLOCK
    parts = max(p for p in (1, 2, 4) if blocks % p == 0 and (p == 1 or p * rows <= 64))
    turns = blocks // parts
    for outputs in (o for o in (64, 32) if weight.outputs % o == 0) if weight.outputs % 32 == 0 else (16,):
        tiles = weight.outputs // outputs
        split = max(s for s in range(1, 9) if turns % s == 0 and (s == 1 or (2 * s <= turns
                                                                           and tiles * s <= 4 * programs)))
        if tiles * split >= programs:
            break
    return Blocks(outputs, BLOCK, parts, STAGES, outputs // 16, split)


def _shape(weight: Packed | ByGroups) -> dict:
    layout = weight.layout
    return {"NIBBLES": layout.bits == 4, "FP4": layout.kind == "fp4", "OFFSETS": layout.offsets,
            "GROUP": 0 if layout.group == weight.inputs else layout.group}


def launch_few_rows(x: torch.Tensor, weight: ByGroups, out: torch.Tensor, bias: torch.Tensor | None = None,
                    add: bool = False, row_scales: torch.Tensor | None = None, blocks: Blocks | None = None,
                    arrivals: torch.Tensor | None = None) -> None:
    """x [m, inputs] with contiguous rows, m <= MOST_ROWS; out [m, outputs] contiguous. `row_scales` [m]: of e4m3.
    Scales of int4 are of x's type. `arrivals`: zeros, int32, one for each 16 outputs, and zeros again afterwards; None:
    made anew. ValueError for fp4: only experts are."""
    if weight.layout.kind == "fp4":
        raise ValueError("fp4 weights are multiplied as experts only: use launch_grouped, or dequantise them")
    (m, inputs), n, layout, device = x.shape, weight.outputs, weight.layout, x.device
    group, bm = 0 if layout.group == inputs else layout.group, max(16, triton.next_power_of_2(m))
    shared, programs = (shared_memory(device), multiprocessors(device)) if x.is_cuda else (227 * 1024, 2)
    blocks = blocks or blocks_for(weight, bm, x.element_size(), shared, programs)
    common = dict(GROUP=group, BIAS=bias is not None, ADD=add, BM=bm, BN=blocks.outputs, PARTS=blocks.parts,
                  STAGES=blocks.stages, PDL=overlaps(device), UPCAST=INTERPRETED and x.dtype is not torch.float32,
                  num_warps=blocks.warps, **dependent(device))
    given, grid = x if bias is None else bias, (n // blocks.outputs, blocks.split)
    if layout.bits == 4:
        if arrivals is None:
            arrivals = torch.zeros(n // 16, dtype=torch.int32, device=device)
        partial = x if blocks.split == 1 else torch.empty(blocks.split * n * bm, dtype=torch.float32, device=device)
        asm = CONVERSION[False] if x.dtype is torch.bfloat16 and not INTERPRETED else ""
        few_nibbles_kernel[grid](x, weight.codes, weight.scales, given, out, partial, arrivals, m, n, inputs,
                                 x.stride(0), SPLIT=blocks.split, ASM=asm, **common)
        return
    scales, offsets = weight.scales, weight.offsets
    sums = scales if offsets is None else _sums(x, blocks.part if group else inputs, bm)
    few_bytes_kernel[grid](x, sums, weight.codes, scales, scales if offsets is None else offsets, given,
                           scales if row_scales is None else row_scales, out, m, n, inputs, x.stride(0),
                           OFFSETS=layout.offsets, ROW_SCALES=row_scales is not None, PART=blocks.part, **common)


def _sums(x: torch.Tensor, each: int, rows: int) -> torch.Tensor:
    """[inputs / each, rows] float32: see `sums_kernel`. Columns after x's rows are not written."""
    m, inputs = x.shape
    out = torch.empty(inputs // each, rows, dtype=torch.float32, device=x.device)
    sums_kernel[(m,)](x, out, inputs, x.stride(0), EACH=each, BLOCK_G=triton.next_power_of_2(inputs // each),
                      BLOCK_E=triton.next_power_of_2(each), BM=rows, PDL=overlaps(x.device), num_warps=4,
                      **dependent(x.device))
    return out


def launch_grouped(x: torch.Tensor, weight: ByGroups, bias: torch.Tensor | None, bounds: torch.Tensor,
                   rows_in: torch.Tensor, rows_out: torch.Tensor, out: torch.Tensor, each: int = 1,
                   gate: Gate | None = None, tile: Tile | None = None) -> torch.Tensor:
    """As `triton_grouped.launch_grouped`; `weight` has the rows of all experts one below the other; bounds [E + 1].
    Scales of 4 bits are of x's type."""
    n_experts, places = len(bounds) - 1, len(rows_in)
    n, inputs, layout = weight.outputs // n_experts, weight.inputs, weight.layout
    t = tile or _tile_for(weight, places, n_experts)
    blocks = blocks_of(places, n_experts, t.places)
    if blocks == 0:
        return out
    kind, alpha, limit = gate_options(gate)
    together = math.gcd(t.inputs, inputs, layout.group)  # a power of two, for a tile's inputs are one
    assert layout.bits == 4 or together >= 16, f"{inputs} inputs in groups of {layout.group}"
    parts = max(p for p in range(1, max(1, t.inputs // BLOCK) + 1) if inputs % (p * BLOCK) == 0 or p == 1)
    asm = layout.bits == 4 and x.dtype is torch.bfloat16 and not INTERPRETED
    grouped_kernel[(triton.cdiv(n, t.rows), blocks)](
        x, weight.codes, weight.scales, weight.scales if weight.offsets is None else weight.offsets,
        x if bias is None else bias, bounds, rows_in, rows_out, out, n_experts, n, inputs, x.stride(0), each, alpha,
        limit, **_shape(weight), BM=t.places, BN=t.rows, BK=together, PARTS=parts,
        EXPERTS=triton.next_power_of_2(n_experts), BIAS=bias is not None, GATE=kind,
        ASM=CONVERSION[layout.kind == "fp4"] if asm else "", UPCAST=INTERPRETED and x.dtype is not torch.float32,
        PDL=overlaps(x.device), num_warps=t.warps, num_stages=t.stages, **dependent(x.device))
    return out


def _tile_for(weight: ByGroups, places: int, n_experts: int) -> Tile:
    bm, rows = min(max(16, triton.next_power_of_2(-(-places // n_experts))), 128), weight.outputs // n_experts
    if bm == 16:
        return Tile(bm, 64, 256 if weight.layout.bits == 4 else 128, 4, 4)
    return Tile(bm, 128 if rows >= 128 else 64, 64, 4 if bm <= 64 else 8)


def launch_dequantize(weight: ByGroups, dtype: torch.dtype) -> torch.Tensor:
    """[outputs, inputs], rounded once. Scales of 4 bits are of this type."""
    out = torch.empty(weight.outputs, weight.inputs, dtype=dtype, device=weight.codes.device)
    block = min(1024, triton.next_power_of_2(weight.inputs))
    dequantize_kernel[(weight.outputs, triton.cdiv(weight.inputs, block))](
        weight.codes, weight.scales, weight.scales if weight.offsets is None else weight.offsets, out, weight.outputs,
        weight.inputs,
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
