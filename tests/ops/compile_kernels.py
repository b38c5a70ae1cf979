"""Compiles the fused kernels for a device that need not be there; run as a script, since the interpreter's switch must
be off. Prints one JSON line for each kernel: shared memory in bytes.

    python -m tests.ops.compile_kernels 90
"""

from __future__ import annotations

import argparse
import json
import re

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_source

from stretto.attn import triton_short
from stretto.ops import (
    skinny,
    triton_delta,
    triton_delta_net,
    triton_draft,
    triton_exchange,
    triton_fixed,
    triton_grouped,
    triton_kv_write,
    triton_layer,
    triton_ngram,
    triton_packed,
    triton_recurrent,
    triton_skinny,
    triton_some_rows,
    triton_step,
)
from stretto.ops.packed import Layout, Packed

DATA = ("x", "w", "norm", "bias", "out", "weight", "gate_up", "q_weight", "k_weight", "k_cache", "v_cache",
        "x_tiles", "w_tiles")
FLOATS = ("table", "reals", "logits", "values", "partial")
LONGS = ("positions", "cells", "slots", "ids", "sampled", "token_rows", "out_tokens", "out_rows", "offered")
INTS = ("rows", "ints", "base", "q_len", "kv_len", "n_out", "cu_q", "cu_out", "log", "arrivals", "step_n_out", "stops",
        "n_new", "accepted", "known", "length", "ndraft", "offer_width", "wants")


STRIDES = ("qkv_stride", "page_stride", "cell_stride")

SHAPES = ((6144, 4096, False), (14336, 4096, True), (128256, 4096, False), (1024, 3072, False))
SHARED = {80: 99 * 1024, 90: 227 * 1024}


def build(kernel, constants: dict, warps: int, arch: int, types: dict[str, str]) -> int:
    """Pointers by the names of the kernel's parameters; all other parameters are int32, `eps` is float32."""
    pointers = ({n: "*bf16" for n in DATA} | {n: "*fp32" for n in FLOATS} | {n: "*i64" for n in LONGS}
                | {n: "*i32" for n in INTS} | {"live": "*i1", "done": "*i1"} | types)
    names = kernel.arg_names
    of = {n: "constexpr" if n in constants else pointers.get(n, "fp32" if n == "eps" else "i32") for n in names}
    aligned = [n for n in names if of[n].startswith("*") or n in ("n", "inputs", "x_stride", "size", *STRIDES)]
    source = ASTSource(kernel, of, {(names.index(n),): v for n, v in constants.items()},
                       {(names.index(n),): [["tt.divisibility", 16]] for n in aligned})
    compiled = compile_source(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": warps})
    check_products(kernel.__name__, compiled.asm["ttgir"])
    return compiled.metadata.shared


def check_products(name: str, code: str) -> None:
    """A product by warp groups (wgmma) gives each warp 16 rows. Where more warps stand one below the other than it has
    rows, as the compiler puts them where one product's result is another's operand, some of them have none: kernels
    of this kind, and no others, have read out of bounds on a device."""
    warps = {m[1]: int(m[2]) for m in re.finditer(
        r"(#mma\d*) = #ttg\.nvidia_mma<\{versionMajor = 3,.*?warpsPerCTA = \[(\d+), \d+\]", code)}
    for rows, layout in re.findall(r"warp_group_dot .*-> tensor<(\d+)x\d+x\w+, (#mma\d*)>", code):
        if 16 * warps[layout] > int(rows):
            raise ValueError(f"{name}: a product of {rows} rows is given to {warps[layout]} warps of 16 rows each")


def layer_kernels(arch: int, pdl: bool):
    yield "rms_norm", build(triton_layer.rms_norm_kernel, dict(BLOCK=4096, PDL=pdl), 8, arch, {})
    for act in ("silu", "gelu_tanh", "gelu", "relu"):
        yield f"gate {act}", build(triton_layer.gate_kernel, dict(ACT=act, BLOCK=1024, PDL=pdl), 4, arch, {})
    sizes = dict(N_Q=32, N_K=8, N_V=8, PAGE=16, D=128, HALF=64, HEADS=8, NORM=True, WRITE=True, PDL=pdl)
    for fp8 in (False, True) if arch >= 89 else (False,):
        types = dict(k_scales="*u8", v_scales="*u8") | (dict(k_cache="*fp8e4nv", v_cache="*fp8e4nv") if fp8 else {})
        yield "rotate, 8 bits" if fp8 else "rotate", build(triton_layer.rotate_kernel, sizes | dict(FP8=fp8), 2, arch,
                                                           types)


PLACES = dict(bounds="*i64", rows_in="*i64", rows_out="*i64", alpha="fp32", limit="fp32")


def grouped_kernels(arch: int, pdl: bool):
    """What is shared by layers of experts, whatever the form of their weights."""
    for places, size in ((16, 2), (4096, 2), (4096, 4)):
        tile = triton_grouped.tile_for(places, 128, size)
        kind = "*bf16" if size == 2 else "*fp32"
        yield f"{places} places of experts, {kind}", build(
            triton_grouped.grouped_kernel,
            dict(BM=tile.places, BN=tile.rows, BK=tile.inputs, EXPERTS=128, BIAS=True, GATE="silu", UPCAST=False,
                 PRECISION="tf32" if size == 2 else "ieee", PDL=pdl), tile.warps, arch,
            PLACES | {name: kind for name in ("x", "weight", "bias", "out")})
    yield "choices", build(triton_grouped.choose_kernel, dict(K=8, WIDE_K=8, E=128, OF_ALL=True, PDL=pdl), 1, arch,
                           dict(logits="*bf16", weights="*fp32", experts="*i64"))
    yield "places", build(triton_grouped.group_kernel, dict(K=8, PADDED=True, N=512, E=256, EACH=16, PDL=pdl), 4, arch,
                          dict.fromkeys(("experts", "tokens", "slots", "bounds", "places"), "*i64"))
    types = dict.fromkeys(("experts", "tokens", "slots", "bounds", "places"), "*i64") | dict(counts="*i32",
                                                                                             before="*i32")
    for name, kernel in (("counted", triton_grouped.count_kernel), ("taken", triton_grouped.place_kernel)):
        yield f"places, {name}", build(kernel, dict(K=8, PADDED=True, N=256, E=256, EACH=16, PDL=pdl), 4, arch, types)
    yield "places, before", build(triton_grouped.before_kernel, dict(E=256, AT_ONCE=16, PDL=pdl), 4, arch,
                                  dict(counts="*i32", bounds="*i64"))
    yield "sum over choices", build(
        triton_grouped.combine_kernel, dict(K=8, PADDED=True, ADD=True, BLOCK=1024, PDL=pdl), 4, arch,
        dict(made="*bf16", weights="*fp32", tokens="*i64", residual="*bf16"))


def packed_kernels(arch: int, pdl: bool):
    """One of each kind of codes, at most rows."""
    layouts = [Layout("int4", 32), Layout("int8", 4096), *([Layout("fp8", 128)] if arch >= 89 else [])]
    for layout in layouts:
        kind, group = layout.kind, layout.group % 4096
        codes = {"int4": "*u8", "int8": "*i8", "fp8": "*fp8e4nv"}[kind]
        types = {"codes": codes, "scales": "*fp32" if kind == "fp8" else "*bf16", "offsets": "*bf16",
                 "row_scales": "*fp32", "pairs": "*i32", "x_sums": "*fp32"}
        options = dict(NIBBLES=kind == "int4", FP4=False, GROUP=group, OFFSETS=False)
        yield f"{kind} of experts", build(
            triton_packed.grouped_kernel, options | dict(FP4=kind == "int4", BM=128, BN=128, BK=64, EXPERTS=32,
                                                         BIAS=True, GATE="clamped", UPCAST=False, PDL=pdl, PARTS=1,
                                                         ASM=triton_packed.CONVERSION[True] if kind == "int4" else ""),
            8, arch, types | PLACES | {"scales": "*i32" if kind == "int4" else "*fp32"})
        yield f"{kind} to numbers", build(triton_packed.dequantize_kernel, options | dict(BK=1024, PDL=pdl), 4, arch,
                                          types | {"scales": "*i32" if kind == "int4" else "*fp32", "offsets": "*fp32"})
        weight = Packed.empty(layout, 4096, 4096, torch.bfloat16, torch.device("meta"))
        blocks = triton_packed.blocks_for(weight, 64, 2, SHARED[arch])
        few = dict(GROUP=group, BIAS=True, ADD=True, BM=64, BN=blocks.outputs, PARTS=blocks.parts, STAGES=blocks.stages,
                   PDL=pdl, UPCAST=False)
        if kind == "int4":
            kernel = triton_packed.few_nibbles_kernel
            more = dict(SPLIT=blocks.split, ASM=triton_packed.CONVERSION[False])
        else:
            kernel, more = triton_packed.few_bytes_kernel, dict(OFFSETS=False, ROW_SCALES=False, PART=blocks.part)
        yield f"{kind} by few rows", build(kernel, few | more, blocks.warps, arch,
                                           types | {"scales": "*fp32", "offsets": "*fp32", "partial": "*fp32"})
    if arch >= 89:
        yield "write of 8-bit cells", build(
            triton_kv_write._write_fp8_kernel, dict(PAGE=16, HEADS=8, D=128, BLOCK=128), 1, arch,
            dict(k="*bf16", v="*bf16", k_cache="*fp8e4nv", v_cache="*fp8e4nv", k_scales="*u8", v_scales="*u8"))


def skinny_kernels(arch: int, pdl: bool):
    options = dict(BIAS=True, ADD=False, PDL=pdl)
    for outputs, inputs, gated in SHAPES:
        blocks = skinny.one_row_blocks(outputs, inputs, gated)
        yield f"one row of {inputs} to {outputs}", build(
            triton_skinny.one_row_kernel,
            options | dict(BN=blocks.outputs, BK=blocks.columns, STAGES=blocks.stages,
                           THREADS=32 * blocks.warps, NORM=True, GATED=gated), blocks.warps, arch, {})
        for rows in (16, 64):
            blocks = skinny.few_rows_blocks(rows, outputs, inputs, gated, SHARED[arch])
            if blocks is None:
                continue
            yield f"{rows} rows of {inputs} to {outputs}", build(
                triton_skinny.few_rows_kernel,
                options | dict(BM=rows, BN=blocks.outputs, BK=blocks.columns, SPLIT=blocks.split, GATED=gated,
                               COPIES=False, STAGES=blocks.stages, THREADS=32 * blocks.warps,
                               PRECISION="tf32", UPCAST=False), blocks.warps, arch, {})


def fixed_kernels(arch: int, pdl: bool):
    for bits, kind in ((16, "*bf16"), (32, "*fp32")):
        sizes = dict(BM=triton_fixed.ROWS, BN=triton_fixed.OUTPUTS, BK=triton_fixed.INPUTS * 16 // bits, BIAS=True,
                     PDL=pdl, PRECISION="tf32" if bits == 16 else "ieee", UPCAST=False)
        yield f"fixed product of {bits} bits", build(triton_fixed.fixed_kernel, sizes, 4, arch,
                                                     {name: kind for name in ("x", "w", "bias", "out")})


def tile_kernels(arch: int, pdl: bool):
    """Those whose tiles come by the copy engine; a descriptor's type holds the size of its tiles."""
    if arch < 90:
        return
    for rows, shared in ((triton_fixed.ROWS, True), (2 * triton_fixed.ROWS, False)):
        sizes = dict(BM=rows, BN=triton_fixed.TILE_OUTPUTS, BK=triton_fixed.TILE_INPUTS, PARTS=4, SHARED=shared,
                     STAGES=4, BIAS=True, PDL=pdl, PRECISION="tf32", UPCAST=False)
        yield f"fixed tiles of {rows} rows", build(triton_fixed.fixed_tiles_kernel, sizes, rows // 16, arch,
                                                   tiles(sizes))
    for rows in (16, 64):
        sizes = dict(BM=rows, BN=64, BK=128, SPLIT=2, STAGES=4, THREADS=128, BIAS=True, GATED=False,
                     ADD=True, COPIES=True, PDL=pdl, PRECISION="tf32", UPCAST=False)
        yield f"few rows, {rows}, copied", build(triton_skinny.few_rows_kernel, sizes, 4, arch, tiles(sizes))
    sizes = dict(BM=128, BN=128, BK=64, STAGES=4, THREADS=256, BIAS=True, PDL=pdl, PRECISION="tf32",
                 UPCAST=False)
    yield "some rows, gated", build(triton_some_rows.some_rows_kernel, sizes, 8, arch, tiles(sizes))


def tiles(sizes: dict) -> dict[str, str]:
    return {f"{name}_tiles": f"tensordesc<bf16[{sizes[rows]}, {sizes['BK']}]>"
            for name, rows in (("x", "BM"), ("w", "BN"))}


def short_kernels(arch: int, pdl: bool):
    types = dict(qkv="*bf16", rope="*fp32", tables="*i32", bases="*i32", q_lens="*i32", partial_out="*fp32",
                 partial_lse="*fp32", scale="fp32")
    for group, most, splits in ((4, 1, 32), (4, 4, 8), (2, 8, 4), (7, 2, 16)):
        sizes = dict(G=group, GROUP=8 if group == 7 else group, HEADS_KV=8, D=128, M=16, MOST=most,
                     KEYS=triton_short.KEYS, STAGES=3, SPLITS=splits, PAGE=16, NORM=group == 2, PDL=pdl,
                     PRECISION="tf32", UPCAST=False)
        yield f"short steps, {group} heads, {most} tokens", build(triton_short.short_kernel, sizes, 4, arch, types)


def step_kernels(arch: int, pdl: bool):
    yield "lengths", build(triton_step.lengths_kernel, dict(ROWS=256, PDL=pdl), 4, arch, {})
    sizes = dict(PAGE=16, STEPS=9, CELLS_ONLY=False, ITEMS=128, PDL=pdl)
    yield "spread", build(triton_step.spread_kernel, sizes, 4, arch, {"table": "*i32"})
    for draw in (False, True):
        sizes = dict(VOCAB=4096, DRAW=draw, STREAM=0, PDL=pdl)
        yield f"best, draw {draw}", build(triton_step.best_kernel, sizes, 8, arch, {"ids": "*i32"})
    yield "best of parts", build(triton_step.best_of_parts_kernel, dict(PARTS=32, PDL=pdl), 1, arch,
                                 {"ids": "*i32", "out": "*i64"})
    yield "judge", build(triton_step.judge_kernel, dict(WIDTH=8, STOPS=64, PDL=pdl), 1, arch, {})
    yield "commit", build(triton_step.commit_kernel, dict(WIDTH=8, PDL=pdl), 1, arch, {})
    yield "n-gram", build(triton_ngram.ngram_kernel, dict(LONGEST=4, SHORTEST=2, WIDTH=8, BLOCK=2048, PDL=pdl), 8, arch,
                          {"known_of": "*i32", "offered": "*i32"})
    yield "pack", build(triton_step.pack_kernel, dict(WIDTH=8, OFFERS=8, PDL=pdl), 1, arch, {"out": "*i32"})


def draft_kernels(arch: int, pdl: bool):
    table = {"table": "*i32", "cells": "*i64", "starts": "*i32"}
    yield "offer", build(triton_draft.offer_kernel, dict(WIDTH=8, PDL=pdl), 1, arch,
                         {"offered": "*i32", "widths": "*i32"})
    yield "seam", build(triton_draft.seam_kernel, dict(PAGE=16, BLOCK=1024, PDL=pdl), 4, arch,
                        {"taps": "*bf16", "of_slot": "*bf16", "of_page": "*bf16"})
    sizes = dict(SHIFT=1, PAGE=16, PDL=pdl)
    yield "stream", build(triton_draft.stream_kernel, sizes | dict(ENTRIES=1024), 4, arch,
                          {"table": "*i32", "out": "*i32"})
    yield "rows of an extension", build(triton_draft.extension_rows_kernel, dict(SHIFT=1, ROWS=256, PDL=pdl), 4, arch,
                                        {"count": "*i32", "starts": "*i32", "base_out": "*i32", "last": "*i64"})
    yield "items of an extension", build(
        triton_draft.extension_items_kernel, sizes | dict(ROWS=256, ITEMS=128), 4, arch,
        table | {"stands": "*i32", "rows_out": "*i64", "cell_out": "*i64", "sources": "*i64"})
    wide = {name: "*i64" for name in ("owners", "rows", "wide_owners", "wide_positions")}
    wide |= {name: "*i32" for name in ("counts", "wide_base", "wide_kv_len", "ones", "wide_starts")}
    yield "block", build(triton_draft.block_kernel, dict(SIZE=8, COPIES=2, PAGE=16, ITEMS=128, PDL=pdl), 4, arch,
                         table | wide)
    yield "steps ahead", build(triton_draft.ahead_kernel, sizes | dict(ITEMS=128), 4, arch,
                               table | {"owners": "*i64", "ones": "*i32", "rows": "*i64"})


def rank_kernels(arch: int, pdl: bool):
    for ranks in (2, 8):
        for join in (False, True):
            sizes = dict(RANK=1, RANKS=ranks, JOIN=join, BASE=not join, TILE=2048 if join else 4096,
                         ALL=triton_exchange.PROGRAMS, PDL=pdl)
            kind = "*fp32" if join else "*bf16"
            yield f"exchange of {ranks}, join {join}", build(
                triton_exchange.exchange_kernel, sizes, triton_exchange.WARPS, arch,
                {"x": kind, "out": kind, "base": kind, "memory": "*i64", "counts": "*i32"})
    sizes = dict(RANK=1, RANKS=4, BASE=True, TILE=4096, ALL=triton_exchange.PROGRAMS, PDL=pdl)
    yield "exchange of 4 in two shots", build(
        triton_exchange.two_shot_kernel, sizes, triton_exchange.WARPS, arch,
        {"x": "*bf16", "out": "*bf16", "base": "*bf16", "memory": "*i64", "counts": "*i32"})


def recurrent_kernels(arch: int, pdl: bool):
    states = {name: "*fp32" for name in ("memory", "page_states", "out", "q", "k", "v", "decay", "beta")}
    states |= {"pages": "*i64", "rows": "*i64"}
    sizes = dict(CELLS=6, WIDTH=4, PDL=pdl)
    tile = dict(TOKENS=8, BLOCK=256, BIAS=True)
    yield "convolution", build(triton_recurrent.conv_kernel, sizes | tile, 4, arch, states)
    yield "its states", build(triton_recurrent.conv_state_kernel, sizes | dict(PAGE=16, BLOCK=64, COLUMNS=4), 4, arch,
                              states)
    yield "inputs of the delta rule", build(
        triton_delta_net.delta_inputs_kernel, dict(HEADS=16, VALUE_HEADS=32, K=128, BLOCK_H=4, BLOCK_K=128, BLOCK_V=32,
                                                   PDL=pdl), 4, arch,
        states | dict(a="*bf16", b="*bf16", log_rate="*bf16", q_out="*fp32", k_out="*fp32", scale="fp32"))
    yield "its gate", build(triton_delta_net.gated_norm_kernel, dict(HEADS=32, D=128, BLOCK_H=8, BLOCK_D=128, PDL=pdl),
                            4, arch, dict(x="*fp32", gate="*bf16"))
    sizes = dict(CELLS=6, HEADS=32, EACH=2, K=128, V=128, BK=128, BV=32, DELTA=True, PDL=pdl)
    yield "delta rule", build(triton_delta.tokens_kernel, sizes, 4, arch, states)
    for dtype, kind, precision in ((torch.bfloat16, "*bf16", "tf32"), (torch.float32, "*fp32", "tf32x3")):
        how = triton_delta.chunking(dtype, 128, (99 if arch < 90 else 227) * 1024)
        types = states | {name: kind for name in ("q_ready", "k_ready", "read", "within")}
        types |= {"own": "*fp32", "totals": "*fp32"}
        shape = sizes | dict(C=how.tokens, PRECISION=precision, UPCAST=False)
        on = {name: value for name, value in shape.items() if name != "CELLS"}
        yield f"delta rule, chunks made ready, {dtype}", build(
            triton_delta.ready_kernel, on | dict(BV=128, LEVELS=how.tokens.bit_length() - 1, ROWS=64), how.warps, arch,
            types)
        yield f"delta rule, chunk after chunk, {dtype}", build(
            triton_delta.chunks_kernel, shape | dict(BV=how.values), how.warps_on, arch, types)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("arch", type=int)
    arch = parser.parse_args().arch
    torch.set_num_threads(1)
    for kernels in (layer_kernels, grouped_kernels, packed_kernels, skinny_kernels, short_kernels, fixed_kernels,
                    step_kernels, draft_kernels, rank_kernels, recurrent_kernels):
        for name, shared in kernels(arch, arch >= 90):
            print(json.dumps({name: shared}))


if __name__ == "__main__":
    main()
