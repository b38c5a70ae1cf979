"""Fits the engine's shares of a device's rates (stretto/plan/hardware.json) to measured steps:

    python -m benchmarks.plan_fit benchmarks/results/step_scan_h200.json --table benchmarks/results/table_h200.json

The first is written by `python -m benchmarks.step_gpu --scan`, the table by `python -m benchmarks.table_gpu`.
A random search that gets narrower; the sum of squared logarithms of predicted over measured is made least. Prints the
entry for the file and the worst points.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from stretto.host.cost import StepWork
from stretto.plan.hardware import Engine, engine, find_hardware
from stretto.plan.shapes import find_shape
from stretto.plan.steps import Steps

Point = tuple[str, StepWork, float]  # shape, step, seconds
SHAPES = {"llama-8b": "llama-3.1-8b", "8B": "llama-3.1-8b", "0.6B": "qwen3-0.6b"}
LEAST = {"read": 0.5, "multiply": 0.5, "blend": 1.2, "attention_read": 0.4, "attention_multiply": 0.2, "passes": 1.0}
MOST = {"read": 1.0, "multiply": 1.0, "blend": 12.0, "attention_read": 1.0, "attention_multiply": 1.0, "passes": 60.0}
DECODED = 16 + 1024 + 64  # mean context of the table's decode steps of "1k"
HOST_BOUND = 1.1  # of a bare replay
CHUNK_STEPS = {
    "8B step, 512 tokens on 8192": StepWork(1, 512, 8704, 512 * 8192 + 512 * 513 // 2),
    "8B step, mixed: chunk of 2048, 64 rows": StepWork(65, 2112, 64 * 1024 + 2048, 2048 * 2049 // 2)}


def scan_points(file: dict) -> list[Point]:
    found = []
    for step in file["steps"]:
        rows, prompt = step["rows"], step["prompt_tokens"]
        tokens = rows * step["tokens_a_row"] + prompt
        work = StepWork(rows * step["tokens_a_row"] + bool(prompt), tokens, rows * step["context"] + prompt,
                        prompt * (prompt + 1) // 2)  # every token of a verify window is a row of the head
        found.append((SHAPES[file["shape"]], work, step["step_us"] * 1e-6))
    return found


def table_points(file: dict) -> list[Point]:
    """Decode steps, prompts, and steps with a chunk. A decode step that took much longer than its bare replay waited
    for the host; then the replay counts."""
    found = []
    for figure in file["figures"]:
        shape = SHAPES.get(figure["what"].split()[0].strip(","))
        decode = re.search(r"decode, (\d+) rows?( at 8k|, prompt 128)?$", figure["what"])
        prompt = re.search(r"prompt of (\d+)$", figure["what"])
        if shape and decode:
            rows, small = int(decode[1]), shape.startswith("qwen")
            context = 160 if small else 8192 + 64 if decode[2] else DECODED
            bare = re.search(r"bare replay ([\d.]+) ms", figure["note"])
            device = float(bare[1]) if bare else figure["measured"]
            seconds = (figure["measured"] if figure["measured"] < HOST_BOUND * device else device) / 1e3
            found.append((shape, StepWork(rows, rows, rows * context), seconds))
        elif shape and prompt and (n := int(prompt[1])) <= 2048:
            found.append((shape, StepWork(1, n, n, n * (n + 1) // 2), n / figure["measured"]))
        elif figure["what"] in CHUNK_STEPS:
            found.append((shape, CHUNK_STEPS[figure["what"]], figure["measured"] / 1e3))
    return found


def errors(candidate: Engine, points: list[Point], name: str) -> np.ndarray:
    hardware = find_hardware(name)
    made = {shape: Steps(find_shape(shape), hardware, candidate) for shape, _, _ in points}
    return np.asarray([math.log(made[shape].seconds(work) / seconds) for shape, work, seconds in points])


def fit(points: list[Point], name: str, rounds: int) -> Engine:
    random, best, spread = np.random.default_rng(0), engine(), 0.3
    lowest = float((errors(best, points, name) ** 2).sum())
    fields = list(asdict(best))
    for step in range(rounds):
        moved = {field: getattr(best, field) * float(np.exp(random.normal(0, spread)))
                 for field in fields if random.random() < 0.35}
        candidate = replace(best, **{field: min(max(value, LEAST.get(field, 0.0)), MOST.get(field, 1.0))
                                     for field, value in moved.items()})
        total = float((errors(candidate, points, name) ** 2).sum())
        if total < lowest:
            best, lowest = candidate, total
        if step % (rounds // 5 + 1) == rounds // 5:
            spread /= 2
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("scan", type=Path)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--hw", default="h200")
    parser.add_argument("--rounds", type=int, default=4000)
    args = parser.parse_args()
    points = scan_points(json.loads(args.scan.read_text()))
    if args.table:
        points += 3 * table_points(json.loads(args.table.read_text()))
    found = fit(points, args.hw, args.rounds)
    print(json.dumps({key: float(f"{value:.4g}") for key, value in asdict(found).items()}))
    off = errors(found, points, args.hw)
    print(f"{len(points)} points, root mean square {100 * float(np.sqrt((off**2).mean())):.1f} %")
    for index in np.argsort(-np.abs(off))[:8]:
        shape, work, seconds = points[index]
        print(f"  {math.exp(off[index]):.2f} x {1e3 * seconds:.2f} ms  {shape} {work}")


if __name__ == "__main__":
    main()
