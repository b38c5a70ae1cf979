"""Compiles the attention kernels for a device that need not be there; run as a script, since the interpreter's switch
must be off. Prints one JSON line for each kernel: shared memory in bytes.

    python -m tests.attn.compile_kernels 90 128 bf16 --window 1024 --softcap --sinks
"""

from __future__ import annotations

import argparse
import json

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from stretto.attn.gluon_chunks import LAYOUT, REGISTERS, RINGS, attend_chunks_kernel
from stretto.attn.tiles import FewTokens, KernelConfig, Tile, kernel_config, padded
from stretto.attn.triton_kernels import ITEM_WORDS, attend_kernel, plan_kernel

ELEMENT = {"bf16": 2, "fp16": 2, "fp32": 4}


def build(kernel, pointers: dict[str, str], constants: dict, options: dict, arch: int, source=ASTSource) -> int:
    names = kernel.arg_names
    rest = {n: "constexpr" if n in constants else "fp32" if n.endswith("_scale") else "i32" for n in names}
    aligned = [n for n in names if n in pointers or (n.endswith("_stride") and n != "table_stride")]
    made = source(kernel, {n: pointers.get(n, rest[n]) for n in names},
                  {(names.index(n),): v for n, v in constants.items()},
                  {(names.index(n),): [["tt.divisibility", 16]] for n in aligned if "desc" not in n})
    return triton.compile(made, target=GPUTarget("cuda", arch, 32), options=options).metadata.shared


def build_plan(config: KernelConfig, few: FewTokens, window: int, arch: int) -> int:
    pointers = dict.fromkeys(("q_len", "kv_len", "cu_q", "slots", "items", "counts", "arrivals"), "*i32")
    constants = dict(ROWS=128, WINDOW=window, G=4, HEADS_KV=8, FEW=few.tile.rows, CHUNK=config.chunk.rows,
                     SPLIT=few.split, MAX_SPLITS=config.max_splits, CHUNK_SPLIT=config.chunk_split,
                     CHUNK_ITEMS=config.chunk_items, WORDS=ITEM_WORDS)
    return build(plan_kernel, pointers, constants, {"num_warps": 4}, arch)


def build_attend(kind: int, tile: Tile, args: argparse.Namespace) -> int:
    data = "*" + args.dtype
    pointers = dict(q=data, k_cache=data, v_cache=data, tables="*i32", items="*i32", counts="*i32", arrivals="*i32",
                    cu_q="*i32", out=data, partial_out="*fp32", partial_lse="*fp32", sinks=data, k_scales="*u8",
                    v_scales="*u8")
    constants = dict(KIND=kind, WINDOW=args.window, SOFTCAP=args.softcap, SINKS=args.sinks, PAGE=16, G=4, HEADS_KV=8,
                     D=args.head_dim, BLOCK_D=max(padded(args.head_dim), 16), M=tile.rows, KEYS=tile.keys,
                     STAGES=tile.stages, WORDS=ITEM_WORDS, FIRST=True, PDL=args.arch >= 90,
                     PRECISION="ieee" if args.dtype == "fp32" else "tf32", UPCAST=False, FP8=False)
    options = {"num_warps": tile.warps, "maxnreg": tile.registers}
    return build(attend_kernel, pointers, constants, options, args.arch)


def build_chunks(args: argparse.Namespace) -> int:
    """The kernel of chunks on sm_90."""
    data, ring, page = "*" + args.dtype, RINGS[args.head_dim], 16
    cells = f"tensordesc<{args.dtype}[{page}, {args.head_dim}],{LAYOUT!r}>"
    pointers = dict(q=data, k_desc=cells, v_desc=cells, tables="*i32", items="*i32", counts="*i32", arrivals="*i32",
                    out=data, partial_out="*fp32", partial_lse="*fp32", sinks=data)
    constants = dict(WINDOW=args.window, SOFTCAP=args.softcap, SINKS=args.sinks, PAGE=page, G=4, HEADS_KV=8,
                     D=args.head_dim, KEYS=ring.keys, STAGES=ring.stages, WORDS=ITEM_WORDS, PDL=True)
    options = {"num_warps": 4, "maxnreg": REGISTERS}
    return build(attend_chunks_kernel, pointers, constants, options, args.arch, GluonASTSource)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("arch", type=int)
    parser.add_argument("head_dim", type=int)
    parser.add_argument("dtype", choices=ELEMENT)
    parser.add_argument("--window", type=int, default=0)
    parser.add_argument("--softcap", action="store_true")
    parser.add_argument("--sinks", action="store_true")
    args = parser.parse_args()
    config = kernel_config(args.head_dim, ELEMENT[args.dtype], args.arch)
    for few in config.few:
        print(json.dumps({"plan": build_plan(config, few, args.window, args.arch)}))
    print(json.dumps({"chunk": build_attend(0, config.chunk, args)}))
    if args.arch == 90 and args.head_dim in RINGS and args.dtype != "fp32":
        print(json.dumps({"chunk on sm_90": build_chunks(args)}))
    for tile in {few.tile for few in config.few}:
        shared = build_attend(1, tile, args)
        print(json.dumps({f"few {tile.keys}": shared, f"few {tile.keys} of all programs": tile.programs * shared}))


if __name__ == "__main__":
    main()
