"""Sums over ranks on several GPUs: our one launch over symmetric memory, torch's, and NCCL's, in a captured graph.

    torchrun --nproc-per-node 2 benchmarks/ranks_exchange.py [--json FILE]

First each way's result is compared with the ordered sum, also when replayed; then microseconds a sum, of the best of
several replays of a graph of 64 of them.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from stretto.device.symmetric import SymmetricMemory
from stretto.ops.exchange import side_by_side, total

HIDDEN, VOCAB, CHAIN = 4096, 64128, 64
ROWS = (1, 8, 32, 128, 512, 2048)


def replay_us(run: Callable[[], object]) -> float:
    """Of one of CHAIN runs, captured together."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(CHAIN):
            run()
    best = float("inf")
    for _ in range(10):
        dist.barrier()
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        graph.replay()
        ended.record()
        torch.cuda.synchronize()
        best = min(best, began.elapsed_time(ended) * 1e3 / CHAIN)
    return best


def gathered(x: torch.Tensor) -> list[torch.Tensor]:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    return parts


def check(memory: SymmetricMemory, device: torch.device) -> dict[str, bool]:
    """Whether sums and joins are those of the reference, for sizes that do and do not fill a program's tile."""
    fine = {}
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        for rows, columns in ((1, 4096), (3, 64), (5, 100), (128, 4096), (1, 64128), (8, 64000)):
            x, base = (torch.randn(rows, columns, device=device).to(dtype) for _ in range(2))
            dist.broadcast(base, 0)
            if not memory.takes(x):
                continue
            parts, kept = gathered(x), base.clone()
            name = f"{str(dtype)[6:]} {rows}x{columns}"
            same = [torch.equal(memory.total(x), total(parts)), torch.equal(memory.side_by_side(x),
                                                                            side_by_side(parts))]
            same.append(torch.equal(memory.total(x, base), total(parts, kept)))
            fine[name] = all(same)
    return fine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    made: dict = {"device": torch.cuda.get_device_name(device), "torch": torch.__version__, "ranks": ranks}
    made["us"] = {rows: others_us(rows, ranks, device) for rows in ROWS}
    print(rank, made["us"], flush=True)
    memory = SymmetricMemory(rank, ranks, device)
    made["equal"] = check(memory, device)
    print(rank, made["equal"], flush=True)
    for rows in ROWS:
        made["us"][rows] |= own_us(memory, rows, device)
        print(rank, rows, made["us"][rows], flush=True)
    if rank == 0 and options.json:
        options.json.write_text(json.dumps(made, indent=1))
    os._exit(0)


def others_us(rows: int, ranks: int, device: torch.device) -> dict[str, float | None]:
    x, logits = torch.randn(rows, HIDDEN, device=device).to(torch.bfloat16), torch.randn(rows, VOCAB, device=device)
    us = {"NCCL": replay_us(lambda: dist.all_reduce(x)), "torch one-shot": torch_us(x)}
    if rows <= 128:
        into = logits.new_empty(ranks * rows, VOCAB)
        us["NCCL gather of logits"] = replay_us(lambda: dist.all_gather_into_tensor(into, logits))
    return us


def own_us(memory: SymmetricMemory, rows: int, device: torch.device) -> dict[str, float | None]:
    x, logits = torch.randn(rows, HIDDEN, device=device).to(torch.bfloat16), torch.randn(rows, VOCAB, device=device)
    residual, us = torch.zeros_like(x), {}
    if memory.takes(x):
        us["own"] = replay_us(lambda: memory.total(x, residual))
    if memory.takes(logits):
        us["own join of logits"] = replay_us(lambda: memory.side_by_side(logits))
    return us


def torch_us(x: torch.Tensor) -> float | None:
    """torch's one-shot sum over its own symmetric memory; None where it does not take the size."""
    import torch.distributed._symmetric_memory as symmetric

    try:
        mine = symmetric.empty(x.shape, dtype=x.dtype, device=x.device)
        symmetric.rendezvous(mine, dist.group.WORLD)
        name = dist.group.WORLD.group_name  # type: ignore[union-attr]
        return replay_us(lambda: torch.ops.symm_mem.one_shot_all_reduce(mine, "sum", name))
    except RuntimeError as e:
        print("torch's one-shot:", e, flush=True)
        return None


if __name__ == "__main__":
    main()
