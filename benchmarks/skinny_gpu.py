"""Times the kernels that multiply a weight matrix by a few rows, beside torch's own, and prints the best blocks.

    python benchmarks/skinny_gpu.py --json out.json

Each figure is one of several launches of a CUDA graph over weights that do not fit the cache. Kernels are compiled by
many processes first; `stretto/ops/skinny.py` holds the table that came out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from multiprocessing import get_context

import torch

from stretto.ops.blocks import Blocks, OneRow, SomeRows
from stretto.ops.launch import shared_memory
from stretto.ops.layer import gate
from stretto.ops.skinny import blocks_for
from stretto.ops.triton_skinny import launch_few_rows, launch_one_row
from stretto.ops.triton_some_rows import launch_some_rows

SHAPES = {  # outputs, inputs, gated
    "8b qkv": (6144, 4096, False), "8b o": (4096, 4096, False), "8b gate_up": (14336, 4096, True),
    "8b down": (4096, 14336, False), "8b head": (128256, 4096, False),
    "0.6b qkv": (4096, 1024, False), "0.6b o": (1024, 2048, False), "0.6b gate_up": (3072, 1024, True),
    "0.6b down": (1024, 3072, False), "0.6b head": (151936, 1024, False)}


def one_row_blocks() -> list[OneRow]:
    """(4, 2048), (8, 1024) ...: one or two kilobytes of each of a few rows at a time."""
    shapes = [(4, 2048, 1, 4), (8, 1024, 4, 4), (8, 1024, 2, 4), (4, 1024, 4, 4), (4, 1024, 2, 4), (8, 1024, 1, 4),
              (4, 2048, 2, 4), (2, 2048, 2, 4)]
    return [OneRow(*shape, ahead=ahead) for shape in shapes for ahead in (64, 512, 1024)]


def few_rows_blocks(bm: int, gated: bool) -> list[Blocks]:
    shapes = [(16, 256, 4, 2), (32, 128, 6, 2), (32, 256, 6, 2), (32, 256, 4, 2), (32, 256, 3, 4), (64, 128, 4, 4),
              (64, 128, 6, 4), (64, 256, 3, 4), (64, 256, 4, 4), (64, 64, 6, 4), (128, 64, 4, 8), (128, 64, 6, 8),
              (128, 128, 4, 8), (128, 128, 3, 4)]
    fits = [s for s in shapes if (s[0] * (1 + gated) + bm) * s[1] * 2 * s[2] < 220_000]
    return [Blocks(*shape, split) for shape in fits for split in ((1,) if gated else (1, 2, 4))]


def copied_blocks(bm: int, gated: bool) -> list[Blocks]:
    """Of the kernel for few rows, its tiles brought by the copy engine."""
    shapes = [(64, 64, 4, 4), (64, 64, 8, 4), (64, 128, 4, 4), (64, 128, 6, 4), (64, 256, 3, 4), (64, 256, 4, 4),
              (128, 64, 4, 4), (128, 64, 6, 8), (128, 128, 4, 8)]
    fits = [s for s in shapes if (s[0] * (1 + gated) + bm) * s[1] * 2 * s[2] < 225_000]
    return [Blocks(*shape, split, 64, True) for shape in fits for split in ((1,) if gated else (1, 2, 4))]


def some_rows_blocks(bm: int) -> list[Blocks]:
    """Of the kernel for gated products; bm: rows of a tile, 64 to 256."""
    shapes = [(32, 64, 6, 4), (32, 128, 4, 4), (64, 64, 3, 8), (64, 64, 4, 8), (64, 64, 6, 4), (64, 128, 3, 4),
              (128, 64, 3, 8), (128, 64, 4, 8)]
    return [SomeRows(*s, ahead=64) for s in shapes if (s[0] * 2 + bm) * s[1] * 2 * s[2] < 220_000
            and s[0] * 2 * bm <= 128 * 32 * s[3]]  # at most 128 registers of a thread hold sums


def candidates(m: int, outputs: int, inputs: int, gated: bool, kernels: list[str]) -> list[Blocks]:
    """Those of the kernels asked for, and what `ops.skinny` chooses."""
    found: list[Blocks] = []
    if m == 1 and "one" in kernels:
        found += one_row_blocks()
    if 1 < m <= 64 and "few" in kernels:
        found += few_rows_blocks(max(16, m), gated)
    if m <= 64 and "copies" in kernels:
        found += copied_blocks(max(16, 1 << (m - 1).bit_length()), gated)
    if m > 64 and gated and "some" in kernels:
        found += some_rows_blocks(max(64, 1 << (m - 1).bit_length()))
    chosen = blocks_for(m, outputs, inputs, gated, shared_memory(torch.device("cuda")), copies=True)
    found += [chosen] if chosen is not None and chosen not in found else []
    return [b for b in found if outputs % b.outputs == 0 and inputs % (b.columns * b.split) == 0]


def all_blocks(args: argparse.Namespace) -> list[tuple[int, bool, Blocks]]:
    """Without repetition, by number of rows."""
    found = [(m, SHAPES[name][2], blocks) for m in args.rows for name in args.shapes
             for blocks in candidates(m, *SHAPES[name], args.kernels)]
    return list(dict.fromkeys(found))


@cache
def arrivals() -> torch.Tensor:
    return torch.zeros(1 << 16, dtype=torch.int32, device="cuda")


def compile_one(task: tuple[int, bool, Blocks]) -> str | None:
    m, gated, blocks = task
    x = torch.zeros(m, blocks.columns * 4 * blocks.split, dtype=torch.bfloat16, device="cuda")
    w = torch.zeros(blocks.outputs * 32 * (1 + gated), x.shape[1], dtype=torch.bfloat16, device="cuda")
    out = torch.zeros(m, blocks.outputs * 32, dtype=torch.bfloat16, device="cuda")
    try:
        launch(x, w, out, blocks, gated)
        torch.cuda.synchronize()
    except Exception as e:  # too large for a multiprocessor: no candidate
        return str(e)[:100]
    return None


def launch(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, blocks: Blocks, gated: bool) -> None:
    if isinstance(blocks, SomeRows):
        launch_some_rows(x, w, out, blocks, True)
    elif isinstance(blocks, OneRow):
        launch_one_row(x, w, out, blocks, True, gated=gated)
    else:
        launch_few_rows(x, w, out, blocks, True, arrivals(), gated=gated)


def graph_time(run: Callable[[], None], replays: int = 4) -> float:
    """Milliseconds of one replay."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def torch_product(x: torch.Tensor, w: torch.Tensor, gated: bool) -> torch.Tensor:
    y = torch.nn.functional.linear(x, w)
    return gate(y, "silu") if gated else y


def over(ws: list[torch.Tensor], product: Callable[..., object]) -> None:
    for w in ws:
        product(w=w)


def measure(name: str, rows: list[int], kernels: list[str]) -> dict:
    n, k, gated = SHAPES[name]
    gigabytes = n * (1 + gated) * k * 2 / 1e9
    ws = [torch.randn(n * (1 + gated), k, device="cuda", dtype=torch.bfloat16) * 0.02
          for _ in range(max(2, min(20, int(0.5 / gigabytes))))]
    result = {}
    for m in rows:
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
        want = torch_product(x, ws[0], gated).float()
        base = graph_time(partial(over, ws, partial(torch_product, x, gated=gated))) / len(ws) * 1e3
        found = []
        default = blocks_for(m, n, k, gated, shared_memory(x.device), copies=True)
        for blocks in candidates(m, n, k, gated, kernels):
            try:
                out.fill_(float("nan"))
                launch(x, ws[0], out, blocks, gated)
                error = float((out.float() - want).norm() / want.norm())
                if not error < 1e-2:
                    print("WRONG", name, m, blocks, error)
                    continue
                product = partial(launch, x, out=out, blocks=blocks, gated=gated)
                found.append((graph_time(partial(over, ws, product)) / len(ws) * 1e3, blocks))
            except Exception as e:
                if "shared memory" not in str(e) and "out of resource" not in str(e):
                    print("FAILED", name, m, blocks, str(e)[:200])
        found.sort(key=lambda f: f[0])
        result[m] = {"torch_us": base, "best": [(us, type(b).__name__, vars(b)) for us, b in found[:6]],
                     "default_us": next((us for us, b in found if b == default), None)}
        print(f"{name:14} m {m:3}: torch {base:7.1f} us {gigabytes / base * 1e6:5.0f} GB/s | " + " | ".join(
            f"{us:6.1f} {gigabytes / us * 1e6:5.0f} {named(b)}" for us, b in found[:4]), flush=True)
    return result


def named(b: Blocks) -> str:
    copied = "Copied" if b.copies else ""
    return f"{copied}{type(b).__name__}({b.outputs},{b.columns},{b.stages},{b.warps},{b.split},{b.ahead})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64, 128, 256])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES))
    parser.add_argument("--kernels", nargs="+", default=["one", "few", "copies", "some"])
    parser.add_argument("--json")
    args = parser.parse_args()
    with ProcessPoolExecutor(min(os.cpu_count() or 1, 14), get_context("spawn")) as pool:
        failures = [f for f in pool.map(compile_one, all_blocks(args)) if f]
    print(len(failures), "candidates do not run:", set(failures))
    results = {name: measure(name, args.rows, args.kernels) for name in args.shapes}
    if args.json:
        with open(args.json, "w") as out:
            json.dump(results, out, indent=1)


if __name__ == "__main__":
    main()
