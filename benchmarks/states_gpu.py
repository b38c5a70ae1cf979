"""What a layer with states costs on a GPU: Qwen3-Next's sizes, rows of each situation, against the memory traffic that
the states alone need.

    python -m benchmarks.states_gpu --json states.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch

from stretto.ops.recurrent import causal_conv, gated_delta_rule
from stretto.ops.state_step import PartMemory, StateStep
from stretto.ragged import RaggedStep

K_HEADS, V_HEADS, DIM, WIDTH, PAGE = 16, 32, 128, 4, 16
CHANNELS = (2 * K_HEADS + V_HEADS) * DIM
STATE_BYTES = 4 * V_HEADS * DIM * DIM
BANDWIDTH = 4.8e12  # bytes a second of an H200
SITUATIONS = [(1, 1, 1), (8, 1, 1), (32, 1, 1), (128, 1, 1), (32, 4, 4), (128, 4, 4), (1, 512, 1), (1, 2048, 1),
              (4, 2048, 1)]  # (rows, tokens of each, positions where it may end)


def step_of(rows: int, tokens: int, n_out: int) -> RaggedStep:
    base = torch.full((rows,), 1600, dtype=torch.int32, device="cuda")
    q = torch.full_like(base, tokens)
    cu_q = torch.arange(rows + 1, dtype=torch.int32, device="cuda") * tokens
    of_token = torch.arange(rows, device="cuda").repeat_interleave(tokens)
    positions = 1600 + torch.arange(tokens, device="cuda").repeat(rows)
    nothing = torch.zeros(0, dtype=torch.int64, device="cuda")
    at_border = (positions + 1) % 256 == 0  # as with the usual --state-interval
    return RaggedStep(slots=1 + torch.arange(rows, device="cuda"), q_len=q, cu_q=cu_q, base=base, kv_len=base + q,
                      n_out=torch.full_like(base, n_out), cu_out=cu_q, ids=positions, positions=positions,
                      rows=of_token, cells=(at_border * PAGE,), out_tokens=nothing, out_rows=nothing, page_tables=(),
                      page_size=PAGE)


def seconds(run: Callable[[], object], repeats: int = 30) -> float:
    """The median time of a replay of what `run` launches."""
    for _ in range(3):
        run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return sorted(times)[len(times) // 2]


def measure(rows: int, tokens: int, n_out: int) -> dict[str, float]:
    step, cells, n = step_of(rows, tokens, n_out), n_out + 1, rows * tokens
    where = StateStep.of(step, 0, cells)
    x = torch.randn(n, CHANNELS, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(CHANNELS, WIDTH, device="cuda", dtype=torch.bfloat16)
    conv = PartMemory(*(torch.zeros(*shape, CHANNELS, WIDTH - 1, device="cuda") for shape in ((rows + 1, cells), (2,))))
    delta = PartMemory(*(torch.zeros(*shape, V_HEADS, DIM, DIM, device="cuda") for shape in ((rows + 1, cells), (2,))))
    q, k = (torch.nn.functional.normalize(torch.randn(n, K_HEADS, DIM, device="cuda"), dim=-1) for _ in "qk")
    v = torch.randn(n, V_HEADS, DIM, device="cuda")
    decay, beta = -torch.rand(n, V_HEADS, device="cuda"), torch.rand(n, V_HEADS, device="cuda")
    took = seconds(lambda: gated_delta_rule(q, k, v, decay, beta, delta, where))
    least = rows * (1 + n_out) * STATE_BYTES / BANDWIDTH
    return {"rows": rows, "tokens": tokens, "n_out": n_out, "delta_us": 1e6 * took,
            "conv_us": 1e6 * seconds(lambda: causal_conv(x, weight, conv, where)), "least_us": 1e6 * least,
            "share": least / took}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = []
    for situation in SITUATIONS:
        found.append(measure(*situation))
        print({name: round(value, 3) for name, value in found[-1].items()}, flush=True)
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
