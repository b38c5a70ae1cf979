"""Times a layer of experts on a GPU, beside what its memory traffic and arithmetic take at best.

    python benchmarks/experts_gpu.py --json out.json

Weights are random; which experts tokens ask for is, too. A figure is the median of launches of a CUDA graph that goes
through several layers' weights, so that none is found in the cache.
"""

from __future__ import annotations

import argparse
import json
import statistics

import torch

from stretto.ops.gates import Gate
from stretto.ops.grouped import choose, combine, group_by_expert, grouped_linear

SHAPES = {  # experts, chosen, hidden, inner
    "qwen3-30b-a3b": (128, 8, 2048, 768), "gpt-oss-20b": (32, 4, 2880, 2880), "mixtral-8x7b": (8, 2, 4096, 14336)}
TOKENS = (1, 8, 32, 256, 2048)
BANDWIDTH, FLOPS = 4.8e12, 790e12  # of an H200: bytes and bfloat16 operations a second


def layer(shape: tuple[int, int, int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    n, _, hidden, inner = shape
    return (torch.randn(n, 2 * inner, hidden, device="cuda", dtype=torch.bfloat16).mul_(0.02),
            torch.randn(n, hidden, inner, device="cuda", dtype=torch.bfloat16).mul_(0.02))


def run(x: torch.Tensor, logits: torch.Tensor, k: int, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """What a layer does behind its router."""
    weights, experts = choose(logits, k, of_all=False)
    groups = group_by_expert(experts, len(down))
    n = experts.numel()
    inner = x.new_empty(n, down.shape[2])
    grouped_linear(x, gate_up, None, groups.bounds, groups.slots, groups.places, inner, k, Gate("silu"))
    out = x.new_empty(n, x.shape[1])
    grouped_linear(inner, down, None, groups.bounds, groups.places, groups.slots, out)
    return combine(out.view(*experts.shape, -1), weights, residual=x)


def seconds(shape: tuple[int, int, int, int], tokens: int, layers: list) -> tuple[float, int]:
    """Of one layer, and how many experts are read."""
    n, chosen, hidden, _ = shape
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    logits = torch.rand(tokens, n, device="cuda")
    experts = logits.topk(chosen, -1).indices
    for _ in range(2):
        run(x, logits, chosen, *layers[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weights in layers:
            run(x, logits, chosen, *weights)
    times = []
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / len(layers))
    return statistics.median(times), len(experts.unique())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json")
    args = parser.parse_args()
    rows = []
    for name, shape in SHAPES.items():
        each = 3 * shape[2] * shape[3]  # weights of an expert
        layers = [layer(shape) for _ in range(max(2, int(1e9 // (each * 2 * shape[0])) + 1))]
        for tokens in TOKENS:
            took, used = seconds(shape, tokens, layers)
            best = max(used * each * 2 / BANDWIDTH, 2 * tokens * shape[1] * each / FLOPS)
            rows.append({"model": name, "tokens": tokens, "experts": used, "us": took * 1e6, "share": best / took})
            print(f"{name:16} {tokens:5} tokens {used:4} experts {took * 1e6:9.1f} us  {best / took:6.1%} of the limit")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
